"""Parallel text from sentence pairs to a binarised fairseq folder: splits, subwords, fairseq-preprocess, the table.

Corpora bring the pairs and say which split each belongs to; this module does not know where they come from.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.binarise import preprocess
from data_prep.common import StagedFolder
from data_prep.piece_model import add_model_arguments, check_model_options, train_model
from fairseq_collab.errors import CollabError

SPLITS = ("train", "valid", "test")


@dataclass
class ParallelText:
    """Sentence pairs by split, with what was dropped on the way, by reason."""

    pairs: dict[str, list[tuple[str, str]]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class SubwordOptions:
    """How sentences become pieces.

    Args:
        vocab_size: pieces of the sentencepiece model, an upper bound for small corpora.
        max_length: training pairs with more pieces on a side are dropped.
        character_coverage: share of the characters of the text that get a piece.
    """

    vocab_size: int = 4000
    max_length: int = 200
    character_coverage: float = 0.9995

    def check(self) -> None:
        """Refuse values out of range with a `CollabError`."""
        check_model_options(self.vocab_size, self.character_coverage)
        if self.max_length < 1:
            raise CollabError(f"--max-length {self.max_length} is out of range: give 1 or more")


def add_subword_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `SubwordOptions`."""
    default = SubwordOptions()
    group = parser.add_argument_group("pieces")
    add_model_arguments(group, default.vocab_size, default.character_coverage)
    group.add_argument(
        "--max-length",
        type=int,
        default=default.max_length,
        metavar="N",
        help="drop training pairs with more pieces on a side (default: %(default)s)",
    )


def prepare_folder(
    folder: StagedFolder, text_stage: Callable[[Path], dict[str, Any]] | None, subwords: SubwordOptions
) -> None:
    """Make the stages ``text``, ``pieces`` and ``bin`` of `folder`, reusing what is complete, and print the table.

    Args:
        folder: the destination.
        text_stage: fills the stage ``text`` through `write_text` and returns its counts; None if that is complete.
        subwords: how the pieces are made.
    """
    with folder.open():
        if text_stage is None:
            print(f"reusing {folder.path / 'text'}")
            text = folder.counts("text")
        else:
            text = folder.stage("text", text_stage)
        langs = text["langs"]
        pieces = folder.stage("pieces", lambda path: write_pieces(folder.path / "text", path, *langs, subwords))
        binary = folder.stage("bin", lambda path: write_binary(folder.path / "pieces", path, *langs))
        print(counts_table(text, pieces, binary, *langs))
        print_end(folder.path, langs)


def print_end(folder: Path, langs: Sequence[str]) -> None:
    """Say where the binarised data are and how fairseq is told their languages."""
    print(f"binarised data: {folder / 'bin'} (--source-lang {langs[0]} --target-lang {langs[1]})")


def collapse(text: str) -> str:
    """`text` with every run of white space, line ends included, as one space, and none at its ends."""
    return " ".join(text.split())


def select(candidates: Iterable[tuple[str, str, str]]) -> ParallelText:
    """Collapse white space, drop what teaches or tests nothing, and keep the splits apart.

    Within a split the first of several equal sources is kept. Across splits a source (its case ignored) belongs to
    train if train has it, else to valid: what a model was trained or chosen on is never in the test set.

    Args:
        candidates: ``(split, source, target)``, in the order in which the first of equal sources wins.
    """
    text = ParallelText()
    by_split: dict[str, list[tuple[str, str]]] = {split: [] for split in SPLITS}
    for split, source, target in candidates:
        by_split[split].append((collapse(source), collapse(target)))
    earlier: set[str] = set()
    for split in SPLITS:
        seen: set[str] = set()
        for source, target in by_split[split]:
            if not source or not target:
                text.dropped["empty side"] += 1
            elif source == target:
                text.dropped["both sides equal"] += 1
            elif source in seen:
                text.dropped["source repeated"] += 1
            elif source.casefold() in earlier:
                text.dropped["source in an earlier split"] += 1
            else:
                seen.add(source)
                text.pairs[split].append((source, target))
        earlier.update(source.casefold() for source in seen)
    return text


def write_text(text: ParallelText, folder: Path, source_lang: str, target_lang: str) -> dict[str, Any]:
    """Write ``{split}.{lang}`` files, one sentence a line, and return the counts.

    Raises:
        CollabError: a split has no pair.
    """
    counts: dict[str, Any] = {"langs": [source_lang, target_lang], "dropped": dict(text.dropped), "splits": {}}
    for split, pairs in text.pairs.items():
        if not pairs:
            raise CollabError(
                f"no {source_lang}-{target_lang} pair is left for the {split} split "
                f"(train/valid/test: {'/'.join(str(len(text.pairs[s])) for s in SPLITS)}): too little text"
            )
        sides = {source_lang: [s for s, _ in pairs], target_lang: [t for _, t in pairs]}
        for lang, lines in sides.items():
            _write_lines(folder / f"{split}.{lang}", lines)
        counts["splits"][split] = {
            "sentences": len(pairs),
            "words": {lang: sum(len(line.split()) for line in lines) for lang, lines in sides.items()},
        }
    return counts


