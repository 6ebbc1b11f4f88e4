"""``CollaborativeMultiheadAttention`` against fairseq's own attention, and its modes against each other."""

import copy
from typing import Dict, List, Optional

import pytest
import torch
from fairseq.modules import MultiheadAttention
from rule import assert_as_exact_as

from fairseq_collab.errors import CollabError
from fairseq_collab.fairseq_modules.multihead_attention import CollaborativeMultiheadAttention

SPARSE = {
    "window": dict(key_dim=16, mix_layout="window"),
    "window, narrow": dict(key_dim=24, mix_layout="window", mix_dim=4),
    "picked": dict(key_dim=19, mix_layout="picked", mix_dim=5),
    "disjoint": dict(key_dim=64, mix_layout="window"),
    "own scale": dict(key_dim=16, mix_layout="picked", scale=0.7),
}
ALL = {**SPARSE, "dense": dict(key_dim=16), "concatenated": dict(key_dim=32, collaborative=False)}
T, B, S, D, H = 5, 4, 7, 64, 8


def build(layout: str, **kwargs) -> CollaborativeMultiheadAttention:
    torch.manual_seed(0)
    module = CollaborativeMultiheadAttention(D, H, **ALL[layout], **kwargs)
    with torch.no_grad():
        if module.query_bias is not None:
            module.mixing.normal_(1.0, 0.5)
            module.query_bias.normal_()
        module.v_proj.bias.normal_()
        module.out_proj.bias.normal_()
    return module.eval()


def stock_twin(module: CollaborativeMultiheadAttention, **kwargs) -> MultiheadAttention:
    """fairseq's own attention with the same scores."""
    twin = MultiheadAttention(D, H, kdim=module.kdim, vdim=module.vdim, **kwargs).eval()
    weights = {k: v for k, v in module.state_dict().items() if k.startswith(("v_proj", "out_proj"))}
    twin.load_state_dict({**weights, **module.to_concatenated()})
    return twin


def masks(kind: str, src_len: int) -> dict:
    padding = torch.zeros(B, src_len, dtype=torch.bool)
    padding[0, -2:] = True
    causal = torch.full((T, src_len), float("-inf")).triu(1)
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "causal": {"attn_mask": causal},
        "both": {"key_padding_mask": padding, "attn_mask": causal},
    }[kind]


@pytest.mark.parametrize("mask", ("none", "padding", "causal", "both"))
@pytest.mark.parametrize("layout", SPARSE)
def test_self_attention_equals_fairseqs_after_export(layout, mask):
    module = build(layout, self_attention=True)
    twin = stock_twin(module, self_attention=True)
    x = torch.randn(T, B, D)
    given = masks(mask, T)
    for kwargs in ({"need_weights": False}, {"need_weights": True}, {"need_head_weights": True}):
        out, weights = module(x, x, x, **given, **kwargs)
        plain, plain_weights = twin(x, x, x, **given, need_weights=kwargs.get("need_weights", True))
        exact, exact_weights = copy.deepcopy(twin).double()(
            *[x.double()] * 3, **{k: v.double() if v.is_floating_point() else v for k, v in given.items()}
        )
        assert_as_exact_as(out, plain, exact)
        if kwargs.get("need_weights", True):
            mean = weights.mean(0) if "need_head_weights" in kwargs else weights
            assert_as_exact_as(mean, plain_weights, exact_weights)


@pytest.mark.parametrize("layout", SPARSE)
def test_cross_attention_equals_fairseqs_after_export(layout):
    module = build(layout, encoder_decoder_attention=True, kdim=40, vdim=40)
    twin = stock_twin(module, encoder_decoder_attention=True)
    x, y = torch.randn(T, B, D), torch.randn(S, B, 40)
    given = masks("padding", S)
    out, _ = module(x, y, y, **given)
    plain, _ = twin(x, y, y, **given)
    exact, _ = copy.deepcopy(twin).double()(x.double(), y.double(), y.double(), **given)
    assert_as_exact_as(out, plain, exact)


def test_heads_that_mix_more_than_a_head_has_cannot_be_exported_exactly():
    with pytest.raises(CollabError, match="mix 16 shared dims do not fit ordinary heads of 8"):
        build("dense").to_concatenated()


