"""Registers ``bart_collab_base``, ``bart_collab_large`` and mBART's presets: BART with collaborative attention."""

from argparse import Namespace
from typing import Any

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY, register_model, register_model_architecture
from fairseq.models.bart.model import BARTModel, bart_large_architecture
from fairseq.models.transformer import transformer_legacy

from fairseq_collab.fairseq_modules.options import build_with_config, preset
from fairseq_collab.models.transformer import TransformerCollabModel, transformer_shapes


# no dataclass: fairseq then hands build_model a copy of the options, and the checkpoint would lack what is set there
@register_model("bart_collab")
class BARTCollabModel(TransformerCollabModel, BARTModel):
    """fairseq's BART with collaborative attention; heads, hub interface and mBART's languages are inherited."""

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "BARTCollabModel":
        """Builds the model and stores its whole configuration in ``args.collab_config``.

        Raises:
            CollabError: options that are wrong or contradict the checkpoint.
        """
        stock_build = super(TransformerCollabModel, cls).build_model

        def build(options: Namespace) -> Any:
            # BART asks for it when a checkpoint is loaded, and options of Hydra do not have it
            options.task = getattr(options, "task", None)
            return stock_build(options, task)

        return build_with_config(args, base_architecture, transformer_shapes, build)


def _stock_defaults(args: Any) -> None:
    bart_large_architecture(args)
    transformer_legacy.base_architecture(args)


base_architecture = preset(_stock_defaults)
for stock_name, stock_model in list(ARCH_MODEL_NAME_REGISTRY.items()):
    if stock_model == "bart":
        name = stock_name.replace("bart", "bart_collab")
        register_model_architecture("bart_collab", name)(preset(ARCH_CONFIG_REGISTRY[stock_name]))
