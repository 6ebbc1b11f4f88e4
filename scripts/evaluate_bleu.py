#!/usr/bin/env python3
"""Translate a binarised test set with fairseq checkpoints and score the result.

    scripts/evaluate_bleu.py DATA --path checkpoint_best.pt
    scripts/evaluate_bleu.py DATA --path a.pt:b.pt                  (an ensemble)
    scripts/evaluate_bleu.py DATA --path SAVE_DIR --average 10      (the mean of its last ten checkpoints)
    scripts/evaluate_bleu.py DATA --compare baseline.pt collab.pt   (with the paired bootstrap test)
    scripts/evaluate_bleu.py --compare a.txt b.txt --ref test.de    (finished translations)

Prints BLEU and chrF of sacreBLEU with their signatures and the speed of decoding. Every sentence of the set counts: a
source line longer than the model takes is cut and counted, and an empty translation is scored as an empty line.
--compound-split adds the BLEU that papers on WMT EN-DE print: tokenised, words cut at hyphens, not smoothed.
Models without collaborative attention are evaluated in the same way. Nothing here trains or prepares data.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLUGIN_DIR = ROOT / "fairseq_collab"
sys.path.insert(0, str(ROOT))

from fairseq_collab.cli.ending import run_command  # noqa: E402
from fairseq_collab.errors import CollabError  # noqa: E402
from fairseq_collab.files import write_json, write_text  # noqa: E402
from fairseq_collab.scoring import (  # noqa: E402
    metrics_for,
    moses_tokenized,
    paired_test,
    score,
    score_compound_split,
)


def build_parser() -> argparse.ArgumentParser:
    """The command line of this script."""
    parser = argparse.ArgumentParser(
        prog="evaluate_bleu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", type=Path, metavar="DATA", help="folder that fairseq-preprocess wrote")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--path", metavar="A.pt[:B.pt]", help="checkpoint, or several of them as an ensemble")
    what.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="two checkpoints (*.pt) or files of translations: scores both and tests B against A",
    )
    parser.add_argument(
        "--average",
        type=int,
        metavar="N",
        help="average the last N checkpoints of the save-dir that --path names, and evaluate what is written there",
    )
    data = parser.add_argument_group("data")
    data.add_argument("--gen-subset", default="test", metavar="SPLIT", help="default: %(default)s")
    data.add_argument("-s", "--source-lang", help="default: the checkpoint's")
    data.add_argument("-t", "--target-lang", help="default: the checkpoint's")
    data.add_argument(
        "--ref",
        type=Path,
        metavar="FILE",
        help="raw references, one a line (default: DATA/../text/SPLIT.LANG if there, else the binarised target side)",
    )
    data.add_argument(
        "--remove-bpe",
        choices=("sentencepiece", "subword_nmt", "none"),
        help="how pieces are joined to words (default: as the dictionary's entries look)",
    )
    data.add_argument("--detokenizer", choices=("none", "moses"), default="none", help="default: %(default)s")
    decode = parser.add_argument_group("decoding")
    decode.add_argument("--user-dir", default=str(PLUGIN_DIR), help="plugin to import (default: fairseq_collab)")
    decode.add_argument("--beam", type=int, default=5, help="default: %(default)s")
    decode.add_argument("--lenpen", type=float, default=1.0, help="default: %(default)s")
    decode.add_argument("--max-len-a", type=float, default=1.2, help="at most A * source length + B tokens (1.2)")
    decode.add_argument("--max-len-b", type=int, default=10, help="default: %(default)s")
    decode.add_argument("--max-tokens", type=int, default=4000, help="source tokens a batch (default: %(default)s)")
    decode.add_argument("--batch-size", type=int, help="sentences a batch (default: by --max-tokens)")
    decode.add_argument("--model-overrides", default="{}", metavar="DICT", help="options to replace in the checkpoint")
    decode.add_argument("--cpu", action="store_true", help="do not use a GPU")
    decode.add_argument("--fp16", action="store_true", help="half precision; needs a GPU")
    score = parser.add_argument_group("scores and output")
    score.add_argument("--tokenize", help="sacreBLEU's tokenizer (default: 13a; zh for Chinese)")
    score.add_argument(
        "--compound-split",
        action="store_true",
        help="also tokenised BLEU with words cut at hyphens; with --detokenizer moses the data's own tokens are scored",
    )
    score.add_argument("--samples", type=int, default=1000, help="bootstrap samples (default: %(default)s)")
    score.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write translations and references there; goes on with what an interrupted run left",
    )
    score.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser


def read_lines(path: Path) -> list[str]:
    """The lines of a text file. Raises CollabError when there is none, or it is not UTF-8."""
    if not path.is_file():
        raise CollabError(f"there is no file {path}")
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise CollabError(f"{path} is not UTF-8 text (byte {error.start}): give a text file") from error
    return [line.strip() for line in (lines[:-1] if lines[-1] == "" else lines)]


def is_checkpoint(path: str) -> bool:
    """Whether an operand of --compare is a checkpoint (or an ensemble), not a file of translations."""
    return all(part.endswith(".pt") for part in path.split(":"))


def find_references(args: argparse.Namespace, target_lang: str, count: int) -> Path | None:
    """The raw references beside DATA, where `python -m data_prep` puts them, if they have `count` lines."""
    path = args.data.resolve().parent / "text" / f"{args.gen_subset}.{target_lang}"
    return path if path.is_file() and len(read_lines(path)) == count else None


def translate(path: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Decode one system: `lines`, `references`, where those came from, `langs` and figures.

    Args:
        name: of its file of translations below --out, beside which an interrupted decode is kept.
    """
    from fairseq_collab.fairseq_modules.translate import LoadedSystem, build_detokenizer, joining_rule

    system = LoadedSystem(path, args)
    dictionary = system.task.tgt_dict
    rule = joining_rule(dictionary.symbols) if args.remove_bpe is None else args.remove_bpe
    text = system.joined(dictionary, None if rule == "none" else rule, lambda line: line)
    detokenize = build_detokenizer(args.detokenizer, system.langs)
    reference_file = args.ref or find_references(args, system.langs[1], len(system.dataset))
    # the data's own tokens are scored where Moses made them and both sides are there
    own_tokens = args.compound_split and args.detokenizer == "moses" and system.dataset.tgt is not None
    tokens = system.references(text) if own_tokens or not reference_file else []
    references = read_lines(reference_file) if reference_file else [detokenize(line).strip() for line in tokens]
    if len(references) != len(system.dataset):
        raise CollabError(
            f"{reference_file} has {len(references)} lines for {len(system.dataset)} sentences of the set"
        )
    lines, figures = system.decode(text, args, args.out / f"{name}.partial" if args.out else None)
    found = {
        "path": path,
        "langs": system.langs,
        "lines": [detokenize(line).strip() for line in lines],
        "references": references,
        "reference_source": str(reference_file) if reference_file else "binarised data",
        **figures,
    }
    if own_tokens:
        score_compound_split(found, lines, tokens, "tok:data")
    return found


