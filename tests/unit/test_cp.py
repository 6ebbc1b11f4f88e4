"""Properties of the factored decomposition, checked against the dense stack that it never forms."""

from itertools import pairwise

import pytest
import torch

from fairseq_collab.decomposition.cp import Factors, Heads, decompose, relative_error

H, K, D, E = 4, 6, 20, 14


def random_heads(seed: int = 0) -> tuple[Heads, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(H * K, D, generator=generator), torch.randn(H * K, E, generator=generator)
    return Heads.from_weights(q, k, H), q, k


def stack(heads: Heads) -> torch.Tensor:
    return torch.einsum("hn,dn,en->hde", heads.member, heads.q, heads.k)


def dense(factors: Factors) -> torch.Tensor:
    return torch.einsum("hr,dr,er->hde", factors.mixing, factors.q, factors.k)


@pytest.mark.parametrize("key_dim, mix_dim", ((12, 12), (12, 6), (7, 4), (1, 1), (20, 5), (24, 6), (24, 3)))
def test_reported_error_is_that_of_the_stack_and_never_rises(key_dim, mix_dim):
    heads, _, _ = random_heads()
    factors, pick, errors = decompose(heads, key_dim, mix_dim)
    truth = ((stack(heads) - dense(factors)).norm() / stack(heads).norm()).item()
    assert relative_error(heads, factors) == pytest.approx(truth, abs=1e-6)
    assert errors[-1] == pytest.approx(truth, abs=1e-6)
    phases = decompose(heads, key_dim)[2]
    for one in (phases, errors[len(phases) :]):
        assert all(later <= earlier for earlier, later in pairwise(one))
    assert pick.shape == (H, mix_dim) and (pick.diff(dim=1) > 0).all()
    outside = torch.ones_like(factors.mixing).scatter(1, pick, 0.0)
    assert not (factors.mixing * outside).any()


def test_uncompressed_heads_are_copied_exactly_and_sparsely():
    heads, _, _ = random_heads()
    factors, pick, errors = decompose(heads, H * K, K)
    assert errors == [0.0]
    assert torch.equal(dense(factors), stack(heads))
    assert torch.equal(pick, torch.arange(H * K).view(H, K))


def test_planted_shared_dims_are_recovered():
    generator = torch.Generator().manual_seed(3)
    shared_q, shared_k = torch.randn(5, D, generator=generator), torch.randn(5, E, generator=generator)
    mixing = torch.rand(H, 5, generator=generator) + 0.5
    # every head uses all five shared dims, and its sixth is empty
    q = torch.cat([torch.cat([shared_q * mixing[h].unsqueeze(1), torch.zeros(1, D)]) for h in range(H)])
    k = torch.cat([torch.cat([shared_k, torch.zeros(1, E)]) for _ in range(H)])
    _, _, errors = decompose(Heads.from_weights(q, k, H), 5, max_sweeps=2000, tol=1e-9)
    assert errors[-1] < 1e-3


def test_better_than_the_singular_vectors_it_starts_from():
    heads, _, _ = random_heads(1)
    errors = decompose(heads, 12)[2]
    assert errors[-1] < 0.95 * errors[0]


@pytest.mark.parametrize("mix_dim", (None, 6))
def test_momentum_needs_fewer_sweeps(mix_dim):
    generator = torch.Generator().manual_seed(0)
    shared = [torch.randn(8, D, generator=generator) for _ in range(2)]  # heads that differ in how they mix
    q, k = ((torch.randn(H * K, 8, generator=generator) + 1) @ part for part in shared)
    heads = Heads.from_weights(q, k, H)
    fast = decompose(heads, 12, mix_dim, max_sweeps=40, tol=0)[2]
    slow = decompose(heads, 12, mix_dim, max_sweeps=80, tol=0, momentum=0)[2]
    assert fast[-1] < slow[-1]


@pytest.mark.parametrize("scale", (1e-12, 1e12))
def test_badly_scaled_weights_convert_alike(scale):
    heads, q, k = random_heads()
    expected = decompose(heads, 12, 6)[2][-1]
    other = Heads.from_weights(q.double() * scale, k.double(), H)
    assert decompose(other, 12, 6)[2][-1] == pytest.approx(expected, rel=1e-3)


def test_zero_and_repeated_heads_do_no_harm():
    _, q, k = random_heads()
    q[:K], k[:K] = q[K : 2 * K], k[K : 2 * K]  # head 0 repeats head 1
    q[2 * K : 3 * K] = 0  # head 2 scores nothing
    factors, _, errors = decompose(Heads.from_weights(q, k, H), 12, 6)
    assert all(torch.isfinite(part).all() for part in (factors.mixing, factors.q, factors.k))
    assert errors[-1] < errors[0], "worse than every head keeping its own strongest dims"
    nothing, _, zero = decompose(Heads.from_weights(q * 0, k, H), 12, 6)
    assert zero[-1] == 0 and not dense(nothing).any()


def test_columns_are_balanced_for_half_precision():
    heads, _, _ = random_heads()
    factors, _, _ = decompose(heads, 12, 6)
    assert factors.mixing.abs().amax(0).allclose(torch.ones(12, dtype=torch.float64))
    assert factors.q.norm(dim=0).allclose(factors.k.norm(dim=0))


def test_same_weights_give_the_same_factors():
    first, second = (decompose(random_heads()[0], 12, 6)[0] for _ in range(2))
    assert torch.equal(first.q, second.q) and torch.equal(first.mixing, second.mixing)
