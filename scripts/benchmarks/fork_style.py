"""Collaborative attention the way of the published fork of fairseq: a baseline, not a part of the package.

The keys are mixed for every head, so that each head has keys of R dims of its own: they are materialised as
(B, H, S, R), and that is what the cache holds. Scores, softmax and values are separate products. Only dense mixing,
and no content bias, as in the published translation runs.

Notation: B batch, T target length, S source length, D width, H heads, R shared key dims, V value dims a head.
"""

from __future__ import annotations

from typing import Any

import torch
from fairseq.incremental_decoding_utils import with_incremental_state
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_collab.attention import CollaborativeAttention

Buffer = dict[str, Tensor | None]


@with_incremental_state
class ForkStyleAttention(nn.Module):
    """Takes the place of a dense :class:`CollaborativeAttention`, and its weights.

    Args:
        attention: whose dims, scale, dropout and weights it takes; the weights are shared with it.
        self_attention, encoder_decoder_attention: as in fairseq.

    Raises:
        ValueError: the mixing is not dense.
    """

    def __init__(
        self, attention: CollaborativeAttention, *, self_attention: bool, encoder_decoder_attention: bool = False
    ):
        super().__init__()
        if attention.mix_layout != "dense":
            raise ValueError(f"the fork mixes all dims, not {attention.mix_layout}")
        self.embed_dim, self.num_heads, self.head_dim = attention.embed_dim, attention.num_heads, attention.head_dim
        self.scale, self.dropout = attention.scale, attention.dropout
        self.self_attention, self.encoder_decoder_attention = self_attention, encoder_decoder_attention
        self.q_proj, self.k_proj = attention.q_proj, attention.k_proj
        self.v_proj, self.out_proj = attention.v_proj, attention.out_proj
        self.mixing = attention.mixing

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict[str, Buffer] | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As fairseq's ``MultiheadAttention.forward``, without ``before_softmax``.

        Returns:
            (T, B, D), and the weights averaged over heads (B, T, S), of each head (H, B, T, S), or None.
        """
        length, batch, _ = query.size()
        saved = None if incremental_state is None else self._buffer(incremental_state)
        if self.self_attention:
            key = query
        if saved and static_kv:
            k, v = saved["prev_key"], saved["prev_value"]
        else:
            k = self.k_proj(key).transpose(0, 1).unsqueeze(1)  # (S, B, R) -> (B, 1, S, R)
            k = k * self.mixing.unsqueeze(1)  # (B, H, S, R)
            v = self.v_proj(key)
            v = v.view(v.size(0), batch, self.num_heads, self.head_dim).permute(1, 2, 0, 3)  # -> (B, H, S, V)
            if saved:
                k, v = torch.cat([saved["prev_key"], k], dim=2), torch.cat([saved["prev_value"], v], dim=2)
        if incremental_state is not None:
            self.set_incremental_state(incremental_state, "attn_state", {"prev_key": k, "prev_value": v})
        q = (self.q_proj(query) * self.scale).transpose(0, 1).unsqueeze(1)  # (T, B, R) -> (B, 1, T, R)
        scores = torch.matmul(q, k.transpose(2, 3))  # (B, H, T, S)
        if attn_mask is not None:
            scores = scores + attn_mask
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask.to(torch.bool)[:, None, None], float("-inf"))
        weights = torch.softmax(scores.float(), dim=-1)
        probs = F.dropout(weights.to(v.dtype), self.dropout, self.training)
        out = torch.matmul(probs, v)  # (B, H, T, V)
        out = self.out_proj(out.permute(2, 0, 1, 3).reshape(length, batch, self.embed_dim))
        if need_head_weights:
            return out, weights.transpose(0, 1)
        return out, weights.mean(dim=1) if need_weights else None

    def reorder_incremental_state(self, incremental_state: dict[str, Buffer], new_order: Tensor) -> None:
        """Brings the cache into the order of the beams; as in fairseq, a fixed one moves only when sentences leave."""
        buffer = self._buffer(incremental_state)
        if self.encoder_decoder_attention and buffer and buffer["prev_key"].size(0) == new_order.size(0):
            return
        for name, cached in buffer.items():
            buffer[name] = cached.index_select(0, new_order)

    def _buffer(self, incremental_state: dict[str, Buffer] | None) -> Buffer:
        found = self.get_incremental_state(incremental_state, "attn_state")
        return {} if found is None else found

    _get_input_buffer = _buffer

    def _set_input_buffer(self, incremental_state: dict[str, Buffer], buffer: Buffer) -> None:
        self.set_incremental_state(incremental_state, "attn_state", buffer)


def to_fork_style(model: nn.Module) -> nn.Module:
    """Puts fork-style attentions in the place of a model's own, which have to be dense; changes and returns it."""

    def replace(parent: nn.Module) -> None:
        for name, child in parent.named_children():
            if isinstance(child, CollaborativeAttention):
                kinds: dict[str, Any] = {
                    kind: getattr(child, kind) for kind in ("self_attention", "encoder_decoder_attention")
                }
                setattr(parent, name, ForkStyleAttention(child, **kinds))
            else:
                replace(child)

    replace(model)
    return model
