"""The one tolerance rule of the equivalence tests. A number is never widened until a test passes."""

import torch
from torch import Tensor


def assert_as_exact_as(fast: Tensor, plain: Tensor, exact: Tensor) -> None:
    """``fast`` may be at most twice as far from ``exact`` as the plain implementation in the same dtype.

    Distances are root mean squares: the largest of a few rounding errors is itself a matter of luck, while one wrong
    value in thousands still stands out by orders of magnitude.

    Args:
        fast: what is tested. plain: the straightforward computation in the dtype of ``fast``.
        exact: the same in float64.

    The plain error counts as at least one rounding of a typical exact value, since it can be 0 by luck. Nothing
    is exact beside float64, so there ``plain`` is computed in float32 and its error scaled by the ratio of roundings.
    """
    assert fast.shape == plain.shape == exact.shape
    assert torch.isfinite(fast).all()
    assert plain.dtype == (torch.float32 if fast.dtype == torch.float64 else fast.dtype)
    rounding = torch.finfo(plain.dtype).eps * max(rms(exact), 1e-3)
    plain_error = max(rms(plain.double() - exact), rounding)
    plain_error *= torch.finfo(fast.dtype).eps / torch.finfo(plain.dtype).eps
    error = rms(fast.double() - exact)
    assert error <= 2 * plain_error, f"error {error:.3g} against {plain_error:.3g} of the plain implementation"


def rms(x: Tensor) -> float:
    return x.detach().square().mean().sqrt().item()
