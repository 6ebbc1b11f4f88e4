"""Dense mixing against the oracle: output and the gradients of inputs and parameters, under masks."""

import copy

import torch
from oracle import oracle
from rule import assert_as_exact_as
from torch import Tensor, nn

from fairseq_collab import functional
from fairseq_collab.attention import CollaborativeAttention

D, H = 48, 4
MASKS_WITH_GRADIENTS = ("none", "padding", "padding and a mask a head", "one mask")


def masks(kind: str, batch: int, queries: int, keys: int) -> dict[str, Tensor]:
    """One of ``MASKS_WITH_GRADIENTS``, for at least three sentences and four queries."""
    lengths = [keys, keys // 2 + 1, 3, *[keys] * (batch - 3)]
    padding = torch.arange(keys) >= torch.tensor(lengths).unsqueeze(1)
    generator = torch.Generator().manual_seed(5)
    attn = torch.randn(batch, H, queries, keys, generator=generator)
    attn[0, 3, 2] = float("-inf")  # one head of one sentence has a query that sees nothing
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "padding and a mask a head": {"key_padding_mask": padding, "attn_mask": attn},
        "one mask": {"attn_mask": torch.ones(queries, keys, dtype=torch.bool).triu(2)},
    }[kind]


def with_gradients(module: CollaborativeAttention, x: Tensor, y: Tensor, run, **given: Tensor) -> list[Tensor]:
    """The output, and the gradients of a weighted sum of it."""
    x, y = (one.clone().requires_grad_() for one in (x, y))
    out = run(x, y, **given)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), [x, y, *module.parameters()])]


def check_gradients(
    key_dim: int, sizes: tuple[int, int, int], kind: str, time_first: bool, dtype: torch.dtype, backend: str
) -> None:
    """Asserts that a dense layer of D = 48 and 4 heads, (B, T, S) being ``sizes``, runs ``backend`` and is exact.

    Four draws are judged together: the 48 roundings of the gradient of one bias are themselves a matter of luck.
    """
    draws = [one_draw(seed, key_dim, sizes, kind, time_first, dtype, backend) for seed in range(3, 7)]
    together = [[torch.stack(same) for same in zip(*way, strict=True)] for way in zip(*draws, strict=True)]
    for found, plain, exact in zip(*together, strict=True):
        assert_as_exact_as(found, plain, exact)


def one_draw(
    seed: int,
    key_dim: int,
    sizes: tuple[int, int, int],
    kind: str,
    time_first: bool,
    dtype: torch.dtype,
    backend: str,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What :func:`with_gradients` returns of a random layer: fast, by the oracle, and by the oracle in float64."""
    batch, queries, keys = sizes
    torch.manual_seed(seed)
    module = CollaborativeAttention(D, H, key_dim, mix_layout="dense")
    nn.init.normal_(module.query_bias)
    x, y = torch.randn(batch, queries, D), torch.randn(batch, keys, D)
    given = masks(kind, *sizes)

    def fast(x: Tensor, y: Tensor, **given: Tensor) -> Tensor:
        if time_first:
            x, y = (one.transpose(0, 1).contiguous().transpose(0, 1) for one in (x, y))
        out = tested(x, y, **given)[0]
        assert functional.backend_used() == backend
        return out

    def by_oracle(dtype: torch.dtype) -> list[Tensor]:
        plain = copy.deepcopy(module).to(dtype)
        return with_gradients(
            plain, x.to(dtype), y.to(dtype), lambda x, y, **m: oracle(plain, x, y, y, **m)[0], **given
        )

    tested = copy.deepcopy(module).to(dtype)
    found = with_gradients(tested, x.to(dtype), y.to(dtype), fast, **given)
    return found, by_oracle(torch.float32 if dtype == torch.float64 else dtype), by_oracle(torch.float64)
