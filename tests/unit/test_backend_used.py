"""What ``functional.backend_used`` says of each layout, of few queries and weights, and of other threads."""

import threading

import pytest
import torch

from fairseq_collab import functional
from fairseq_collab.attention import CollaborativeAttention
from fairseq_collab.fairseq_modules.multihead_attention import CollaborativeMultiheadAttention

LAYOUTS = {
    "dense": dict(mix_layout="dense"),
    "window": dict(mix_layout="window"),
    "picked": dict(mix_layout="picked"),
    "concatenated": dict(collaborative=False),
}


def in_a_thread(work) -> list:
    found: list = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found


@pytest.mark.parametrize(
    "layout, whole, with_weights, one_query",
    (
        ("dense", "dense-blocks", "dense-product", "dense-product"),
        ("window", "windows-sdpa", "windows-matmul", "spread-product"),
        ("picked", "one_hot-sdpa", "one_hot-matmul", "spread-product"),
        ("concatenated", "concatenated-sdpa", "concatenated-matmul", "concatenated-sdpa"),
    ),
)
def test_the_backend_follows_layout_weights_and_decoding(layout, whole, with_weights, one_query):
    module = CollaborativeMultiheadAttention(64, 8, 16, self_attention=True, **LAYOUTS[layout]).eval()
    x = torch.randn(5, 2, 64)
    module(x, x, x, need_weights=False)
    assert functional.backend_used() == whole
    module(x, x, x, need_weights=True)
    assert functional.backend_used() == with_weights
    module(x[:1], x[:1], x[:1], incremental_state={}, need_weights=False)
    assert functional.backend_used() == one_query


@pytest.mark.parametrize(
    "key_dim, keys, dtype, backend",
    (
        (8, 5, torch.float32, "dense-sdpa"),  # as wide as values
        (9, 300, torch.float32, "dense-blocks"),
        (7, 5, torch.float32, "dense-blocks"),  # narrower: padded, which pays for many keys
        (7, 300, torch.float32, "dense-sdpa"),
        (8, 5, torch.bfloat16, "dense-product"),
        (8, 300, torch.bfloat16, "dense-sdpa"),
    ),
)
def test_a_shared_key_no_wider_than_values_is_read_by_the_fused_attention(key_dim, keys, dtype, backend):
    module = CollaborativeAttention(64, 8, key_dim, mix_layout="dense").to(dtype)
    x, y = torch.randn(2, 3, 64, dtype=dtype), torch.randn(2, keys, 64, dtype=dtype)
    module(x, y)
    assert functional.backend_used() == backend
    module(x[:, :1], y)
    assert functional.backend_used() == ("dense-blocks" if dtype == torch.float32 else "dense-product")


def test_every_thread_has_its_own_backend():
    CollaborativeAttention(64, 8, 16, mix_layout="window")(torch.randn(1, 3, 64))
    other = CollaborativeAttention(64, 8, 16, mix_layout="picked")

    def attend() -> tuple:
        before = functional.backend_used()
        other(torch.randn(1, 3, 64))
        return before, functional.backend_used()

    assert in_a_thread(attend) == [(None, "one_hot-sdpa")]
    assert functional.backend_used() == "windows-sdpa"


def test_scripted_attention_leaves_the_note_alone():
    CollaborativeAttention(64, 8, 16, mix_layout="window")(torch.randn(1, 3, 64))
    torch.jit.script(CollaborativeAttention(64, 8, 16, mix_layout="picked"))(torch.randn(1, 3, 64))
    assert functional.backend_used() == "windows-sdpa"


@pytest.mark.parametrize("layout", ("window", "picked"))
@pytest.mark.parametrize("time_first", (False, True))
def test_gathered_and_multiplied_heads_have_the_same_values_and_gradients(monkeypatch, layout, time_first):
    module = CollaborativeAttention(48, 4, 22 if layout == "picked" else 24, mix_dim=11, mix_layout=layout).double()
    torch.nn.init.normal_(module.mixing)
    torch.nn.init.normal_(module.query_bias)
    x = torch.randn(7, 3, 48, dtype=torch.double).transpose(0, 1) if time_first else torch.randn(3, 7, 48).double()
    found, backends = [], []
    assert functional.multiplies(x) and not functional.multiplies(torch.empty(1, 1, 513))
    for multiplies in (True, False):
        monkeypatch.setattr(functional, "multiplies", lambda _, answer=multiplies: answer)
        module.zero_grad()
        entry = x.clone().requires_grad_()
        out, _ = module(entry)
        out.square().sum().backward()
        backends.append(functional.backend_used())
        found.append([out, entry.grad, *(parameter.grad.clone() for parameter in module.parameters())])
    assert backends == (["one_hot-sdpa", "gather-sdpa"] if layout == "picked" else ["windows-sdpa"] * 2)
    torch.testing.assert_close(found[0], found[1])


def test_ones_and_zeros_pick_numbers_unchanged():
    pick = torch.tensor([[3, 0, 17], [16, 17, 1]])
    x = torch.randn(5, 9, 18) * 10.0 ** torch.randint(-30, 30, (5, 9, 18))
    heads = functional.multiplied_heads(x, pick, torch.ones(2, 3), None)
    assert torch.equal(heads, functional.picked_heads(x, pick))
    time_first = x.transpose(0, 1)
    heads = functional.multiplied_heads(time_first, pick, torch.ones(2, 3), None)
    assert torch.equal(heads, functional.picked_heads(time_first, pick))


def test_hidden_rows_are_named_only_where_there_are_any():
    padding = torch.tensor([[False, True], [False, False]])
    assert functional.merge_masks(None, padding, 4, torch.float32)[1] is None
    padding[1] = True
    mask, hidden = functional.merge_masks(None, padding, 4, torch.float32)
    assert hidden.flatten().tolist() == [False, True] and torch.isfinite(mask[1]).all()


@pytest.mark.parametrize("layout", ("dense", "window", "picked"))
def test_recorded_attention_clears_rows_that_were_not_hidden_when_it_was_recorded(layout):
    module = CollaborativeAttention(64, 8, 16, mix_layout=layout).requires_grad_(False)
    x, seen, hidden = torch.randn(2, 5, 64), torch.zeros(2, 5).bool(), torch.ones(2, 5).bool()

    def attend(x, padding):
        return module(x, key_padding_mask=padding)[0]

    wanted = attend(x, hidden)
    torch.testing.assert_close(wanted, module.out_proj.bias.expand(2, 5, 64))
    for recorded in (
        torch.compile(attend, fullgraph=True, backend="eager"),
        torch.jit.trace(attend, (x, seen)),
    ):
        torch.testing.assert_close(recorded(x, seen), attend(x, seen))
        torch.testing.assert_close(recorded(x, hidden), wanted)
