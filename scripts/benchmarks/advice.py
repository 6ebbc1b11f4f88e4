"""Sentences on the choice of a layout and a key dim, made from the rows of the suites. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks import scaling
from benchmarks.attention import BOTH
from benchmarks.common import Row
from benchmarks.layers import CONCATENATED

MIXING = {"dense": "dense mixing", "windows": "window mixing", "picked": "picked mixing"}


def advice(suites: Mapping[str, list[Row]]) -> list[str]:
    """What the figures say of the choice of a layout, of the key dim, and of whole models; in every precision."""
    sentences = []
    rows = suites.get("scaling", [])
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        chosen = [row for row in rows if row["dtype"] == dtype]
        key_dim, length = scaling.middle(chosen)
        sentences.append(f"{dtype}: {layout_advice(chosen, key_dim)}")
        limits = [
            f"{MIXING[layout]} is {scaling.said(scaling.curve(chosen, 'key_dim', BOTH, layout, length=length), 'R')}"
            for layout in scaling.OURS
        ]
        sentences.append(f"{dtype}: with gradients at T = {length}, against concatenated heads, {'; '.join(limits)}.")
    whole = [
        *model_facts(suites.get("train", []), "a training step"),
        *model_facts(suites.get("generate", []), "beam search"),
    ]
    if whole:
        sentences.append(f"In a whole model, {'; '.join(whole)}.")
    return sentences


def layout_advice(rows: Sequence[Row], key_dim: int) -> str:
    """Between which lengths dense mixing is faster than windows, in training."""
    dense, windows = (
        dict(scaling.curve(rows, "length", BOTH, layout, key_dim=key_dim)) for layout in ("dense", "windows")
    )
    points = [(length, windows[length] / dense[length]) for length in sorted(dense)]
    where = scaling.said(points, "T")
    return f"with gradients at R = {key_dim}, window mixing compared with dense mixing is {where}."


def model_facts(rows: Sequence[Row], what: str) -> list[str]:
    """How ours compare with concatenated heads in a whole model."""
    found = []
    for row in rows:
        if row["peer"] != CONCATENATED:
            continue
        if row.get("measure") == "key cache":
            found.append(
                f"the key cache of {MIXING[row['layout']]} has {row['ratio']:.4g} of the bytes ({row['dtype']})"
            )
        else:
            found.append(f"{what} with {MIXING[row['layout']]} takes {row['ratio']:.2f} of the time ({row['dtype']})")
    return found
