"""The page of results, from lines alone: every experiment that has any, with its tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiment_grids import glue_runs, pictures, tables
from experiment_grids.grids import EXPERIMENTS
from experiment_grids.store import Line
from fairseq_collab.errors import CollabError
from fairseq_collab.files import write_text

NAMES = (*EXPERIMENTS, glue_runs.NAME)


def tables_of(name: str, lines: Sequence[Line]) -> str:
    """Table and comparisons of an experiment as markdown; empty where it has no lines."""
    if name == glue_runs.NAME:
        return glue_runs.table(lines)
    return "\n".join(filter(None, (tables.results_table(lines, name), tables.comparison_table(lines, name))))


def draw(name: str, lines: Sequence[Line], folder: Path) -> list[Path]:
    """The pictures of an experiment."""
    return glue_runs.draw(lines, folder) if name == glue_runs.NAME else pictures.draw(lines, name, folder)


def write_page(lines: Sequence[Line], out: Path) -> list[Path]:
    """Writes the page, and its pictures into the folder of the same name beside it.

    Returns:
        all files.

    Raises:
        CollabError: there is no experiment among the lines.
    """
    parts = [
        "# Results\n",
        "Written by `scripts/experiments.py page` from the lines that `scripts/experiments.py run` appends to its "
        "results; how to make them is in [experiments.md](experiments.md). Differences hold for models of this size on "
        "this corpus.\n",
    ]
    files: list[Path] = []
    for name in NAMES:
        text = tables_of(name, lines)
        if not text:
            continue
        title, about = (
            (glue_runs.TITLE, glue_runs.ABOUT)
            if name == glue_runs.NAME
            else (EXPERIMENTS[name].title, EXPERIMENTS[name].about)
        )
        parts += [f"## {title}\n", f"`{name}`. {about}\n", text]
        drawn = draw(name, lines, out.with_suffix(""))
        parts += [f"![{title}: {path.stem.removeprefix(name + '-')}]({out.stem}/{path.name})\n" for path in drawn]
        files += drawn
    if len(parts) == 2:
        raise CollabError(f"the results hold no runs of {', '.join(NAMES)}; make them with scripts/experiments.py run")
    write_text(out, "\n".join(parts))
    return [out, *files]
