"""Output and gradients of the attention on each device and in each precision against the oracle."""

import copy

import pytest
import torch
from oracle import oracle
from rule import assert_as_exact_as
from torch import Tensor
from torch.nn import functional as F

from fairseq_collab.attention import CollaborativeAttention

LAYOUTS = {
    "window": dict(key_dim=24, mix_dim=11, mix_layout="window"),
    "picked": dict(key_dim=19, mix_dim=5, mix_layout="picked"),
    "dense": dict(key_dim=17, mix_layout="dense"),
}
PLACES = [
    pytest.param("cpu", torch.float32, id="cpu-fp32"),
    pytest.param("cpu", torch.bfloat16, id="cpu-bf16"),
    *(
        pytest.param("cuda", dtype, id=f"cuda-{name}", marks=pytest.mark.gpu)
        for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16))
    ),
]


def spelled_out(module: CollaborativeAttention, x: Tensor, **masks: Tensor) -> Tensor:
    """The output of self-attention by the oracle."""
    return oracle(module, x, x, x, **masks)[0]


def fused_oracle(module: CollaborativeAttention, x: Tensor, **masks: Tensor) -> Tensor:
    """The same head by head with torch's fused attention, whose gradients round differently from spelled-out ones."""
    hidden = torch.zeros(x.size(0), x.size(1), x.size(1), dtype=torch.bool)
    if masks:
        hidden = masks["attn_mask"] | masks["key_padding_mask"].unsqueeze(1)
    mask = torch.zeros(hidden.shape, dtype=x.dtype).masked_fill(hidden, float("-inf")).unsqueeze(1)  # (B, 1, T, S)
    values = module.v_proj(x).chunk(module.num_heads, dim=-1)
    outs = []
    for head, dims in enumerate(module.pick):
        query = module.q_proj(x)[..., dims] * module.mixing[head] + module.query_bias[head]
        key, missing = module.k_proj(x)[..., dims], module.head_dim - module.mix_dim
        query, key = (F.pad(one, (0, missing)).unsqueeze(1) for one in (query, key))
        value = values[head].unsqueeze(1)
        outs.append(F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=module.scale).squeeze(1))
    return module.out_proj(torch.cat(outs, dim=-1))


def with_gradients(module: CollaborativeAttention, x: Tensor, run, **masks: Tensor) -> list[Tensor]:
    """The output and the gradients of its weighted sum: of the input and of every parameter."""
    x = x.clone().requires_grad_()
    out = run(x, **masks)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out)
    grads = torch.autograd.grad((out * weights).sum(), [x, *module.parameters()])
    return [one.detach().cpu() for one in (out, *grads)]


@pytest.mark.parametrize("masked", (False, True), ids=("unmasked", "masked"))
@pytest.mark.parametrize("with_weights", (False, True), ids=("fused", "weights"))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device, dtype", PLACES)
def test_output_and_gradients_are_as_exact_as_the_oracles(device, dtype, layout, with_weights, masked):
    torch.manual_seed(0)
    module = CollaborativeAttention(64, 4, **LAYOUTS[layout])
    with torch.no_grad():
        module.query_bias.normal_()
        for bias in (module.v_proj.bias, module.out_proj.bias):
            bias.normal_()
    module, x = module.to(dtype), torch.randn(3, 13, 64).to(dtype)
    masks = {}
    if masked:
        lengths = torch.tensor([13, 9, 1]).unsqueeze(1)
        masks = dict(key_padding_mask=torch.arange(13) >= lengths, attn_mask=torch.ones(13, 13).triu(1).bool())
    there = copy.deepcopy(module).to(device)
    moved = {name: mask.to(device) for name, mask in masks.items()}
    found = with_gradients(there, x.to(device), lambda x, **m: there(x, need_weights=with_weights, **m)[0], **moved)
    slow = spelled_out if with_weights or layout == "dense" else fused_oracle
    plain = with_gradients(module, x, lambda x, **m: slow(module, x, **m), **masks)
    wide = copy.deepcopy(module).double()
    exact = with_gradients(wide, x.double(), lambda x, **m: spelled_out(wide, x, **m), **masks)
    for one, by_oracle, right in zip(found, plain, exact, strict=True):
        assert_as_exact_as(one, by_oracle, right)
