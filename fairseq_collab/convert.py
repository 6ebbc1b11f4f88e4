"""Turns the attentions of a fairseq checkpoint into collaborative ones. In memory; files are the caller's.

The mathematics is ``decomposition``, the names are ``adapters``; the way back is ``concatenate``.
"""

import time
from pathlib import Path
from typing import Any, Optional

import torch
from tqdm import tqdm

from fairseq_collab import ranks
from fairseq_collab.adapters import fairseq_transformer as adapter
from fairseq_collab.adapters.fairseq_task import predicts_numbers
from fairseq_collab.adapters.hf_encoder import is_hf_encoder
from fairseq_collab.checkpoint import drop_training_state, model_options, task_options
from fairseq_collab.config import ATTENTIONS, check_attention
from fairseq_collab.conversion import OLD_KEYS, Job, Request, count_parameters, describe
from fairseq_collab.decomposition.layer import (
    CollaborativeLayer,
    ConcatenatedLayer,
    convert_layer,
    score_error,
    weight_error,
)
from fairseq_collab.errors import PLACE, CollabError, merge_places, one_a_line
from fairseq_collab.report import ConversionReport


def check(state: dict[str, Any], path: str, request: Request) -> list[str]:
    """Every reason for which :func:`to_collaborative` would refuse, as far as that can be known beforehand.

    Args:
        state: a checkpoint. path: what to call it.
    """
    if is_hf_encoder(model_options(state, path)):
        from fairseq_collab.fairseq_modules import hf_convert

        return hf_convert.check(state, path, request)
    try:
        options, name, shapes = describe(state, path)
    except CollabError as error:
        return [str(error)]
    kinds = [kind for kind in shapes if kind in request.kinds]
    if getattr(options, "collab_config", None):
        # their projections are smaller, which must not be told as pruned heads
        return [f"{path} has collaborative heads already; start from the checkpoint that it was converted from"]
    reasons = []
    if not kinds:
        reasons.append(f"--attention names none of the attentions of this model, {', '.join(shapes)}")
    if request.key_dim is not None:
        reasons += request.refused_dims({kind: shapes[kind] for kind in kinds})
    adapter.upgrade_names(state["model"], name)
    unusable = (
        (one.prefix, _unusable(state["model"], one, shapes[one.kind].embed_dim))
        for one in adapter.attentions(name, shapes, kinds)
    )
    reasons += merge_places((prefix, reason) for prefix, reason in unusable if reason)
    if request.calibrate is not None and Path(request.calibrate).is_dir():
        from fairseq_collab.fairseq_modules.data_folder import check_data

        reasons += check_data(state, request.calibrate, "--calibrate")
        if request.distill_steps and predicts_numbers(task_options(state)):
            reasons.append("--distill-steps needs predictions of words or classes, this model predicts numbers")
    return reasons


def to_collaborative(state: dict[str, Any], path: str, request: Request, *, checked: bool = False) -> ConversionReport:
    """Converts in place, and the options with the weights; the optimizer's state is dropped.

    Args:
        state: a checkpoint of one of the models of ``adapters.fairseq_transformer``. path: what to call it in messages.
        checked: :func:`check` has found nothing wrong with these already.

    Raises:
        CollabError: all reasons that can be known beforehand, a sentence and a line each; or what came up on the way.
    """
    if reasons := [] if checked else check(state, path, request):
        raise CollabError(one_a_line(reason if reason.endswith(".") else reason + "." for reason in reasons))
    drop_training_state(state)
    if is_hf_encoder(model_options(state, path)):
        from fairseq_collab.fairseq_modules import hf_convert

        return hf_convert.to_collaborative(state, path, request)
    options, name, shapes = describe(state, path)
    job = Job(request, state, options, name, shapes, adapter.attentions(name, shapes, request.kinds))
    report = job.report
    report.parameters = [count_parameters(job.weights)]
    original = None
    if request.calibrate is not None:
        from fairseq_collab import conversion_training

        original = conversion_training.observe_original(job)
    layers = {one.prefix: job.original(one) for one in job.found}
    dims = _choose_key_dims(job, layers)
    with tqdm(job.found, desc="attentions", unit="attention", disable=not request.progress) as bar:
        for one in bar:
            started = time.monotonic()
            converted = _convert_attention(job, one, layers[one.prefix], dims[one.prefix])
            job.write(one, converted)
            error = weight_error(layers[one.prefix], converted)
            bar.set_postfix_str(f"{one.prefix} error {error:.4f}")
            report.rows.append({"name": one.prefix, "seconds": time.monotonic() - started})
    job.store_options()
    if request.refine_steps:
        conversion_training.refine(job, original)
    if request.distill_steps:
        conversion_training.distill_model(job, original)
    _fill_report(job, layers)
    return report


