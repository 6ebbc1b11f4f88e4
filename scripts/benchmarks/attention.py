"""One attention layer, forward and with its gradients: time, and the memory that the gradients need.

Ours with dense, window and picked mixing at R = D/4 (P = K where mixing is sparse) against fairseq's own
MultiheadAttention, concatenated heads of the same small keys, and the published fork's way. All have biases, a padding
mask and no weights to return, dropout is 0, and all are called in turns in one run. Peak memory is what torch's
allocator hands out at most during a call, beyond parameters and input. Operations are counted without masks and
softmax; the limit is the machine's own rate for a large matrix product, measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import device as devices
from benchmarks import layers, pictures
from benchmarks.common import ROUNDS, Row, Times, make_row, measure_in_turns, turns_row
from benchmarks.layers import CONCATENATED, FORK, SMALL_KEYS, Shape

HELP = "time and memory of one attention layer against fairseq's own and the fork's"
FORWARD, BOTH, MEMORY = "forward", "forward+backward", "peak memory"
OURS = tuple(layers.LAYOUTS)


@dataclass(frozen=True)
class Targets:
    """The largest times to be content with, by what is measured and layout, as parts of those of concatenated heads."""

    forward: dict[str, float]
    both: dict[str, float]


CASES = {
    Shape(64, 32, 512, 8, 128): Targets(dict(windows=0.68, picked=0.75), dict(windows=0.72, picked=0.75)),
    Shape(16, 128, 512, 8, 128): Targets(dict(windows=0.70, picked=0.80), dict(windows=0.77, picked=0.78)),
    Shape(4, 512, 768, 12, 192): Targets(dict(windows=0.72, picked=0.80), dict(windows=0.80, picked=0.85)),
    Shape(1, 2048, 768, 12, 192): Targets(dict(windows=0.78, picked=0.85), dict(windows=0.85, picked=0.90)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite."""
    devices.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")


def run(args: argparse.Namespace) -> list[Row]:
    """Rows of the four shapes, in each precision of the device; only the first two, briefly, with ``--quick``."""
    cases = dict(list(CASES.items())[:2]) if args.quick else CASES
    rounds = 2 if args.quick else args.rounds
    return measure_cases(cases, args.device, devices.dtypes_of(args), rounds, devices.min_seconds_of(args))


def measure_cases(
    cases: dict[Shape, Targets], device: str, dtypes: Sequence[torch.dtype], rounds: int, min_seconds: float
) -> list[Row]:
    """Rows of time and memory, a precision and a shape at a time."""
    rows = []
    todo = [(dtype, shape) for dtype in dtypes for shape in cases]
    limits = {dtype: devices.product_rate(device, dtype) for dtype in dtypes}
    with tqdm(todo, desc="attention", unit="case") as bar:
        for dtype, shape in bar:
            bar.set_postfix_str(name_of(shape, dtype))
            rows += measure_shape(shape, cases[shape], device, dtype, limits[dtype], rounds, min_seconds)
    return rows


def name_of(shape: Shape, dtype: torch.dtype) -> str:
    """As it stands in the rows."""
    facts = f"B={shape.batch} T={shape.length} D={shape.width} H={shape.heads} R={shape.key_dim}"
    return f"{facts} {devices.SHORT[dtype]}"


def measure_shape(
    shape: Shape,
    targets: Targets,
    device: str,
    dtype: torch.dtype,
    limit: float,
    rounds: int,
    min_seconds: float,
) -> list[Row]:
    """Rows of one shape: forward, forward and backward, memory.

    Args:
        limit: operations a second of the machine's own matrix product.
    """
    names = (*OURS, CONCATENATED, SMALL_KEYS, FORK)
    built = {name: layers.build(name, shape).to(device, dtype) for name in names}
    x, padding = layers.inputs(shape, device, dtype)
    rows = []
    for what, make_work, held_to in (
        (FORWARD, layers.forward_work, targets.forward),
        (BOTH, layers.training_work, targets.both),
    ):
        works = {name: make_work(layer, x, padding) for name, layer in built.items()}
        backends = {name: backend_with_kernels(works[name], device) for name in OURS}
        times = measure_in_turns(works, rounds, min_seconds=min_seconds, clock=devices.clock_of(device))
        passes = 1 if what == FORWARD else 3  # two products for each one of the way forward

        def row(ours: str, peer: str, target: float | None, *, what=what, times=times, passes=passes, ran=backends):
            facts = {**_facts(shape, dtype, what, ours), **_rates(shape, times, ours, peer, passes, limit)}
            case = f"{name_of(shape, dtype)} {what}: {ours}"
            return turns_row("attention", case, times, ours, peer, target, backend=ran[ours], **facts)

        rows += [row(name, CONCATENATED, held_to.get(name)) for name in OURS]
        rows += [row("windows", SMALL_KEYS, None), row("dense", FORK, 1.0 if what == BOTH else None)]
    peaks = {name: devices.peak_bytes(work, device) for name, work in works.items()}
    for ours, peer in (*((name, CONCATENATED) for name in OURS), ("dense", FORK)):
        facts = {**_facts(shape, dtype, MEMORY, ours), "bytes": peaks[ours], "peer_bytes": peaks[peer]}
        case, target = f"{name_of(shape, dtype)} {MEMORY}: {ours}", 1.0 if peer == CONCATENATED else None
        ratio = peaks[ours] / peaks[peer]
        rows.append(make_row("attention", case, peer, ratio, target, backend=backends[ours], rounds=1, **facts))
    return rows


def backend_with_kernels(work: Callable[..., None], device: str) -> str:
    """What ran in one call of ours, with the fused kernels that torch could choose from on a GPU."""
    backend = layers.backend_of(work)
    able = devices.fused_kernels(work, device) if backend.endswith("sdpa") else []
    return f"{backend} ({', '.join(able)})" if able else backend


def _facts(shape: Shape, dtype: torch.dtype, what: str, layout: str) -> dict[str, Any]:
    return {**vars(shape), "dtype": devices.SHORT[dtype], "measure": what, "layout": layout}


def _rates(shape: Shape, times: Times, ours: str, peer: str, passes: int, limit: float) -> dict[str, float]:
    """Operations a second of both, and the limit."""
    rates = {}
    for side, name in (("rate", ours), ("peer_rate", peer)):
        rates[side] = passes * layers.operations(name, shape) / statistics.median(times[name])
    return {**rates, "limit_rate": limit}


def plot(rows: list[Row], folder: Path) -> list[Path]:
    """Bars by shape: time forward, time with gradients, memory; the targets are lines across the bars."""
    paths = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        chosen = [row for row in rows if row["dtype"] == dtype and row["peer"] == CONCATENATED]
        shapes = list(dict.fromkeys(_label(row) for row in chosen))
        panels = {}
        for what in (FORWARD, BOTH, MEMORY):
            of_panel = {(_label(row), row["layout"]): row for row in chosen if row["measure"] == what}
            panels[what] = {
                layout: [(of_panel[shape, layout]["ratio"], of_panel[shape, layout]["target"]) for shape in shapes]
                for layout in OURS
            }
        path = folder / f"attention-{dtype}.png"
        title = f"one attention layer, R = D/4, {dtype}: ours divided by fairseq's own"
        paths.append(pictures.bars(path, title, shapes, panels))
    return paths


def _label(row: Row) -> str:
    return f"T={row['length']}\nB={row['batch']} D={row['width']}"
