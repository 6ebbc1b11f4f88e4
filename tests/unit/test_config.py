"""Resolving flags and JSON to a configuration, and the sentences for what cannot be resolved."""

from argparse import Namespace

import pytest
import torch

from fairseq_collab.config import AttentionConfig, AttentionShape, CollabConfig
from fairseq_collab.errors import CollabError
from fairseq_collab.flags import resolve_flags

SHAPES = {
    "encoder": AttentionShape(64, 8, 2),
    "cross": AttentionShape(32, 4, 3),
    "decoder": AttentionShape(32, 4, 3),
}


def resolve(**flags) -> CollabConfig:
    return resolve_flags(Namespace(**flags), SHAPES)


def test_defaults_are_a_quarter_of_the_width_with_dense_mixing_everywhere():
    config = resolve()
    assert config.encoder == (AttentionConfig(True, 16, 16, "dense"),) * 2
    assert config.cross == config.decoder == (AttentionConfig(True, 8, 8, "dense"),) * 3


def test_key_dim_applies_to_all_and_is_overridden_by_name():
    config = resolve(key_dim=16, cross_key_dim=8)
    assert {c.key_dim for c in config.encoder + config.decoder} == {16}
    assert {c.key_dim for c in config.cross} == {8}


@pytest.mark.parametrize("text", ("encoder_cross", "encoder,cross", "cross, encoder"))
def test_attentions_that_are_not_named_stay_concatenated_at_full_width(text):
    config = resolve(collaborative_heads=text)
    assert config.decoder == (AttentionConfig(False, 32),) * 3
    assert all(c.collaborative for c in config.encoder + config.cross)


def test_none_with_a_key_dim_is_the_concatenated_baseline():
    assert resolve(collaborative_heads="none", key_dim=16).encoder == (AttentionConfig(False, 16),) * 2


@pytest.mark.parametrize(
    "flags, expected",
    (
        (dict(mix_layout="window"), (8, "window")),
        (dict(mix_layout="picked"), (8, "picked")),
        (dict(mix_dim=16), (16, "dense")),
        (dict(mix_dim=5), (5, "window")),
        (dict(key_dim=18, mix_dim=5), (5, "picked")),
        (dict(key_dim=4, mix_layout="picked"), (4, "dense")),
        (dict(mix_layout="window", mix_dim=16), (16, "dense")),
    ),
)
def test_mix_dim_and_layout_fill_each_other(flags, expected):
    config = resolve_flags(Namespace(**flags), {"encoder": SHAPES["encoder"]})
    assert (config.encoder[0].mix_dim, config.encoder[0].mix_layout) == expected


@pytest.mark.parametrize(
    "flags, sentence",
    (
        (dict(key_dim=0), "--key-dim is 0; it must be at least 1"),
        (dict(cross_key_dim=-4), "--cross-key-dim is -4; it must be at least 1"),
        (dict(mix_dim=0), "--mix-dim is 0; it must be at least 1"),
        (dict(key_dim=48), "cross attention of layer 0 is 48, more than the model width 32.*--key-dim 32 or less"),
        (dict(collaborative_heads="none", key_dim=12), "12 of the encoder attention.*its 8 concatenated heads"),
        (dict(collaborative_heads="encoder_crss"), "has 'crss'; it takes any of encoder, cross, decoder"),
        (dict(collaborative_heads="none,encoder"), "has 'none'.*or none alone"),
        (dict(collaborative_heads=","), "--collaborative-heads is empty"),
        (dict(mix_layout="striped"), "--mix-layout is 'striped'; known are dense, window, picked"),
        (dict(mixing_init="zeros"), "--mixing-init is 'zeros'; known are default"),
        (dict(mix_dim=20), "mix dim of the encoder attention of layer 0 is 20; a head can mix 1 to 16"),
        (dict(mix_dim=5, mix_layout="dense"), "uses all 16 shared dims, not 5"),
        (dict(key_dim=18, mix_layout="window"), "multiple of its 8 heads.*not key dim 18 and mix dim 8"),
        (dict(mix_layout="window", mix_dim=1), "not key dim 16 and mix dim 1"),
        (dict(mix_layout="picked", mix_dim=1), "8 heads that pick 1 dims each leave some of the 16.*--mix-dim 2"),
        (dict(encoder_xformers_att_config="{}"), "--encoder-xformers-att-config replaces the attention"),
        (dict(mha_heads_to_keep=2), "--mha-heads-to-keep prunes heads"),
        (dict(mha_reg_scale_factor=0.1), "--mha-reg-scale-factor regularises separate heads"),
        (dict(collab_config="/nowhere/c.json"), "/nowhere/c.json: there is no such file"),
    ),
)
def test_wrong_flags_get_one_sentence(flags, sentence):
    with pytest.raises(CollabError, match=sentence):
        resolve(**flags)


def test_options_that_only_concern_collaborative_heads_are_left_alone_without_them():
    assert resolve(collaborative_heads="none", encoder_xformers_att_config="{}").encoder[0].key_dim == 64


