"""Turns the attentions of a fairseq checkpoint into collaborative ones. In memory; files are the caller's.

The mathematics is ``decomposition``, the names are ``adapters``; the way back is ``concatenate``.
"""

import time
from dataclasses import dataclass, field
from typing import Any, Iterable, Optional

import torch
from tqdm import tqdm

from fairseq_collab.adapters import fairseq_transformer as adapter
from fairseq_collab.checkpoint import drop_training_state, model_options, set_model_options
from fairseq_collab.config import ATTENTIONS, AttentionConfig, CollabConfig, check_attention, resolve_attention
from fairseq_collab.decomposition.cp import Heads, decompose, fit_query_bias
from fairseq_collab.errors import CollabError


@dataclass
class ConversionReport:
    """What was done to each attention: rows of ``name, before, key_dim, mix_dim, error, seconds``."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    key_query_before: int = 0
    key_query_after: int = 0
    parameters_before: int = 0
    parameters_after: int = 0


def to_collaborative(
    state: dict[str, Any],
    path: str,
    key_dim: int,
    kinds: Iterable[str] = ATTENTIONS,
    mix_dim: Optional[int] = None,
    mix_layout: str = "picked",
    progress: bool = True,
) -> ConversionReport:
    """Converts the attentions of these kinds in place, and the options with them; the optimizer's state is dropped.

    Args:
        state: a checkpoint of fairseq's ``transformer`` or ``transformer_lm``. path: what to call it in messages.
        key_dim: R. kinds: any of encoder, cross, decoder.
        mix_dim: P, K when None. mix_layout: ``picked``, or ``dense`` for P = R.

    Raises:
        CollabError: all reasons that can be known beforehand, in one sentence each.
    """
    options, name, shapes = describe(state, path)
    kinds = [kind for kind in shapes if kind in set(kinds)]
    reasons = []
    if getattr(options, "collab_config", None):
        reasons.append(f"{path} has collaborative heads already; start from the checkpoint that it was converted from")
    if not kinds:
        reasons.append(f"--attention names none of the attentions of this model, {', '.join(shapes)}")
    layout = {"mix_layout": mix_layout, "mix_dim": mix_dim}
    wanted = {kind: resolve_attention(shapes[kind], collaborative=True, key_dim=key_dim, **layout) for kind in kinds}
    for kind, config in wanted.items():
        try:
            check_attention(config, shapes[kind], kind)
        except CollabError as error:
            reasons.append(str(error))
    weights = state["model"]
    adapter.split_in_proj(weights)
    found = adapter.attentions(shapes, kinds)
    if not reasons:
        reasons += [reason for one in found if (reason := _unusable(weights, one, shapes[one.kind].embed_dim))]
    if reasons:
        raise CollabError(" ".join(reason if reason.endswith(".") else reason + "." for reason in reasons))

    report = ConversionReport(parameters_before=count_parameters(weights))
    for one in tqdm(found, desc="attentions", unit="attention", disable=not progress):
        report.rows.append(_convert_attention(weights, one, wanted[one.kind], report))
    report.parameters_after = count_parameters(weights)
    layers = {kind: (AttentionConfig(False, shape.embed_dim),) * shape.layers for kind, shape in shapes.items()}
    layers |= {kind: (config,) * shapes[kind].layers for kind, config in wanted.items()}
    options.collab_config = CollabConfig(**layers).to_json()
    options.arch = options._name = adapter.ARCHITECTURES[name]
    set_model_options(state, options)
    drop_training_state(state)
    return report


def describe(state: dict[str, Any], path: str):
    options = model_options(state, path)
    name = adapter.model_name(options)
    if name is None:
        arch = getattr(options, "arch", None) or getattr(options, "_name", None)
        known = ", ".join(adapter.ARCHITECTURES)
        raise CollabError(f"{path} is a {arch} model; this version converts {known} and their presets.")
    return options, name, adapter.shapes(options, name)


def _unusable(weights: dict[str, Any], one: adapter.Attention, width: int) -> Optional[str]:
    for key in ("q_proj.weight", "k_proj.weight", "q_proj.bias"):
        tensor = weights.get(f"{one.prefix}.{key}")
        if tensor is None:
            return f"{one.prefix} has no {key}: this is no ordinary attention"
        if tensor.size(0) != width:
            return f"{one.prefix}.{key} has {tensor.size(0)} rows, not {width}: pruned heads cannot be converted"
        if not torch.isfinite(tensor).all():
            return f"{one.prefix}.{key} holds NaN or infinite values; repair or retrain the model"
    if f"{one.prefix}.bias_k" in weights:
        return f"{one.prefix} has add_bias_kv, with which collaborative heads are not equivalent"
    return None


def _convert_attention(
    weights: dict[str, Any], one: adapter.Attention, config: AttentionConfig, report: ConversionReport
) -> dict[str, Any]:
    started = time.monotonic()
    old = {key: weights.pop(f"{one.prefix}.{key}") for key in ("q_proj.weight", "q_proj.bias", "k_proj.weight")}
    dropped = weights.pop(f"{one.prefix}.k_proj.bias")
    dtype = old["q_proj.weight"].dtype
    heads = Heads.from_weights(old["q_proj.weight"], old["k_proj.weight"], one.num_heads)
    factors, pick, errors = decompose(heads, config.key_dim, config.mix_dim)
    new = {
        "q_proj.weight": factors.q.T,
        "k_proj.weight": factors.k.T,
        "mixing": factors.mixing.gather(1, pick),
        "query_bias": fit_query_bias(factors, pick, old["k_proj.weight"], old["q_proj.bias"]),
    }
    for key, tensor in new.items():
        weights[f"{one.prefix}.{key}"] = tensor.to(dtype).contiguous()
    if config.mix_layout == "picked":
        weights[f"{one.prefix}.pick"] = pick.contiguous()
    report.key_query_before += sum(tensor.numel() for tensor in (*old.values(), dropped))
    report.key_query_after += sum(tensor.numel() for tensor in new.values())
    return {
        "name": one.prefix,
        "before": heads.q.size(1),
        "key_dim": config.key_dim,
        "mix_dim": config.mix_dim,
        "error": errors[-1],
        "seconds": time.monotonic() - started,
    }


def count_parameters(weights: dict[str, Any]) -> int:
    """Parameters, those that are stored twice because they are tied counted once."""
    unique = {tensor.data_ptr(): tensor for key, tensor in weights.items() if not key.endswith(("version", ".pick"))}
    return sum(tensor.numel() for tensor in unique.values())
