"""fairseq's encoder and decoder layers with the attention that a configuration asks for. No attention mathematics here.

Attentions that stay concatenated at full width are fairseq's own ``MultiheadAttention``, keys and all.
"""

from typing import Any, Final

from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import nn

from fairseq_collab.config import AttentionConfig
from fairseq_collab.fairseq_modules.multihead_attention import CollaborativeMultiheadAttention

FASTPATH_COPIES = tuple(
    f"{module}_{kind}" for module in ("in_proj", "out_proj", "fc1", "fc2") for kind in ("weight", "bias")
)


def is_stock(config: AttentionConfig | None, embed_dim: int) -> bool:
    """Whether fairseq's own attention is what ``config`` describes."""
    if config is None:
        return True
    return not config.collaborative and config.key_dim == embed_dim and config.scale is None


class CollaborativeTransformerEncoderLayer(TransformerEncoderLayerBase):
    """An encoder layer whose self-attention follows ``attention``.

    Args:
        cfg: fairseq's transformer configuration.
        attention: None is fairseq's own attention.
        seed: of picked mixing.
    """

    can_use_fastpath: Final[bool]  # TorchScript leaves out what a constant rules out

    def __init__(self, cfg: Any, return_fc: bool = False, attention: AttentionConfig | None = None, seed: int = 0):
        super().__init__(cfg, return_fc)
        if not is_stock(attention, self.embed_dim):
            # afterwards, because fairseq 0.12.2 measures the attention that it builds
            self.self_attn = CollaborativeMultiheadAttention.from_config(
                attention,
                self.embed_dim,
                cfg.encoder.attention_heads,
                dropout=cfg.attention_dropout,
                self_attention=True,
                q_noise=self.quant_noise,
                qn_block_size=self.quant_noise_block_size,
                seed=seed,
            )
        # the inference fast path of fairseq 0.12.2 computes concatenated heads from copies of the weights
        self.can_use_fastpath = False
        for name in FASTPATH_COPIES:
            self._parameters.pop(name, None)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        """Loads without the copies that fairseq 0.12.2 makes and stores for its fast path."""
        for name in FASTPATH_COPIES:
            state_dict.pop(prefix + name, None)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args)


class CollaborativeTransformerDecoderLayer(TransformerDecoderLayerBase):
    """A decoder layer whose self-attention follows ``attention`` and whose encoder attention follows ``cross``.

    Args:
        cfg: fairseq's transformer configuration.
        attention, cross: None is fairseq's own attention.
        seed: of picked mixing.
    """

    def __init__(
        self,
        cfg: Any,
        no_encoder_attn: bool = False,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        attention: AttentionConfig | None = None,
        cross: AttentionConfig | None = None,
        seed: int = 0,
    ):
        self.attention_config = attention
        self.cross_config = cross
        self.attention_seed = seed
        super().__init__(cfg, no_encoder_attn, add_bias_kv, add_zero_attn)

    def build_self_attention(
        self, embed_dim: int, cfg: Any, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> nn.Module:
        if is_stock(self.attention_config, embed_dim):
            return super().build_self_attention(embed_dim, cfg, add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn)
        return CollaborativeMultiheadAttention.from_config(
            self.attention_config,
            embed_dim,
            cfg.decoder.attention_heads,
            dropout=cfg.attention_dropout,
            self_attention=not cfg.cross_self_attention,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            seed=self.attention_seed,
        )

    def build_encoder_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        if is_stock(self.cross_config, embed_dim):
            return super().build_encoder_attention(embed_dim, cfg)
        return CollaborativeMultiheadAttention.from_config(
            self.cross_config,
            embed_dim,
            cfg.decoder.attention_heads,
            kdim=cfg.encoder.embed_dim,
            vdim=cfg.encoder.embed_dim,
            dropout=cfg.attention_dropout,
            encoder_decoder_attention=True,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            seed=self.attention_seed + 1,
        )
