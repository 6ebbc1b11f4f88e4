"""The movie snippets of ``snippets`` as two tasks in GLUE's own file formats, for where GLUE's files are not at hand.

DESTDIR, when done:
  SST-2/{train,dev,test}.tsv     whether people found the snippet positive (1) or negative (0): the sign of its mean
                                 score; snippets of score 0 are left out
  STS-B/{train,dev,test}.tsv     every other snippet beside one sentence of praise, always the same, with how close it
                                 comes to it, from 0 to 5: its mean score (-4 to 4), moved and stretched
  TASK/test_labels.tsv           index and label of test, to score predictions with; test.tsv has none, as GLUE's
  unpacked.json                  the archive it came from, and the digest of each file

With n the first eight bytes of the SHA-256 of a snippet's id, big-endian, modulo 100: n < 8 is dev, n < 16 is test,
all others train. Within a split the order is that of these digests. A text that an earlier split has
(train, dev, test; case ignored), or that came before in its own, is dropped.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

from data_prep import snippets, unpacked
from data_prep.snippets import PACKAGE, Snippet

HELP = "movie snippets as SST-2-like and STS-B-like tasks in GLUE's file formats"
SPLITS = ("train", "dev", "test")
SST2_HEADER = "sentence\tlabel"
PRAISE = "One of the best films I have ever seen."
STSB_HEADER = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the package."""
    unpacked.add_arguments(parser, PACKAGE)


def prepare(args: argparse.Namespace) -> None:
    """Make ``args.destdir`` and print how many lines each file has.

    Raises:
        CollabError: unreachable registry, damaged archive, or a folder that holds something else.
    """
    unpacked.unpack(args, PACKAGE, _build, derived="snippets-glue")
    for task in ("SST-2", "STS-B"):
        numbers = {split: len(_lines(args.destdir / task / f"{split}.tsv")) - 1 for split in SPLITS}
        print(f"{args.destdir / task}: " + ", ".join(f"{split} {number:,}" for split, number in numbers.items()))


def split_of(key: str) -> str:
    """The split of a snippet: a function of its id alone."""
    bucket = int.from_bytes(_digest(key)[:8], "big") % 100
    return "dev" if bucket < 8 else "test" if bucket < 16 else "train"


def split_snippets(sentences: list[Snippet]) -> tuple[dict[str, list[Snippet]], int]:
    """The snippets of each split in the order of their digests, none of them twice, and how many were dropped."""
    ordered = sorted(sentences, key=lambda snippet: _digest(snippet.id))
    seen: set[str] = set()
    found: dict[str, list[Snippet]] = {split: [] for split in SPLITS}
    for split in SPLITS:
        for snippet in ordered:
            if split_of(snippet.id) == split and snippet.text.casefold() not in seen:
                seen.add(snippet.text.casefold())
                found[split].append(snippet)
    return found, len(sentences) - sum(map(len, found.values()))


def closeness(snippet: Snippet) -> float:
    """How close a snippet comes to praise, from 0 to 5."""
    return 5 / 8 * (snippet.score + 4)


def _build(archive: Path, folder: Path) -> None:
    movie = snippets.read_archive(archive)[0]["movie"]
    splits, dropped = split_snippets(movie)
    neutral = sum(snippet.score == 0 for sentences in splits.values() for snippet in sentences)
    print(f"{len(movie):,} snippets, {dropped:,} of them dropped as repeated, {neutral:,} with score 0 not in SST-2")
    for split, sentences in splits.items():
        _write_sst2(folder / "SST-2", split, [snippet for snippet in sentences if snippet.score != 0])
        _write_stsb(folder / "STS-B", split, sentences[::2])


def _write_sst2(folder: Path, split: str, sentences: list[Snippet]) -> None:
    labels = [str(int(snippet.score > 0)) for snippet in sentences]
    if split == "test":
        _write(folder / "test.tsv", "index\tsentence", [f"{i}\t{s.text}" for i, s in enumerate(sentences)])
        _write(folder / "test_labels.tsv", "index\tlabel", [f"{i}\t{label}" for i, label in enumerate(labels)])
    else:
        rows = [f"{snippet.text}\t{label}" for snippet, label in zip(sentences, labels, strict=True)]
        _write(folder / f"{split}.tsv", SST2_HEADER, rows)


def _write_stsb(folder: Path, split: str, sentences: list[Snippet]) -> None:
    rows = [
        f"{index}\tmovie-snippets\tmovie.tsv\t2014\t{index}\t{snippet.id}\t-\t{snippet.text}\t{PRAISE}"
        for index, snippet in enumerate(sentences)
    ]
    scores = [f"{closeness(snippet):.3f}" for snippet in sentences]
    if split == "test":
        _write(folder / "test.tsv", STSB_HEADER.removesuffix("\tscore"), rows)
        _write(folder / "test_labels.tsv", "index\tlabel", [f"{i}\t{score}" for i, score in enumerate(scores)])
    else:
        _write(
            folder / f"{split}.tsv", STSB_HEADER, [f"{row}\t{score}" for row, score in zip(rows, scores, strict=True)]
        )


def _write(path: Path, header: str, rows: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{row}\n" for row in (header, *rows)), encoding="utf-8", newline="\n")


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
