"""Mistakes on fairseq's command lines end with one sentence, a non-zero status and nothing written.

Whole commands first; then every check of the options by itself, where building the model meets it. Data folders and
damaged files have tests of their own.
"""

import json
import os
from argparse import Namespace

import pytest
from _tools import DENSE, SMALL, WINDOW, build, train_flags

from fairseq_collab.errors import CollabError

LM = ("--arch", "transformer_lm_collab_gpt2_tiny", "--task", "language_modeling", "--tokens-per-sample", 32)


def sentence_of(done) -> str:
    """The one line that tells the mistake; a traceback before it would be a failure."""
    assert done.returncode != 0
    assert "Traceback" not in done.stdout
    lines = done.stdout.strip().splitlines()
    assert lines[-1].startswith("fairseq_collab: error: "), done.stdout[-2000:]
    return lines[-1]


@pytest.fixture
def refused(fairseq, toy_data, plugin_dir, tmp_path):
    """Runs a training that must fail without leaving anything in its save-dir; returns the sentence."""

    def run(*flags):
        folder = tmp_path / "refused"
        done = fairseq(
            "train",
            *(toy_data, "--user-dir", plugin_dir, "--save-dir", folder, *train_flags(), *flags),
            check=False,
        )
        assert not folder.exists() or not list(folder.iterdir())
        return sentence_of(done)

    return run


@pytest.mark.parametrize(
    "flags, expected",
    (
        (("--key-dim", 0), "--key-dim is 0; it must be at least 1"),
        (("--decoder-key-dim", -4), "--decoder-key-dim is -4; it must be at least 1"),
        (("--key-dim", 65), "more than the model width 64"),
        (("--key-dim", 18, "--collaborative-heads", "none"), "18 of the encoder attention of layer 0 does not divide"),
        (("--collaborative-heads", "encoder_decodr"), "has 'decodr'; it takes any of encoder, cross, decoder"),
        (("--mix-dim", 40), "is 40; a head can mix 1 to 16"),
        (("--encoder-xformers-att-config", "{}"), "cannot be combined with collaborative heads"),
        (("--collab-config", "missing.json"), "--collab-config missing.json: there is no such file"),
        (("--encoder-layers-to-keep", "0,7"), "--encoder-layers-to-keep is '0,7'; it takes numbers from 0 to 1"),
    ),
    ids=lambda value: str(value[0]) if isinstance(value, tuple) else None,
)
def test_wrong_flags_are_refused_before_training(refused, flags, expected):
    assert expected in refused(*SMALL, *flags)


def test_hand_written_configuration_is_told_by_file_and_entry(refused, tmp_path):
    file = tmp_path / "dims.json"
    file.write_text(json.dumps({"encoder": {"key_dim": 16}, "cross": {"keydim": 8}}))
    assert f"{file}, cross layer 0 has the unknown entry 'keydim'" in refused(*SMALL, "--collab-config", file)


def test_configuration_that_contradicts_the_flags_is_refused(refused, window_model):
    path = window_model / "checkpoint_last.pt"
    expected = "ask for key_dim 32 in the encoder attention of layer 0, but"
    assert expected in refused(*SMALL, "--collab-config", path, "--key-dim", 32)


