"""Converts fairseq's checkpoints of encoders of transformers to shared keys. In memory; files are the caller's.

The other models of fairseq are ``fairseq_collab.convert``, models outside fairseq ``fairseq_collab.swap``.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

from fairseq import tasks
from fairseq.data import Dictionary
from torch import Tensor, nn

import fairseq_collab.models  # noqa: F401 (registers the architectures)
from fairseq_collab.adapters.hf_encoder import IDS_KEY, MODEL_PREFIX
from fairseq_collab.checkpoint import model_options, set_model_options, task_options
from fairseq_collab.config import CollabConfig
from fairseq_collab.conversion import Request
from fairseq_collab.errors import CollabError
from fairseq_collab.fairseq_modules import hf_folder, hf_start
from fairseq_collab.fairseq_modules.data_folder import dictionary_files, no_dictionary
from fairseq_collab.fairseq_modules.hf_encoder import HFEncoder
from fairseq_collab.fairseq_modules.hf_swap import calibration_batches, encoder_shape, swap
from fairseq_collab.fairseq_modules.task_config import task_config
from fairseq_collab.report import ConversionReport


def is_swapped(options: Namespace) -> bool:
    """Whether an encoder with these options has shared keys."""
    return any(one.collaborative for one in hf_start.attention_configs(options))


def check(state: dict[str, Any], path: str, request: Request) -> list[str]:
    """Every reason for which :func:`to_collaborative` would refuse, as far as that can be known beforehand."""
    options, reasons = model_options(state, path), []
    if is_swapped(options):
        reasons.append(f"{path} has collaborative heads already; start from the checkpoint that it was converted from")
    if "encoder" not in request.kinds:
        reasons.append("--attention names none of the attentions of this model, encoder")
    if request.distill_steps:
        reasons.append("--distill-steps is not for encoders of transformers; train the converted checkpoint instead")
    if request.key_dim is None:
        reasons.append("--budget and --max-error are not for encoders of transformers; give --key-dim")
    else:
        reasons += request.refused_dims({"encoder": encoder_shape(hf_folder.config_of(options.hf_config))})
    if request.calibrate is not None and Path(request.calibrate).is_dir():
        reasons += _check_data(options, task_options(state), request.calibrate)
    return reasons


def _check_data(options: Namespace, task: Namespace, data: str) -> list[str]:
    name = dictionary_files(task, Path(data))["encoder"]
    path = Path(data) / name
    if not path.is_file():
        return [f"--calibrate {data}{no_dictionary(Path(data), name)}"]
    dictionary = Dictionary.load(str(path))
    dictionary.add_symbol("<mask>")
    try:
        hf_start.check_dictionary(options, dictionary, f"--calibrate {data}")
    except CollabError as error:
        return [str(error)]
    return []


def to_collaborative(state: dict[str, Any], path: str, request: Request) -> ConversionReport:
    """Converts in place, and the options with the weights.

    Args:
        state: a checkpoint that :func:`check` finds nothing wrong with. path: what to call it in messages.

    Raises:
        CollabError: what came up on the way.
    """
    options = model_options(state, path)
    model = load_model(state, options)
    shape = encoder_shape(model.config)
    configs = (request.attention(shape, request.key_dim),) * shape.layers
    batches = _calibration(state, model, request) if request.calibrate is not None else None
    report = swap(
        model,
        configs,
        batches,
        method=request.method,
        refine_steps=request.refine_steps,
        seed=request.seed,
        device=request.device,
    )
    store_model(state, model.cpu())
    options.collab_config = CollabConfig(encoder=configs).to_json()
    set_model_options(state, options)
    return report


def load_model(state: dict[str, Any], options: Namespace) -> nn.Module:
    """The model of transformers that a checkpoint holds, in float32 and evaluation mode.

    Raises:
        CollabError: the weights are not those of the configuration.
    """
    model = hf_start.make_model(options)
    weights = state["model"]
    own = {key.removeprefix(MODEL_PREFIX): weights[key] for key in weights if key.startswith(MODEL_PREFIX)}
    try:
        model.load_state_dict(own)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise CollabError(f"the checkpoint's weights are not those of its configuration: {reason}") from error
    return model.eval()


def store_model(state: dict[str, Any], model: nn.Module) -> None:
    """Puts a model of transformers in the place of the one in a checkpoint, in its dtype."""
    weights = state["model"]
    old = {key: weights.pop(key) for key in list(weights) if key.startswith(MODEL_PREFIX)}
    model.to(next(tensor.dtype for tensor in old.values() if tensor.is_floating_point()))
    weights.update((MODEL_PREFIX + key, tensor) for key, tensor in model.state_dict().items())


def _calibration(state: dict[str, Any], model: nn.Module, request: Request) -> list[dict[str, Tensor]]:
    """Samples of the train split of ``request.calibrate``, read by the checkpoint's own task."""
    task = tasks.setup_task(task_config(state, request.calibrate))
    encoder = HFEncoder(task.source_dictionary, model, state["model"][IDS_KEY])
    return calibration_batches(task, encoder, request.sentences, request.seed)
