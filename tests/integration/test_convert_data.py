"""``fairseq-collab-convert`` with text: calibrated, refined, distilled, evaluated, reported; bad text refused."""

import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from _tools import SMALL, key_dims, weights_of

from fairseq_collab.cli.convert import main

FLAGS = ("--encoder-normalize-before", "--decoder-normalize-before", "--max-epoch", 25)
FILES = {"report.json", "errors.png", "mixing.png", "curves.png"}


@pytest.fixture(scope="module")
def stock_model(train):
    """The checkpoint of an ordinary transformer, pre-norm, with its moving average."""
    return train("stock", "--arch", "transformer_tiny", *SMALL[2:], *FLAGS, "--store-ema") / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def language_model(fairseq, toy_data, plugin_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    fairseq(
        *("train", toy_data, "--user-dir", plugin_dir, "--save-dir", folder, "--task", "language_modeling", "--cpu"),
        *("--arch", "transformer_lm_gpt2_tiny", "--decoder-attention-heads", 4, "--tokens-per-sample", 32),
        *("--optimizer", "adam", "--lr", 0.005, "--max-tokens", 800, "--max-epoch", 5, "--num-workers", 0),
    )
    return folder / "checkpoint_last.pt"


def test_text_brings_the_model_closer_to_the_original(convert, stock_model, toy_data, tmp_path):
    text = ("--key-dim", 16, "--calibrate", toy_data, "--calibrate-sentences", 200, "--data", toy_data)
    plain, _ = convert(stock_model, "--key-dim", 16, "--data", toy_data)
    weighted, _ = convert(stock_model, *text)
    refined, _ = convert(stock_model, *text, "--refine-steps", 60)
    distilled, printed = convert(stock_model, *text, "--refine-steps", 60, "--distill-steps", 40, "--bleu")
    original = plain["bits_per_token"][0]
    losses = [report["bits_per_token"][1] - original for report in (plain, weighted, distilled)]
    assert losses[1] < losses[0] and losses[2] < losses[0]
    for row in refined["rows"]:
        assert row["output_error"] <= row["output_error_before"]
    assert any(row["output_error"] < row["output_error_before"] for row in refined["rows"])
    # with so little text it may gain nothing on what is held out, but never lose
    assert 0 < distilled["divergence"][1] <= distilled["divergence"][0]
    for shown in ("score error", "output error", "perplexity on valid: ", "BLEU: ", "key cache", "file size in MB"):
        assert shown in printed
    assert "|attn:encoder+cross+decoder|calib:200|refine:60|distill:40|seed:0|eval:valid|version:" in printed
    assert {file.name for file in (tmp_path / "report").iterdir()} == FILES


def test_the_loss_it_prints_is_fairseq_s(convert, fairseq, stock_model, toy_data, plugin_dir, tmp_path):
    report, _ = convert(stock_model, "--key-dim", 24, "--data", toy_data)
    for path, bits in zip((stock_model, tmp_path / "converted.pt"), report["bits_per_token"], strict=True):
        done = fairseq(
            *("validate", toy_data, "--user-dir", plugin_dir, "--path", path, "--cpu", "--max-tokens", 800),
            *("--task", "translation", "--num-workers", 0, "--required-batch-size-multiple", 1),
        )
        assert float(re.findall(r"\| loss ([\d.]+)", done.stdout)[-1]) == pytest.approx(bits, abs=2e-3)


@pytest.mark.parametrize("flags", (("--method", "svd"), ("--method", "parafac"), ("--mix-layout", "dense")))
def test_other_methods_and_dense_mixing_are_calibrated_too(convert, stock_model, toy_data, flags):
    text = ("--calibrate", toy_data, "--calibrate-sentences", 100)
    report, printed = convert(stock_model, "--key-dim", 16, *flags, *text)
    plain, _ = convert(stock_model, "--key-dim", 16, *flags)
    for row, uncalibrated in zip(report["rows"], plain["rows"], strict=True):
        assert 0 < row["score_error"] < row["weight_error"] and uncalibrated["score_error"] is None
    assert f"conv:{flags[1] if flags[0] == '--method' else 'cp'}|R:16" in printed


@pytest.mark.parametrize("share", (0.2, 0.5))
def test_budgets_choose_key_dims_by_layer_and_are_kept(convert, load, stock_model, toy_data, tmp_path, share):
    text = ("--calibrate", toy_data, "--calibrate-sentences", 100)
    report, printed = convert(stock_model, "--budget", share, *text)
    before, after = report["key_query_parameters"]
    assert 0.8 * share * before < after <= share * before
    dims = [row["key_dim"] for row in report["rows"]]
    assert len(set(dims)) > 1 and f"|R:{min(dims)}-{max(dims)}|" in printed and f"|budget:{share}" in printed
    (model,) = load(tmp_path / "converted.pt")
    assert sorted(key_dims(model).values()) == sorted(dims)


def test_error_bounds_hold_after_the_fit(convert, stock_model, toy_data):
    report, _ = convert(stock_model, "--max-error", 0.3)
    assert all(row["weight_error"] <= 0.3 for row in report["rows"])
    report, _ = convert(stock_model, "--max-error", 0.2, "--calibrate", toy_data, "--calibrate-sentences", 100)
    assert all(row["score_error"] <= 0.2 for row in report["rows"])


def test_text_without_a_target_side_is_translated_by_the_model_itself(convert, stock_model, toy_data, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for file in toy_data.glob("dict.*.txt"):
        shutil.copy(file, source)
    for file in toy_data.glob("train.src-tgt.src.*"):
        shutil.copy(file, source)
    report, _ = convert(
        *(stock_model, "--key-dim", 16, "--calibrate", source, "--calibrate-sentences", 300, "--distill-steps", 60),
    )
    assert 0 < report["divergence"][1] <= report["divergence"][0]


def test_language_models_are_calibrated_and_distilled(convert, language_model, toy_data):
    text = ("--calibrate", toy_data, "--calibrate-sentences", 40, "--data", toy_data)
    report, printed = convert(language_model, "--key-dim", 16, *text, "--refine-steps", 30, "--distill-steps", 30)
    assert {row["name"] for row in report["rows"]} == {"decoder.layers.0.self_attn", "decoder.layers.1.self_attn"}
    assert all(row["output_error"] < row["output_error_before"] for row in report["rows"])
    assert report["divergence"][1] < report["divergence"][0] and len(report["bits_per_token"]) == 2
    assert "fairseq-eval-lm" in printed and report["cache_bytes"][0][1] == 0


def test_the_moving_average_is_converted_on_request(convert, stock_model, tmp_path):
    convert(stock_model, "--key-dim", 64)
    plain = torch.load(tmp_path / "converted.pt")
    convert(stock_model, "--key-dim", 64, "--ema")
    average = torch.load(tmp_path / "converted.pt")
    wanted = torch.load(stock_model)["extra_state"]["ema"]
    assert "ema" not in average["extra_state"] and "ema" not in plain["extra_state"]
    for key in ("encoder.embed_tokens.weight", "decoder.layers.1.fc1.weight"):
        assert torch.equal(average["model"][key], wanted[key])
        assert not torch.equal(average["model"][key], plain["model"][key])
    tied = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "decoder.output_projection.weight")
    for state in (plain, average):
        assert len({state["model"][key].data_ptr() for key in tied}) == 1


def test_half_precision_stays_half_precision(convert, generate, stock_model, toy_data, tmp_path):
    state = torch.load(stock_model)
    state["model"] = {k: v.half() if v.is_floating_point() else v for k, v in state["model"].items()}
    torch.save(state, tmp_path / "half.pt")
    report, _ = convert(tmp_path / "half.pt", "--key-dim", 16, "--calibrate", toy_data, "--refine-steps", 5)
    new = torch.load(tmp_path / "converted.pt")["model"]
    assert {tensor.dtype for key, tensor in new.items() if "attn" in key and "pick" not in key} == {torch.float16}
    assert report["cache_bytes"] == [[2 * 2 * 64] * 2, [2 * 2 * 16] * 2]
    assert len(generate(tmp_path / "converted.pt", "--beam", 2).hypotheses()) == 30


def test_same_seed_same_checkpoint_and_the_original_is_not_touched(convert, stock_model, toy_data, tmp_path):
    before = stock_model.read_bytes()
    flags = ("--key-dim", 16, "--calibrate", toy_data, "--calibrate-sentences", 64, "--refine-steps", 5)
    models = []
    for seed in (0, 0, 1):
        convert(stock_model, *flags, "--seed", seed)
        models.append(weights_of(tmp_path / "converted.pt"))
    assert stock_model.read_bytes() == before
    equal = [all(torch.equal(models[0][key], other[key]) for key in models[0]) for other in models[1:]]
    assert equal == [True, False]


def test_an_interrupted_conversion_leaves_nothing(stock_model, toy_data, fairseq_env, tmp_path):
    output = tmp_path / "out" / "converted.pt"
    command = [sys.executable, "-m", "fairseq_collab.cli.convert", "--path", stock_model, "--output", output]
    command += ["--key-dim", 16, "--calibrate", toy_data, "--refine-steps", 100000, "--report", tmp_path / "out"]
    process = subprocess.Popen(
        [str(part) for part in command],
        stderr=subprocess.PIPE,
        text=True,
        env=fairseq_env(),
        # tests that run in the background of a shell ignore interrupts, and so would their children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    shown = ""
    while "refining" not in shown and process.poll() is None:
        shown += process.stderr.read(1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; nothing was written" in rest
    assert not output.parent.exists()


def other_dictionary(toy_data, folder, *, size=None, words=None):
    shutil.copytree(toy_data, folder)
    for file in folder.glob("dict.*txt"):
        lines = file.read_text().splitlines()
        lines = lines[:size] if size else [words + line for line in lines]
        file.write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    "case, sentences",
    (
        ("shorter dictionary", ["dict.src.txt has 44 entries, the encoder embeddings of the model 128"]),
        ("other words", ["dict.src.txt is as long as the model's dictionary but differs from"]),
        ("no folder", ["there is no such folder"]),
        ("no dictionary", ["has no binarised text of two languages; give a folder that fairseq-preprocess made"]),
        ("no split", ["has no split train; it has"]),
        ("no gpu", ["--device cuda: there is no GPU"]),
        (
            "many",
            [
                "--key-dim, --budget and --max-error exclude each other",
                "--budget is 2; it must be a share between 0 and 1",
                "--calibrate-sentences is 0; it must be at least 2",
                "--refine-steps needs text to train on",
                "--bleu needs text to translate",
                "there is no checkpoint",
            ],
        ),
        ("no space", ["needs up to", "left; make room or give another folder"]),
    ),
)
def test_what_cannot_be_done_is_told_before_work_starts(
    stock_model, toy_data, tmp_path, capsys, monkeypatch, case, sentences
):
    flags = ["--key-dim", 16, "--calibrate", toy_data]
    path = stock_model
    if case == "shorter dictionary":
        flags[3] = other_dictionary(toy_data, tmp_path / "other", size=40)
    elif case == "other words":
        flags[3] = other_dictionary(toy_data, tmp_path / "other", words="x")
    elif case == "no folder":
        flags[3] = tmp_path / "nowhere"
    elif case == "no dictionary":
        flags[3] = tmp_path
    elif case == "no split":
        shutil.copytree(toy_data, tmp_path / "other", ignore=shutil.ignore_patterns("train*"))
        flags[3] = tmp_path / "other"
    elif case == "no gpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        flags += ["--device", "cuda"]
    elif case == "many":
        path = tmp_path / "missing.pt"
        flags = ["--key-dim", 16, "--budget", 2, "--refine-steps", 5, "--calibrate-sentences", 0, "--bleu"]
    elif case == "no space":
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    arguments = ["--path", path, "--output", tmp_path / "out.pt", *flags]
    assert main([str(argument) for argument in arguments]) == 1
    _, _, reasons = capsys.readouterr().err.strip().partition("fairseq-collab-convert: error: ")
    assert case != "many" or len(reasons.splitlines()) == len(sentences)
    for sentence in sentences:
        assert sentence in reasons
    assert not (tmp_path / "out.pt").exists()
