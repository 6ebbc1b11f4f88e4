"""What a conversion is asked for, and the state of a checkpoint on its way: reading and writing single attentions.

The steps themselves are ``convert`` and ``conversion_training``.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor

from fairseq_collab.adapters import fairseq_transformer as adapter
from fairseq_collab.adapters.fairseq_options import architecture
from fairseq_collab.checkpoint import model_options, set_model_options
from fairseq_collab.config import (
    ATTENTIONS,
    AttentionConfig,
    AttentionShape,
    CollabConfig,
    check_attention,
    resolve_attention,
)
from fairseq_collab.decomposition.calibration import Whitening
from fairseq_collab.decomposition.layer import CollaborativeLayer, ConcatenatedLayer
from fairseq_collab.errors import PLACE, CollabError, merge_places
from fairseq_collab.report import ConversionReport

OLD_KEYS = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")
NEW_KEYS = ("q_proj.weight", "k_proj.weight", "mixing", "query_bias")


@dataclass(frozen=True)
class Request:
    """What to convert to, and how.

    Args:
        key_dim: R of every attention; or give ``budget``, the share of the query and key parameters to keep, or
            ``max_error``, the largest relative error (of the scores when calibrated, of the weights otherwise).
        kinds: any of encoder, cross, decoder.
        mix_dim: P, K when None. mix_layout: ``picked``, or ``dense`` for P = R.
        method: of decomposition.
        calibrate: folder of ``fairseq-preprocess`` with unlabelled text. sentences: how many are drawn from it.
        refine_steps, distill_steps: of training on the calibration text. seed: of everything random.
        device: where the model runs; the decomposition itself is float64 on the CPU.
        curves: find the error against R even where no choice depends on it.
    """

    key_dim: Optional[int] = None
    budget: Optional[float] = None
    max_error: Optional[float] = None
    kinds: tuple[str, ...] = ATTENTIONS
    mix_dim: Optional[int] = None
    mix_layout: str = "picked"
    method: str = "cp"
    calibrate: Optional[str] = None
    sentences: int = 512
    refine_steps: int = 0
    distill_steps: int = 0
    seed: int = 0
    device: str = "cpu"
    curves: bool = False
    progress: bool = True

    def attention(self, shape: AttentionShape, key_dim: int) -> AttentionConfig:
        """The configuration of one attention."""
        mix_dim = None if self.mix_dim is None else min(self.mix_dim, key_dim)
        return resolve_attention(
            shape, collaborative=True, key_dim=key_dim, mix_layout=self.mix_layout, mix_dim=mix_dim
        )

    def refused_dims(self, shapes: Mapping[str, AttentionShape]) -> list[str]:
        """Why ``key_dim`` or ``mix_dim`` cannot be that of these attentions, each reason once."""
        found = []
        for kind, shape in shapes.items():
            try:
                check_attention(self.attention(shape, self.key_dim), shape, kind)
            except CollabError as error:
                # all layers are alike
                found.append((kind, str(error).replace(f"the {kind} attention of layer 0", f"the {PLACE} attention")))
        reasons = merge_places(found)
        if self.mix_dim is not None and self.mix_dim > self.key_dim:
            reasons.append(f"--mix-dim is {self.mix_dim}, more than the {self.key_dim} shared dims")
        return reasons


@dataclass
class Job:
    """A checkpoint on its way."""

    request: Request
    state: dict[str, Any]
    options: Namespace
    name: str
    shapes: dict[str, AttentionShape]
    found: list[adapter.Attention]
    report: ConversionReport = field(default_factory=ConversionReport)
    whitenings: dict[str, Whitening] = field(default_factory=dict)
    configs: dict[str, AttentionConfig] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.state["model"]

    def original(self, one: adapter.Attention) -> ConcatenatedLayer:
        """An attention that was not converted yet."""
        q, bias, k = (self.weights[f"{one.prefix}.{key}"].float() for key in OLD_KEYS[:3])
        return ConcatenatedLayer(q, bias, k, one.num_heads)

    def write(self, one: adapter.Attention, converted: CollaborativeLayer) -> None:
        """Puts a converted layer in the place of the original one, in its dtype."""
        dtype = self.weights[f"{one.prefix}.q_proj.weight"].dtype
        for key in OLD_KEYS:
            dropped = self.weights.pop(f"{one.prefix}.{key}", None)
            self.report.key_query_parameters[0] += 0 if dropped is None else dropped.numel()
        tensors = (converted.q_weight, converted.k_weight, converted.mixing, converted.query_bias)
        for key, tensor in zip(NEW_KEYS, tensors, strict=True):
            self.weights[f"{one.prefix}.{key}"] = tensor.to(dtype).contiguous()
            self.report.key_query_parameters[1] += tensor.numel()
        if self.configs[one.prefix].mix_layout == "picked":
            self.weights[f"{one.prefix}.pick"] = converted.pick.contiguous()

    def converted(self, one: adapter.Attention) -> CollaborativeLayer:
        """An attention that was converted."""
        config = self.configs[one.prefix]
        tensors = [self.weights[f"{one.prefix}.{key}"] for key in NEW_KEYS]
        pick = self.weights.get(f"{one.prefix}.pick")
        if pick is None:
            pick = torch.arange(config.key_dim).expand(one.num_heads, config.key_dim)
        return CollaborativeLayer(*tensors, pick)

    def write_trained(self, prefix: str, module: torch.nn.Module) -> None:
        """Takes over what was trained in a converted attention."""
        for key in NEW_KEYS:
            old = self.weights[f"{prefix}.{key}"]
            self.weights[f"{prefix}.{key}"] = module.get_parameter(key).detach().cpu().to(old.dtype)

    def store_options(self) -> None:
        """Makes the checkpoint one of the collaborative architecture."""
        layers = {}
        for kind, shape in self.shapes.items():
            prefixes = [one.prefix for one in adapter.attentions(self.name, {kind: shape})]
            plain = AttentionConfig(False, shape.embed_dim)
            layers[kind] = tuple(self.configs.get(prefix, plain) for prefix in prefixes)
        self.options.collab_config = CollabConfig(**layers).to_json()
        self.options.arch = self.options._name = architecture(self.options, self.name)
        set_model_options(self.state, self.options)


def describe(state: dict[str, Any], path: str) -> tuple[Namespace, str, dict[str, AttentionShape]]:
    """The options of a checkpoint's model, fairseq's name of it, and its attentions.

    Raises:
        CollabError: no adapter knows the model.
    """
    options = model_options(state, path)
    name = adapter.model_name(options)
    if name is None:
        arch = getattr(options, "arch", None) or getattr(options, "_name", None)
        known = ", ".join(adapter.FAMILIES)
        raise CollabError(f"{path} is a {arch} model; this version converts {known} and their presets.")
    return options, name, adapter.shapes(options, name)


def count_parameters(weights: dict[str, Any]) -> int:
    """Parameters, those that are stored twice because they are tied counted once."""
    unique = {tensor.data_ptr(): tensor for key, tensor in weights.items() if not key.endswith(("version", ".pick"))}
    return sum(tensor.numel() for tensor in unique.values())
