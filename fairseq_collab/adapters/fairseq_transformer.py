"""Where fairseq's ``transformer`` and ``transformer_lm`` keep their attention, as data and functions of options.

Only names and options; reading and writing files is ``fairseq_collab.checkpoint``.
"""

import re
from argparse import Namespace
from dataclasses import dataclass
from typing import Any, Iterable, Optional

from fairseq_collab.config import AttentionShape

# model name of fairseq -> architecture here, whose options are a superset
ARCHITECTURES = {"transformer": "transformer_collab", "transformer_lm": "transformer_lm_collab"}
ATTENTION_NAMES = {
    "encoder": "encoder.layers.{layer}.self_attn",
    "cross": "decoder.layers.{layer}.encoder_attn",
    "decoder": "decoder.layers.{layer}.self_attn",
}
# copies that fairseq 0.12.2 stores beside the layers of the encoder
EXTRA_KEYS = re.compile(r"encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)")

# options that shape the parameters, with the values of the base architectures
DEFAULTS: dict[str, Any] = {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in {
        "embed_dim": 512,
        "ffn_embed_dim": 2048,
        "layers": 6,
        "attention_heads": 8,
        "normalize_before": False,
        "learned_pos": False,
    }.items()
}
DEFAULTS |= dict.fromkeys(
    (
        "share_all_embeddings",
        "share_decoder_input_output_embed",
        "layernorm_embedding",
        "no_scale_embedding",
        "no_token_positional_embeddings",
        "no_cross_attention",
        "cross_self_attention",
        "adaptive_input",
        "tie_adaptive_weights",
        "tie_adaptive_proj",
        "no_decoder_final_norm",
    ),
    False,
)
DEFAULTS |= {"activation_fn": "relu", "adaptive_softmax_cutoff": None, "adaptive_input_cutoff": None}


def architecture_flags(options: Namespace) -> list[str]:
    """The flags that make the base architecture of a model that of ``options``, for a command line to repeat."""
    flags = []
    for name, default in DEFAULTS.items():
        value = getattr(options, name, default)
        if value == default or value in (None, ""):
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags.append(",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))
    return flags


@dataclass(frozen=True)
class Attention:
    """One attention of a model: its ``kind`` and ``layer``, the prefix of its parameters, and how many heads it has."""

    kind: str
    layer: int
    prefix: str
    num_heads: int


def model_name(args: Any) -> Optional[str]:
    """The model of fairseq that options were written for, ``transformer`` or ``transformer_lm``; None for others."""
    arch = str(getattr(args, "arch", None) or getattr(args, "_name", None) or "")
    for collab in ("_collab", ""):
        for name in sorted(ARCHITECTURES, key=len, reverse=True):
            if arch == name + collab or arch.startswith(name + collab + "_"):
                return name if _is_preset(arch, name) else None
    return None


def _is_preset(arch: str, name: str) -> bool:
    """fairseq has other models whose names begin with ``transformer_`` (align, pointer generator, ulm, ...)."""
    rest = arch.removeprefix(name).removeprefix("_collab")
    if name == "transformer":
        return (
            rest == "" or re.fullmatch(r"_(tiny|iwslt_de_en|(vaswani_)?wmt_en_(de|fr)(_big)?(_t2t)?)", rest) is not None
        )
    return re.fullmatch(r"(_(big|gbw|wiki103|baevski_\w+|gpt\w*))?", rest) is not None


def shapes(args: Namespace, name: str) -> dict[str, AttentionShape]:
    """The attentions of a model with these options, by kind."""
    decoder = AttentionShape(args.decoder_embed_dim, args.decoder_attention_heads, args.decoder_layers)
    if name == "transformer_lm":
        return {"decoder": decoder}
    encoder = AttentionShape(args.encoder_embed_dim, args.encoder_attention_heads, args.encoder_layers)
    found = {"encoder": encoder, "cross": decoder, "decoder": decoder}
    if getattr(args, "no_cross_attention", False):
        del found["cross"]
    return found


def attentions(found: dict[str, AttentionShape], kinds: Iterable[str] = tuple(ATTENTION_NAMES)) -> list[Attention]:
    """Every attention of these kinds in the order in which the model runs them."""
    return [
        Attention(kind, layer, ATTENTION_NAMES[kind].format(layer=layer), shape.num_heads)
        for kind, shape in found.items()
        if kind in kinds
        for layer in range(shape.layers)
    ]


def split_in_proj(state: dict[str, Any]) -> None:
    """Renames what early versions of fairseq stored as one ``in_proj_weight``, and drops ``EXTRA_KEYS``, in place."""
    for key in list(state):
        if EXTRA_KEYS.fullmatch(key):
            del state[key]
            continue
        prefix, _, last = key.rpartition(".")
        if last in ("in_proj_weight", "in_proj_bias") and prefix.endswith("attn"):
            kind = last.removeprefix("in_proj_")
            for part, tensor in zip("qkv", state.pop(key).chunk(3), strict=True):
                state[f"{prefix}.{part}_proj.{kind}"] = tensor
