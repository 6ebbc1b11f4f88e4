"""``fairseq-collab-convert`` on RoBERTa and BART: exact where it must be, calibrated, distilled, there and back."""

import json
import re
import shutil
from argparse import Namespace

import pytest
import torch
from _tools import SMALL_ENCODER, attentions, classifier_flags, denoising_flags, encoder_flags, shaken, train_flags

import fairseq_collab  # noqa: F401 (lets torch.load accept fairseq's checkpoints)
from fairseq_collab.cli.convert import main

SIZES = (*SMALL_ENCODER, "--decoder-layers", 2, "--decoder-attention-heads", 4)
POSITIONS = ("--max-source-positions", 64, "--max-target-positions", 64)
HEAD = "sentence_classification_head"


@pytest.fixture(scope="module")
def train_stock(fairseq, toy_data, plugin_dir, tmp_path_factory):
    """`train_stock(ARCH, FLAG, ...)` returns the checkpoint of an ordinary model."""

    def run(arch, *flags, data=toy_data):
        folder = tmp_path_factory.mktemp(arch)
        fairseq("train", data, "--user-dir", plugin_dir, "--save-dir", folder, "--arch", arch, *flags)
        return folder / "checkpoint_last.pt"

    return run


@pytest.fixture(scope="module")
def masked_lm(train_stock):
    return train_stock("roberta", *encoder_flags(), "--max-epoch", 25)


@pytest.fixture(scope="module")
def classifier(train_stock, toy_classes, masked_lm):
    flags = (*classifier_flags(), "--finetune-from-model", masked_lm, "--max-epoch", 8, "--lr", 0.002)
    return train_stock("roberta", *flags, data=toy_classes)


@pytest.fixture(scope="module")
def prenorm(train_stock):
    return shaken(train_stock("roberta_prenorm", *encoder_flags()))


@pytest.fixture(scope="module")
def denoiser(train_stock):
    return train_stock("bart_base", *denoising_flags(), "--max-epoch", 10)


@pytest.fixture(scope="module", params=("bart_base", "mbart_base", "mbart_base_wmt20"))
def translator(request, train_stock):
    return shaken(train_stock(request.param, *train_flags(), *SIZES, *POSITIONS))


@pytest.fixture
def convert(tmp_path, capsys):
    """`convert(PATH, FLAG, ...)` writes `converted.pt`, and returns the report and what was printed."""

    def run(path, *flags):
        output, folder = tmp_path / "converted.pt", tmp_path / "report"
        arguments = ["--path", path, "--output", output, "--force", "--report", folder, *flags]
        assert main([str(argument) for argument in arguments]) == 0, capsys.readouterr().err
        return json.loads((folder / "report.json").read_text()), capsys.readouterr().out

    return run


@pytest.fixture
def refused(tmp_path, capsys):
    """As `convert`, for what ends with one sentence and writes nothing; returns the sentence."""

    def run(path, *flags):
        output = tmp_path / "refused.pt"
        assert main([str(argument) for argument in ("--path", path, "--output", output, *flags)]) == 1
        assert not output.exists()
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("fairseq-collab-convert: error: ")
        return error

    return run


def batch():
    tokens = torch.randint(4, 40, (4, 9), generator=torch.Generator().manual_seed(3))
    tokens[:, 0] = 0
    tokens[1, 6:] = 1
    return tokens


def logits(model, **kwargs):
    """What a model without a decoder answers at every token that is no padding, in float64."""
    tokens = batch()
    with torch.no_grad():
        found, _ = model.double()(tokens, **kwargs)
    return found[tokens.ne(1)] if found.dim() == 3 else found


def words(finished):
    return {number: text for number, (text, _) in finished.hypotheses().items()}


