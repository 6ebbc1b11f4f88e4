"""fairseq's transformer encoder and decoder built from the layers of ``transformer_layer``; every layer its own dims.

The configuration arrives as ``cfg.collab`` (a :class:`fairseq_collab.config.CollabConfig`).
"""

from typing import Any

from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from torch import nn

from fairseq_collab.fairseq_modules.transformer_layer import (
    CollaborativeTransformerDecoderLayer,
    CollaborativeTransformerEncoderLayer,
)


def wrap_layer(layer: nn.Module, cfg: Any) -> nn.Module:
    """Activation checkpointing and FSDP as fairseq's own ``build_*_layer`` methods apply them."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    # a checkpointed layer is always wrapped by FSDP, whatever its size
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


class CollaborativeTransformerEncoder(TransformerEncoderBase):
    """A transformer encoder whose layer ``i`` has the attention ``cfg.collab.encoder[i]``."""

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Module, return_fc: bool = False):
        self.layers_built = 0
        super().__init__(cfg, dictionary, embed_tokens, return_fc)
        self.dropout_module.module_name = "TransformerEncoder"

    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        index = self.layers_built
        self.layers_built += 1
        layer = CollaborativeTransformerEncoderLayer(
            cfg, return_fc=self.return_fc, attention=cfg.collab.encoder[index], seed=index
        )
        return wrap_layer(layer, cfg)


class CollaborativeTransformerDecoder(TransformerDecoderBase):
    """A transformer decoder whose layer ``i`` has ``cfg.collab.decoder[i]`` and, if any, ``cfg.collab.cross[i]``."""

    def __init__(
        self,
        cfg: Any,
        dictionary: Any,
        embed_tokens: nn.Module,
        no_encoder_attn: bool = False,
        output_projection: Any = None,
    ):
        self.layers_built = 0
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn, output_projection)
        self.dropout_module.module_name = "TransformerDecoder"

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        index = self.layers_built
        self.layers_built += 1
        layer = CollaborativeTransformerDecoderLayer(
            cfg,
            no_encoder_attn,
            attention=cfg.collab.decoder[index],
            cross=None if no_encoder_attn else cfg.collab.cross[index],
            seed=1000 + 2 * index,
        )
        return wrap_layer(layer, cfg)
