"""What the suites share: a row, the table, the clock, facts about the host, and the folders of real data.

Nothing here measures anything of its own.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fairseq_collab.errors import CollabError

Row = dict[str, Any]
Times = dict[str, list[float]]  # seconds of one call, by what was called and round
MIN_SECONDS, ROUNDS = 0.2, 7
BUSY = 0.5  # load of a machine on which other programs run


def make_row(
    suite: str,
    case: str,
    peer: str,
    ratio: float | None,
    target: float | None,
    *,
    backend: str,
    rounds: int,
    unit: str = "x",
    **extra: Any,
) -> Row:
    """One figure, the smaller the better.

    Args:
        suite, case: what was measured. peer: against what; "-" if alone.
        ratio: ours by the peer's, None if ours never got as far; without peer the figure itself, in ``unit``.
        target: the largest ``ratio`` to be content with, None where there is none.
        backend: what computed. rounds: measurements of ours behind the figure.
        extra: further figures, as JSON values.
    """
    met = None if target is None else ratio is not None and ratio <= target
    row = {"suite": suite, "case": case, "peer": peer, "ratio": ratio, "target": target, "met": met}
    return {**row, "backend": backend, "rounds": rounds, "unit": unit, **extra}


def table(rows: Sequence[Row]) -> str:
    """The rows as lines of columns, the largest permitted figure beside the one found."""
    head = ["case", "peer", "found", "at most", "met", "rounds", "backend"]
    shown = {None: "", True: "yes", False: "NO"}
    cells = [head]
    for row in rows:
        unit = "" if row["unit"] == "x" else f" {row['unit']}"
        target = "" if row["target"] is None else f"{row['target']:.4g}{unit}"
        found = "never" if row["ratio"] is None else f"{row['ratio']:.4g}{unit}"
        figures = [found, target, shown[row["met"]], str(row["rounds"])]
        cells.append([row["case"], row["peer"], *figures, row["backend"]])
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    right = {2, 3, 5}
    return "\n".join(
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in (list(map(str.rstrip, line)) for line in cells)
    )


def measure(work: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """Median wall-clock seconds of ``rounds`` calls, and what the last one returned."""
    seconds, result = [], None
    for _ in range(rounds):
        started = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), result


def measure_in_turns(
    works: Mapping[str, Callable[[int], Any]],
    rounds: int = ROUNDS,
    *,
    min_seconds: float = MIN_SECONDS,
    clock: Callable[[Callable[[], Any]], float] | None = None,
) -> Times:
    """Seconds of one call of each work in every round; a round calls all of them, one after the other.

    What drifts during a run, drifts for both sides of a ratio of the same round. Every work is called at least once
    before the first round, and within a round as often as fills ``min_seconds``.

    Args:
        works: by name, in the order of their turns; called with the number of the round (0 before the first).
        clock: seconds of a call; wall-clock if not given.
    """
    clock = clock or seconds_of
    repeats = {}
    for name, work in works.items():
        once = clock(lambda work=work: work(0))
        if once < min_seconds:  # the first call also pays for what later ones find ready
            once = clock(lambda work=work: work(0))
        repeats[name] = max(1, math.ceil(min_seconds / max(once, 1e-9)))
    times: Times = {name: [] for name in works}
    for number in range(rounds):
        for name, work in works.items():

            def turn(work: Callable[[int], Any] = work, calls: int = repeats[name], number: int = number) -> None:
                for _ in range(calls):
                    work(number)

            times[name].append(clock(turn) / repeats[name])
    return times


def seconds_of(work: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def turns_row(
    suite: str, case: str, times: Times, ours: str, peer: str, target: float | None, *, backend: str, **extra: Any
) -> Row:
    """A row of the median of the ratios ``ours / peer`` of the rounds, with both times and the spread beside it."""
    ratios = [a / b for a, b in zip(times[ours], times[peer], strict=True)]
    facts = {
        "seconds": statistics.median(times[ours]),
        "peer_seconds": statistics.median(times[peer]),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }
    median = statistics.median(ratios)
    return make_row(suite, case, peer, median, target, backend=backend, rounds=len(ratios), **facts, **extra)


def host_facts() -> dict[str, Any]:
    """Processor, cores that this process may use, torch and its threads, how busy the machine is, and when (UTC)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {"cpu": _cpu_model(), "cores": cores, "threads": torch.get_num_threads(), "torch": torch.__version__}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    facts |= {"python": platform.python_version(), "load": round(os.getloadavg()[0], 2)}
    return {**facts, "measured": time.strftime("%Y-%m-%d %H:%M", time.gmtime())}


def host_line(host: dict[str, Any]) -> str:
    """The facts in one line; a warning follows where other work was running."""
    line = ", ".join(f"{key} {value}" for key, value in host.items())
    busy = "\nOther programs are running on this machine: do not cite these times." if host["load"] > BUSY else ""
    return f"host: {line}{busy}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def import_fairseq() -> None:
    """Imports fairseq with this package's architectures.

    Raises:
        CollabError: there is none in this environment.
    """
    try:
        import fairseq_collab.models  # noqa: F401
    except ImportError as error:
        raise CollabError(
            f"fairseq cannot be imported ({error}): use the Python of the environment it is in"
        ) from error


def data_folder(chosen: Path | None, corpus: ModuleType, option: str | None = None) -> Path:
    """A folder that ``data_prep`` made, or the one that it makes in the cache, downloading what is missing.

    Args:
        chosen: the user's folder, taken as it is. corpus: a module of ``data_prep``.
        option: that chose it; of the corpus's own name if not given.

    Raises:
        CollabError: the folder is not there, or the download failed.
    """
    name = corpus.__name__.rsplit(".", 1)[1]
    if chosen is not None:
        if not chosen.is_dir():
            made_by = f"python -m data_prep {name} --destdir {chosen}"
            raise CollabError(f"--{option or name} {chosen}: there is no such folder; make it with {made_by}")
        return chosen
    from data_prep.common import default_cache

    parser = argparse.ArgumentParser()
    corpus.add_arguments(parser)
    folder = default_cache() / name
    corpus.prepare(parser.parse_args(["--destdir", str(folder)]))
    return folder
