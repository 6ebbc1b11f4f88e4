"""One run from its first command to its line of results. Every step is a command that a user could give.

Which runs there are is `grids`; how many at a time, and how they are stopped, is `pool`.
"""

from __future__ import annotations

import json
import math
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from experiment_grids.cells import (
    CONCATENATED,
    CONVERTED,
    PLUGIN,
    ROOT,
    TRAINED,
    TUNED,
    Run,
    Setup,
    common_flags,
    model_flags,
    schedule_flags,
)
from fairseq_collab.errors import CollabError
from fairseq_collab.files import read_json, write_json

MODEL, ROW, STEPS = "model.pt", "row.json", "steps.json"
Row = dict[str, Any]
# runs a command with its output appended to a log: command, log -> seconds
Runner = Callable[[Sequence[Any], Path], float]


@dataclass(frozen=True)
class Workplace:
    """Where the runs of one results folder lie, and what they have in common.

    Args:
        out: the folder. data: binarised corpus. setup, device: of all runs. threads: of each process.
    """

    out: Path
    data: Path
    setup: Setup
    device: str
    threads: int

    def folder(self, run: Run) -> Path:
        """Of one run."""
        return self.out / "runs" / run.name(self.setup)

    def finished(self, run: Run) -> Row | None:
        """The results of a run that is finished."""
        return read_json(self.folder(run) / ROW)


def perform(run: Run, place: Workplace, execute: Runner) -> Row:
    """Does what is still to be done of a run, and returns its results.

    Raises:
        CollabError: a step failed, or its log lacks what should be there.
    """
    folder = place.folder(run)
    row = place.finished(run)
    if row is None:
        write_json(folder / "configuration.json", run.configuration(place.setup))
        steps = _Steps(folder, execute)
        (_convert if run.kind == CONVERTED else _train)(run, place, folder, steps)
        command = [sys.executable, ROOT / "scripts/evaluate_bleu.py", place.data, "--path", folder / MODEL]
        command += ["--beam", 5, "--out", folder / "decoded", "--json", folder / "scores.json"]
        steps.once("decode", [*command, *(["--cpu"] if place.device == "cpu" else [])])
        row = _row(run, place, folder, steps.done)
        write_json(folder / ROW, row)
    return row


def status(folder: Path) -> str:
    """What is being done in a run's folder now, by its newest log: the step, and the updates of a training."""
    logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime_ns)
    if not logs:
        return "starting"
    with logs[-1].open("rb") as stream:
        stream.seek(max(0, logs[-1].stat().st_size - 4000))
        updates = re.findall(rb'"(?:train_|valid_)?num_updates": "(\d+)"', stream.read())
    return logs[-1].stem + (f" {int(updates[-1]):,}" if updates else "")


class _Steps:
    def __init__(self, folder: Path, execute: Runner) -> None:
        self.folder, self.execute = folder, execute
        self.done: dict[str, dict[str, Any]] = read_json(folder / STEPS) or {}

    def once(self, name: str, command: Sequence[Any], finish: Callable[[], None] | None = None) -> None:
        """Runs a step unless it was finished before; ``finish`` is part of it."""
        if name in self.done:
            return
        words = [str(part) for part in command]
        seconds = self.execute(words, self.folder / f"{name}.log")
        started = time.monotonic()
        if finish:
            finish()
        self.done[name] = {"seconds": round(seconds + time.monotonic() - started, 2), "command": shlex.join(words)}
        write_json(self.folder / STEPS, self.done)


def _train(run: Run, place: Workplace, folder: Path, steps: _Steps) -> None:
    setup = place.setup
    command: list[Any] = [sys.executable, "-m", "fairseq_cli.train", place.data, *common_flags(setup, place.device)]
    if run.kind == TUNED:
        source = place.folder(run.source) / MODEL
        command += ["--finetune-from-model", source]
        command += ["--arch", "transformer"]
        if run.source.kind == CONVERTED:
            command[-1:] = ["transformer_collab", "--collab-config", source]
        first = run.source if run.source.kind == TRAINED else run.source.source
        command += schedule_flags(run, setup, epoch_updates(place.folder(first) / "train.log"))
    else:
        command += [*model_flags(run, setup), *schedule_flags(run, setup)]
    checkpoints = folder / "checkpoints"
    kept = checkpoints / ("checkpoint_last.pt" if run.kind == TUNED else "checkpoint_best.pt")
    steps.once("train", [*command, "--save-dir", checkpoints], lambda: _keep(kept, folder / MODEL))


def _keep(checkpoint: Path, model: Path) -> None:
    """Keeps a checkpoint without what only resuming needs, and removes its folder."""
    from fairseq_collab.checkpoint import drop_training_state, load_checkpoint, save_checkpoint

    if checkpoint.exists():
        state = load_checkpoint(checkpoint)
        drop_training_state(state)
        save_checkpoint(state, model)
    elif not model.exists():
        raise CollabError(
            f"the training left no {checkpoint}: no loss was ever defined; see train.log in {model.parent}"
        )
    for path in checkpoint.parent.glob("*.pt"):
        path.unlink()
    if checkpoint.parent.is_dir():
        checkpoint.parent.rmdir()


