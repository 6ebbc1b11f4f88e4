"""The steps of `glue.py`, each finished once and then reused: prepare, fine-tune, convert, evaluate.

In which order, and what becomes of the results, is decided there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glue_models import OPTIMIZER, ROOT, Pretrained, Recipe
from glue_scores import evaluate, read_preparation
from quickstart_steps import PLUGIN, run, run_training

sys.path.insert(0, str(ROOT))

from data_prep import glue as preparation  # noqa: E402
from fairseq_collab.errors import CollabError  # noqa: E402
from fairseq_collab.files import differences, read_json, write_json, write_text  # noqa: E402

MODEL, RESULT, SETTINGS = "model.pt", "result.json", "settings.json"
LOG_INTERVAL = 10


def prepare(task: str, raw: Path, folder: Path, model: Pretrained, max_length: int) -> Path:
    """The binarised data of a task.

    Raises:
        CollabError: see ``data_prep glue``.
    """
    parser = argparse.ArgumentParser()
    preparation.add_arguments(parser)
    option, place = model.vocabulary
    arguments = ["--task", task, "--raw", raw, "--destdir", folder, option, place, "--max-length", max_length]
    preparation.prepare(parser.parse_args([str(argument) for argument in arguments]))
    return folder


def begin(folder: Path, settings: dict[str, Any]) -> None:
    """Make a folder of one step, or go on with it.

    Raises:
        CollabError: it was begun with other settings, or is a folder of something else.
    """
    found = read_json(folder / SETTINGS)
    if found is None:
        if folder.is_dir() and any(folder.iterdir()):
            raise CollabError(f"{folder} is not empty and was not begun by glue.py; choose another --out")
        write_json(folder / SETTINGS, settings)
    elif other := differences(found, settings):
        raise CollabError(f"{folder} was begun with other settings ({other}); remove it, or choose another --out")


def finetune(
    folder: Path, data: Path, start: list[str], recipe: Recipe, seed: int, device: str, extra: Sequence[str], lock: int
) -> Path:
    """Fine-tune one model, or go on with it; the checkpoint of the best epoch, without the optimizer's state.

    Args:
        folder: of this training. data: see `prepare`. start: flags of the model and where its weights come from.
        extra: further flags of ``fairseq-train``; they win.
        lock: file descriptor that the training keeps open.

    Raises:
        CollabError: the folder was begun with other settings, or ``fairseq-train`` failed; its last lines are quoted.
    """
    prepared = read_preparation(data)
    settings = {"start": start, "data": str(data.resolve()), **recipe.settings(), "seed": seed, "extra": list(extra)}
    begin(folder, settings)
    if (folder / MODEL).exists() or (folder / RESULT).exists():
        return folder / MODEL
    examples = prepared["splits"]["train"]["examples"]
    command = [sys.executable, "-m", "fairseq_cli.train", data, "--user-dir", PLUGIN, *prepared["flags"], *start]
    command += [*OPTIMIZER, *recipe.flags(examples), "--seed", seed, "--save-dir", folder, "--no-epoch-checkpoints"]
    command += ["--valid-subset", "valid", "--num-workers", 0, "--log-format", "json", "--log-interval", LOG_INTERVAL]
    command += [*(["--cpu"] if device == "cpu" else []), *extra]
    what = f"{prepared['task']} {folder.name}, seed {seed}"
    run_training(command, what, recipe.updates(examples), folder / "train.log", lock)
    strip(folder)
    return folder / MODEL


def strip(folder: Path) -> None:
    """Keep the best epoch of a finished training as `MODEL`, without what only resuming needs."""
    from fairseq_collab.checkpoint import drop_training_state, load_checkpoint, save_checkpoint

    # no epoch is the best where the score was never defined
    best, last = folder / "checkpoint_best.pt", folder / "checkpoint_last.pt"
    state = load_checkpoint(best if best.exists() else last)
    drop_training_state(state)
    save_checkpoint(state, folder / MODEL)
    for path in (best, last):
        path.unlink(missing_ok=True)


def convert(folder: Path, original: Path, data: Path | None, key_dim: int, extra: Sequence[str], lock: int) -> Path:
    """A fine-tuned checkpoint with `key_dim` shared dims.

    Args:
        data: its training text shows the inputs to fit to; the weights alone decide when None.

    Raises:
        CollabError: the folder was begun with other settings, or the conversion failed; its message was printed.
    """
    calibrate = [] if data is None else ["--calibrate", str(data)]
    begin(folder, {"original": str(original.resolve()), "key_dim": key_dim, "extra": [*calibrate, *extra]})
    output = folder / MODEL
    if not output.exists() and not (folder / RESULT).exists():
        command = [sys.executable, "-m", "fairseq_collab.cli.convert", "--path", original, "--output", output]
        run([*command, "--key-dim", key_dim, *calibrate, *extra], f"converting {original}", lock)
    return output


def evaluate_once(checkpoint: Path, data: Path, device: str, about: dict[str, Any]) -> dict[str, Any]:
    """Scores and prediction files of a checkpoint, beside it; what an earlier call found is reused.

    Args:
        about: further entries of the result.
    """
    folder = checkpoint.parent
    result = read_json(folder / RESULT)
    if result is None:
        scores, files = evaluate(checkpoint, data, device)
        for name, text in files.items():
            write_text(folder / "predictions" / name, text)
        result = {**about, "scores": scores}
        write_json(folder / RESULT, result)
    return result
