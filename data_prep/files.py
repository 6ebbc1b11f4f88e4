"""Your own parallel text: files of sentences, one a line, whose lines translate each other.

--train, --valid and --test name files without their endings: --train data/news data/web with --source-lang en and
--target-lang de reads data/news.en, data/news.de, data/web.en and data/web.de, in this order. Files are UTF-8.

DESTDIR, when done:
  options.json            what it was made with, the digest of each file included; other options are refused
  text/SPLIT.LANG         the sentences, white space collapsed, as references for scoring
  tokens/SPLIT.LANG       the same, tokenised and cleaned as asked
  pieces/SPLIT.LANG       the same as pieces, with spm.model (spm.LANG.model with --joined none)
  bin/                    what fairseq-train and fairseq-generate read
SPLIT is train, valid or test. Training pairs are dropped where a side is empty, not UTF-8, too long or too unequal,
and counted by reason; valid and test keep every line.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from data_prep import stages
from data_prep.bitext import FilePair, check_pairs
from data_prep.cleaning import Cleaning
from data_prep.common import sha256_of
from data_prep.parallel import SPLITS
from data_prep.subwords import Subwords
from fairseq_collab.errors import CollabError

HELP = "your own parallel text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this corpus."""
    for split in SPLITS:
        parser.add_argument(
            f"--{split}", required=True, nargs="+", metavar="PREFIX", help="files PREFIX.SOURCE and PREFIX.TARGET"
        )
    parser.add_argument("--source-lang", required=True, metavar="SOURCE", help="ending of the source files, e.g. en")
    parser.add_argument("--target-lang", required=True, metavar="TARGET", help="ending of the target files, e.g. de")
    stages.add_folder_arguments(parser)
    stages.add_text_arguments(parser, Cleaning(max_length=250, max_ratio=1.5), Subwords(vocab_size=8000))


def prepare(args: argparse.Namespace) -> None:
    """Make everything under ``args.destdir`` and print the table of counts.

    Raises:
        CollabError: bad option, missing file, files of different numbers of lines, or a folder of other options.
    """
    langs = (args.source_lang, args.target_lang)
    for flag, lang in zip(("--source-lang", "--target-lang"), langs, strict=True):
        if not re.fullmatch(r"\w+", lang):
            raise CollabError(
                f"{flag} {lang}: fairseq takes letters, digits and _ only; rename the files (zh-CN: zh_CN)"
            )
    if langs[0] == langs[1]:
        raise CollabError(f"--source-lang and --target-lang are both {langs[0]}")
    splits = {
        split: [FilePair(*(Path(f"{prefix}.{lang}") for lang in langs)) for prefix in getattr(args, split)]
        for split in SPLITS
    }
    options = {"corpus": "files", "source_lang": langs[0], "target_lang": langs[1]}
    for split, pairs in splits.items():
        check_pairs(pairs)
        options[split] = [sha256_of(path) for pair in pairs for path in vars(pair).values()]
    stages.prepare_natural(args, options, langs, lambda: lambda _: splits)
