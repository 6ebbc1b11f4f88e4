"""From a model's options to its configuration: the same checks for ``fairseq-train``, Hydra and Python.

What a configuration is, and whether it fits a model, is in ``config``; the parser's side is in ``fairseq_modules``.
"""

import os
from collections.abc import Mapping
from typing import Any, Optional

from fairseq_collab.config import (
    ATTENTIONS,
    INITS,
    LAYOUTS,
    AttentionShape,
    CollabConfig,
    check_attention,
    resolve_attention,
)
from fairseq_collab.errors import CollabError


def parse_heads(text: Optional[str]) -> frozenset[str]:
    """The attentions named by ``--collaborative-heads``; None names all of them.

    Raises:
        CollabError: an unknown name, or ``none`` together with others.
    """
    if text is None:
        return frozenset(ATTENTIONS)
    names = [name.strip() for name in str(text).replace("_", ",").split(",") if name.strip()]
    if names == ["none"]:
        return frozenset()
    for name in names:
        if name not in ATTENTIONS:
            raise CollabError(
                f"--collaborative-heads has {name!r}; it takes any of {', '.join(ATTENTIONS)} joined by '_' or ',', "
                "or none alone."
            )
    if not names:
        raise CollabError("--collaborative-heads is empty; give none for an ordinary model.")
    return frozenset(names)


def read_config_file(path: str) -> str:
    """The JSON held by a file: JSON itself, or a checkpoint that carries one.

    Raises:
        CollabError: no such file, or a checkpoint that is not collaborative.
    """
    if not os.path.isfile(path):
        raise CollabError(f"--collab-config {path}: there is no such file.")
    with open(path, "rb") as file:
        start = file.read(2)
        if start[:1] != b"P" and start[:1] != b"\x80":
            try:
                return start.decode() + file.read().decode()
            except UnicodeDecodeError:
                raise CollabError(f"--collab-config {path} is neither JSON nor a checkpoint.") from None
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=start == b"PK")
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise CollabError(f"--collab-config {path} could not be read as a checkpoint ({reason}).") from None
    model = (state.get("cfg") or {}).get("model") or state.get("args")
    text = model.get("collab_config") if isinstance(model, dict) else getattr(model, "collab_config", None)
    if not text:
        raise CollabError(
            f"--collab-config {path} is a checkpoint without collaborative attention; convert it with "
            "fairseq-collab-convert, or give --key-dim."
        )
    return text


def resolve_flags(args: Any, shapes: Mapping[str, AttentionShape]) -> CollabConfig:
    """The configuration that a model's options ask for.

    ``args.collab_config`` (a file, or JSON itself as a checkpoint stores it) decides when it is given; flags that
    are given beside it must agree. Without it the flags and the defaults decide.

    Args:
        args: any object with the flags as attributes; missing ones count as not given.
        shapes: the model's attentions, by name.

    Raises:
        CollabError: options that are wrong, do not fit the model, or contradict each other.
    """

    def flag(name: str) -> Any:
        return getattr(args, name, None)

    heads = parse_heads(flag("collaborative_heads"))
    given_dims = {name: flag(f"{name}_key_dim") or flag("key_dim") for name in ATTENTIONS}
    for name in ("key_dim", "mix_dim", *(f"{name}_key_dim" for name in ATTENTIONS)):
        if flag(name) is not None and flag(name) < 1:
            raise CollabError(f"--{name.replace('_', '-')} is {flag(name)}; it must be at least 1.")
    for name in ATTENTIONS:
        if name not in shapes and flag(f"{name}_key_dim") is not None:
            raise CollabError(f"--{name}-key-dim is given, but this model has no {name} attention; leave it out.")
    if heads and not heads & set(shapes):
        raise CollabError(
            f"--collaborative-heads names none of the attentions that this model has, {', '.join(shapes)}; "
            "name one of them, or none for an ordinary model."
        )
    if flag("mix_layout") is not None and flag("mix_layout") not in LAYOUTS:
        raise CollabError(f"--mix-layout is {flag('mix_layout')!r}; known are {', '.join(LAYOUTS)}.")
    if flag("mixing_init") is not None and flag("mixing_init") not in INITS:
        raise CollabError(f"--mixing-init is {flag('mixing_init')!r}; known are {', '.join(INITS)}.")

    text = flag("collab_config")
    if text:
        inline = text.lstrip().startswith("{")
        config = CollabConfig.from_json(
            text if inline else read_config_file(text),
            shapes,
            "the checkpoint's collab_config" if inline else f"--collab-config {text}",
        )
        _refuse_contradictions(config, heads if flag("collaborative_heads") is not None else None, given_dims, args)
        if any(one.collaborative for name in shapes for one in getattr(config, name)):
            refuse_unsupported(args)
        return config

    if heads:
        refuse_unsupported(args)
    found = {}
    for name, shape in shapes.items():
        one = resolve_attention(
            shape,
            collaborative=name in heads,
            key_dim=given_dims[name],
            mix_dim=flag("mix_dim"),
            mix_layout=flag("mix_layout"),
            mixing_init=flag("mixing_init") or "default",
        )
        found[name] = tuple(check_attention(one, shape, name, layer) for layer in range(shape.layers))
    return CollabConfig(**found)


def _refuse_contradictions(config: CollabConfig, heads, given_dims: Mapping[str, Optional[int]], args: Any) -> None:
    for name in ATTENTIONS:
        for layer, one in enumerate(getattr(config, name)):
            sparse = one.collaborative and one.mix_dim < one.key_dim
            asked = {
                "key_dim": given_dims[name],
                "mix_dim": getattr(args, "mix_dim", None) if one.collaborative else None,
                "mix_layout": getattr(args, "mix_layout", None) if sparse else None,
                "collaborative": None if heads is None else name in heads,
            }
            for key, value in asked.items():
                if value is not None and value != getattr(one, key):
                    raise CollabError(
                        f"The options ask for {key} {value} in the {name} attention of layer {layer}, but the "
                        f"checkpoint or --collab-config says {getattr(one, key)}; leave the option out, or make "
                        "another model with fairseq-collab-convert."
                    )


def refuse_unsupported(args: Any) -> None:
    """Refuses the options of stock attention that cannot mean anything here.

    Raises:
        CollabError: naming the option and what to do.
    """
    for name in ("encoder_xformers_att_config", "decoder_xformers_att_config"):
        if getattr(args, name, None):
            raise CollabError(
                f"--{name.replace('_', '-')} replaces the attention and cannot be combined with collaborative heads; "
                "leave it out, or use the stock architecture."
            )
    if getattr(args, "mha_heads_to_keep", -1) not in (-1, None):
        raise CollabError(
            "--mha-heads-to-keep prunes heads, but collaborative heads share their keys; leave it out, or choose a "
            "smaller --key-dim."
        )
    if getattr(args, "mha_reg_scale_factor", 0) not in (0, None):
        raise CollabError(
            "--mha-reg-scale-factor regularises separate heads, but collaborative heads share their keys; leave it out."
        )
