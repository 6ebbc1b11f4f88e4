"""Tokenising and cleaning of parallel text, by several processes, with every loss counted.

Reading and writing pairs is ``bitext``'s.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from data_prep.bitext import OVER_LONG, RATIO, FilePair, check_pairs, fault_of_text, open_sides, pair_bar, read_pairs
from data_prep.parallel import SPLITS, collapse
from fairseq_collab.errors import CollabError

_CHUNK = 2000  # pairs that one worker takes at a time


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


def write_tokens(
    splits: dict[str, list[FilePair]],
    folder: Path,
    langs: tuple[str, str],
    cleaning: Cleaning,
    workers: int,
    valid_every: int = 0,
) -> dict[str, Any]:
    """Tokenise and clean files, write ``{split}.{lang}`` and return counts.

    Training pairs that are empty, not UTF-8, too long or too unequal are dropped; other splits keep every line.

    Args:
        splits: the files of each split. folder: where it writes. langs: source and target.
        cleaning: what is done. workers: processes.
        valid_every: each so many-th training pair becomes valid, counted after cleaning; 0 for a split of its own.

    Raises:
        CollabError: of `check_pairs`, or nothing is left of a split.
    """
    totals = {split: check_pairs(pairs) for split, pairs in splits.items()}
    dropped: dict[str, Counter[str]] = {split: Counter() for split in splits}
    left: Counter[str] = Counter()
    tokens = {split: dict.fromkeys(langs, 0) for split in SPLITS}
    with ExitStack() as stack:
        write = {split: stack.enter_context(open_sides(folder, split, langs)) for split in SPLITS}
        run = stack.enter_context(_worker_pool(cleaning, langs, workers))
        for split, pairs in splits.items():
            chunks = run(_chunks(line for pair in pairs for line in read_pairs(pair)))
            with pair_bar(f"clean {split}", totals[split]) as progress:
                for source, target, reason in (triple for chunk in chunks for triple in chunk):
                    progress.update()
                    if reason:
                        dropped[split][reason] += 1
                        if split == "train":
                            continue
                    is_valid = (
                        split == "train" and valid_every and (left["train"] + left["valid"] + 1) % valid_every == 0
                    )
                    to = "valid" if is_valid else split
                    write[to](source, target)
                    left[to] += 1
                    for lang, side in zip(langs, (source, target), strict=True):
                        tokens[to][lang] += len(side.split(" ")) if side else 0
    if lost := [split for split in SPLITS if not left[split]]:
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in dropped["train"].items())
        raise CollabError(f"no pair is left for the {lost[0]} split (dropped from train: {reasons or 'nothing'})")
    return {
        "read": totals,
        "dropped": {split: dict(found) for split, found in dropped.items() if split == "train"},
        "kept": {split: dict(found) for split, found in dropped.items() if split != "train"},
        "splits": dict(left),
        "tokens": tokens,
    }


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
        return source, target, self.fault(source, target, pair[2])

    def fault(self, source: str, target: str, is_utf8: bool) -> str | None:
        """Why the pair should not be trained on, or None."""
        if reason := fault_of_text(source, target, is_utf8):
            return reason
        short, long = sorted((source.count(" ") + 1, target.count(" ") + 1))
        if self.cleaning.max_length and long > self.cleaning.max_length:
            return OVER_LONG
        if self.cleaning.max_ratio and long > short * self.cleaning.max_ratio:
            return RATIO
        return None


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
    except BrokenProcessPool as error:
        raise CollabError(
            "a worker process was ended from outside; run the same command with fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
