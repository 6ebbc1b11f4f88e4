"""Attention over shared keys as plain functions; which kernel computes it is decided here and nowhere else.

Notation: B batch, T target length, S source length, H heads, R shared key dims (``key_dim``), P shared dims that
one head mixes (``mix_dim``), V value dims a head, s = R // H the step between windows. All functions script.
"""

import math
import threading
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_collab import dense_blocks, projections

_used = threading.local()


def note_keys(keys: str) -> None:
    """Notes for :func:`backend_used` how the keys were brought before the heads."""
    _used.keys = keys


def note_kernel(kernel: str) -> None:
    """Notes for :func:`backend_used` what computed the scores."""
    _used.kernel = kernel


def backend_used() -> Optional[str]:
    """What the last attention of this thread ran, None before the first; scripted calls do not count.

    Returns:
        ``KEYS-KERNEL``. KEYS: ``dense`` shared keys, ``spread`` (shared keys, sparse mixing spread over all of
        them), ``windows``, ``gather`` (picked dims), ``one_hot`` (picked dims, by a product with ones and zeros), or
        ``concatenated`` heads. KERNEL: ``blocks`` (:mod:`fairseq_collab.dense_blocks`), ``product`` (one product for
        all heads of a sentence), ``sdpa`` (torch's fused attention), or ``matmul`` (a product a head).
    """
    if not hasattr(_used, "keys") or not hasattr(_used, "kernel"):
        return None
    return f"{_used.keys}-{_used.kernel}"


def window_heads(x: Tensor, num_heads: int, mix_dim: int) -> Tensor:
    """The dims that each head mixes, for windows: head h takes ``(h*s + 0..P-1) mod R``.

    Args:
        x: (B, T, R) shared projection, R a multiple of ``num_heads``.

    Returns:
        (B, H, T, P), a view of x followed by its own first P - s dims.
    """
    step = x.size(-1) // num_heads
    if mix_dim > step:
        x = torch.cat([x, x[..., : mix_dim - step]], dim=-1)  # (B, T, R + P - s)
    return x.unfold(-1, mix_dim, step).transpose(1, 2)  # (B, T, H, P) -> (B, H, T, P)


def picked_heads(x: Tensor, pick: Tensor) -> Tensor:
    """The dims that each head mixes, by index: (B, T, R) and pick (H, P) -> (B, H, T, P)."""
    picked = x.index_select(-1, pick.flatten())  # (B, T, H*P)
    return picked.view(x.size(0), x.size(1), pick.size(0), pick.size(1)).transpose(1, 2)


def mix_query(query_heads: Tensor, mixing: Tensor, query_bias: Tensor, scale: float) -> Tensor:
    """Mixed and scaled queries ``(q * mixing + query_bias) * scale``.

    The scale is folded into the small factors in their own precision, so that half-precision scores never
    exceed what the concatenated heads of stock attention would reach.

    Args:
        query_heads: (B, H, T, P), or (B, 1, T, P) to mix one shared query for every head.
        mixing, query_bias: (H, P).

    Returns:
        (B, H, T, P) in the dtype of ``query_heads``.
    """
    mixing = (mixing * scale).to(query_heads.dtype).unsqueeze(1)  # (H, 1, P)
    query_bias = (query_bias * scale).to(query_heads.dtype).unsqueeze(1)
    return torch.addcmul(query_bias, query_heads, mixing)


def multiplies(x: Tensor) -> bool:
    """Whether :func:`multiplied_heads` is the fastest way to bring shared dims before the heads.

    It is on CPUs for up to 512 shared dims, where gathering single numbers is slower than the operations of a product.
    Sums of one number and zeros are exact in float32, not in the shortened products of GPUs; in half precision CPUs
    multiply slowly.
    """
    return x.device.type == "cpu" and (x.dtype == torch.float32 or x.dtype == torch.float64) and x.size(-1) <= 512


def multiplied_heads(x: Tensor, pick: Tensor, factors: Tensor, bias: Optional[Tensor]) -> Tensor:
    """The dims that each head mixes, times a factor, by one matrix product: ``x[pick] * factors + bias``.

    Of its input only x is kept for gradients, which are products as well.

    Args:
        x: (B, T, R) shared projection. pick: (H, P) indices. factors, bias: (H, P).

    Returns:
        (B, H, T, P).
    """
    weight = spread_to_shared(factors.reshape(-1, 1), pick.reshape(-1, 1), x.size(-1))  # (H*P, R), a number a row
    flat_bias: Optional[Tensor] = None if bias is None else bias.flatten()
    # fairseq's tensors have time first in memory; their rows are multiplied as they lie
    time_first = x.stride(0) < x.stride(1)
    rows = x.transpose(0, 1) if time_first else x
    heads = F.linear(rows, weight, flat_bias).view(rows.size(0), rows.size(1), pick.size(0), pick.size(1))
    return heads.permute(1, 2, 0, 3) if time_first else heads.transpose(1, 2)


