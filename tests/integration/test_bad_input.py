"""Mistakes on fairseq's command lines end with one sentence, a non-zero status and nothing written."""

import json
import os

import pytest
from _tools import DENSE, SMALL, WINDOW, train_flags


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
