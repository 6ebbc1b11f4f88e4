"""The ways to decompose stacked heads, by name, and tensorly's ``CPTensor`` as the form in which factors are exchanged.

``cp`` is this package's own (``cp.py``); ``parafac`` is tensorly's on the dense stack, as in the paper's code; ``svd``
keeps the strongest singular components of the single heads, so that nothing is shared.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fairseq_collab.decomposition import cp
from fairseq_collab.decomposition.cp import Factors, Heads
from fairseq_collab.errors import CollabError

if TYPE_CHECKING:
    from tensorly.cp_tensor import CPTensor

METHODS = ("cp", "parafac", "svd")


def to_cp_tensor(factors: Factors | Heads) -> "CPTensor":
    """As tensorly has it: unit weights and the factor matrices of modes head (H, R), query (D, R) and key (E, R)."""
    from tensorly.cp_tensor import CPTensor

    mixing = factors.mixing if isinstance(factors, Factors) else factors.member
    matrices = [part.numpy() for part in (mixing, factors.q, factors.k)]
    return CPTensor((torch.ones(mixing.size(1), dtype=mixing.dtype).numpy(), matrices))


def from_cp_tensor(tensor: Any) -> Factors:
    """Factors in float64 with balanced columns, from a ``CPTensor`` (or its weights and matrices) of any backend."""
    weights, matrices = tensor
    mixing, q, k = (torch.as_tensor(matrix).double() for matrix in matrices)
    if weights is not None:
        mixing = mixing * torch.as_tensor(weights).double()
    return cp.balance(Factors(mixing, q, k))


def decompose(
    heads: Heads, key_dim: int, mix_dim: int, method: str = "cp", seed: int = 0, tol: float | None = None
) -> tuple[Factors, Tensor]:
    """Fits ``key_dim`` shared dims to ``heads``; every head keeps its ``mix_dim`` strongest ones.

    Args:
        heads: what to approximate. key_dim: R. mix_dim: P.
        method: one of ``METHODS``. At R >= H*K and P >= K all of them copy the heads.
        seed: of the random start of ``parafac``; the others use none.
        tol: gain of a sweep below which ``cp`` and ``parafac`` end; their own when None.

    Returns:
        factors, and the picks (H, P) in ascending order.

    Raises:
        CollabError: an unknown method.
    """
    if method not in METHODS:
        raise CollabError(f"there is no decomposition {method!r}; known are {', '.join(METHODS)}")
    num_heads, size = heads.member.shape
    if method == "cp" or (key_dim >= size and mix_dim >= size // num_heads) or heads.squared_norm() == 0:
        return cp.decompose(heads, key_dim, mix_dim, **({} if tol is None else {"tol": tol}))[:2]
    if method == "svd":
        factors = cp.singular_components(heads, key_dim)
        pick = cp.strongest(factors, mix_dim)
        kept = torch.zeros_like(factors.mixing).scatter(1, pick, factors.mixing.gather(1, pick))
        return cp.with_bias(heads, Factors(kept, factors.q, factors.k), pick), pick
    factors = from_cp_tensor(parafac(heads, key_dim, seed, tol=1e-6 if tol is None else tol))
    pick = cp.strongest(factors, mix_dim)
    if mix_dim < key_dim:
        factors, _ = cp.sweep(heads, factors, pick)
    return cp.with_bias(heads, factors, pick), pick


def parafac(heads: Heads, key_dim: int, seed: int = 0, init: str = "random", tol: float = 1e-6) -> "CPTensor":
    """tensorly's decomposition of the dense (H, D, E) stack, with the settings of the paper's code by default."""
    import tensorly
    from tensorly.decomposition import parafac as tensorly_parafac

    stack = torch.einsum("hn,dn,en->hde", heads.member, heads.q, heads.k).numpy()
    with tensorly.backend_context("numpy", local_threadsafe=True):
        return tensorly_parafac(stack, rank=key_dim, init=init, tol=tol, n_iter_max=100, random_state=seed)
