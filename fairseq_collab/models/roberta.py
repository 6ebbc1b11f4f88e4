"""Registers ``roberta_collab`` and its presets: masked language models and classifiers with collaborative attention."""

from argparse import Namespace
from typing import Any

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY, register_model, register_model_architecture
from fairseq.models.roberta import model as stock_roberta
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_sentence_encoder import init_bert_params

from fairseq_collab.config import AttentionShape
from fairseq_collab.fairseq_modules.options import WithFlags, build_with_config, preset
from fairseq_collab.fairseq_modules.transformer import CollaborativeTransformerEncoder


def roberta_shapes(args: Namespace) -> dict[str, AttentionShape]:
    """The attentions of an encoder with these options."""
    return {"encoder": AttentionShape(args.encoder_embed_dim, args.encoder_attention_heads, args.encoder_layers)}


class CollaborativeRobertaEncoder(stock_roberta.RobertaEncoder):
    """RoBERTa's encoder and language-model head, with collaborative attention in the layers."""

    def build_encoder(self, args: Namespace, dictionary: Any, embed_tokens: Any) -> CollaborativeTransformerEncoder:
        encoder = CollaborativeTransformerEncoder(TransformerConfig.from_namespace(args), dictionary, embed_tokens)
        encoder.apply(init_bert_params)
        return encoder


# no dataclass: fairseq then hands build_model a copy of the options, and the checkpoint would lack what is set there
@register_model("roberta_collab")
class RobertaCollabModel(WithFlags, stock_roberta.RobertaModel):
    """fairseq's RoBERTa with collaborative attention; heads, hub interface and old names of weights are inherited."""

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "RobertaCollabModel":
        """Builds the model and stores its whole configuration in ``args.collab_config``.

        Raises:
            CollabError: options that are wrong or contradict the checkpoint.
        """

        def build(options: Namespace) -> "RobertaCollabModel":
            if getattr(options, "max_positions", None) is None:
                tokens = getattr(options, "tokens_per_sample", None)
                options.max_positions = task.max_positions() if tokens is None else tokens
            return cls(options, CollaborativeRobertaEncoder(options, task.source_dictionary))

        return build_with_config(args, base_architecture, roberta_shapes, build)


base_architecture = preset(stock_roberta.base_architecture)
for stock_name, stock_model in list(ARCH_MODEL_NAME_REGISTRY.items()):
    if stock_model == "roberta":
        name = stock_name.replace("roberta", "roberta_collab") if "roberta" in stock_name else f"{stock_name}_collab"
        register_model_architecture("roberta_collab", name)(preset(ARCH_CONFIG_REGISTRY[stock_name]))
