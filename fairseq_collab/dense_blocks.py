"""Dense mixing on CPUs in blocks that stay in the cache: no scores and no mixed queries are kept for gradients.

Torch's fused attention wants keys as wide as values, which shared keys are not; one large product for all heads
writes all scores to memory and keeps them. Here a block of scores is made, used and overwritten by the next one, and
made once more on the way back. Where this is chosen is decided in ``functional``.

Notation: B batch, T target length, S source length, H heads, R shared key dims, V value dims a head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 2**19  # scores a block, two MiB in float32; smaller ones pay for more calls, larger ones leave the cache
FEWEST_QUERIES = 512  # of a head that is cut: with fewer, products with thousands of keys do not reach their rate


@dataclass(frozen=True)
class Block:
    """Which sentences, heads and queries are attended together, and the dropout of their weights."""

    sentences: slice
    heads: slice
    queries: slice
    seed: int

    def dropped(self, weights: Tensor, dropout_p: float) -> Tensor:
        """Factors 0 and ``1 / (1 - p)`` for the weights, the same each time."""
        generator = torch.Generator(weights.device).manual_seed(self.seed)
        return torch.empty_like(weights).bernoulli_(1.0 - dropout_p, generator=generator).div_(1.0 - dropout_p)


def blocks(batch: int, heads: int, queries: int, keys: int, seed: int) -> Iterator[Block]:
    """Cuts (B, H, T) into blocks of about ``BLOCK`` scores: whole sentences, else whole heads, else queries of one."""
    if queries == 0:
        return
    rows = max(1, BLOCK // max(1, keys))
    sentences_at_once = max(1, rows // (heads * queries))
    heads_at_once = min(heads, max(1, rows // queries))
    parts = math.ceil(queries / max(rows, FEWEST_QUERIES)) if heads_at_once == 1 else 1
    queries_at_once = math.ceil(queries / parts)
    for sentence in range(0, batch, sentences_at_once):
        for head in range(0, heads, heads_at_once):
            for query in range(0, queries, queries_at_once):
                yield Block(
                    slice(sentence, min(batch, sentence + sentences_at_once)),
                    slice(head, min(heads, head + heads_at_once)),
                    slice(query, min(queries, query + queries_at_once)),
                    seed,
                )
                seed += 1


class _Memory:
    """Arrays that are made for the first, largest block and used again for those after it."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._arrays: dict[str, Tensor] = {}

    def array(self, name: str, *size: int) -> Tensor:
        """An array of that size; what was in it is lost."""
        numbers = math.prod(size)
        if name not in self._arrays or self._arrays[name].numel() < numbers:
            self._arrays[name] = self._like.new_empty(numbers)
        return self._arrays[name][:numbers].view(size)


