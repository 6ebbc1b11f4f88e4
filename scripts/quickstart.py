#!/usr/bin/env python3
"""Prepare a corpus, train concatenated and collaborative attention with the same budget, score both, print one table.

    scripts/quickstart.sh [--minutes 15] [--out FOLDER]

The steps are the ones a user would run: ``python -m data_prep``, ``fairseq-train`` and ``scripts/evaluate_bleu.py``,
each in its own process, each skipped when it was finished before. Nothing is trained, decoded or scored in this file.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from quickstart_report import (
    count_model,
    figures_of,
    markdown,
    plot,
    read_json,
    read_log,
    write_json,
    write_text,
)
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fairseq_collab.errors import CollabError  # noqa: E402

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
OPTIONAL_MODEL = "collaborative-window"
FULL_UPDATES, FEWEST_UPDATES, PROBE_UPDATES = 1400, 600, 60
LOG_INTERVAL = 20
# Seconds that a training takes to start and to save, and that decoding and scoring take, seen on two cores.
START_SECONDS, SCORE_SECONDS = 12, 30
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


def build_parser() -> argparse.ArgumentParser:
    """The command line of this script."""
    parser = argparse.ArgumentParser(
        prog="quickstart.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "outputs" / "quickstart", help="output folder (default: %(default)s)"
    )
    parser.add_argument(
        "--minutes", type=float, default=15, help="time for everything, environment included (default: %(default)s)"
    )
    parser.add_argument(
        "--updates", type=int, help=f"updates of each training (default: {FULL_UPDATES}, or fewer where time is short)"
    )
    parser.add_argument("--vocab-size", type=int, default=2000, help="pieces (default: %(default)s)")
    parser.add_argument("--archive", type=Path, help="downloaded package of the corpus, for machines without a network")
    parser.add_argument("--sha256", help="SHA-256 that the archive must have (default: the pinned one)")
    return parser


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
def lock(folder: Path) -> Any:
    """Keep a second quickstart, or a training that outlived its parent, from working in the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CollabError(f"another quickstart, or a training it started, is still working in {folder}") from error
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
    tail: list[str] = []
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "train.log"
    with log.open("a", encoding="utf-8") as stream, tqdm(total=until, desc=name, unit="update", smoothing=0.1) as bar:

        def on_line(line: str) -> None:
            stream.write(line)
            stream.flush()
            tail.append(line.strip())
            del tail[:-3]
            if figures := figures_of(line):
                bar.set_postfix_str(f"loss {figures['loss']:.2f}, {figures['wps']:,.0f} words/s", refresh=False)
                bar.update(max(0, int(figures["num_updates"]) - bar.n))

        try:
            run(command, f"training {name}", lock_fd, on_line)
        except CollabError as error:
            raise CollabError(f"{error} (log: {log}; it ends: {' / '.join(tail)[-300:]})") from error
    try:
        return read_log(log)
    except ValueError as error:
        raise CollabError(f"{error}; remove {folder} and start again") from error


def plan_updates(args: argparse.Namespace, data: Path, clock: Clock, lock_fd: int) -> dict[str, Any]:
    """How many updates each training gets, decided once for a folder so that all its models get the same.

    Raises:
        CollabError: the folder was begun with other settings.
    """
    file = args.out / "plan.json"
    settings = [str(part) for part in [*TRAINING[2:], *sum(MODELS.values(), [])]]
    plan = read_json(file)
    if plan:
        if plan["settings"] != settings or args.updates not in (None, plan["updates"]):
            raise CollabError(
                f"{args.out} was begun with {plan['updates']} updates and its own training options; "
                "remove that folder, or choose another with --out"
            )
        return plan
    updates, rate = args.updates, None
    if updates is None:
        say(f"      measuring this machine for {PROBE_UPDATES} updates (about 20 s)", clock)
        probe = args.out / "probe"
        rate = train("concatenated", data, probe, FULL_UPDATES, lock_fd, until=PROBE_UPDATES, saving=False)
        rate = rate["updates_per_second"]
        updates = fit(clock.left(), rate)
    plan = {"updates": updates, "updates_per_second": rate, "settings": settings}
    write_json(file, plan)
    return plan


def fit(seconds_left: float, updates_per_second: float) -> int:
    """Updates of each training for the time that is left: the optional model is given up before the full number is."""
    for models in (len(MODELS), len(MODELS) - 1):
        each = seconds_left / models - START_SECONDS - SCORE_SECONDS
        updates = int(min(FULL_UPDATES, each * updates_per_second)) // 100 * 100
        if updates >= 0.75 * FULL_UPDATES:
            break
    return max(FEWEST_UPDATES, updates)


