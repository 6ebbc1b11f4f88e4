"""One shared key no wider than the values, read by torch's fused attention for every head: output and gradients."""

import pytest
import torch
from gradients import MASKS_WITH_GRADIENTS, D, H, check_gradients
from torch.nn import functional as F

from fairseq_collab import functional
from fairseq_collab.attention import CollaborativeAttention
from fairseq_collab.fairseq_modules.multihead_attention import CollaborativeMultiheadAttention

WIDE = D // H  # as wide as values


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=("fp32", "fp64"))
@pytest.mark.parametrize("time_first", (False, True), ids=("batch first", "time first"))
@pytest.mark.parametrize("kind", MASKS_WITH_GRADIENTS)
@pytest.mark.parametrize("key_dim, keys", ((WIDE, 13), (5, 259)), ids=("as wide", "padded"))
def test_output_and_gradients_are_the_oracles(key_dim, keys, kind, time_first, dtype):
    check_gradients(key_dim, (3, 11, keys), kind, time_first, dtype, "dense-sdpa")


@pytest.mark.parametrize("key_dim", (WIDE, 5), ids=("as wide", "padded"))
def test_half_precision_follows_the_rule_as_well(key_dim):
    check_gradients(key_dim, (3, 11, 259), "padding", False, torch.bfloat16, "dense-sdpa")


def test_keys_are_not_copied_for_every_head(monkeypatch):
    seen, fused = [], F.scaled_dot_product_attention

    def noted(query, key, *rest, **more):
        seen.append(key)
        return fused(query, key, *rest, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    for key_dim, keys in ((WIDE, 13), (5, 259)):
        CollaborativeAttention(D, H, key_dim)(torch.randn(2, 3, D), torch.randn(2, keys, D))
        assert seen.pop().stride(1) == 0


def test_weights_and_steps_agree_with_the_whole():
    torch.manual_seed(1)
    module = CollaborativeMultiheadAttention(D, H, WIDE, self_attention=True).eval()
    x = torch.randn(7, 2, D)
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    whole, _ = module(x, x, x, attn_mask=future, need_weights=False)
    assert functional.backend_used() == "dense-sdpa"
    with_weights, _ = module(x, x, x, attn_mask=future, need_weights=True)
    torch.testing.assert_close(with_weights, whole)
    state: dict = {}
    steps = [module(one, one, one, incremental_state=state, need_weights=False)[0] for one in x.split(1)]
    assert functional.backend_used() == "dense-product"
    torch.testing.assert_close(torch.cat(steps), whole)
