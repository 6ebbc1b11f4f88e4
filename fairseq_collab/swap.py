"""The verb: puts collaborative heads in the place of the attentions of a PyTorch model, in memory.

Where the attentions are is ``adapters``, how they are computed ``decomposition``; files are ``pretrained``. For
checkpoints of fairseq see ``convert``.
"""

import operator
import time
from collections.abc import Iterable, Mapping
from typing import Any, Optional, Union

import torch
from torch import nn
from tqdm import tqdm

from fairseq_collab import functional
from fairseq_collab.adapters.base import CollaborativeLayerAdapter, FoundAttention, as_adapter, fill
from fairseq_collab.adapters.observed import ObservedLibraryModel, split
from fairseq_collab.attention import CollaborativeAttention
from fairseq_collab.config import AttentionConfig
from fairseq_collab.decomposition.calibration import Whitening
from fairseq_collab.decomposition.layer import CollaborativeLayer, convert_layer, score_error, weight_error
from fairseq_collab.decomposition.methods import METHODS
from fairseq_collab.decomposition.observation import collect_moments
from fairseq_collab.decomposition.refine import Student, refine_layers
from fairseq_collab.errors import PLACE, CollabError, merge_places, one_a_line
from fairseq_collab.report import ConversionReport


@torch.inference_mode(False)  # what is made in that mode can never be trained
@torch.enable_grad()
def swap_to_collaborative(
    model: nn.Module,
    adapter: Union[CollaborativeLayerAdapter, type[CollaborativeLayerAdapter]],
    dim_shared_query_key: Union[int, Iterable[int]],
    tol: float = 1e-6,
    *,
    method: str = "cp",
    mix_dim: Union[int, str, None] = None,
    calibration: Optional[Iterable[Any]] = None,
    refine_steps: int = 0,
    seed: int = 0,
    device: Union[torch.device, str, None] = None,
    progress: bool = True,
) -> ConversionReport:
    """Makes the heads of a trained model share their keys and queries, in place.

    The model is unchanged if anything is refused or goes wrong. Names and argument order are those of the original
    package (arXiv 2006.16362).

    Args:
        model: an encoder or decoder, a model with a head, or a composite that contains one.
        adapter: says where its attentions are, such as ``BERTCollaborativeAdapter``; the class or an instance.
        dim_shared_query_key: R, the shared dims, 1 to H*K; or one for each attention in the order of the model. H*K
            shares nothing and changes no output beyond rounding.
        tol: the fit of a layer ends when a sweep improves its relative error by less than this share. It bounds no
            error: that depends on R, and is in the report. Sweeps also end after 100.
        method: ``cp``, ``parafac`` or ``svd``, see ``fairseq_collab.decomposition.methods``.
        mix_dim: P, the shared dims that one head mixes: K when None (sparse), R with ``"dense"``.
        calibration: batches of unlabelled text as the model's forward takes them. The fit then weighs errors by what
            the attentions see on it. An eighth of the text is kept apart to judge refinement by.
        refine_steps: of training every layer on the original's outputs on that text; needs ``calibration``.
        seed: of what is held out, and of ``parafac``.
        device: the model is moved there first, and stays there. The fit itself is float64 on the CPU.
        progress: show bars.

    Returns:
        what was done, a row an attention: ``table()``, ``save(folder)``.

    Raises:
        CollabError: every reason for which the swap is refused, a sentence and a line each.
    """
    adapter, mix_dim, refine_steps = as_adapter(adapter), _plain(mix_dim), _plain(refine_steps)
    found = adapter.find(model)
    configs = _configs(adapter, model, found, dim_shared_query_key, mix_dim)
    if method not in METHODS:
        raise CollabError(f"There is no method {method!r}; known are {', '.join(METHODS)}.")
    if not isinstance(refine_steps, int) or refine_steps < 0:
        raise CollabError(f"refine_steps is {refine_steps!r}; give a whole number, at least 0.")
    if refine_steps and calibration is None:
        raise CollabError("refine_steps needs text to train on; give calibration batches.")
    if device is not None:
        model.to(device)
    report = ConversionReport(parameters=[_count(model)])
    whitenings: dict[str, Whitening] = {}
    observed = None
    mode = {module: module.training for module in model.modules()}
    try:
        model.eval()
        if calibration is not None:
            train, held_out, count = split(calibration, next(model.parameters()).device, seed)
            if refine_steps and not held_out:
                raise CollabError("calibration has one batch, and refinement holds one out; give at least two.")
            observed = ObservedLibraryModel(model, found, train, held_out)
            moments = collect_moments(observed, progress)
            for name in found:
                if name not in moments:
                    raise CollabError(f"{name} did not run on the calibration text; give batches in which it does.")
            whitenings = {name: Whitening.of(*pair) for name, pair in moments.items()}
            report.settings["calib"] = count
        converted = {}
        with tqdm(found.items(), desc="attentions", unit="attention", disable=not progress) as bar:
            for name, one in bar:
                started = time.monotonic()
                dims = configs[name].key_dim, configs[name].mix_dim
                converted[name] = convert_layer(one.parts.layer, *dims, whitenings.get(name), method, seed, tol)
                report.rows.append({"name": name, "seconds": time.monotonic() - started})
        if refine_steps:
            students = {
                name: Student(one.standalone(configs[name], converted[name]), whitenings[name])
                for name, one in found.items()
            }
            errors = refine_layers(observed, students, refine_steps, progress)
            for row in report.rows:
                converted[row["name"]] = _layer(students[row["name"]].module)
                row["output_error_before"], row["output_error"] = (one**0.5 for one in errors[row["name"]])
    finally:
        for module, training in mode.items():
            module.training = training
    _describe(report, found, configs, converted, whitenings)
    for name, one in found.items():
        module = one.make(configs[name])
        fill(module, converted[name])
        one.replace(model, module)
    report.parameters.append(_count(model))
    dims = sorted({config.key_dim for config in configs.values()})
    report.settings = {
        "conv": method,
        "R": dims[0] if len(dims) == 1 else f"{dims[0]}-{dims[-1]}",
        "P": mix_dim if mix_dim is not None else "K",
        "adapter": type(adapter).__name__,
        "calib": report.settings.get("calib", "none"),
        "refine": refine_steps,
        "seed": seed,
    }
    return report


