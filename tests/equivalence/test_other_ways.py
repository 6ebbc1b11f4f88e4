"""Where neither blocks nor torch's fused attention can go: what is recorded or transformed, dropout, finite masks."""

import pytest
import torch
from gradients import D, H
from oracle import oracle
from torch import Tensor
from torch.autograd import forward_ad

from fairseq_collab import functional
from fairseq_collab.attention import CollaborativeAttention

WIDE = D // H  # as wide as values
DENSE = {"wider than values": (17, 11), "as wide": (WIDE, 11), "narrower, long": (5, 300)}
LAYOUTS = {
    "dense": dict(key_dim=17, mix_layout="dense"),
    "dense, as wide": dict(key_dim=WIDE, mix_layout="dense"),
    "dense, narrower": dict(key_dim=5, mix_layout="dense"),
    "window": dict(key_dim=24, mix_layout="window"),
    "window, narrower": dict(key_dim=8, mix_layout="window", mix_dim=3),
    "picked": dict(key_dim=19, mix_layout="picked"),
    "concatenated": dict(collaborative=False),
}


@pytest.mark.parametrize("sizes", DENSE.values(), ids=DENSE.keys())
@pytest.mark.parametrize("why", ("half precision", "a trained mask", "per-sample gradients", "forward mode", "twice"))
def test_what_is_recorded_or_transformed_takes_the_product(why, sizes):
    key_dim, length = sizes
    torch.manual_seed(9)
    module, x = CollaborativeAttention(D, H, key_dim, mix_layout="dense"), torch.randn(3, length, D)
    if why == "half precision":
        length = min(length, 255)  # longer ones go to the fused attention
        module.bfloat16()(x[:, :length].bfloat16())
    elif why == "a trained mask":
        mask = torch.zeros(length, length, requires_grad=True)
        module(x, attn_mask=mask)[0].sum().backward()
        assert mask.grad.abs().sum() > 0
        if key_dim <= WIDE:
            return  # torch's fused attention falls back by itself
    elif why == "forward mode":
        with forward_ad.dual_level():
            out, _ = module(forward_ad.make_dual(x, torch.randn_like(x)))
            assert forward_ad.unpack_dual(out).tangent.abs().sum() > 0
    elif why == "twice":
        squares = torch.func.grad(lambda one: torch.func.grad(lambda x: module(x)[0].square().sum())(one).sum())(x)
        assert squares.abs().sum() > 0
    else:
        grads = torch.func.vmap(torch.func.grad(lambda one: module(one.unsqueeze(0))[0].sum()))(x)
        assert grads.shape == x.shape
    assert functional.backend_used() == "dense-product"


@pytest.mark.parametrize("key_dim", (17, WIDE, 5))
def test_dropout_on_cpus_stays_in_blocks(key_dim):
    module = CollaborativeAttention(D, H, key_dim, mix_layout="dense", dropout=0.1)
    module(torch.randn(1, 300, D))
    assert functional.backend_used() == "dense-blocks"
    module.eval()(torch.randn(1, 300, D))
    assert functional.backend_used() == ("dense-blocks" if key_dim > WIDE else "dense-sdpa")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exported_layers_take_texts_of_any_length(layout):
    module = CollaborativeAttention(D, H, **LAYOUTS[layout]).eval()
    batch, queries, keys = (torch.export.Dim(name, max=1024) for name in ("batch", "queries", "keys"))
    example = torch.randn(2, 5, D), torch.randn(2, 6, D)
    shapes = {0: batch, 1: queries}, {0: batch, 1: keys}
    exported = torch.export.export(module, example, dynamic_shapes=shapes).module()
    for sizes in ((2, 5, 6), (3, 2, 300)):
        x, y = torch.randn(sizes[0], sizes[1], D), torch.randn(sizes[0], sizes[2], D)
        torch.testing.assert_close(exported(x, y)[0], module(x, y)[0])


@pytest.mark.parametrize("low", (-1e4, torch.finfo(torch.float32).min), ids=("-1e4", "lowest"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_finite_numbers_that_stand_for_minus_infinity_leave_gradients_right(layout, low):
    """A row in which all keys are masked by them attends to all keys alike, which is what others do as well."""
    torch.manual_seed(2)
    module = CollaborativeAttention(D, H, **LAYOUTS[layout])
    x, y = torch.randn(2, 4, D, requires_grad=True), torch.randn(2, 300, D, requires_grad=True)
    mask = torch.zeros(2, 1, 1, 300)
    mask[0, ..., 100:] = low
    mask[1] = low

    def gradients(out: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(out.square().sum(), [x, y, *module.parameters()], allow_unused=True))

    found = gradients(module(x, y, attn_mask=mask)[0])
    wanted = gradients(module(x, y, attn_mask=mask, need_weights=True)[0])
    for one, other in zip(found, wanted, strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 * other.abs().max().item())
    if module.mixing is not None:
        wanted = oracle(module, x, y, y, attn_mask=mask.expand(2, H, 4, 300))[0]
        torch.testing.assert_close(module(x, y, attn_mask=mask)[0], wanted)
