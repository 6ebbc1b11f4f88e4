"""Where fairseq's transformers, language models, RoBERTa and BART keep their attention, as data.

Only names of weights and of architectures; the options that describe a model's sizes are in ``fairseq_options``, and
reading and writing files is ``fairseq_collab.checkpoint``.
"""

import re
from argparse import Namespace
from dataclasses import dataclass
from typing import Any, Iterable, Optional

from fairseq_collab.config import AttentionShape

DECODER = {"cross": "decoder.layers.{layer}.encoder_attn", "decoder": "decoder.layers.{layer}.self_attn"}
ENCODER_DECODER = {"encoder": "encoder.layers.{layer}.self_attn", **DECODER}


@dataclass(frozen=True)
class Family:
    """The models of fairseq that share a class.

    Args:
        presets: the stock architectures, as a regular expression. fairseq has other models whose names begin alike.
        attentions: prefixes of the parameters of each kind of attention.
        embeddings: weights of the embeddings of each side that reads text.
        renamed: old beginnings or middles of weights' names, as regular expressions, and what they are today.
    """

    presets: str
    attentions: dict[str, str]
    embeddings: dict[str, str]
    renamed: tuple[tuple[str, str], ...] = ()


BOTH_SIDES = {"encoder": "encoder.embed_tokens.weight", "decoder": "decoder.embed_tokens.weight"}
FAMILIES = {
    "transformer": Family(
        r"transformer(_(tiny|iwslt_de_en|(vaswani_)?wmt_en_(de|fr)(_big)?(_t2t)?))?", ENCODER_DECODER, BOTH_SIDES
    ),
    "transformer_lm": Family(
        r"transformer_lm(_(big|gbw|wiki103|baevski_\w+|gpt\w*))?",
        {"decoder": DECODER["decoder"]},
        {"decoder": BOTH_SIDES["decoder"]},
    ),
    "roberta": Family(
        r"roberta(_(base|large|prenorm))?|xlm",
        {"encoder": "encoder.sentence_encoder.layers.{layer}.self_attn"},
        {"encoder": "encoder.sentence_encoder.embed_tokens.weight"},
        ((r"^decoder\.", "encoder."), (r"\.emb_layer_norm\.", ".layernorm_embedding.")),
    ),
    "bart": Family(r"m?bart_(large|base)(_wmt20)?", ENCODER_DECODER, BOTH_SIDES),
}

# copies that fairseq 0.12.2 stores beside the layers of an encoder
EXTRA_KEYS = re.compile(r"encoder\.(sentence_encoder\.)?layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)")


@dataclass(frozen=True)
class Attention:
    """One attention of a model: its ``kind`` and ``layer``, the prefix of its parameters, and how many heads it has."""

    kind: str
    layer: int
    prefix: str
    num_heads: int


def model_name(args: Any) -> Optional[str]:
    """The family of :data:`FAMILIES` that options were written for; None for others."""
    arch = str(getattr(args, "arch", None) or getattr(args, "_name", None) or "").replace("_collab", "", 1)
    return next((name for name, family in FAMILIES.items() if re.fullmatch(family.presets, arch)), None)


def shapes(args: Namespace, name: str) -> dict[str, AttentionShape]:
    """The attentions of a model with these options, by kind."""
    found = {}
    for kind in FAMILIES[name].attentions:
        side = "encoder" if kind == "encoder" else "decoder"
        width, heads, layers = (getattr(args, f"{side}_{key}") for key in ("embed_dim", "attention_heads", "layers"))
        found[kind] = AttentionShape(width, heads, layers)
    if getattr(args, "no_cross_attention", False):
        found.pop("cross", None)
    return found


def attentions(name: str, found: dict[str, AttentionShape], kinds: Optional[Iterable[str]] = None) -> list[Attention]:
    """Every attention of a model with these shapes in the order in which it runs them, of all ``kinds`` or some."""
    return [
        Attention(kind, layer, FAMILIES[name].attentions[kind].format(layer=layer), shape.num_heads)
        for kind, shape in found.items()
        if kinds is None or kind in kinds
        for layer in range(shape.layers)
    ]


def upgrade_names(state: dict[str, Any], name: str) -> None:
    """Gives the weights of early versions of fairseq their names of today, in place.

    One ``in_proj_weight`` becomes three, prefixes of old models change, and ``EXTRA_KEYS`` are dropped.
    """
    for key in list(state):
        new = key
        for old, today in FAMILIES[name].renamed:
            new = re.sub(old, today, new)
        if new != key:
            state[new] = state.pop(key)
        if EXTRA_KEYS.fullmatch(new):
            del state[new]
            continue
        prefix, _, last = new.rpartition(".")
        if last in ("in_proj_weight", "in_proj_bias") and prefix.endswith("attn"):
            kind = last.removeprefix("in_proj_")
            for part, tensor in zip("qkv", state.pop(new).chunk(3), strict=True):
                state[f"{prefix}.{part}_proj.{kind}"] = tensor