def test_json_restores_an_equal_configuration():
    config = resolve(key_dim=8, mix_layout="picked", collaborative_heads="encoder,decoder", mixing_init="uniform")
    assert CollabConfig.from_json(config.to_json(), SHAPES) == config
    assert resolve(collab_config=config.to_json()) == config


def test_hand_written_json_needs_only_key_dims(tmp_path):
    file = tmp_path / "dims.json"
    file.write_text('{"encoder": {"key_dim": 16}, "decoder": [{"key_dim": 4}, {"key_dim": 8, "mix_dim": 3}, {}]}')
    config = resolve(collab_config=str(file))
    assert config.encoder == (AttentionConfig(True, 16, 16, "dense"),) * 2
    assert config.cross == (AttentionConfig(False, 32),) * 3
    assert [c.key_dim for c in config.decoder] == [4, 8, 8]
    assert config.decoder[1].mix_layout == "window"


@pytest.mark.parametrize(
    "text, sentence",
    (
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"version": 9}', "has version 9; this release reads version 1"),
        ('{"encodr": {}}', "unknown entry 'encodr'"),
        ('{"encoder": [{"key_dim": 4}]}', "has 1 layers for the encoder attention, the model has 2"),
        ('{"encoder": 4}', "has 0 layers"),
        ('{"encoder": [4, 4]}', "encoder layer 0 must be an object"),
        ('{"encoder": {"key_dims": 4}}', "encoder layer 0 has the unknown entry 'key_dims'"),
        ('{"encoder": {"key_dim": "4"}}', "key_dim must be a whole number, not '4'"),
        ('{"encoder": {"key_dim": 100}}', "is 100, more than the model width 64"),
        ('{"encoder": {"key_dim": 8, "scale": -1}}', "scale of the encoder attention of layer 0 is -1"),
        ('{"encoder": {"collaborative": "yes"}}', "collaborative must be true or false, not 'yes'"),
    ),
)
def test_wrong_json_is_told_by_entry(tmp_path, text, sentence):
    file = tmp_path / "dims.json"
    file.write_text(text)
    with pytest.raises(CollabError, match=sentence):
        resolve(collab_config=str(file))


def test_json_for_an_attention_that_the_model_lacks_is_refused():
    with pytest.raises(CollabError, match="configures the cross attention, which this model does not have"):
        CollabConfig.from_json('{"cross": {"key_dim": 4}}', {"decoder": SHAPES["decoder"]})


@pytest.mark.parametrize(
    "flags, sentence",
    (
        (dict(key_dim=8), "ask for key_dim 8 in the encoder attention of layer 0, but.*says 16"),
        (dict(mix_dim=4), "ask for mix_dim 4.*says 16"),
        (dict(collaborative_heads="encoder"), "ask for collaborative False in the cross attention.*says True"),
        (dict(decoder_key_dim=4), "ask for key_dim 4 in the decoder attention of layer 0, but.*says 8"),
    ),
)
def test_flags_that_contradict_the_stored_configuration_are_refused(flags, sentence):
    stored = resolve().to_json()
    with pytest.raises(CollabError, match=sentence):
        resolve(collab_config=stored, **flags)


def test_a_layout_that_contradicts_the_stored_one_is_refused():
    stored = resolve(mix_layout="window", mix_dim=4).to_json()
    with pytest.raises(CollabError, match="ask for mix_layout picked.*says window"):
        resolve(collab_config=stored, mix_layout="picked")


def test_windows_over_all_dims_are_dense_and_may_still_be_called_windows():
    config = resolve(key_dim=4, mix_layout="window")
    assert {one.mix_layout for one in config.encoder + config.cross} == {"dense"}
    assert resolve(key_dim=4, mix_layout="window", collab_config=config.to_json()) == config


def test_flags_that_agree_with_the_stored_configuration_are_fine():
    stored = resolve(key_dim=8, mix_dim=8, collaborative_heads="encoder_cross").to_json()
    flags = dict(encoder_key_dim=8, cross_key_dim=8, mix_dim=8, collaborative_heads="cross_encoder")
    assert resolve(collab_config=stored, **flags).to_json() == stored


def test_a_checkpoint_serves_as_configuration_and_a_stock_one_is_told(tmp_path):
    stored = resolve(key_dim=8)
    collab, stock, broken = tmp_path / "collab.pt", tmp_path / "stock.pt", tmp_path / "broken.pt"
    torch.save({"cfg": {"model": Namespace(collab_config=stored.to_json())}}, collab)
    torch.save({"args": Namespace(arch="transformer"), "cfg": None}, stock)
    broken.write_bytes(collab.read_bytes()[:300])
    assert resolve(collab_config=str(collab)) == stored
    with pytest.raises(CollabError, match="checkpoint without collaborative attention.*fairseq-collab-convert"):
        resolve(collab_config=str(stock))
    with pytest.raises(CollabError, match="could not be read as a checkpoint"):
        resolve(collab_config=str(broken))


def test_pruned_layers_keep_their_own_dims():
    config = CollabConfig(decoder=tuple(AttentionConfig(True, dim, dim, "dense") for dim in (4, 8, 16)))
    assert [c.key_dim for c in config.keep_layers("decoder", [0, 2]).decoder] == [4, 16]
