"""Results as JSON lines: written one at a time and whole, read even where the last one is half written."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fairseq_collab.errors import CollabError

Line = dict[str, Any]


class Store:
    """A file of results.

    Args:
        path: made with its folder when the first line is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: Line) -> None:
        """Adds a line by one write, after removing what an interrupted one left."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
        with self.path.open("ab+") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            _repair(stream)
            stream.write(text.encode("utf-8"))
            stream.flush()
            os.fsync(stream.fileno())

    def load(self) -> list[Line]:
        """All whole lines; none if there is no file.

        Raises:
            CollabError: a line other than the last is no JSON object.
        """
        if not self.path.exists():
            return []
        *whole, last = self.path.read_bytes().split(b"\n")
        lines = []
        for number, text in enumerate([*whole, *([last] if _parsed(last) is not None else [])], 1):
            if text.strip():
                line = _parsed(text)
                if line is None:
                    raise CollabError(f"line {number} of {self.path} is no JSON object; remove it and run again")
                lines.append(line)
        return lines


def load_all(paths: Sequence[Path]) -> list[Line]:
    """The lines of several files, of which each must exist.

    Raises:
        CollabError: one does not exist, or holds a broken line.
    """
    for path in paths:
        if not path.is_file():
            raise CollabError(f"there are no results in {path}; make them with scripts/experiments.py run")
    return [line for path in paths for line in Store(path).load()]


def latest(lines: Iterable[Line], kind: str, experiment: str) -> list[Line]:
    """The last line of each cell and seed (of each pair and its seeds, for comparisons), in the order of the grid."""
    found: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        if line.get("kind") == kind and line.get("experiment") == experiment:
            key = ("cell", "seed", "against", "task", "stage", "key_dim")
            seeds = tuple(line.get("seeds", ()))
            found[(*(line.get(name) for name in key), seeds)] = line
    return sorted(found.values(), key=lambda line: (line.get("order", 0), line.get("seed", 0)))


def _parsed(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _repair(stream: Any) -> None:
    stream.seek(0)
    content = stream.read()
    if not content or content.endswith(b"\n"):
        return
    end = content.rfind(b"\n") + 1
    if _parsed(content[end:]) is None:
        stream.truncate(end)
    else:
        stream.write(b"\n")
