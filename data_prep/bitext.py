"""Parallel text in files of any size: counted, read and written pair by pair, with every loss counted.

Lines end at line feeds only, so that other line separators of Unicode cannot shift one side against the other.
Tokenising and cleaning is ``cleaning``'s, subwords are ``subwords``'.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.parallel import collapse
from fairseq_collab.errors import CollabError

EMPTY, ONE_SIDED, NOT_UTF8, OVER_LONG, RATIO = (
    "empty",
    "misaligned (one side empty)",
    "not UTF-8",
    "over-long",
    "length ratio",
)
REASONS = (EMPTY, ONE_SIDED, NOT_UTF8, OVER_LONG, RATIO)


@dataclass(frozen=True)
class FilePair:
    """Two files whose lines translate each other."""

    source: Path
    target: Path


def count_lines(path: Path) -> int:
    """The number of lines of a file, a last one without line feed included.

    Raises:
        CollabError: there is no such file.
    """
    if not path.is_file():
        raise CollabError(f"there is no file {path}")
    count, last = 0, b"\n"
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


def check_pairs(pairs: Iterable[FilePair]) -> int:
    """The number of lines of all pairs together.

    Raises:
        CollabError: a file is missing or empty, or the two files of a pair have different numbers of lines.
    """
    total = 0
    for pair in pairs:
        source, target = count_lines(pair.source), count_lines(pair.target)
        if source != target:
            raise CollabError(
                f"{pair.source} has {source:,} lines and {pair.target} has {target:,}: their lines do not translate "
                "each other"
            )
        if not source:
            raise CollabError(f"{pair.source} and {pair.target} are empty")
        total += source
    return total


def read_pairs(pair: FilePair) -> Iterator[tuple[str, str, bool]]:
    """Source and target lines with white space collapsed, and whether both are UTF-8; other bytes become U+FFFD."""
    with pair.source.open("rb") as sources, pair.target.open("rb") as targets:
        for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
            if number == 0:
                source, target = source.removeprefix(codecs.BOM_UTF8), target.removeprefix(codecs.BOM_UTF8)
            try:
                yield collapse(source.decode("utf-8")), collapse(target.decode("utf-8")), True
            except UnicodeDecodeError:
                source, target = (side.decode("utf-8", errors="replace") for side in (source, target))
                yield collapse(source), collapse(target), False


def write_natural(folder: Path, splits: dict[str, list[FilePair]], langs: tuple[str, str]) -> dict[str, Any]:
    """Write the sentences of each split as ``{split}.{lang}`` and return counts.

    Training pairs with an empty side or bytes that are not UTF-8 are dropped; other splits keep every line.

    Raises:
        CollabError: of `check_pairs`, or nothing is left of a split.
    """
    totals = {split: check_pairs(pairs) for split, pairs in splits.items()}
    counts: dict[str, Any] = {"langs": list(langs), "read": totals, "dropped": {}, "kept": {}, "splits": {}}
    for split, pairs in splits.items():
        found: Counter[str] = Counter()
        with open_sides(folder, split, langs) as write, pair_bar(f"read {split}", totals[split]) as progress:
            for pair in pairs:
                for source, target, is_utf8 in read_pairs(pair):
                    progress.update()
                    reason = fault_of_text(source, target, is_utf8)
                    if reason:
                        found[reason] += 1
                    if reason and split == "train":
                        continue
                    write(source, target)
        counts["dropped" if split == "train" else "kept"][split] = dict(found)
        left = totals[split] - (found.total() if split == "train" else 0)
        if not left:
            raise CollabError(f"no pair is left for the {split} split: all {totals[split]:,} are empty or not UTF-8")
        counts["splits"][split] = left
    return counts


def fault_of_text(source: str, target: str, is_utf8: bool) -> str | None:
    """`EMPTY`, `ONE_SIDED`, `NOT_UTF8`, or None for a pair with readable text on both sides."""
    if not source or not target:
        return ONE_SIDED if source or target else EMPTY
    return None if is_utf8 else NOT_UTF8


@contextmanager
def open_sides(folder: Path, split: str, langs: Iterable[str]) -> Iterator[Callable[..., None]]:
    """A function that writes one line to each ``{split}.{lang}``."""
    with ExitStack() as stack:
        streams = [
            stack.enter_context((folder / f"{split}.{lang}").open("w", encoding="utf-8", newline="\n"))
            for lang in langs
        ]

        def write(*sides: str) -> None:
            for stream, side in zip(streams, sides, strict=True):
                stream.write(f"{side}\n")

        yield write


def pair_bar(title: str, total: int) -> tqdm:
    """A progress bar of pairs."""
    return tqdm(total=total, desc=title, unit="pair", unit_scale=True)
