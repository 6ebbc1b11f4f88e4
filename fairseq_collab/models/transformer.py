"""Registers ``transformer_collab`` and its presets: translation with collaborative attention."""

from argparse import Namespace
from typing import Any

from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerModel, transformer_legacy

from fairseq_collab.config import AttentionShape
from fairseq_collab.fairseq_modules.options import WithFlags, build_with_config, preset
from fairseq_collab.fairseq_modules.transformer import CollaborativeTransformerDecoder, CollaborativeTransformerEncoder


def transformer_shapes(args: Namespace) -> dict[str, AttentionShape]:
    """The attentions of an encoder-decoder transformer with these options."""
    heads, width = args.decoder_attention_heads, args.decoder_embed_dim
    shapes = {
        "encoder": AttentionShape(args.encoder_embed_dim, args.encoder_attention_heads, args.encoder_layers),
        "cross": AttentionShape(width, heads, args.decoder_layers),
        "decoder": AttentionShape(width, heads, args.decoder_layers),
    }
    if args.no_cross_attention:
        del shapes["cross"]
    return shapes


# no dataclass: registered with one, fairseq ignores the presets of nested configurations
@register_model("transformer_collab")
class TransformerCollabModel(WithFlags, TransformerModel):
    """fairseq's transformer with collaborative attention; which, and how wide, is said by the flags of ``add_args``."""

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "TransformerCollabModel":
        """Builds the model and stores its whole configuration in ``args.collab_config``.

        Raises:
            CollabError: options that are wrong or contradict the checkpoint.
        """
        build = super().build_model
        return build_with_config(args, base_architecture, transformer_shapes, lambda options: build(options, task))

    @classmethod
    def build_encoder(cls, args: Any, src_dict: Any, embed_tokens: Any) -> CollaborativeTransformerEncoder:
        return CollaborativeTransformerEncoder(args, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, args: Any, tgt_dict: Any, embed_tokens: Any) -> CollaborativeTransformerDecoder:
        return CollaborativeTransformerDecoder(args, tgt_dict, embed_tokens, no_encoder_attn=args.no_cross_attention)


PRESETS = {
    "transformer_collab": transformer_legacy.base_architecture,
    "transformer_collab_tiny": transformer_legacy.tiny_architecture,
    "transformer_collab_iwslt_de_en": transformer_legacy.transformer_iwslt_de_en,
    "transformer_collab_wmt_en_de": transformer_legacy.transformer_wmt_en_de,
    "transformer_collab_wmt_en_de_big": transformer_legacy.transformer_wmt_en_de_big,
    "transformer_collab_vaswani_wmt_en_de_big": transformer_legacy.transformer_vaswani_wmt_en_de_big,
    "transformer_collab_vaswani_wmt_en_fr_big": transformer_legacy.transformer_vaswani_wmt_en_fr_big,
    "transformer_collab_wmt_en_de_big_t2t": transformer_legacy.transformer_wmt_en_de_big_t2t,
}
base_architecture = preset(transformer_legacy.base_architecture)
for name, stock in PRESETS.items():
    register_model_architecture("transformer_collab", name)(preset(stock))
