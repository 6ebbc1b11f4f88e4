"""``fairseq-collab-convert`` on trained checkpoints: exact where it must be, smaller where asked, safe always."""

import os
import pickle
import re
from argparse import Namespace

import pytest
import torch
from _stock import skip_where_stock_fails
from _tools import SMALL, Finished, assert_same_weights, attentions, train_flags

import fairseq_collab.convert
from fairseq_collab.cli.convert import main
from fairseq_collab.errors import CollabError

SEPARATE = (
    *("--arch", "transformer_iwslt_de_en", "--encoder-layers", 2, "--decoder-layers", 2, "--encoder-embed-dim", 48),
    *("--decoder-embed-dim", 64, "--encoder-ffn-embed-dim", 64, "--decoder-ffn-embed-dim", 64, *SMALL[2:]),
    *("--max-epoch", 10),
)
STOCK = ("--arch", "transformer_tiny", *SMALL[2:], "--max-epoch", 10)


@pytest.fixture(scope="module")
def stock_model(train):
    """The checkpoint of an ordinary transformer, pre-norm."""
    flags = ("--encoder-normalize-before", "--decoder-normalize-before")
    return train("stock", *STOCK, *flags) / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def separate_model(fairseq, toy_data, plugin_dir, tmp_path_factory):
    """As `stock_model`, post-norm, with embeddings of their own and an encoder of another width."""
    folder = tmp_path_factory.mktemp("separate")
    flags = [flag for flag in train_flags() if flag != "--share-all-embeddings"]
    fairseq("train", toy_data, "--user-dir", plugin_dir, "--save-dir", folder, *flags, *SEPARATE)
    return folder / "checkpoint_last.pt"


def convert(*args) -> int:
    return main([str(arg) for arg in args])


def words(finished):
    return {number: text for number, (text, _) in finished.hypotheses().items()}


@pytest.mark.parametrize("calibrated", (False, True), ids=("weights", "calibrated"))
@pytest.mark.parametrize("variant", ("pre-norm, shared", "post-norm, separate, other widths"))
def test_uncompressed_conversion_keeps_every_hypothesis(
    generate, toy_data, stock_model, separate_model, tmp_path, variant, calibrated
):
    path = stock_model if variant == "pre-norm, shared" else separate_model
    output = tmp_path / "converted.pt"
    text = ("--calibrate", toy_data, "--calibrate-sentences", 50) if calibrated else ()
    assert convert("--path", path, "--output", output, "--max-error", 1e-9, *text) == 0
    weights = torch.load(output)["model"]
    assert weights["decoder.layers.0.encoder_attn.k_proj.weight"].shape == (64, 64 if path == stock_model else 48)
    converted = words(generate(output, "--beam", 4))
    if path == separate_model:  # post-norm
        skip_where_stock_fails("decoding")
    assert converted == words(generate(path, "--beam", 4))


def test_checkpoints_of_old_versions_convert_alike(generate, stock_model, toy_data, tmp_path):
    """Options in ``args``, queries, keys and values in one ``in_proj_weight``, copies beside the encoder's layers."""
    state = torch.load(stock_model)
    task = {key: value for key, value in state["cfg"]["task"].items() if key not in ("_name", "data")}
    state["args"] = Namespace(**{**vars(state["cfg"]["model"]), **task, "task": "translation", "data": str(toy_data)})
    state["cfg"] = None
    weights = state["model"]
    for prefix in [key.removesuffix(".q_proj.weight") for key in weights if key.endswith(".q_proj.weight")]:
        for kind in ("weight", "bias"):
            parts = [weights.pop(f"{prefix}.{name}_proj.{kind}") for name in "qkv"]
            weights[f"{prefix}.in_proj_{kind}"] = torch.cat(parts)
    weights["encoder.layers.0.fc1_weight"] = weights["encoder.layers.0.fc1.weight"].clone()
    old, new, calibrated = tmp_path / "old.pt", tmp_path / "new.pt", tmp_path / "calibrated.pt"
    torch.save(state, old)
    assert convert("--path", old, "--output", new, "--key-dim", 64) == 0
    assert words(generate(new, "--beam", 4)) == words(generate(stock_model, "--beam", 4))
    text = ("--calibrate", toy_data, "--calibrate-sentences", 50, "--data", toy_data)
    assert convert("--path", old, "--output", calibrated, "--key-dim", 16, *text) == 0
    assert len(generate(calibrated, "--beam", 4).hypotheses()) == 30


