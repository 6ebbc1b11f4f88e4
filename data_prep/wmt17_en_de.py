"""WMT 2017 English-German: Europarl v7, Common Crawl and News Commentary v12, as in the translation task of MLBench.

MLBench's task 4b (Transformer, WMT17 EN-DE) trains on these three corpora, takes newstest2013 of WMT 2017's dev.tgz as
its dev set and newstest2014 (3,003 sentences) as its test set, on which it also validates, with about 32,768 subwords
shared by both languages, and leaves out sentences of more than 80 subwords. It cuts text into subwords by a fixed
dictionary of tensor2tensor, without a tokenizer and without cleaning. Here newstest2013 is valid and newstest2014 is
test; text is tokenised by Moses' rules (sacremoses), pairs of more than 175 tokens or with one side more than 1.5 times
as long are dropped, and the subwords are a joint BPE of 32,000 pieces, trained by sentencepiece. --tokenizer none
--max-length 0 --max-ratio 0 --vocab-size 32768 comes closest to MLBench. --rapid2016 adds the fourth corpus of the
campaign.

Downloads of 1.8 GB from statmt.org, checked by the digests that TensorFlow Datasets and sacreBLEU publish.

DESTDIR, when done:
  options.json            what it was made with; other options are refused
  text/SPLIT.LANG         the sentences, as references for scoring
  tokens/SPLIT.LANG       tokenised and cleaned
  pieces/SPLIT.LANG       the same as pieces, with spm.model
  bin/                    what fairseq-train and fairseq-generate read, in both directions
SPLIT is train, valid or test; LANG is en or de. Score with evaluate_bleu.py --detokenizer moses.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from data_prep import archives, stages
from data_prep.archives import Archive
from data_prep.bitext import FilePair
from data_prep.cleaning import Cleaning
from data_prep.downloads import RemoteFile
from data_prep.markup import write_segments
from data_prep.subwords import Subwords

HELP = "news and parliament, English-German, as in MLBench (1.8 GB download)"
LANGS = ("en", "de")


def _plain(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{lang}" for lang in LANGS)


NEWS_COMMENTARY = Archive(
    RemoteFile(
        "training-parallel-nc-v12.tgz",
        "https://data.statmt.org/wmt17/translation-task/training-parallel-nc-v12.tgz",
        168_591_139,
        "sha256:2b45f30ef1d550d302fd17dd3a5cbe19134ccc4c2cf50c2dae534aee600101a2",
    ),
    _plain("training/news-commentary-v12.de-en"),
)
COMMON_CRAWL = Archive(
    RemoteFile(
        "training-parallel-commoncrawl.tgz",
        "https://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
        918_311_367,
        "sha256:c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
    ),
    _plain("commoncrawl.de-en"),
)
EUROPARL = Archive(
    RemoteFile(
        "training-parallel-europarl-v7.tgz",
        "https://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz",
        657_632_379,
        "sha256:0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
    ),
    _plain("training/europarl-v7.de-en"),
)
RAPID = Archive(
    RemoteFile(
        "rapid2016.tgz",
        "https://data.statmt.org/wmt18/translation-task/rapid2016.tgz",
        161_050_516,
        "sha256:41557dd5d8f0ed3a6d98bce3b798b1a9d3b68361eb99d902329ddbb943a6b55a",
    ),
    _plain("rapid2016.de-en"),
)
DEV = Archive(
    RemoteFile(
        "dev.tgz",
        "https://data.statmt.org/wmt17/translation-task/dev.tgz",
        digest="md5:9b1aa63c1cf49dccdd20b962fe313989",
    ),
    _plain("dev/newstest2013"),
)
TEST = Archive(
    RemoteFile(
        "test-full.tgz",
        "https://www.statmt.org/wmt14/test-full.tgz",
        digest="md5:a8cd784e006feb32ac6f3d9ec7eb389a",
    ),
    ("test-full/newstest2014-deen-src.en.sgm", "test-full/newstest2014-deen-ref.de.sgm"),
)
TRAIN = (NEWS_COMMENTARY, COMMON_CRAWL, EUROPARL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this corpus."""
    parser.add_argument("--rapid2016", action="store_true", help="also train on press releases of the EU (Rapid 2016)")
    stages.add_folder_arguments(parser)
    archives.add_arguments(parser)
    stages.add_text_arguments(parser, Cleaning("moses", max_length=175, max_ratio=1.5), Subwords(vocab_size=32_000))


def prepare(args: argparse.Namespace) -> None:
    """Make everything under ``args.destdir`` and print the table of counts.

    Raises:
        CollabError: bad option, failed download, damaged archive, or a folder of other options.
    """
    options = {"corpus": "wmt17_en_de", "rapid2016": args.rapid2016}
    stages.prepare_natural(args, options, LANGS, lambda: _find(args))


def _find(args: argparse.Namespace) -> stages.Unpack:
    train = (*TRAIN, RAPID) if args.rapid2016 else TRAIN
    located = archives.locate((*train, DEV, TEST), args, "wmt17_en_de")

    def unpack(scratch: Path) -> stages.Splits:
        paths = archives.unpack(located, scratch)
        test = (
            write_segments([paths[Path(member).name]], scratch / f"test.{lang}")
            for member, lang in zip(TEST.members, LANGS, strict=True)
        )
        return {
            "train": [_pair(archive, paths) for archive in train],
            "valid": [_pair(DEV, paths)],
            "test": [FilePair(*test)],
        }

    return unpack


def _pair(archive: Archive, paths: dict[str, Path]) -> FilePair:
    return FilePair(*(paths[Path(member).name] for member in archive.members))
