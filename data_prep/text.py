"""Your own text in one language, for pretraining with fairseq's masked_lm, denoising and language_modeling.

--train, --valid and --test name files of UTF-8 text, a sentence or paragraph a line; an empty line ends a document.

DESTDIR, when done:
  options.json            what it was made with, the digest of each file included; other options are refused
  pieces/SPLIT.txt        the text as pieces, with spm.model (and spm.vocab)
  bin/                    what fairseq-train reads, with dict.txt
SPLIT is train, valid, or test where --test is given. White space is collapsed and lines that are not UTF-8 are dropped
and counted. The pieces are a BPE of sentencepiece trained on train; to go on from a published RoBERTa its own encoding
is needed instead (docs/training.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import sentencepiece
from tqdm import tqdm

from data_prep.binarise import preprocess
from data_prep.bitext import count_lines
from data_prep.common import StagedFolder, sha256_of
from data_prep.parallel import SPLITS, aligned, collapse
from data_prep.piece_model import add_model_arguments, check_model_options, train_model
from data_prep.stages import add_folder_arguments, check_workers
from fairseq_collab.errors import CollabError

HELP = "your own text in one language, for pretraining"
_MOST_LINES = 5_000_000  # that the model of pieces is trained on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this corpus."""
    for split in SPLITS:
        parser.add_argument(f"--{split}", required=split != "test", nargs="+", type=Path, metavar="FILE")
    add_folder_arguments(parser)
    add_model_arguments(parser.add_argument_group("pieces"), 32_000, 0.9999)


def prepare(args: argparse.Namespace) -> None:
    """Make everything under ``args.destdir`` and print the table of counts.

    Raises:
        CollabError: bad option, missing or empty file, or a folder of other options.
    """
    check_workers(args)
    check_model_options(args.vocab_size, args.character_coverage)
    files = {split: paths for split in SPLITS if (paths := getattr(args, split))}
    totals = {split: sum(map(count_lines, paths)) for split, paths in files.items()}
    for split, paths in files.items():
        if not totals[split]:
            raise CollabError(f"{', '.join(map(str, paths))}: there is no line in it")
    options: dict[str, Any] = {"corpus": "text", "vocab_size": args.vocab_size}
    options["character_coverage"] = args.character_coverage
    options |= {split: [sha256_of(path) for path in paths] for split, paths in files.items()}
    folder = StagedFolder(args.destdir, options)
    with folder.open():
        pieces = folder.stage("pieces", lambda path: _write_pieces(files, totals, path, args))
        binary = folder.stage("bin", lambda path: _write_binary(folder.path / "pieces", path, files, args.workers))
        rows = [["split", "lines", "pieces", "unknown"]]
        for split, counts in pieces["splits"].items():
            unknown = binary["unknown"].get(f"{split}.txt", 0.0)
            rows.append([split, f"{counts['lines']:,}", f"{counts['pieces']:,}", f"{unknown:.3g}%"])
        print("\n".join(aligned(rows)))
        dropped = ", ".join(f"{counts['not_utf8']:,} of {split}" for split, counts in pieces["splits"].items())
        print(f"lines dropped because they are not UTF-8: {dropped}")
        print(f"binarised data: {folder.path / 'bin'}")


def read_lines(paths: Iterable[Path]) -> Iterator[str | None]:
    """The lines of all files with white space collapsed, None for one that is not UTF-8."""
    for path in paths:
        with path.open("rb") as stream:
            for number, line in enumerate(stream):
                try:
                    yield collapse(line.decode("utf-8-sig" if number == 0 else "utf-8"))
                except UnicodeDecodeError:
                    yield None


def _write_pieces(
    files: dict[str, list[Path]], totals: dict[str, int], folder: Path, args: argparse.Namespace
) -> dict[str, Any]:
    step = -(-totals["train"] // _MOST_LINES)
    print(f"training spm.model of {args.vocab_size:,} pieces on {totals['train'] // step:,} lines", flush=True)
    model = train_model(
        (line for number, line in enumerate(read_lines(files["train"])) if line and number % step == 0),
        folder / "spm",
        vocab_size=args.vocab_size,
        character_coverage=args.character_coverage,
        model_type="bpe",
    )
    counts = {}
    for split, paths in files.items():
        with tqdm(read_lines(paths), desc=f"pieces of {split}", total=totals[split], unit="line") as lines:
            counts[split] = _encode(model, lines, folder / f"{split}.txt")
    return {"pieces": model.vocab_size(), "splits": counts}


def _encode(model: sentencepiece.SentencePieceProcessor, lines: Iterable[str | None], path: Path) -> dict[str, int]:
    counts = {"lines": 0, "pieces": 0, "not_utf8": 0}
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        for line in lines:
            if line is None:
                counts["not_utf8"] += 1
                continue
            pieces = model.encode(line, out_type=str)
            stream.write(" ".join(pieces) + "\n")
            counts["lines"] += 1
            counts["pieces"] += len(pieces)
    return counts


def _write_binary(pieces: Path, folder: Path, splits: Iterable[str], workers: int) -> dict[str, Any]:
    options = ["--only-source", "--workers", str(workers), "--destdir", str(folder)]
    for split in splits:
        options += [f"--{split}pref", str(pieces / f"{split}.txt")]
    return {"unknown": preprocess(options, len(list(splits)))}