def old_names(state, task, data):
    """The checkpoint as fairseq 0.8 wrote it: options in ``args``, RoBERTa's weights under ``decoder``."""
    options = {key: value for key, value in state["cfg"]["task"].items() if key not in ("_name", "data")}
    args = {**options, **vars(state["cfg"]["model"]), "task": task, "data": str(data)}
    weights = state["model"]
    for key in [key for key in weights if key.endswith("k_proj.weight")]:
        prefix = key.removesuffix(".k_proj.weight")
        for kind in ("weight", "bias"):
            parts = [weights.pop(f"{prefix}.{name}_proj.{kind}") for name in "qkv"]
            weights[f"{prefix}.in_proj_{kind}"] = torch.cat(parts)
    renamed = {}
    for key, tensor in weights.items():
        new = re.sub(r"^encoder\.", "decoder.", key)
        renamed[new.replace(".layernorm_embedding.", ".emb_layer_norm.")] = tensor
    return {**state, "cfg": None, "args": Namespace(**args), "model": renamed}


@pytest.mark.parametrize("calibrated", (False, True), ids=("weights", "calibrated"))
@pytest.mark.parametrize("variant", ("masked_lm", "prenorm"))
def test_an_uncompressed_roberta_predicts_what_it_did(request, convert, load, toy_data, tmp_path, variant, calibrated):
    path = request.getfixturevalue(variant)
    text = ("--calibrate", toy_data, "--calibrate-sentences", 50) if calibrated else ()
    _, printed = convert(path, "--key-dim", 64, *text)
    before, after = (load(one)[0] for one in (path, tmp_path / "converted.pt"))
    expected, found = logits(before), logits(after)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    # weights are stored in float32 on both sides
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert {module.key_dim for module in attentions(after).values()} == {64}
    assert "roberta_collab_prenorm" in printed if variant == "prenorm" else "--arch roberta_collab " in printed


@pytest.mark.parametrize("variant", ("masked_lm", "classifier"))
def test_checkpoints_of_old_versions_convert_alike(request, convert, load, toy_data, toy_classes, tmp_path, variant):
    path = request.getfixturevalue(variant)
    task, data = ("masked_lm", toy_data) if variant == "masked_lm" else ("sentence_prediction", toy_classes)
    state = old_names(torch.load(path), task, data)
    assert any(key.startswith("decoder.sentence_encoder.layers.0.self_attn.in_proj") for key in state["model"])
    state["args"].criterion, state["args"].optimizer = task, "adam"
    torch.save(state, tmp_path / "old.pt")
    kwargs = {"features_only": True, "classification_head_name": HEAD} if variant == "classifier" else {}
    expected = logits(load(path, data=str(data))[0], **kwargs)
    convert(tmp_path / "old.pt", "--key-dim", 64)
    found = logits(load(tmp_path / "converted.pt", data=str(data))[0], **kwargs)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    report, _ = convert(tmp_path / "old.pt", "--key-dim", 16, "--calibrate", data, "--calibrate-sentences", 50)
    assert all(0 < row["score_error"] < 1 for row in report["rows"])


def test_text_brings_a_roberta_closer_to_the_original(convert, masked_lm, toy_data):
    text = ("--calibrate", toy_data, "--calibrate-sentences", 200, "--data", toy_data)
    plain, _ = convert(masked_lm, "--key-dim", 12, "--data", toy_data)
    weighted, _ = convert(masked_lm, "--key-dim", 12, *text)
    distilled, printed = convert(masked_lm, "--key-dim", 12, *text, "--refine-steps", 40, "--distill-steps", 30)
    errors = [sum(row["score_error"] for row in report["rows"]) for report in (weighted, distilled)]
    assert all(0 < row["score_error"] < row["weight_error"] for row in weighted["rows"]) and min(errors) > 0
    for row in distilled["rows"]:
        assert row["output_error"] <= row["output_error_before"]
    assert 0 < distilled["divergence"][1] <= distilled["divergence"][0]
    original = plain["bits_per_token"][0]
    lost = [abs(report["bits_per_token"][1] - original) for report in (plain, weighted, distilled)]
    assert lost[2] <= lost[0] + 0.02
    assert "|attn:encoder|calib:200|refine:40|distill:30|" in printed and "loss on valid, bits a token" in printed
    assert "key cache" not in printed and "fairseq-validate" in printed


