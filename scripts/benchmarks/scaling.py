"""One attention layer at growing lengths T and key dims R: where shared keys begin and cease to pay.

D = 512, H = 8, the same number of tokens at every T. Ours (dense, windows, picked; P = min(K, R) where mixing is
sparse, so that the three differ only where R > K) and two peers of the same key cache, each against fairseq's
MultiheadAttention (concatenated heads of full width): concatenated heads of total key dim R, and grouped-query
attention with R / K groups, which exists only where that divides H, and whose values shrink like its keys. A crossing
is where the time passes that of concatenated heads, between two measured points on a logarithmic scale. Each layer's
operations a second stand beside those of the machine's own large matrix product in the same run. Masks and modes are
those of the suite `attention`.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks import device as devices
from benchmarks import layers, pictures
from benchmarks.attention import BOTH, FORWARD, backend_with_kernels
from benchmarks.common import ROUNDS, Row, measure_in_turns, turns_row
from benchmarks.layers import CONCATENATED, GROUPED, SMALL_KEYS, Shape

HELP = "one attention layer from T = 16 to 2048 and R = 32 to D: curves and crossing points"
WIDTH, HEADS, TOKENS = 512, 8, 2048
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
KEY_DIMS = (32, 64, 128, 256, 384, 512)
OURS = tuple(layers.LAYOUTS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite."""
    devices.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")


def run(args: argparse.Namespace) -> list[Row]:
    """Rows of the whole grid, in each precision of the device; of a corner of it, briefly, with ``--quick``."""
    if args.quick:
        grid, rounds = make_grid((16, 256), (64, 128, 512), WIDTH, HEADS, 512), 2
    else:
        tokens = TOKENS if args.device == "cpu" else 32 * TOKENS
        grid, rounds = make_grid(LENGTHS, KEY_DIMS, WIDTH, HEADS, tokens), args.rounds
    rows = measure_grid(grid, args.device, devices.dtypes_of(args), rounds, devices.min_seconds_of(args))
    print("\n".join(crossing_lines(rows)))
    return rows


