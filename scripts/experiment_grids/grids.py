"""The experiments: which runs each consists of, and which of them are compared. Nothing is run here."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from experiment_grids.cells import Run, Setup, collaborative, concatenated, converted, tuned
from fairseq_collab.config import ATTENTIONS
from fairseq_collab.errors import CollabError

Grid = dict[str, dict[int, list["Cell"]]]  # experiment -> seed -> cells
TITLES = {"dense": "dense", "window": "windows", "picked": "picked"}


@dataclass(frozen=True)
class Cell:
    """A row of an experiment's table, for one seed.

    against: names of the cells of the same experiment that it is compared with. order: place among all rows, however
    many are chosen.
    """

    name: str
    run: Run
    against: tuple[str, ...] = ()
    order: int = 0


@dataclass(frozen=True)
class Experiment:
    """A grid.

    Args:
        title, about: heading and text on the page of results.
        cells: the cells of a seed and some key dims, each after what it is compared with.
        key_dims: default, as divisors of the model's width.
        share_of: the cell, by the beginning of its name, whose loss of bits is the unit for the others.
    """

    title: str
    about: str
    cells: Callable[[Setup, int, Sequence[int]], list[Cell]]
    key_dims: tuple[int, ...] = field(default=(4,))
    share_of: str | None = None


def _full(seed: int, setup: Setup) -> Cell:
    return Cell(f"concatenated R={setup.width}", concatenated(seed, setup.width))


def _small(seed: int, key_dim: int, against: Cell) -> Cell:
    return Cell(f"concatenated R={key_dim}", concatenated(seed, key_dim), (against.name,))


def key_dim_cells(setup: Setup, seed: int, key_dims: Sequence[int]) -> list[Cell]:
    """The paper's main table: concatenated heads with keys of each size, and each mixing."""
    full = _full(seed, setup)
    cells = [full]
    for key_dim in key_dims:
        small = _small(seed, key_dim, full)
        against = (full.name, small.name)
        cells += [small, Cell(f"dense R={key_dim}", collaborative(seed, "dense", key_dim), against)]
        if key_dim <= setup.head_dim:  # P = R: all mixings coincide
            continue
        against += (cells[-1].name,)
        for layout in ("window", "picked"):
            run = collaborative(seed, layout, key_dim, setup.head_dim)
            cells.append(Cell(f"{TITLES[layout]} R={key_dim} P={run.mix_dim}", run, against))
    return cells


