"""The command line ``python -m data_prep CORPUS ...``: subcommands, error sentences and exit codes.

A corpus is a module of this package, of that name with "_" for "-", with ``HELP`` (one line), ``add_arguments(parser)``
and ``prepare(args)``; to add one, name it in `CORPORA`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from fairseq_collab.cli.ending import run_command

CORPORA = (
    "homeassistant",
    "files",
    "text",
    "iwslt14_de_en",
    "wmt16_en_de_bpe32k",
    "wmt17_en_de",
    "minilm",
    "snippets",
    "snippets-glue",
    "glue",
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line, with one subcommand per corpus."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep", description="Prepare a corpus for fairseq, or fetch what measurements run on."
    )
    subparsers = parser.add_subparsers(dest="corpus", required=True, metavar="CORPUS")
    for name in CORPORA:
        module = importlib.import_module(f"data_prep.{name.replace('-', '_')}")
        subparser = subparsers.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(subparser)
        subparser.set_defaults(prepare=module.prepare)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one preparation: 0 when all is there."""
    args = build_parser().parse_args(argv)
    when_interrupted = "the same command continues with the first unfinished step"
    return run_command(f"data_prep {args.corpus}", lambda: args.prepare(args), when_interrupted)


if __name__ == "__main__":
    sys.exit(main())
