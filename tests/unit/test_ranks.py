"""Key dims by layer: within the budget, below the error, and better than the same dim everywhere."""

import itertools

import pytest
import torch

from fairseq_collab.decomposition.calibration import Moments, Whitening
from fairseq_collab.decomposition.cp import relative_error
from fairseq_collab.decomposition.layer import ConcatenatedLayer, convert_layer, weight_error
from fairseq_collab.errors import CollabError
from fairseq_collab.ranks import error_curves, under_budget, under_error

H, K, D = 4, 8, 32
METHODS = ("cp", "svd")


def layer_of_rank(rank, seed=0):
    """A layer that ``rank`` shared dims describe but for a little noise."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size):
        return torch.randn(*size, generator=generator)

    mixed = random(H, K, rank) @ random(rank, D)
    q, k = mixed.flatten(0, 1), (random(H, K, rank) @ random(rank, D)).flatten(0, 1)
    return ConcatenatedLayer(q + 0.05 * random(H * K, D), random(H * K), k + 0.05 * random(H * K, D), H)


@pytest.fixture(scope="module")
def layers():
    return {"simple": layer_of_rank(2), "middling": layer_of_rank(5, 1), "rich": layer_of_rank(32, 2)}


@pytest.fixture(scope="module")
def curves(layers):
    return error_curves(layers, {}, progress=False)


def test_curves_fall_to_zero_between_a_full_fit_and_its_start(layers, curves):
    for name, curve in curves.items():
        assert list(curve.errors) == sorted(curve.errors, reverse=True)
        assert curve.dims[-1] == H * K and curve.errors[-1] == 0
        for dim, error in list(zip(curve.dims, curve.errors, strict=True))[:-1]:
            found, single = (
                weight_error(layers[name], convert_layer(layers[name], dim, dim, None, m)) for m in METHODS
            )
            assert found <= error + 1e-9 < single


@pytest.mark.parametrize("share", (0.1, 0.25, 0.5, 0.9))
def test_budgets_are_kept_and_spent_where_they_pay(curves, share):
    costs = {name: (2 * D, 100) for name in curves}
    budget = int(share * 3 * 2 * D * H * K) + 300
    chosen = under_budget(curves, costs, budget)
    spent = sum(2 * D * dim + 100 for dim in chosen.values())
    assert spent <= budget < spent + 2 * D * 2

    def total(dims):
        return sum((curves[name].error(dim) * curves[name].size) ** 2 for name, dim in zip(curves, dims, strict=True))

    affordable = (budget - 300) // (2 * D)
    choices = [dims for dims in itertools.product(range(1, H * K + 1), repeat=3) if sum(dims) <= affordable]
    assert total(chosen.values()) <= 1.1 * min(map(total, choices)) + 1e-9
    assert total(chosen.values()) <= total([affordable // 3] * 3)


def test_a_budget_below_the_smallest_dims_is_refused(curves):
    with pytest.raises(CollabError, match="the budget of 10 parameters is below the 1,236 of the smallest key dims"):
        under_budget(curves, {name: (64 * 6, 28) for name in curves}, 10)


@pytest.mark.parametrize("bound", (0.5, 0.2, 0.05, 1e-9))
def test_errors_stay_below_the_bound_with_no_dim_too_many(curves, bound):
    chosen = under_error(curves, bound)
    for name, dim in chosen.items():
        assert curves[name].error(dim) <= bound
        assert dim == 1 or curves[name].error(dim - 1) > bound
    assert chosen["simple"] <= chosen["rich"]


def test_calibrated_curves_know_how_large_the_scores_are(layers):
    moments = Moments(D)
    moments.add(torch.randn(500, D, generator=torch.Generator().manual_seed(3)))
    whitening = Whitening.of(moments, moments)
    larger = layers["rich"]
    larger = ConcatenatedLayer(larger.q_weight * 2, larger.q_bias, larger.k_weight, H)
    found = error_curves({"once": layers["rich"], "twice": larger}, dict.fromkeys(("once", "twice"), whitening), False)
    assert found["twice"].size == pytest.approx(2 * found["once"].size)
    assert found["twice"].errors == pytest.approx(found["once"].errors, abs=1e-6)
    assert relative_error(layers["rich"].heads, convert_layer(layers["rich"], 16, 16).factors) > 0
