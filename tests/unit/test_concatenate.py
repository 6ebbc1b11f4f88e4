"""The closest ordinary heads of collaborative ones, against the dense products that the package never forms."""

import pytest
import torch

from fairseq_collab.attention import CollaborativeAttention
from fairseq_collab.concatenate import ordinary_projections
from fairseq_collab.decomposition.concatenated import closest_heads

HEADS, HEAD_DIM, SHARED = 3, 4, 9
SCALE = 1.7


def layer(mix_dim=7, width=12, k_width=10, rank=None, seed=0):
    """Random ``q_weight``, ``k_weight``, ``mixing``, ``query_bias``, ``pick``; of each head ``rank`` dims matter."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    pick = torch.stack([torch.randperm(SHARED, generator=generator)[:mix_dim] for _ in range(HEADS)])
    mixing = random(HEADS, mix_dim)
    if rank is not None:
        mixing[:, rank:] = 0
    return random(SHARED, width), random(SHARED, k_width), mixing, random(HEADS, mix_dim), pick


def dense_stack(q_weight, k_weight, mixing, query_bias, pick):
    """T_hat (H, D, E) and the content biases (H, E)."""
    queries, keys = q_weight[pick], k_weight[pick]
    stack = SCALE * torch.einsum("hpd,hp,hpe->hde", queries, mixing, keys)
    return stack, SCALE * torch.einsum("hp,hpe->he", query_bias, keys)


def new_stack(heads):
    return heads.q_weight.transpose(1, 2) @ heads.k_weight


@pytest.mark.parametrize(
    "sizes", ({}, {"width": 3}, {"k_width": 3}, {"mix_dim": 9}), ids=("wide", "queries", "keys", "dense")
)
def test_every_head_is_the_best_of_its_rank(sizes):
    parts = layer(**sizes)
    stack, _ = dense_stack(*parts)
    heads = closest_heads(*parts, head_dim=HEAD_DIM, scale=SCALE)
    u, s, vh = torch.linalg.svd(stack, full_matrices=False)
    best = (u[:, :, :HEAD_DIM] * s[:, None, :HEAD_DIM]) @ vh[:, :HEAD_DIM]
    assert heads.q_weight.shape == (HEADS, HEAD_DIM, stack.size(1))
    assert heads.k_weight.shape == (HEADS, HEAD_DIM, stack.size(2))
    torch.testing.assert_close(new_stack(heads), best, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(heads.q_weight.norm(dim=2), heads.k_weight.norm(dim=2))


def test_reported_errors_are_those_of_the_dense_products():
    parts = layer()
    stack, content = dense_stack(*parts)
    heads = closest_heads(*parts, head_dim=HEAD_DIM, scale=SCALE)
    assert heads.error == pytest.approx(((stack - new_stack(heads)).norm() / stack.norm()).item(), rel=1e-9)
    new_content = torch.einsum("hk,hke->he", heads.q_bias, heads.k_weight)
    assert heads.bias_error == pytest.approx(((content - new_content).norm() / content.norm()).item(), rel=1e-9)
    assert 0.01 < heads.error < 1 and 0.01 < heads.bias_error < 1


def test_what_the_new_keys_cannot_say_of_the_bias_is_orthogonal_to_them():
    parts = layer()
    _, content = dense_stack(*parts)
    heads = closest_heads(*parts, head_dim=HEAD_DIM, scale=SCALE)
    residual = content - torch.einsum("hk,hke->he", heads.q_bias, heads.k_weight)
    assert residual.norm() > 0.1
    assert torch.einsum("hke,he->hk", heads.k_weight, residual).abs().max() < 1e-10


@pytest.mark.parametrize("rank", (HEAD_DIM, 2, 0))
def test_heads_of_low_rank_are_kept_exactly(rank):
    parts = layer(rank=rank)
    stack, _ = dense_stack(*parts)
    heads = closest_heads(*parts, head_dim=HEAD_DIM, scale=SCALE)
    assert heads.error == 0.0
    torch.testing.assert_close(new_stack(heads), stack, rtol=1e-10, atol=1e-10)
    # dims in which only rounding is left must not carry a bias
    assert heads.q_bias.abs().max() < 1e3


def test_repeated_dims_leave_the_bias_exact_too():
    q_weight, k_weight, mixing, query_bias, _ = layer(mix_dim=8)
    k_weight[4:8] = k_weight[:4]
    parts = q_weight, k_weight, mixing, query_bias, torch.arange(8).expand(HEADS, 8)
    heads = closest_heads(*parts, head_dim=HEAD_DIM, scale=SCALE)
    assert heads.error == 0.0 and heads.bias_error == 0.0
    _, content = dense_stack(*parts)
    torch.testing.assert_close(torch.einsum("hk,hke->he", heads.q_bias, heads.k_weight), content)


@pytest.mark.parametrize("key_dim, mix_dim, exact", ((6, 4, True), (6, 6, False), (12, 5, False)))
def test_a_layer_says_how_it_was_exported_and_scores_alike(key_dim, mix_dim, exact):
    torch.manual_seed(0)
    layout = "dense" if mix_dim == key_dim else "picked"
    old = CollaborativeAttention(12, 3, key_dim, mix_dim=mix_dim, mix_layout=layout, scale=0.3)
    new = CollaborativeAttention(12, 3, 12, collaborative=False)
    torch.nn.init.normal_(old.query_bias)
    if not exact:
        # beyond the fourth dim only a trace, so that closest heads must score almost alike
        with torch.no_grad():
            old.mixing[:, 4:] *= 1e-6
            old.query_bias[:, 4:] = 0
    projections, told = ordinary_projections(old)
    assert (told["weight_error"] == 0.0) == exact and told["weight_error"] < 1e-5
    state = new.state_dict() | {key: tensor.float() for key, tensor in projections.items()}
    rest = {key: tensor for key, tensor in old.state_dict().items() if key.startswith(("v_proj", "out_proj"))}
    new.load_state_dict(state | rest)
    x, y = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    torch.testing.assert_close(new(x, y, need_weights=True)[1], old(x, y, need_weights=True)[1], rtol=1e-4, atol=1e-5)
