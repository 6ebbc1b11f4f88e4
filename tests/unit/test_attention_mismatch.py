"""A state dict whose attentions do not fit the model is told with the flag or the converter that helps."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from fairseq_collab.errors import CollabError
from fairseq_collab.fairseq_modules import patches
from fairseq_collab.fairseq_modules.attention_mismatch import check_attentions

WIDTH, HEADS = 8, 2


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    patches.install()


PREFIXES = ("encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.encoder_attn")


def collaborative(key_dim, mix_dim=None, prefixes=PREFIXES, picked=False):
    state = {}
    for prefix in prefixes:
        state[f"{prefix}.q_proj.weight"] = torch.zeros(key_dim, WIDTH)
        state[f"{prefix}.mixing"] = torch.zeros(HEADS, mix_dim or key_dim)
        state[f"{prefix}.query_bias"] = torch.zeros(HEADS, mix_dim or key_dim)
        if picked:
            state[f"{prefix}.pick"] = torch.zeros(HEADS, mix_dim or key_dim, dtype=torch.long)
    return state


def concatenated(key_dim=WIDTH, prefixes=PREFIXES):
    state = {}
    for prefix in prefixes:
        state[f"{prefix}.q_proj.weight"] = torch.zeros(key_dim, WIDTH)
        state[f"{prefix}.q_proj.bias"] = torch.zeros(key_dim)
    return state


OLD_STOCK = {f"{prefix}.in_proj_weight": torch.zeros(3 * WIDTH, WIDTH) for prefix in PREFIXES}


@pytest.mark.parametrize(
    ("checkpoint", "model", "expected"),
    [
        (concatenated(), collaborative(4), "fairseq-collab-convert --path IN.pt --output OUT.pt --key-dim R"),
        (OLD_STOCK, collaborative(4), "fairseq-collab-convert --path IN.pt --output OUT.pt --key-dim R"),
        (collaborative(4), concatenated(), "fairseq-collab-convert --to-concatenated"),
        (
            {**collaborative(4, prefixes=PREFIXES[:1]), **concatenated(prefixes=PREFIXES[1:])},
            collaborative(4),
            "repeat its --collaborative-heads encoder",
        ),
        (
            {**collaborative(4, prefixes=PREFIXES[1:]), **concatenated(prefixes=PREFIXES[:1])},
            {**collaborative(4, prefixes=PREFIXES[:1]), **concatenated(prefixes=PREFIXES[1:])},
            "repeat its --collaborative-heads cross_decoder",
        ),
        (collaborative(4), collaborative(6), "key dim is 4 in the checkpoint and 6 in the model"),
        (collaborative(4), collaborative(6), "and 2 more attentions: give --key-dim 4"),
        (concatenated(4), concatenated(), "key dim is 4 in the checkpoint and 8 in the model"),
        (
            {**collaborative(4, prefixes=PREFIXES[:1]), **collaborative(6, prefixes=PREFIXES[1:])},
            collaborative(4),
            "give --encoder-key-dim 4 --cross-key-dim 6 --decoder-key-dim 6",
        ),
        (
            {**collaborative(4), **collaborative(6, prefixes=["encoder.layers.1.self_attn"])},
            collaborative(4, prefixes=[*PREFIXES, "encoder.layers.1.self_attn"]),
            "give the checkpoint itself to --collab-config",
        ),
        (collaborative(4, 2), collaborative(4), "mix dim is 2 in the checkpoint and 4 in the model"),
        (collaborative(4, 2), collaborative(4), "give --mix-dim 2"),
        (collaborative(4, 2, picked=True), collaborative(4, 2), "give --mix-layout picked"),
        (
            collaborative(4, 2, picked=True),
            collaborative(2),
            "give --key-dim 4 --mix-dim 2 --mix-layout picked, or the",
        ),
        (collaborative(4), collaborative(6, 2), "give --key-dim 4 --mix-layout dense, or the"),
        (
            {**collaborative(4, 2, PREFIXES[:1]), **collaborative(4, prefixes=PREFIXES[1:])},
            collaborative(6),
            "in the model at encoder.layers.0.self_attn and 2 more attentions: give the checkpoint itself to",
        ),
        (collaborative(4, 2), collaborative(4, 2, picked=True), "give --mix-layout window"),
    ],
)
def test_attentions_that_do_not_fit_get_the_way_out(checkpoint, model, expected):
    with pytest.raises(CollabError) as caught:
        check_attentions(checkpoint, model)
    assert expected in str(caught.value)


@pytest.mark.parametrize("state", [concatenated(), OLD_STOCK, collaborative(4, 2), {}])
def test_attentions_that_fit_pass(state):
    check_attentions(state, state)
    check_attentions(state, {})


def test_loading_into_a_fairseq_model_compares_the_attentions():
    from fairseq.models import BaseFairseqModel

    model = BaseFairseqModel()
    model.load_state_dict({}, strict=True)
    model.state_dict = lambda: collaborative(4)
    with pytest.raises(CollabError, match="fairseq-collab-convert"):
        model.load_state_dict(concatenated(), strict=True)


@pytest.mark.parametrize(
    ("name", "theirs", "ours", "expected"),
    [
        (
            "encoder.embed_positions",
            (34, 8),
            (18, 8),
            "32 positions at encoder.embed_positions and the model 16: give ",
        ),
        ("decoder.embed_positions", (34, 8), (18, 8), "give --max-target-positions 32"),
        ("encoder.embed_tokens", (34, 8), (18, 8), "34 symbols at encoder.embed_tokens and that of the model 18: give"),
        (
            "encoder.embed_tokens",
            (34, 8),
            (34, 4),
            "encoder.embed_tokens.weight is 34 x 8 in the checkpoint and 34 x 4",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_told_in_a_sentence(name, theirs, ours, expected):
    from fairseq.models import BaseFairseqModel

    model = BaseFairseqModel()
    side, module = name.split(".")
    setattr(model, side, torch.nn.ModuleDict({module: torch.nn.Embedding(*ours)}))
    with pytest.raises(CollabError) as caught:
        model.load_state_dict({f"{name}.weight": torch.zeros(theirs)})
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})


def test_layers_left_out_on_purpose_are_not_compared_by_number():
    from fairseq.models import BaseFairseqModel

    model = BaseFairseqModel()
    model.state_dict = lambda: collaborative(4)
    options = SimpleNamespace(encoder_layers_to_keep="1")
    assert model.load_state_dict(collaborative(6), strict=False, model_cfg=options).missing_keys == []