def score_all(systems: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any] | None:
    """Add their scores to the systems; returns the paired test if there are two to compare."""
    target_lang = systems[0].get("langs", (None, args.target_lang))[1]
    for system in systems:
        score(system, metrics_for(args.tokenize, target_lang))
        if args.compound_split and "compound_split" not in system:
            sides = (moses_tokenized(system[side], target_lang) for side in ("lines", "references"))
            score_compound_split(system, *sides, f"tok:moses-{target_lang or 'en'}")
    return paired_test(systems, metrics_for(args.tokenize, target_lang), args.samples) if args.compare else None


def report(label: str, system: dict[str, Any]) -> str:
    """What is printed about one system."""
    lines = [f"{label}{system['path']}"]
    for name, title in (("bleu", "BLEU"), ("chrf", "chrF2"), ("compound_split", "BLEU")):
        if name in system:
            lines.append(f"  {title:6}{system[name]['score']:6.2f}   {system[name]['signature']}")
    if "seconds" in system:
        lines.append(
            f"  {system['sentences']:,} sentences in {system['seconds']:.1f} s on {system['device']}: "
            f"{system['tokens_per_second']:,.0f} tokens/s, {system['sentences_per_second']:,.1f} sentences/s"
        )
        lines.append(f"  references: {system['reference_source']}")
    notes = {
        "source_lines_cut": "source lines were longer than the model takes and were cut",
        "unknown_source_tokens": "source tokens are unknown to the dictionary",
        "empty_translations": "translations are empty (and are scored as such)",
    }
    lines += [f"  {system[key]} {note}" for key, note in notes.items() if system.get(key)]
    return "\n".join(lines)


