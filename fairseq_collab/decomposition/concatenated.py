"""From collaborative heads that mix more dims than an ordinary head has to the closest ordinary heads.

Functions on tensors only. Heads with P <= K need no approximation: ``CollaborativeAttention.to_concatenated``.

Notation: H heads, K dims of an ordinary head, D and E widths of queries and keys, R shared dims, P dims a head mixes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

EXACT = 1e-12  # what is relatively smaller is rounding of float64


@dataclass(frozen=True)
class OrdinaryHeads:
    """Ordinary heads, in float64, and how far they are from those that they replace.

    Args:
        q_weight: (H, K, D). q_bias: (H, K). k_weight: (H, K, E); the key bias is zero.
        error: relative Frobenius error of the stack of all ``T_hat[h]``; 0.0 where only rounding is left.
        bias_error: relative error of the stack of all content biases.
    """

    q_weight: Tensor
    q_bias: Tensor
    k_weight: Tensor
    error: float
    bias_error: float


def closest_heads(
    q_weight: Tensor,
    k_weight: Tensor,
    mixing: Tensor,
    query_bias: Tensor,
    pick: Tensor,
    head_dim: int,
    scale: float = 1.0,
) -> OrdinaryHeads:
    """The ordinary heads that are closest to collaborative ones, head by head.

    ``T_hat[h] = scale * Wq[pick[h]]^T diag(mixing[h]) Wk[pick[h]]`` (D, E) is replaced by its best approximation of
    rank K, and the content bias ``scale * query_bias[h]^T Wk[pick[h]]`` by its least-squares fit with the new keys.
    ``T_hat`` is never formed: its singular values are those of a small core between two QR factors.

    Args:
        q_weight: Wq, (R, D). k_weight: Wk, (R, E).
        mixing, query_bias: (H, P). pick: (H, P), indices into the R dims.
        head_dim: K.
        scale: factor on the scores before ordinary attention divides by ``sqrt(K)``.

    Returns:
        heads whose query and key rows have equal norms, padded with zeros where ``T_hat[h]`` has a rank below K.
    """
    q_columns = q_weight.double()[pick].transpose(1, 2)  # (H, P, D) -> (H, D, P)
    k_columns = k_weight.double()[pick].transpose(1, 2)  # (H, P, E) -> (H, E, P)
    q_basis, q_core = torch.linalg.qr(q_columns)
    k_basis, k_core = torch.linalg.qr(k_columns)
    core = scale * (q_core * mixing.double().unsqueeze(1)) @ k_core.transpose(1, 2)  # (H, min(D, P), min(E, P))
    u, strengths, vh = torch.linalg.svd(core, full_matrices=False)
    kept = min(head_dim, strengths.size(1))
    # keys that are rounding only would invite huge biases
    real = strengths > EXACT * strengths[:, :1]
    roots = (strengths * real)[:, :kept].sqrt().unsqueeze(1)  # (H, 1, kept)
    keys = (k_basis @ vh.transpose(1, 2)[:, :, :kept]) * roots  # (H, E, kept)
    queries = (q_basis @ u[:, :, :kept]) * roots  # (H, D, kept)

    content = scale * (k_columns @ query_bias.double().unsqueeze(-1))  # (H, E, 1)
    bias = torch.linalg.lstsq(keys, content, driver="gelsd").solution  # (H, kept, 1)
    missing = head_dim - kept
    return OrdinaryHeads(
        q_weight=torch.nn.functional.pad(queries, (0, missing)).transpose(1, 2),
        q_bias=torch.nn.functional.pad(bias.squeeze(-1), (0, missing)),
        k_weight=torch.nn.functional.pad(keys, (0, missing)).transpose(1, 2),
        error=_ratio(strengths[:, kept:], strengths),
        bias_error=_ratio(content - keys @ bias, content),
    )


def _ratio(rest: Tensor, whole: Tensor) -> float:
    norm = whole.norm().item()
    ratio = rest.norm().item() / norm if norm > 0 else 0.0
    return ratio if ratio > EXACT else 0.0