@dataclass
class _Layer:
    """The inputs of :func:`attend_in_blocks`, and what every block makes of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    mixing: Tensor
    query_bias: Tensor
    mask: Tensor | None
    dropout_p: float
    seed: int

    def __post_init__(self) -> None:
        self.memory = _Memory(self.q)

    def blocks(self) -> Iterator[Block]:
        return blocks(self.q.size(0), self.mixing.size(0), self.q.size(1), self.k.size(1), self.seed)

    def queries(self, block: Block) -> Tensor:
        """(b, h, t, R) mixed queries."""
        q = self.q[block.sentences, block.queries].unsqueeze(1)  # (b, 1, t, R)
        mixing = self.mixing[block.heads].unsqueeze(1)  # (h, 1, R)
        mixed = self.memory.array("queries", q.size(0), mixing.size(0), q.size(2), q.size(3))
        return torch.addcmul(self.query_bias[block.heads].unsqueeze(1), q, mixing, out=mixed)

    def weights(self, block: Block, queries: Tensor) -> Tensor:
        """(b, h, t, S) weights of :meth:`queries` before dropout."""
        b, h, t, dims = queries.size()
        keys = self.k[block.sentences].transpose(1, 2)  # (b, R, S)
        weights = self.memory.array("weights", b, h, t, keys.size(2))
        scores = weights.view(b, h * t, keys.size(2))
        if self.mask is None:
            torch.bmm(queries.view(b, h * t, dims), keys, out=scores)
        else:
            weights.copy_(_cut(self.mask, block))
            torch.baddbmm(scores, queries.view(b, h * t, dims), keys, out=scores)
        return torch.softmax(weights, dim=-1, out=weights)


def _flat(part: Tensor) -> Tensor:
    """(b, h, ., V) -> (b*h, ., V): a view, because several sentences come with all of their heads."""
    return part[0] if part.size(0) == 1 else part.flatten(0, 1)


def _cut(mask: Tensor, block: Block) -> Tensor:
    """The part of a mask that broadcasts to (B, H, T, S)."""
    for dim, part in enumerate((block.sentences, block.heads, block.queries)):
        if mask.size(dim) > 1:
            mask = mask[(slice(None),) * dim + (part,)]
    return mask


def _heads_of_tokens(like: Tensor, heads: int, dims: int) -> Tensor:
    """An array (B, H, T, dims) for ``like`` (B, T, .), with the heads of a token side by side and tokens as there."""
    if like.stride(0) < like.stride(1):
        return like.new_empty(like.size(1), like.size(0), heads, dims).permute(1, 2, 0, 3)
    return like.new_empty(like.size(0), like.size(1), heads, dims).transpose(1, 2)


def _mergeable(v: Tensor) -> Tensor:
    """(B, H, S, V), copied if sentences and heads cannot be one dimension of a view."""
    return v if v.size(0) == 1 or v.stride(0) == v.size(1) * v.stride(1) else v.contiguous()


class _AttendInBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, mixing, query_bias, mask, dropout_p: float) -> Tensor:
        seed = int(torch.randint(2**62, ())) if dropout_p > 0 else 0
        ctx.save_for_backward(q, k, v, mixing, query_bias, mask)
        ctx.dropout = dropout_p, seed
        layer = _Layer(q, k, _mergeable(v), mixing, query_bias, mask, dropout_p, seed)
        out = _mergeable(_heads_of_tokens(q, mixing.size(0), v.size(3)))
        for block in layer.blocks():
            weights = layer.weights(block, layer.queries(block))
            if dropout_p > 0:
                weights.mul_(block.dropped(weights, dropout_p))
            into = _flat(out[block.sentences, block.heads, block.queries])
            torch.bmm(weights.flatten(0, 1), _flat(layer.v[block.sentences, block.heads]), out=into)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mixing, query_bias, mask = ctx.saved_tensors
        layer = _Layer(q, k, _mergeable(v), mixing, query_bias, mask, *ctx.dropout)
        grad = _mergeable(grad)
        grad_q, grad_k = torch.zeros_like(q), torch.zeros_like(k)
        grad_v = _mergeable(_heads_of_tokens(k, v.size(1), v.size(3))).zero_()
        grad_mixing, grad_bias = torch.zeros_like(mixing), torch.zeros_like(query_bias)
        for block in layer.blocks():
            queries = layer.queries(block)
            weights = layer.weights(block, queries)
            grad_block = _flat(grad[block.sentences, block.heads, block.queries])  # (b*h, t, V)
            values = _flat(layer.v[block.sentences, block.heads])  # (b*h, S, V)
            grad_weights = layer.memory.array("grad_weights", *weights.size())
            torch.bmm(grad_block, values.transpose(1, 2), out=grad_weights.flatten(0, 1))
            kept = weights
            if layer.dropout_p > 0:
                factors = block.dropped(weights, layer.dropout_p)
                grad_weights.mul_(factors)
                kept = factors.mul_(weights)
            _flat(grad_v[block.sentences, block.heads]).baddbmm_(kept.flatten(0, 1).transpose(1, 2), grad_block)
            torch.ops.aten._softmax_backward_data.out(grad_weights, weights, -1, q.dtype, grad_input=weights)
            b, h, t, dims = queries.size()
            grad_scores, flat_queries = weights.view(b, h * t, weights.size(3)), queries.view(b, h * t, dims)
            grad_k[block.sentences].baddbmm_(grad_scores.transpose(1, 2), flat_queries)
            grad_queries = layer.memory.array("grad_queries", *queries.size())
            torch.bmm(grad_scores, k[block.sentences], out=grad_queries.view(flat_queries.size()))
            grad_bias[block.heads] += grad_queries.sum((0, 2))
            of_q = q[block.sentences, block.queries].unsqueeze(1)
            grad_mixing[block.heads] += torch.mul(grad_queries, of_q, out=queries).sum((0, 2))
            mixed_back = torch.mul(grad_queries, mixing[block.heads].unsqueeze(1), out=queries)
            grad_q[block.sentences, block.queries] += mixed_back.sum(1)
        return grad_q, grad_k, grad_v, grad_mixing, grad_bias, None, None


def attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, query_bias: Tensor, mask: Tensor | None, dropout_p: float
) -> Tensor:
    """Softmax attention ``softmax((q * mixing + query_bias) k^T + mask) v`` of every head over one shared key.

    Args:
        q: (B, T, R). k: (B, S, R). v: (B, H, S, V). mixing, query_bias: (H, R), with the scale in them.
        mask: added to the scores, broadcasts to (B, H, T, S) in its four dimensions; no gradient reaches it.
        dropout_p: applied to the weights.

    Returns:
        (B, H, T, V), in the memory order of q. It can be differentiated once.
    """
    return _AttendInBlocks.apply(q, k, v, mixing, query_bias, mask, dropout_p)
