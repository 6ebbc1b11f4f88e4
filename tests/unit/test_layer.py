"""A layer's conversion against scores that are computed head by head for all pairs of inputs."""

import pytest
import torch

from fairseq_collab.decomposition import calibration
from fairseq_collab.decomposition.calibration import Moments, Whitening
from fairseq_collab.decomposition.layer import ConcatenatedLayer, convert_layer, score_error, weight_error

H, K, D, E = 4, 6, 20, 14


def random(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def layer():
    return ConcatenatedLayer(random(H * K, D), random(H * K, seed=1), random(H * K, E, seed=2), H)


@pytest.fixture
def text():
    """Queries and keys with means, and a few directions in which they vary much more than in others."""
    x = random(300, D, seed=3) * torch.logspace(0, -2, D, dtype=torch.float64) @ random(D, D, seed=4)
    y = random(200, E, seed=5) * torch.logspace(0, -2, E, dtype=torch.float64) @ random(E, E, seed=6)
    return x + random(D, seed=7), y + random(E, seed=8)


@pytest.fixture
def damping(monkeypatch):
    """Next to none, for figures that are compared with exact ones."""
    monkeypatch.setattr(calibration, "DAMPING", 1e-12)


@pytest.fixture
def whitening(text):
    moments = [Moments(part.size(1)) for part in text]
    for one, part in zip(moments, text, strict=True):
        one.add(part)
    return Whitening.of(*moments)


def original_scores(layer, x, y):
    q = (x @ layer.q_weight.T + layer.q_bias).view(len(x), H, K)
    return torch.einsum("thk,shk->hts", q, (y @ layer.k_weight.T).view(len(y), H, K))


def new_scores(converted, x, y):
    q = (x @ converted.q_weight.T)[:, converted.pick] * converted.mixing + converted.query_bias  # (T, H, P)
    return torch.einsum("thp,shp->hts", q, (y @ converted.k_weight.T)[:, converted.pick])


def centred(scores):
    return scores - scores.mean(-1, keepdim=True)


@pytest.mark.parametrize("method", ("cp", "parafac", "svd"))
@pytest.mark.parametrize("calibrated", (False, True))
def test_uncompressed_layers_keep_all_their_scores(layer, text, whitening, method, calibrated):
    converted = convert_layer(layer, H * K, K, whitening if calibrated else None, method)
    torch.testing.assert_close(centred(new_scores(converted, *text)), centred(original_scores(layer, *text)))
    assert weight_error(layer, converted) == 0
    assert score_error(layer, converted, whitening)[0] == 0


@pytest.mark.parametrize("key_dim, mix_dim", ((8, 8), (8, 5), (2, 2)))
def test_reported_score_error_is_that_of_all_pairs(damping, layer, text, whitening, key_dim, mix_dim):
    converted = convert_layer(layer, key_dim, mix_dim, whitening)
    wanted, found = centred(original_scores(layer, *text)), centred(new_scores(converted, *text))
    relative, absolute = score_error(layer, converted, whitening)
    assert relative == pytest.approx(((wanted - found).norm() / wanted.norm()).item())
    assert absolute == pytest.approx((wanted - found).square().mean().sqrt().item())


@pytest.mark.parametrize("mix_dim", (8, 6))
def test_calibration_spends_the_dims_on_what_inputs_do(layer, text, whitening, mix_dim):
    wanted = centred(original_scores(layer, *text))

    def error(converted):
        return ((centred(new_scores(converted, *text)) - wanted).norm() / wanted.norm()).item()

    plain, weighted = convert_layer(layer, 8, mix_dim), convert_layer(layer, 8, mix_dim, whitening)
    assert error(weighted) < 0.5 * error(plain)
    assert weight_error(layer, weighted) > weight_error(layer, plain)


def test_the_bias_cannot_be_fitted_better(layer, whitening, text):
    converted = convert_layer(layer, 8, 5, whitening)
    best = score_error(layer, converted, whitening)[0]
    for h in range(H):
        for p in range(5):
            for step in (-0.01, 0.01):
                converted.query_bias[h, p] += step
                assert score_error(layer, converted, whitening)[0] > best
                converted.query_bias[h, p] -= step


def test_layers_without_bias_get_one_only_from_calibration(layer, whitening):
    bare = ConcatenatedLayer(layer.q_weight, None, layer.k_weight, H)
    assert not convert_layer(bare, 8, 5).query_bias.any()
    assert convert_layer(bare, 8, 5, whitening).query_bias.any()
    assert not convert_layer(bare, H * K, K, whitening).query_bias.abs().max() > 1e-9


def test_columns_are_balanced_after_whitening_too(layer, whitening):
    converted = convert_layer(layer, 8, 5, whitening)
    torch.testing.assert_close(converted.q_weight.norm(dim=1), converted.k_weight.norm(dim=1))
    assert converted.mixing.abs().max() == pytest.approx(1)
