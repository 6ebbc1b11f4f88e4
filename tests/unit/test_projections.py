"""Projections of one input: their values and gradients are those of separate calls, and hooks are still called."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fairseq_collab import projections
from fairseq_collab.attention import CollaborativeAttention
from fairseq_collab.fairseq_modules.multihead_attention import CollaborativeMultiheadAttention

D, R = 24, 7


@pytest.fixture
def layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(D, R, bias=False), nn.Linear(D, R, bias=False), nn.Linear(D, D)]


@pytest.fixture
def summed(monkeypatch) -> list[int]:
    """How many projections went together, call by call."""
    calls: list[int] = []
    together = projections._together

    def noted(x: Tensor, *modules: nn.Module):
        calls.append(len(modules))
        return together(x, *modules)

    monkeypatch.setattr(projections, "_together", noted)
    return calls


def gradients(outs, inputs) -> list[Tensor]:
    weights = [torch.linspace(-1, 1, out.numel()).view_as(out).to(out) for out in outs]
    return torch.autograd.grad([(out * weight).sum() for out, weight in zip(outs, weights, strict=True)], inputs)


@pytest.mark.parametrize("which", ("self", "cross", "three inputs"))
def test_gradients_are_those_of_separate_calls(layers, summed, which):
    layers = [layer.double() for layer in layers]
    x, y, z = (torch.randn(5, 3, D, dtype=torch.float64, requires_grad=True) for _ in range(3))
    given = {"self": (x, x, x), "cross": (x, y, y), "three inputs": (x, y, z)}[which]
    leaves = [*dict.fromkeys(given), *(p for layer in layers for p in layer.parameters())]
    found = projections.project(*given, *layers)
    plain = [layer(one) for layer, one in zip(layers, given, strict=True)]
    assert summed == {"self": [3], "cross": [2], "three inputs": []}[which]
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    for one, other in zip(gradients(found, leaves), gradients(plain, leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_gradients_have_gradients(layers):
    layers = [layer.double() for layer in layers]
    x = torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True)

    def nonlinear(x: Tensor, *_: Tensor) -> Tensor:
        q, k, v = projections.project(x, x, x, *layers)
        return (q * k).sum().tanh() + v.sin().sum()

    assert torch.autograd.gradgradcheck(nonlinear, (x, *(layer.weight for layer in layers)))


def test_frozen_projections_get_no_gradient(layers):
    layers[1].requires_grad_(False)
    x = torch.randn(2, 3, D, requires_grad=True)
    sum(out.sum() for out in projections.project(x, x, x, *layers)).backward()
    assert layers[1].weight.grad is None and layers[0].weight.grad is not None and x.grad is not None


def test_hooks_are_called(layers, summed):
    seen = []
    layers[1].register_forward_hook(lambda module, given, out: seen.append("forward"))
    layers[2].register_full_backward_hook(lambda module, given, out: seen.append("backward"))
    x = torch.randn(2, 3, D, requires_grad=True)
    sum(out.sum() for out in projections.project(x, x, x, *layers)).backward()
    assert seen == ["forward", "backward"] and not summed


def test_a_projection_that_is_more_than_a_product_is_called(layers, summed):
    layers[0] = nn.Sequential(layers[0], nn.Tanh())
    x = torch.randn(2, 3, D, requires_grad=True)
    q, _, _ = projections.project(x, x, x, *layers)
    assert q.abs().max() <= 1 and summed == [2]


def test_a_method_replaced_on_one_projection_is_called(layers, summed):
    multiply = layers[1].forward
    layers[1].forward = lambda x: 2 * multiply(x)
    x = torch.randn(2, 3, D, requires_grad=True)
    _, k, _ = projections.project(x, x, x, *layers)
    torch.testing.assert_close(k, 2 * multiply(x))
    assert not summed


class Wrapped(Tensor):
    """What libraries for quantised or distributed weights put in the place of a weight."""


@pytest.mark.parametrize("what", ("weight", "input"))
def test_tensors_of_other_kinds_are_left_to_their_own_rules(layers, summed, what):
    x = torch.randn(2, 3, D, requires_grad=True)
    if what == "weight":
        layers[1].weight = nn.Parameter(layers[1].weight.detach().as_subclass(Wrapped))
    else:
        x = x.as_subclass(Wrapped)
    assert type(projections.project(x, x, x, *layers)[1]) is Wrapped and not summed


def test_forward_mode_differentiates(layers, summed):
    x = torch.randn(2, 3, D, requires_grad=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        q, _, _ = projections.project(dual, dual, dual, *layers)
        torch.testing.assert_close(forward_ad.unpack_dual(q).tangent, layers[0](torch.ones_like(x)))
    assert not summed


def test_autocast_keeps_its_precision(layers, summed):
    x = torch.randn(2, 3, D, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(out.dtype == torch.bfloat16 for out in projections.project(x, x, x, *layers))
    assert not summed


def test_nothing_is_summed_without_gradients(layers, summed):
    x = torch.randn(2, 3, D)
    projections.project(x, x, x, *layers)
    with torch.no_grad():
        projections.project(x.requires_grad_(), x, x, *layers)
    assert not summed


@pytest.mark.parametrize("layout", ("dense", "window", "picked"))
def test_attention_projects_together(layout, summed):
    x = torch.randn(5, 3, D, requires_grad=True)
    CollaborativeAttention(D, 4, 8, mix_layout=layout)(x)
    CollaborativeMultiheadAttention(D, 4, 8, mix_layout=layout, self_attention=True)(x, x, x)
    encoded = torch.randn(7, 3, D, requires_grad=True)
    cross = CollaborativeMultiheadAttention(D, 4, 8, mix_layout=layout, encoder_decoder_attention=True)
    cross(x, encoded, encoded)
    assert summed == [3, 3, 2]
