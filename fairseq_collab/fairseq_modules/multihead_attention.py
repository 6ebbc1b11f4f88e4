"""Collaborative attention behind the interface of fairseq's ``MultiheadAttention``: (T, B, D) and incremental state.

The attention itself is ``fairseq_collab.attention``; here are fairseq's layout, cache, beam search and dropout.

Notation: B query batch, N key batch (B, or B / beam), T target length, S source length, D width, H heads,
R shared key dims, V value dims a head.
"""

import copy
from typing import Any

import torch
from fairseq.incremental_decoding_utils import with_incremental_state
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor

from fairseq_collab import functional
from fairseq_collab.attention import CollaborativeAttention
from fairseq_collab.errors import CollabError

CANNOT_PRUNE = "Collaborative heads share their keys and cannot be pruned; choose a smaller --key-dim instead."


@with_incremental_state
class CollaborativeMultiheadAttention(CollaborativeAttention):
    """Takes the place of fairseq's ``MultiheadAttention``, with shared keys.

    The cache holds ``prev_key`` (N, S, R), ``prev_value`` (N, H, S, V) and ``prev_key_padding_mask`` (N, S): never
    a key per head.

    Args:
        self_attention: keys and values are made from the query.
        encoder_decoder_attention: keys and values come from the encoder and are cached once.
        q_noise, qn_block_size: quantisation noise on the projections, as in fairseq.
        kwargs: those of :class:`CollaborativeAttention`.

    Raises:
        CollabError: dims that do not fit, or ``add_bias_kv`` and ``add_zero_attn``, under which the key bias that
            collaborative attention leaves out would not drop out of the softmax.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        key_dim: int | None = None,
        *,
        self_attention: bool = False,
        encoder_decoder_attention: bool = False,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        q_noise: float = 0.0,
        qn_block_size: int = 8,
        **kwargs,
    ):
        super().__init__(embed_dim, num_heads, key_dim, **kwargs)
        if add_bias_kv or add_zero_attn:
            raise CollabError("Collaborative attention has no key bias and cannot take add_bias_kv or add_zero_attn.")
        self.self_attention = self_attention
        self.encoder_decoder_attention = encoder_decoder_attention
        self.dropout_module = FairseqDropout(self.dropout, module_name="MultiheadAttention")
        if q_noise > 0:
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                setattr(self, name, quant_noise(getattr(self, name), q_noise, qn_block_size))
        self.beam_size = 1
        self.onnx_trace = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "CollaborativeMultiheadAttention":
        """A copy with an identity of its own, so that its cache never mixes with the original's."""
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        new.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
        new.init_incremental_state()
        return new

    def prepare_for_onnx_export_(self):
        self.onnx_trace = True

    def set_beam_size(self, beam_size: int) -> None:
        """From now on the query batch may be ``beam_size`` times the key batch."""
        self.beam_size = beam_size

    def _get_reserve_head_index(self, num_heads_to_keep: int):
        raise CollabError(CANNOT_PRUNE)

    def _adaptive_prune_heads(self, reserve_head_index: list[tuple[int, int]]):
        raise CollabError(CANNOT_PRUNE)

    def _active_dropout(self) -> float:
        return self.dropout if self.training or self.dropout_module.apply_during_inference else 0.0

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As fairseq's ``MultiheadAttention.forward``.

        Args:
            query: (T, B, D). key: (S, N, kdim). value: (S, N, vdim); both may be None when cached or self-attending.
            key_padding_mask: (N, S), non-zero where a key is padding.
            incremental_state: where keys and values of earlier steps are kept.
            static_kv: the cached keys and values are all there is.
            attn_mask: (T, S), added to the scores.
            before_softmax: return scores (B*H, T, S) and values (B*H, S, V) instead.
            need_head_weights: return weights of each head; implies ``need_weights``.

        Returns:
            the output (T, B, D), and the weights (B, T, S) averaged over heads, (H, B, T, S), or None.
        """
        if key_padding_mask is not None and key_padding_mask.dim() == 0:
            key_padding_mask = None
        if self.self_attention:
            key = value = query
        elif self.encoder_decoder_attention:
            value = key

        saved_state: dict[str, Tensor | None] | None = None
        if incremental_state is not None:
            saved_state = self._get_input_buffer(incremental_state)
            if static_kv and "prev_key" in saved_state:
                key = value = None

        batch = query.size(1)
        k: Tensor | None = None
        v: Tensor | None = None
        if key is None or value is None:
            q = self.q_proj(query)
        else:
            if self.encoder_decoder_attention and self.beam_size > 1 and batch == key.size(1):
                key = value = key.view(key.size(0), -1, self.beam_size, key.size(2))[:, :, 0, :]  # (S, N, kdim)
                if key_padding_mask is not None:
                    key_padding_mask = key_padding_mask.view(-1, self.beam_size, key_padding_mask.size(1))[:, 0, :]
            q, k, v = self._project(query, key, value)
            k = k.transpose(0, 1)  # (S, N, R) -> (N, S, R)
            v = v.view(v.size(0), v.size(1), self.num_heads, self.head_dim).permute(1, 2, 0, 3)  # -> (N, H, S, V)
        q = q.transpose(0, 1)  # (T, B, R) -> (B, T, R)

        if saved_state is not None and incremental_state is not None:
            k, v, key_padding_mask = self._extend_cache(saved_state, k, v, key_padding_mask, static_kv)
            incremental_state = self._set_input_buffer(incremental_state, saved_state)
        assert k is not None and v is not None, "keys and values are neither given nor cached"

        beam = batch // k.size(0) if batch > 0 else 1
        if beam > 1:
            q = q.reshape(k.size(0), beam * q.size(1), q.size(2))  # (B, T, R) -> (N, beam*T, R)
            if attn_mask is not None:
                attn_mask = attn_mask.repeat(beam, 1)
        few_queries = incremental_state is not None and query.size(0) == 1
        if before_softmax:
            mixed, keys = self._query_and_key(q, k, few_queries)
            mask, _ = functional.merge_masks(attn_mask, key_padding_mask, self.num_heads, mixed.dtype)
            scores = functional.attention_scores(mixed, keys)
            if mask is not None:
                scores = scores + mask
            scores = self._split_beam(scores, beam)
            return scores.flatten(0, 1), v.repeat_interleave(beam, 0).flatten(0, 1)
        out, weights = self._attend(
            q, k, v, key_padding_mask, attn_mask, need_weights or need_head_weights, few_queries
        )
        out = out.reshape(batch, query.size(0), self.embed_dim)  # (N, beam*T, D) -> (B, T, D)
        # projected in the order in which it lies in memory, which copies nothing and keeps no copy for gradients
        if out.is_contiguous():
            out = self.out_proj(out).transpose(0, 1)
        else:
            out = self.out_proj(out.transpose(0, 1))
        if weights is not None:
            weights = self._split_beam(weights, beam).transpose(0, 1)  # (B, H, T, S) -> (H, B, T, S)
            if not need_head_weights:
                weights = weights.mean(dim=0)
        return out, weights

    def _split_beam(self, x: Tensor, beam: int) -> Tensor:
        """(N, H, beam*T, S) -> (B, H, T, S)."""
        if beam == 1:
            return x
        x = x.view(x.size(0), x.size(1), beam, -1, x.size(3)).transpose(1, 2)  # -> (N, beam, H, T, S)
        return x.reshape(-1, x.size(2), x.size(3), x.size(4))

    def _extend_cache(
        self,
        saved_state: dict[str, Tensor | None],
        k: Tensor | None,
        v: Tensor | None,
        key_padding_mask: Tensor | None,
        static_kv: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Puts the cached steps before the new ones and stores the result in ``saved_state``.

        Args:
            k: (N, S', R) and v: (N, H, S', V) of the new steps, None where the cache is all there is.
            key_padding_mask: (N, S') of the new steps, or (N, S) of all.
        """
        if "prev_key" in saved_state and "prev_value" in saved_state:
            prev_key = saved_state["prev_key"]
            prev_value = saved_state["prev_value"]
            assert prev_key is not None and prev_value is not None
            if static_kv or k is None or v is None:
                k, v = prev_key, prev_value
            else:
                k = torch.cat([prev_key, k], dim=1)
                v = torch.cat([prev_value, v], dim=2)
        assert k is not None and v is not None, "keys and values are neither given nor cached"
        prev_mask: Tensor | None = None
        if "prev_key_padding_mask" in saved_state:
            prev_mask = saved_state["prev_key_padding_mask"]
        if prev_mask is not None and static_kv:
            key_padding_mask = prev_mask
        else:
            key_padding_mask = self._join_padding(prev_mask, key_padding_mask, k.size(0), k.size(1))
        saved_state["prev_key"] = k
        saved_state["prev_value"] = v
        saved_state["prev_key_padding_mask"] = key_padding_mask
        return k, v, key_padding_mask

    def _join_padding(self, earlier: Tensor | None, new: Tensor | None, batch: int, src_len: int) -> Tensor | None:
        """One (N, S) mask of earlier and new steps; steps without a mask are not padding."""
        if earlier is None and new is None:
            return None
        parts: list[Tensor] = []
        length = 0
        if earlier is not None:
            parts.append(earlier.to(torch.bool))
            length += earlier.size(1)
        if new is not None:
            length += new.size(1)
        reference = earlier if earlier is not None else new
        assert reference is not None
        if length < src_len:
            parts.append(torch.zeros([batch, src_len - length], dtype=torch.bool, device=reference.device))
        if new is not None:
            parts.append(new.to(torch.bool))
        return torch.cat(parts, dim=1)

    @torch.jit.export
    def reorder_incremental_state(
        self,
        incremental_state: dict[str, dict[str, Tensor | None]] | None,
        new_order: Tensor,
    ) -> dict[str, dict[str, Tensor | None]] | None:
        """Brings the cache into the order of the beams that go on.

        The beams of a sentence look at the same encoder output, so its cache moves only when sentences leave.
        """
        input_buffer = self._get_input_buffer(incremental_state)
        for name in input_buffer.keys():
            cached = input_buffer[name]
            if cached is not None:
                if self.encoder_decoder_attention:
                    if cached.size(0) * self.beam_size == new_order.size(0):
                        return incremental_state
                    elif self.beam_size > 1:
                        order = new_order.reshape(-1, self.beam_size)[:, 0] // self.beam_size
                        input_buffer[name] = cached.index_select(0, order)
                    else:
                        input_buffer[name] = cached.index_select(0, new_order)
                else:
                    input_buffer[name] = cached.index_select(0, new_order)
        return self._set_input_buffer(incremental_state, input_buffer)

    def _get_input_buffer(
        self, incremental_state: dict[str, dict[str, Tensor | None]] | None
    ) -> dict[str, Tensor | None]:
        result = self.get_incremental_state(incremental_state, "attn_state")
        if result is not None:
            return result
        empty: dict[str, Tensor | None] = {}
        return empty

    def _set_input_buffer(
        self,
        incremental_state: dict[str, dict[str, Tensor | None]] | None,
        buffer: dict[str, Tensor | None],
    ) -> dict[str, dict[str, Tensor | None]] | None:
        return self.set_incremental_state(incremental_state, "attn_state", buffer)
