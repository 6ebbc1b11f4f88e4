"""Moments of inputs as they stream by, and the whitening made from them."""

import pytest
import torch

from fairseq_collab.decomposition.calibration import Moments, Whitening
from fairseq_collab.decomposition.cp import Factors, Heads

WIDTH = 6


@pytest.fixture
def inputs():
    """(B, T, D) with a mean and correlations, and which of them are no padding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, WIDTH, generator=generator) @ torch.randn(WIDTH, WIDTH, generator=generator) + 3
    valid = torch.arange(7) < torch.tensor([7, 5, 1, 3, 6]).unsqueeze(1)
    x[~valid] = float("nan")
    return x, valid


def moments_of(x, valid=None):
    moments = Moments(x.size(-1))
    moments.add(x, valid)
    return moments


def test_padding_does_not_count(inputs):
    x, valid = inputs
    moments, rows = moments_of(x, valid), x[valid].double()
    assert moments.count == len(rows) == 22
    torch.testing.assert_close(moments.mean, rows.mean(0))
    torch.testing.assert_close(moments.second, rows.T @ rows / len(rows))
    torch.testing.assert_close(moments.covariance, torch.cov(rows.T, correction=0))


def test_text_in_parts_is_the_text_as_a_whole(inputs):
    x, valid = inputs
    parts = Moments(WIDTH)
    for one, mask in zip(x, valid, strict=True):
        parts.add(one, mask)
    torch.testing.assert_close(parts.covariance, moments_of(x, valid).covariance)


def test_whitened_inputs_have_unit_covariance(inputs):
    rows = inputs[0][inputs[1]].double()
    whitening = Whitening.of(moments_of(rows), moments_of(rows))
    white = (rows - rows.mean(0)) @ whitening.query_inverse
    assert torch.cov(white.T, correction=0).sub(torch.eye(WIDTH)).abs().max() < 0.01, "but for the damping"
    torch.testing.assert_close(whitening.key_root @ whitening.key_inverse, torch.eye(WIDTH).double())


@pytest.mark.parametrize("rank", (0, 2), ids=("constant", "flat"))
def test_inputs_without_some_directions_can_be_undone(rank):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(50, rank, generator=generator) @ torch.randn(rank, WIDTH, generator=generator) + 1
    whitening = Whitening.of(moments_of(rows), moments_of(rows))
    parts = [torch.randn(size, 4, generator=generator, dtype=torch.float64) for size in (3, WIDTH, WIDTH)]
    there = whitening.apply(Heads(*parts))
    bias = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    back = whitening.undo(Factors(there.member, there.q, there.k, bias))
    for found, wanted in ((back.q, parts[1]), (back.k, parts[2])):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(whitening.apply_to_factors(back).bias, bias)
