"""Parallel text in files of any size: reading, pairing, tokenising and cleaning, line by line, with every loss counted.

Lines end at line feeds only, so that other line separators of Unicode cannot shift one side against the other. Subwords
and fairseq's own files are made elsewhere.
"""

from __future__ import annotations

import codecs
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.parallel import SPLITS, collapse
from fairseq_collab.errors import CollabError

EMPTY, ONE_SIDED, NOT_UTF8, OVER_LONG, RATIO = "empty", "misaligned (one side empty)", "not UTF-8", "over-long", "ratio"
REASONS = (EMPTY, ONE_SIDED, NOT_UTF8, OVER_LONG, RATIO)
_CHUNK = 2000  # pairs that one worker takes at a time


@dataclass(frozen=True)
class FilePair:
    """Two files whose lines translate each other."""

    source: Path
    target: Path


@dataclass(frozen=True)
class Cleaning:
    """What happens to natural text before subwords.

    Args:
        tokenizer: ``moses`` (of sacremoses) or ``none``.
        split_dashes: whether the Moses tokenizer splits words at dashes.
        lowercase: whether case is dropped, after tokenising.
        max_length: training pairs with more tokens on a side are dropped; 0 keeps all.
        max_ratio: training pairs with a side more than so many times as long as the other are dropped; 0 keeps all.
    """

    tokenizer: str = "none"
    split_dashes: bool = True
    lowercase: bool = False
    max_length: int = 0
    max_ratio: float = 0.0

    def check(self) -> None:
        """Refuse values out of range, and a missing sacremoses, with a `CollabError`."""
        if self.max_length < 0:
            raise CollabError(f"--max-length {self.max_length} is out of range: give 1 or more, or 0 to keep all")
        if self.max_ratio != 0 and not self.max_ratio >= 1:
            raise CollabError(f"--max-ratio {self.max_ratio} is out of range: give 1 or more, or 0 to keep all")
        if self.tokenizer == "moses":
            _import_sacremoses()


def _import_sacremoses() -> Any:
    try:
        import sacremoses
    except ImportError as error:
        raise CollabError(
            "the Moses tokenizer needs sacremoses, which is not installed: pip install sacremoses, or --tokenizer none"
        ) from error
    return sacremoses


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
                f"{pair.source} has {source:,} lines and {pair.target} has {target:,}: they are no translations of each "
                "other line by line"
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
        with open_sides(folder, split, langs) as write, _bar(f"read {split}", totals[split]) as progress:
            for pair in pairs:
                for source, target, is_utf8 in read_pairs(pair):
                    progress.update()
                    reason = _what_is_missing(source, target) or (None if is_utf8 else NOT_UTF8)
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


def write_tokens(
    source_folder: Path, folder: Path, langs: tuple[str, str], cleaning: Cleaning, workers: int, valid_every: int = 0
) -> dict[str, Any]:
    """Tokenise and clean the files of `write_natural` and return counts.

    Training pairs that are empty, too long or too unequal are dropped; other splits keep every line.

    Args:
        source_folder: what `write_natural` filled. folder: where ``{split}.{lang}`` are written.
        langs: source and target. cleaning: what is done. workers: processes.
        valid_every: each so many-th training pair becomes valid, counted after cleaning; 0 for a split of its own.

    Raises:
        CollabError: nothing is left of a split.
    """
    counts: dict[str, Any] = {"langs": list(langs), "dropped": {}, "kept": {}, "splits": Counter()}
    counts["tokens"] = {split: dict.fromkeys(langs, 0) for split in SPLITS}
    with ExitStack() as stack:
        write = {split: stack.enter_context(open_sides(folder, split, langs)) for split in SPLITS}
        run = stack.enter_context(_worker_pool(cleaning, langs, workers))
        for split in SPLITS:
            pair = FilePair(*(source_folder / f"{split}.{lang}" for lang in langs))
            if split == "valid" and valid_every:
                continue
            found: Counter[str] = Counter()
            total, kept = check_pairs([pair]), 0
            with _bar(f"clean {split}", total) as progress:
                for chunk in run(_chunks(read_pairs(pair))):
                    progress.update(len(chunk))
                    for source, target, reason in chunk:
                        if reason:
                            found[reason] += 1
                        if reason and split == "train":
                            continue
                        kept += 1
                        to = "valid" if split == "train" and valid_every and kept % valid_every == 0 else split
                        write[to](source, target)
                        counts["splits"][to] += 1
                        for lang, side in zip(langs, (source, target), strict=True):
                            counts["tokens"][to][lang] += side.count(" ") + 1 if side else 0
            counts["dropped" if split == "train" else "kept"][split] = dict(found)
    if lost := [split for split in SPLITS if not counts["splits"][split]]:
        read = ", ".join(f"{number:,} {reason}" for reason, number in counts["dropped"]["train"].items())
        raise CollabError(f"no pair is left for the {lost[0]} split (dropped from train: {read or 'nothing'})")
    return {**counts, "splits": dict(counts["splits"])}


