"""CP decomposition of stacked attention heads, without ever forming the stack.

The scores of head h are ``x T[h] y`` with ``T[h] = Wq[h] Wk[h]^T``. A rank-R CP decomposition of the stack T,
``T[h] ~ sum_r mixing[h, r] q[:, r] k[:, r]^T``, is a collaborative layer (arXiv 2006.16362, section 4). T is itself a
CP tensor of rank H*K with known factors, so alternating least squares [1] needs only products of thin matrices.

A query bias adds ``b[h] y`` to the scores, with a content bias ``b`` (H, E). A collaborative layer can add
``sum_r bias[h, r] k[:, r]`` to those of each head, with ``bias`` (H, R) free wherever the head mixes. So the fit of
``b`` couples to that of T through ``k`` alone: it is one more query row of every head, with coefficients of its own.

Notation: H heads, K dims a head, N = H*K, D and E widths of queries and keys, R shared dims, P dims a head mixes.

[1] T. G. Kolda, B. W. Bader. Tensor Decompositions and Applications. SIAM Review 51(3), 2009, section 3.4.
[2] D. Mitchell, N. Ye, H. De Sterck. Nesterov acceleration of alternating least squares for canonical tensor
    decomposition. Numerical Linear Algebra with Applications 27(4), 2020.
"""

from dataclasses import dataclass, replace
from typing import Optional

import torch
from torch import Tensor

MOMENTUM = 0.9
RIDGE = 1e-12  # of the mean diagonal of a normal matrix: only guards against singular ones
EXACT = 1e-6  # relative errors below are rounding: their squares differ by less than float64 resolves


@dataclass(frozen=True)
class Factors:
    """A collaborative layer: ``mixing`` (H, R), 0 outside of a head's picks, ``q`` (D, R) and ``k`` (E, R).

    ``bias`` (H, R), 0 outside of the picks too, is there when the heads had one.
    """

    mixing: Tensor
    q: Tensor
    k: Tensor
    bias: Optional[Tensor] = None


@dataclass(frozen=True)
class Heads:
    """Concatenated heads as CP factors, in float64: ``q`` (D, N), ``k`` (E, N), and ``member`` (H, N), 1 where own.

    ``bias`` (H, E), the content bias, takes part in the fit and in errors where it is given.
    """

    member: Tensor
    q: Tensor
    k: Tensor
    bias: Optional[Tensor] = None

    @classmethod
    def from_weights(cls, q_weight: Tensor, k_weight: Tensor, num_heads: int) -> "Heads":
        """From the weights of fairseq's projections, (N, D) and (N, E)."""
        head_dim = q_weight.size(0) // num_heads
        member = torch.eye(num_heads, dtype=torch.float64).repeat_interleave(head_dim, dim=1)
        return cls(member, q_weight.double().T, k_weight.double().T)

    def content_bias(self, q_bias: Tensor) -> Tensor:
        """What a query bias (N,) adds to the scores of each head: ``bq[h]^T Wk[h]``, (H, E)."""
        return (self.member * q_bias.to(self.q)) @ self.k.T

    def squared_norm(self) -> Tensor:
        """``|T|^2 + |b|^2``."""
        stack = ((self.member.T @ self.member) * (self.q.T @ self.q) * (self.k.T @ self.k)).sum()
        return stack if self.bias is None else stack + self.bias.square().sum()


def relative_error(heads: Heads, factors: Factors) -> float:
    """``|T - T_hat| / |T|`` (Frobenius), biases included; 0 for heads that are all zero, and below ``EXACT``."""
    return _error(heads, factors, heads.squared_norm(), _products_m(heads, factors))


def _error(heads: Heads, factors: Factors, norm: Tensor, products: Tensor) -> float:
    """:func:`relative_error`, given ``heads.squared_norm()`` and T contracted with q and k."""
    if norm == 0:
        return 0.0
    inner = (factors.mixing * products).sum()
    approximate = (_gram_queries(factors) * _gram(factors.k)).sum()
    if heads.bias is not None:
        inner = inner + (factors.bias * (heads.bias @ factors.k)).sum()
    error = ((norm - 2 * inner + approximate).clamp(min=0) / norm).sqrt().item()
    return error if error > EXACT else 0.0