def mixing_cells(setup: Setup, seed: int, key_dims: Sequence[int]) -> list[Cell]:
    """Layouts, mix dims and initialisations of the mixing at one key dim."""
    full = _full(seed, setup)
    cells = [full]
    for key_dim in key_dims:
        small = _small(seed, key_dim, full)
        dense = Cell(f"dense R={key_dim} noisy", collaborative(seed, "dense", key_dim), (full.name, small.name))
        cells += [small, dense]
        against = (full.name, dense.name)
        for init in ("all_ones", "uniform"):
            run = collaborative(seed, "dense", key_dim, init=init)
            cells.append(Cell(f"dense R={key_dim} {init}", run, against))
        head_dim = min(setup.head_dim, key_dim)
        wanted = [(head_dim // 2, "all_ones"), *((head_dim, init) for init in ("all_ones", "noisy", "uniform"))]
        for layout in ("window", "picked"):
            for mix_dim, init in wanted:
                if mix_dim == key_dim or (layout == "picked" and init != "all_ones"):
                    continue
                run = collaborative(seed, layout, key_dim, mix_dim, init)
                cells.append(Cell(f"{TITLES[layout]} R={key_dim} P={mix_dim} {init}", run, against))
    return cells


def where_cells(setup: Setup, seed: int, key_dims: Sequence[int]) -> list[Cell]:
    """One attention collaborative, the others as they were."""
    full = _full(seed, setup)
    cells = [full]
    for key_dim in key_dims:
        for layout in ("dense", "window"):
            mix_dim = None if layout == "dense" else min(setup.head_dim, key_dim)
            for attentions in (*ATTENTIONS, "+".join(ATTENTIONS)):
                run = collaborative(seed, layout, key_dim, mix_dim, attentions=attentions)
                if layout != "dense" and run.layout == "dense":
                    continue
                shown = attentions if attentions in ATTENTIONS else "all"
                cells.append(Cell(f"{TITLES[layout]} R={key_dim} {shown}", run, (full.name,)))
    return cells


def convert_cells(setup: Setup, seed: int, key_dims: Sequence[int]) -> list[Cell]:
    """Ways to convert a trained model, each with a step more, and an epoch of fine-tuning after the last."""
    original = Cell("original", concatenated(seed, setup.width))
    cells = [original, Cell("original + 1 epoch", tuned(original.run), (original.name,))]
    few, more, most = setup.calibrate
    refine = ["--refine-steps", setup.refine_steps]
    distil = ["--distill-steps", setup.distill_steps]
    for key_dim in key_dims:
        head_dim = min(setup.head_dim, key_dim)
        ways: list[tuple[str, int, list[Any], bool]] = [
            ("plain CP dense", key_dim, ["--mix-layout", "dense"], False),
            ("plain CP", head_dim, [], False),
            ("weighted", head_dim, ["--calibrate-sentences", few], True),
            ("refined", head_dim, ["--calibrate-sentences", more, *refine], True),
            ("distilled", head_dim, ["--calibrate-sentences", most, *refine, *distil], True),
        ]
        plain = f"plain CP dense R={key_dim}"
        for way, mix_dim, flags, text in ways:
            run = converted(original.run, key_dim, mix_dim, flags, text)
            name = f"{way} R={key_dim}"
            cells.append(Cell(name, run, (original.name,) if name == plain else (original.name, plain)))
        cells.append(Cell(f"{cells[-1].name} + 1 epoch", tuned(run), (original.name, plain, cells[1].name)))
    return cells


EXPERIMENTS = {
    "nmt-key-dim": Experiment(
        "Key dims and mixings, trained from scratch",
        "Concatenated heads whose queries and keys have `R` dims together, and collaborative heads that share `R` "
        "dims. With windows and picks a head mixes `P` of them, with dense mixing all.",
        key_dim_cells,
        key_dims=(4, 8),
    ),
    "nmt-mixing": Experiment(
        "How heads mix the shared dims",
        "Layouts, mix dims `P` and starts of the mixing at one key dim, trained from scratch. "
        "`P` = `R` is dense mixing.",
        mixing_cells,
    ),
    "nmt-where": Experiment(
        "Which attention is collaborative",
        "One of the three attentions shares its keys, the others have concatenated heads of full width.",
        where_cells,
    ),
    "nmt-convert": Experiment(
        "Converting a trained model",
        "The trained model with concatenated heads, converted. *plain CP dense* is the paper's way, the decomposition "
        "of the weights with dense mixing; in the others a head mixes `P` dims, and each adds a step to the one above "
        "it. The text that *weighted*, *refined* and *distilled* see is the source side of the training set.",
        convert_cells,
        share_of="plain CP dense",
    ),
}


def expand(
    name: str, setup: Setup, seeds: Sequence[int], key_dims: Sequence[int] | None = None
) -> dict[int, list[Cell]]:
    """The cells of an experiment by seed.

    Args:
        key_dims: instead of the experiment's own.
    """
    experiment = EXPERIMENTS[name]
    dims = list(key_dims) if key_dims else [setup.width // divisor for divisor in experiment.key_dims]
    return {
        seed: [replace(cell, order=order) for order, cell in enumerate(experiment.cells(setup, seed, dims))]
        for seed in seeds
    }


def select(grid: Grid, patterns: Sequence[str]) -> Grid:
    """The cells whose names fit a pattern (``*`` and ``?``), and those that they begin with.

    Raises:
        CollabError: none fits.
    """
    chosen: Grid = {}
    for name, by_seed in grid.items():
        for seed, cells in by_seed.items():
            fitting = [cell for cell in cells if any(fnmatch.fnmatchcase(cell.name, pattern) for pattern in patterns)]
            sources = {run for cell in fitting for run in ancestors(cell.run)}
            if kept := [cell for cell in cells if cell in fitting or cell.run in sources]:
                chosen.setdefault(name, {})[seed] = kept
    if not chosen:
        known = dict.fromkeys(cell.name for by_seed in grid.values() for cells in by_seed.values() for cell in cells)
        raise CollabError(f"--cells {','.join(patterns)} fits no row; known are {', '.join(known)}")
    return chosen


def ancestors(run: Run) -> list[Run]:
    """The runs that a run begins with, the first one last."""
    return [run.source, *ancestors(run.source)] if run.source else []


def all_runs(grid: Grid) -> list[Run]:
    """Each run once, a seed after the other, and each after what it begins with."""
    seeds = {seed: None for by_seed in grid.values() for seed in by_seed}
    found: dict[Run, None] = {}
    for seed in seeds:
        for by_seed in grid.values():
            for cell in by_seed.get(seed, []):
                found.update(dict.fromkeys([*reversed(ancestors(cell.run)), cell.run]))
    return list(found)
