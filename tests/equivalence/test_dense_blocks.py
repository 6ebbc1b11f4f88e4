"""Dense mixing in blocks: output and gradients by the rule, however the blocks are cut, and when it is not chosen."""

import pytest
import torch
from gradients import MASKS_WITH_GRADIENTS, check_gradients, with_gradients
from torch import Tensor

from fairseq_collab import dense_blocks, functional
from fairseq_collab.attention import CollaborativeAttention
from fairseq_collab.fairseq_modules.multihead_attention import CollaborativeMultiheadAttention

B, T, S, D, H, R = 3, 11, 13, 48, 4, 17
CUTS = {  # scores a block and queries a block at least, of 3 sentences, 4 heads, 11 queries and 13 keys
    "one block": (2**19, 512),
    "two sentences": (2 * H * T * S, 2),
    "three heads": (3 * T * S, 2),
    "four queries": (4 * S, 2),
}


@pytest.fixture(params=CUTS.values(), ids=CUTS.keys(), autouse=True)
def cut(request, monkeypatch):
    for name, number in zip(("BLOCK", "FEWEST_QUERIES"), request.param, strict=True):
        monkeypatch.setattr(dense_blocks, name, number)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=("fp32", "fp64"))
@pytest.mark.parametrize("time_first", (False, True), ids=("batch first", "time first"))
@pytest.mark.parametrize("kind", MASKS_WITH_GRADIENTS)
def test_output_and_gradients_are_the_oracles(kind, time_first, dtype):
    check_gradients(R, (B, T, S), kind, time_first, dtype, "dense-blocks")


def test_dropout_drops_the_same_weights_on_the_way_back():
    """The function is fixed by the random state, so that differences of it are its gradients."""
    torch.manual_seed(4)
    q, k, v = torch.randn(B, T, R), torch.randn(B, S, R), torch.randn(B, H, S, 6)
    mixing, query_bias = torch.randn(H, R) / 4, torch.randn(H, R) / 4
    inputs = [one.double().requires_grad_() for one in (q, k, v, mixing, query_bias)]

    def attend(*inputs: Tensor) -> Tensor:
        torch.manual_seed(6)
        return dense_blocks.attend_in_blocks(*inputs, None, 0.4)

    assert torch.autograd.gradcheck(attend, inputs)


def test_dropout_drops_its_share_and_keeps_the_mean():
    k, v = torch.zeros(B, 2000, R), torch.eye(1).expand(B, H, 2000, 1)
    factors = torch.zeros(H, R)
    torch.manual_seed(7)
    one, other = (dense_blocks.attend_in_blocks(torch.zeros(B, T, R), k, v, factors, factors, None, 0.25) for _ in "ab")
    assert not torch.equal(one, other)
    # a mean of 2000 draws of 0 or 4/3: its deviation is sqrt(1/3 / 2000) = 0.013
    assert ((one - 1).abs() < 5 * 0.013).all() and one.std() > 0.5 * 0.013


def test_fairseqs_layer_takes_the_same_way():
    torch.manual_seed(8)
    module = CollaborativeMultiheadAttention(D, H, R, self_attention=True, mix_layout="dense")
    x = torch.randn(T, B, D)
    out, _ = module(x, x, x, need_weights=False)
    assert functional.backend_used() == "dense-blocks"
    again, _ = module(x, x, x, need_weights=True)
    torch.testing.assert_close(out, again)


@pytest.mark.parametrize("sizes", ((0, T, S), (B, 0, S), (B, T, 0), (B, 0, 0), (1, 1, 1), (1, 1, 5000)), ids=str)
def test_nothing_or_one_of_something_is_attended(sizes):
    torch.manual_seed(10)
    module = CollaborativeAttention(D, H, R, mix_layout="dense").double()
    x, y = (torch.randn(sizes[0], length, D, dtype=torch.float64) for length in sizes[1:])
    spelled = with_gradients(module, x, y, lambda x, y: module(x, y, need_weights=True)[0])
    found = with_gradients(module, x, y, lambda x, y: module(x, y)[0])
    assert functional.backend_used() == "dense-blocks"
    for one, other in zip(found, spelled, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("sizes", ((0, B), (T, 0)), ids=str)
@pytest.mark.parametrize("need_weights", (False, True))
def test_fairseqs_layer_takes_nothing(sizes, need_weights):
    module = CollaborativeMultiheadAttention(D, H, R, self_attention=True, mix_layout="dense")
    x = torch.zeros(*sizes, D, requires_grad=True)
    out, _ = module(x, x, x, need_weights=need_weights)
    out.sum().backward()
    assert out.shape == x.shape == x.grad.shape


MASKS = (
    (),
    (S,),
    (T, 1),
    (B * H, T, S),
    (1, T, S),
    (B, 1, T, S),
    (1, H, 1, S),
    (B, H, 1, 1),
    (1, 1, T, 1),
    (B, H, T, S),
)


@pytest.mark.parametrize("size", MASKS, ids=str)
def test_masks_of_every_size_that_broadcasts(size):
    torch.manual_seed(11)
    module = CollaborativeAttention(D, H, R, mix_layout="dense").double()
    x, y = torch.randn(B, T, D, dtype=torch.float64), torch.randn(B, S, D, dtype=torch.float64)
    mask = torch.randn(size, dtype=torch.float64)
    mask[torch.rand(size) < 0.3] = float("-inf")
    for given in (mask, mask == float("-inf")):
        for padding in (None, torch.rand(B, S) < 0.3):
            out, _ = module(x, y, attn_mask=given, key_padding_mask=padding)
            spelled, _ = module(x, y, attn_mask=given, key_padding_mask=padding, need_weights=True)
            torch.testing.assert_close(out, spelled)
