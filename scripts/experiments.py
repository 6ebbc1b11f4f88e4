#!/usr/bin/env python3
"""Grids of trainings and conversions over seeds, key dims, mixings and attentions: run them, and make tables of them.

    scripts/experiments.py run nmt-key-dim nmt-mixing nmt-convert --data outputs/quickstart/data/bin --jobs 2
    scripts/experiments.py run nmt-key-dim --data ... --dry-run        (what is finished, and how long the rest takes)
    scripts/experiments.py run glue-convert -- --model MODEL --raw GLUE --tasks all
    scripts/experiments.py table nmt-key-dim
    scripts/experiments.py plot nmt-key-dim --pictures outputs
    scripts/experiments.py page --out docs/results.md

``run`` gives every step as a command of its own and skips what was finished before: the same command goes on after an
interruption. Experiments share runs of the same configuration. Every finished run is a line of results.jsonl, and
``table``, ``plot`` and ``page`` read nothing else.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quickstart_steps import ROOT, lock
from tqdm import tqdm

sys.path.insert(0, str(ROOT))

from experiment_grids import estimate, glue_runs, pool, runs, significance  # noqa: E402
from experiment_grids.cells import CONCATENATED, TINY, Run, Setup  # noqa: E402
from experiment_grids.grids import EXPERIMENTS, Grid, all_runs, expand, select  # noqa: E402
from experiment_grids.page import NAMES, draw, tables_of, write_page  # noqa: E402
from experiment_grids.store import Store, load_all  # noqa: E402

from fairseq_collab.cli.ending import interrupt_when_terminated, run_command  # noqa: E402
from fairseq_collab.config import AttentionConfig, AttentionShape, check_attention  # noqa: E402
from fairseq_collab.errors import CollabError, one_a_line  # noqa: E402
from fairseq_collab.files import differences, read_json, write_json  # noqa: E402

OUT = ROOT / "outputs" / "experiments"
RESULTS = "results.jsonl"


def build_parser() -> argparse.ArgumentParser:
    """The command line of this script."""
    parser = argparse.ArgumentParser(
        prog="experiments.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    about = "do what is still to be done of some experiments"
    run = commands.add_parser("run", help=about, epilog="What follows -- goes to glue.py table, for glue-convert.")
    run.add_argument("names", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    run.add_argument("--data", type=Path, metavar="BIN", help="binarised corpus that python -m data_prep made")
    run.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="models and results (default: %(default)s)")
    run.add_argument("--seeds", default="1,2,3", metavar="N,...", help="default: %(default)s")
    run.add_argument("--key-dims", metavar="R,...", help="instead of each experiment's own")
    run.add_argument("--cells", metavar="NAME,...", help="only these rows (with * and ?), and what they begin with")
    run.add_argument("--updates", type=int, help=f"of each training (default: {Setup.updates})")
    run.add_argument("--jobs", type=int, metavar="N", help="processes at a time (default: 1, or one a GPU)")
    run.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    run.add_argument("--tiny", action="store_true", help="tiny models, to see that it runs; not to be cited")
    run.add_argument("--dry-run", action="store_true", help="say what is finished and how long the rest takes")
    table = commands.add_parser("table", help="print the tables of experiments")
    plot = commands.add_parser("plot", help="draw the pictures of experiments")
    page = commands.add_parser("page", help="write the page with all tables and pictures")
    for command in (table, plot):
        command.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (default: all)")
    for command in (table, plot, page):
        default = [OUT / RESULTS]
        command.add_argument("--results", type=Path, nargs="+", default=default, metavar="FILE", help=f"default: {OUT}")
    plot.add_argument("--pictures", type=Path, required=True, metavar="DIR", help="folder for them")
    page.add_argument("--out", type=Path, required=True, metavar="FILE", help="the page, e.g. docs/results.md")
    return parser


def numbers(text: str, flag: str) -> list[int]:
    """Whole positive numbers joined by commas.

    Raises:
        CollabError: something else.
    """
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise CollabError(f"{flag} {text} is no list of whole numbers such as 1,2,3")
    return list(dict.fromkeys(map(int, text.split(","))))


def make_grid(args: argparse.Namespace, setup: Setup) -> Grid:
    """The cells that are asked for.

    Raises:
        CollabError: a list that is none, rows that no experiment has, or key dims that do not fit the model.
    """
    key_dims = numbers(args.key_dims, "--key-dims") if args.key_dims is not None else None
    if key_dims and max(key_dims) >= setup.width:
        raise CollabError(f"--key-dims {args.key_dims}: give less than the width {setup.width}, which every grid has")
    names = [name for name in args.names if name in EXPERIMENTS]
    grid = {name: expand(name, setup, numbers(args.seeds, "--seeds"), key_dims) for name in names}
    grid = select(grid, args.cells.split(",")) if args.cells else grid
    for wanted in all_runs(grid):
        shared = wanted.layout != CONCATENATED
        config = AttentionConfig(shared, wanted.key_dim, wanted.mix_dim, wanted.layout if shared else None)
        try:
            check_attention(config, AttentionShape(setup.width, setup.heads, setup.layers), "first")
        except CollabError as error:
            raise CollabError(f"--key-dims {args.key_dims}: {error}") from error
    return grid


def find_slots(args: argparse.Namespace) -> tuple[str, list[str | None]]:
    """Device, and the GPU of each process that runs at a time (None: CPU).

    Raises:
        CollabError: ``--jobs`` below 1, or no GPU for ``--device cuda``.
    """
    if args.jobs is not None and args.jobs < 1:
        raise CollabError(f"--jobs {args.jobs} is out of range: give 1 or more")
    gpus = 0
    if args.device != "cpu":
        import torch

        gpus = torch.cuda.device_count()
    if args.device == "cuda" and not gpus:
        raise CollabError("--device cuda is given, but torch sees no GPU")
    if not gpus:
        return "cpu", [None] * (args.jobs or 1)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else list(map(str, range(gpus)))
    return "cuda", [names[number % gpus] for number in range(args.jobs or gpus)]


def run(args: argparse.Namespace) -> None:
    """The command ``run``."""
    setup = TINY if args.tiny else Setup()
    if args.updates is not None:
        if args.updates < 1:
            raise CollabError(f"--updates {args.updates} is out of range: give 1 or more")
        setup = replace(setup, updates=args.updates)
    grid = make_grid(args, setup)
    if grid and (args.data is None or not args.data.is_dir()):
        raise CollabError(f"--data is {args.data}, and no folder; make it with python -m data_prep homeassistant")
    if glue_runs.NAME in args.names and not args.glue_flags and not args.dry_run:
        raise CollabError("glue-convert needs a model and tasks: add -- --model MODEL --raw GLUE, or -- --tiny")
    if args.glue_flags and glue_runs.NAME not in args.names:
        raise CollabError(f"what follows -- is for {glue_runs.NAME}, which is not among {', '.join(args.names)}")
    device, slots = find_slots(args)
    cores = len(os.sched_getaffinity(0))
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # a list has a number for each nested level
    threads = 1 if len(slots) > 1 else int(given) if given.isdecimal() else min(4, cores)
    place = runs.Workplace(args.out, (args.data or args.out).resolve(), setup, device, threads)
    store = Store(args.out / RESULTS)
    if args.dry_run:
        show_plan(grid, place, len(slots))
        return
    with lock(args.out, "experiments.py") as lock_fd:
        failed: dict[str, str] = {}
        if grid:
            begin(place)
            failed = run_grid(grid, place, store, slots, lock_fd)
            add_comparisons(grid, place, store)
        if glue_runs.NAME in args.names:
            glue_runs.run(glue_runs.command_of(args.out, numbers(args.seeds, "--seeds"), device, args.glue_flags))
            for line in glue_runs.new_lines(args.out, store.load()):
                store.append(line)
    if failed:
        raise CollabError(one_a_line(f"{name} is missing: {reason}" for name, reason in failed.items()))
    print("\n".join(tables_of(name, store.load()) for name in args.names))
    print(f"results: {store.path}")


def begin(place: runs.Workplace) -> None:
    """Starts a folder of results, or goes on with it.

    Raises:
        CollabError: it was begun with another corpus or other settings.
    """
    file = place.out / "settings.json"
    setup = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(place.setup).items()}
    settings = {"data": str(place.data), **setup}
    found = read_json(file)
    if found is None:
        write_json(file, settings)
    elif other := differences(found, settings):
        raise CollabError(f"{place.out} was begun with other settings ({other}); choose another --out")


def show_plan(grid: Grid, place: runs.Workplace, jobs: int) -> None:
    """Prints every cell and seed with what there is of it, and the time that the rest takes."""
    for name, by_seed in grid.items():
        for seed, cells in by_seed.items():
            for cell in cells:
                folder = place.folder(cell.run)
                state = "finished" if place.finished(cell.run) else "begun" if folder.exists() else "to do"
                print(f"{name:12} seed {seed}  {state:8}  {cell.name:34} {folder.name}")
    print(plan_line(all_runs(grid), place, jobs))


def plan_line(wanted: Sequence[Run], place: runs.Workplace, jobs: int) -> str:
    """How much is to be done, and about how long it takes."""
    left = [run for run in wanted if not place.finished(run)]
    done = [row for run in wanted if (row := place.finished(run))]
    hours = estimate.seconds_left(left, place.setup, done) / 3600 / jobs
    return f"{len(wanted)} runs, {len(done)} finished; the others take about {hours:.1f} hours, {jobs} at a time"


def run_grid(
    grid: Grid, place: runs.Workplace, store: Store, slots: Sequence[str | None], lock_fd: int
) -> dict[str, str]:
    """All runs, each with its lines when it is finished; why runs are missing, by the name of their folder."""
    cells: dict[Run, list[dict[str, Any]]] = {}
    for name, by_seed in grid.items():
        for of_seed in by_seed.values():
            for cell in of_seed:
                line = {"kind": "run", "experiment": name, "cell": cell.name, "order": cell.order}
                cells.setdefault(cell.run, []).append(line)
    known = {(line["experiment"], line["cell"], line["run"]) for line in store.load() if line.get("kind") == "run"}
    wanted = all_runs(grid)
    print(plan_line(wanted, place, len(slots)), flush=True)
    by_name = {run.name(place.setup): run for run in wanted}
    processes = pool.Processes(place.threads, lock_fd)

    def work(run: Run, slot: int) -> runs.Row:
        return runs.perform(run, place, partial(processes.execute, gpu=slots[slot]))

    tasks = [
        (name, partial(work, run), frozenset([run.source.name(place.setup)] if run.source else []))
        for name, run in by_name.items()
    ]
    with tqdm(total=len(tasks), unit="run", smoothing=0) as bar:

        def on_end(name: str, row: runs.Row) -> None:
            for line in cells.get(by_name[name], []):
                if (line["experiment"], line["cell"], name) not in known:
                    store.append({**line, **row})
            bar.write(f"{name}: {row['bits'] or math.nan:.3f} bits a token, BLEU {row['bleu']:.2f}", file=sys.stderr)
            bar.update()

        def on_failure(name: str, reason: str) -> None:
            bar.write(f"{name} failed: {reason}", file=sys.stderr)
            bar.update()

        told = time.monotonic()

        def on_wait(names: list[str]) -> None:
            nonlocal told
            if time.monotonic() - told > (2 if sys.stderr.isatty() else 60):
                folders = [place.folder(by_name[name]) for name in names]
                bar.set_postfix_str(", ".join(f"{folder.name} {runs.status(folder)}" for folder in folders))
                told = time.monotonic()

        return pool.perform_all(tasks, len(slots), on_end, processes.stop, on_wait, on_failure)


def add_comparisons(grid: Grid, place: runs.Workplace, store: Store) -> None:
    """Tests what has not been tested, and appends the lines."""
    lines = store.load()
    left = [one for name, by_seed in grid.items() for one in significance.pending(name, by_seed, place, lines)]
    for line, pairs in tqdm(left, desc="bootstrap", unit="test", disable=not left):
        store.append(significance.compare(line, pairs, place))


def show(args: argparse.Namespace) -> None:
    """The commands ``table``, ``plot`` and ``page``."""
    lines = load_all(args.results)
    if args.command == "page":
        print("\n".join(f"wrote {path}" for path in write_page(lines, args.out)))
        return
    for name in args.names or NAMES:
        if name not in NAMES:
            raise CollabError(f"there is no experiment {name}; known are {', '.join(NAMES)}")
        text = tables_of(name, lines)
        if not text and args.names:
            raise CollabError(f"the results hold no runs of {name}; make them with scripts/experiments.py run {name}")
        if text and args.command == "table":
            print(f"## {name}\n\n{text}")
        elif text:
            if find_spec("matplotlib") is None:
                raise CollabError('pictures need matplotlib: pip install ".[plot]"')
            for path in draw(name, lines, args.pictures):
                print(f"wrote {path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; 0 when all is done, 1 after a sentence, 130 when interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args = build_parser().parse_args(words[:end])
    if args.command == "run":
        args.out, args.glue_flags = args.out.resolve(), words[end + 1 :]

    interrupt_when_terminated()
    work = run if args.command == "run" else show
    return run_command("experiments.py", lambda: work(args), "the same command continues where it was")


if __name__ == "__main__":
    sys.exit(main())
