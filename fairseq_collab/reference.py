"""The slow, obvious oracle: one head at a time, written from the formulas. Every fast path is tested against it.

Letters: B batch, T target length, S source length, D width, H heads, R shared key dims, P dims a head mixes,
V value dims a head. Nothing here is used outside tests and checks.
"""

from typing import Optional

import torch
from torch import Tensor


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    out_weight: Tensor,
    mixing: Tensor,
    query_bias: Tensor,
    pick: Tensor,
    scale: float,
    v_bias: Optional[Tensor] = None,
    out_bias: Optional[Tensor] = None,
    key_padding_mask: Optional[Tensor] = None,
    attn_mask: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """Collaborative attention (arXiv 2006.16362, section 3, with sparse mixing), head by head.

    Args:
        query: (B, T, D). key: (B, S, width of keys). value: (B, S, width of values).
        q_weight: (R, D). k_weight: (R, width of keys). v_weight: (H*V, width of values). out_weight: (D, H*V).
        mixing, query_bias: (H, P). pick: (H, P), indices into the R shared dims.
        scale: factor on the scores.
        key_padding_mask: (B, S), True where a key is padding.
        attn_mask: (T, S) or (B, H, T, S), added to the scores; or boolean, True where masked.

    Returns:
        the output (B, T, D) and the weights (B, H, T, S); both are 0 where a query has no key to look at.
    """
    heads = mixing.size(0)
    v_dim = v_weight.size(0) // heads
    outputs, all_weights = [], []
    for b in range(query.size(0)):
        shared_query = query[b] @ q_weight.T  # (T, R)
        shared_key = key[b] @ k_weight.T  # (S, R)
        values = value[b] @ v_weight.T  # (S, H*V)
        if v_bias is not None:
            values = values + v_bias
        head_outputs, head_weights = [], []
        for h in range(heads):
            mixed = shared_query[:, pick[h]] * mixing[h] + query_bias[h]  # (T, P)
            scores = mixed @ shared_key[:, pick[h]].T * scale  # (T, S)
            if attn_mask is not None:
                mask = attn_mask[b, h] if attn_mask.dim() == 4 else attn_mask
                if mask.dtype == torch.bool:
                    scores = scores.masked_fill(mask, float("-inf"))
                else:
                    scores = scores + mask.to(scores.dtype)
            if key_padding_mask is not None:
                scores = scores.masked_fill(key_padding_mask[b].bool()[None, :], float("-inf"))
            rows = []
            for row in scores:
                visible = row > float("-inf")
                weights = torch.zeros_like(row)
                if visible.any():
                    weights = weights.masked_scatter(visible, torch.softmax(row[visible], 0))
                rows.append(weights)
            weights = torch.stack(rows)  # (T, S)
            head_weights.append(weights)
            head_outputs.append(weights @ values[:, h * v_dim : (h + 1) * v_dim])
        out = torch.cat(head_outputs, dim=-1) @ out_weight.T  # (T, D)
        outputs.append(out if out_bias is None else out + out_bias)
        all_weights.append(torch.stack(head_weights))
    return torch.stack(outputs), torch.stack(all_weights)