def names_of(systems: Sequence[Any]) -> list[str]:
    """The files of translations below --out."""
    return ["translations.txt"] if len(systems) == 1 else ["translations.A.txt", "translations.B.txt"]


def write_outputs(systems: list[dict[str, Any]], comparison: dict[str, Any] | None, args: argparse.Namespace) -> None:
    """Write translations, references and figures, each file whole or not at all."""
    if args.out is not None:
        write_text(args.out / "references.txt", "".join(f"{line}\n" for line in systems[0]["references"]))
        for name, system in zip(names_of(systems), systems, strict=True):
            write_text(args.out / name, "".join(f"{line}\n" for line in system["lines"]))
            (args.out / f"{name}.partial").unlink(missing_ok=True)
    if args.json is not None:
        kept = [{k: v for k, v in system.items() if k not in ("lines", "references")} for system in systems]
        decoding = {name: getattr(args, name) for name in ("beam", "lenpen", "max_len_a", "max_len_b", "fp16")}
        figures: dict[str, Any] = {"gen_subset": args.gen_subset, "decoding": decoding, "systems": kept}
        if comparison is not None:
            figures["comparison"] = comparison
        write_json(args.json, figures)


def import_plugin(user_dir: str) -> None:
    """Import the plugin and, if another one is given, that one as well."""
    try:
        from fairseq import utils

        import fairseq_collab.models  # noqa: F401
    except ImportError as error:
        raise CollabError(
            f"fairseq cannot be imported ({error}): use the Python of the environment it is in"
        ) from error
    if Path(user_dir).resolve() != PLUGIN_DIR:
        if not Path(user_dir).is_dir():
            raise CollabError(f"there is no folder {user_dir} for --user-dir")
        utils.import_user_module(Namespace(user_dir=user_dir))


def averaged(args: argparse.Namespace) -> Path:
    """The checkpoint that `--average` asks for. Raises CollabError when --path is no save-dir with that many."""
    from fairseq_collab.averaging import average_last

    if args.compare or ":" in args.path:
        raise CollabError("--average goes with --path SAVE_DIR and one system")
    return average_last(args.path, args.average)


def run(args: argparse.Namespace) -> None:
    """Everything after the command line was read."""
    paths = args.compare or [args.path]
    if args.average is not None:
        paths = [str(averaged(args))]
    if args.compound_split and args.detokenizer == "none":
        moses_tokenized([], None)  # a missing package is said before anything is decoded
    if args.compare and is_checkpoint(paths[0]) != is_checkpoint(paths[1]):
        raise CollabError("--compare takes two checkpoints (*.pt) or two files of translations, not one of each")
    if is_checkpoint(paths[0]) or not args.compare:
        import_plugin(args.user_dir)
        systems = [translate(path, name, args) for path, name in zip(paths, names_of(paths), strict=True)]
        if len(systems) == 2 and systems[0]["references"] != systems[1]["references"]:
            raise CollabError("the two systems have different references: give the raw ones with --ref")
    else:
        if args.ref is None:
            raise CollabError("two files of translations need their references: give --ref FILE")
        references = read_lines(args.ref)
        systems = [{"path": path, "lines": read_lines(Path(path)), "references": references} for path in paths]
        for system in systems:
            if len(system["lines"]) != len(references):
                raise CollabError(f"{system['path']} has {len(system['lines'])} lines, {args.ref} {len(references)}")
    comparison = score_all(systems, args)
    write_outputs(systems, comparison, args)
    for number, system in enumerate(systems):
        print(report(f"{'AB'[number]}: " if args.compare else "", system))
    for name, result in (comparison or {}).items():
        print(f"B - A  {name:5}{result['difference']:+6.2f}   p = {result['p_value']:.4f}   {result['signature']}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when all was scored, 1 after a sentence on standard error."""
    args = build_parser().parse_args(argv)
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    logging.basicConfig(level=os.environ.get("LOGLEVEL", "WARNING").upper(), stream=sys.stderr)
    kept = "with the same --out it goes on where it was" if args.out else "nothing was written"
    return run_command("evaluate_bleu.py", lambda: run(args), kept)


if __name__ == "__main__":
    sys.exit(main())
