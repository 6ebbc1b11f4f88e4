#!/usr/bin/env python3
"""Fine-tune a pretrained encoder on GLUE, convert it to shared keys, fine-tune it again, and make the table.

    scripts/glue.py table --model DIR --key-dims 768,384,256,128 --tasks all --raw GLUE --out OUT
    scripts/glue.py table --tiny --out OUT
    scripts/glue.py finetune --data DATA --model DIR --out OUT [--from FINETUNED.pt --key-dim R]
    scripts/glue.py evaluate --data DATA --path CHECKPOINT --out OUT

``table`` does everything, from GLUE's files to the table, and skips what it finished before; ``finetune`` and
``evaluate`` are its single steps on data that ``python -m data_prep glue`` made. What follows ``--`` goes to
fairseq-train.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import glue_steps as steps
import glue_table
from glue_models import RECIPES, ROOT, Pretrained, Recipe, find_model
from glue_scores import evaluate, read_preparation
from quickstart_steps import lock

sys.path.insert(0, str(ROOT))

from data_prep.glue_files import TASKS  # noqa: E402
from fairseq_collab.cli.ending import interrupt_when_terminated, run_command  # noqa: E402
from fairseq_collab.errors import CollabError  # noqa: E402
from fairseq_collab.files import write_json, write_text  # noqa: E402

DEFAULT_DIMS = "768,384,256,128"


def build_parser() -> argparse.ArgumentParser:
    """The command line of this script."""
    parser = argparse.ArgumentParser(
        prog="glue.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    finetune = commands.add_parser("finetune", help="one training: of the original, or of a converted checkpoint")
    finetune.add_argument("--data", type=Path, required=True, help="folder that data_prep glue made")
    finetune.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder of the pretrained model")
    finetune.add_argument(
        "--from", dest="source", type=Path, metavar="FINETUNED.pt", help="convert this checkpoint and go on with it"
    )
    finetune.add_argument("--key-dim", type=int, metavar="R", help="shared dims to convert it to")
    finetune.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    scored = commands.add_parser("evaluate", help="scores of a checkpoint, and files for GLUE's server")
    scored.add_argument("--data", type=Path, required=True, help="folder that data_prep glue made")
    scored.add_argument("--path", type=Path, required=True, metavar="CHECKPOINT", help="fine-tuned model")
    scored.add_argument("--gold", type=Path, metavar="FILE", help="labels of test: a header, then index and label")
    scored.add_argument("--seed", type=int, help="the seed it was trained with, for the JSON")
    table = commands.add_parser("table", help="everything, from GLUE's files to the table")
    table.add_argument("--model", type=Path, metavar="DIR", help="folder of the pretrained model")
    table.add_argument("--raw", type=Path, metavar="DIR", help="folder that GLUE's archives were unzipped into")
    table.add_argument("--tasks", help="names joined by commas, or all (default)")
    table.add_argument("--key-dims", metavar="R,...", help=f"shared dims of each row (default: {DEFAULT_DIMS})")
    table.add_argument("--plain-key-dims", metavar="R,...", help="shared dims of rows from the weights alone, too")
    table.add_argument("--epochs-again", type=int, metavar="N", help="of the second fine-tuning (default: --epochs)")
    table.add_argument("--seeds", default="1", metavar="N,...", help="default: %(default)s")
    table.add_argument("--max-length", type=int, default=128, help="longest sequence (default: %(default)s)")
    table.add_argument("--keep-models", action="store_true", help="keep the checkpoints of the rows, too")
    table.add_argument("--tiny", action="store_true", help="a tiny random model on tiny files, to see that it runs")
    for command in (finetune, scored, table):
        command.add_argument("--out", type=Path, required=True, help="output folder")
        command.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    for command in (finetune, table):
        _add_recipe(command)
        command.add_argument("--mix_heads", action="store_true", help="convert (as the paper's code spells it)")
        command.add_argument("--mix_size", type=int, metavar="N", help="the key dim (as the paper's code spells it)")
        command.add_argument(
            "--convert-flags", default="", metavar="'FLAGS'", help="further flags of fairseq-collab-convert"
        )
        command.add_argument("train_flags", nargs="*", metavar="-- FLAGS", help="further flags of fairseq-train")
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("recipe (default: by task, see docs/glue.md)")
    group.add_argument("--lr", type=float, help="peak learning rate")
    group.add_argument("--epochs", type=int, help="passes over train")
    group.add_argument("--batch", type=int, metavar="N", help="sentences a batch")
    group.add_argument("--warmup", type=float, metavar="SHARE", help="share of the updates in which the rate rises")


def recipe_of(task: str, args: argparse.Namespace) -> Recipe:
    """The recipe of a task with what the command line changes."""
    return RECIPES[task].overridden(lr=args.lr, epochs=args.epochs, batch=args.batch, warmup=args.warmup)


def key_dims_of(args: argparse.Namespace) -> list[int]:
    """The key dims that are asked for under either spelling, largest first.

    Raises:
        CollabError: both spellings, one half of the paper's, or no positive numbers.
    """
    given = getattr(args, "key_dims", None) or getattr(args, "key_dim", None)
    if args.mix_heads != (args.mix_size is not None):
        raise CollabError("--mix_heads and --mix_size N belong together; or give the key dim alone")
    if args.mix_heads and given is not None:
        raise CollabError("--mix_size is another spelling of the key dim; give one of them")
    if args.mix_heads:
        given = args.mix_size
    if given is None and args.command == "table":
        given = DEFAULT_DIMS
    return sorted(_numbers(str(given), "the key dims"), reverse=True) if given is not None else []


def _numbers(text: str, what: str) -> list[int]:
    try:
        found = list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise CollabError(f"{what} are {text!r}; give positive whole numbers joined by commas")
    return found


def tasks_of(text: str) -> list[str]:
    """The tasks that are asked for, in GLUE's order.

    Raises:
        CollabError: one of them is unknown.
    """
    names = list(TASKS) if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in TASKS]:
        raise CollabError(f"--tasks has {', '.join(unknown)}; known are all, {', '.join(TASKS)}")
    return [name for name in TASKS if name in names]


def run_finetune(args: argparse.Namespace) -> None:
    """The command ``finetune``."""
    model, task = find_model(args.model), read_preparation(args.data)["task"]
    dims = key_dims_of(args)
    if (args.source is None) != (not dims):
        raise CollabError("--from FINETUNED.pt and --key-dim R belong together: what to convert, and to what")
    recipe, about = recipe_of(task, args), {"task": task, "seed": args.seed}
    with lock(args.out, "glue.py") as lock_fd:
        start, key_dim = model.first, None
        if dims:
            key_dim, converted = dims[0], args.out / "converted"
            extra = shlex.split(args.convert_flags)
            start = model.again(steps.convert(converted, args.source, args.data, key_dim, extra, lock_fd))
            stage = {**about, "key_dim": key_dim, "stage": "converted"}
            show(steps.evaluate_once(converted / steps.MODEL, args.data, args.device, stage))
        folder = args.out / ("finetuned" if dims else "original")
        checkpoint = steps.finetune(folder, args.data, start, recipe, args.seed, args.device, args.train_flags, lock_fd)
        stage = {**about, "key_dim": key_dim, "stage": folder.name}
        show(steps.evaluate_once(checkpoint, args.data, args.device, stage))
    print(f"fine-tuned model: {checkpoint}")


def run_evaluate(args: argparse.Namespace) -> None:
    """The command ``evaluate``."""
    scores, files = evaluate(args.path, args.data, args.device, args.gold)
    result = {"task": read_preparation(args.data)["task"], "checkpoint": str(args.path), "scores": scores}
    if args.seed is not None:
        result["seed"] = args.seed
    for name, text in files.items():
        write_text(args.out / name, text)
    write_json(args.out / steps.RESULT, result)
    show(result)
    print("wrote " + ", ".join(str(args.out / name) for name in (steps.RESULT, *files)))


def show(result: dict[str, Any]) -> None:
    """Print the scores of one checkpoint."""
    where = " ".join(str(result[key]) for key in ("task", "stage", "key_dim") if result.get(key) is not None)
    for split, scores in result["scores"].items():
        figures = ", ".join(f"{name} {value:.2f}" for name, value in scores.items())
        print(f"{where} {split}: {figures}", flush=True)


def run_table(args: argparse.Namespace) -> None:
    """The command ``table``."""
    with lock(args.out, "glue.py") as lock_fd:
        if args.tiny:
            import glue_tiny

            glue_tiny.fill(args, lock_fd)
        if args.model is None or args.raw is None:
            raise CollabError("--model DIR and --raw DIR are missing; or give --tiny to see a table of tiny files")
        tasks, dims, seeds = tasks_of(args.tasks or "all"), key_dims_of(args), _numbers(args.seeds, "the seeds")
        plain = _numbers(args.plain_key_dims, "the plain key dims") if args.plain_key_dims else []
        ways = [(dim, "") for dim in dims] + [(dim, "plain-") for dim in sorted(plain, reverse=True)]
        recipes = {task: recipe_of(task, args) for task in tasks}
        again = {task: recipe.overridden(epochs=args.epochs_again) for task, recipe in recipes.items()}
        model = find_model(args.model)
        data = {task: steps.prepare(task, args.raw, args.out / "data" / task, model, args.max_length) for task in tasks}
        results: list[dict[str, Any]] = []
        for seed in seeds:
            for task in tasks:
                folder = args.out / "runs" / task / f"seed-{seed}"
                both = recipes[task], again[task]
                for result in task_results(folder, data[task], model, both, seed, ways, args, lock_fd):
                    results.append(result)
                    write_table(args.out, results, tasks)
    print(f"\n{(args.out / 'table.md').read_text(encoding='utf-8')}")
    print(f"in {args.out}: table.md, table.json and table.png, and under runs/ every result with its predictions")


def task_results(
    folder: Path,
    data: Path,
    model: Pretrained,
    recipes: tuple[Recipe, Recipe],
    seed: int,
    ways: Sequence[tuple[int, str]],
    args: argparse.Namespace,
    lock_fd: int,
) -> Any:
    """The results of one task and seed, one after the other: of the original, and two for each way to convert it.

    Args:
        recipes: of the first and of the second fine-tuning. ways: key dim, and "plain-" to leave the text out.
    """
    about = {"task": read_preparation(data)["task"], "seed": seed}

    def evaluated(checkpoint: Path, key_dim: int | None, stage: str) -> dict[str, Any]:
        result = steps.evaluate_once(checkpoint, data, args.device, {**about, "key_dim": key_dim, "stage": stage})
        show(result)
        return result

    def finetuned(place: Path, start: list[str], recipe: Recipe) -> Path:
        return steps.finetune(place, data, start, recipe, seed, args.device, args.train_flags, lock_fd)

    original = finetuned(folder / "original", model.first, recipes[0])
    yield evaluated(original, None, "original")
    for dim, way in ways:
        place = folder / f"{way}key-dim-{dim}"
        extra = shlex.split(args.convert_flags)
        converted = steps.convert(place / "converted", original, None if way else data, dim, extra, lock_fd)
        yield evaluated(converted, dim, f"{way}converted")
        again = finetuned(place / "finetuned", model.again(converted), recipes[1])
        yield evaluated(again, dim, f"{way}finetuned")
        if not args.keep_models:
            for path in (converted, again):
                path.unlink(missing_ok=True)


def write_table(out: Path, results: list[dict[str, Any]], tasks: Sequence[str]) -> None:
    """Write the table of what there is so far."""
    rows = glue_table.make_rows(results, tasks)
    write_json(out / "table.json", rows)
    write_text(out / "table.md", glue_table.markdown(rows, tasks))
    glue_table.plot(rows, out / "table.png")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when it is done, 1 after a sentence, 130 when interrupted."""
    args = build_parser().parse_args(argv)
    # steps run in other folders
    for name in ("out", "data", "model", "raw", "source", "path", "gold"):
        if getattr(args, name, None) is not None:
            setattr(args, name, getattr(args, name).resolve())
    os.environ.setdefault("OMP_NUM_THREADS", str(min(4, len(os.sched_getaffinity(0)))))

    interrupt_when_terminated()
    for name in ("fairseq", "matplotlib"):
        logging.getLogger(name).setLevel(os.environ.get("LOGLEVEL", "WARNING").upper())
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    args.device = args.device or _default_device()
    work = {"finetune": run_finetune, "evaluate": run_evaluate, "table": run_table}[args.command]
    return run_command("glue.py", lambda: work(args), "the same command continues where it was")


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