def _unusable(weights: dict[str, Any], one: adapter.Attention, width: int) -> Optional[str]:
    """Why an attention cannot be converted, with ``errors.PLACE`` for its name."""
    for key in ("q_proj.weight", "k_proj.weight", "q_proj.bias"):
        tensor = weights.get(f"{one.prefix}.{key}")
        if tensor is None:
            return f"there is no {key} in {PLACE}: this is no ordinary attention"
        if tensor.size(0) != width:
            return f"{key} of {PLACE} has {tensor.size(0)} rows, not {width}: pruned heads cannot be converted"
        if not torch.isfinite(tensor).all():
            return f"{key} of {PLACE} holds NaN or infinite values; repair or retrain the model"
    if f"{one.prefix}.bias_k" in weights:
        return f"there is an add_bias_kv in {PLACE}, with which collaborative heads are not equivalent"
    return None


def _choose_key_dims(job: Job, layers: dict[str, ConcatenatedLayer]) -> dict[str, int]:
    request = job.request
    names = [one.prefix for one in job.found]
    chosen = dict.fromkeys(names, request.key_dim)
    if request.key_dim is not None and not request.curves:
        return chosen
    curves = ranks.error_curves(layers, job.whitenings, request.progress)
    job.report.curves = {name: dict(zip(c.dims, c.errors, strict=True)) for name, c in curves.items()}
    if request.key_dim is not None:
        return chosen
    if request.max_error is not None:
        return ranks.under_error(curves, request.max_error)
    costs, total = {}, 0
    for one in job.found:
        layer = layers[one.prefix]
        head_dim = layer.q_weight.size(0) // one.num_heads
        width = layer.q_weight.size(1) + layer.k_weight.size(1)
        dense = request.mix_layout == "dense"
        costs[one.prefix] = (width + 2 * one.num_heads, 0) if dense else (width, 2 * one.num_heads * head_dim)
        total += sum(job.weights[f"{one.prefix}.{key}"].numel() for key in OLD_KEYS)
    return ranks.under_budget(curves, costs, int(request.budget * total))


def _convert_attention(job: Job, one: adapter.Attention, layer: ConcatenatedLayer, key_dim: int) -> CollaborativeLayer:
    request, shape = job.request, job.shapes[one.kind]
    whitening = job.whitenings.get(one.prefix)
    while True:
        config = check_attention(request.attention(shape, key_dim), shape, one.kind, one.layer)
        converted = convert_layer(layer, key_dim, config.mix_dim, whitening, request.method, request.seed)
        job.configs[one.prefix] = config
        if request.max_error is None or key_dim >= shape.embed_dim:
            return converted
        error = score_error(layer, converted, whitening)[0] if whitening else weight_error(layer, converted)
        if error <= request.max_error:
            return converted
        key_dim = min(shape.embed_dim, key_dim + max(1, shape.embed_dim // 32))


def _fill_report(job: Job, layers: dict[str, ConcatenatedLayer]) -> None:
    report, request = job.report, job.request
    report.parameters.append(count_parameters(job.weights))
    for one, row in zip(job.found, report.rows, strict=True):
        config, layer, converted = job.configs[one.prefix], layers[one.prefix], job.converted(one)
        row.update(before=layer.q_weight.size(0), key_dim=config.key_dim, mix_dim=config.mix_dim)
        row["weight_error"] = weight_error(layer, converted)
        whitening = job.whitenings.get(one.prefix)
        row["score_error"] = None if whitening is None else score_error(layer, converted, whitening)[0]
        report.mixing[one.prefix] = converted.factors.mixing.float()
    bytes_each = next(tensor.element_size() for key, tensor in job.weights.items() if key.endswith("q_proj.weight"))
    for one in adapter.attentions(job.name, job.shapes):
        if one.kind == "encoder":
            continue
        side = 1 if one.kind == "cross" else 0
        before = job.shapes[one.kind].embed_dim
        config = job.configs.get(one.prefix)
        report.cache_bytes[0][side] += bytes_each * before
        report.cache_bytes[1][side] += bytes_each * (config.key_dim if config else before)
    dims = sorted({config.key_dim for config in job.configs.values()})
    kinds = "+".join(kind for kind in ATTENTIONS if kind in {one.kind for one in job.found})
    report.settings = {
        "conv": request.method,
        "R": dims[0] if len(dims) == 1 else f"{dims[0]}-{dims[-1]}",
        "P": "R" if request.mix_layout == "dense" else request.mix_dim or "K",
        "attn": kinds,
        "calib": report.settings.get("calib", "none"),
        "refine": request.refine_steps,
        "distill": request.distill_steps,
        "seed": request.seed,
    }
    if request.budget is not None:
        report.settings["budget"] = request.budget
    if request.max_error is not None:
        report.settings["max-error"] = request.max_error
