"""Every layout, mask, dtype and mode of ``CollaborativeAttention`` against the per-head oracle."""

import copy

import pytest
import torch
from oracle import oracle
from rule import assert_as_exact_as

from fairseq_collab.attention import CollaborativeAttention

LAYOUTS = {
    "dense": dict(key_dim=16),
    "dense, odd": dict(key_dim=13),
    "dense, one dim": dict(key_dim=1),
    "dense, uncompressed": dict(key_dim=64),
    "window": dict(key_dim=16, mix_layout="window"),
    "window, wrapping far": dict(key_dim=16, mix_layout="window", mix_dim=15),
    "window, odd": dict(key_dim=24, mix_layout="window", mix_dim=5),
    "window, disjoint": dict(key_dim=64, mix_layout="window"),
    "picked": dict(key_dim=16, mix_layout="picked"),
    "picked, odd": dict(key_dim=19, mix_layout="picked", mix_dim=5),
}
MASKS = ("none", "padding", "causal", "causal and padding", "bias", "boolean", "a row of padding")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def build(layout: str, **kwargs) -> CollaborativeAttention:
    torch.manual_seed(0)
    module = CollaborativeAttention(64, 8, **LAYOUTS[layout], **kwargs)
    with torch.no_grad():
        module.mixing.normal_(1.0, 0.5)
        module.query_bias.normal_()
        module.v_proj.bias.normal_()
        module.out_proj.bias.normal_()
    return module


def make_masks(kind: str, batch: int, tgt_len: int, src_len: int) -> dict:
    padding = torch.zeros(batch, src_len, dtype=torch.bool)
    padding[0, -2:] = True
    padding[1, :1] = True
    causal = torch.full((tgt_len, src_len), float("-inf")).triu(1)
    everything = padding.clone()
    everything[1] = True
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "causal": {"attn_mask": causal},
        "causal and padding": {"attn_mask": causal, "key_padding_mask": padding},
        "bias": {"attn_mask": torch.linspace(-2, 2, tgt_len * src_len).view(tgt_len, src_len)},
        "boolean": {"attn_mask": causal.isinf()},
        "a row of padding": {"key_padding_mask": everything},
    }[kind]


@pytest.mark.parametrize("need_weights", (False, True), ids=("fused", "weights"))
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_agrees_with_the_oracle(layout, mask, need_weights):
    module = build(layout).eval()
    x = torch.randn(2, 7, 64)
    masks = make_masks(mask, 2, 7, 7)
    for dtype in DTYPES:
        cast = copy.deepcopy(module).to(dtype)
        exact_module = copy.deepcopy(cast).double()
        plain_dtype = torch.float32 if dtype == torch.float64 else dtype
        out, weights = cast(x.to(dtype), need_weights=need_weights, **masks)
        plain, plain_weights = oracle(copy.deepcopy(cast).to(plain_dtype), *[x.to(plain_dtype)] * 3, **masks)
        exact, exact_weights = oracle(exact_module, *[x.to(dtype).double()] * 3, **masks)
        assert out.dtype == dtype
        assert_as_exact_as(out, plain, exact)
        if need_weights:
            assert_as_exact_as(weights.to(dtype), plain_weights, exact_weights)
        else:
            assert weights is None


