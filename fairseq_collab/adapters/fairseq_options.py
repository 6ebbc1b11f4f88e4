"""The options of fairseq's command line that describe the sizes of a model, and which architecture they belong to.

Where the weights are is ``fairseq_transformer``.
"""

from argparse import Namespace
from typing import Any

_SIDE = {
    "embed_dim": 512,
    "ffn_embed_dim": 2048,
    "layers": 6,
    "attention_heads": 8,
    "normalize_before": False,
    "learned_pos": False,
}


def _sides(options: dict[str, Any], *sides: str) -> dict[str, Any]:
    return {f"{side}_{key}": value for side in sides for key, value in options.items()}


_TRANSFORMER = {
    **_sides(_SIDE, "encoder", "decoder"),
    **dict.fromkeys(
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
    ),
    **{"activation_fn": "relu", "adaptive_softmax_cutoff": None, "adaptive_input_cutoff": None},
}
_POSITIONS = {"max_source_positions": 1024, "max_target_positions": 1024}
_ROBERTA = {
    **{"encoder_embed_dim": 768, "encoder_ffn_embed_dim": 3072, "encoder_layers": 12, "encoder_attention_heads": 12},
    **{"encoder_normalize_before": False, "layernorm_embedding": True, "untie_weights_roberta": False},
    **{"activation_fn": "gelu", "pooler_activation_fn": "tanh", "spectral_norm_classification_head": False},
    "max_positions": None,
}
_BART_SIZES = {"embed_dim": 1024, "ffn_embed_dim": 4096, "layers": 12, "attention_heads": 16}
_BART = {
    **_TRANSFORMER,
    **_POSITIONS,
    **_sides({**_BART_SIZES, "learned_pos": True}, "encoder", "decoder"),
    **dict.fromkeys(
        ("share_all_embeddings", "share_decoder_input_output_embed", "layernorm_embedding", "no_scale_embedding"), True
    ),
    **{"activation_fn": "gelu", "pooler_activation_fn": "tanh", "spectral_norm_classification_head": False},
}
_BART_BASE_SIZES = {"embed_dim": 768, "ffn_embed_dim": 3072, "layers": 6, "attention_heads": 12}

# options that shape the parameters or what is computed from them, with the values that each architecture gives them;
# what is True there, no flag can make False, and so several architectures are needed
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "transformer": {"transformer_collab": {**_TRANSFORMER, **_POSITIONS}},
    "transformer_lm": {"transformer_lm_collab": _TRANSFORMER},
    "roberta": {
        "roberta_collab": _ROBERTA,
        "roberta_collab_prenorm": {**_ROBERTA, "layernorm_embedding": False, "encoder_normalize_before": True},
    },
    "bart": {
        "bart_collab_large": _BART,
        "mbart_collab_large": {**_BART, "no_scale_embedding": False},
        "mbart_collab_base_wmt20": {
            **_BART,
            **_sides(_BART_BASE_SIZES, "encoder", "decoder"),
            **{"no_scale_embedding": False, "layernorm_embedding": False},
        },
    },
}
# where the side of the encoder is given, these follow it unless they are given, too
_FOLLOW = {
    "decoder_embed_dim": "encoder_embed_dim",
    "decoder_ffn_embed_dim": "encoder_ffn_embed_dim",
}


def architecture(options: Namespace, name: str) -> str:
    """The collaborative architecture that flags can bring to the sizes of ``options``.

    Args:
        name: a family of ``fairseq_transformer``.
    """
    for arch, defaults in DEFAULTS[name].items():
        if all(getattr(options, key, True) for key, default in defaults.items() if default is True):
            return arch
    return next(iter(DEFAULTS[name]))


def architecture_flags(options: Namespace, name: str) -> list[str]:
    """The flags that make :func:`architecture` that of ``options``, with ``--arch``, for a command line to repeat."""
    arch = architecture(options, name)
    defaults = DEFAULTS[name][arch]
    flags = ["--arch", arch]
    for key, default in defaults.items():
        value = getattr(options, key, default)
        leader = _FOLLOW.get(key)
        led = leader is not None and getattr(options, leader, defaults[leader]) != defaults[leader]
        if (value == default and not led) or value in (None, "", False):
            continue
        flags.append("--" + key.replace("_", "-"))
        if value is not True:
            flags.append(",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))
    return flags
