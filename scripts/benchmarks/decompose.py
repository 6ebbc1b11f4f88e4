"""Decomposition of one layer's heads: this package's ALS against tensorly's parafac on the dense (H, D, D) stack.

Both decompose the weights alone, with dense mixing. tensorly runs parafac(init="random", tol=1e-6, n_iter_max=100)
once a case, in float32 with the backend that was the faster one in a trial of three iterations; making the stack is
not counted. Ours runs in float64 several times, from the weights. Errors are relative, in float64.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.common import Row, data_folder, make_row, measure
from fairseq_collab.decomposition import cp
from fairseq_collab.decomposition.methods import from_cp_tensor

HELP = "decomposition of one layer against tensorly's, time and error"
SPEED_TARGET = 1 / 100
SWEEPS = 100
BACKENDS = ("numpy", "pytorch")
SHARED = 0.5  # part of the squared norm that synthetic heads share


@dataclass(frozen=True)
class Case:
    """Projections ``q`` (D, D) and ``k`` (D, D) of H ``heads``, and R, the ``key_dim`` to reach."""

    name: str
    q: Tensor
    k: Tensor
    heads: int
    key_dim: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite."""
    parser.add_argument("--minilm", type=Path, metavar="DIR", help="of python -m data_prep minilm; made when not given")
    parser.add_argument("--rounds", type=int, default=7, help="of ours (default: %(default)s)")


def run(args: argparse.Namespace) -> list[Row]:
    """Rows for six real layers and two synthetic ones; only one real layer with ``--quick``."""
    from data_prep import minilm

    cases = minilm_cases(data_folder(args.minilm, minilm), 1 if args.quick else None)
    if not args.quick:
        cases += [synthetic_case(512, 8, 128), synthetic_case(768, 12, 384)]
    return measure_cases(cases, args.rounds)


def measure_cases(cases: list[Case], rounds: int) -> list[Row]:
    """Three rows a case: the final error, the time until ours is no higher than theirs, and the whole time."""
    rows = []
    with tqdm(cases, desc="decompose", unit="case") as bar:
        for case in bar:
            bar.set_postfix_str(case.name)
            rows += _rows(case, rounds)
    return rows


def minilm_cases(folder: Path, count: int | None = None) -> list[Case]:
    """The attentions of a BERT checkpoint in Hugging Face's format, reduced to half their key dim."""
    import json

    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = load_file(folder / "model.safetensors")
    prefix = next(key for key in weights if key.endswith("encoder.layer.0.attention.self.query.weight"))
    prefix = prefix.split("encoder.")[0]
    cases = []
    for i in range(config["num_hidden_layers"] if count is None else count):
        q, k = (weights[f"{prefix}encoder.layer.{i}.attention.self.{part}.weight"] for part in ("query", "key"))
        heads, key_dim = config["num_attention_heads"], len(q) // 2
        cases.append(Case(f"MiniLM layer {i} D={len(q)} H={heads} R={key_dim}", q, k, heads, key_dim))
    return cases


def synthetic_case(width: int, heads: int, key_dim: int, seed: int = 0) -> Case:
    """Xavier-uniform projections, half of whose squared norm lies in D/4 directions that all heads share.

    The shared directions are orthogonal, fade as 1/sqrt(rank), and are mixed at random in every row.
    """
    generator = torch.Generator().manual_seed(seed)
    dims = width // 4

    def projection() -> Tensor:
        bound = math.sqrt(6 / (2 * width))
        own = (2 * torch.rand(width, width, generator=generator) - 1) * bound
        directions = torch.linalg.qr(torch.randn(width, dims, generator=generator)).Q.T  # (dims, D)
        fading = torch.arange(1, dims + 1).rsqrt().unsqueeze(1)
        shared = torch.randn(width, dims, generator=generator) @ (fading * directions)
        shared *= own.norm() / shared.norm()
        return math.sqrt(1 - SHARED) * own + math.sqrt(SHARED) * shared

    return Case(f"synthetic D={width} H={heads} R={key_dim}", projection(), projection(), heads, key_dim)


def _rows(case: Case, rounds: int) -> list[Row]:
    heads = cp.Heads.from_weights(case.q, case.k, case.heads)
    trials = {name: parafac_seconds(case, name, 3)[0] for name in BACKENDS}
    backend = min(trials, key=trials.get)
    seconds, tensor = parafac_seconds(case, backend, 100)
    theirs = cp.relative_error(heads, from_cp_tensor(tensor))

    def ours(sweeps: int = SWEEPS) -> list[float]:
        fresh = cp.Heads.from_weights(case.q, case.k, case.heads)
        return cp.decompose(fresh, case.key_dim, max_sweeps=sweeps)[2]

    whole, errors = measure(ours, rounds)
    needed = next((sweeps for sweeps, error in enumerate(errors) if error <= theirs), None)
    until = None if needed is None else measure(lambda: ours(needed), rounds)[0]
    facts = {
        "error": errors[-1],
        "peer_error": theirs,
        "peer_seconds": seconds,
        "peer_rounds": 1,
        "peer_backend": f"tensorly {backend} float32",
        "peer_trials": trials,
    }

    def row(what: str, ratio: float | None, target: float | None, **extra: float | int | None) -> Row:
        peer = f"parafac, {backend}"
        extra = {"measure": what, **facts, **extra}
        case_name = f"{case.name}: {what}"
        return make_row("decompose", case_name, peer, ratio, target, backend="torch float64", rounds=rounds, **extra)

    return [
        row("final error", errors[-1] / theirs, 1.0),
        row("time until no worse", until and until / seconds, SPEED_TARGET, seconds=until, sweeps=needed),
        row("time to the end", whole / seconds, None, seconds=whole, sweeps=len(errors) - 1),
    ]


def parafac_seconds(case: Case, backend: str, iterations: int):
    """Seconds of tensorly's parafac in float32 with a backend, and its tensor."""
    import tensorly
    from tensorly.decomposition import parafac

    q, k = (weight.float().view(case.heads, -1, weight.size(1)) for weight in (case.q, case.k))
    stack = q.transpose(1, 2) @ k  # (H, D, D)
    with tensorly.backend_context(backend, local_threadsafe=True):
        stack = tensorly.tensor(stack.numpy() if backend == "numpy" else stack)
        started = time.perf_counter()
        tensor = parafac(stack, rank=case.key_dim, init="random", tol=1e-6, n_iter_max=iterations, random_state=0)
        return time.perf_counter() - started, tensor


def plot(rows: list[Row], folder: Path) -> list[Path]:
    """Errors of both, and how many times faster ours is, by case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    finals = [row for row in rows if row["measure"] == "final error"]
    names = [row["case"].split(":")[0] for row in finals]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 1.5 + 0.4 * len(names)), sharey=True)
    left.scatter([row["peer_error"] for row in finals], names, marker="x", label="tensorly parafac")
    left.scatter([row["error"] for row in finals], names, label="this package")
    left.set_xlabel("final relative error")
    left.invert_yaxis()
    for what, marker in (("time until no worse", "o"), ("time to the end", "s")):
        found = [row for row in rows if row["measure"] == what and row["ratio"]]
        speeds = [1 / row["ratio"] for row in found]
        label = f"{what}, median {statistics.median(speeds):.0f}x" if speeds else f"{what}: never"
        right.scatter(speeds, [row["case"].split(":")[0] for row in found], marker=marker, label=label)
    right.axvline(1 / SPEED_TARGET, color="grey", linestyle=":", label="target")
    right.set_xscale("log")
    right.set_xlabel("times faster than tensorly")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.tight_layout()
    path = folder / "decompose.png"
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return [path]