@pytest.mark.parametrize("boolean", (False, True), ids=("added", "boolean"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mask_of_each_sentence_agrees_with_the_oracle(layout, boolean):
    """Masks (B, 1, T, S), with and without padding beside them; one query of the second sentence sees nothing."""
    module, x = build(layout).eval(), torch.randn(2, 7, 64)
    mask = torch.rand(2, 1, 7, 7) < 0.4
    mask[1, 0, 3] = True
    given = mask if boolean else torch.zeros(mask.shape).masked_fill(mask, float("-inf"))
    for padding in (None, make_masks("padding", 2, 7, 7)["key_padding_mask"]):

        def by_sentence(dtype, padding=padding):
            one = copy.deepcopy(module).to(dtype)
            parts = []
            for b in range(2):
                masks = {} if padding is None else {"key_padding_mask": padding[b : b + 1]}
                parts.append(oracle(one, *[x[b : b + 1].to(dtype)] * 3, attn_mask=mask[b, 0], **masks)[0])
            return torch.cat(parts)

        out, _ = module(x, key_padding_mask=padding, attn_mask=given)
        assert_as_exact_as(out, by_sentence(torch.float32), by_sentence(torch.float64))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_agree_with_the_oracle(layout, mask):
    module = build(layout).train()
    x = torch.randn(2, 7, 64)
    direction = torch.randn(2, 7, 64)
    masks = make_masks(mask, 2, 7, 7)

    def gradients(one, run, dtype):
        one = copy.deepcopy(one).to(dtype)
        inputs = x.to(dtype, copy=True).requires_grad_()
        (run(one, inputs) * direction.to(dtype)).sum().backward()
        return {"input": inputs.grad, **{name: p.grad for name, p in one.named_parameters()}}

    fast = gradients(module, lambda one, y: one(y, **masks)[0], torch.float32)
    plain = gradients(module, lambda one, y: oracle(one, y, y, y, **masks)[0], torch.float32)
    exact = gradients(module, lambda one, y: oracle(one, y, y, y, **masks)[0], torch.float64)
    assert fast.keys() == exact.keys()
    for name in fast:
        assert_as_exact_as(fast[name], plain[name], exact[name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cross_attention_with_other_widths_and_lengths(layout):
    module = build(layout, kdim=40, vdim=24).eval()
    query, key, value = torch.randn(2, 3, 64), torch.randn(2, 11, 40), torch.randn(2, 11, 24)
    masks = make_masks("padding", 2, 3, 11)
    with torch.no_grad():
        out, _ = module(query, key, value, **masks)
        plain, _ = oracle(module, query, key, value, **masks)
        exact, _ = oracle(copy.deepcopy(module).double(), query.double(), key.double(), value.double(), **masks)
    assert_as_exact_as(out, plain, exact)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_query_that_sees_no_key_gets_the_output_bias_and_finite_gradients(layout):
    module = build(layout).train()
    x = torch.randn(2, 5, 64, requires_grad=True)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1] = True
    out, weights = module(x, key_padding_mask=padding, need_weights=True)
    fused, _ = module(x, key_padding_mask=padding)
    assert torch.equal(out[1], module.out_proj.bias.expand(5, 64))
    assert torch.equal(fused[1], module.out_proj.bias.expand(5, 64))
    assert not weights[1].any()
    (out.sum() + fused.sum()).backward()
    for name, parameter in module.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
    assert not x.grad[1].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast_stays_finite_and_close_on_large_inputs(layout, dtype):
    module = build(layout).eval()
    x = 50 * torch.randn(2, 7, 64)
    masks = make_masks("causal and padding", 2, 7, 7)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=dtype):
            for need_weights in (False, True):
                out, _ = module(x, need_weights=need_weights, **masks)
                assert torch.isfinite(out).all()
        exact, _ = oracle(copy.deepcopy(module).double(), *[x.double()] * 3, **masks)
        half = copy.deepcopy(module).to(dtype)
        plain, _ = oracle(half, *[x.to(dtype)] * 3, **masks)
    assert_as_exact_as(out.to(dtype), plain, exact)


@pytest.mark.parametrize("need_weights", (False, True))
@pytest.mark.parametrize("layout", ("dense", "window", "picked"))
def test_dropout_drops_weights_in_training_only_and_keeps_the_mean(layout, need_weights):
    module = build(layout, dropout=0.5)
    x = torch.randn(1, 6, 64)
    module.eval()
    expected = module(x, need_weights=need_weights)[0]
    assert torch.equal(expected, module(x, need_weights=need_weights)[0])
    module.train()
    runs = torch.stack([module(x, need_weights=need_weights)[0] for _ in range(2000)])
    assert runs.std(0).min() > 0
    standard_error = runs.std(0) / len(runs) ** 0.5
    assert ((runs.mean(0) - expected).abs() < 6 * standard_error).all()
