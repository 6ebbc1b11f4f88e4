"""What conversion does to sentence embeddings of a pretrained BERT: mean of 1 - cosine on sentences kept apart.

The paper's way is CP on the weights alone with dense mixing and the content bias kept exactly. Ours is CP weighted by
1,024 unlabelled sentences, dense and sparse (every head mixes K dims), alone and with 150 steps of layer-wise
refinement on the same sentences. Embeddings are normalised means over the tokens of 1,024 sentences from the other
halves of the files that those come from. Before anything is measured, the model with converted attentions of full key
dim has to agree with BERT's own to the rounding of float32.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import bert
from benchmarks.common import Row, data_folder, make_row
from fairseq_collab._transformers import import_transformers
from fairseq_collab.adapters.observed import ObservedLibraryModel
from fairseq_collab.decomposition.calibration import Whitening
from fairseq_collab.decomposition.layer import convert_layer
from fairseq_collab.decomposition.observation import collect_moments
from fairseq_collab.decomposition.refine import Student, refine_layers

HELP = "change of a pretrained BERT's sentence embeddings by conversion"
TARGET = 1 / 8
SECONDS = 120.0
ROUNDING = 1e-5  # of components of embeddings of length 1
CALIBRATION, EVALUATION, BATCH, LENGTH = 1024, 1024, 32, 128
PAPER = "plain CP"


@dataclass(frozen=True)
class Way:
    """A way to convert: the method, whether inputs weigh, whether mixing is dense, and steps of refinement."""

    name: str
    method: str = "cp"
    weighted: bool = True
    dense: bool = True
    refined: bool = False


WAYS = (
    Way("per-head SVD", method="svd", weighted=False),
    Way(PAPER, weighted=False),
    Way("weighted"),
    Way("weighted, sparse", dense=False),
    Way("weighted, refined", refined=True),
    Way("weighted, sparse, refined", dense=False, refined=True),
)


@dataclass(frozen=True)
class Text:
    """Batches to fit to, to stop refinement by, and to measure on."""

    train: Sequence[bert.Batch]
    held_out: Sequence[bert.Batch]
    evaluation: Sequence[bert.Batch]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite."""
    parser.add_argument("--minilm", type=Path, metavar="DIR", help="of python -m data_prep minilm; made when not given")
    parser.add_argument("--snippets", type=Path, metavar="DIR", help="of python -m data_prep snippets; likewise")
    parser.add_argument("--refine-steps", type=int, default=150, metavar="N", help="default: %(default)s")


