"""Folders with swapped models: written whole or not at all, read back into the class that was saved.

A folder holds ``config.json`` (the library's configuration and what each attention became) and
``collaborative.safetensors``, a model type and a name that transformers itself does not load: it could only fill the
attentions with random numbers.
"""

import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional, Union

import torch
from torch import Tensor, nn

from fairseq_collab import __version__
from fairseq_collab._transformers import import_transformers
from fairseq_collab.adapters.base import CollaborativeLayerAdapter, as_adapter, known_adapter
from fairseq_collab.adapters.library_attention import LibraryAttention
from fairseq_collab.config import AttentionConfig
from fairseq_collab.errors import CollabError

CONFIG, WEIGHTS, GENERATION = "config.json", "collaborative.safetensors", "generation_config.json"
MODEL_TYPE = "fairseq_collab"
FORMAT_VERSION = 1
FOREIGN_WEIGHTS = (
    "model.safetensors",
    "pytorch_model.bin",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)

Adapter = Union[CollaborativeLayerAdapter, type[CollaborativeLayerAdapter]]


def save_collaborative(model: nn.Module, folder: Union[str, os.PathLike], *, force: bool = False) -> Path:
    """Writes a swapped model of transformers to a folder, for :func:`load_collaborative`.

    Other files of the folder, such as a tokenizer's, stay as they are.

    Args:
        model: as ``swap_to_collaborative`` left it, trained further or not.
        folder: made if it does not exist. force: replace a model that is there.

    Returns:
        the folder.

    Raises:
        CollabError: the model was not swapped, or is none of transformers; the folder holds a model; or it cannot be
            written, and then what was there is still there.
    """
    from safetensors.torch import save

    folder = Path(folder)
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    attentions = {name: one for name, one in model.named_modules() if isinstance(one, LibraryAttention)}
    if not attentions:
        raise CollabError(f"This {type(model).__name__} has no shared keys to save; swap_to_collaborative comes first.")
    if not hasattr(getattr(model, "config", None), "to_dict"):
        raise CollabError(
            f"{type(model).__name__} has no configuration of transformers; keep its state_dict() instead, and swap a "
            "new model before loading it."
        )
    taken = [name for name in FOREIGN_WEIGHTS if (folder / name).exists()]
    if taken:
        raise CollabError(
            f"{folder} holds another model ({taken[0]}), which transformers would go on loading; give another folder."
        )
    if not force and any((folder / name).exists() for name in (CONFIG, WEIGHTS)):
        raise CollabError(f"{folder} holds a model already; give another folder, or force=True to replace it.")
    tensors, same = _unique(model.state_dict())
    settings = {
        "model_type": MODEL_TYPE,
        "format_version": FORMAT_VERSION,
        "fairseq_collab_version": __version__,
        "model_class": type(model).__name__,
        "attn_implementation": getattr(model.config, "_attn_implementation", None),
        "options": _options(model),
        "attentions": {name: _describe(one) for name, one in attentions.items()},
        "same": same,
        "config": model.config.to_dict(),
    }
    files = {WEIGHTS: save(tensors), CONFIG: _json(settings)}
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        files[GENERATION] = generation.to_json_string().encode()
    _write(folder, files)
    return folder


def load_collaborative(
    folder: Union[str, os.PathLike],
    *,
    model_class: Optional[type[nn.Module]] = None,
    adapter: Optional[Adapter] = None,
    attn_implementation: Optional[str] = None,
    device: Union[torch.device, str, None] = None,
) -> Any:
    """The model that :func:`save_collaborative` wrote, in evaluation mode and the dtype that it had.

    Args:
        folder: of :func:`save_collaborative`.
        model_class: needed for classes that are not part of transformers.
        adapter: needed for adapters that are not part of this package.
        attn_implementation: ``sdpa`` or ``eager``; that of the saved model when None.
        device: where the model goes; the CPU when None.

    Raises:
        CollabError: no such folder, none of this kind, of a newer version, or with weights that do not fit.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    settings = _read_settings(folder)
    if not (folder / WEIGHTS).is_file():
        raise CollabError(f"{folder} has no {WEIGHTS}; copy the whole folder again.")
    if attn_implementation not in (None, "eager", "sdpa"):
        raise CollabError(f'attn_implementation is {attn_implementation!r}; shared keys need "sdpa" or "eager".')
    model = _build(settings, folder, model_class, attn_implementation)
    _swap_empty(model, settings["attentions"], folder, adapter)
    try:
        tensors = load_file(folder / WEIGHTS)
    except Exception as error:  # safetensors has an exception of its own, which is no subclass of a common one
        raise CollabError(f"{folder / WEIGHTS} is damaged ({str(error).splitlines()[0]}); copy it again.") from error
    tensors.update({name: tensors[kept] for name, kept in settings["same"].items() if kept in tensors})
    _take(model, tensors, folder / WEIGHTS)
    if (folder / GENERATION).is_file() and hasattr(model, "generation_config"):
        model.generation_config = import_transformers().GenerationConfig.from_pretrained(folder)
    return model.eval() if device is None else model.eval().to(device)


def _describe(module: LibraryAttention) -> dict[str, Any]:
    dims = {key: getattr(module, key) for key in ("key_dim", "mix_dim", "mix_layout", "scale")}
    return {"adapter": module.adapter, **dims}


def _options(model: nn.Module) -> dict[str, Any]:
    """Arguments of the constructor that the configuration does not hold."""
    known = inspect.signature(type(model).__init__).parameters
    if "add_pooling_layer" in known and getattr(model, "pooler", True) is None:
        return {"add_pooling_layer": False}
    return {}


def _unique(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors, those that are tied once, on the CPU; and by name which of them the others are."""
    tensors, same = {}, {}
    seen: dict[tuple, str] = {}
    for name, tensor in state.items():
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if tensor.numel() and place in seen:
            same[name] = seen[place]
            continue
        seen[place] = name
        tensors[name] = tensor.detach().cpu().contiguous().clone()
    return tensors, same