def decompose(
    heads: Heads,
    key_dim: int,
    mix_dim: Optional[int] = None,
    max_sweeps: int = 100,
    tol: float = 1e-5,
    momentum: float = MOMENTUM,
) -> tuple[Factors, Tensor, list[float]]:
    """Fits ``key_dim`` shared dims to ``heads``, then lets every head keep its ``mix_dim`` strongest ones.

    Deterministic: it starts from the strongest singular components of all heads, not from random factors.

    Args:
        heads: what to approximate.
        key_dim: R. At R >= H*K the heads are copied.
        mix_dim: P; all R when None.
        max_sweeps: of each of the two phases. tol: relative gain below which a phase ends.
        momentum: of the sweeps; 0 for plain alternating least squares.

    Returns:
        factors with balanced columns, the picks (H, P) in ascending order, and the relative errors, one after the
        start and one after each sweep; they never rise within a phase.
    """
    num_heads, size = heads.member.shape
    mix_dim = key_dim if mix_dim is None else mix_dim
    if key_dim >= size and mix_dim >= size // num_heads:
        factors = _copy(heads, key_dim)
        pick = strongest(factors, mix_dim)
        factors = with_bias(heads, factors, pick)
        return factors, pick, [relative_error(heads, factors)]
    every = torch.arange(key_dim).expand(num_heads, key_dim)
    start = with_bias(heads, singular_components(heads, key_dim), every)
    if heads.squared_norm() == 0:
        zeros = (torch.zeros_like(part) for part in (start.mixing, start.q, start.k))
        return Factors(*zeros, start.bias), strongest(start, mix_dim), [0.0]
    factors, errors = sweep(heads, start, None, max_sweeps, tol, momentum)
    if mix_dim == key_dim:
        return factors, every, errors
    # the dense solution is the better place to choose dims from, except where heads repeat each other
    found = []
    for candidate in (factors, start):
        pick = strongest(candidate, mix_dim)
        found.append((*sweep(heads, candidate, pick, max_sweeps, tol, momentum), pick))
    factors, more, pick = min(found, key=lambda one: one[1][-1])
    return factors, pick, errors + more


def _gram(x: Tensor) -> Tensor:
    return x.T @ x


def _products_m(heads: Heads, factors: Factors) -> Tensor:
    """T contracted with q and k: (H, R)."""
    return heads.member @ ((heads.q.T @ factors.q) * (heads.k.T @ factors.k))


def _copy(heads: Heads, key_dim: int) -> Factors:
    missing = key_dim - heads.q.size(1)
    return Factors(*(torch.nn.functional.pad(x, (0, missing)) for x in (heads.member, heads.q, heads.k)))


def with_bias(heads: Heads, factors: Factors, pick: Tensor) -> Factors:
    """The factors with the bias that fits best on the picks (H, P), dependent columns or not."""
    if heads.bias is None:
        return replace(factors, bias=None)
    columns = factors.k.T[pick].transpose(1, 2)  # (H, E, P)
    found = torch.linalg.lstsq(columns, heads.bias.unsqueeze(-1), driver="gelsd").solution.squeeze(-1)
    return replace(factors, bias=torch.zeros_like(factors.mixing).scatter(1, pick, found))