def spread_to_shared(per_head: Tensor, pick: Tensor, key_dim: int) -> Tensor:
    """Mixing over all shared dims: (H, P) values at ``pick`` (H, P) -> (H, R), 0 elsewhere."""
    shared = torch.zeros(per_head.size(0), key_dim, dtype=per_head.dtype, device=per_head.device)
    return shared.scatter(1, pick, per_head)


def merge_masks(
    attn_mask: Optional[Tensor], key_padding_mask: Optional[Tensor], num_heads: int, dtype: torch.dtype
) -> Tuple[Optional[Tensor], Optional[Tensor]]:
    """One additive mask, and the rows in which nothing is visible.

    Args:
        attn_mask: (T, S), (B*H, T, S), or what broadcasts to (B, H, T, S); floating masks are added, others are True
            where masked.
        key_padding_mask: (B, S), non-zero where a key is padding.
        dtype: of the scores that the mask will be added to.

    Returns:
        an additive mask that broadcasts to (B, H, T, S), finite in rows that see no key, and a boolean mask of
        those rows that broadcasts to (B, H, T, 1); None for both when nothing is masked, and for the second where
        it is known that there are none.
    """
    mask: Optional[Tensor] = None
    if attn_mask is not None:
        if attn_mask.is_floating_point():
            mask = attn_mask.to(dtype)
        else:
            mask = torch.zeros_like(attn_mask, dtype=dtype).masked_fill(attn_mask.to(torch.bool), float("-inf"))
        if mask.dim() == 3 and mask.size(0) > 1:
            mask = mask.view(-1, num_heads, mask.size(1), mask.size(2))
        elif mask.dim() <= 3:
            mask = mask.view([1] * (4 - mask.dim()) + list(mask.size()))
    if key_padding_mask is not None:
        padding = key_padding_mask.to(torch.bool)[:, None, None, :]  # (B, S) -> (B, 1, 1, S)
        if mask is None:
            mask = torch.zeros_like(padding, dtype=dtype).masked_fill(padding, float("-inf"))
        else:
            mask = mask.masked_fill(padding, float("-inf"))
    if mask is None:
        return None, None
    hidden_rows = (mask == float("-inf")).all(dim=-1, keepdim=True)
    if not torch.jit.is_scripting() and _eager_on_cpu(hidden_rows) and not hidden_rows.any():
        return mask, None
    return mask.masked_fill(hidden_rows, 0.0), hidden_rows


@torch.jit.unused
def _eager_on_cpu(x: Tensor) -> bool:
    """Whether to look at what a tensor holds costs no waiting, and its operations are simply done."""
    return x.device.type == "cpu" and projections.is_plain(x)


@torch.jit.unused
def takes_fused(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, fewest_keys: int = 256) -> bool:
    """Whether torch's fused attention is to read one shared key for every head: (B, T, R), (B, S, R), (B, H, S, V).

    It wants keys as wide as values: padding narrower ones pays from ``fewest_keys`` on, as does on CPUs the whole in
    half precision, and values are never padded for wider ones. One query of each head makes a better product. On CPUs
    it has no dropout, and nowhere derivatives of derivatives, so whatever is recorded or transformed goes another way.
    """
    dims, value_dims, on_cpu = q.size(2), v.size(3), v.device.type == "cpu"
    if (
        q.size(1) == 1
        or dims > value_dims
        or q.dtype != v.dtype
        or not (projections.is_plain(q) and projections.is_plain(v))
    ):
        return False
    if on_cpu and dropout_p > 0.0:
        return False
    half_on_cpu = on_cpu and v.dtype not in (torch.float32, torch.float64)
    return k.size(1) >= fewest_keys or (dims == value_dims and not half_on_cpu)


@torch.jit.unused
def far_below(mask: Tensor, query: Tensor) -> bool:
    """Whether a mask lowers all scores of some row so far that torch's fused attention on CPUs loses its gradients.

    On the way back it computes weights as ``exp(score - log sum)``, and both terms round to the same number where
    they are as large as the finite numbers that stand for minus infinity in some libraries.
    """
    if not (torch.is_grad_enabled() and _eager_on_cpu(query)) or mask.numel() == 0:
        return False
    return bool((mask.detach().amax(-1) < -100.0).any())