def test_concatenated_heads_at_full_width_equal_fairseqs():
    module = CollaborativeMultiheadAttention(D, H, D, collaborative=False, self_attention=True).eval()
    twin = MultiheadAttention(D, H, self_attention=True).eval()
    twin.load_state_dict(module.state_dict())
    x = torch.randn(T, B, D)
    given = masks("both", T)
    exact, _ = copy.deepcopy(twin).double()(
        *[x.double()] * 3, key_padding_mask=given["key_padding_mask"], attn_mask=given["attn_mask"].double()
    )
    assert_as_exact_as(module(x, x, x, **given)[0], twin(x, x, x, **given)[0], exact)


def step_by_step(module, x, padding=None, **kwargs):
    """Feeds one position at a time with an incremental state."""
    state, outputs = {}, []
    for t in range(x.size(0)):
        step = x[t : t + 1]
        mask = None if padding is None else padding[:, t : t + 1]
        outputs.append(module(step, step, step, key_padding_mask=mask, incremental_state=state, **kwargs)[0])
    return torch.cat(outputs), state


@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize("layout", ALL)
def test_decoding_step_by_step_equals_the_whole_sequence(layout, padded):
    module = build(layout, self_attention=True)
    x = torch.randn(T, B, D)
    padding = masks("padding", T)["key_padding_mask"] if padded else None
    causal = masks("causal", T)["attn_mask"]
    steps, state = step_by_step(module, x, padding)
    whole, _ = module(x, x, x, key_padding_mask=padding, attn_mask=causal)
    exact, _ = copy.deepcopy(module).double()(*[x.double()] * 3, key_padding_mask=padding, attn_mask=causal.double())
    assert_as_exact_as(steps, whole, exact)
    (cache,) = state.values()
    assert cache["prev_key"].shape == (B, T, module.key_dim)
    assert cache["prev_value"].shape == (B, H, T, D // H)


@pytest.mark.parametrize("layout", ALL)
def test_a_mask_that_appears_or_leaves_between_steps_covers_its_own_steps(layout):
    module = build(layout, self_attention=True)
    x = torch.randn(3, B, D)
    padding = torch.zeros(B, 3, dtype=torch.bool)
    padding[2, 1] = True
    state: dict = {}
    for t in range(3):
        mask = padding[:, 1:2] if t == 1 else None
        out, _ = module(*[x[t : t + 1]] * 3, key_padding_mask=mask, incremental_state=state)
    causal = torch.full((3, 3), float("-inf")).triu(1)
    whole, _ = module(x, x, x, key_padding_mask=padding, attn_mask=causal)
    exact, _ = copy.deepcopy(module).double()(*[x.double()] * 3, key_padding_mask=padding, attn_mask=causal.double())
    assert_as_exact_as(out, whole[-1:], exact[-1:])


@pytest.mark.parametrize("layout", ALL)
def test_cross_attention_uses_its_cache_and_does_not_look_at_keys_again(layout):
    module = build(layout, encoder_decoder_attention=True, kdim=40, vdim=40)
    x, y = torch.randn(T, B, D), torch.randn(S, B, 40)
    padding = masks("padding", S)["key_padding_mask"]
    state: dict = {}
    outputs = []
    for t in range(T):
        given = y if t == 0 else torch.full_like(y, float("nan"))
        outputs.append(
            module(x[t : t + 1], given, given, key_padding_mask=padding, incremental_state=state, static_kv=True)[0]
        )
    exact, _ = copy.deepcopy(module).double()(x.double(), y.double(), y.double(), key_padding_mask=padding)
    assert_as_exact_as(torch.cat(outputs), module(x, y, y, key_padding_mask=padding)[0], exact)


@pytest.mark.parametrize("layout", ALL)
def test_reordered_beams_go_on_from_the_beam_they_came_from(layout):
    module = build(layout, self_attention=True)
    x = torch.randn(4, B, D)
    order = torch.tensor([2, 2, 0])
    _, state = step_by_step(module, x[:3])
    module.reorder_incremental_state(state, order)
    out, _ = module(*[x[3:, order]] * 3, incremental_state=state)
    expected, _ = step_by_step(module, x[:, order])
    exact, _ = step_by_step(copy.deepcopy(module).double(), x[:, order].double())
    assert_as_exact_as(out, expected[3:], exact[3:])


@pytest.mark.parametrize("layout", ALL)
def test_beam_size_lets_the_query_batch_be_a_multiple_of_the_key_batch(layout):
    beam, sentences = 3, 2
    module = build(layout, encoder_decoder_attention=True)
    repeated = copy.deepcopy(module)
    module.set_beam_size(beam)
    x = torch.randn(2, sentences * beam, D)
    y = torch.randn(S, sentences, D)
    padding = torch.zeros(sentences, S, dtype=torch.bool)
    padding[1, -3:] = True
    y_all, padding_all = y.repeat_interleave(beam, 1), padding.repeat_interleave(beam, 0)
    state: dict = {}
    exact_module = copy.deepcopy(repeated).double()
    for t in range(2):
        out, weights = module(
            x[t : t + 1], y_all, y_all, padding_all, incremental_state=state, static_kv=True, need_head_weights=True
        )
        plain, plain_weights = repeated(x[t : t + 1], y_all, y_all, padding_all, need_head_weights=True)
        exact, exact_weights = exact_module(
            x[t : t + 1].double(), y_all.double(), y_all.double(), padding_all, need_head_weights=True
        )
        assert_as_exact_as(out, plain, exact)
        assert_as_exact_as(weights, plain_weights, exact_weights)
    (cache,) = state.values()
    assert cache["prev_key"].size(0) == sentences
    scores, values = module(x[:1], y_all, y_all, padding_all, before_softmax=True)
    plain_scores, plain_values = repeated(x[:1], y_all, y_all, padding_all, before_softmax=True)
    assert torch.allclose(scores.softmax(-1), plain_scores.softmax(-1))
    assert torch.allclose(values, plain_values)
    # the second sentence goes on alone
    module.reorder_incremental_state(state, torch.arange(beam, 2 * beam))
    assert cache["prev_key"].size(0) == 1
    out, _ = module(x[1:, beam:], None, None, incremental_state=state, static_kv=True)
    assert_as_exact_as(out, plain[:, beam:], exact[:, beam:])


class StepByStep(torch.nn.Module):
    """Decodes inside one script, since state that crosses its border is copied."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: Dict[str, Dict[str, Optional[torch.Tensor]]] = {}
        outputs: List[torch.Tensor] = []
        for t in range(x.size(0)):
            step = x[t : t + 1]
            outputs.append(self.attention(step, step, step, incremental_state=state)[0])
            self.attention.reorder_incremental_state(state, torch.arange(x.size(1)))
        return torch.cat(outputs)


@pytest.mark.parametrize("layout", ALL)
def test_scripted_module_computes_the_same_in_every_mode(layout):
    module = build(layout, self_attention=True)
    scripted = torch.jit.script(module)
    x = torch.randn(T, B, D)
    given = masks("both", T)
    for kwargs in ({"need_weights": False}, {"need_head_weights": True}, {"before_softmax": True}):
        for ours, theirs in zip(module(x, x, x, **given, **kwargs), scripted(x, x, x, **given, **kwargs), strict=True):
            assert (ours is None and theirs is None) or torch.equal(ours, theirs)
    expected, _ = step_by_step(module, x)
    assert torch.equal(torch.jit.script(StepByStep(module))(x), expected)


@pytest.mark.parametrize("layout", ALL)
def test_copies_keep_caches_of_their_own(layout):
    module = build(layout, self_attention=True)
    twin = copy.deepcopy(module)
    x, other = torch.randn(1, B, D), torch.randn(1, B, D)
    state: dict = {}
    module(x, x, x, incremental_state=state)
    twin(other, other, other, incremental_state=state)
    assert len(state) == 2
    assert torch.equal(module._get_input_buffer(state)["prev_key"], module.k_proj(x).transpose(0, 1))


def test_quantisation_noise_changes_training_only():
    module = build("window", self_attention=True, q_noise=0.5, qn_block_size=8)
    x = torch.randn(T, B, D)
    quiet = module(x, x, x)[0]
    assert torch.equal(quiet, module(x, x, x)[0])
    module.train()
    assert not torch.equal(quiet, module(x, x, x)[0])


def test_dropout_kept_during_inference_is_applied():
    module = build("window", self_attention=True, dropout=0.3)
    x = torch.randn(T, B, D)
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    module.dropout_module.make_generation_fast_(
        "layer", retain_dropout=True, retain_dropout_modules=["MultiheadAttention"]
    )
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])


@pytest.mark.parametrize("option", ("add_bias_kv", "add_zero_attn"))
def test_options_that_need_a_key_bias_are_refused(option):
    with pytest.raises(CollabError, match="add_bias_kv or add_zero_attn"):
        CollaborativeMultiheadAttention(D, H, **{option: True})


def test_head_pruning_is_refused():
    module = build("window", self_attention=True)
    for call in (lambda: module._get_reserve_head_index(2), lambda: module._adaptive_prune_heads([(0, 8)])):
        with pytest.raises(CollabError, match="cannot be pruned"):
            call()
