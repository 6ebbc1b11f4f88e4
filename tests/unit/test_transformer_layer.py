"""Layers build the attention that they are told to, and load what fairseq 0.12.2 stores."""

from argparse import Namespace

import pytest
import torch
from fairseq.models.transformer import TransformerConfig
from fairseq.modules import MultiheadAttention

from fairseq_collab.config import AttentionConfig
from fairseq_collab.fairseq_modules.multihead_attention import CollaborativeMultiheadAttention
from fairseq_collab.fairseq_modules.transformer_layer import (
    FASTPATH_COPIES,
    CollaborativeTransformerDecoderLayer,
    CollaborativeTransformerEncoderLayer,
)

COLLABORATIVE = AttentionConfig(True, 16, 8, "window")
SMALL_KEYS = AttentionConfig(False, 16)
STOCK = AttentionConfig(False, 64)


@pytest.fixture
def cfg() -> TransformerConfig:
    sides = {
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in dict(embed_dim=64, ffn_embed_dim=96, attention_heads=8, layers=1).items()
    }
    return TransformerConfig.from_namespace(Namespace(**sides))


@pytest.mark.parametrize(
    "attention, expected",
    (
        (COLLABORATIVE, (CollaborativeMultiheadAttention, 16, "window")),
        (SMALL_KEYS, (CollaborativeMultiheadAttention, 16, "concatenated")),
        (STOCK, (MultiheadAttention, 64, None)),
        (None, (MultiheadAttention, 64, None)),
    ),
)
def test_each_attention_is_the_one_configured(cfg, attention, expected):
    encoder = CollaborativeTransformerEncoderLayer(cfg, attention=attention)
    decoder = CollaborativeTransformerDecoderLayer(cfg, attention=attention, cross=STOCK)
    for module in (encoder.self_attn, decoder.self_attn):
        found = type(module), module.q_proj.out_features, getattr(module, "mix_layout", None)
        assert found == expected
    assert type(decoder.encoder_attn) is MultiheadAttention


def test_copies_of_weights_for_a_fast_path_are_neither_kept_nor_needed(cfg):
    layer = CollaborativeTransformerEncoderLayer(cfg, attention=COLLABORATIVE)
    assert not layer.can_use_fastpath
    assert not set(FASTPATH_COPIES) & set(layer.state_dict())
    saved = {**layer.state_dict(), **{name: torch.zeros(3) for name in FASTPATH_COPIES}}
    saved["fc1.bias"] = torch.ones(96)
    torch.nn.Module.load_state_dict(layer, saved, strict=True)
    assert torch.equal(layer.fc1.bias, torch.ones(96))
    with pytest.raises(RuntimeError, match="in_proj_something"):
        torch.nn.Module.load_state_dict(layer, {**saved, "in_proj_something": torch.zeros(3)}, strict=True)


@pytest.mark.parametrize("attention", (COLLABORATIVE, SMALL_KEYS, STOCK))
def test_evaluation_runs_the_same_attention_as_training(cfg, attention):
    layer = CollaborativeTransformerEncoderLayer(cfg, attention=attention)
    torch.nn.Module.load_state_dict(layer, layer.state_dict())
    calls = []
    layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    layer.dropout_module.p = 0.0
    x = torch.randn(5, 2, 64)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    trained = layer.train()(x, padding)
    with torch.no_grad():
        evaluated = layer.eval()(x, padding)
    assert len(calls) == 2
    assert torch.allclose(trained, evaluated, atol=1e-5)