def test_the_loss_it_prints_is_fairseq_s(convert, fairseq, masked_lm, classifier, toy_data, toy_classes, plugin_dir):
    for path, data in ((masked_lm, toy_data), (classifier, toy_classes)):
        report, printed = convert(path, "--key-dim", 24, "--data", data)
        command = re.search(r"use:       fairseq-(.*)", printed).group(1).split()
        flags = ("--cpu", "--max-tokens", 800, "--num-workers", 0, "--required-batch-size-multiple", 1)
        command[command.index("--user-dir") + 1] = plugin_dir
        if path == masked_lm:
            command += ["--sample-break-mode", "eos"]
        done = fairseq(*command, *flags)
        loss = float(re.findall(r"\| loss ([\d.]+)", done.stdout)[-1])
        assert loss == pytest.approx(report["bits_per_token"][1], abs=2e-3)
    assert report["unit"] == "sentence" and "loss on valid, bits a sentence" in printed


def test_a_classifier_is_calibrated_and_distilled_and_keeps_its_head(convert, load, classifier, toy_classes, tmp_path):
    unlabelled = tmp_path / "unlabelled"
    shutil.copytree(toy_classes, unlabelled, ignore=shutil.ignore_patterns("train.bin", "train.idx", "valid.*"))
    for kind in ("bin", "idx"):
        shutil.copy(toy_classes / "input0" / f"train.{kind}", unlabelled / "input0")
    text = ("--calibrate", unlabelled, "--calibrate-sentences", 200, "--refine-steps", 20, "--distill-steps", 20)
    report, printed = convert(classifier, "--key-dim", 12, *text)
    assert 0 <= report["divergence"][1] <= report["divergence"][0]
    assert "nats a sentence" in printed
    before, after = torch.load(classifier)["model"], torch.load(tmp_path / "converted.pt")["model"]
    head = [key for key in before if key.startswith("classification_heads.")]
    assert len(head) == 4 and all(torch.equal(before[key], after[key]) for key in head)
    (model,) = load(tmp_path / "converted.pt", data=str(toy_classes))
    assert logits(model, features_only=True, classification_head_name=HEAD).shape == (4, 2)


@pytest.mark.parametrize("calibrated", (False, True), ids=("weights", "calibrated"))
def test_an_uncompressed_bart_keeps_every_hypothesis(
    convert, generate, run_fairseq, translator, toy_data, tmp_path, calibrated
):
    text = ("--calibrate", toy_data, "--calibrate-sentences", 50) if calibrated else ()
    convert(translator, "--key-dim", 64, *text)
    expected = words(generate(translator, "--beam", 4, "--max-len-b", 20))
    assert len(set(expected.values())) > 10
    assert words(generate(tmp_path / "converted.pt", "--beam", 4, "--max-len-b", 20)) == expected


def test_there_and_back_is_stock_and_answers_alike(
    convert, load, generate, masked_lm, classifier, translator, tmp_path
):
    converted, back = tmp_path / "converted.pt", tmp_path / "back.pt"
    for path, arch in ((masked_lm, "roberta"), (classifier, "roberta"), (translator, None)):
        convert(path, "--key-dim", 16)
        assert main(["--to-concatenated", "--path", str(converted), "--output", str(back), "--force"]) == 0
        state = torch.load(back)
        assert not any("mixing" in key or key.endswith(".pick") for key in state["model"])
        assert "collab" not in state["cfg"]["model"].arch
        if arch is None:
            flags = ("--beam", 4, "--max-len-b", 20)
            assert words(generate(back, *flags)) == words(generate(converted, *flags))
            continue
        data = {"data": str(classifier.parent)} if False else {}
        if path == classifier:
            data = {"data": vars(Namespace(**state["cfg"]["task"]))["data"]}
        expected, found = (logits(load(one, **data)[0]) for one in (converted, back))
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_denoising_model_is_calibrated_and_distilled(convert, denoiser, toy_data):
    text = ("--calibrate", toy_data, "--calibrate-sentences", 100, "--data", toy_data)
    report, printed = convert(denoiser, "--key-dim", 16, *text, "--refine-steps", 20, "--distill-steps", 20)
    assert len(report["rows"]) == 6
    assert 0 < report["divergence"][1] <= report["divergence"][0]
    assert all(0 < row["score_error"] < 1 for row in report["rows"])
    again, _ = convert(denoiser, "--key-dim", 16, *text, "--refine-steps", 20, "--distill-steps", 20)
    assert again["bits_per_token"] == report["bits_per_token"] and again["divergence"] == report["divergence"]
    assert "--task denoising" in printed and "key cache" in printed


