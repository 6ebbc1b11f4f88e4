"""Pictures from lines of results: BLEU against key dim, mix dim and parameters, each cell's seeds, errors of layers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiment_grids.store import Line
from experiment_grids.tables import by_cell

COLOURS = {"concatenated": "#888888", "dense": "#4477aa", "window": "#228833", "picked": "#ccbb44"}
LABELS = {"concatenated": "concatenated", "dense": "dense", "window": "windows", "picked": "picked"}
ERRORS = {"weight_error": "of the weights", "score_error": "of the scores", "output_error": "of the outputs"}


def draw(lines: Sequence[Line], experiment: str, folder: Path) -> list[Path]:
    """All pictures of an experiment that its lines allow; none without matplotlib or lines.

    Returns:
        files, ``EXPERIMENT-WHAT.png``.
    """
    cells = by_cell(lines, experiment)
    try:
        import matplotlib
    except ImportError:
        return []
    if not cells:
        return []
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    trained = {name: runs for name, runs in cells.items() if runs[0]["model"] == "trained" and _everywhere(runs[0])}
    pictures: list[tuple[str, Callable[[Path], None]]] = [("cells", lambda path: _cells(cells, path))]
    key = "key_dim" if len({runs[0]["key_dim"] for runs in trained.values() if _shared(runs[0])}) > 1 else "mix_dim"
    if any(len(members) > 1 for members in _series(trained).values() if _shared(members[0][0])):
        pictures.append((key.replace("_", "-"), lambda path: _curve(trained, key, path)))
    if len({runs[0]["parameters"] for runs in cells.values()}) > 1:
        pictures.append(("parameters", lambda path: _parameters(cells, path)))
    if any(runs[0].get("errors") for runs in cells.values()):
        pictures.append(("layers", lambda path: _layers(cells, path)))
    made = []
    for what, work in pictures:
        made.append(folder / f"{experiment}-{what}.png")
        work(made[-1])
    return made


def _everywhere(line: Line) -> bool:
    return line["attentions"] is None or line["attentions"].count("+") == 2


def _shared(line: Line) -> bool:
    return line["layout"] != "concatenated"


def _series(cells: dict[str, list[Line]]) -> dict[tuple[str, str | None], list[list[Line]]]:
    """Cells by layout and start of the mixing."""
    found: dict[tuple[str, str | None], list[list[Line]]] = {}
    for runs in cells.values():
        found.setdefault((runs[0]["layout"], runs[0]["init"]), []).append(runs)
    return found


def _figure(**options: Any) -> Any:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(layout="constrained", squeeze=False, **options)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=130)
    pyplot.close(figure)
    temporary.replace(path)


def _legend(figure: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)


def _values(runs: Sequence[Line], key: str) -> list[float]:
    return [run[key] for run in runs if run[key] is not None]


def _cells(cells: dict[str, list[Line]], path: Path) -> None:
    """Bits and BLEU by cell: a dot a seed, and a stroke for the mean; a thin line where the first cell is."""
    figure, axes = _figure(ncols=2, figsize=(10, 1.1 + 0.27 * len(cells)), sharey=True)
    for axis, key, title in zip(axes, ("bits", "bleu"), ("bits a token (valid)", "BLEU (test)"), strict=True):
        for place, runs in enumerate(cells.values()):
            values = _values(runs, key)
            if not values:
                continue
            axis.scatter(values, [place] * len(values), color=COLOURS[runs[0]["layout"]], alpha=0.7)
            axis.scatter(statistics.fmean(values), place, color="#222222", marker="|", s=180)
            if place == 0:
                axis.axvline(statistics.fmean(values), color="#bbbbbb", linewidth=0.8, zorder=0)
        axis.set(xlabel=title, yticks=range(len(cells)), yticklabels=list(cells))
    axes[0].invert_yaxis()
    _save(figure, path)


def _curve(cells: dict[str, list[Line]], key: str, path: Path) -> None:
    """BLEU and bits against a dim: means with standard deviations; a curve for each layout and start of its mixing."""
    series = _series(cells)
    starts = {layout: sum(other == layout for other, _ in series) for layout, _ in series}
    figure, axes = _figure(ncols=2, figsize=(11, 3.6))
    figures = (("bleu", "BLEU (test)"), ("bits", "bits a token (valid)"))
    ticks: set[int] = set()
    for axis, (figure_key, label) in zip(axes, figures, strict=True):
        for number, ((layout, init), members) in enumerate(series.items()):
            if key == "mix_dim" and not _shared(members[0][0]):
                for runs in members:
                    values = _values(runs, figure_key)
                    if not values:
                        continue
                    axis.axhline(statistics.fmean(values), color="#888888", linewidth=0.9, linestyle="--")
                    where = (1.0, statistics.fmean(values))
                    axis.annotate(
                        f"concatenated R={runs[0]['key_dim']}",
                        where,
                        xycoords=("axes fraction", "data"),
                        ha="right",
                        va="bottom",
                        fontsize=7,
                    )
                continue
            members = sorted((runs for runs in members if _values(runs, figure_key)), key=lambda runs: runs[0][key])
            values = [_values(runs, figure_key) for runs in members]
            points = [runs[0][key] for runs in members]
            ticks.update(points)
            name = LABELS[layout] + (f", {init}" if starts[layout] > 1 else "")
            axis.errorbar(
                [point * 1.012 ** (number - len(series) / 2) for point in points],  # bars side by side
                [statistics.fmean(of_cell) for of_cell in values],
                yerr=[statistics.stdev(of_cell) if len(of_cell) > 1 else 0 for of_cell in values],
                color=COLOURS[layout],
                marker="os^Dv"[number % 5],
                markersize=5,
                linestyle="-" if len(points) > 1 else "none",
                capsize=2,
                label=name,
            )
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)])
        axis.minorticks_off()
        axis.set(xlabel={"key_dim": "key dim R", "mix_dim": "mix dim P"}[key], ylabel=label)
    _legend(figure, axes[0])
    _save(figure, path)


def _parameters(cells: dict[str, list[Line]], path: Path) -> None:
    """BLEU against all parameters: means with standard deviations, numbered as in the legend."""
    figure, axes = _figure(figsize=(9, 1.6 + max(2.6, 0.24 * len(cells))))
    for number, (name, runs) in enumerate(cells.items()):
        values = _values(runs, "bleu")
        axes[0].errorbar(
            runs[0]["parameters"] / 1e6,
            statistics.fmean(values),
            yerr=statistics.stdev(values) if len(values) > 1 else 0,
            color=COLOURS[runs[0]["layout"]],
            marker="os^Dv<>pP*X"[number % 11],
            markersize=7,
            linestyle="none",
            capsize=2,
            label=name,
        )
    axes[0].set(xlabel="parameters, millions", ylabel="BLEU (test)")
    axes[0].ticklabel_format(useOffset=False)
    _legend(figure, axes[0])
    _save(figure, path)


def _layers(cells: dict[str, list[Line]], path: Path) -> None:
    """Errors of every converted attention, means over seeds; a panel for each kind of error that was measured."""
    converted = {name: runs for name, runs in cells.items() if runs[0].get("errors")}
    kinds = [key for key in ERRORS if any(key in one for runs in converted.values() for one in runs[0]["errors"])]
    figure, axes = _figure(ncols=len(kinds), figsize=(2.6 + 3.4 * len(kinds), 3.8), sharey=True)
    for axis, kind in zip(axes, kinds, strict=True):
        for number, (name, runs) in enumerate(converted.items()):
            errors: dict[str, list[float]] = {}
            for run in runs:
                for one in run["errors"]:
                    if kind in one:
                        errors.setdefault(_short(one["name"]), []).append(one[kind])
            if errors:
                means = [statistics.fmean(values) for values in errors.values()]
                colour = f"C{number}"
                axis.plot(list(errors), means, marker="os^Dv"[number % 5], markersize=4, color=colour, label=name)
        axis.tick_params(axis="x", rotation=60)
        axis.set_title(f"error {ERRORS[kind]}", fontsize=10)
    axes[0].set_ylim(bottom=0)  # of all panels, after the curves of all
    axes[0].set_ylabel("relative error")
    _legend(figure, axes[0])
    _save(figure, path)


def _short(name: str) -> str:
    """``decoder.layers.0.encoder_attn`` as ``cross 0``."""
    side, _, layer, attention = name.split(".")
    return f"{'cross' if attention == 'encoder_attn' else side} {layer}"
