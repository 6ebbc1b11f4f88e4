"""What a run is: its configuration, its name, and the commands' flags that follow from it. Nothing is run here.

A run is known by its whole configuration, not by the experiment that asked for it, so that experiments share runs.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "fairseq_collab"
ALL = "encoder+cross+decoder"
CONCATENATED = "concatenated"
TRAINED, CONVERTED, TUNED = "trained", "converted", "tuned"


@dataclass(frozen=True)
class Setup:
    """What all runs of a folder have in common: size of the model, and length of trainings and conversions.

    calibrate: sentences of text for the weighted, the refined and the distilled conversion.
    """

    width: int = 128
    heads: int = 8
    layers: int = 2
    max_tokens: int = 1500
    updates: int = 3000
    lr: float = 3e-3
    tuning_lr: float = 2e-3
    dropout: float = 0.1
    calibrate: tuple[int, int, int] = (512, 4000, 16000)
    refine_steps: int = 200
    distill_steps: int = 1200

    @property
    def head_dim(self) -> int:
        """K, the width of a concatenated head."""
        return self.width // self.heads


TINY = Setup(
    *(64, 8, 1, 500, 30), lr=1e-3, tuning_lr=1e-3, calibrate=(32, 48, 64), refine_steps=5, distill_steps=5
)  # to see that it runs


@dataclass(frozen=True)
class Run:
    """One model: trained, converted from another run, or another run fine-tuned for an epoch.

    Args:
        layout: concatenated, dense, window or picked. key_dim: R. mix_dim: P, None for concatenated heads.
        init: how the mixing starts, None where it does not.
        attentions: the collaborative ones, joined by ``+``; the others are concatenated and as wide as the model.
        flags: of ``fairseq-collab-convert``, for a conversion. text: whether it sees text (the source side of train).
        source: the run that a conversion or fine-tuning begins with.
    """

    kind: str
    seed: int
    layout: str
    key_dim: int
    mix_dim: int | None = None
    init: str | None = None
    attentions: str = ALL
    flags: tuple[str, ...] = ()
    text: bool = False
    source: Run | None = None

    def configuration(self, setup: Setup) -> dict[str, Any]:
        """Everything that decides about the model, as JSON values."""
        source = self.source.configuration(setup) if self.source else None
        return {
            **asdict(replace(self, source=None)),
            "flags": list(self.flags),
            "source": source,
            "setup": asdict(setup),
        }

    def name(self, setup: Setup) -> str:
        """A folder's name: readable, and different for every configuration."""
        text = json.dumps(self.configuration(setup), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return f"seed{self.seed}-{self.kind}-{self.layout}-R{self.key_dim}-{digest}"


def concatenated(seed: int, key_dim: int) -> Run:
    """An ordinary transformer, with queries and keys of ``key_dim`` in all heads together."""
    return Run(TRAINED, seed, CONCATENATED, key_dim)


def collaborative(
    seed: int, layout: str, key_dim: int, mix_dim: int | None = None, init: str | None = None, attentions: str = ALL
) -> Run:
    """Collaborative heads from scratch. What is not given is what ``fairseq-train`` takes, written out.

    A layout in which every head mixes all dims is dense, and called so.
    """
    if layout == "dense" or mix_dim == key_dim:
        layout, mix_dim = "dense", key_dim
    default = "noisy" if layout == "dense" else "all_ones"
    return Run(TRAINED, seed, layout, key_dim, mix_dim, init or default, attentions)


def converted(source: Run, key_dim: int, mix_dim: int, flags: list[Any], text: bool) -> Run:
    """``source`` with shared keys; dense if ``mix_dim`` is ``key_dim``."""
    layout = "dense" if mix_dim == key_dim else "picked"
    words = tuple(map(str, flags))
    return Run(CONVERTED, source.seed, layout, key_dim, mix_dim, None, flags=words, text=text, source=source)


def tuned(source: Run) -> Run:
    """``source`` after an epoch more."""
    return replace(source, kind=TUNED, flags=(), text=False, source=source)


def common_flags(setup: Setup, device: str) -> list[Any]:
    """Flags of ``fairseq-train`` that all runs share."""
    return [
        *("--user-dir", PLUGIN, *(["--cpu"] if device == "cpu" else []), "--share-all-embeddings"),
        *("--encoder-layers", setup.layers, "--decoder-layers", setup.layers),
        *("--encoder-embed-dim", setup.width, "--decoder-embed-dim", setup.width),
        *("--encoder-ffn-embed-dim", 4 * setup.width, "--decoder-ffn-embed-dim", 4 * setup.width),
        *("--encoder-attention-heads", setup.heads, "--decoder-attention-heads", setup.heads),
        *("--encoder-normalize-before", "--decoder-normalize-before", "--dropout", setup.dropout),
        *("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", 1.0),
        *("--lr-scheduler", "polynomial_decay", "--max-tokens", setup.max_tokens),
        *("--num-workers", 0, "--log-format", "json", "--log-interval", 100),
        *("--no-epoch-checkpoints", "--save-interval-updates", 1000, "--keep-interval-updates", 1),
    ]


def model_flags(run: Run, setup: Setup) -> list[Any]:
    """Flags of ``fairseq-train`` for the model of a run that is trained from scratch."""
    if run.layout == CONCATENATED and run.key_dim == setup.width:
        return ["--arch", "transformer"]
    if run.layout == CONCATENATED:
        return ["--arch", "transformer_collab", "--collaborative-heads", "none", "--key-dim", run.key_dim]
    flags: list[Any] = ["--arch", "transformer_collab"]
    if run.attentions == ALL:
        flags += ["--key-dim", run.key_dim]
    else:
        names = run.attentions.split("+")
        flags += ["--collaborative-heads", ",".join(names)]
        for name in names:
            flags += [f"--{name}-key-dim", run.key_dim]
    flags += ["--mix-layout", run.layout, "--mixing-init", run.init]
    return flags if run.layout == "dense" else [*flags, "--mix-dim", run.mix_dim]


def schedule_flags(run: Run, setup: Setup, epoch: int | None = None) -> list[Any]:
    """Flags of ``fairseq-train`` for how long and how fast a run learns.

    Args:
        epoch: updates of an epoch, for a run that is fine-tuned.
    """
    if run.kind == TUNED:
        flags = ["--lr", setup.tuning_lr, "--total-num-update", epoch, "--max-update", epoch]
        return [*flags, "--max-epoch", 1, "--seed", run.seed]
    warmup = max(1, setup.updates // 9)
    return [
        *("--lr", setup.lr, "--warmup-updates", warmup, "--total-num-update", setup.updates),
        *("--max-update", setup.updates, "--seed", run.seed),
    ]