def make_grid(lengths: Sequence[int], key_dims: Sequence[int], width: int, heads: int, tokens: int) -> list[Shape]:
    """All pairs of a length and a key dim, with about the same number of tokens."""
    return [
        Shape(max(1, tokens // length), length, width, heads, key_dim) for length in lengths for key_dim in key_dims
    ]


def measure_grid(
    grid: Sequence[Shape], device: str, dtypes: Sequence[torch.dtype], rounds: int, min_seconds: float
) -> list[Row]:
    """A row for each of ours and each peer of the same cache, at every point, forward and with gradients."""
    rows = []
    todo = [(dtype, shape) for dtype in dtypes for shape in grid]
    limits = {dtype: devices.product_rate(device, dtype) for dtype in dtypes}
    with tqdm(todo, desc="scaling", unit="point") as bar:
        for dtype, shape in bar:
            bar.set_postfix_str(f"T={shape.length} R={shape.key_dim} {devices.SHORT[dtype]}")
            rows += _rows(shape, device, dtype, limits[dtype], rounds, min_seconds)
    return rows


def _rows(shape: Shape, device: str, dtype: torch.dtype, limit: float, rounds: int, min_seconds: float) -> list[Row]:
    names = [*OURS, SMALL_KEYS] if shape.groups is None else [*OURS, SMALL_KEYS, GROUPED]
    built = {name: layers.build(name, shape).to(device, dtype) for name in (*names, CONCATENATED)}
    x, padding = layers.inputs(shape, device, dtype)
    rows = []
    for what, make_work, passes in ((FORWARD, layers.forward_work, 1), (BOTH, layers.training_work, 3)):
        works = {name: make_work(layer, x, padding) for name, layer in built.items()}
        backends = {name: backend_with_kernels(works[name], device) for name in (*OURS, SMALL_KEYS)}
        if GROUPED in works:
            backends[GROUPED] = choose_grouped(built[GROUPED], works[GROUPED], device)
        times = measure_in_turns(works, rounds, min_seconds=min_seconds, clock=devices.clock_of(device))
        for name in names:
            facts = {
                **vars(shape),
                "dtype": devices.SHORT[dtype],
                "measure": what,
                "layout": name,
                "rate": passes * layers.operations(name, shape) / statistics.median(times[name]),
                "peer_rate": passes * layers.operations(CONCATENATED, shape) / statistics.median(times[CONCATENATED]),
                "limit_rate": limit,
            }
            case = f"T={shape.length} R={shape.key_dim} {devices.SHORT[dtype]} {what}: {name}"
            rows.append(turns_row("scaling", case, times, name, CONCATENATED, None, backend=backends[name], **facts))
    return rows


def choose_grouped(layer: layers.GroupedQueryAttention, work: Callable[..., None], device: str) -> str:
    """Repeats the keys for every head where no fused kernel of a GPU takes them in groups; says what runs."""
    layer.repeat = device == "cuda" and not devices.fused_kernels(work, device)
    return "sdpa, keys repeated" if layer.repeat else "sdpa, enable_gqa"


def crossings(points: Sequence[tuple[float, float]]) -> list[float]:
    """Where the ratio of (x, ratio) passes 1, between neighbours on a line of log ratio over log x."""
    found = []
    ordered = sorted(points)
    for (x, ratio), (next_x, next_ratio) in zip(ordered, ordered[1:], strict=False):
        if (ratio <= 1) != (next_ratio <= 1):
            part = -math.log(ratio) / (math.log(next_ratio) - math.log(ratio))
            found.append(x * (next_x / x) ** part)
    return found


def curve(rows: Sequence[Row], axis: str, what: str, layout: str, **fixed: int | str) -> list[tuple[float, float]]:
    """(T or R, ratio) of a layout, ascending.

    Args:
        axis: ``length`` or ``key_dim``. fixed: what the rows have to agree with.
    """
    wanted = {"measure": what, "layout": layout, **fixed}
    return sorted((row[axis], row["ratio"]) for row in rows if all(row[key] == wanted[key] for key in wanted))


def said(points: Sequence[tuple[float, float]], letter: str) -> str:
    """Where a curve lies against concatenated heads, in words: ``faster up to T = 300``."""
    ordered = sorted(points)
    first, last = (f"{letter} = {x:g}" for x, _ in (ordered[0], ordered[-1]))
    crossed = [f"{letter} = {x:.0f}" for x in crossings(ordered)]
    faster = ordered[0][1] <= 1
    if not crossed:
        return f"{'faster' if faster else 'slower'} from {first} to {last}"
    words = [f"{'faster' if faster else 'slower'} up to {crossed[0]}"]
    for place in crossed[1:]:
        faster = not faster
        words.append(f"{'faster' if faster else 'slower'} up to {place}")
    return ", ".join([*words, f"{'slower' if faster else 'faster'} up to {last}"])


def crossing_lines(rows: Sequence[Row]) -> list[str]:
    """One line for each layout, pass and precision: along T at R = D/4, and along R at T = 128 (or the nearest)."""
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for what in (FORWARD, BOTH):
            for layout in (*OURS, SMALL_KEYS, GROUPED):
                chosen = [row for row in rows if row["layout"] == layout and row["dtype"] == dtype]
                if not chosen:
                    continue
                key_dim, length = middle(chosen)
                along_t = said(curve(chosen, "length", what, layout, key_dim=key_dim), "T")
                along_r = said(curve(chosen, "key_dim", what, layout, length=length), "R")
                lines.append(f"{what}, {dtype}, {layout}: at R = {key_dim} {along_t}; at T = {length} {along_r}")
    return lines


def middle(rows: Sequence[Row]) -> tuple[int, int]:
    """The measured key dim nearest to D/4, and the length nearest to 128."""
    width = rows[0]["width"]
    key_dim = min({row["key_dim"] for row in rows}, key=lambda dim: abs(dim - width // 4))
    return key_dim, min({row["length"] for row in rows}, key=lambda length: abs(length - 128))


def plot(rows: list[Row], folder: Path) -> list[Path]:
    """For each precision: time along T and along R, forward and with gradients, and the rates along T."""
    return [_plot_dtype([row for row in rows if row["dtype"] == dtype], dtype, folder) for dtype in _dtypes(rows)]


def _dtypes(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["dtype"] for row in rows))


def _plot_dtype(rows: list[Row], dtype: str, folder: Path) -> Path:
    from matplotlib.ticker import LogLocator

    pyplot, figure, axes = pictures.start(nrows=2, ncols=3, figsize=(12, 7))
    key_dim, length = middle(rows)
    layouts = [layout for layout in (*OURS, SMALL_KEYS, GROUPED) if any(row["layout"] == layout for row in rows)]
    for line, what in zip(axes, (FORWARD, BOTH), strict=True):
        for axis, (along, letter, fixed) in zip(
            line, (("length", "T", {"key_dim": key_dim}), ("key_dim", "R", {"length": length})), strict=False
        ):
            for layout in layouts:
                points = curve(rows, along, what, layout, **fixed)
                if points:
                    pictures.curve(axis, points, layout)
            axis.axhline(1.0, color="black", linestyle=":", linewidth=1)
            at = ", ".join(f"{'R' if key == 'key_dim' else 'T'} = {value}" for key, value in fixed.items())
            axis.set_title(f"{what} at {at}", fontsize=9)
            axis.set_ylabel("time / concatenated heads", fontsize=8)
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_locator(LogLocator(base=2, subs=(1.0, 2**0.5)))
            axis.yaxis.set_major_formatter("{x:.2g}")
            _log_axis(axis, sorted({row[along] for row in rows}), letter)
        _plot_rates(line[2], [row for row in rows if row["measure"] == what and row["key_dim"] == key_dim], layouts)
        line[2].set_title(f"{what} at R = {key_dim}", fontsize=9)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(labels), fontsize=8, loc="lower center", frameon=False)
    figure.suptitle(f"one attention layer, D = {rows[0]['width']}, H = {rows[0]['heads']}, {dtype}", fontsize=10)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    return pictures.save(pyplot, figure, folder / f"scaling-{dtype}.png")


def _plot_rates(axis, rows: Sequence[Row], layouts: Sequence[str]) -> None:
    """Operations a second as parts of those of the machine's matrix product, along T."""
    for layout in layouts:
        points = [(row["length"], row["rate"] / row["limit_rate"]) for row in rows if row["layout"] == layout]
        if points:
            pictures.curve(axis, points, layout)
    own = {row["length"]: row["peer_rate"] / row["limit_rate"] for row in rows}
    axis.plot(*zip(*sorted(own.items()), strict=True), "k:", marker="o", markersize=3.5, label=CONCATENATED)
    axis.legend(handles=[axis.lines[-1]], fontsize=7)
    axis.axhline(1.0, color="black", linewidth=0.5)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("operations a second / matrix product", fontsize=8)
    _log_axis(axis, sorted(own), "T")


def _log_axis(axis, ticks: Sequence[int], letter: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=7)
    axis.set_xlabel(letter, fontsize=8)
    axis.grid(alpha=0.3)
