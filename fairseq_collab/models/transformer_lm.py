"""Registers ``transformer_lm_collab`` and its presets: language models with collaborative attention."""

from argparse import Namespace
from contextlib import contextmanager
from typing import Any, Iterator

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY, register_model, register_model_architecture
from fairseq.models import transformer_lm as stock_lm
from fairseq.models.transformer import TransformerConfig

from fairseq_collab.config import AttentionShape
from fairseq_collab.fairseq_modules.options import WithFlags, add_flags, build_with_config, preset
from fairseq_collab.fairseq_modules.transformer import CollaborativeTransformerDecoder


def lm_shapes(args: Namespace) -> dict[str, AttentionShape]:
    """The attentions of a decoder-only transformer with these options."""
    return {"decoder": AttentionShape(args.decoder_embed_dim, args.decoder_attention_heads, args.decoder_layers)}


class CollaborativeLanguageModelDecoder(CollaborativeTransformerDecoder):
    """The decoder from a language model's flat options."""

    def __init__(self, args: Namespace, dictionary: Any, embed_tokens: Any, no_encoder_attn: bool = True):
        super().__init__(TransformerConfig.from_namespace(args), dictionary, embed_tokens, no_encoder_attn)


@contextmanager
def _decoder_class(decoder: type) -> Iterator[None]:
    """fairseq's ``build_model`` names its decoder as a global of its module; ours stands there while it runs."""
    stock = stock_lm.TransformerDecoder
    stock_lm.TransformerDecoder = decoder
    try:
        yield
    finally:
        stock_lm.TransformerDecoder = stock


# no dataclass: fairseq then hands build_model a copy of the options, and the checkpoint would lack what is set there
@register_model("transformer_lm_collab")
class TransformerLanguageModelCollab(WithFlags, stock_lm.TransformerLanguageModel):
    """fairseq's transformer language model with collaborative attention."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        gen_parser_from_dataclass(parser, stock_lm.TransformerLanguageModelConfig(), delete_default=True)
        add_flags(parser)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "TransformerLanguageModelCollab":
        """Builds the model and stores its whole configuration in ``args.collab_config``.

        Raises:
            CollabError: options that are wrong or contradict the checkpoint.
        """
        stock_build = super().build_model

        def build(options: Namespace) -> Any:
            options.tokens_per_sample = getattr(options, "tokens_per_sample", task.args.tokens_per_sample)
            with _decoder_class(CollaborativeLanguageModelDecoder):
                return stock_build(options, task)

        return build_with_config(args, base_lm_architecture, lm_shapes, build)


def _stock_defaults(args: Any) -> None:
    """The defaults of ``transformer_lm`` itself: unlike its presets, it does not insist on normalising before."""
    normalize_before = getattr(args, "decoder_normalize_before", None)
    stock_lm.base_lm_architecture(args)
    args.decoder_normalize_before = bool(normalize_before)


base_lm_architecture = preset(_stock_defaults)
register_model_architecture("transformer_lm_collab", "transformer_lm_collab")(base_lm_architecture)
for stock_name, stock_model in list(ARCH_MODEL_NAME_REGISTRY.items()):
    if stock_model == "transformer_lm" and stock_name != "transformer_lm":
        name = stock_name.replace("transformer_lm", "transformer_lm_collab")
        register_model_architecture("transformer_lm_collab", name)(preset(ARCH_CONFIG_REGISTRY[stock_name]))
