"""WMT 2016 English-German as Google prepared it, for the runs of "Scaling Neural Machine Translation".

Tokenised by Moses, cleaned, and cut into 32,000 joint BPE units by subword-nmt (Ott et al. 2018, arXiv 1806.00187, and
fairseq's examples/scaling_nmt). Train is train.tok.clean.bpe.32000 (4,500,966 pairs), valid newstest2013 (3,000), test
newstest2014 (3,003). The dictionary is the one of fairseq's example: the 32,768 most frequent units of train, shared by
both languages, fairseq's four special symbols included. --dictionary archive takes the archive's vocab.bpe.32000.
Nothing is dropped but pairs with an empty side, unless --max-length or --max-ratio are given.

The archive wmt16_en_de.tar.gz lies on Google Drive, whose download form is answered. Drive also refuses downloads: it
then shows a web page, and the archive must be fetched with a browser and its folder named with --raw. Its MD5 is the
one that torchtext publishes.

DESTDIR, when done:
  options.json            what it was made with; other options are refused
  text/{valid,test}.LANG  the sentences before tokenising, as references for scoring
  archive/                the files of the archive that are used
  pieces/SPLIT.LANG       its BPE text, white space collapsed and cleaned
  bin/                    what fairseq-train and fairseq-generate read, in both directions
SPLIT is train, valid or test; LANG is en or de. Score with evaluate_bleu.py --detokenizer moses.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from data_prep import archives, parallel, stages
from data_prep.archives import Archive, Located
from data_prep.bitext import FilePair, write_natural
from data_prep.cleaning import Cleaning, write_tokens
from data_prep.common import StagedFolder
from data_prep.downloads import RemoteFile
from data_prep.subwords import BOTH

HELP = "WMT 2016 English-German with BPE, of Scaling NMT (Google Drive)"
LANGS = ("en", "de")
BPE = {
    "train": "train.tok.clean.bpe.32000",
    "valid": "newstest2013.tok.bpe.32000",
    "test": "newstest2014.tok.bpe.32000",
}
NATURAL = {"valid": "newstest2013", "test": "newstest2014"}
VOCABULARY = "vocab.bpe.32000"
WORDS = 32_768
ARCHIVE = Archive(
    RemoteFile(
        "wmt16_en_de.tar.gz",
        "https://drive.google.com/uc?export=download&id=0B_bZck-ksdkpM25jRUN2X2UxMm8",
        digest="md5:874ab6bbfe9c21ec987ed1b9347f95ec",
    ),
    (VOCABULARY, *(f"{prefix}.{lang}" for prefix in (*BPE.values(), *NATURAL.values()) for lang in LANGS)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this corpus."""
    stages.add_folder_arguments(parser)
    archives.add_arguments(parser)
    group = parser.add_argument_group("pieces")
    stages.add_limits(group, Cleaning())
    group.add_argument(
        "--dictionary",
        choices=("frequent", "archive"),
        default="frequent",
        help="the most frequent units of train, or the archive's list (default: %(default)s)",
    )


def prepare(args: argparse.Namespace) -> None:
    """Make everything under ``args.destdir`` and print the table of counts.

    Raises:
        CollabError: bad option, failed download, damaged archive, or a folder of other options.
    """
    stages.check_workers(args)
    cleaning = Cleaning(max_length=args.max_length, max_ratio=args.max_ratio)
    cleaning.check()
    limits = {"max_length": args.max_length, "max_ratio": args.max_ratio}
    folder = StagedFolder(args.destdir, {"corpus": "wmt16_en_de_bpe32k", **limits, "dictionary": args.dictionary})
    complete = folder.check() and folder.is_complete("archive")
    located = [] if complete else archives.locate([ARCHIVE], args, "wmt16_en_de_bpe32k")
    files = folder.path / "archive"
    with folder.open():
        folder.stage("archive", lambda path: _unpack(path, located))
        folder.stage("text", lambda path: write_natural(path, _pairs(files, NATURAL), LANGS))
        tokens = folder.stage("pieces", lambda path: write_tokens(_pairs(files, BPE), path, LANGS, cleaning, 1))
        binary = folder.stage("bin", lambda path: _binarise(folder.path, path, args))
        print(stages.table(LANGS, tokens, binary))
        parallel.print_end(folder.path, LANGS)


def _unpack(folder: Path, located: list[Located]) -> dict[str, Any]:
    files = archives.unpack(located, folder)
    for name, path in files.items():
        if path.parent != folder:
            shutil.copyfile(path, folder / name)
    return {"files": len(files)}


def _pairs(folder: Path, prefixes: dict[str, str]) -> dict[str, list[FilePair]]:
    return {s: [FilePair(*(folder / f"{prefix}.{lang}" for lang in LANGS))] for s, prefix in prefixes.items()}


def _binarise(destdir: Path, path: Path, args: argparse.Namespace) -> dict[str, Any]:
    if args.dictionary == "frequent":
        more = ["--nwordssrc", str(WORDS), "--nwordstgt", str(WORDS)]
        return stages.binary_stage(destdir, path, LANGS, args, BOTH, more)
    units = (destdir / "archive" / VOCABULARY).read_text(encoding="utf-8").split()
    listed = path / "listed.txt"
    listed.write_text("".join(f"{unit} 1\n" for unit in dict.fromkeys(units)), encoding="utf-8", newline="\n")
    counts = stages.binary_stage(destdir, path, LANGS, args, BOTH, ["--srcdict", str(listed)])
    listed.unlink()
    return counts
