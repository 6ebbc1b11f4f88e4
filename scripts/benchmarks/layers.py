"""The attention layers that `attention` and `scaling` compare, their inputs, and how many operations each needs.

Every layer is called as fairseq calls its own: (T, B, D), a padding mask, no weights wanted. Nothing is timed here.

Notation: B batch, T length, D width, H heads, K = D / H head dim, R shared key dims, P dims that one head mixes,
G groups of grouped-query attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.common import import_fairseq
from fairseq_collab import functional

LAYOUTS = {"dense": "dense", "windows": "window", "picked": "picked"}
CONCATENATED, SMALL_KEYS, FORK, GROUPED = "concatenated", "concatenated, small keys", "fork-style", "grouped-query"


@dataclass(frozen=True)
class Shape:
    """What one call computes; ``key_dim`` is R."""

    batch: int
    length: int
    width: int
    heads: int
    key_dim: int

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def groups(self) -> int | None:
        """Groups whose keys are ``key_dim`` wide together; None where there is no such number of whole heads."""
        groups = self.key_dim // self.head_dim
        fits = groups > 0 and self.key_dim % self.head_dim == 0 and self.heads % groups == 0
        return groups if fits else None


class GroupedQueryAttention(nn.Module):
    """Query heads that share keys and values in groups (arXiv 2305.13245), on torch's fused attention.

    Args:
        groups: G; keys and values are G * K wide.

    With ``repeat`` keys and values are repeated for every head, where the fused attention does not take groups.
    """

    repeat = False

    def __init__(self, width: int, heads: int, groups: int):
        super().__init__()
        self.head_dim = width // heads
        self.q_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.k_proj, self.v_proj = (nn.Linear(width, groups * self.head_dim) for _ in range(2))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor, need_weights: bool = False):
        """As fairseq's attention: (T, B, D) and (B, S)."""
        q, k, v = (
            projected.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3)  # (T, B, .) -> (B, heads, T, K)
            for projected in (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        )
        if self.repeat:
            k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        mask = torch.zeros_like(key_padding_mask, dtype=q.dtype).masked_fill(key_padding_mask, float("-inf"))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None], enable_gqa=True)
        return self.out_proj(out.permute(2, 0, 1, 3).flatten(2)), None


def build(name: str, shape: Shape) -> nn.Module:
    """A layer with random weights, non-zero biases included.

    Args:
        name: ours (``dense``, ``windows``, ``picked``) or one of the peers.

    Raises:
        CollabError: fairseq cannot be imported.
    """
    import_fairseq()
    from fairseq.modules import MultiheadAttention

    from benchmarks.fork_style import ForkStyleAttention
    from fairseq_collab.fairseq_modules.multihead_attention import CollaborativeMultiheadAttention

    width, heads = shape.width, shape.heads
    torch.manual_seed(0)
    if name == CONCATENATED:
        layer = MultiheadAttention(width, heads, self_attention=True)
    elif name == GROUPED:
        layer = GroupedQueryAttention(width, heads, shape.groups)
    elif name == SMALL_KEYS:
        layer = CollaborativeMultiheadAttention(width, heads, shape.key_dim, collaborative=False, self_attention=True)
    else:
        options = dict(mix_layout=LAYOUTS.get(name, "dense"), self_attention=True)
        if options["mix_layout"] != "dense":
            options["mix_dim"] = min(shape.head_dim, shape.key_dim)
        layer = CollaborativeMultiheadAttention(width, heads, shape.key_dim, **options)
        if name == FORK:
            layer = ForkStyleAttention(layer, self_attention=True)
    with torch.no_grad():
        for parameter_name, parameter in layer.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.1)
    return layer


def inputs(shape: Shape, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(T, B, D) and a padding mask (B, T): lengths from 3/4 of T to T in even steps, 7/8 of it for one sentence."""
    torch.manual_seed(1)
    x = torch.randn(shape.length, shape.batch, shape.width, device=device, dtype=dtype)
    places = torch.linspace(0.75, 1.0, shape.batch) if shape.batch > 1 else torch.tensor([0.875])
    lengths = (places * shape.length).long().unsqueeze(1)
    return x, (torch.arange(shape.length) >= lengths).to(device)


def forward_work(layer: nn.Module, x: Tensor, padding: Tensor) -> Callable[..., None]:
    """A call in evaluation."""

    @torch.no_grad()
    def work(_: Any = None) -> None:
        layer(x, x, x, key_padding_mask=padding, need_weights=False)

    layer.eval()
    return work


def training_work(layer: nn.Module, x: Tensor, padding: Tensor) -> Callable[..., None]:
    """A call and its gradients, of the input as well; they are dropped at its end."""
    x = x.clone().requires_grad_()
    wanted = torch.ones_like(x)

    def work(_: Any = None) -> None:
        layer(x, x, x, key_padding_mask=padding, need_weights=False)[0].backward(wanted)
        layer.zero_grad(set_to_none=True)
        x.grad = None

    layer.train()
    return work


def backend_of(work: Callable[..., None]) -> str:
    """What ran in one call of ours."""
    work()
    return functional.backend_used() or "unknown"


def operations(name: str, shape: Shape) -> int:
    """Multiplications and additions of one forward call: projections, scores and weighted values, padding included.

    Mixing, biases, masks and softmax are left out; so is what fork-style spends on mixing its keys.
    """
    sides = {
        CONCATENATED: (shape.width, shape.width, shape.head_dim),
        SMALL_KEYS: (shape.key_dim, shape.width, max(1, shape.key_dim // shape.heads)),
        FORK: (shape.key_dim, shape.width, shape.key_dim),
        "dense": (shape.key_dim, shape.width, shape.key_dim),
    }
    keys, values, mixed = sides.get(name, (shape.key_dim, shape.width, min(shape.head_dim, shape.key_dim)))
    queries = keys
    if name == GROUPED:
        queries, values = shape.width, shape.key_dim
    projections = shape.width * (queries + keys + values + shape.width)
    pairs = shape.length * shape.heads * (mixed + shape.head_dim)
    return 2 * shape.batch * shape.length * (projections + pairs)
