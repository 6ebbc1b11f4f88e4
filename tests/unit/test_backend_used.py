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
        ("dense", "dense-product", "dense-product", "dense-product"),
        ("window", "windows-sdpa", "windows-matmul", "spread-product"),
        ("picked", "gather-sdpa", "gather-matmul", "spread-product"),
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


def test_every_thread_has_its_own_backend():
    CollaborativeAttention(64, 8, 16, mix_layout="window")(torch.randn(1, 3, 64))
    other = CollaborativeAttention(64, 8, 16, mix_layout="picked")

    def attend() -> tuple:
        before = functional.backend_used()
        other(torch.randn(1, 3, 64))
        return before, functional.backend_used()

    assert in_a_thread(attend) == [(None, "gather-sdpa")]
    assert functional.backend_used() == "windows-sdpa"


def test_scripted_attention_leaves_the_note_alone():
    CollaborativeAttention(64, 8, 16, mix_layout="window")(torch.randn(1, 3, 64))
    torch.jit.script(CollaborativeAttention(64, 8, 16, mix_layout="picked"))(torch.randn(1, 3, 64))
    assert functional.backend_used() == "windows-sdpa"