def singular_components(heads: Heads, key_dim: int) -> Factors:
    """The ``key_dim`` strongest singular components of all heads, each mixed by its own head alone."""
    num_heads, size = heads.member.shape
    head_dim = size // num_heads
    columns_q, columns_k, strengths = [], [], []
    for h in range(num_heads):
        own = slice(h * head_dim, (h + 1) * head_dim)
        basis_q, core_q = torch.linalg.qr(heads.q[:, own])
        basis_k, core_k = torch.linalg.qr(heads.k[:, own])
        u, s, vh = torch.linalg.svd(core_q @ core_k.T)
        columns_q.append(basis_q @ u * s.sqrt())
        columns_k.append(basis_k @ vh.T * s.sqrt())
        strengths.append(s)
    found = torch.cat(strengths)
    owner = torch.arange(num_heads).repeat_interleave(len(found) // num_heads)
    kept = found.argsort(descending=True, stable=True)[:key_dim].sort().values
    q, k = torch.cat(columns_q, dim=1)[:, kept], torch.cat(columns_k, dim=1)[:, kept]
    mixing = torch.nn.functional.one_hot(owner[kept], num_heads).T.double()  # (H, R)
    return balance(Factors(*(torch.nn.functional.pad(x, (0, key_dim - len(kept))) for x in (mixing, q, k))))


def sweep(
    heads: Heads,
    factors: Factors,
    pick: Optional[Tensor],
    max_sweeps: int = 100,
    tol: float = 1e-5,
    momentum: float = MOMENTUM,
) -> tuple[Factors, list[float]]:
    """Alternating least squares with momentum; with ``pick``, ``mixing`` is fitted on the picks of each head alone.

    Each sweep starts from a point beyond the last one, in the direction of the last step [2]; where that leads to a
    larger error, the sweep is dropped and the next one starts from the last point itself.

    Returns:
        factors, and their relative errors at the start and after each sweep, which never rise.
    """
    if pick is not None:
        products = _products_m(heads, factors)
        factors = replace(factors, mixing=_least_squares(products, _gram(factors.q) * _gram(factors.k), pick))
        factors = replace(factors, bias=_fit_bias(heads, factors, pick))
    norm = heads.squared_norm()
    errors = [_error(heads, factors, norm, _products_m(heads, factors))]
    start = factors
    for _ in range(max_sweeps):
        following, products = _one_sweep(heads, start, pick)
        error = _error(heads, following, norm, products)
        if not error < errors[-1]:
            if start is factors:
                break
            start = factors
            errors.append(errors[-1])
            continue
        following = balance(following)
        start = _beyond(following, factors, momentum) if momentum else following
        factors = following
        errors.append(error)
        if errors[-2] - error <= tol * errors[-2]:
            break
    return factors, errors


def _one_sweep(heads: Heads, factors: Factors, pick: Optional[Tensor]) -> tuple[Factors, Tensor]:
    """Queries, keys, mixing and biases, each fitted to the others; and T contracted with the new q and k."""
    q, k, mixing, bias = factors.q, factors.k, factors.mixing, factors.bias
    q = _solve(heads.q @ ((heads.k.T @ k) * (heads.member.T @ mixing)), _gram(k) * _gram(mixing))
    products = heads.k @ ((heads.q.T @ q) * (heads.member.T @ mixing))
    if bias is not None:
        products = products + heads.bias.T @ bias
    k = _solve(products, _gram_queries(Factors(mixing, q, k, bias)))
    products = _products_m(heads, Factors(mixing, q, k))
    mixing = _least_squares(products, _gram(q) * _gram(k), pick)
    bias = _fit_bias(heads, Factors(mixing, q, k), pick)
    return Factors(mixing, q, k, bias), products


def _beyond(now: Factors, before: Factors, momentum: float) -> Factors:
    """``momentum`` of the last step further."""

    def part(a: Tensor, b: Tensor) -> Tensor:
        return a + momentum * (a - b)

    bias = None if now.bias is None else part(now.bias, before.bias)
    return Factors(part(now.mixing, before.mixing), part(now.q, before.q), part(now.k, before.k), bias)


def _least_squares(products: Tensor, gram: Tensor, pick: Optional[Tensor]) -> Tensor:
    """The rows (H, R) that solve the normal equations, each on its own ``pick`` alone if there is one."""
    if pick is None:
        return _solve(products, gram)
    picked = _ridged(gram[pick.unsqueeze(2), pick.unsqueeze(1)])  # (H, P, P)
    solved = torch.linalg.solve(picked, products.gather(1, pick).unsqueeze(-1)).squeeze(-1)
    return torch.zeros_like(products).scatter(1, pick, solved)


def _fit_bias(heads: Heads, factors: Factors, pick: Optional[Tensor]) -> Optional[Tensor]:
    if heads.bias is None:
        return None
    return _least_squares(heads.bias @ factors.k, _gram(factors.k), pick)


def _gram_queries(factors: Factors) -> Tensor:
    """Products of what stands before the columns of ``k`` in all heads, (R, R)."""
    products = _gram(factors.mixing) * _gram(factors.q)
    return products if factors.bias is None else products + _gram(factors.bias)


def _solve(products: Tensor, gram: Tensor) -> Tensor:
    """``products gram^-1`` for a symmetric ``gram``."""
    return torch.linalg.solve(_ridged(gram), products.T).T


def _ridged(gram: Tensor) -> Tensor:
    """``gram`` scaled by nothing and lifted just off singularity; unused columns get a harmless diagonal."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    lift = (RIDGE * diagonal.mean(-1, keepdim=True)).clamp(min=torch.finfo(gram.dtype).tiny)
    return gram + torch.diag_embed(lift.expand_as(diagonal))


def balance(factors: Factors) -> Factors:
    """The same tensor with ``|q| = |k|`` in every column and mixing of at most 1, which half precision keeps."""
    top = factors.mixing.abs().amax(0)
    norm_q, norm_k = factors.q.norm(dim=0), factors.k.norm(dim=0)
    used = (top > 0) & (norm_q > 0) & (norm_k > 0)
    norm = (top * norm_q * norm_k).sqrt()

    def scaled(x: Tensor, by: Tensor) -> Tensor:
        return torch.where(used, x * torch.where(used, by, torch.ones_like(by)), torch.zeros_like(x))

    bias = None if factors.bias is None else scaled(factors.bias, norm_k / norm)
    mixing, q, k = scaled(factors.mixing, 1 / top), scaled(factors.q, norm / norm_q), scaled(factors.k, norm / norm_k)
    return Factors(mixing, q, k, bias)


def strongest(factors: Factors, mix_dim: int) -> Tensor:
    """The ``mix_dim`` dims that matter most to each head, ascending: (H, P).

    The bias has no say: it can be spread over any of the dims that a head has.
    """
    weight = factors.mixing.abs() * factors.q.norm(dim=0) * factors.k.norm(dim=0)
    return weight.argsort(dim=1, descending=True, stable=True)[:, :mix_dim].sort(dim=1).values