@pytest.mark.parametrize(
    "overrides, expected",
    (
        ({"key_dim": 32}, "ask for key_dim 32 in the encoder attention of layer 0, but"),
        ({"mix_layout": "picked"}, "ask for mix_layout picked"),
        ({"collaborative_heads": "encoder"}, "ask for collaborative False in the cross attention"),
        ({"collab_config": '{"encoder": {"key_dim": 8}}'}, "ask for key_dim 16"),
    ),
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_overrides_that_contradict_the_checkpoint_are_refused(generate, window_model, overrides, expected):
    done = generate(window_model / "checkpoint_last.pt", "--model-overrides", repr(overrides), check=False)
    assert expected in sentence_of(done)


def test_weights_of_other_dims_are_told_with_the_flag_to_give(refused, window_model):
    told = refused(*SMALL, "--key-dim", 32, "--finetune-from-model", window_model / "checkpoint_last.pt")
    assert "16" in told and "32" in told and "--key-dim 16" in told


@pytest.mark.parametrize("stock_first", (True, False), ids=("stock to collaborative", "collaborative to stock"))
def test_a_checkpoint_of_the_other_kind_names_the_converter(train, refused, window_model, stock_first):
    stock = ("--arch", "transformer_tiny", *SMALL[2:])
    if stock_first:
        told = refused(*DENSE, "--finetune-from-model", train("stock", *stock) / "checkpoint_last.pt")
        assert "fairseq-collab-convert" in told and "--to-concatenated" not in told
    else:
        told = refused(*stock, "--finetune-from-model", window_model / "checkpoint_last.pt")
        assert "fairseq-collab-convert --to-concatenated" in told


def test_a_restore_file_that_is_gone_does_not_start_a_new_training(refused, tmp_path):
    assert "gone.pt does not exist" in refused(*WINDOW, "--restore-file", tmp_path / "gone.pt")


def test_the_traceback_is_there_for_who_asks(run_fairseq, toy_data, plugin_dir, tmp_path):
    done = run_fairseq(
        "train",
        *(toy_data, "--user-dir", plugin_dir, "--save-dir", tmp_path, *train_flags(), *SMALL, "--key-dim", 0),
        check=False,
        env={**os.environ, "FAIRSEQ_COLLAB_TRACEBACK": "1"},
    )
    assert done.returncode == 1
    assert "Traceback" in done.stdout and "CollabError: --key-dim is 0" in done.stdout


def message(plugin, *flags):
    """The sentence with which building the model of these flags is refused."""
    with pytest.raises(CollabError) as caught:
        build(plugin, flags)
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".")
    return text


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--key-dim", 0), ("--key-dim is 0", "at least 1")),
        (("--key-dim", -4), ("--key-dim is -4", "at least 1")),
        (("--cross-key-dim", 0), ("--cross-key-dim is 0", "at least 1")),
        (("--key-dim", 65), ("is 65", "width 64", "--key-dim 64 or less", "encoder")),
        (("--decoder-key-dim", 128), ("is 128", "width 64", "decoder")),
        (("--collaborative-heads", "none", "--key-dim", 18), ("18", "4 concatenated heads", "multiple of 4")),
        (
            ("--collaborative-heads", "cross", "--encoder-key-dim", 6),
            ("6", "encoder", "multiple of 4", "collaborative"),
        ),
        (("--collaborative-heads", "encoder_deocder"), ("'deocder'", "encoder, cross, decoder", "none")),
        (("--collaborative-heads", "none_cross"), ("'none'", "none alone")),
        (("--collaborative-heads", "all"), ("'all'", "encoder, cross, decoder")),
        (("--collaborative-heads", ","), ("is empty", "none")),
        (("--mix-dim", 0), ("--mix-dim is 0", "at least 1")),
        (("--key-dim", 16, "--mix-dim", 20), ("mix dim", "20", "16 shared dims")),
        (("--key-dim", 16, "--mix-dim", 8, "--mix-layout", "dense"), ("16 shared dims, not 8", "--mix-layout window")),
        (("--key-dim", 18, "--mix-dim", 8, "--mix-layout", "window"), ("multiple of its 4 heads", "18", "picked")),
        (("--key-dim", 16, "--mix-dim", 3, "--mix-layout", "window"), ("at least key dim / heads", "3", "picked")),
        (("--key-dim", 16, "--mix-dim", 3, "--mix-layout", "picked"), ("16 shared dims", "unused", "--mix-dim 4")),
        (("--encoder-layers-to-keep", "0,2"), ("--encoder-layers-to-keep", "'0,2'", "from 0 to 1")),
        (("--decoder-layers-to-keep", "2"), ("--decoder-layers-to-keep", "'2'", "from 0 to 1")),
        (("--no-cross-attention", "--cross-key-dim", 16), ("--cross-key-dim", "no cross attention", "leave it out")),
        (("--no-cross-attention", "--collaborative-heads", "cross"), ("--collaborative-heads", "encoder, decoder")),
    ],
    ids=lambda value: "_".join(map(str, value)) if str(value[0]).startswith("--") else "",
)
def test_flags_that_cannot_be_say_why_and_what_would_do(plugin, flags, parts):
    text = message(plugin, *SMALL, *flags)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--encoder-key-dim", 16), ("--encoder-key-dim", "no encoder attention", "leave it out")),
        (("--collaborative-heads", "encoder_cross"), ("--collaborative-heads", "decoder", "none")),
        (("--key-dim", 128), ("128", "width 64", "decoder")),
    ],
)
def test_a_language_model_refuses_attentions_that_it_does_not_have(plugin, flags, parts):
    text = message(plugin, *LM, *flags)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("{", ("not JSON",)),
        ("[1]", ("JSON object", "encoder, cross, decoder")),
        ({"encoders": {"key_dim": 16}}, ("'encoders'", "encoder, cross, decoder")),
        ({"encoder": {"keydim": 16}}, ("encoder layer 0", "'keydim'", "key_dim")),
        ({"encoder": {"key_dim": "16"}}, ("encoder layer 0", "whole number", "'16'")),
        ({"encoder": [{"key_dim": 16}] * 3}, ("3 layers", "encoder", "the model has 2")),
        ({"cross": [{"key_dim": 16}, {"key_dim": 65}]}, ("cross attention of layer 1", "65", "width 64")),
        ({"cross": {"key_dim": 16, "scale": -1}}, ("scale", "-1", "above 0")),
        ({"cross": {"key_dim": 16, "mix_layout": "ring"}}, ("'ring'", "dense, window, picked")),
        ({"cross": {"key_dim": 16, "mixing_init": "ones"}}, ("'ones'", "all_ones")),
        ({"cross": {"key_dim": 16, "collaborative": "yes"}}, ("collaborative", "'yes'", "true or false")),
        ({"version": 99, "cross": {"key_dim": 16}}, ("version 99", "reads version 1")),
        (b"\xff\xfe\x00", ("neither JSON nor a checkpoint",)),
        (b"PK\x03\x04 not a checkpoint", ("could not be read as a checkpoint",)),
    ],
    ids=str,
)
def test_a_configuration_file_that_cannot_be_names_the_entry(plugin, tmp_path, content, parts):
    file = tmp_path / "config.json"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    text = message(plugin, *SMALL, "--collab-config", file)
    assert str(file) in text or "of layer" in text
    assert all(part in text for part in parts), text