def test_there_and_back_is_a_stock_checkpoint_with_the_same_hypotheses(
    generate, run_fairseq, toy_data, stock_model, tmp_path, capsys
):
    small, back = tmp_path / "small.pt", tmp_path / "back.pt"
    assert convert("--path", stock_model, "--output", small, "--key-dim", 16) == 0
    assert "signature: conv:cp|R:16|P:K|attn:encoder+cross+decoder|calib:none" in capsys.readouterr().out
    assert convert("--to-concatenated", "--path", small, "--output", back) == 0
    state = torch.load(back)
    assert not any("mixing" in key or "pick" in key for key in state["model"])
    # the command that was printed; no plugin, so it must tell torch otherwise that the file is trusted
    printed = re.search(rf"use:       (.*?)fairseq-generate DATA --path {back}\n", capsys.readouterr().out)[1]
    flags = ("--cpu", "--num-workers", 0, "--batch-size", 10, "--required-batch-size-multiple", 1, "--beam", 4)
    trust = dict(one.split("=") for one in printed.split())
    done = run_fairseq("generate", toy_data, "--path", back, *flags, env=trust)
    assert words(Finished(0, done.stdout)) == words(generate(small, "--beam", 4))


def test_a_checkpoint_is_checked_once(stock_model, tmp_path, monkeypatch):
    checked, check = [], fairseq_collab.convert.check
    monkeypatch.setattr(fairseq_collab.convert, "check", lambda *args: checked.append(args) or check(*args))
    assert convert("--path", stock_model, "--output", tmp_path / "out.pt", "--key-dim", 16) == 0
    assert len(checked) == 1
    with pytest.raises(CollabError, match="has collaborative heads already"):
        state = torch.load(tmp_path / "out.pt")
        fairseq_collab.convert.to_collaborative(state, "out.pt", fairseq_collab.convert.Request(key_dim=8))


def test_a_window_model_exports_to_stock_fairseq(generate, window_model, tmp_path):
    back = tmp_path / "back.pt"
    assert convert("--to-concatenated", "--path", window_model / "checkpoint_last.pt", "--output", back) == 0
    expected = words(generate(window_model / "checkpoint_last.pt", "--beam", 4))
    skip_where_stock_fails("decoding")
    assert words(generate(back, "--beam", 4)) == expected


def test_only_the_named_attentions_change_and_parameters_shrink(load, stock_model, tmp_path):
    output = tmp_path / "cross.pt"
    assert convert("--path", stock_model, "--output", output, "--key-dim", 16, "--attention", "cross,encoder") == 0
    (model,) = load(output)
    dims = {name: module.q_proj.weight.size(0) for name, module in attentions(model).items()}
    assert dims == {name: 64 if name.startswith("decoder") else 16 for name in dims}


def test_a_converted_model_is_fine_tuned_with_the_printed_flags(
    fairseq, toy_data, plugin_dir, stock_model, tmp_path, capsys
):
    output, folder = tmp_path / "converted.pt", tmp_path / "tuned"
    assert convert("--path", stock_model, "--output", output, "--key-dim", 16) == 0
    printed = re.search(r"fairseq-train DATA --user-dir fairseq_collab (.*)", capsys.readouterr().out).group(1).split()
    assert "--share-all-embeddings" in printed and "--decoder-normalize-before" in printed
    fairseq(
        *("train", toy_data, "--user-dir", plugin_dir, "--save-dir", folder, *printed, "--lr", 1e-30),
        *("--max-epoch", 1, "--cpu", "--num-workers", 0),
    )
    assert_same_weights(output, folder / "checkpoint_last.pt")


