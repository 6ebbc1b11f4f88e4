"""Reads fairseq's checkpoints safely, rewrites their options, and writes them so that nothing is ever half there.

What the attentions become is decided elsewhere; here are files and options.
"""

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from fairseq_collab._safe_load import allow_fairseq_checkpoints
from fairseq_collab.checkpoint_files import load_checkpoint_to_cpu
from fairseq_collab.errors import CollabError


def load_checkpoint(path: str | os.PathLike, unsafe: bool = False) -> dict[str, Any]:
    """The content of a checkpoint of any age of fairseq, on the CPU.

    Args:
        path: the file.
        unsafe: also run code that the file holds; only for files from people you trust.

    Raises:
        CollabError: no such file; damaged; not fairseq's; or wanting to run code, with the name of what it wanted.
    """
    if not os.path.isfile(path):
        raise CollabError(f"there is no checkpoint {path}; give an existing file")
    with open(path, "rb") as file:
        magic = file.read(2)
    if magic and magic != b"PK" and magic[:1] != b"\x80" and magic.strip(b"\0"):
        raise CollabError(
            f"{path} is not a checkpoint of torch: it begins with {magic!r}; give a file that fairseq saved"
        )
    allow_fairseq_checkpoints()

    def load(name: str) -> dict:
        # mapped into memory, so that the optimizer's state, two thirds of a file, is never read
        state = torch.load(name, map_location="cpu", weights_only=not unsafe, mmap=magic == b"PK")
        if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
            raise CollabError(f"{name} is not a fairseq checkpoint: it has no model")
        return state

    try:
        state = load_checkpoint_to_cpu(load)(str(path))
    except CollabError as error:
        advice = "set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 and try again"
        raise CollabError(str(error).replace(advice, "give --unsafe-load")) from error
    model_options(state, str(path))
    return state


def model_options(state: dict[str, Any], path: str) -> Namespace:
    """The options of the model, from ``cfg`` or from the ``args`` of older versions, as a copy.

    Raises:
        CollabError: there are none.
    """
    cfg = state.get("cfg")
    options = cfg.get("model") if cfg else state.get("args")
    if options is None:
        raise CollabError(f"{path} is not a fairseq checkpoint: it has neither cfg.model nor args")
    return Namespace(**(options if isinstance(options, dict) else vars(options)))


def task_options(state: dict[str, Any]) -> Namespace:
    """The options of the task, from ``cfg`` or from the ``args`` of older versions, as a copy; empty without any."""
    cfg = state.get("cfg")
    options = (cfg.get("task") if cfg else state.get("args")) or {}
    return Namespace(**(options if isinstance(options, dict) else vars(options)))


def set_model_options(state: dict[str, Any], options: Namespace) -> None:
    """Stores options where :func:`model_options` found them; as a Namespace, which carries what a schema would drop."""
    if state.get("cfg"):
        state["cfg"]["model"] = options
    else:
        state["args"] = options


def use_ema(state: dict[str, Any], path: str) -> None:
    """Puts the moving average of the weights that ``--store-ema`` kept in the place of the weights.

    Raises:
        CollabError: there is none.
    """
    extra = state.get("extra_state")
    average = extra.get("ema") if isinstance(extra, dict) else None
    if not average:
        raise CollabError(f"{path} holds no moving average; it was not trained with --store-ema: leave --ema out")
    # in the averages of tied weights the tie is lost
    ties: dict[int, Any] = {}
    for key, tensor in state["model"].items():
        if key in average:
            state["model"][key] = ties.setdefault(tensor.data_ptr(), average[key].to(tensor.dtype))


def drop_training_state(state: dict[str, Any]) -> None:
    """Removes what belongs to the optimizer of the model as it was, in place."""
    state["last_optimizer_state"] = None
    extra = state.get("extra_state")
    if isinstance(extra, dict):
        for key in [key for key in extra if key.startswith("ema")]:
            del extra[key]


def save_checkpoint(state: dict[str, Any], path: str | os.PathLike) -> None:
    """Writes to a temporary name beside ``path`` and renames, so that ``path`` is whole or as it was before.

    Raises:
        CollabError: it could not be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        raise CollabError(f"{path} could not be written ({str(error).splitlines()[0]}); nothing was changed") from error
    finally:
        temporary.unlink(missing_ok=True)