def _convert(run: Run, place: Workplace, folder: Path, steps: _Steps) -> None:
    command = [sys.executable, "-m", "fairseq_collab.cli.convert", "--path", place.folder(run.source) / MODEL]
    command += ["--output", folder / MODEL, "--key-dim", run.key_dim, *run.flags, "--report", folder / "report"]
    command += ["--force", "--device", place.device]
    if run.text:
        command += ["--calibrate", source_side(place.data, place.out / "text")]
    steps.once("convert", command)
    command = [sys.executable, "-m", "fairseq_cli.validate", place.data, "--user-dir", PLUGIN]
    command += ["--task", "translation", "--path", folder / MODEL, "--valid-subset", "valid"]
    command += ["--max-tokens", place.setup.max_tokens, "--num-workers", 0, "--log-format", "json"]
    steps.once("validate", [*command, *(["--cpu"] if place.device == "cpu" else [])])


def source_side(data: Path, folder: Path) -> Path:
    """A folder with links to the dictionaries and the source side of the training text alone.

    Raises:
        CollabError: there is no binarised training text.
    """
    index = next(data.glob("train.*-*.*.idx"), None)
    if index is None:
        raise CollabError(f"{data} has no binarised train split; give the bin folder of python -m data_prep")
    folder.mkdir(parents=True, exist_ok=True)
    pair = index.name.split(".")[1]
    for file in [*data.glob("dict.*.txt"), *data.glob(f"train.{pair}.{pair.split('-')[0]}.*")]:
        try:
            (folder / file.name).symlink_to(file.resolve())
        except FileExistsError:
            continue
    return folder


def read_figures(log: Path, part: str) -> list[dict[str, float]]:
    """The figures that fairseq logged as JSON for ``valid`` or ``train``, in their order."""
    found = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            figures = json.loads(line.split(f"| {part} | ", 1)[1])
            found.append({name: float(value) for name, value in figures.items()})
        except (IndexError, ValueError, AttributeError):
            continue
    return found


def epoch_updates(log: Path) -> int:
    """Updates of the first epoch of a training.

    Raises:
        CollabError: the log does not tell.
    """
    for figures in read_figures(log, "train"):
        if figures.get("epoch") == 1 and "train_num_updates" in figures:
            return int(figures["train_num_updates"])
    raise CollabError(f"{log} does not tell how many updates an epoch has; remove its folder and start again")


def bits_of(run: Run, folder: Path) -> dict[str, float | None]:
    """Bits a token on valid: of the model that is kept, and of the best and the last check of a training.

    Raises:
        CollabError: the log has no loss on valid.
    """
    log = folder / ("validate.log" if run.kind == CONVERTED else "train.log")
    found = read_figures(log, "valid")
    if not found:
        raise CollabError(f"{log} has no loss on valid; remove {folder} and start again")
    last = found[-1]["valid_nll_loss"]
    if run.kind == CONVERTED:
        return {"bits": _finite(last)}
    # of equal ones the last is kept, as in fairseq
    best = min(reversed(found), key=lambda figures: figures["valid_loss"])["valid_nll_loss"]
    bits = last if run.kind == TUNED else best
    return {"bits": _finite(bits), "bits_best": _finite(best), "bits_last": _finite(last)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _updates(run: Run, folder: Path) -> int:
    return 0 if run.kind == CONVERTED else int(read_figures(folder / "train.log", "valid")[-1]["valid_num_updates"])


def _row(run: Run, place: Workplace, folder: Path, steps: dict[str, dict[str, Any]]) -> Row:
    from quickstart_report import count_model

    system = read_json(folder / "scores.json")["systems"][0]
    row: Row = {
        "run": folder.name,
        "model": run.kind,
        "seed": run.seed,
        "layout": run.layout,
        "key_dim": run.key_dim,
        "mix_dim": run.mix_dim,
        "init": run.init,
        "attentions": None if run.layout == CONCATENATED else run.attentions,
        "flags": list(run.flags),
        **bits_of(run, folder),
        "bleu": system["bleu"]["score"],
        "bleu_signature": system["bleu"]["signature"],
        "chrf": system["chrf"]["score"],
        "chrf_signature": system["chrf"]["signature"],
        "langs": "-".join(system["langs"]),
        "sentences": system["sentences"],
        "parameters": system["parameters"][0],
        "key_query_parameters": count_model(folder / MODEL)["key_query_parameters"],
        "updates": _updates(run, folder),
        "seconds": round(sum(step["seconds"] for step in steps.values()), 1),
        "steps": {name: step["seconds"] for name, step in steps.items()},
        "device": place.device,
        "threads": place.threads,
        "versions": versions(),
    }
    if run.kind == CONVERTED:
        report = read_json(folder / "report" / "report.json")
        errors = ("name", "weight_error", "score_error", "output_error")
        row["conversion"] = report["signature"]
        row["errors"] = [{key: one[key] for key in errors if one.get(key) is not None} for one in report["rows"]]
    return row


def versions() -> dict[str, str]:
    """Of what the results may depend on."""
    import fairseq_collab

    found = {"fairseq_collab": fairseq_collab.__version__, "python": platform.python_version()}
    for name, distributions in {
        "torch": ["torch"],
        "fairseq": ["fairseq", "ve-fairseq"],
        "sacrebleu": ["sacrebleu"],
    }.items():
        for distribution in distributions:
            try:
                found[name] = version(distribution)
            except PackageNotFoundError:
                continue
    return found
