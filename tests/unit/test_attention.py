"""How a ``CollaborativeAttention`` is put together: dims, picks, starting values, what it refuses."""

import pytest
import torch

from fairseq_collab.attention import (
    CollaborativeAttention,
    MixingMatrixInit,
    balanced_pick,
    initial_mixing,
    window_pick,
)
from fairseq_collab.errors import CollabError
from fairseq_collab.functional import picked_heads, window_heads


@pytest.mark.parametrize(
    "heads, mix_dim, key_dim", ((8, 8, 16), (8, 16, 16), (8, 5, 24), (8, 8, 64), (1, 7, 7), (3, 4, 9))
)
def test_windows_read_the_same_dims_as_their_indices(heads, mix_dim, key_dim):
    x = torch.randn(2, 3, key_dim)
    assert torch.equal(window_heads(x, heads, mix_dim), picked_heads(x, window_pick(heads, mix_dim, key_dim)))


def test_disjoint_windows_are_a_view_without_a_copy():
    x = torch.randn(2, 3, 64)
    assert window_heads(x, 8, 8).data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    "heads, mix_dim, key_dim", ((8, 8, 16), (8, 5, 19), (12, 32, 96), (4, 7, 7), (8, 3, 24), (7, 4, 9))
)
def test_picks_are_balanced_distinct_sorted_and_seeded(heads, mix_dim, key_dim):
    pick = balanced_pick(heads, mix_dim, key_dim, seed=3)
    uses = torch.bincount(pick.flatten(), minlength=key_dim)
    assert uses.min() >= heads * mix_dim // key_dim
    assert uses.max() <= -(-heads * mix_dim // key_dim)
    assert (pick.diff(dim=1) > 0).all()
    assert torch.equal(pick, balanced_pick(heads, mix_dim, key_dim, seed=3))
    if mix_dim < key_dim:
        assert not torch.equal(pick, balanced_pick(heads, mix_dim, key_dim, seed=4))


def test_mixing_starts_as_named():
    pick = torch.arange(10).expand(4, 10)
    concatenated = initial_mixing(MixingMatrixInit.CONCATENATE, pick, 10)
    assert concatenated.sum(1).tolist() == [3, 3, 3, 1]
    assert torch.equal(concatenated.sum(0), torch.ones(10))
    assert torch.equal(initial_mixing(MixingMatrixInit.ALL_ONES, pick, 10), torch.ones(4, 10))
    wide = torch.arange(400).expand(50, 400)
    uniform = initial_mixing(MixingMatrixInit.UNIFORM, wide, 400)
    default = initial_mixing(MixingMatrixInit.DEFAULT, wide, 400)
    assert abs(uniform.mean()) < 0.01 and abs(uniform.std() - 0.2) < 0.01
    assert abs(default.mean() - 1) < 0.02 and abs(default.std() - 0.5) < 0.02
    noisy = initial_mixing(MixingMatrixInit.NOISY, window_pick(50, 399, 400), 400)
    assert abs(noisy.mean() - 1) < 0.02 and abs(noisy.std() - 0.5) < 0.02
    sparse = initial_mixing(MixingMatrixInit.DEFAULT, window_pick(8, 8, 16), 16)
    assert torch.equal(sparse, torch.ones(8, 8))


def test_the_original_packages_initialisations_keep_their_values():
    assert [
        init.value for init in (MixingMatrixInit.CONCATENATE, MixingMatrixInit.ALL_ONES, MixingMatrixInit.UNIFORM)
    ] == [
        1,
        2,
        3,
    ]


def test_only_picks_are_stored():
    assert "pick" in CollaborativeAttention(64, 8, 16, mix_layout="picked").state_dict()
    for layout in ("dense", "window"):
        assert "pick" not in CollaborativeAttention(64, 8, 16, mix_layout=layout).state_dict()


def test_a_loaded_module_takes_the_saved_picks():
    saved = CollaborativeAttention(64, 8, 16, mix_layout="picked", seed=1)
    other = CollaborativeAttention(64, 8, 16, mix_layout="picked", seed=2)
    x = torch.randn(1, 3, 64)
    other.load_state_dict(saved.state_dict())
    assert torch.equal(other(x)[0], saved(x)[0])


def test_parameters_shrink_with_the_key_dim():
    full = CollaborativeAttention(64, 8, 64, collaborative=False)
    quarter = CollaborativeAttention(64, 8, 16)
    assert quarter.q_proj.weight.numel() + quarter.k_proj.weight.numel() == 2 * 64 * 16
    assert quarter.q_proj.bias is None and quarter.k_proj.bias is None and full.q_proj.bias is not None
    assert quarter.mixing.shape == quarter.query_bias.shape == (8, 16)


def test_scale_is_that_of_uncompressed_heads_at_every_key_dim():
    assert {CollaborativeAttention(64, 8, dim).scale for dim in (4, 16, 64)} == {1 / 8**0.5}
    assert CollaborativeAttention(64, 8, 16, scale=0.3).scale == 0.3


def test_one_head_is_dense():
    module = CollaborativeAttention(16, 1, 4, mix_layout="window", mix_dim=4)
    twin = CollaborativeAttention(16, 1, 4)
    twin.load_state_dict(module.state_dict())
    x = torch.randn(2, 5, 16)
    assert torch.allclose(module(x)[0], twin(x)[0], atol=1e-6)


@pytest.mark.parametrize(
    "kwargs, sentence",
    (
        (dict(key_dim=0), "must be at least 1"),
        (dict(key_dim=65), "more than the model width 64"),
        (dict(key_dim=16, mix_dim=17), "can mix 1 to 16"),
        (dict(key_dim=12, collaborative=False), "does not divide among its 8"),
    ),
)
def test_dims_that_do_not_fit_are_refused(kwargs, sentence):
    with pytest.raises(CollabError, match=sentence):
        CollaborativeAttention(64, 8, **kwargs)


def test_a_width_that_does_not_divide_among_heads_is_refused():
    with pytest.raises(CollabError, match="width 60 does not divide among 8 heads"):
        CollaborativeAttention(60, 8)
