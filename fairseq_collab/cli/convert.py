"""``fairseq-collab-convert``: a fairseq checkpoint with ordinary heads to collaborative ones, and back.

Arguments, messages and the order of things; the work is ``fairseq_collab.convert`` and ``fairseq_collab.concatenate``.
"""

import argparse
import logging
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any, Optional, Sequence

from fairseq_collab import convert
from fairseq_collab.adapters.fairseq_options import architecture_flags
from fairseq_collab.adapters.fairseq_task import TRANSLATION, task_flags, task_name
from fairseq_collab.adapters.fairseq_transformer import model_name
from fairseq_collab.adapters.hf_encoder import is_hf_encoder
from fairseq_collab.checkpoint import load_checkpoint, model_options, save_checkpoint, task_options, use_ema
from fairseq_collab.cli.ending import run_command
from fairseq_collab.concatenate import to_concatenated
from fairseq_collab.config import ATTENTIONS
from fairseq_collab.decomposition.methods import METHODS
from fairseq_collab.errors import CollabError, one_a_line
from fairseq_collab.flags import parse_heads
from fairseq_collab.report import ConversionReport

PROG = "fairseq-collab-convert"
BATCH = "--batch-size 8"  # fairseq has no default
TRAINING = f"--optimizer adam --lr 1e-05 {BATCH}"  # the least that fairseq-train needs, to begin with


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Convert a checkpoint of fairseq's transformer, transformer_lm, RoBERTa or BART to collaborative "
        "heads of a smaller key dim, or (--to-concatenated) a collaborative checkpoint back to a stock one.",
    )
    files = parser.add_argument_group("files")
    files.add_argument("--path", required=True, type=Path, metavar="IN.pt", help="checkpoint to read; never changed")
    files.add_argument("--output", required=True, type=Path, metavar="OUT.pt", help="checkpoint to write")
    files.add_argument("--force", action="store_true", help="replace OUT.pt if it exists")
    files.add_argument("--unsafe-load", action="store_true", help="run code that IN.pt may hold; only if you trust it")
    files.add_argument("--ema", action="store_true", help="convert the moving average that --store-ema kept in IN.pt")
    what = parser.add_argument_group("what to convert to (one of the first three)")
    what.add_argument("--key-dim", type=int, metavar="R", help="shared dims of queries and keys, in every attention")
    what.add_argument(
        "--budget", type=float, metavar="F", help="share of the query and key parameters to keep; R by layer"
    )
    what.add_argument("--max-error", type=float, metavar="E", help="relative error allowed; R by layer")
    what.add_argument(
        "--attention",
        default=",".join(ATTENTIONS),
        metavar="NAMES",
        help="attentions to convert (default: %(default)s)",
    )
    what.add_argument("--mix-dim", type=int, metavar="P", help="dims that one head mixes (default: the head dim)")
    what.add_argument("--mix-layout", choices=("picked", "dense"), default="picked", help="default: %(default)s")
    what.add_argument("--to-concatenated", action="store_true", help="the way back; needs none of the above")
    what.add_argument(
        "--to-hf",
        action="store_true",
        help="write a checkpoint of bert_collab, distilbert_collab or albert_collab as a folder for transformers",
    )
    what.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer to put beside it")
    how = parser.add_argument_group("how")
    how.add_argument("--method", choices=METHODS, default="cp", help="decomposition (default: %(default)s)")
    how.add_argument(
        "--calibrate", metavar="DATA_BIN", help="folder of fairseq-preprocess whose train split shows real inputs"
    )
    how.add_argument("--calibrate-sentences", type=int, default=512, metavar="N", help="default: %(default)s")
    how.add_argument(
        "--refine-steps", type=int, default=0, metavar="N", help="training of each layer on the calibration text"
    )
    how.add_argument(
        "--distill-steps", type=int, default=0, metavar="N", help="training of the whole model on it, after that"
    )
    how.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    how.add_argument("--device", default="cpu", help="where models run: cpu, cuda, cuda:1 (default: %(default)s)")
    shown = parser.add_argument_group("what to show")
    shown.add_argument("--data", metavar="DATA_BIN", help="folder for the loss before and after")
    shown.add_argument("--gen-subset", default="valid", metavar="SPLIT", help="split of --data (default: %(default)s)")
    shown.add_argument("--bleu", action="store_true", help="translate that split, too")
    shown.add_argument("--report", type=Path, metavar="DIR", help="write all figures as JSON, and plots, there")
    return parser


