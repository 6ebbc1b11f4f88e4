"""The table of `glue.py`: key dims by tasks, as markdown, JSON and a picture. Nothing here runs a model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glue_scores import METRICS
from markdown_table import markdown_table

STAGES = {
    "original": "original",
    "converted": "converted",
    "finetuned": "fine-tuned again",
    "plain-converted": "converted from the weights alone",
    "plain-finetuned": "that, fine-tuned again",
}
SHORT = {"matthews": "Matthews", "accuracy": "accuracy", "f1": "F1", "pearson": "Pearson", "spearman": "Spearman"}
Row = dict[str, Any]


def figures_of(task: str, scores: dict[str, dict[str, float]]) -> list[float]:
    """The figures that GLUE's table shows for a task: of MNLI those of both dev sets, of others all of its metrics."""
    if task == "MNLI":
        return [scores[split]["accuracy"] for split in ("valid", "valid1")]
    return [scores["valid"][name] for name in METRICS[task]]


def make_rows(results: Sequence[dict[str, Any]], tasks: Sequence[str]) -> list[Row]:
    """One row for the original and two for each key dim and way, before and after the second fine-tuning.

    Args:
        results: of single runs: task, seed, key_dim (None: original), stage and scores.

    Returns:
        rows with ``key_dim``, ``stage``, ``tasks`` (task -> means over seeds of its figures), ``seeds`` (task -> each
        seed's figures) and ``average``: the mean over tasks of the mean of their figures, as GLUE makes it; None where
        a task is missing.
    """
    found: dict[tuple[int | None, str], Row] = {}
    for result in results:
        key = (result["key_dim"], result["stage"])
        row = found.setdefault(key, {"key_dim": key[0], "stage": key[1], "tasks": {}, "seeds": {}})
        figures = figures_of(result["task"], result["scores"])
        row["seeds"].setdefault(result["task"], {})[str(result["seed"])] = figures
    for row in found.values():
        for task, by_seed in row["seeds"].items():
            row["tasks"][task] = [statistics.fmean(column) for column in zip(*by_seed.values(), strict=True)]
        complete = all(task in row["tasks"] for task in tasks)
        means = [statistics.fmean(figures) for figures in row["tasks"].values()]
        row["average"] = statistics.fmean(means) if complete else None
    stages = list(STAGES)
    return sorted(found.values(), key=lambda row: (-(row["key_dim"] or float("inf")), stages.index(row["stage"])))


def markdown(rows: Sequence[Row], tasks: Sequence[str]) -> str:
    """The rows as a table, with a line on what its figures are."""
    head = ["key dim", "", *tasks, "average"]
    lines = []
    for row in rows:
        cells = ["/".join(f"{figure:.1f}" for figure in row["tasks"].get(task, [])) for task in tasks]
        average = "" if row["average"] is None else f"{row['average']:.2f}"
        dim = "" if row["key_dim"] is None else str(row["key_dim"])
        lines.append([dim, STAGES[row["stage"]], *cells, average])
    seeds = sorted({seed for row in rows for by_seed in row["seeds"].values() for seed in by_seed}, key=int)
    shown = [f"{task} {_metrics(task)}" for task in tasks]
    note = f"Dev sets, in percent: {', '.join(shown)}. Seeds: {', '.join(seeds)}{' (means)' if len(seeds) > 1 else ''}."
    return f"{markdown_table(head, lines)}\n{note}\n"


def _metrics(task: str) -> str:
    if task == "MNLI":
        return "matched/mismatched accuracy"
    return "/".join(SHORT[name] for name in METRICS[task])


def plot(rows: Sequence[Row], path: Path) -> bool:
    """Draw the average by key dim, before and after the second fine-tuning; False without matplotlib or averages."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    complete = [row for row in rows if row["average"] is not None]
    if not any(row["key_dim"] for row in complete):
        return False
    figure, axes = pyplot.subplots(figsize=(6, 4))
    styles = {"converted": "o--", "finetuned": "s-", "plain-converted": "x", "plain-finetuned": "+"}
    for stage, style in styles.items():
        points = [(row["key_dim"], row["average"]) for row in complete if row["stage"] == stage]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=STAGES[stage])
    for row in complete:
        if row["key_dim"] is None:
            axes.axhline(row["average"], color="grey", linewidth=1, label=STAGES["original"])
    dims = sorted({row["key_dim"] for row in complete if row["key_dim"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(dims, [str(dim) for dim in dims])
    axes.minorticks_off()
    axes.set_xlabel("key dim R")
    axes.set_ylabel("average score on the dev sets (%)")
    axes.legend()
    figure.tight_layout()
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, dpi=150, format="png")
    pyplot.close(figure)
    temporary.replace(path)
    return True
