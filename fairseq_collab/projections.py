"""Projections of one input whose gradients are summed inside the matrix products.

Autograd makes the gradient of queries, keys and values with respect to their input each in an array of its own and
adds the three. Here every product but the first adds to what is there.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

_PLAIN = (Tensor, nn.Parameter)


class _Projections(torch.autograd.Function):
    """``x @ weight.T + bias`` for several weights and biases."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights_and_biases: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = weights_and_biases[::2], weights_and_biases[1::2]
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows = x.reshape(-1, x.size(-1))
        grad_x: Tensor | None = None
        others: list[Tensor | None] = []
        for number, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
            grad = grad.reshape(-1, grad.size(-1))
            if ctx.needs_input_grad[0]:
                grad_x = grad @ weight if grad_x is None else grad_x.addmm_(grad, weight)
            of_weight, of_bias = ctx.needs_input_grad[1 + 2 * number : 3 + 2 * number]
            others.append(grad.t() @ rows if of_weight else None)
            others.append(grad.sum(0) if of_bias else None)
        return (None if grad_x is None else grad_x.view(x.size()), *others)


def project(
    query: Tensor, key: Tensor, value: Tensor, q_proj: nn.Module, k_proj: nn.Module, v_proj: nn.Module
) -> tuple[Tensor, Tensor, Tensor]:
    """``q_proj(query), k_proj(key), v_proj(value)``, together where they have the same input."""
    if key is value and _sums(key, k_proj, v_proj):
        if query is key and _sums(key, q_proj):
            return _together(key, q_proj, k_proj, v_proj)
        return q_proj(query), *_together(key, k_proj, v_proj)
    return q_proj(query), k_proj(key), v_proj(value)


def _together(x: Tensor, *projections: nn.Module) -> tuple[Tensor, ...]:
    return _Projections.apply(x, *(part for one in projections for part in (one.weight, one.bias)))


def _sums(x: Tensor, *projections: nn.Module) -> bool:
    """Whether there are gradients to sum, and calling the projections would do nothing but multiply."""
    if not (torch.is_grad_enabled() and x.requires_grad) or _has_any_global_hook() or not is_plain(x):
        return False
    if torch._C._is_any_autocast_enabled():
        return False
    return all(_only_multiplies(one) and one.weight.dtype == x.dtype for one in projections)


def _only_multiplies(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "forward" in vars(module):  # some libraries replace the method of one module
        return False
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    return type(module.weight) in _PLAIN and (module.bias is None or type(module.bias) in _PLAIN)


def is_plain(x: Tensor) -> bool:
    """Whether operations on a tensor are simply done: nobody records, transforms or overrides them."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return False
    return type(x) in _PLAIN and forward_ad._current_level < 0