def write_pieces(
    text_folder: Path,
    folder: Path,
    source_lang: str,
    target_lang: str,
    subwords: SubwordOptions,
) -> dict[str, Any]:
    """Train one sentencepiece model on both sides of train and write ``{split}.{lang}`` as pieces.

    Training pairs with a side of more than `subwords.max_length` pieces are dropped and counted; valid and test
    pairs are counted and kept. The text is not normalised, so joining the pieces gives back the line. Runs with
    the same text and options give the same model.

    Raises:
        CollabError: sentencepiece refuses the text or the vocabulary size.
    """
    langs = (source_lang, target_lang)
    lines = {
        (split, lang): (text_folder / f"{split}.{lang}").read_text(encoding="utf-8").split("\n")[:-1]
        for split in SPLITS
        for lang in langs
    }
    model = train_model(
        lines["train", source_lang] + lines["train", target_lang],
        folder / "spm",
        vocab_size=subwords.vocab_size,
        character_coverage=subwords.character_coverage,
    )
    counts: dict[str, Any] = {"pieces": model.vocab_size(), "splits": {}}
    for split in SPLITS:
        kept: list[tuple[list[str], list[str]]] = []
        over_long = 0
        pairs = zip(lines[split, source_lang], lines[split, target_lang], strict=True)
        total = len(lines[split, source_lang])
        with tqdm(pairs, desc=f"pieces of {split}", total=total, unit="pair", unit_scale=True) as progress:
            for pair in progress:
                source, target = (model.encode(line, out_type=str) for line in pair)
                if max(len(source), len(target)) > subwords.max_length:
                    over_long += 1
                    if split == "train":
                        continue
                kept.append((source, target))
        counts["splits"][split] = {"sentences": len(kept), "over_long": over_long, "tokens": {}}
        for side, lang in enumerate(langs):
            _write_lines(folder / f"{split}.{lang}", (" ".join(pieces[side]) for pieces in kept))
            counts["splits"][split]["tokens"][lang] = sum(len(pieces[side]) for pieces in kept)
    return counts


def write_binary(
    pieces_folder: Path,
    folder: Path,
    source_lang: str,
    target_lang: str,
    *,
    joined: bool = True,
    workers: int = 1,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """Run fairseq-preprocess and return the entries of the dictionaries and how much of each file they do not know.

    Args:
        pieces_folder: where ``{split}.{lang}`` are. folder: where it writes.
        source_lang: what the text is translated from. target_lang: and to.
        joined: one dictionary for both sides. workers: processes. more: further options of fairseq-preprocess.

    Raises:
        CollabError: fairseq is not installed, or refused the text.
    """
    options = ["--workers", str(workers), "--destdir", str(folder), "--source-lang", source_lang]
    options += ["--target-lang", target_lang, *(["--joined-dictionary"] if joined else []), *more]
    for split in SPLITS:
        options += [f"--{split}pref", str(pieces_folder / split)]
    unknown = preprocess(options, 2 * len(SPLITS))
    entries = {
        lang: (folder / f"dict.{lang}.txt").read_text(encoding="utf-8").count("\n")
        for lang in (source_lang, target_lang)
    }
    return {"dictionary": entries[target_lang], "dictionaries": entries, "unknown": unknown}


def counts_table(
    text: dict[str, Any], pieces: dict[str, Any], binary: dict[str, Any], source_lang: str, target_lang: str
) -> str:
    """The closing table: sentences, words and tokens by split, then what was dropped and why."""
    langs = (source_lang, target_lang)
    header = ["split", "sentences", *(f"{lang} words" for lang in langs), *(f"{lang} tokens" for lang in langs)]
    rows = [header]
    for split in SPLITS:
        words, tokens = text["splits"][split]["words"], pieces["splits"][split]["tokens"]
        numbers = [pieces["splits"][split]["sentences"], *(words[x] for x in langs), *(tokens[x] for x in langs)]
        rows.append([split, *(f"{number:,}" for number in numbers)])
    lines = aligned(rows)
    lines.append(f"dictionary: {binary['dictionary']:,} entries, shared by both languages")
    dropped = {**text["dropped"], "over-long, from train": pieces["splits"]["train"]["over_long"]}
    lines.append("dropped: " + ", ".join(f"{number:,} {reason}" for reason, number in dropped.items()))
    kept = {split: pieces["splits"][split]["over_long"] for split in ("valid", "test")}
    lines.append("over-long but kept: " + ", ".join(f"{number:,} in {split}" for split, number in kept.items()))
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines, its first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(c.rjust(width) if i else c.ljust(width) for i, (c, width) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        stream.writelines(f"{line}\n" for line in lines)
