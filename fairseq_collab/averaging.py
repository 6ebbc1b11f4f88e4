"""The mean of the weights of a training's last checkpoints, in one checkpoint that keeps their options.

fairseq's own script for this is not part of its distributions. Reading and writing files is ``checkpoint``'s.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fairseq_collab.checkpoint import drop_training_state, load_checkpoint, save_checkpoint
from fairseq_collab.errors import CollabError

_OF_AN_EPOCH = re.compile(r"checkpoint(\d+)\.pt")
_OF_UPDATES = re.compile(r"checkpoint_\d+_(\d+)\.pt")


def last_checkpoints(folder: str | os.PathLike, count: int) -> list[Path]:
    """The last ``count`` checkpoints of epochs in a save-dir, oldest first; of updates where there are none.

    Raises:
        CollabError: no such folder, fewer checkpoints, or a count below 1.
    """
    folder = Path(folder)
    if count < 1:
        raise CollabError(f"--average {count} is out of range: give 1 or more")
    if not folder.is_dir():
        raise CollabError(f"there is no folder {folder} whose checkpoints could be averaged: give a save-dir")
    kinds = {"epochs": _OF_AN_EPOCH, "updates": _OF_UPDATES}
    for kind, pattern in kinds.items():
        numbered = [(int(found[1]), path) for path in folder.iterdir() if (found := pattern.fullmatch(path.name))]
        if len(numbered) >= count:
            return [path for _, path in sorted(numbered)[-count:]]
        if numbered:
            raise CollabError(
                f"{folder} has {len(numbered)} checkpoint(s) of {kind} and {count} are to be averaged: average fewer, "
                f"or train with --keep-last-epochs {count} or more"
            )
    raise CollabError(f"{folder} has no checkpoints of epochs or updates: train without --no-epoch-checkpoints")


def average_checkpoints(paths: Sequence[str | os.PathLike], output: str | os.PathLike) -> Path:
    """Writes the mean of the weights of several checkpoints of one model; all else is as in the last of them.

    Sums are made in float64. Half-precision weights give float32 ones, other floats keep their type, and integers are
    taken from the last checkpoint. Weights that are tied stay so. The optimizer's state is left out.

    Returns:
        ``output``.

    Raises:
        CollabError: no checkpoint is given, or one is missing, damaged or of another model; or ``output`` cannot be
            written.
    """
    if not paths:
        raise CollabError("no checkpoints are given that could be averaged")
    sums: dict[str, torch.Tensor] = {}
    state: dict[str, Any] = {}
    for path in paths:
        state = load_checkpoint(path)
        if sums:
            _require_same_model(sums, state["model"], str(paths[0]), str(path))
        for name, tensor in state["model"].items():
            if not tensor.is_floating_point():
                sums[name] = tensor
            elif name in sums:
                sums[name] += tensor
            else:
                sums[name] = tensor.to(torch.float64, copy=True)
    ties: dict[tuple[int, torch.Size], torch.Tensor] = {}
    for name, tensor in state["model"].items():
        mean = sums.pop(name)
        if tensor.is_floating_point():
            dtype = torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype
            mean = ties.setdefault((tensor.data_ptr(), tensor.shape), (mean / len(paths)).to(dtype))
        state["model"][name] = mean
    drop_training_state(state)
    save_checkpoint(state, output)
    return Path(output)


def average_last(folder: str | os.PathLike, count: int) -> Path:
    """`average_checkpoints` of `last_checkpoints`, written into the same folder as ``average_of_last_{count}.pt``."""
    return average_checkpoints(last_checkpoints(folder, count), Path(folder) / f"average_of_last_{count}.pt")


def _require_same_model(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor], one: str, two: str) -> None:
    if unshared := sorted(first.keys() ^ other.keys()):
        raise CollabError(f"{one} and {two} are not of one model: only one of them has {unshared[0]}")
    for name, tensor in other.items():
        if tensor.shape != first[name].shape:
            shapes = f"{tuple(first[name].shape)} and {tuple(tensor.shape)}"
            raise CollabError(f"{one} and {two} are not of one model: {name} has shape {shapes}")
        if name.endswith("pick") and not torch.equal(tensor, first[name]):
            raise CollabError(f"{one} and {two} are not of one training: their heads pick other dims in {name}")
