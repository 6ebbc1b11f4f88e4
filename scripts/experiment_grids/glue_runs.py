"""The experiment `glue-convert`: `glue.py table` does the work, its results become lines and, by it, tables again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import glue_table

from experiment_grids.cells import ROOT
from experiment_grids.runs import versions
from experiment_grids.store import Line, latest
from fairseq_collab.errors import CollabError
from fairseq_collab.files import read_json

NAME = "glue-convert"
TITLE = "Converting fine-tuned encoders"
ABOUT = (
    "A pretrained encoder, fine-tuned; converted to `R` shared dims; and fine-tuned again, by `scripts/glue.py table`."
)


def command_of(out: Path, seeds: Sequence[int], device: str, flags: Sequence[str]) -> list[str]:
    """The command that makes all results, or goes on with them."""
    command = [sys.executable, str(ROOT / "scripts/glue.py"), "table", "--out", str(out / "glue")]
    return [*command, "--seeds", ",".join(map(str, seeds)), "--device", device, *flags]


def run(command: Sequence[str]) -> None:
    """Runs it; what it prints goes through.

    Raises:
        CollabError: it failed; it printed why.
    """
    status = subprocess.run(command, cwd=ROOT).returncode
    if status == 130:
        raise KeyboardInterrupt
    if status:
        raise CollabError(f"scripts/glue.py table ended with status {status}; what it printed says why")


def new_lines(out: Path, lines: Sequence[Line]) -> Iterator[Line]:
    """A line for each result of ``glue.py`` that is not among ``lines``."""
    known = {_key(line) for line in lines if line.get("experiment") == NAME}
    for path in sorted((out / "glue" / "runs").glob("**/result.json")):
        result = read_json(path)
        if result is not None and _key(result) not in known:
            kept = {key: result[key] for key in ("task", "seed", "key_dim", "stage", "scores")}
            yield {"kind": "glue", "experiment": NAME, **kept, "versions": versions()}


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["task"], line["seed"], line["key_dim"], line["stage"]


def _rows(lines: Sequence[Line]) -> tuple[list[Any], list[str]]:
    found = latest(lines, "glue", NAME)
    tasks = [task for task in glue_table.METRICS if any(line["task"] == task for line in found)]
    return glue_table.make_rows(found, tasks), tasks


def table(lines: Sequence[Line]) -> str:
    """The table of `glue.py`; empty where there are no lines."""
    rows, tasks = _rows(lines)
    return glue_table.markdown(rows, tasks) if rows else ""


def draw(lines: Sequence[Line], folder: Path) -> list[Path]:
    """The picture of `glue.py`, if the lines allow one."""
    rows, _ = _rows(lines)
    path = folder / f"{NAME}.png"
    folder.mkdir(parents=True, exist_ok=True)
    return [path] if rows and glue_table.plot(rows, path) else []
