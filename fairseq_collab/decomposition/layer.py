"""One attention layer from concatenated to collaborative heads: weights in, weights and errors out.

Notation: H heads, K dims a head, N = H*K, D and E widths of queries and keys, R shared dims, P dims a head mixes.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fairseq_collab.decomposition import cp
from fairseq_collab.decomposition.calibration import Whitening
from fairseq_collab.decomposition.cp import Factors, Heads
from fairseq_collab.decomposition.methods import decompose


@dataclass(frozen=True)
class ConcatenatedLayer:
    """What is converted: ``q_weight`` (N, D), ``q_bias`` (N,) or None, ``k_weight`` (N, E) and H."""

    q_weight: Tensor
    q_bias: Tensor | None
    k_weight: Tensor
    num_heads: int

    @property
    def heads(self) -> Heads:
        """The heads as factors."""
        return Heads.from_weights(self.q_weight.detach(), self.k_weight.detach(), self.num_heads)

    @property
    def content_bias(self) -> Tensor:
        """(H, E)."""
        bias = self.q_weight.new_zeros(len(self.q_weight)) if self.q_bias is None else self.q_bias.detach()
        return self.heads.content_bias(bias)


@dataclass(frozen=True)
class CollaborativeLayer:
    """What it becomes, in float64: ``q_weight`` (R, D), ``k_weight`` (R, E), ``mixing`` and ``query_bias`` (H, P).

    ``pick`` (H, P) holds the shared dims of each head, ascending.
    """

    q_weight: Tensor
    k_weight: Tensor
    mixing: Tensor
    query_bias: Tensor
    pick: Tensor

    @property
    def factors(self) -> Factors:
        """The layer, its bias included."""
        shape = len(self.mixing), len(self.q_weight)
        mixing, bias = (
            part.new_zeros(shape, dtype=torch.float64).scatter(1, self.pick, part.double())
            for part in (self.mixing, self.query_bias)
        )
        return Factors(mixing, self.q_weight.double().T, self.k_weight.double().T, bias)


def convert_layer(
    layer: ConcatenatedLayer,
    key_dim: int,
    mix_dim: int,
    whitening: Whitening | None = None,
    method: str = "cp",
    seed: int = 0,
    tol: float | None = None,
) -> CollaborativeLayer:
    """Decomposes a layer's heads and fits its query bias.

    Args:
        key_dim: R. mix_dim: P.
        whitening: what the layer's inputs look like; the weights alone count when None.
        method, seed, tol: as in :func:`fairseq_collab.decomposition.methods.decompose`.

    Returns:
        the layer, exact at R >= H*K and P >= K.
    """
    heads = replace(layer.heads, bias=layer.content_bias)
    if whitening is None:
        # the weights of the heads alone decide; their bias is fitted to what comes out
        factors, pick = decompose(layer.heads, key_dim, mix_dim, method, seed, tol)
        factors = cp.with_bias(heads, factors, pick)
    else:
        factors, pick = decompose(whitening.apply(heads), key_dim, mix_dim, method, seed, tol)
        factors = cp.balance(whitening.undo(factors))
    parts = factors.mixing.gather(1, pick), factors.bias.gather(1, pick)
    return CollaborativeLayer(factors.q.T, factors.k.T, *parts, pick)


def weight_error(layer: ConcatenatedLayer, converted: CollaborativeLayer) -> float:
    """``|T - T_hat| / |T|`` (Frobenius), without the bias."""
    return cp.relative_error(layer.heads, replace(converted.factors, bias=None))


def score_error(layer: ConcatenatedLayer, converted: CollaborativeLayer, whitening: Whitening) -> tuple[float, float]:
    """Root mean square of the error of the scores before scaling, relative to the scores themselves and absolute.

    Both are those expected of independent queries and keys with the calibrated moments, the mean of each query's
    scores taken off.
    """
    heads = whitening.apply(replace(layer.heads, bias=layer.content_bias))
    relative = cp.relative_error(heads, whitening.apply_to_factors(converted.factors))
    return relative, relative * (heads.squared_norm() / layer.num_heads).sqrt().item()
