"""One optimizer step of a translation model: words a second against fairseq's own model and the published fork's way.

The model is transformer_wmt_en_de with a joined dictionary of 32,000 words and shared embeddings; a step is one of
fairseq's trainer: forward, label-smoothed loss, gradients, Adam. Batches have 3,500 tokens and the lengths of the
sentences of a real corpus; each round takes another batch, from short to long sentences, the same one for all models.
The fork's way is put in the place of the attentions of the model with dense mixing. Words are those of the target.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import device as devices
from benchmarks import models, pictures
from benchmarks.common import ROUNDS, Row, data_folder, measure_in_turns, turns_row
from benchmarks.layers import CONCATENATED, FORK
from fairseq_collab.errors import CollabError

HELP = "words a second in training a translation model, against fairseq's own and the fork's"
ARCH, WORDS, KEY_DIM, TOKENS = "transformer_wmt_en_de", 32_000, 128, 3500
SPEEDUP = 1.08
OURS = ("dense", "windows")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite."""
    devices.add_arguments(parser)
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="of python -m data_prep homeassistant; made when not given"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")


def run(args: argparse.Namespace) -> list[Row]:
    """Rows of dense and window mixing; few tokens and a small dictionary with ``--quick``.

    Raises:
        CollabError: fairseq cannot train in that precision, or there are no sentences.
    """
    from data_prep import homeassistant

    # fairseq's trainer knows bf16 on TPUs only, and fp16 on GPUs only
    able = ("fp32", "fp16") if args.device == "cuda" else ("fp32",)
    precisions = [name for name in able if name in (args.dtype or able)]
    if not precisions:
        raise CollabError(f"fairseq trains in {' and '.join(able)} on this device: choose one with --dtype")
    lengths = models.real_lengths(data_folder(args.data, homeassistant, "data"))
    if args.quick:
        return measure_steps(ARCH, 2000, KEY_DIM, lengths, 200, 2, args.device, precisions)
    return measure_steps(ARCH, WORDS, KEY_DIM, lengths, TOKENS, args.rounds, args.device, precisions)


def measure_steps(
    arch: str,
    words: int,
    key_dim: int,
    lengths: models.Lengths,
    tokens: int,
    rounds: int,
    device: str,
    precisions: Sequence[str] = ("fp32",),
) -> list[Row]:
    """Rows against both peers in each precision."""
    rows = []
    for precision in precisions:
        options = ["--cpu"] if device == "cpu" else ["--fp16"] if precision == "fp16" else []
        works, backends, ntokens = {}, {}, []
        for name in tqdm(models.NAMES, desc=f"train {precision}: models", unit="model"):
            step, model, samples = _trainer(name, arch, words, key_dim, lengths, tokens, rounds, options)
            with models.backends_seen(model) as seen:
                step(0)
            works[name], backends[name] = step, models.in_words(seen)
            ntokens = [sample["ntokens"] for sample in samples]
        with tqdm(total=(rounds + 1) * len(works), desc=f"train {precision}: steps", unit="step") as bar:
            times = measure_in_turns(_shown(works, bar), rounds, min_seconds=0, clock=devices.clock_of(device))
        for name in OURS:
            for peer, target in ((CONCATENATED, 1 / SPEEDUP), (FORK, 1.0)):
                row = turns_row(
                    "train",
                    f"{arch} R={key_dim}, {tokens} tokens, {words} words, {precision}: {name}",
                    times,
                    name,
                    peer,
                    target,
                    backend=backends[name],
                    layout=name,
                    dtype=precision,
                    words_per_second=_median_rate(ntokens, times[name]),
                    peer_words_per_second=_median_rate(ntokens, times[peer]),
                    wanted_speedup=1 / target,
                )
                rows.append({**row, "speedup": 1 / row["ratio"]})
    return rows


def _trainer(
    name: str,
    arch: str,
    words: int,
    key_dim: int,
    lengths: models.Lengths,
    tokens: int,
    rounds: int,
    options: list[str],
) -> tuple[Callable[[int], Any], Any, list[models.Sample]]:
    """A step on the batch of a round, the model, and the batches."""
    config, task, model = models.build(name, arch, words, key_dim, options)
    from fairseq.trainer import Trainer

    samples = [
        models.make_sample(task.target_dictionary, batch, seed)
        for seed, batch in enumerate(models.choose_batches(lengths, tokens, rounds))
    ]
    trainer = Trainer(config, task, model, task.build_criterion(config.criterion))

    def step(number: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fairseq's, of names that torch has replaced
            trainer.train_step([samples[number]])

    return step, trainer.model, samples


def _shown(works: dict[str, Callable[[int], Any]], bar: tqdm) -> dict[str, Callable[[int], Any]]:
    """The works, each moving a bar by one."""

    def show(work: Callable[[int], Any]) -> Callable[[int], Any]:
        def shown(number: int) -> None:
            work(number)
            bar.update()

        return shown

    return {name: show(work) for name, work in works.items()}


def _median_rate(words: list[int], seconds: list[float]) -> float:
    return statistics.median(n / s for n, s in zip(words, seconds, strict=True))


def plot(rows: list[Row], folder: Path) -> list[Path]:
    """Bars of step times by peer."""
    panels = {}
    for precision in dict.fromkeys(row["dtype"] for row in rows):
        found = {(row["layout"], row["peer"]): row for row in rows if row["dtype"] == precision}
        panels[precision] = {
            name: [(found[name, peer]["ratio"], found[name, peer]["target"]) for peer in (CONCATENATED, FORK)]
            for name in OURS
        }
    groups = [f"/ {CONCATENATED}", f"/ {FORK}"]
    return [pictures.bars(folder / "train.png", "time of a training step", groups, panels)]