def run(args: argparse.Namespace) -> list[Row]:
    """Rows at R = D/4 against the paper's way; with ``--plot`` also at D/8, D/2 and 3D/4."""
    from data_prep import minilm, snippets

    model, tokenizer = load_model(data_folder(args.minilm, minilm))
    sentences = calibration_and_evaluation(data_folder(args.snippets, snippets))
    if args.quick:
        sentences = sentences[0][:128], sentences[1][:128]
    text = make_text(tokenizer, *sentences)
    width = model.config.hidden_size
    dims = [width // 4, 3 * width // 4] if args.plot is None or args.quick else [width * n // 8 for n in (1, 2, 4, 6)]
    return measure_model(model, text, dims, 20 if args.quick else args.refine_steps, everything=args.plot is not None)


def load_model(folder: Path):
    """The BERT in a folder, in evaluation mode with plain attention, and its tokenizer.

    Raises:
        CollabError: transformers is not installed.
    """
    transformers = import_transformers()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.BertModel.from_pretrained(folder, attn_implementation="eager", add_pooling_layer=False)
    return model.float().eval(), transformers.AutoTokenizer.from_pretrained(folder)


def calibration_and_evaluation(folder: Path, seed: int = 0) -> tuple[list[str], list[str]]:
    """Sentences from the first halves of all files, and others from their second halves."""
    from data_prep import snippets

    parts: tuple[list[str], list[str]] = [], []
    for name in snippets.SOURCES:
        texts = [snippet.text for snippet in snippets.read_tsv(folder / f"{name}.tsv")]
        parts[0].extend(texts[: len(texts) // 2])
        parts[1].extend(texts[len(texts) // 2 :])
    first = set(parts[0])
    pools = sorted(first), sorted(set(parts[1]) - first)
    generator = random.Random(seed)
    return generator.sample(pools[0], CALIBRATION), generator.sample(pools[1], EVALUATION)


def make_text(tokenizer, calibration: Sequence[str], evaluation: Sequence[str]) -> Text:
    """Batches of tokens; an eighth of the calibration sentences stop refinement."""

    def batches(sentences: Sequence[str]) -> list[bert.Batch]:
        parts = [sentences[i : i + BATCH] for i in range(0, len(sentences), BATCH)]
        encoded = (tokenizer(p, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt") for p in parts)
        return [{key: one[key] for key in ("input_ids", "attention_mask")} for one in encoded]

    cut = len(calibration) * 7 // 8
    return Text(batches(calibration[:cut]), batches(calibration[cut:]), batches(sorted(evaluation, key=len)))


def measure_model(model: nn.Module, text: Text, dims: Sequence[int], steps: int, everything: bool = True) -> list[Row]:
    """Rows of every way at every key dim, then those of D/4 that are held to the targets.

    Args:
        model: a ``BertModel``. dims: key dims, ascending, among them D/4; the last is where the paper's way competes.
        steps: of refinement. everything: measure all ways at all dims, instead of what the targets need.
    """
    target_dim = model.config.hidden_size // 4
    original = bert.embed(model, text.evaluation, "original")
    check_agreement(model, text, original)
    started = time.perf_counter()
    observed = ObservedLibraryModel(model, bert.attentions(model), text.train, text.held_out)
    whitenings = {name: Whitening.of(*moments) for name, moments in collect_moments(observed).items()}
    calibrating = time.perf_counter() - started
    rows = []
    found: dict[tuple[str, int], float] = {}
    for key_dim in dims:
        for way in WAYS:
            if not everything and key_dim != target_dim and way.name != PAPER:
                continue
            started = time.perf_counter()
            converted = convert_model(model, way, key_dim, whitenings, observed, steps)
            seconds = time.perf_counter() - started + (calibrating if way.weighted else 0)
            embedded = bert.embed(converted, text.evaluation, f"{way.name}, R={key_dim}")
            found[way.name, key_dim] = value = bert.distortion(original, embedded)
            facts = {"way": way.name, "key_dim": key_dim, "distortion": value, "seconds": seconds}
            case = f"{way.name}, R={key_dim}"
            rows.append(_row(case, "-", value, None, unit="1-cos", **facts))
    for way in (way for way in WAYS if way.weighted):
        row = next(row for row in rows if (row["way"], row["key_dim"]) == (way.name, target_dim))
        facts = {key: row[key] for key in ("way", "key_dim", "distortion", "seconds")}
        case = f"{way.name}, R={target_dim}"
        for peer_dim, target in ((target_dim, TARGET), (dims[-1], 1.0)):
            peer = found[PAPER, peer_dim]
            peer_name = f"{PAPER}, R={peer_dim}"
            rows.append(_row(case, peer_name, facts["distortion"] / peer, target, peer_distortion=peer, **facts))
        rows.append(_row(f"{case}, whole model", "-", facts["seconds"], SECONDS, unit="s", **facts))
    return rows


def _row(case: str, peer: str, ratio: float, target: float | None, **extra) -> Row:
    return make_row("distortion", case, peer, ratio, target, backend="torch float32, eager", rounds=1, **extra)


def convert_model(
    model: nn.Module,
    way: Way,
    key_dim: int,
    whitenings: dict[str, Whitening],
    observed: ObservedLibraryModel,
    steps: int,
) -> nn.Module:
    """A copy of the model, all its attentions converted to ``key_dim`` shared dims."""
    found, layers = bert.attentions(model), {}
    old = {name: one.parts.layer for name, one in found.items()}
    for name, attention in found.items():
        head_dim = len(old[name].q_weight) // old[name].num_heads
        mix_dim = key_dim if way.dense else min(head_dim, key_dim)
        whitening = whitenings[name] if way.weighted else None
        layer = convert_layer(old[name], key_dim, mix_dim, whitening, way.method)
        layers[name] = bert.collaborative_attention(attention, layer)
    if way.refined:
        students = {name: Student(layer, whitenings[name]) for name, layer in layers.items()}
        refine_layers(observed, students, steps)
    if way.weighted:
        return bert.with_attentions(model, layers)
    with torch.no_grad():
        for layer in layers.values():
            layer.query_bias.zero_()
    return bert.with_attentions(model, layers, {name: one.content_bias for name, one in old.items()})


def check_agreement(model: nn.Module, text: Text, original: Tensor) -> None:
    """That attentions of full key dim, put in the place of BERT's own, change nothing but rounding.

    Raises:
        AssertionError: they do.
    """
    for way in (Way("sparse, full key dim", weighted=False, dense=False), Way("dense, full key dim", weighted=False)):
        exact = convert_model(model, way, model.config.hidden_size, {}, None, 0)
        change = (bert.embed(exact, text.evaluation, way.name) - original).abs().max().item()
        if not change <= ROUNDING:
            raise AssertionError(f"{way.name}: embeddings differ from BERT's own by {change:.2e}")


def plot(rows: list[Row], folder: Path) -> list[Path]:
    """Distortion against the key dim, a line for each way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.4))
    for way, marker in zip(WAYS, "vsoD^P", strict=True):
        curve = [row for row in rows if row["unit"] == "1-cos" and row["way"] == way.name]
        points = sorted((row["key_dim"], row["ratio"]) for row in curve)
        if points:
            style = "-" if way.dense else "--"
            axes.plot(*zip(*points, strict=True), style, marker=marker, markersize=5, alpha=0.8, label=way.name)
    axes.set_yscale("log")
    axes.set_xticks(sorted({row["key_dim"] for row in rows}))
    axes.set_xlabel("key dim R")
    axes.set_ylabel("mean 1 - cosine of sentence embeddings")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.tight_layout()
    path = folder / "distortion.png"
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return [path]
