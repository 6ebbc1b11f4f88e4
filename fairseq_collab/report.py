"""What a conversion did: the rows, totals and signature, as text, JSON and pictures. Converts nothing."""

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fairseq_collab import __version__

TITLES = {
    "name": "attention",
    "before": "K*H",
    "key_dim": "key dim",
    "mix_dim": "mix dim",
    "method": "method",
    "weight_error": "weight error",
    "bias_error": "bias error",
    "score_error": "score error",
    "output_error": "output error",
    "seconds": "seconds",
}


@dataclass
class ConversionReport:
    """Rows of ``TITLES``, and figures before and after.

    Args:
        rows: one an attention; errors are relative (0 is exact), those that were not computed are missing.
        parameters, key_query_parameters: of the whole model, and of its query and key projections with mixing.
        cache_bytes: of keys in all decoder layers, a generated token and a source token.
        file_bytes: of the checkpoints.
        bits_per_token, bleu: on the evaluation data, where it was given.
        unit: what a prediction is made for, a token or a sentence.
        settings: parts of the signature. curves: errors by key dim and attention. mixing: (H, R) by attention.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    key_query_parameters: list[int] = field(default_factory=lambda: [0, 0])
    cache_bytes: list[list[int]] = field(default_factory=lambda: [[0, 0], [0, 0]])
    file_bytes: list[int] = field(default_factory=list)
    bits_per_token: list[float] = field(default_factory=list)
    bleu: list[dict[str, Any]] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)
    unit: str = "token"
    settings: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, dict[int, float]] = field(default_factory=dict)
    mixing: dict[str, Tensor] = field(default_factory=dict)

    @property
    def signature(self) -> str:
        """Names how the numbers came about, as sacreBLEU's signatures do."""
        return "|".join(f"{key}:{value}" for key, value in {**self.settings, "version": __version__}.items())

    def table(self) -> str:
        """A line an attention, then the totals."""
        columns = [key for key in TITLES if any(row.get(key) is not None for row in self.rows)]
        cells = [[TITLES[key] for key in columns]]
        cells += [[_shown(key, row.get(key)) for key in columns] for row in self.rows]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        lines = [
            "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
            for line in cells
        ]
        lines.append(f"query and key parameters: {_arrow(self.key_query_parameters, ',')}")
        lines.append(f"all parameters: {_arrow(self.parameters, ',')}")
        if any(self.cache_bytes[0]):
            shown = [" + ".join(f"{one:,}" for one in part) for part in self.cache_bytes]
            lines.append(f"key cache, bytes a token (generated + source): {shown[0]} -> {shown[1]}")
        if self.file_bytes:
            lines.append(f"file size in MB: {_arrow([size / 1e6 for size in self.file_bytes], ',.1f')}")
        if self.divergence:
            lines.append(
                f"divergence from the original, nats a {self.unit}, held out: {_arrow(self.divergence, '.4f')}"
            )
        if self.bits_per_token:
            split = self.settings.get("eval", "data")
            lines.append(f"loss on {split}, bits a {self.unit}: {_arrow(self.bits_per_token, '.4f')}")
            lines.append(f"perplexity on {split}: {_arrow([2**bits for bits in self.bits_per_token], '.3f')}")
        if self.bleu:
            lines.append(f"BLEU: {_arrow([one['score'] for one in self.bleu], '.2f')}   {self.bleu[0]['signature']}")
        return "\n".join(lines)

    def save(self, folder: Path) -> list[Path]:
        """Writes report.json, and the pictures where matplotlib is installed, each whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        data = {key: value for key, value in asdict(self).items() if key != "mixing"}
        path = folder / "report.json"
        temporary = folder / ".report.json.tmp"
        temporary.write_text(json.dumps({"signature": self.signature, **data}, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
        return [path, *self._plot(folder)]

    def _plot(self, folder: Path) -> list[Path]:
        try:
            import matplotlib

            matplotlib.use("Agg")
            from matplotlib import pyplot
        except ImportError:
            return []
        pictures = {"errors.png": self._plot_errors(pyplot), "mixing.png": self._plot_mixing(pyplot)}
        if self.curves:
            pictures["curves.png"] = self._plot_curves(pyplot)
        for name, figure in pictures.items():
            temporary = folder / f".{name}.tmp"
            figure.savefig(temporary, format="png", dpi=120)
            pyplot.close(figure)
            os.replace(temporary, folder / name)
        return [folder / name for name in pictures]

    def _plot_errors(self, pyplot: Any) -> Any:
        kinds = [key for key in ("weight_error", "score_error", "output_error") if self.rows[0].get(key) is not None]
        names = [f"{row['name']}  {row['before']}→{row['key_dim']}" for row in self.rows]
        figure, axis = pyplot.subplots(figsize=(7, 1.2 + 0.35 * len(names)), layout="constrained")
        height = 0.8 / len(kinds)
        for number, key in enumerate(kinds):
            places = [place + number * height for place in range(len(names))]
            axis.barh(places, [row[key] for row in self.rows], height, label=TITLES[key])
        axis.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], names)
        axis.invert_yaxis()
        axis.set_xlabel("relative error")
        axis.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper right", frameon=False, ncols=len(kinds))
        return figure

    def _plot_curves(self, pyplot: Any) -> Any:
        figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        chosen = {row["name"]: row["key_dim"] for row in self.rows}
        colours = pyplot.get_cmap("viridis")
        for number, (name, curve) in enumerate(self.curves.items()):
            colour = colours(number / max(1, len(self.curves) - 1))
            dims, errors = list(curve), list(curve.values())
            axis.plot(dims, errors, marker=".", color=colour, label=name)
            axis.axvline(chosen[name], color=colour, linewidth=0.5, linestyle=":")
        axis.set(xlabel="key dim R", ylabel="relative error of the decomposition", ylim=(0, None), xlim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize="x-small", ncols=1 + len(self.curves) // 10)
        return figure

    def _plot_mixing(self, pyplot: Any) -> Any:
        columns = min(3, len(self.mixing))
        lines = math.ceil(len(self.mixing) / columns)
        figure, axes = pyplot.subplots(
            lines, columns, figsize=(4 * columns, 0.6 + 1.3 * lines), squeeze=False, layout="constrained"
        )
        for axis in axes.flat[len(self.mixing) :]:
            axis.set_axis_off()
        for axis, (name, mixing) in zip(axes.flat, self.mixing.items(), strict=False):
            shown = axis.imshow(
                mixing.abs().numpy(), aspect="auto", cmap="magma", vmin=0, vmax=1, interpolation="nearest"
            )
            axis.set_title(name, fontsize="small")
            axis.set(xlabel="shared dim", ylabel="head")
        figure.colorbar(shown, ax=axes, label="|mixing|, largest of a dim = 1")
        return figure


def _shown(key: str, value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if key.endswith("error") else f"{value:.1f}" if key == "seconds" else str(value)


def _arrow(values: list[Any], form: str) -> str:
    return " -> ".join(f"{value:{form}}" for value in values)
