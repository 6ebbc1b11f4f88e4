"""Other ways to compute the same attention, against the one that is chosen: below 1, the other way would be faster.

Dense mixing as one product for all heads of a sentence; picked dims gathered; all heads projected at once by weights
that were multiplied with mixing and scale beforehand (forward only: in training those weights change every step);
torch.compile; FlexAttention, which CPUs compile for the way forward only. Shapes, masks and modes are those of the
suite `attention`. Every way has to give the output of the chosen one before it is timed. Compiling is not timed. In
the table, "ours" is the other way, "theirs" and the backend are the chosen one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from benchmarks import device as devices
from benchmarks import layers
from benchmarks.attention import BOTH, CASES, FORWARD, name_of
from benchmarks.common import ROUNDS, Row, make_row, measure_in_turns, turns_row
from benchmarks.layers import Shape
from fairseq_collab import functional

HELP = "other ways to compute the same attention layer, against the one that is chosen"
CHOSEN = "as chosen"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite."""
    devices.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")


def run(args: argparse.Namespace) -> list[Row]:
    """Rows of the four shapes of `attention`, in each precision of the device; of two, briefly, with ``--quick``."""
    shapes = list(CASES)[: 2 if args.quick else None]
    rounds = 2 if args.quick else args.rounds
    todo = [(dtype, shape, way) for dtype in devices.dtypes_of(args) for shape in shapes for way in WAYS]
    rows = []
    with tqdm(todo, desc="variants", unit="way") as bar:
        for dtype, shape, way in bar:
            bar.set_postfix_str(f"{name_of(shape, dtype)} {way}")
            rows += measure_way(way, shape, args.device, dtype, rounds, devices.min_seconds_of(args))
    return rows


def measure_way(way: str, shape: Shape, device: str, dtype: torch.dtype, rounds: int, min_seconds: float) -> list[Row]:
    """Rows of one way, forward and with gradients where it has them."""
    layout, make, trains = WAYS[way]
    layer = layers.build(layout, shape).to(device, dtype)
    x, padding = layers.inputs(shape, device, dtype)
    rows = []
    for what in (FORWARD, BOTH) if trains else (FORWARD,):
        make_work = layers.forward_work if what == FORWARD else layers.training_work
        chosen = make_work(layer, x, padding)
        case = f"{name_of(shape, dtype)} {what}: {layout}, {way.removeprefix(f'{layout}, ')}"
        facts = {**vars(shape), "dtype": devices.SHORT[dtype], "measure": what, "layout": layout, "way": way}
        try:
            other, patch = make(layer)
            with patch():
                check_same(layer(x, x, x, key_padding_mask=padding, need_weights=False)[0], other, x, padding)
            work = make_work(other, x, padding)
        except Exception as error:  # a compiler that is missing, or an operation that it does not know
            reason = f"not possible here ({type(error).__name__})"
            rows.append(make_row("variants", case, CHOSEN, None, None, backend=reason, rounds=0, **facts))
            continue
        works = {way: under(patch, work), CHOSEN: chosen}
        times = measure_in_turns(works, rounds, min_seconds=min_seconds, clock=devices.clock_of(device))
        rows.append(turns_row("variants", case, times, way, CHOSEN, None, backend=layers.backend_of(chosen), **facts))
    return rows


def check_same(wanted: Tensor, other: Callable[..., Any], x: Tensor, padding: Tensor) -> None:
    """Raises AssertionError where another way computes something else, beyond rounding."""
    with torch.no_grad():
        found = other(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    size = wanted.detach().float().square().mean().sqrt().item()
    torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=100 * torch.finfo(x.dtype).eps * size)


def under(patch: Callable[[], Any], work: Callable[..., None]) -> Callable[..., None]:
    """The work, done with a patch in place."""

    def patched(number: Any = None) -> None:
        with patch():
            work(number)

    return patched


@contextmanager
def unchanged() -> Iterator[None]:
    """No patch."""
    yield


def without(choice: str) -> Callable[[], Any]:
    """A patch under which a question of `functional` is answered with no."""
    return lambda: mock.patch.object(functional, choice, lambda *args: False)


class Folded(nn.Module):
    """A sparse layer for inference whose query weights have the picks, mixing and scale in them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        mixing, query_bias = layer.mixing * layer.scale, layer.query_bias * layer.scale
        self.weight = nn.Parameter((layer.q_proj.weight[layer.pick] * mixing.unsqueeze(-1)).flatten(0, 1).detach())
        self.bias = nn.Parameter(query_bias.flatten().detach())

    def attend(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
        """(B, H, T, P), (B, H, S, P), (B, H, S, V) and (B, S) -> (B, H, T, V)."""
        mask, _ = functional.merge_masks(None, padding, query.size(1), query.dtype)
        return functional.attend(query, key, value, mask, None, 0.0)

    def forward(self, x: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor, need_weights: bool = False):
        """As fairseq's attention."""
        layer, heads = self.layer, self.layer.num_heads
        query = F.linear(x, self.weight, self.bias).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
        key = functional.window_heads(layer.k_proj(x).transpose(0, 1), heads, layer.mix_dim)
        value = layer.v_proj(x).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
        out = self.attend(query, key, value, key_padding_mask)
        return layer.out_proj(out.permute(2, 0, 1, 3).flatten(2)), None


class Flex(Folded):
    """The same with FlexAttention, compiled, and the padding as a change of the scores."""

    def __init__(self, layer: nn.Module) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        super().__init__(layer)
        self.flex = torch.compile(flex_attention)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
        hidden = torch.zeros_like(padding, dtype=query.dtype).masked_fill(padding, float("-inf"))

        def masked(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return score + hidden[batch, column]

        key = key.contiguous()  # windows overlap, which the compiled kernel does not take
        return self.flex(query, key, value, score_mod=masked, scale=1.0)


# name -> layout, layer -> (another layer, a patch under which it runs), whether it has gradients
WAYS: dict[str, tuple[str, Callable[[nn.Module], tuple[Callable[..., Any], Callable[[], Any]]], bool]] = {
    "one product": ("dense", lambda layer: (layer, without("takes_blocks")), True),
    "gathered": ("picked", lambda layer: (layer, without("multiplies")), True),
    "folded weights": ("windows", lambda layer: (Folded(layer), unchanged), False),
    "torch.compile": ("windows", lambda layer: (torch.compile(layer), unchanged), True),
    "dense, torch.compile": ("dense", lambda layer: (torch.compile(layer), unchanged), True),
    "FlexAttention": ("windows", lambda layer: (Flex(layer), unchanged), False),
}
