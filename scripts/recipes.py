#!/usr/bin/env python3
"""Run a recipe: data, training on any number of processes and machines, averaging, decoding, scores.

    scripts/train_wmt.sh, train_mlbench.sh, train_iwslt.sh, pretrain_roberta.sh [--tiny] [flags of fairseq-train]

Each finished step is kept, and the same command goes on with the first unfinished one. Settings come from the
environment, in the names of the paper's runs; what the recipes are is in ``recipe_settings.py``, what the steps do in
``recipe_steps.py``.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import recipe_steps as steps
from quickstart_steps import lock, say
from recipe_settings import RECIPES, ROOT, Recipe, tiny
from recipe_steps import Run

from fairseq_collab.cli.ending import interrupt_when_terminated, run_command
from fairseq_collab.config import LAYOUTS
from fairseq_collab.errors import CollabError
from fairseq_collab.files import differences, read_json, write_json
from fairseq_collab.flags import parse_heads

OWNED = {"--save-dir": "SAVE_DIR", "--seed": "SEED", "--update-freq": "NPROC_PER_NODE or MAX_TOKENS"}
OWNED |= {"--key-dim": "KEY_DIM", "--collaborative-heads": "COLAB", "--mix-dim": "MIX_DIM"}
OWNED |= {"--mix-layout": "MIX_LAYOUT", "--max-tokens": "MAX_TOKENS", "--batch-size": "MAX_SENTENCES"}


def build_parser() -> argparse.ArgumentParser:
    """The command line of this script; what it does not know goes to ``fairseq-train``."""
    parser = argparse.ArgumentParser(
        prog="recipes.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--tiny", action="store_true", help="the whole recipe, small, on a small real corpus")
    parser.add_argument("--archive", type=Path, help="with --tiny: downloaded package of the corpus")
    parser.add_argument("--sha256", help="with --tiny: SHA-256 of the archive (default: the pinned one)")
    return parser


def number(name: str, default: int, least: int) -> int:
    """A whole number from the environment. Raises CollabError when it is none, or below `least`."""
    text = os.environ.get(name) or str(default)
    if not re.fullmatch("[0-9]+", text) or int(text) < least:
        raise CollabError(f"{name} is {text!r}: give a whole number from {least} on")
    return int(text)


def one_of(name: str, known: Sequence[str]) -> str | None:
    """A word from the environment, None where there is none. Raises CollabError when it is not known."""
    text = os.environ.get(name) or None
    if text is not None and text not in known:
        raise CollabError(f"{name} is {text!r}: give one of {', '.join(known)}")
    return text


def on_cpu(extra: Sequence[str]) -> bool:
    """Whether the training runs without GPUs."""
    import torch

    return "--cpu" in extra or not torch.cuda.is_available()


def processes(cpu: bool) -> tuple[int, int]:
    """Processes on each machine, and machines, as ``launch.sh`` will see them."""
    import torch

    each = number("NPROC_PER_NODE", 1 if cpu else torch.cuda.device_count(), 1)
    slurm = number("SLURM_STEP_NUM_NODES", 1, 1) if os.environ.get("SLURM_STEP_ID") else 1
    return each, number("NNODES", slurm, 1)


def plan(args: argparse.Namespace, extra: list[str]) -> Run:
    """The run that the command line and the environment ask for.

    Raises:
        CollabError: a variable out of range or misspelt, a flag that a variable sets, or a batch that cannot be
            divided.
    """
    for argument in extra:
        if variable := OWNED.get(argument.split("=")[0]):
            raise CollabError(f"{argument.split('=')[0]} is set by the recipe: leave it out and set {variable}")
    recipe: Recipe = tiny(args.recipe) if args.tiny else RECIPES[args.recipe]
    share = number(recipe.batch.variable, recipe.batch.share, 1)
    recipe = replace(recipe, batch=replace(recipe.batch, share=share))
    average = number("AVERAGE", recipe.average, 0)
    words = [part for word in (*recipe.flags, *extra, "") for part in str(word).split("=")]
    kept = words[len(words) - words[::-1].index("--keep-last-epochs")]
    if kept.isdecimal() and 0 < int(kept) < average:
        raise CollabError(
            f"AVERAGE is {average}, but only the last {kept} epochs are kept: add --keep-last-epochs {average}"
        )
    cpu = on_cpu(extra)
    each, machines = processes(cpu)
    recipe.batch.divide(each * machines)
    model = {
        "COLAB": os.environ.get("COLAB") or recipe.heads,
        "KEY_DIM": number("KEY_DIM", recipe.key_dim, 1),
        "MIX_LAYOUT": one_of("MIX_LAYOUT", LAYOUTS),
        "MIX_DIM": number("MIX_DIM", 0, 0) or None,
        "SEED": number("SEED", recipe.seed, 0),
    }
    try:
        parse_heads(model["COLAB"])
    except CollabError as error:
        raise CollabError(f"COLAB is {model['COLAB']!r}: {error}") from error
    return Run(
        name=args.recipe,
        recipe=recipe,
        tiny=args.tiny,
        model=model,
        each=each,
        machines=machines,
        node=number("NODE_RANK", number("SLURM_NODEID", 0, 0) if os.environ.get("SLURM_STEP_ID") else 0, 0),
        cpu=cpu,
        average=average,
        out=folder_of(args, recipe, model),
        data=None if args.tiny else Path(os.environ.get("DATA") or ROOT / recipe.data).resolve(),
        extra=extra,
        archive=args.archive.resolve() if args.archive else None,
        sha256=args.sha256,
    )


def folder_of(args: argparse.Namespace, recipe: Recipe, model: dict[str, object]) -> Path:
    """SAVE_DIR, or a folder named after what is trained."""
    if given := os.environ.get("SAVE_DIR"):
        return Path(given).resolve()
    name = f"{recipe.save_dir}-d-{model['KEY_DIM']}-colab-{model['COLAB']}"
    name += f"-{model['MIX_LAYOUT']}" if model["MIX_LAYOUT"] else ""
    name += f"-mix-{model['MIX_DIM']}" if model["MIX_DIM"] else ""
    name += f"-seed-{model['SEED']}" if model["SEED"] != recipe.seed else ""
    return ROOT / (f"outputs/tiny-{args.recipe}/{Path(name).name}" if args.tiny else name)


def show(run: Run) -> None:
    """Print the commands that the recipe would run."""
    data = run.data or run.out / "data" / "bin"
    for command in [*(steps.corpus_commands(run) if run.tiny else []), steps.train_command(run, data)]:
        print(shlex.join(map(str, command)))
    for command in steps.score_commands(run, data):
        print(shlex.join(map(str, command)))


def execute(run: Run) -> None:
    """Everything: data, training, scores. On machines after the first only the training.

    Raises:
        CollabError: missing data, a folder begun with other settings, or a step that failed.
    """
    begin(run)
    first = run.node == 0
    with lock(run.out if first else run.out / f".node{run.node}", "recipe") as lock_fd:
        data = run.data or steps.prepare_corpus(run, lock_fd)
        command = steps.train_command(run, data)
        trained = {"command": steps.lasting_flags(run), "extra": run.extra}
        if read_json(run.out / "trained.json") == trained:
            say(f"training is finished, in {run.out}")
        else:
            say(f"training in {run.out}: {run.recipe.batch.describe(run.each * run.machines)}")
            if not run.tensorboard:
                say('no TensorBoard log: tensorboard is not installed (pip install ".[tensorboard]")')
            steps.train(run, command, lock_fd)
            if first:
                write_json(run.out / "trained.json", trained)
        if first:
            steps.score(run, data, lock_fd)


def begin(run: Run) -> None:
    """Refuse missing data, and a folder with checkpoints of another model; else keep what this one is."""
    if run.data is not None and not any(run.data.glob("dict*.txt")):
        raise CollabError(f"there is no binarised data in {run.data}: set DATA, or make it with {run.recipe.prepare}")
    settings = {"recipe": run.name, "tiny": run.tiny, "data": str(run.data), **run.model}
    settings |= {"flags": flags} if (flags := steps.own_flags(run.extra)) else {}
    found = read_json(run.out / "recipe.json")
    begun = found is not None and (run.out / "checkpoint_last.pt").exists()
    if begun and (other := differences(found, settings)):
        raise CollabError(f"{run.out} was begun with other settings ({other}); remove it, or set another SAVE_DIR")
    if found != settings and run.node == 0:
        write_json(run.out / "recipe.json", settings)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when all is done, 1 after a sentence, 130 when interrupted."""
    args, extra = build_parser().parse_known_args(argv)

    def work() -> None:
        run = plan(args, extra)
        if os.environ.get("DRY_RUN", "0") not in ("", "0"):
            return show(run)
        # OpenMP's default is to spin for long: ten times slower as soon as another program needs one of the cores.
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
        cores = len(os.sched_getaffinity(0))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, min(4, cores // run.each))))
        os.environ["NPROC_PER_NODE"] = str(run.each)
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        execute(run)

    interrupt_when_terminated()
    return run_command(f"recipes.py {args.recipe}", work, "the same command continues where it was")


if __name__ == "__main__":
    sys.exit(main())
