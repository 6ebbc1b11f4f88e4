"""The steps of `recipes.py`, each a command as a user would type it: corpus, training, averaging, scores.

What is done in which order is decided there, what a recipe's settings are in ``recipe_settings.py``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from quickstart_steps import run as run_step
from quickstart_steps import run_training, say
from recipe_settings import ROOT, TINY_VOCABULARY, Recipe

from fairseq_collab.errors import CollabError
from fairseq_collab.files import write_json

PLUGIN = ROOT / "fairseq_collab"
_ERROR = re.compile(r"\S+: error: (.+)|^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception): .+)")
_FLAG = re.compile(r"--?[A-Za-z]")
# flags that a training may be resumed with or without: how long, on what, and what is checked, saved and logged
_PASSING = re.compile(
    "--(max-update|max-epoch|stop-time-hours|patience|cpu|fp16|memory-efficient|bf16|amp|num-workers|log-|no-progress-bar"
    "|keep-|save-interval|no-epoch-checkpoints|validate-interval|max-tokens-valid|batch-size-valid|tensorboard|wandb|ddp-"
    "|reset-|restore-file)"
)
UNKNOWN_INTERVAL = "UPDATES_OF_30_PERCENT"  # shown in place of a number that the missing data decide


@dataclass(frozen=True)
class Run:
    """A recipe with all that the command line and the environment decide.

    Args:
        model: COLAB, KEY_DIM, MIX_LAYOUT, MIX_DIM and SEED. each: processes on a machine. node: number of this machine.
        average: how many checkpoints are averaged, 0 for the best one. out: the save-dir.
        data: binarised folder, None where the small corpus is used. extra: further flags of ``fairseq-train``.
        archive: downloaded package of the small corpus. sha256: what it must have.
    """

    name: str
    recipe: Recipe
    tiny: bool
    model: dict[str, object]
    each: int
    machines: int
    node: int
    cpu: bool
    average: int
    out: Path
    data: Path | None
    extra: list[str]
    archive: Path | None = None
    sha256: str | None = None

    @cached_property
    def tensorboard(self) -> bool:
        """Whether fairseq will find a TensorBoard to write for."""
        return any(find_spec(name) for name in ("tensorboard", "tensorboardX"))


def corpus_commands(run: Run) -> list[list[object]]:
    """What prepares the small corpus; the last command's ``--destdir`` has the folder ``bin``."""
    masked, folder = not run.recipe.decode, run.out / "data"
    text = run.out / "text" if masked else folder
    command = [sys.executable, "-m", "data_prep", "homeassistant", "--langs", "-".join(run.recipe.langs)]
    command += ["--destdir", text, "--vocab-size", TINY_VOCABULARY]
    command += ["--archive", run.archive] if run.archive else []
    command += ["--sha256", run.sha256] if run.sha256 else []
    if not masked:
        return [command]
    pieces = [sys.executable, "-m", "data_prep", "text", "--destdir", folder, "--vocab-size", TINY_VOCABULARY]
    for split in ("train", "valid", "test"):
        pieces += [f"--{split}", text / "text" / f"{split}.en"]
    return [command, [*pieces, "--workers", 1]]


def prepare_corpus(run: Run, lock_fd: int) -> Path:
    """The binarised small corpus."""
    for command in corpus_commands(run):
        run_step(command, "preparing the corpus", lock_fd)
    return run.out / "data" / "bin"


def lasting_flags(run: Run) -> list[str]:
    """The flags that make this training what it is, on however many processes."""
    options = {"--collaborative-heads": "COLAB", "--key-dim": "KEY_DIM", "--mix-layout": "MIX_LAYOUT"}
    options |= {"--mix-dim": "MIX_DIM", "--seed": "SEED"}
    flags = [*run.recipe.flags]
    for flag, name in options.items():
        flags += [flag, run.model[name]] if run.model[name] is not None else []
    return [str(flag) for flag in flags]