class PairCleaner:
    """Tokenises a pair and says why it should not be trained on."""

    def __init__(self, cleaning: Cleaning, langs: tuple[str, str]) -> None:
        self.cleaning = cleaning
        self.tokenizers = None
        if cleaning.tokenizer == "moses":
            self.tokenizers = [_import_sacremoses().MosesTokenizer(lang=lang.split("_")[0]) for lang in langs]

    def __call__(self, pair: tuple[str, str, bool]) -> tuple[str, str, str | None]:
        sides = list(pair[:2])
        if self.tokenizers:
            sides = [
                tokenizer.tokenize(side, aggressive_dash_splits=self.cleaning.split_dashes, return_str=True)
                for tokenizer, side in zip(self.tokenizers, sides, strict=True)
            ]
        if self.cleaning.lowercase:
            sides = [side.lower() for side in sides]
        source, target = map(collapse, sides)
        return source, target, self.fault(source, target)

    def fault(self, source: str, target: str) -> str | None:
        """One of `REASONS`, or None."""
        if missing := _what_is_missing(source, target):
            return missing
        short, long = sorted((source.count(" ") + 1, target.count(" ") + 1))
        if self.cleaning.max_length and long > self.cleaning.max_length:
            return OVER_LONG
        if self.cleaning.max_ratio and long > short * self.cleaning.max_ratio:
            return RATIO
        return None


def _what_is_missing(source: str, target: str) -> str | None:
    if source and target:
        return None
    return ONE_SIDED if source or target else EMPTY


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


def _bar(title: str, total: int) -> tqdm:
    return tqdm(total=total, desc=title, unit="pair", unit_scale=True)


def _chunks(pairs: Iterable[Any]) -> Iterator[list[Any]]:
    iterator = iter(pairs)
    while chunk := list(islice(iterator, _CHUNK)):
        yield chunk


_cleaner: PairCleaner | None = None


def _start_worker(cleaning: Cleaning, langs: tuple[str, str], parent: int) -> None:
    global _cleaner
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _cleaner = PairCleaner(cleaning, langs)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _clean_chunk(chunk: list[tuple[str, str, bool]]) -> list[tuple[str, str, str | None]]:
    return [_cleaner(pair) for pair in chunk]


@contextmanager
def _worker_pool(cleaning: Cleaning, langs: tuple[str, str], workers: int) -> Iterator[Callable[..., Iterator[list]]]:
    """A function from chunks of pairs to chunks of cleaned pairs, in order, a few chunks ahead of who takes them."""
    if workers == 1 or cleaning.tokenizer == "none":
        cleaner = PairCleaner(cleaning, langs)
        yield lambda chunks: ([cleaner(pair) for pair in chunk] for chunk in chunks)
        return
    pool = ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(cleaning, langs, os.getpid()))

    def run(chunks: Iterator[list]) -> Iterator[list]:
        waiting = deque(pool.submit(_clean_chunk, chunk) for chunk in islice(chunks, 2 * workers))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(_clean_chunk, chunk) for chunk in islice(chunks, 1))

    try:
        yield run
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