@pytest.mark.parametrize("variant", ("masked_lm", "prenorm", "classifier", "denoiser", "translator"))
def test_the_printed_flags_rebuild_the_model(
    request, convert, fairseq, toy_data, toy_classes, plugin_dir, tmp_path, variant
):
    path = request.getfixturevalue(variant)
    data = toy_classes if variant == "classifier" else toy_data
    _, printed = convert(path, "--key-dim", 16)
    flags = re.search(r"fairseq-train DATA --user-dir fairseq_collab (.*)", printed).group(1).split()
    fairseq(
        *("train", data, "--user-dir", plugin_dir, "--save-dir", tmp_path / "tuned", *flags, "--lr", 1e-30),
        *("--optimizer", "adam", "--max-tokens", 800, "--max-epoch", 1, "--cpu", "--num-workers", 0),
    )
    before, after = (torch.load(tmp_path / name)["model"] for name in ("converted.pt", "tuned/checkpoint_last.pt"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before if not key.endswith("_float_tensor"))
    first, second = (
        torch.load(tmp_path / name)["cfg"]["model"] for name in ("converted.pt", "tuned/checkpoint_last.pt")
    )
    for option in ("activation_fn", "encoder_normalize_before", "no_scale_embedding", "layernorm_embedding"):
        assert getattr(first, option) == getattr(second, option), option


def test_a_dictionary_without_the_mask_is_told_from_a_wrong_one(refused, convert, masked_lm, toy_data, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for kind in ("bin", "idx"):
        shutil.copy(toy_data / f"train.{kind}", text)
    lines = (toy_data / "dict.txt").read_text().splitlines()
    (text / "dict.txt").write_text("\n".join([*lines, "<mask> 1"]) + "\n")
    convert(masked_lm, "--key-dim", 16, "--calibrate", text, "--calibrate-sentences", 20)
    (text / "dict.txt").write_text("\n".join(lines[:-1]) + "\n")
    told = refused(masked_lm, "--key-dim", 16, "--calibrate", text)
    size = len(lines) + 4
    assert (
        f"dict.txt has {size - 1} entries and the task adds 1, the encoder embeddings of the model {size + 1}" in told
    )


def test_what_cannot_be_done_is_told_beforehand(refused, masked_lm, classifier, toy_data, toy_classes, tmp_path):
    small = ("--key-dim", 16)
    assert "has no input0/dict.txt" in refused(classifier, *small, "--calibrate", toy_data)
    assert "has no dict.txt" in refused(masked_lm, *small, "--calibrate", toy_classes)
    assert "--attention names none of the attentions of this model, encoder" in refused(
        masked_lm, *small, "--attention", "cross"
    )
    told = refused(masked_lm, *small, "--data", toy_data, "--bleu")
    assert "--bleu needs a model that translates, this one was trained for masked_lm" in told
    state = torch.load(classifier)
    state["cfg"]["task"]["regression_target"] = True
    torch.save(state, tmp_path / "regression.pt")
    told = refused(tmp_path / "regression.pt", *small, "--calibrate", toy_classes, "--distill-steps", 5)
    assert "--distill-steps needs predictions of words or classes, this model predicts numbers" in told
    told = refused(tmp_path / "regression.pt", *small, "--data", toy_classes)
    assert "--data measures what classes are given" in told
    state = torch.load(masked_lm)
    state["cfg"]["task"]["_name"] = "multilingual_masked_lm"
    torch.save(state, tmp_path / "other.pt")
    told = refused(tmp_path / "other.pt", *small, "--calibrate", toy_data)
    assert "--calibrate cannot read text for the task multilingual_masked_lm" in told
    assert main(["--path", str(tmp_path / "other.pt"), "--output", str(tmp_path / "out.pt"), "--key-dim", "16"]) == 0
