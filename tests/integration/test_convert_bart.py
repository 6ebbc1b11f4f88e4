"""``fairseq-collab-convert`` on BART and mBART: every hypothesis kept, calibrated, distilled, there and back."""

import shutil

import pytest
import torch
from _tools import SMALL_ENCODER, assert_flags_rebuild, denoising_flags, shaken, train_flags

import fairseq_collab  # noqa: F401 (lets torch.load accept fairseq's checkpoints)
from fairseq_collab.cli.convert import main

SIZES = (*SMALL_ENCODER, "--decoder-layers", 2, "--decoder-attention-heads", 4)
POSITIONS = ("--max-source-positions", 64, "--max-target-positions", 64)
BEAMS = ("--beam", 4, "--max-len-b", 20)


@pytest.fixture(scope="module")
def denoiser(train_stock):
    return train_stock("bart_base", *denoising_flags(), "--max-epoch", 10)


@pytest.fixture(scope="module", params=("bart_base", "mbart_base_wmt20"))
def translator(request, train_stock):
    return shaken(train_stock(request.param, *train_flags(), *SIZES, *POSITIONS))


def words(finished):
    return {number: text for number, (text, _) in finished.hypotheses().items()}


@pytest.mark.parametrize("calibrated", (False, True), ids=("weights", "calibrated"))
def test_an_uncompressed_bart_keeps_every_hypothesis(convert, generate, translator, toy_data, tmp_path, calibrated):
    text = ("--calibrate", toy_data, "--calibrate-sentences", 50) if calibrated else ()
    convert(translator, "--key-dim", 64, *text)
    expected = words(generate(translator, *BEAMS))
    assert len(set(expected.values())) > 10
    assert words(generate(tmp_path / "converted.pt", *BEAMS)) == expected


def test_a_denoising_model_is_calibrated_and_distilled(convert, denoiser, toy_data):
    text = ("--calibrate", toy_data, "--calibrate-sentences", 100, "--data", toy_data)
    report, printed = convert(denoiser, "--key-dim", 16, *text, "--refine-steps", 20, "--distill-steps", 20)
    assert len(report["rows"]) == 6
    assert 0 < report["divergence"][1] <= report["divergence"][0]
    assert all(0 < row["score_error"] < 1 for row in report["rows"])
    again, _ = convert(denoiser, "--key-dim", 16, *text, "--refine-steps", 20, "--distill-steps", 20)
    assert again["bits_per_token"] == report["bits_per_token"] and again["divergence"] == report["divergence"]
    assert "--task denoising" in printed and "key cache" in printed


def test_mbart_s_languages_are_counted_and_text_without_a_target_side_is_translated(
    convert, generate, train_stock, toy_data, tmp_path
):
    task = ("--task", "translation_from_pretrained_bart", "--langs", "src,tgt", "--source-lang", "src")
    flags = (*train_flags(), *SIZES, *POSITIONS, *task, "--target-lang", "tgt")
    path = shaken(train_stock("mbart_base", *flags), 0.1)
    source = tmp_path / "source"
    source.mkdir()
    for file in (*toy_data.glob("dict.*.txt"), *toy_data.glob("train.src-tgt.src.*")):
        shutil.copy(file, source)
    text = ("--calibrate", source, "--calibrate-sentences", 60, "--distill-steps", 10)
    report, printed = convert(path, "--key-dim", 16, *text, "--data", toy_data, "--bleu")
    assert 0 < report["divergence"][1] <= report["divergence"][0]
    assert len(report["bleu"]) == 2
    assert "--arch mbart_collab_large" in printed and "--langs src,tgt" in printed
    convert(path, "--key-dim", 64)
    more = (*task, "--target-lang", "tgt", *BEAMS)
    assert words(generate(tmp_path / "converted.pt", *more)) == words(generate(path, *more))


def test_there_and_back_is_stock_and_keeps_every_hypothesis(convert, generate, translator, tmp_path):
    converted, back = tmp_path / "converted.pt", tmp_path / "back.pt"
    convert(translator, "--key-dim", 16)
    assert main(["--to-concatenated", "--path", str(converted), "--output", str(back)]) == 0
    state = torch.load(back)
    assert not any("mixing" in key or key.endswith(".pick") for key in state["model"])
    assert "collab" not in state["cfg"]["model"].arch
    assert words(generate(back, *BEAMS)) == words(generate(converted, *BEAMS))


def test_the_printed_flags_rebuild_a_denoising_model(convert, fairseq, denoiser, toy_data, plugin_dir, tmp_path):
    _, printed = convert(denoiser, "--key-dim", 16)
    assert_flags_rebuild(fairseq, printed, toy_data, plugin_dir, tmp_path)


def test_the_printed_flags_rebuild_a_translating_model(convert, fairseq, translator, toy_data, plugin_dir, tmp_path):
    _, printed = convert(translator, "--key-dim", 16)
    assert_flags_rebuild(fairseq, printed, toy_data, plugin_dir, tmp_path)
