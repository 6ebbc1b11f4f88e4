"""What `quickstart.py` shows at the end: counts from a checkpoint, the table and the plot.

The training log of fairseq is read here too. Nothing here starts a process.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def figures_of(line: str) -> dict[str, float] | None:
    """The figures in a line of fairseq's training log in JSON format, or None if it has none."""
    try:
        figures = json.loads(line.split("| train_inner | ", 1)[1])
        return {name: float(figures[name]) for name in ("num_updates", "loss", "wps", "ups")}
    except (IndexError, ValueError, KeyError):
        return None


def read_log(path: Path) -> dict[str, float]:
    """Median words and updates a second over a training log, resumptions included, and the last loss.

    Raises:
        ValueError: the log holds no figures.
    """
    found = [f for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if (f := figures_of(line))]
    if not found:
        raise ValueError(f"{path} holds no figures of a training")
    return {
        "words_per_second": statistics.median(f["wps"] for f in found),
        "updates_per_second": statistics.median(f["ups"] for f in found),
        "loss": found[-1]["loss"],
    }


def count_model(checkpoint: Path) -> dict[str, int]:
    """Parameters of queries and keys, and bytes of the decoder's key caches in float32, from a checkpoint."""
    import torch

    import fairseq_collab  # noqa: F401

    state = torch.load(checkpoint, map_location="cpu", weights_only=True)["model"]
    parts = (".q_proj.", ".k_proj.", ".mixing", ".query_bias")
    key_query = sum(value.numel() for name, value in state.items() if any(part in name for part in parts))
    caches = {
        kind: sum(4 * v.size(0) for n, v in state.items() if n.startswith("decoder.") and n.endswith(suffix))
        for kind, suffix in (("self", "self_attn.k_proj.weight"), ("cross", "encoder_attn.k_proj.weight"))
    }
    return {"key_query_parameters": key_query, "cache_self": caches["self"], "cache_cross": caches["cross"]}


COLUMNS: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
    ("model", lambda row: row["model"]),
    ("BLEU", lambda row: f"{row['bleu']:.2f}"),
    ("chrF2", lambda row: f"{row['chrf']:.2f}"),
    ("parameters", lambda row: f"{row['parameters']:,}"),
    ("key/query", lambda row: f"{row['key_query_parameters']:,}"),
    ("train words/s", lambda row: f"{speed:,.0f}" if (speed := row["train_words_per_second"]) else "–"),
    ("decode tokens/s", lambda row: f"{row['decode_tokens_per_second']:,.0f}"),
    ("key cache B/token", lambda row: f"{row['cache_self']:,} + {row['cache_cross']:,}"),
]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table, with what its columns mean below."""
    cells = [[title for title, _ in COLUMNS]] + [[show(row) for _, show in COLUMNS] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    notes = [
        f"{rows[0]['updates']:,} updates each; test set of {rows[0]['langs']}, beam 5, detokenised.",
        "converted: the concatenated model, decomposed, refined and distilled on 2,000 sentences; never fine-tuned.",
        f"BLEU: {rows[0]['bleu_signature']}",
        f"chrF2: {rows[0]['chrf_signature']}",
        "key/query: parameters of the query and key projections, mixing and query bias, in all layers.",
        "train words/s: target tokens, median over the run; decode tokens/s: target tokens of the best translations.",
        "key cache: bytes of float32 keys in all decoder layers, a generated token (self-attention) + a source token",
        "(cross-attention).",
    ]
    return "\n".join([*lines, "", *notes]) + "\n"


COLOURS = {"concatenated": "#888888", "converted": "#ccbb44", "collaborative-window": "#66ccee"}


def plot(rows: Sequence[dict[str, Any]], path: Path) -> bool:
    """Bars of BLEU and of the key cache; False, and no file, without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
    names = [row["model"].replace("-", "\n") for row in rows]
    panels = (
        ("BLEU", [row["bleu"] for row in rows]),
        ("key cache, bytes a token", [row["cache_self"] + row["cache_cross"] for row in rows]),
    )
    for axis, (title, values) in zip(axes, panels, strict=True):
        axis.bar_label(
            axis.bar(names, values, color=[COLOURS.get(row["model"], "#4477aa") for row in rows]), fmt="{:,.4g}"
        )
        axis.set_title(title)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.15)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png", dpi=150)
    pyplot.close(figure)
    os.replace(temporary, path)
    return True
