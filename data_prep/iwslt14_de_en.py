"""IWSLT 2014 German-English: transcripts of talks, prepared as in fairseq's own example (prepare-iwslt14.sh).

Tokenised by Moses' rules (sacremoses), pairs of 1 to 175 tokens a side and at most 1.5 times as many on one side as on
the other, lowercased; each 23rd of them is valid. Test is dev2010, dev2012 (TEDX), tst2010, tst2011 and tst2012. Joint
BPE of 10,000 pieces, a dictionary for each language; --joined both for one dictionary, which --share-all-embeddings of
fairseq-train needs. The published counts of that example are 160,239 training, 7,283 valid and 6,750 test pairs.
Two things differ from it: sacremoses stands in for the Perl tokenizer, and sentencepiece's BPE for subword-nmt's, so
pieces are joined by --remove-bpe sentencepiece.

The archive is de-en.tgz (TED talks, CC BY-NC-ND) from the address in fairseq's example. No digest is published: the MD5
that is checked was seen by another project.

DESTDIR, when done:
  options.json            what it was made with; other options are refused
  raw/{train,test}.LANG   the sentences as they are in the archive
  text/SPLIT.LANG         tokenised, lowercased and cleaned: what the model sees, and is scored against by convention
                          (evaluate_bleu.py --tokenize none)
  pieces/SPLIT.LANG       the same as pieces, with spm.model
  bin/                    what fairseq-train and fairseq-generate read, in both directions
SPLIT is train, valid or test; LANG is de or en.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from data_prep import archives, stages
from data_prep.archives import Archive
from data_prep.bitext import FilePair
from data_prep.cleaning import Cleaning
from data_prep.downloads import RemoteFile
from data_prep.markup import write_segments, write_talks
from data_prep.subwords import SUBWORDS, Subwords

HELP = "talks, German-English, as in fairseq's example"
LANGS = ("de", "en")
TRAIN = "train.tags.de-en"
TEST = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
VALID_EVERY = 23
ARCHIVE = Archive(
    RemoteFile(
        "de-en.tgz",
        "https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz",
        digest="md5:10936dfdf616504ddbd844e91b94ef4a",
    ),
    tuple(f"de-en/{TRAIN}.{lang}" for lang in LANGS)
    + tuple(f"de-en/IWSLT14.{name}.de-en.{lang}.xml" for name in TEST for lang in LANGS),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this corpus."""
    stages.add_folder_arguments(parser)
    archives.add_arguments(parser)
    cleaning = Cleaning("moses", split_dashes=False, lowercase=True, max_length=175, max_ratio=1.5)
    stages.add_text_arguments(parser, cleaning, Subwords(vocab_size=10_000, joined=SUBWORDS))


def prepare(args: argparse.Namespace) -> None:
    """Make everything under ``args.destdir`` and print the table of counts.

    Raises:
        CollabError: bad option, failed download, damaged archive, or a folder of other options.
    """
    stages.prepare_natural(
        args,
        {"corpus": "iwslt14_de_en"},
        LANGS,
        lambda: _find(args),
        names=("raw", "text"),
        valid_every=VALID_EVERY,
    )


def _find(args: argparse.Namespace) -> stages.Unpack:
    located = archives.locate([ARCHIVE], args, "iwslt14_de_en")

    def unpack(scratch: Path) -> stages.Splits:
        paths = archives.unpack(located, scratch)
        train = [write_talks(paths[f"{TRAIN}.{lang}"], scratch / f"train.{lang}") for lang in LANGS]
        test = []
        for name in TEST:
            sides = (
                write_segments(
                    [paths[f"IWSLT14.{name}.de-en.{lang}.xml"]], scratch / f"{name}.{lang}", replace=("\u2019", "'")
                )
                for lang in LANGS
            )
            test.append(FilePair(*sides))
        return {"train": [FilePair(*train)], "test": test}

    return unpack