@torch.jit.unused
def takes_blocks(q: Tensor, v: Tensor, mask: Optional[Tensor]) -> bool:
    """Whether :func:`attend_in_blocks` may compute dense mixing: on CPUs, in full precision, for fixed masks."""
    if not _eager_on_cpu(q) or (mask is not None and mask.requires_grad):
        return False
    return q.dtype == v.dtype and q.dtype in (torch.float32, torch.float64)


@torch.jit.unused
def attend_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixing: Tensor,
    query_bias: Tensor,
    mask: Optional[Tensor],
    hidden_rows: Optional[Tensor],
    dropout_p: float,
) -> Tensor:
    """Dense mixing by :func:`fairseq_collab.dense_blocks.attend_in_blocks`, with hidden rows set to 0: (B, H, T, V)."""
    note_keys("dense")
    note_kernel("blocks")
    out = dense_blocks.attend_in_blocks(q, k, v, mixing, query_bias, mask, dropout_p)
    return out if hidden_rows is None else out.masked_fill(hidden_rows, 0.0)


def attention_scores(query: Tensor, key: Tensor) -> Tensor:
    """Scores (B, H, T, S) of mixed queries (B, H, T, P) and keys (B, H, S, P).

    Keys that are the same for every head, (B, 1, S, R), make one product ``(H*T, R) x (R, S)`` a sentence.
    """
    if key.size(1) == 1 and query.size(1) > 1:
        if not torch.jit.is_scripting():
            note_kernel("product")
        batch, heads, length, dims = query.size()
        scores = torch.bmm(query.reshape(batch, heads * length, dims), key.squeeze(1).transpose(1, 2))
        return scores.view(batch, heads, length, key.size(2))
    if not torch.jit.is_scripting():
        note_kernel("matmul")
    return torch.matmul(query, key.transpose(2, 3))


def attend_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Optional[Tensor],
    hidden_rows: Optional[Tensor],
    dropout_p: float,
) -> Tuple[Tensor, Tensor]:
    """Softmax attention spelled out, in float32 where it matters.

    Args:
        query: (B, H, T, P), mixed and scaled. key: (B, H, S, P) or (B, 1, S, P). value: (B, H, S, V).
        mask, hidden_rows: as :func:`merge_masks` returns them.
        dropout_p: applied to the weights that reach the values, not to those returned.

    Returns:
        (B, H, T, V), and the weights (B, H, T, S) in float32 (float64 for float64 queries).
    """
    scores = attention_scores(query, key)
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores if scores.dtype == torch.float64 else scores.float(), dim=-1)
    if hidden_rows is not None:
        weights = weights.masked_fill(hidden_rows, 0.0)
    probs = weights.to(value.dtype)
    if dropout_p > 0.0:
        probs = F.dropout(probs, dropout_p, True)
    return torch.matmul(probs, value), weights


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Optional[Tensor],
    hidden_rows: Optional[Tensor],
    dropout_p: float,
    fused: bool = False,
) -> Tensor:
    """As :func:`attend_with_weights` without the weights: (B, H, T, V).

    Keys per head go to torch's fused attention; one shared key to one large product, or there as well if ``fused``.
    """
    shared = key.size(1) == 1 and query.size(1) > 1
    spelled_out = shared and not fused
    if not torch.jit.is_scripting():
        spelled_out = spelled_out or (mask is not None and far_below(mask, query))
    if spelled_out:
        out, _ = attend_with_weights(query, key, value, mask, hidden_rows, dropout_p)
        return out
    if not torch.jit.is_scripting():
        note_kernel("sdpa")
    dims, value_dims = query.size(3), value.size(3)
    if dims < value_dims:
        # the fused kernels want keys as wide as values, and fall back to a much slower path otherwise
        query = F.pad(query, (0, value_dims - dims))
        key = F.pad(key, (0, value_dims - dims))
    if shared:
        key = key.expand(-1, query.size(1), -1, -1)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_p, scale=1.0)
    if hidden_rows is not None:
        out = out.masked_fill(hidden_rows, 0.0)
    return out


def default_scale(embed_dim: int, num_heads: int) -> float:
    """``1 / sqrt(D / H)``: that of uncompressed heads, at every key dim."""
    return 1.0 / math.sqrt(embed_dim / num_heads)
