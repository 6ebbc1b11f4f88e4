"""Measures a part of the package against its peers: ``python scripts/benchmark.py SUITE [--json OUT] [--plot DIR]``.

Prints what it ran on and a table; figures are ratios of things measured in one run where there is a peer. A suite is
a module of ``benchmarks`` with ``HELP`` (one line), ``add_arguments(parser)`` and ``run(args) -> rows``, and
``plot(rows, folder)`` where there is a picture; to add one, name it in `SUITES`.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import common  # noqa: E402

from fairseq_collab.cli.ending import run_command  # noqa: E402
from fairseq_collab.files import write_json  # noqa: E402

SUITES = ("decompose", "distortion", "convert", "attention", "variants", "scaling", "train", "generate")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line, with one subcommand per suite."""
    parser = argparse.ArgumentParser(prog="benchmark.py", description="Measure a part of the package against peers.")
    subparsers = parser.add_subparsers(dest="suite", required=True, metavar="SUITE")
    for name in SUITES:
        module = importlib.import_module(f"benchmarks.{name}")
        subparser = subparsers.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        subparser.add_argument("--json", type=Path, metavar="OUT", help="write the rows there")
        subparser.add_argument("--plot", type=Path, metavar="DIR", help="draw pictures there, where the suite has any")
        subparser.add_argument("--quick", action="store_true", help="less work, to see that it runs; not to be cited")
        module.add_arguments(subparser)
        subparser.set_defaults(module=module)
    return parser


def measure(args: argparse.Namespace) -> None:
    """Runs one suite, prints its table and writes what was asked for."""
    host = common.host_facts()
    print(common.host_line(host), flush=True)
    rows = args.module.run(args)
    print(common.table(rows))
    if args.json is not None:
        write_json(args.json, [{**row, "quick": args.quick, "host": host} for row in rows])
        print(f"wrote {args.json}")
    if args.plot is not None and hasattr(args.module, "plot"):
        args.plot.mkdir(parents=True, exist_ok=True)
        for path in args.module.plot(rows, args.plot):
            print(f"wrote {path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line: 0 when the suite was measured, targets met or not."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=os.environ.get("LOGLEVEL", "WARNING").upper(), stream=sys.stderr)
    return run_command(f"benchmark {args.suite}", lambda: measure(args), "nothing was written")


if __name__ == "__main__":
    sys.exit(main())