def make_model(
    name: str, args: argparse.Namespace, data: Path, plan: dict[str, Any], clock: Clock, lock_fd: int
) -> dict[str, Any]:
    """The row of one model: trained, decoded and scored, or what an earlier run found."""
    folder = args.out / name
    row = read_json(folder / "row.json")
    if row:
        say(f"      {name}: finished before, BLEU {row['bleu']:.2f}", clock)
        return row
    trained = read_json(folder / "trained.json")
    if trained is None:
        trained = train(name, data, folder, plan["updates"], lock_fd)
        write_json(folder / "trained.json", trained)
    say(f"      {name}: decoding and scoring the test set (about {SCORE_SECONDS} s)", clock)
    started = time.time()
    checkpoint, scores = folder / "checkpoint_last.pt", folder / "scores.json"
    command = [sys.executable, ROOT / "scripts/evaluate_bleu.py", data, "--path", checkpoint, "--user-dir", PLUGIN]
    command += ["--gen-subset", "test", "--beam", 5, "--cpu", "--json", scores, "--out", folder / "translations"]
    run(command, f"scoring {name}", lock_fd)
    system = read_json(scores)["systems"][0]
    row = {
        "model": name,
        "langs": "-".join(LANGS),
        "bleu": system["bleu"]["score"],
        "bleu_signature": system["bleu"]["signature"],
        "chrf": system["chrf"]["score"],
        "chrf_signature": system["chrf"]["signature"],
        "parameters": system["parameters"][0],
        **count_model(checkpoint),
        "updates": plan["updates"],
        "train_words_per_second": trained["words_per_second"],
        "decode_tokens_per_second": system["tokens_per_second"],
        "seconds": START_SECONDS + plan["updates"] / trained["updates_per_second"] + time.time() - started,
    }
    write_json(folder / "row.json", row)
    return row


def make_models(
    args: argparse.Namespace, data: Path, plan: dict[str, Any], clock: Clock, lock_fd: int
) -> list[dict[str, Any]]:
    """The rows of all models for which there is time; the first two are always made."""
    rate = plan["updates_per_second"]
    expected = START_SECONDS + plan["updates"] / rate + SCORE_SECONDS if rate else None
    rows: list[dict[str, Any]] = []
    for name in MODELS:
        finished = (args.out / name / "row.json").exists()
        if not finished and expected:
            if name == OPTIONAL_MODEL and expected > clock.left():
                say(
                    f"      {name}: left out, it needs about {expected / 60:.1f} min more; add it with --minutes", clock
                )
                continue
            say(f"      {name}: about {expected / 60:.1f} min", clock)
        rows.append(make_model(name, args, data, plan, clock, lock_fd))
        expected = rows[-1]["seconds"]
        write_json(args.out / "results.json", rows)
    return rows


def quickstart(args: argparse.Namespace) -> None:
    """Everything after the environment."""
    clock = Clock(args.minutes)
    with lock(args.out) as lock_fd:
        say("[2/4] corpus (about 30 s the first time)", clock)
        data = prepare_data(args, lock_fd)
        plan = plan_updates(args, data, clock, lock_fd)
        say(f"[3/4] training with {plan['updates']:,} updates each, decoding and scoring", clock)
        rows = make_models(args, data, plan, clock, lock_fd)
        say("[4/4] results", clock)
        table = markdown(rows)
        write_text(args.out / "results.md", table)
        if not plot(rows, args.out / "results.png"):
            say("      no plot: matplotlib is not installed", clock)
    say(f"\n{table}")
    say(f"in {args.out}: results.md, .json and .png, and a folder a model with its checkpoint, log and translations")
    say(f"took {clock.spent() / 60:.1f} of {args.minutes:g} minutes")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when the table is there, 1 after a sentence, 130 when interrupted."""
    args = build_parser().parse_args(argv)
    # OpenMP's default is to spin for long: ten times slower as soon as another program needs one of the cores.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    os.environ.setdefault("OMP_NUM_THREADS", str(min(4, len(os.sched_getaffinity(0)))))
    args.out = args.out.resolve()

    def stop(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        if args.updates is not None and args.updates < LOG_INTERVAL:
            raise CollabError(f"--updates {args.updates} is out of range: give {LOG_INTERVAL} or more")
        if not args.minutes > 0:
            raise CollabError(f"--minutes {args.minutes:g} is out of range: give more than 0")
        quickstart(args)
    except (CollabError, OSError) as error:
        print(f"quickstart.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("quickstart.py: interrupted; the same command continues where it was", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
