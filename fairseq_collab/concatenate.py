"""The way back: from the collaborative heads of a fairseq checkpoint to a stock checkpoint. In memory; no files.

Heads that mix P <= K dims are ordinary heads and come back exactly, the others as closely as an ordinary head can;
that is ``decomposition.concatenated``. The way there is ``convert``.
"""

import time
from argparse import Namespace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from fairseq_collab import functional
from fairseq_collab.adapters import fairseq_transformer as adapter
from fairseq_collab.adapters.fairseq_options import architecture
from fairseq_collab.attention import CollaborativeAttention
from fairseq_collab.checkpoint import drop_training_state, set_model_options
from fairseq_collab.config import ATTENTIONS, CollabConfig
from fairseq_collab.conversion import NEW_KEYS, count_parameters, describe
from fairseq_collab.decomposition.concatenated import closest_heads
from fairseq_collab.errors import CollabError
from fairseq_collab.report import ConversionReport

_FLAGS = ("collaborative_heads", "key_dim", "mix_dim", "mix_layout", "mixing_init", "collab_config") + tuple(
    f"{name}_key_dim" for name in ATTENTIONS
)


def to_concatenated(state: dict[str, Any], path: str, progress: bool = True) -> ConversionReport:
    """The way back, in place: an ordinary checkpoint that stock fairseq loads without the plugin.

    Args:
        state: a checkpoint with collaborative heads. path: what to call it in messages.

    Returns:
        a report with a row for every attention that was collaborative; ``weight_error`` and ``bias_error``, of the
        content bias, are relative to the whole attention and 0.0 where exact.

    Raises:
        CollabError: there is nothing to convert, or something that stock fairseq lacks, or a weight is not finite.
    """
    options, name, shapes = describe(state, path)
    if not getattr(options, "collab_config", None):
        raise CollabError(f"{path} has no collaborative heads; nothing to do.")
    config = CollabConfig.from_json(options.collab_config, shapes, path)
    weights = state["model"]
    small = [
        k for k, s in shapes.items() for c in getattr(config, k) if not c.collaborative and c.key_dim < s.embed_dim
    ]
    if small:
        raise CollabError(
            f"{path} has concatenated heads of a smaller key dim ({small[0]}), which stock fairseq lacks."
        )
    modules = {
        one: _module(weights, one, settings, shapes[one.kind].embed_dim)
        for one in adapter.attentions(name, shapes)
        if (settings := getattr(config, one.kind)[one.layer]).collaborative
    }
    report = ConversionReport(parameters=[count_parameters(weights)])
    for one, module in tqdm(modules.items(), desc="attentions", unit="attention", disable=not progress):
        started = time.monotonic()
        exported, errors = ordinary_projections(module)
        dtype = weights[f"{one.prefix}.q_proj.weight"].dtype
        for key in NEW_KEYS:
            report.key_query_parameters[0] += weights.pop(f"{one.prefix}.{key}").numel()
        weights.pop(f"{one.prefix}.pick", None)
        for key, tensor in exported.items():
            weights[f"{one.prefix}.{key}"] = tensor.to(dtype)
            report.key_query_parameters[1] += tensor.numel()
        dims = {"before": module.key_dim, "key_dim": module.embed_dim, "mix_dim": module.mix_dim}
        report.rows.append({"name": one.prefix, **dims, **errors, "seconds": time.monotonic() - started})
        report.mixing[one.prefix] = functional.spread_to_shared(module.mixing.detach(), module.pick, module.key_dim)
    report.parameters.append(count_parameters(weights))
    exact = not any(row["weight_error"] or row["bias_error"] for row in report.rows)
    report.settings = {"conv": "exact" if exact else "svd", "to": "concatenated"}
    options.arch = options._name = architecture(options, name).replace("_collab", "")
    for key in [key for key in vars(options) if key in _FLAGS]:
        delattr(options, key)
    _add_task(options, state)
    set_model_options(state, options)
    drop_training_state(state)
    return report


def _add_task(options: Namespace, state: dict[str, Any]) -> None:
    """Options of the task beside those of the model, where fairseq's own command line leaves them and CTranslate2 looks
    for them: models that were trained under Hydra or have a dataclass do not have them."""
    task = (state.get("cfg") or {}).get("task")
    if task is None:
        return
    task = task if isinstance(task, dict) else vars(task)
    for key, value in {**task, "task": task.get("_name") or task.get("task")}.items():
        if not hasattr(options, key):
            setattr(options, key, value)


@torch.no_grad()
def ordinary_projections(module: CollaborativeAttention) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The projections of the ordinary heads that equal those of ``module`` or are closest to them.

    Returns:
        ``q_proj.weight`` (H*K, D), ``q_proj.bias``, ``k_proj.weight`` (H*K, kdim) and ``k_proj.bias`` in float32 or
        wider; and ``method``, ``weight_error`` and ``bias_error`` as in :func:`to_concatenated`.
    """
    if module.mix_dim <= module.head_dim:
        return module.to_concatenated(), {"method": "exact", "weight_error": 0.0, "bias_error": 0.0}
    heads = closest_heads(
        *(module.q_proj.weight, module.k_proj.weight, module.mixing, module.query_bias, module.pick),
        head_dim=module.head_dim,
        scale=module.scale / functional.default_scale(module.embed_dim, module.num_heads),
    )
    projections = {
        "q_proj.weight": heads.q_weight.flatten(0, 1),
        "q_proj.bias": heads.q_bias.flatten(),
        "k_proj.weight": heads.k_weight.flatten(0, 1),
        "k_proj.bias": heads.q_bias.new_zeros(module.embed_dim),
    }
    return projections, {"method": "svd", "weight_error": heads.error, "bias_error": heads.bias_error}


def _module(weights: dict[str, Any], one: adapter.Attention, settings: Any, width: int) -> CollaborativeAttention:
    prefix = f"{one.prefix}."
    own = {key.removeprefix(prefix): tensor for key, tensor in weights.items() if key.startswith(prefix)}
    broken = [key for key, tensor in own.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise CollabError(f"{prefix}{broken[0]} holds NaN or infinite values; repair or retrain the model.")
    kdim = own["k_proj.weight"].size(1)
    module = CollaborativeAttention.from_config(settings, width, one.num_heads, kdim=kdim, vdim=kdim)
    module.load_state_dict(own)
    return module
