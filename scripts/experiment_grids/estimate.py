"""How long runs take: from finished ones like them, or from what was seen on one machine. Nothing is measured here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from experiment_grids.cells import TRAINED, TUNED, Run, Setup
from experiment_grids.runs import Row


def expected_seconds(run: Run, setup: Setup) -> float:
    """About how long a run takes with one thread of a CPU of 2020, before any of its kind was finished."""
    decoding = 20.0
    if run.kind == TRAINED:
        return 15 + setup.updates / 7 + decoding
    if run.kind == TUNED:
        return 60 + decoding
    flags = dict(zip(run.flags[::2], run.flags[1::2], strict=True))
    sentences, refine, distil = (
        int(flags.get(f"--{name}", 0)) for name in ("calibrate-sentences", "refine-steps", "distill-steps")
    )
    return 15 + sentences / 300 + 0.35 * refine + 0.6 * distil + decoding


def seconds_left(runs: Sequence[Run], setup: Setup, done: Sequence[Row]) -> float:
    """Of work: for each run the mean of finished runs like it, and `expected_seconds` where there are none."""
    known: dict[tuple[Any, ...], list[float]] = {}
    for row in done:
        known.setdefault((row["model"], row["layout"], tuple(row["flags"])), []).append(row["seconds"])
    return sum(
        statistics.fmean(found)
        if (found := known.get((run.kind, run.layout, run.flags)))
        else expected_seconds(run, setup)
        for run in runs
    )
