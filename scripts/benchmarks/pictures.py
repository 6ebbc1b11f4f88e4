"""Bars and curves of ratios, for the pictures of the suites of speed. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Bar = tuple[float, float | None]  # a ratio and its target
COLOURS = {"dense": "#4477aa", "windows": "#228833", "picked": "#ccbb44"}
PEER_COLOURS = {"grouped-query": "#ee6677", "concatenated, small keys": "#888888", "fork-style": "#aa3377"}


def start(**options: Any):
    """``pyplot`` without a window, and its figure and axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot, *pyplot.subplots(**options)


def bars(path: Path, title: str, groups: Sequence[str], panels: Mapping[str, Mapping[str, Sequence[Bar]]]) -> Path:
    """A panel beside the other, in each a group of bars for every name of ``groups``; the peer is the line at 1.

    Args:
        panels: title of a panel -> name of a bar -> ratio and target in each group.
    """
    widths = [len(groups) * len(series) for series in panels.values()]
    figure_width = 2.2 + sum(0.25 * width + 0.8 for width in widths)
    pyplot, figure, axes = start(
        ncols=len(panels), figsize=(figure_width, 3.8), squeeze=False, gridspec_kw={"width_ratios": widths}
    )
    for axis, (name, series) in zip(axes[0], panels.items(), strict=True):
        step = 0.8 / len(series)
        highest = 1.0
        for i, (label, values) in enumerate(series.items()):
            places = [j + (i - (len(series) - 1) / 2) * step for j in range(len(groups))]
            ratios = [ratio for ratio, _ in values]
            axis.bar(places, ratios, 0.9 * step, label=label, color=COLOURS.get(label, PEER_COLOURS.get(label)))
            highest = max(highest, *ratios)
            for place, (ratio, target) in zip(places, values, strict=True):
                axis.text(place, ratio, f"{ratio:.2f}", ha="center", va="bottom", fontsize=6)
                if target is not None:
                    axis.hlines(target, place - step / 2, place + step / 2, color="black", linewidth=1.5)
        axis.axhline(1.0, color="grey", linestyle=":")
        axis.set_ylim(0, 1.12 * highest)
        axis.set_xticks(range(len(groups)), groups, fontsize=7)
        axis.set_title(name, fontsize=9)
    axes[0][0].set_ylabel("ratio; black: target", fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(labels), fontsize=8, loc="lower center", frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return save(pyplot, figure, path)


def curve(axis: Any, points: Sequence[tuple[float, float]], label: str) -> None:
    """A line through (x, ratio) in the colour of ``label``; peers are dashed."""
    colour = COLOURS.get(label, PEER_COLOURS.get(label))
    style = "-" if label in COLOURS else "--"
    xs, ratios = zip(*sorted(points), strict=True)
    axis.plot(xs, ratios, style, marker="o", markersize=3.5, label=label, color=colour)


def save(pyplot: Any, figure: Any, path: Path) -> Path:
    """Writes and closes a figure."""
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