def _json(settings: Mapping[str, Any]) -> bytes:
    return (json.dumps(settings, indent=2, default=str) + "\n").encode()


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """All files under temporary names first, then renamed, the configuration last."""
    temporary = {name: folder / f".{name}.{os.getpid()}.tmp" for name in files}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            with open(temporary[name], "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for name in sorted(files, key=CONFIG.__eq__):
            os.replace(temporary[name], folder / name)
    except OSError as error:
        raise CollabError(
            f"{folder} could not be written ({error.strerror}); make room or give another folder."
        ) from error
    finally:
        for path in temporary.values():
            if path.parent.is_dir():
                path.unlink(missing_ok=True)


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise CollabError(f"{folder} has no {CONFIG}; give a folder that save_collaborative wrote.")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CollabError(f"{path} is no JSON ({error}); copy the folder again.") from error
    if not isinstance(settings, dict) or settings.get("model_type") != MODEL_TYPE:
        kind = settings.get("model_type") if isinstance(settings, dict) else None
        raise CollabError(
            f"{path} is of a {kind} model without shared keys; load it with transformers and swap_to_collaborative it."
        )
    if settings.get("format_version", 0) > FORMAT_VERSION:
        raise CollabError(
            f"{path} has format {settings['format_version']}, and this version reads up to {FORMAT_VERSION}; it was "
            f"written by fairseq_collab {settings.get('fairseq_collab_version')}: install that or a newer one."
        )
    missing = [key for key in ("model_class", "options", "attentions", "same", "config") if key not in settings]
    if missing:
        raise CollabError(f"{path} has no entry {missing[0]}; copy the folder again.")
    return settings


def _build(
    settings: dict[str, Any], folder: Path, model_class: Optional[type[nn.Module]], implementation: Optional[str]
) -> nn.Module:
    """A model of the saved class, still with ordinary heads and random weights."""
    transformers = import_transformers()
    name = settings["model_class"]
    if model_class is None:
        model_class = getattr(transformers, name, None)
    if model_class is None:
        raise CollabError(
            f"{folder} is of the class {name}, which transformers {transformers.__version__} does not have; give it as "
            "model_class."
        )
    entries = dict(settings["config"])
    kind = model_class.config_class
    if kind is None or kind.model_type != entries.get("model_type"):
        kind = type(transformers.AutoConfig.for_model(entries["model_type"]))
    config = kind.from_dict(entries)
    more = dict(settings["options"])
    implementation = implementation or settings.get("attn_implementation")
    if implementation is not None:
        more["attn_implementation"] = implementation
    return model_class._from_config(config, **more)


def _swap_empty(model: nn.Module, attentions: dict[str, Any], folder: Path, adapter: Optional[Adapter]) -> None:
    """Puts modules of the saved dims in the places of the attentions."""
    for name in {entry["adapter"] for entry in attentions.values()}:
        own = None if adapter is None else as_adapter(adapter)
        chosen = own if own is not None and type(own).__name__ == name else known_adapter(name)
        if chosen is None:
            raise CollabError(f"{folder} was swapped with {name}, which is none of this package; give it as adapter.")
        found = chosen.find(model)
        for one_name, entry in attentions.items():
            if entry["adapter"] != name:
                continue
            if one_name not in found:
                raise CollabError(f"{folder} has an attention {one_name}, which {type(model).__name__} does not have.")
            one = found[one_name]
            dims = entry["key_dim"], entry["mix_dim"], entry["mix_layout"]
            one.replace(model, one.make(AttentionConfig(True, *dims, scale=entry["scale"])))


def _take(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Fills parameters and buffers, in the dtypes that were saved.

    Raises:
        CollabError: a tensor is missing, too many, or of another shape.
    """
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    wanted = model.state_dict()
    for name, one in wanted.items():
        if name not in tensors:
            raise CollabError(f"{path} has no {name}; it is not of this model, or damaged.")
        if tensors[name].shape != one.shape:
            raise CollabError(
                f"{path} has {name} of shape {tuple(tensors[name].shape)}, the configuration makes it "
                f"{tuple(one.shape)}; the two files do not belong together."
            )
    unknown = [name for name in tensors if name not in wanted]
    if unknown:
        raise CollabError(f"{path} has {unknown[0]}, which {type(model).__name__} does not have.")
    for name in wanted:
        own[name].data = tensors[name]
