"""Decompositions by name, and factors as tensorly's tensors."""

import pytest
import tensorly
import torch

from fairseq_collab.decomposition.cp import Factors, Heads, relative_error
from fairseq_collab.decomposition.methods import decompose, from_cp_tensor, to_cp_tensor
from fairseq_collab.errors import CollabError

H, K, D, E = 3, 4, 10, 8


@pytest.fixture
def heads():
    generator = torch.Generator().manual_seed(0)
    return Heads.from_weights(torch.randn(H * K, D, generator=generator), torch.randn(H * K, E, generator=generator), H)


def dense(parts):
    mixing = parts.mixing if isinstance(parts, Factors) else parts.member
    return torch.einsum("hr,dr,er->hde", mixing, parts.q, parts.k)


def test_tensorly_reads_heads_and_factors(heads):
    for parts in (heads, decompose(heads, 6, 6)[0]):
        found = torch.as_tensor(tensorly.cp_to_tensor(to_cp_tensor(parts)))
        torch.testing.assert_close(found, dense(parts))


def test_factors_of_tensorly_are_read_with_their_weights(heads):
    tensor = to_cp_tensor(heads)
    tensor.weights[:] = 2.0
    torch.testing.assert_close(dense(from_cp_tensor(tensor)), 2 * dense(heads))
    torch.testing.assert_close(dense(from_cp_tensor((None, tensor.factors))), dense(heads))


@pytest.mark.parametrize("method", ("cp", "parafac", "svd"))
@pytest.mark.parametrize("key_dim, mix_dim", ((6, 6), (6, 4), (12, 4), (12, 12), (1, 1)))
def test_every_method_keeps_to_its_picks(heads, method, key_dim, mix_dim):
    factors, pick = decompose(heads, key_dim, mix_dim, method)
    assert pick.shape == (H, mix_dim)
    assert not factors.mixing.scatter(1, pick, 0.0).any()
    error = relative_error(heads, factors)
    assert error == 0 if key_dim == 12 else 0 < error < 1


def test_the_paper_s_method_follows_its_seed(heads):
    one, again, other = (decompose(heads, 5, 5, "parafac", seed)[0] for seed in (1, 1, 2))
    assert torch.equal(one.q, again.q)
    assert not torch.equal(one.q, other.q)


def test_svd_keeps_the_strongest_components_of_single_heads(heads):
    factors, _ = decompose(heads, 6, 4, "svd")
    strengths = torch.linalg.svdvals(dense(heads))[:, :K].flatten().sort(descending=True).values
    expected = strengths[6:].square().sum().sqrt() / strengths.norm()
    assert relative_error(heads, factors) == pytest.approx(expected.item())
    assert (factors.mixing != 0).sum(0).tolist() == [1] * 6


def test_the_own_method_is_at_least_as_close_as_the_others(heads):
    errors = {method: relative_error(heads, decompose(heads, 6, 6, method)[0]) for method in ("cp", "parafac", "svd")}
    assert errors["cp"] <= 1.01 * errors["parafac"] and errors["cp"] < errors["svd"]


def test_unknown_methods_are_refused(heads):
    with pytest.raises(CollabError, match="there is no decomposition 'tucker'; known are cp, parafac, svd"):
        decompose(heads, 6, 6, "tucker")
