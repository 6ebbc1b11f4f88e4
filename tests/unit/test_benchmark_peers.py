"""The baselines of the speed benchmarks compute what they are said to, and time and memory are counted as said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "equivalence"))

from benchmarks import common, device, layers  # noqa: E402
from benchmarks.fork_style import ForkStyleAttention  # noqa: E402
from rule import assert_as_exact_as  # noqa: E402

from fairseq_collab.fairseq_modules.multihead_attention import CollaborativeMultiheadAttention  # noqa: E402
from fairseq_collab.reference import reference_attention  # noqa: E402

T, B, S, D, H, R = 5, 3, 7, 32, 4, 8
SHAPE = layers.Shape(B, T, D, H, R)


def fork(**kind: bool) -> ForkStyleAttention:
    torch.manual_seed(0)
    return ForkStyleAttention(CollaborativeMultiheadAttention(D, H, R, **kind).eval(), **kind).eval()


def by_heads(module: ForkStyleAttention, x: torch.Tensor, y: torch.Tensor, **masks):
    """The oracle in the dtype of x, for (T, B, D) and (S, B, D)."""
    weights = {
        "q_weight": module.q_proj.weight,
        "k_weight": module.k_proj.weight,
        "v_weight": module.v_proj.weight,
        "out_weight": module.out_proj.weight,
        "v_bias": module.v_proj.bias,
        "out_bias": module.out_proj.bias,
        "mixing": module.mixing,
    }
    weights = {name: weight.to(x.dtype) for name, weight in weights.items()}
    query, key = x.transpose(0, 1), y.transpose(0, 1)
    zero, pick = torch.zeros(H, R, dtype=x.dtype), torch.arange(R).expand(H, R)
    out, probs = reference_attention(
        query, key, key, **weights, query_bias=zero, pick=pick, scale=module.scale, **masks
    )
    return out.transpose(0, 1), probs


@pytest.mark.parametrize("source", ("itself", "the encoder"))
def test_fork_style_agrees_with_the_oracle(source):
    own = source == "itself"
    module = fork(self_attention=own, encoder_decoder_attention=not own)
    x = torch.randn(T, B, D)
    y = x if own else torch.randn(S, B, D)
    padding = torch.zeros(B, len(y), dtype=torch.bool)
    padding[0, -2:] = True
    masks = {"key_padding_mask": padding}
    if own:
        masks["attn_mask"] = torch.full((T, T), float("-inf")).triu(1)
    out, weights = module(x, y, y, **masks)
    per_head = module(x, y, y, need_head_weights=True, **masks)[1]
    plain, plain_weights = by_heads(module, x, y, **masks)
    exact, exact_weights = by_heads(module, x.double(), y.double(), **masks)
    assert_as_exact_as(out, plain, exact)
    assert_as_exact_as(per_head, plain_weights.transpose(0, 1), exact_weights.transpose(0, 1))
    assert torch.equal(weights, per_head.mean(0))
    assert module(x, y, y, need_weights=False, **masks)[1] is None


def test_fork_style_decodes_with_a_cache_of_mixed_keys_per_head():
    module = fork(self_attention=True)
    x, state, steps = torch.randn(T, B, D), {}, []
    for t in range(T):
        steps.append(module(x[t : t + 1], None, None, incremental_state=state, need_weights=False)[0])
    causal = torch.full((T, T), float("-inf")).triu(1)
    exact = by_heads(module, x.double(), x.double(), attn_mask=causal)[0]
    assert_as_exact_as(torch.cat(steps), by_heads(module, x, x, attn_mask=causal)[0], exact)
    before = module._get_input_buffer(state)["prev_key"]
    assert before.shape == (B, H, T, R)
    module.reorder_incremental_state(state, torch.tensor([2, 0, 0]))
    assert torch.equal(module._get_input_buffer(state)["prev_key"], before[[2, 0, 0]])


def test_fork_style_keeps_the_encoders_keys_until_sentences_leave():
    module = fork(self_attention=False, encoder_decoder_attention=True)
    y, x, state = torch.randn(S, B, D), torch.randn(1, B, D), {}
    first = module(x, y, y, incremental_state=state, static_kv=True)[0]
    again = module(x, y + 1, y + 1, incremental_state=state, static_kv=True)[0]
    assert torch.equal(first, again)
    keys = module._get_input_buffer(state)["prev_key"]
    module.reorder_incremental_state(state, torch.tensor([2, 1, 0]))
    assert module._get_input_buffer(state)["prev_key"] is keys
    module.reorder_incremental_state(state, torch.tensor([2, 1]))
    assert torch.equal(module._get_input_buffer(state)["prev_key"], keys[[2, 1]])


def test_fork_style_refuses_sparse_mixing():
    sparse = CollaborativeMultiheadAttention(D, H, 16, mix_layout="window", self_attention=True)
    with pytest.raises(ValueError, match="not window"):
        ForkStyleAttention(sparse, self_attention=True)


@pytest.mark.parametrize("repeat", (False, True))
def test_grouped_queries_attend_to_the_keys_of_their_group(repeat):
    layer = layers.build(layers.GROUPED, layers.Shape(B, T, D, H, 16))
    layer.repeat = repeat
    assert layer.k_proj.out_features == layer.v_proj.out_features == 16
    x, padding = layers.inputs(SHAPE, "cpu", torch.float32)
    out = layer(x, x, x, key_padding_mask=padding)[0]
    heads = []
    for h in range(H):
        own, shared = slice(8 * h, 8 * h + 8), slice(8 * (h // 2), 8 * (h // 2) + 8)
        q, k, v = layer.q_proj(x)[..., own], layer.k_proj(x)[..., shared], layer.v_proj(x)[..., shared]
        scores = torch.einsum("tbd,sbd->bts", q, k) / 8**0.5
        weights = scores.masked_fill(padding[:, None], float("-inf")).softmax(-1)
        heads.append(torch.einsum("bts,sbd->tbd", weights, v))
    torch.testing.assert_close(out, layer.out_proj(torch.cat(heads, -1)))


@pytest.mark.parametrize("key_dim, groups", ((8, 1), (16, 2), (24, None), (32, 4), (4, None), (12, None)))
def test_groups_exist_where_whole_heads_share_a_key(key_dim, groups):
    assert layers.Shape(B, T, D, H, key_dim).groups == groups


@pytest.mark.parametrize("name", ("dense", layers.FORK))
def test_operations_are_those_that_torch_counts(name):
    shape = layers.Shape(B, T, D, H, 12)  # wider than values, or torch's fused attention would not be counted
    layer = layers.build(name, shape)
    work = layers.forward_work(layer, *layers.inputs(shape, "cpu", torch.float32))
    with FlopCounterMode(display=False) as counter:
        work()
    assert layers.operations(name, shape) == counter.get_total_flops()


@pytest.mark.parametrize("name", (layers.CONCATENATED, "windows", "picked", layers.SMALL_KEYS, layers.GROUPED))
def test_operations_of_fused_layers_are_projections_and_products(name):
    shape = layers.Shape(B, T, D, H, 16)
    layer = layers.build(name, shape)
    widths = [getattr(layer, f"{part}_proj").out_features for part in "qkv"] + [D]
    score_dims = 4 if name == layers.SMALL_KEYS else 8
    expected = 2 * B * T * (D * sum(widths) + T * H * (score_dims + 8))
    assert layers.operations(name, shape) == expected


def test_every_layer_takes_the_same_call_and_trains():
    shape = layers.Shape(B, T, D, H, 16)
    x, padding = layers.inputs(shape, "cpu", torch.float32)
    assert padding.any() and not padding[-1].any() and not padding.all(1).any()
    for name in ("dense", "windows", "picked", layers.CONCATENATED, layers.SMALL_KEYS, layers.GROUPED, layers.FORK):
        layer = layers.build(name, shape)
        assert all(p.abs().sum() > 0 for n, p in layer.named_parameters() if n.endswith("bias"))
        assert layer(x, x, x, key_padding_mask=padding, need_weights=False)[0].shape == x.shape
        layers.training_work(layer, x, padding)()
        assert all(p.grad is None for p in layer.parameters())


def test_turns_go_round_and_fill_their_time():
    calls, now = [], [0.0]

    def work(name: str, seconds: float):
        def one(number: int) -> None:
            calls.append((name, number))
            now[0] += seconds

        return one

    def clock(turn) -> float:
        started = now[0]
        turn()
        return now[0] - started

    works = {"slow": work("slow", 1.0), "quick": work("quick", 0.25)}
    times = common.measure_in_turns(works, 3, min_seconds=0.5, clock=clock)
    assert times == {"slow": [1.0] * 3, "quick": [0.25] * 3}
    rounds = [[("slow", n)] + [("quick", n)] * 2 for n in range(3)]
    assert calls == [("slow", 0), ("quick", 0), ("quick", 0), *sum(rounds, [])]


def test_a_row_of_turns_has_the_median_of_the_ratios_of_the_rounds():
    times = {"ours": [1.0, 9.0, 2.0], "theirs": [2.0, 3.0, 4.0]}
    row = common.turns_row("s", "c", times, "ours", "theirs", 0.5, backend="b", key_dim=3)
    assert (row["ratio"], row["met"], row["rounds"], row["key_dim"]) == (0.5, True, 3, 3)
    assert (row["seconds"], row["peer_seconds"], row["ratios"]) == (2.0, 3.0, [0.5, 3.0, 0.5])


def test_peak_memory_is_exact_and_beyond_what_was_held():
    held = torch.zeros(1000)

    def work() -> None:
        first = held + 1  # 4,000 bytes
        second = torch.cat([first, first])  # 8,000
        del first
        F.relu(second, inplace=True)
        torch.empty(250)  # 1,000

    assert device.peak_bytes(work, "cpu") == 12_000


def test_the_rate_of_a_matrix_product_counts_multiplications_and_additions(monkeypatch):
    monkeypatch.setattr(device, "measure_in_turns", lambda works, rounds, clock: {"product": [0.5] * rounds})
    assert device.product_rate("cpu", torch.float32, size=10) == 4000
