"""What the inputs of an attention look like, and how to weigh a decomposition by it. Knows no model.

The scores of a head are ``x T y + b y``, with ``b`` the content bias. For independent inputs with covariances ``Cx``
and ``Cy`` the expected squared error of an approximation is

    |Cx^1/2 (T - T_hat) Cy^1/2|^2 + |Cy^1/2 ((T - T_hat)^T E[x] + b - b_hat)|^2

where ``y`` may be centred because a shift of all scores of a query does not change its softmax, and ``x`` because the
bias takes up what the mean of ``x`` contributes. So the factors are multiplied by the roots of the covariances,
decomposed and mapped back, and the bias is fitted to the second term.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq_collab.decomposition.cp import Factors, Heads

DAMPING = 1e-4  # of the mean eigenvalue, added to all: directions that no input had stay invertible


class Moments:
    """Mean and second moments of vectors of ``width`` numbers, added up in float64 as they come.

    The memory is that of one (width, width) matrix, however many vectors are added.
    """

    def __init__(self, width: int):
        self.count = 0
        self._sum = torch.zeros(width, dtype=torch.float64)
        self._products = torch.zeros(width, width, dtype=torch.float64)

    def add(self, x: Tensor, valid: Tensor | None = None) -> None:
        """Adds the vectors of ``x`` (..., width), only those where ``valid`` (...) is True if it is given."""
        rows = (x.flatten(0, -2) if valid is None else x[valid]).detach().double().to(self._sum.device)
        self.count += len(rows)
        self._sum += rows.sum(0)
        self._products += rows.T @ rows

    @property
    def mean(self) -> Tensor:
        """``E[x]``, (width,)."""
        return self._sum / max(1, self.count)

    @property
    def second(self) -> Tensor:
        """``E[x x^T]``, (width, width)."""
        return self._products / max(1, self.count)

    @property
    def covariance(self) -> Tensor:
        """``Cov[x]``, (width, width)."""
        return self.second - torch.outer(self.mean, self.mean)


@dataclass(frozen=True)
class Whitening:
    """Symmetric roots of the covariances of queries (D, D) and keys (E, E), their inverses, and E[x] (D,); float64."""

    query_mean: Tensor
    query_root: Tensor
    query_inverse: Tensor
    key_root: Tensor
    key_inverse: Tensor

    @classmethod
    def of(cls, query: Moments, key: Moments) -> "Whitening":
        """From the moments of an attention's two inputs."""
        return cls(query.mean, *_roots(query.covariance), *_roots(key.covariance))

    def apply(self, heads: Heads) -> Heads:
        """The heads whose plain error is the error of the scores of ``heads``, bias included, on the data."""
        bias = self._mean_scores(heads.member, heads)
        if heads.bias is not None:
            bias = bias + heads.bias
        return Heads(heads.member, self.query_root @ heads.q, self.key_root @ heads.k, bias @ self.key_root)

    def apply_to_factors(self, factors: Factors) -> Factors:
        """As :meth:`apply`, for factors with a bias."""
        bias = factors.bias + factors.mixing * (self.query_mean @ factors.q)
        return Factors(factors.mixing, self.query_root @ factors.q, self.key_root @ factors.k, bias)

    def undo(self, factors: Factors) -> Factors:
        """Factors of what was given to :meth:`apply` from factors of what it returned."""
        q = self.query_inverse @ factors.q
        bias = factors.bias - factors.mixing * (self.query_mean @ q)
        return Factors(factors.mixing, q, self.key_inverse @ factors.k, bias)

    def _mean_scores(self, mixing: Tensor, parts: Heads) -> Tensor:
        """``T[h]^T E[x]`` of each head, (H, E)."""
        return (mixing * (self.query_mean @ parts.q)) @ parts.k.T


def _roots(covariance: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp(min=0)
    lift = DAMPING * values.mean()
    root = (values + lift if lift > 0 else torch.ones_like(values)).sqrt()
    return vectors * root @ vectors.T, vectors / root @ vectors.T
