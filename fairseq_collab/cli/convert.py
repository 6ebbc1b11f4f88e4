"""``fairseq-collab-convert``: a fairseq checkpoint with ordinary heads to collaborative ones, and exactly back.

Arguments, messages and the printed table; the work is ``fairseq_collab.convert``.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Optional, Sequence

from fairseq_collab import __version__
from fairseq_collab.adapters.fairseq_transformer import architecture_flags
from fairseq_collab.checkpoint import load_checkpoint, model_options, save_checkpoint
from fairseq_collab.concatenate import to_concatenated
from fairseq_collab.config import ATTENTIONS
from fairseq_collab.convert import ConversionReport, to_collaborative
from fairseq_collab.errors import CollabError
from fairseq_collab.flags import parse_heads

PROG = "fairseq-collab-convert"


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Convert a checkpoint of fairseq's transformer or transformer_lm to collaborative heads of a "
        "smaller key dim, or (--to-concatenated) a collaborative checkpoint exactly back to a stock one.",
    )
    files = parser.add_argument_group("files")
    files.add_argument("--path", required=True, type=Path, metavar="IN.pt", help="checkpoint to read; never changed")
    files.add_argument("--output", required=True, type=Path, metavar="OUT.pt", help="checkpoint to write")
    files.add_argument("--force", action="store_true", help="replace OUT.pt if it exists")
    files.add_argument("--unsafe-load", action="store_true", help="run code that IN.pt may hold; only if you trust it")
    what = parser.add_argument_group("conversion")
    what.add_argument("--key-dim", type=int, metavar="R", help="shared dims of queries and keys")
    what.add_argument(
        "--attention",
        default=",".join(ATTENTIONS),
        metavar="NAMES",
        help="attentions to convert (default: %(default)s)",
    )
    what.add_argument("--mix-dim", type=int, metavar="P", help="dims that one head mixes (default: the head dim)")
    what.add_argument("--mix-layout", choices=("picked", "dense"), default="picked", help="default: %(default)s")
    what.add_argument("--to-concatenated", action="store_true", help="the way back; needs none of the above")
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Every reason to refuse that needs no look into the checkpoint, told together.

    Raises:
        CollabError: at least one.
    """
    reasons = []
    if args.to_concatenated and (args.key_dim is not None or args.mix_dim is not None):
        reasons.append("--to-concatenated takes neither --key-dim nor --mix-dim")
    if not args.to_concatenated and args.key_dim is None:
        reasons.append("--key-dim is missing: give the shared dims, for example a quarter of the model's width")
    if args.key_dim is not None and args.key_dim < 1:
        reasons.append(f"--key-dim is {args.key_dim}; it must be at least 1")
    if args.mix_dim is not None and args.mix_layout == "dense":
        reasons.append("--mix-dim has no meaning with --mix-layout dense")
    try:
        parse_heads(args.attention)
    except CollabError as error:
        reasons.append(str(error).replace("--collaborative-heads", "--attention").rstrip("."))
    if not args.path.is_file():
        reasons.append(f"there is no checkpoint {args.path}")
    if args.output.exists():
        if args.path.is_file() and os.path.samefile(args.path, args.output):
            reasons.append("--output is --path itself; give another name")
        elif not args.force:
            reasons.append(f"{args.output} exists; give another name, or --force to replace it")
    if reasons:
        raise CollabError("; ".join(reasons))


def table(report: ConversionReport) -> str:
    """One line an attention and the totals."""
    lines = [f"{'attention':<34} {'before':>7} {'key dim':>8} {'mix dim':>8} {'weight error':>13} {'seconds':>8}"]
    for row in report.rows:
        lines.append(
            f"{row['name']:<34} {row['before']:>7} {row['key_dim']:>8} {row.get('mix_dim') or '':>8} "
            f"{row['error']:>13.4f} {row.get('seconds', 0.0):>8.1f}"
        )
    lines.append(f"query and key parameters: {report.key_query_before:,} -> {report.key_query_after:,}")
    lines.append(f"all parameters: {report.parameters_before:,} -> {report.parameters_after:,}")
    return "\n".join(lines)


def convert(args: argparse.Namespace) -> None:
    """The whole command.

    Raises:
        CollabError: see the functions called.
    """
    check_arguments(args)
    state = load_checkpoint(args.path, args.unsafe_load)
    if args.to_concatenated:
        report = to_concatenated(state, str(args.path))
    else:
        kinds = parse_heads(args.attention)
        report = to_collaborative(state, str(args.path), args.key_dim, kinds, args.mix_dim, args.mix_layout)
    save_checkpoint(state, args.output)
    print(table(report))
    options = model_options(state, str(args.output))
    if args.to_concatenated:
        print(f"signature: conv:exact|to:concatenated|version:{__version__}")
        print(f"generate:  fairseq-generate DATA --path {args.output}")
        return
    kinds = "+".join(name for name in ATTENTIONS if name in parse_heads(args.attention))
    mixing = f"P:{args.mix_dim or 'K'}" if args.mix_layout == "picked" else "P:R"
    print(f"signature: conv:cp|R:{args.key_dim}|{mixing}|attn:{kinds}|calib:none|refine:0|version:{__version__}")
    print(f"generate:  fairseq-generate DATA --user-dir fairseq_collab --path {args.output}")
    flags = ["--arch", options.arch, *architecture_flags(options)]
    print(
        f"fine-tune: fairseq-train DATA --user-dir fairseq_collab {' '.join(flags)} --collab-config {args.output} "
        f"--finetune-from-model {args.output}"
    )


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs the command line: 0, 1 after a sentence, 130 when interrupted, with nothing left behind."""
    args = build_parser().parse_args(argv)
    try:
        convert(args)
    except CollabError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