def check_arguments(args: argparse.Namespace) -> list[str]:
    """Every reason to refuse that needs no look into the checkpoint."""
    reasons = []
    targets = [name for name in ("key_dim", "budget", "max_error") if getattr(args, name) is not None]
    if args.to_concatenated or args.to_hf:
        verb = "--to-hf" if args.to_hf else "--to-concatenated"
        others = [*targets, *(name for name in ("mix_dim", "calibrate", "data") if getattr(args, name) is not None)]
        others += ["to_concatenated"] if args.to_hf and args.to_concatenated else []
        reasons += [f"{verb} takes no --{name.replace('_', '-')}" for name in others]
    elif not targets:
        reasons.append(
            "--key-dim is missing: give the shared dims, for example a quarter of the model's width; "
            "or --budget or --max-error"
        )
    elif len(targets) > 1:
        reasons.append("--key-dim, --budget and --max-error exclude each other; give one")
    for name in ("key_dim", "calibrate_sentences"):
        value, least = getattr(args, name), 1 if name == "key_dim" else 2
        if value is not None and value < least:
            reasons.append(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    for name in ("refine_steps", "distill_steps"):
        if getattr(args, name) < 0:
            reasons.append(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 0")
        elif getattr(args, name) and args.calibrate is None:
            reasons.append(f"--{name.replace('_', '-')} needs text to train on: give --calibrate DATA_BIN")
    for name in ("budget", "max_error"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 1:
            reasons.append(f"--{name.replace('_', '-')} is {value:g}; it must be a share between 0 and 1")
        if value is not None and args.mix_dim is not None:
            reasons.append(f"--mix-dim cannot be combined with --{name.replace('_', '-')}; leave it out")
    if args.mix_dim is not None and args.mix_layout == "dense":
        reasons.append("--mix-dim has no meaning with --mix-layout dense")
    if args.bleu and args.data is None:
        reasons.append("--bleu needs text to translate: give --data DATA_BIN")
    if args.data is not None and not Path(args.data).is_dir():
        reasons.append(f"--data {args.data}: there is no such folder; make it with fairseq-preprocess")
    if args.calibrate is not None and not Path(args.calibrate).is_dir():
        reasons.append(f"--calibrate {args.calibrate}: there is no such folder; make it with fairseq-preprocess")
    if reason := _device_reason(args.device):
        reasons.append(reason)
    try:
        parse_heads(args.attention)
    except CollabError as error:
        reasons.append(str(error).replace("--collaborative-heads", "--attention"))
    if args.tokenizer is not None and not args.to_hf:
        reasons.append("--tokenizer belongs to --to-hf; leave it out")
    if args.to_hf:
        if args.output.exists() and (not args.output.is_dir() or any(args.output.iterdir())):
            reasons.append(f"--output {args.output} is not empty; give a new folder")
    elif args.output.is_dir():
        reasons.append(f"--output {args.output} is a folder; give the name of a file")
    elif args.output.exists():
        if args.path.is_file() and os.path.samefile(args.path, args.output):
            reasons.append("--output is --path itself; give another name")
        elif not args.force:
            reasons.append(f"{args.output} exists; give another name, or --force to replace it")
    return reasons


def _device_reason(device: str) -> Optional[str]:
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        return f"--device {device} is no device; give cpu or cuda"
    if kind == "cuda" and not torch.cuda.is_available():
        return f"--device {device}: there is no GPU that torch can use here; leave it out"
    return None


def _space_reason(state: dict[str, Any], output: Path) -> Optional[str]:
    folder = next(parent for parent in output.absolute().parents if parent.exists())
    weights = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in state["model"].values()}
    needed, free = sum(weights.values()), shutil.disk_usage(folder).free
    if needed <= free:
        return None
    return f"{output} needs up to {needed:,} bytes and {folder} has {free:,} left; make room or give another folder"


def request_of(args: argparse.Namespace) -> convert.Request:
    """What the arguments ask for."""
    heads = parse_heads(args.attention)
    return convert.Request(
        key_dim=args.key_dim,
        budget=args.budget,
        max_error=args.max_error,
        kinds=tuple(kind for kind in ATTENTIONS if kind in heads),
        mix_dim=args.mix_dim,
        mix_layout=args.mix_layout,
        method=args.method,
        calibrate=args.calibrate,
        sentences=args.calibrate_sentences,
        refine_steps=args.refine_steps,
        distill_steps=args.distill_steps,
        seed=args.seed,
        device=args.device,
        curves=args.report is not None,
    )


def run(args: argparse.Namespace) -> None:
    """The whole command.

    Raises:
        CollabError: see the functions called.
    """
    reasons, state = check_arguments(args), None
    try:
        state = load_checkpoint(args.path, args.unsafe_load)
        if args.ema:
            use_ema(state, str(args.path))
    except CollabError as error:
        reasons.append(str(error))
    request = None if any("--attention" in reason for reason in reasons) else request_of(args)
    if state is not None:
        reasons += [reason for reason in [_space_reason(state, args.output)] if reason]
        reasons += _hf_reasons(args, is_hf_encoder(model_options(state, str(args.path))))
        if not args.to_concatenated and not args.to_hf and request is not None:
            reasons += convert.check(state, str(args.path), request)
        if args.data is not None and Path(args.data).is_dir() and not reasons:
            from fairseq_collab.fairseq_modules.data_folder import check_data

            reasons += check_data(state, args.data, "--data")
        task = task_name(task_options(state))
        if args.bleu and task not in TRANSLATION:
            reasons.append(f"--bleu needs a model that translates, this one was trained for {task}; leave it out")
    if reasons:
        raise CollabError(one_a_line(reason.rstrip(".") for reason in reasons))
    if args.to_hf:
        from fairseq_collab.fairseq_modules.hf_export import export

        print(f"wrote:     {export(state, str(args.path), args.output, args.tokenizer)}")
        return
    if args.to_concatenated:
        report = to_concatenated(state, str(args.path))
    else:
        _evaluate(args, state, args.path, before := ConversionReport())
        report = convert.to_collaborative(state, str(args.path), request, checked=True)
        report.bits_per_token, report.bleu = before.bits_per_token, before.bleu
    save_checkpoint(state, args.output)
    report.file_bytes = [args.path.stat().st_size, args.output.stat().st_size]
    _evaluate(args, state, args.output, report)
    print(report.table())
    print(f"signature: {report.signature}")
    if args.report is not None:
        print("report:    " + " ".join(str(path) for path in report.save(args.report)))
    _print_commands(args, state)


def _hf_reasons(args: argparse.Namespace, is_one: bool) -> list[str]:
    """What the arguments ask for that an encoder of transformers has not, or only such an encoder has."""
    if not is_one:
        return ["--to-hf is for checkpoints of bert_collab, distilbert_collab and albert_collab"] if args.to_hf else []
    reasons = []
    if args.to_concatenated:
        reasons.append("--to-concatenated is not for encoders of transformers; --to-hf writes a folder")
    if args.data is not None or args.bleu:
        reasons.append("--data and --bleu are not for encoders of transformers; use fairseq-validate")
    return reasons


def _evaluate(args: argparse.Namespace, state: dict[str, Any], path: Path, report: ConversionReport) -> None:
    if args.data is None:
        return
    from fairseq_collab.fairseq_modules.observed import FairseqModel
    from fairseq_collab.fairseq_modules.translate import corpus_bleu

    model = FairseqModel(state, args.data, args.device)
    report.bits_per_token.append(model.bits_per_token(args.gen_subset))
    report.unit = model.unit
    if args.bleu:
        report.bleu.append(corpus_bleu(str(path), args.data, args.gen_subset, args.device == "cpu"))
    report.settings["eval"] = args.gen_subset


def _print_commands(args: argparse.Namespace, state: dict[str, Any]) -> None:
    options, task = model_options(state, str(args.output)), task_options(state)
    data = args.data or args.calibrate or "DATA"
    plugin = "" if args.to_concatenated else " --user-dir fairseq_collab"
    name, shown = task_name(task), " ".join(["", *task_flags(task)])
    use = "generate" if name in TRANSLATION else "validate"
    if name == "language_modeling":
        use, shown = "eval-lm", ""
    elif use == "validate":
        shown += f" {BATCH}"
    # without the plugin, torch 2.6 and newer refuses the argparse.Namespace that every checkpoint of fairseq holds
    trust = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 " if args.to_concatenated and _refuses_namespaces() else ""
    print(f"use:       {trust}fairseq-{use} {data}{plugin} --path {args.output}{shown}")
    if args.to_concatenated:
        return
    if is_hf_encoder(options):
        # the checkpoint brings the configuration of its model
        flags = " ".join(["--arch", options.arch, *task_flags(task)])
        print(f"fine-tune: fairseq-train {data}{plugin} {flags} --finetune-from-model {args.output} {TRAINING}")
        return
    flags = " ".join([*architecture_flags(options, model_name(options)), *task_flags(task)])
    print(
        f"fine-tune: fairseq-train {data} --user-dir fairseq_collab {flags} --collab-config {args.output} "
        f"--finetune-from-model {args.output} {TRAINING}"
    )


def _refuses_namespaces() -> bool:
    import torch

    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 6)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs the command line: 0, 1 after a sentence, 130 when interrupted, with nothing left behind."""
    args = build_parser().parse_args(argv)
    warnings.filterwarnings("ignore", message=".*(pin_memory|mismatched key_padding_mask).*")
    logging.basicConfig(level=os.environ.get("LOGLEVEL", "WARNING").upper(), stream=sys.stderr)
    return run_command(PROG, lambda: run(args), "nothing was written")


if __name__ == "__main__":
    sys.exit(main())
