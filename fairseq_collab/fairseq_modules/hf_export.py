"""Writes fairseq's checkpoints of encoders of transformers as folders of transformers, or of ``pretrained``.

A model with a classification head becomes one for sequence classification, others become masked language models. With
ordinary heads the folder is one that transformers loads; with shared keys it is one that ``load_collaborative`` loads.
"""

import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn

from fairseq_collab._transformers import import_transformers, load_tokenizer, quiet
from fairseq_collab.adapters.hf_encoder import HEADS_PREFIX
from fairseq_collab.checkpoint import model_options
from fairseq_collab.errors import CollabError
from fairseq_collab.fairseq_modules import hf_folder
from fairseq_collab.fairseq_modules.hf_convert import is_swapped, load_model
from fairseq_collab.fairseq_modules.hf_start import attention_configs
from fairseq_collab.fairseq_modules.hf_swap import install
from fairseq_collab.pretrained import save_collaborative


def export(state: dict[str, Any], path: str, output: Path, tokenizer: Optional[str] = None) -> str:
    """Writes a checkpoint as a folder, whole or not at all.

    Args:
        state: the checkpoint. path: what to call it in messages.
        output: a folder that does not exist, or is empty.
        tokenizer: folder with the tokenizer to put beside; when None, the one that the training started from if it is
            still there, or else none.

    Returns:
        a sentence that says what was written and how to load it.

    Raises:
        CollabError: there are several heads, a head that transformers cannot have, or no tokenizer in ``tokenizer``.
    """
    options = model_options(state, path)
    model = to_transformers(state, options)
    words, without = _tokenizer(options, tokenizer)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    swapped = is_swapped(options)
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with quiet():
            save_collaborative(model, temporary) if swapped else model.save_pretrained(temporary)
            if words is not None:
                words.save_pretrained(temporary)
        os.replace(temporary, output)
    except OSError as error:
        raise CollabError(f"{output} could not be written ({error}); nothing was changed") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    loader = "fairseq_collab.load_collaborative" if swapped else f"transformers.{type(model).__name__}.from_pretrained"
    return f"{type(model).__name__}{without}; load it with {loader}({str(output)!r})"


def _tokenizer(options: Namespace, named: Optional[str]) -> tuple[Any, str]:
    """The tokenizer of ``--tokenizer``, or else of the folder that the training started from; or None, and a remark.

    Raises:
        CollabError: ``--tokenizer`` names a folder without one.
    """
    if named is not None:
        return load_tokenizer(named, "--tokenizer"), ""
    source = getattr(options, "hf_model", None)
    if source is not None and Path(source).is_dir():
        try:
            return load_tokenizer(source), ""
        except CollabError:
            reason = f"which {source} has no longer"
    else:
        reason = "whose folder is gone"
    return None, f" without a tokenizer, {reason}: to have one, export again to another folder with --tokenizer DIR"


def to_transformers(state: dict[str, Any], options: Namespace) -> nn.Module:
    """The model of transformers that a checkpoint holds, its head included, in evaluation mode.

    Raises:
        CollabError: there are several heads, or one that transformers cannot have.
    """
    model = load_model(state, options)
    weights = state["model"]
    names = {key.removeprefix(HEADS_PREFIX).split(".")[0] for key in weights if key.startswith(HEADS_PREFIX)}
    if len(names) > 1:
        raise CollabError(
            f"the checkpoint has the heads {', '.join(sorted(names))}, and a model of transformers has one"
        )
    if not names:
        return model
    (name,) = names
    head = {
        part: weights[f"{HEADS_PREFIX}{name}.{part}"].float()
        for part in ("dense.weight", "dense.bias", "out_proj.weight", "out_proj.bias")
    }
    config, classes = model.config, len(head["out_proj.bias"])
    if head["dense.weight"].size(0) != config.hidden_size:
        raise CollabError(
            f"the head has {head['dense.weight'].size(0)} inner dims, and transformers knows only heads of the model's "
            f"{config.hidden_size}"
        )
    if config.num_labels != classes:
        config.num_labels = classes
    with quiet():
        found = import_transformers().AutoModelForSequenceClassification.from_config(config).float()
    install(found, attention_configs(options))
    found.base_model.load_state_dict(model.base_model.state_dict(), strict=False)
    family = hf_folder.FAMILIES[config.model_type]
    with torch.no_grad():
        for ours, theirs in (("dense", family.dense), ("out_proj", "classifier")):
            for part in ("weight", "bias"):
                found.get_parameter(f"{theirs}.{part}").copy_(head[f"{ours}.{part}"])
    return found.eval()
