#!/usr/bin/env python3
"""How long a training took to a validation BLEU, from the log of fairseq-train.

    scripts/time_to_bleu.py SAVE_DIR/train.log [--goal 25 20]

The log is that of `--log-format json --eval-bleu`, further runs of the same training appended. What is counted is time
spent on updates: not starting, validating and saving, and not work that was lost when a run was killed, since the next
run does it again. Times have the log's resolution of a second.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fairseq_collab.cli.ending import run_command  # noqa: E402
from fairseq_collab.errors import CollabError  # noqa: E402

GOALS = (25.0, 20.0)
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) \| INFO \| (\S+) \| (.*)")
_UPDATES = re.compile(r"@ (\d+) updates")


class Validation(NamedTuple):
    """BLEU after so many updates and so many seconds of training."""

    updates: int
    bleu: float
    seconds: float


def _bleu(subset: str, message: str) -> tuple[int, float] | None:
    """Updates and BLEU, if the message holds the figures of a validation on that subset."""
    try:
        figures = json.loads(message)
        return int(float(figures[f"{subset}_num_updates"])), float(figures[f"{subset}_bleu"])
    except (ValueError, KeyError, TypeError):
        return None


def read_validations(lines: Iterable[str]) -> list[Validation]:
    """The validations of a training in the order of their updates, each with the time of training before it."""
    found: list[Validation] = []
    at_save: dict[int, float] = {}
    elapsed, since = 0.0, None
    for line in lines:
        if not (match := _LINE.match(line)):
            continue
        now, name, message = datetime.fromisoformat(match[1]), match[2], match[3]
        updates = int(number[1]) if (number := _UPDATES.search(message)) else 0
        if message.startswith(("begin validation", "Preparing to save", "end of epoch")):
            if since is not None:
                elapsed += (now - since).total_seconds()
            since = None
        elif message.startswith("Start iterating"):
            since = now
        elif message.startswith("Saved checkpoint"):
            at_save[updates], since = elapsed, now
        elif message.startswith(("Loaded checkpoint", "No existing checkpoint")):
            elapsed = 0.0 if updates == 0 else at_save.get(updates, elapsed)
            found = [validation for validation in found if validation.updates <= updates]
            since = None
        elif (figures := _bleu(name, message)) and not name.startswith("train"):
            found.append(Validation(*figures, elapsed))
            since = now
    return found


def report(validations: Sequence[Validation], goals: Sequence[float]) -> str:
    """A line for each goal."""
    lines = []
    for goal in goals:
        reached = next((validation for validation in validations if validation.bleu >= goal), None)
        if reached:
            lines.append(
                f"BLEU {goal:g}: {_time(reached)} of training, {reached.updates:,} updates, "
                f"validation BLEU {reached.bleu:.2f}"
            )
        else:
            best = max(validations, key=lambda validation: validation.bleu)
            lines.append(
                f"BLEU {goal:g}: not reached in {_time(validations[-1])} of training, best validation BLEU "
                f"{best.bleu:.2f} after {best.updates:,} updates"
            )
    return "\n".join(lines)


def _time(validation: Validation) -> str:
    return f"{validation.seconds:,.0f} s ({validation.seconds / 3600:.2f} h)"


def time_to_bleu(log: Path, goals: Sequence[float]) -> str:
    """What :func:`report` says of a log. Raises CollabError when there is none, or it has no BLEU."""
    if not log.is_file():
        raise CollabError(f"there is no log {log}")
    with log.open(encoding="utf-8", errors="replace") as stream:
        validations = read_validations(stream)
    if not validations:
        raise CollabError(f"{log} has no validation with BLEU: train with --eval-bleu and --log-format json")
    return report(validations, goals)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when the times were printed, 1 after a sentence."""
    parser = argparse.ArgumentParser(
        prog="time_to_bleu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", type=Path, help="log of the training")
    parser.add_argument("--goal", type=float, nargs="+", default=GOALS, help="BLEU to reach (default: 25 20)")
    args = parser.parse_args(argv)
    return run_command("time_to_bleu.py", lambda: print(time_to_bleu(args.log, args.goal)), "nothing was printed")


if __name__ == "__main__":
    sys.exit(main())