def own_flags(extra: Iterable[str]) -> list[str]:
    """The user's flags that make a training another one, each with its values, the last of each name."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in extra:
        if _FLAG.match(word):
            name, *value = word.split("=", 1)
            found[name] = value
        else:
            found.setdefault(name, []).append(word)
    return [" ".join([name, *values]) for name, values in sorted(found.items()) if not _PASSING.match(name)]


def train_command(run: Run, data: Path) -> list[object]:
    """The command of the training: ``launch.sh`` and the flags of ``fairseq-train``."""
    update_freq, share = run.recipe.batch.divide(run.each * run.machines)
    command = [ROOT / "scripts/launch.sh", data, *lasting_flags(run), "--save-dir", run.out]
    command += [run.recipe.batch.flag, share, "--update-freq", update_freq]
    if run.recipe.validate_every:
        interval = validation_interval(run, data, share, update_freq) if data.is_dir() else UNKNOWN_INTERVAL
        command += ["--validate-interval-updates", interval, "--save-interval-updates", interval]
    command += ["--log-format", "json", *([] if "--log-interval" in command else ["--log-interval", 100])]
    command += ["--tensorboard-logdir", run.out / "tensorboard"] if run.tensorboard else []
    return [*command, *([] if run.cpu else run.recipe.half), *run.extra]


def validation_interval(run: Run, data: Path, share: int, update_freq: int) -> int:
    """Updates between validations, from the batches that fairseq makes of the data."""
    from fairseq.tasks.translation import TranslationConfig, TranslationTask

    flags = list(map(str, run.recipe.flags))
    options = {name: flags[flags.index(f"--{name.replace('_', '-')}") + 1] for name in ("source_lang", "target_lang")}
    longest = int(flags[flags.index("--max-source-positions") + 1])
    options |= {"max_source_positions": longest, "max_target_positions": longest}
    # these three refer to other parts of fairseq's configuration unless they are given
    options |= {"dataset_impl": None, "num_batch_buckets": 0, "required_seq_len_multiple": 1}
    task = TranslationTask.setup_task(TranslationConfig(data=str(data), **options))
    task.load_dataset("train")
    batches = task.get_batch_iterator(
        dataset=task.dataset("train"),
        max_tokens=share,
        max_positions=(longest, longest),
        ignore_invalid_inputs=True,
        required_batch_size_multiple=8,
        num_shards=run.each * run.machines,
    )
    updates = -(-len(batches) // update_freq)
    return max(1, round(run.recipe.validate_every * updates))


def train(run: Run, command: list[object], lock_fd: int) -> None:
    """Train, or go on with it; what it prints goes to the end of a log.

    Raises:
        CollabError: it failed; the first error of its log is quoted.
    """
    log = run.out / ("train.log" if run.node == 0 else f"train.node{run.node}.log")
    # the last of several counts, as in fairseq; with a number of epochs nobody knows the updates
    updates, words = None, [*map(str, command), ""]
    if "--max-update" in words and "--max-epoch" not in words:
        text = words[len(words) - words[::-1].index("--max-update")]
        updates = int(text) if text.isdecimal() else None  # fairseq refuses what is none
    before = log.stat().st_size if log.exists() else 0
    try:
        run_training(command, run.name, updates, log, lock_fd)
    except CollabError as error:
        with log.open(encoding="utf-8", errors="replace") as stream:
            stream.seek(before)
            reason = first_error(stream)
        if reason is None:
            raise
        raise CollabError(f"training {run.name} failed: {reason} (log: {log})") from error


def first_error(lines: Iterable[str]) -> str | None:
    """The first error in the log of a training, before those of the other processes and of the launcher."""
    return next((found[1] or found[2] for line in lines if (found := _ERROR.search(line))), None)


def score_commands(run: Run, data: Path) -> list[list[object]]:
    """What scores the trained model."""
    path, average = run.out / "checkpoint_best.pt", []
    if run.average and run.recipe.decode:
        path, average = run.out, ["--average", run.average]
    elif run.average:
        path = run.out / f"average_of_last_{run.average}.pt"
    if run.recipe.decode:
        command = [sys.executable, ROOT / "scripts/evaluate_bleu.py", data, "--path", path, *average]
        command += [*run.recipe.decode, "--out", run.out / "translations", "--json", run.out / "scores.json"]
    else:
        split = "test" if (data / "test.idx").exists() or not data.exists() else "valid"
        command = [sys.executable, "-m", "fairseq_cli.validate", data, "--user-dir", PLUGIN, "--path", path]
        command += ["--task", "masked_lm", "--valid-subset", split, "--batch-size", 16, "--log-format", "json"]
        command += ["--skip-invalid-size-inputs-valid-test"]
    return [command + (["--cpu"] if run.cpu else [])]


def score(run: Run, data: Path, lock_fd: int) -> None:
    """Average, decode and score, and print the result; it is kept in ``scores.json``.

    Raises:
        CollabError: too few checkpoints, or a step failed.
    """
    (command,) = score_commands(run, data)
    if run.recipe.decode:
        run_step(command, "scoring", lock_fd)
    else:
        if run.average:
            from fairseq_collab.averaging import average_last

            average_last(run.out, run.average)
        validate(command, run.out / "scores.json", lock_fd)
    if run.recipe.goals:
        from time_to_bleu import time_to_bleu

        say(time_to_bleu(run.out / "train.log", run.recipe.goals))


def validate(command: list[object], path: Path, lock_fd: int) -> None:
    """Run ``fairseq-validate`` and keep and print its loss and perplexity."""
    printed: list[str] = []
    run_step(command, "validating", lock_fd, printed.append)
    figures = next((found for line in reversed(printed) if (found := _figures(line))), None)
    if figures is None:
        raise CollabError(f"validating printed no loss; it ended: {' / '.join(printed[-3:])[-400:]}")
    write_json(path, figures)
    say(f"masked words of {figures['split']}: {figures['loss']:.3f} bits each, perplexity {figures['perplexity']:.2f}")


def _figures(line: str) -> dict[str, object] | None:
    if not (match := re.search(r"\| INFO \| (\w+) \| (\{.*\})", line)):
        return None
    try:
        values = {key.removeprefix(f"{match[1]}_"): value for key, value in json.loads(match[2]).items()}
        return {"split": match[1], "loss": float(values["loss"]), "perplexity": float(values["ppl"])}
    except (ValueError, KeyError):
        return None