def test_a_language_model_converts_and_comes_back(fairseq, toy_data, plugin_dir, tmp_path):
    """The options of stock language models are a dict, and lose nothing on the way."""
    lm, small, back = tmp_path / "lm", tmp_path / "small.pt", tmp_path / "back.pt"
    fairseq(
        *("train", toy_data, "--user-dir", plugin_dir, "--save-dir", lm, "--task", "language_modeling", "--cpu"),
        *("--arch", "transformer_lm_gpt2_tiny", "--decoder-attention-heads", 4, "--tokens-per-sample", 32),
        *("--optimizer", "adam", "--lr", 0.005, "--max-tokens", 800, "--max-epoch", 2, "--num-workers", 0),
    )

    def loss(path):
        done = fairseq(
            *("eval-lm", toy_data, "--user-dir", plugin_dir, "--path", path, "--cpu", "--gen-subset", "valid"),
            *("--tokens-per-sample", 32, "--num-workers", 0),
        )
        return float(re.search(r"Loss \(base 2\): ([\d.]+)", done.stdout).group(1))

    def continued(path):
        done = fairseq(
            *("generate", toy_data, "--user-dir", plugin_dir, "--path", path, "--cpu", "--task", "language_modeling"),
            *("--sample-break-mode", "eos", "--prefix-size", 2, "--beam", 3, "--num-workers", 0),
            *("--tokens-per-sample", 32, "--required-batch-size-multiple", 1),
        )
        return words(done)

    original = lm / "checkpoint_last.pt"
    assert convert("--path", original, "--output", small, "--key-dim", 64) == 0
    assert loss(small) == pytest.approx(loss(original), abs=2e-4)
    assert continued(small) == continued(original)
    assert convert("--path", original, "--output", small, "--key-dim", 24, "--force") == 0
    assert convert("--to-concatenated", "--path", small, "--output", back) == 0
    assert loss(back) == pytest.approx(loss(small), abs=2e-4)
    assert loss(small) < loss(original) + 1


class Evil:
    def __reduce__(self):
        return os.mkdir, ("owned",)


@pytest.mark.parametrize(
    "case, sentence",
    (
        ("missing", "there is no checkpoint"),
        ("truncated", r"is damaged \(its end is missing"),
        ("text", "is not a checkpoint of torch"),
        ("code", "it wants to run posix.mkdir.*give --unsafe-load"),
        ("code, old format", r"in.pt is damaged \(Unsupported|in.pt was not loaded"),
        (
            "collaborative",
            "in.pt has collaborative heads already; start from the checkpoint that it was converted from$",
        ),
        ("other architecture", "is a lstm model; this version converts transformer, transformer_lm"),
        ("nan", "k_proj.weight of encoder.layers.0.self_attn holds NaN"),
        ("pruned", "q_proj.weight of decoder.layers.1.encoder_attn has 48 rows, not 64: pruned heads"),
        ("key dim", "The key dim of the encoder, cross, decoder attention is 65, more than the model width 64"),
        ("itself", "--output is --path itself"),
        ("exists", "exists; give another name, or --force"),
        ("several", "--key-dim is 0; it must be at least 1\n--attention has 'crss'"),
    ),
)
def test_what_cannot_be_converted_is_said_and_nothing_is_written(
    stock_model, window_model, tmp_path, monkeypatch, capsys, case, sentence
):
    monkeypatch.chdir(tmp_path)
    path, output, flags = tmp_path / "in.pt", tmp_path / "out.pt", ["--key-dim", 16]
    content = stock_model.read_bytes()
    state = torch.load(stock_model)
    if case == "truncated":
        content = content[: len(content) // 2]
    elif case == "text":
        content = b"not a checkpoint at all\n"
    elif case == "code":
        torch.save({"model": Evil()}, path)
        content = path.read_bytes()
    elif case == "code, old format":
        content = pickle.dumps({"model": Evil()}, protocol=2)
    elif case == "collaborative":
        content = (window_model / "checkpoint_last.pt").read_bytes()
    if case != "missing":
        path.write_bytes(content)
    if case == "other architecture":
        state["cfg"]["model"].arch = state["cfg"]["model"]._name = "lstm"
    elif case == "nan":
        state["model"]["encoder.layers.0.self_attn.k_proj.weight"][0, 0] = float("nan")
    elif case == "pruned":
        key = "decoder.layers.1.encoder_attn.q_proj.weight"
        state["model"][key] = state["model"][key][:48]
    if case in ("other architecture", "nan", "pruned"):
        torch.save(state, path)
    if case == "key dim":
        flags = ["--key-dim", 65]
    elif case == "itself":
        output = path
    elif case == "exists":
        output.write_text("precious")
    elif case == "several":
        flags = ["--key-dim", 0, "--attention", "crss"]
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert convert("--path", path, "--output", output, *flags) == 1
    error = capsys.readouterr().err
    assert error.startswith("fairseq-collab-convert: error: ") and error.count("\n") == 1 + sentence.count("\n")
    assert re.search(sentence, error.rstrip()), error
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