def _configs(
    adapter: CollaborativeLayerAdapter,
    model: nn.Module,
    found: dict[str, FoundAttention],
    dims: Union[int, Iterable[int]],
    mix_dim: Union[int, str, None],
) -> dict[str, AttentionConfig]:
    """What each attention becomes.

    Raises:
        CollabError: all reasons for which it cannot be done.
    """
    reasons = adapter.problems(model, found)
    dims = _plain(dims)
    if isinstance(dims, (int, str, Mapping)) or not isinstance(dims, Iterable):
        dims = [dims] * len(found)
    else:
        dims = [_plain(dim) for dim in dims]
    if len(dims) != len(found):
        reasons.append(
            f"dim_shared_query_key has {len(dims)} entries for {len(found)} attentions; give one number, or one for "
            f"each of {', '.join(found)}."
        )
    configs, refused = {}, []
    for (name, one), key_dim in zip(found.items(), dims, strict=False):
        config = _config(one, key_dim, mix_dim)
        if isinstance(config, str):
            refused.append((name, config))
        else:
            configs[name] = config
    if reasons or refused:
        raise CollabError(one_a_line([*reasons, *merge_places(refused)]))
    return configs


def _config(one: FoundAttention, key_dim: Any, mix_dim: Union[int, str, None]) -> Union[AttentionConfig, str]:
    """The configuration of an attention, or why there is none, with ``errors.PLACE`` for its name."""
    parts = one.parts
    heads, width = parts.num_heads, one.width
    if isinstance(key_dim, bool) or not isinstance(key_dim, int) or not 1 <= key_dim <= width:
        return f"dim_shared_query_key is {key_dim!r} for {PLACE}; give a whole number from 1 to {width}."
    if mix_dim == "dense":
        mix_dim = key_dim
    elif mix_dim is None:
        mix_dim = min(width // heads, key_dim)
    least = -(-key_dim // heads)
    if isinstance(mix_dim, bool) or not isinstance(mix_dim, int) or not least <= mix_dim <= key_dim:
        return (
            f'mix_dim is {mix_dim!r} for {PLACE}; give "dense", or from {least}, below which shared dims lie idle, '
            f"to {key_dim}."
        )
    scale = parts.scale if parts.scale is not None else functional.default_scale(width, heads)
    return AttentionConfig(True, key_dim, mix_dim, "dense" if mix_dim == key_dim else "picked", scale=scale)


def _plain(value: Any) -> Any:
    """A whole number of numpy or torch as an ``int``, anything else as it is."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def _layer(module: CollaborativeAttention) -> CollaborativeLayer:
    """The weights of a module that was trained."""
    parts = module.q_proj.weight, module.k_proj.weight, module.mixing, module.query_bias
    return CollaborativeLayer(*(part.detach().double().cpu() for part in parts), module.pick.cpu())


def _describe(
    report: ConversionReport,
    found: dict[str, FoundAttention],
    configs: dict[str, AttentionConfig],
    converted: dict[str, CollaborativeLayer],
    whitenings: dict[str, Whitening],
) -> None:
    """Fills the rows from the layers as they were and as they are."""
    for row in report.rows:
        name = row["name"]
        one, config, layer, whitening = found[name], configs[name], converted[name], whitenings.get(name)
        original = one.parts.layer
        row.update(before=one.width, key_dim=config.key_dim, mix_dim=config.mix_dim)
        row["weight_error"] = weight_error(original, layer)
        row["score_error"] = None if whitening is None else score_error(original, layer, whitening)[0]
        report.mixing[name] = layer.factors.mixing.float()
        parts = one.parts
        old = [*parts.query.parameters(), *parts.key.parameters()]
        report.key_query_parameters[0] += sum(part.numel() for part in old)
        new = layer.q_weight, layer.k_weight, layer.mixing, layer.query_bias
        report.key_query_parameters[1] += sum(part.numel() for part in new)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
