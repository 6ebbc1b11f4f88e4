#!/usr/bin/env python3
"""Prepare a corpus, train concatenated and collaborative attention alike, convert one to the other, print one table.

    scripts/quickstart.sh [--minutes 15] [--out FOLDER]

The steps are in ``quickstart_steps.py``, each skipped when it was finished before; here is their order, and how the
time is spent.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quickstart_report import count_model, markdown, plot
from quickstart_steps import (
    LANGS,
    LOG_INTERVAL,
    MODELS,
    ROOT,
    TRAINING,
    Clock,
    CollabError,
    convert,
    lock,
    prepare_data,
    say,
    score,
    train,
)

from fairseq_collab.cli.ending import interrupt_when_terminated, run_command
from fairseq_collab.files import read_json, write_json, write_text

CONVERTED, OPTIONAL_MODEL = "converted", "collaborative-window"
FULL_UPDATES, FEWEST_UPDATES, PROBE_UPDATES = 1400, 600, 60
# Seconds that a training takes to start and to save, and that scoring and converting take, seen on two cores.
START_SECONDS, SCORE_SECONDS, CONVERT_SECONDS = 12, 30, 60


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
        each = (seconds_left - CONVERT_SECONDS - SCORE_SECONDS) / models - START_SECONDS - SCORE_SECONDS
        updates = int(min(FULL_UPDATES, each * updates_per_second)) // 100 * 100
        if updates >= 0.75 * FULL_UPDATES:
            break
    return max(FEWEST_UPDATES, updates)


def make_model(
    name: str, args: argparse.Namespace, data: Path, plan: dict[str, Any], clock: Clock, lock_fd: int
) -> dict[str, Any]:
    """The row of one model: trained or converted, decoded and scored, or what an earlier run found."""
    folder = args.out / name
    row = read_json(folder / "row.json")
    if row:
        say(f"      {name}: finished before, BLEU {row['bleu']:.2f}", clock)
        return row
    started, trained = time.time(), None
    if name == CONVERTED:
        convert(args.out / next(iter(MODELS)) / "checkpoint_last.pt", data, folder, lock_fd)
    else:
        trained = read_json(folder / "trained.json")
        if trained is None:
            trained = train(name, data, folder, plan["updates"], lock_fd)
            write_json(folder / "trained.json", trained)
    say(f"      {name}: decoding and scoring the test set (about {SCORE_SECONDS} s)", clock)
    scoring, checkpoint = time.time(), folder / "checkpoint_last.pt"
    system = score(checkpoint, data, folder, lock_fd)
    if trained:
        seconds = START_SECONDS + plan["updates"] / trained["updates_per_second"] + time.time() - scoring
    else:
        seconds = time.time() - started
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
        "train_words_per_second": trained["words_per_second"] if trained else None,
        "decode_tokens_per_second": system["tokens_per_second"],
        "seconds": seconds,
    }
    write_json(folder / "row.json", row)
    return row


def make_models(
    args: argparse.Namespace, data: Path, plan: dict[str, Any], clock: Clock, lock_fd: int
) -> list[dict[str, Any]]:
    """The rows of all models for which there is time; the first and the dense one are always made."""
    rate = plan["updates_per_second"]
    training = START_SECONDS + plan["updates"] / rate + SCORE_SECONDS if rate else None
    rows: list[dict[str, Any]] = []
    first, *others = MODELS
    for name in (first, CONVERTED, *others):
        expected = CONVERT_SECONDS + SCORE_SECONDS if name == CONVERTED else training
        if not (args.out / name / "row.json").exists() and expected:
            minutes = f"{expected / 60:.1f} min"
            if name in (CONVERTED, OPTIONAL_MODEL) and expected > clock.left():
                say(f"      {name}: left out, it needs about {minutes} more; add it with --minutes", clock)
                continue
            say(f"      {name}: about {minutes}", clock)
        rows.append(make_model(name, args, data, plan, clock, lock_fd))
        if name != CONVERTED:
            training = rows[-1]["seconds"]
        write_json(args.out / "results.json", rows)
    return rows


def quickstart(args: argparse.Namespace) -> None:
    """Everything after the environment."""
    if args.updates is not None and args.updates < LOG_INTERVAL:
        raise CollabError(f"--updates {args.updates} is out of range: give {LOG_INTERVAL} or more")
    if not args.minutes > 0:
        raise CollabError(f"--minutes {args.minutes:g} is out of range: give more than 0")
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

    interrupt_when_terminated()
    return run_command("quickstart.py", lambda: quickstart(args), "the same command continues where it was")


if __name__ == "__main__":
    sys.exit(main())
