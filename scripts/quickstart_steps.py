"""The steps of `quickstart.py`, each in its own process as a user would run it: corpus, training, conversion, scoring.

What is done in which order, and how the time is spent, is decided there.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quickstart_report import figures_of, read_log
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fairseq_collab.errors import CollabError  # noqa: E402
from fairseq_collab.files import read_json  # noqa: E402

PLUGIN = ROOT / "fairseq_collab"
LANGS = ("en", "de")
WIDTH, HEADS, KEY_DIM, MIX_DIM = 128, 8, 32, 16
MODELS = {
    "concatenated": ["--arch", "transformer"],
    "collaborative-dense": ["--arch", "transformer_collab", "--key-dim", KEY_DIM],
    "collaborative-window": [
        *("--arch", "transformer_collab", "--key-dim", KEY_DIM),
        *("--mix-layout", "window", "--mix-dim", MIX_DIM),
    ],
}
LOG_INTERVAL = 20
CONVERSION = [
    *("--key-dim", KEY_DIM, "--calibrate-sentences", 2000, "--refine-steps", 100, "--distill-steps", 100),
]
TRAINING = [
    *("--user-dir", PLUGIN, "--cpu", "--source-lang", LANGS[0], "--target-lang", LANGS[1]),
    *("--share-all-embeddings", "--encoder-layers", 2, "--decoder-layers", 2),
    *("--encoder-embed-dim", WIDTH, "--decoder-embed-dim", WIDTH),
    *("--encoder-ffn-embed-dim", 4 * WIDTH, "--decoder-ffn-embed-dim", 4 * WIDTH),
    *("--encoder-attention-heads", HEADS, "--decoder-attention-heads", HEADS),
    *("--encoder-normalize-before", "--decoder-normalize-before", "--dropout", 0.0),
    *("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1),
    *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", 1.0),
    *("--lr-scheduler", "polynomial_decay", "--lr", 3e-3),
    *("--max-tokens", 1000, "--seed", 1, "--num-workers", 0),
    *("--log-format", "json", "--log-interval", LOG_INTERVAL, "--disable-validation"),
]
SAVING = ["--save-interval-updates", 200, "--keep-interval-updates", 1, "--no-epoch-checkpoints"]


class Clock:
    """The time budget, counted from the start of the shell script that made the environment."""

    def __init__(self, minutes: float) -> None:
        self.started = float(os.environ.get("QUICKSTART_STARTED") or time.time())
        self.budget = 60 * minutes

    def spent(self) -> float:
        """Seconds since the start."""
        return time.time() - self.started

    def left(self) -> float:
        """Seconds of the budget that remain, negative when it is used up."""
        return self.budget - self.spent()


def say(text: str, clock: Clock | None = None) -> None:
    """Print a line at once, with the time spent so far if a clock is given."""
    spent = f"[{clock.spent() / 60:4.1f} min] " if clock else ""
    print(f"{spent}{text}", flush=True)


@contextlib.contextmanager
def lock(folder: Path, program: str = "quickstart") -> Any:
    """Keep a second run of a program, or a training that outlived its parent, from working in the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CollabError(f"another {program}, or a training it started, is still working in {folder}") from error
        yield stream.fileno()


def run(command: Sequence[object], what: str, lock_fd: int, on_line: Callable[[str], None] | None = None) -> None:
    """Run a step in its own process; its standard output goes to `on_line`, or through to ours.

    Raises:
        CollabError: the step failed; its own message was printed before.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "TQDM_MININTERVAL": "1"}
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=ROOT,
        env=environment,
        pass_fds=[lock_fd],
        text=True,
        stdout=subprocess.PIPE if on_line else None,
        stderr=subprocess.STDOUT if on_line else None,
    )
    try:
        for line in process.stdout or ():
            on_line(line)
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if status != 0:
        raise CollabError(f"{what} failed with exit status {status}")


def prepare_data(args: argparse.Namespace, lock_fd: int) -> Path:
    """The binarised corpus."""
    destdir = args.out / "data"
    command = [sys.executable, "-m", "data_prep", "homeassistant", "--langs", "-".join(LANGS), "--destdir", destdir]
    command += ["--vocab-size", args.vocab_size]
    command += ["--archive", args.archive.resolve()] if args.archive else []
    command += ["--sha256", args.sha256] if args.sha256 else []
    run(command, "preparing the corpus", lock_fd)
    return destdir / "bin"


def train(
    name: str, data: Path, folder: Path, updates: int, lock_fd: int, until: int | None = None, saving: bool = True
) -> dict[str, float]:
    """Train one model, or go on with it, and return what `read_log` finds.

    Args:
        name: a key of `MODELS`.
        updates: the length of the learning-rate schedule.
        until: stop after so many updates (default: `updates`).
        saving: keep checkpoints, from which a later call goes on.

    Raises:
        CollabError: fairseq-train failed; its last lines are quoted.
    """
    until = until or updates
    command = [sys.executable, "-m", "fairseq_cli.train", data, *TRAINING, *MODELS[name], "--save-dir", folder]
    command += ["--warmup-updates", max(1, updates // 10), "--total-num-update", updates, "--max-update", until]
    command += SAVING if saving else ["--no-save"]
    log = folder / "train.log"
    run_training(command, name, until, log, lock_fd)
    try:
        return read_log(log)
    except ValueError as error:
        raise CollabError(f"{error}; remove {folder} and start again") from error


def run_training(command: list[object], what: str, updates: int, log: Path, lock_fd: int) -> None:
    """Run `fairseq-train` with its JSON log, which goes to the end of `log`, behind a progress bar.

    Raises:
        CollabError: it failed; its last lines are quoted.
    """
    tail: list[str] = []
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as stream, tqdm(total=updates, desc=what, unit="update", smoothing=0.1) as bar:

        def on_line(line: str) -> None:
            stream.write(line)
            stream.flush()
            tail.append(line.strip())
            del tail[:-3]
            if figures := figures_of(line):
                bar.set_postfix_str(f"loss {figures['loss']:.2f}, {figures['wps']:,.0f} words/s", refresh=False)
                bar.update(max(0, int(figures["num_updates"]) - bar.n))

        try:
            run(command, f"training {what}", lock_fd, on_line)
        except CollabError as error:
            raise CollabError(f"{error} (log: {log}; it ends: {' / '.join(tail)[-400:]})") from error


def convert(original: Path, data: Path, folder: Path, lock_fd: int) -> Path:
    """Converts a trained model to `KEY_DIM` shared dims, looking at the source and target text of `data`."""
    output = folder / "checkpoint_last.pt"
    if not output.exists():
        command = [sys.executable, "-m", "fairseq_collab.cli.convert", "--path", original, "--output", output]
        run([*command, "--calibrate", data, *CONVERSION, "--report", folder / "report"], "converting", lock_fd)
    return output


def score(checkpoint: Path, data: Path, folder: Path, lock_fd: int) -> dict[str, Any]:
    """What `evaluate_bleu.py` finds on the test set."""
    scores = folder / "scores.json"
    command = [sys.executable, ROOT / "scripts/evaluate_bleu.py", data, "--path", checkpoint, "--user-dir", PLUGIN]
    command += ["--gen-subset", "test", "--beam", 5, "--cpu", "--json", scores, "--out", folder / "translations"]
    run(command, f"scoring {folder.name}", lock_fd)
    return read_json(scores)["systems"][0]