def test_a_configuration_file_that_is_not_there_is_named(plugin, tmp_path):
    assert "there is no such file" in message(plugin, *SMALL, "--collab-config", tmp_path / "none.json")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--key-dim", 24), ("key_dim 24", "encoder", "says 16")),
        (("--encoder-key-dim", 16, "--decoder-key-dim", 24), ("key_dim 24", "decoder", "says 64")),
        (("--mix-dim", 4), ("mix_dim 4", "encoder", "says 8")),
        (("--mix-layout", "picked"), ("mix_layout picked", "encoder", "says window")),
        (("--collaborative-heads", "encoder"), ("cross",)),
    ],
)
def test_flags_beside_a_configuration_file_must_agree_with_it(plugin, tmp_path, flags, parts):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"encoder": {"key_dim": 16, "mix_dim": 8}, "cross": {"key_dim": 16, "mix_dim": 8}}))
    build(plugin, (*SMALL, "--collab-config", file, "--encoder-key-dim", 16))
    text = message(plugin, *SMALL, "--collab-config", file, *flags)
    assert all(part in text for part in (*parts, "leave the option out")), text


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("encoder_xformers_att_config", '{"name": "scaled_dot_product"}'),
        ("decoder_xformers_att_config", '{"name": "scaled_dot_product"}'),
        ("mha_heads_to_keep", 2),
        ("mha_reg_scale_factor", 0.1),
    ],
)
def test_options_of_separate_heads_are_refused_for_collaborative_ones(plugin, option, value):
    from fairseq.data import Dictionary
    from fairseq.models import build_model

    class Task:
        source_dictionary = target_dictionary = Dictionary()

    options = {"arch": "transformer_collab_tiny", option: value}
    with pytest.raises(CollabError) as caught:
        build_model(Namespace(**options), Task)
    assert f"--{option.replace('_', '-')}" in str(caught.value)
    assert "collaborative heads" in str(caught.value) and "leave it out" in str(caught.value)
    if option.startswith("mha"):
        build_model(Namespace(**options, collaborative_heads="none"), Task)


def test_training_that_is_taken_up_with_other_dims_names_the_flag_and_leaves_the_checkpoint(
    fairseq, toy_data, plugin_dir, train
):
    folder = train("taken_up", *DENSE, "--no-epoch-checkpoints")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    command = (toy_data, "--user-dir", plugin_dir, "--save-dir", folder, *train_flags(), *SMALL, "--key-dim", 32)
    told = sentence_of(fairseq("train", *command, "--max-epoch", 2, check=False))
    assert "16" in told and "32" in told and "--key-dim 16" in told
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_configuration_that_does_not_fit_the_checkpoint_is_refused(generate, window_model, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({name: {"key_dim": 32} for name in ("encoder", "cross", "decoder")}))
    overrides = {"collab_config": str(file), "key_dim": None, "mix_dim": None, "mix_layout": None}
    done = generate(window_model / "checkpoint_last.pt", "--model-overrides", repr(overrides), check=False)
    told = sentence_of(done)
    assert "16 in the checkpoint and 32 in the model" in told


def test_overrides_that_agree_with_the_checkpoint_are_fine(generate, window_model):
    path = window_model / "checkpoint_last.pt"
    overridden = generate(path, "--beam", 1, "--model-overrides", "{'key_dim': 16, 'mix_dim': 8}")
    assert overridden.hypotheses() == generate(path, "--beam", 1).hypotheses()
