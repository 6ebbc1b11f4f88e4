"""``fairseq-collab-convert`` on RoBERTa: masked language models and classifiers, of today and of old versions."""

import re
import shutil
from argparse import Namespace

import pytest
import torch
from _tools import assert_flags_rebuild, attentions, classifier_flags, encoder_flags, shaken

import fairseq_collab  # noqa: F401 (lets torch.load accept fairseq's checkpoints)
from fairseq_collab.cli.convert import main

HEAD = "sentence_classification_head"


@pytest.fixture(scope="module")
def masked_lm(train_stock):
    return train_stock("roberta", *encoder_flags(), "--max-epoch", 12)


@pytest.fixture(scope="module")
def classifier(train_stock, toy_classes, masked_lm):
    flags = (*classifier_flags(), "--finetune-from-model", masked_lm, "--max-epoch", 8, "--lr", 0.002)
    return train_stock("roberta", *flags, data=toy_classes)


@pytest.fixture(scope="module")
def prenorm(train_stock):
    return shaken(train_stock("roberta_prenorm", *encoder_flags()))


def sentences():
    tokens = torch.randint(4, 40, (4, 9), generator=torch.Generator().manual_seed(3))
    tokens[:, 0] = 0
    tokens[1, 6:] = 1
    return tokens


def logits(model, **kwargs):
    """What a model without a decoder answers at every token that is no padding, in float64."""
    tokens = sentences()
    with torch.no_grad():
        found, _ = model.double()(tokens, **kwargs)
    return found[tokens.ne(1)] if found.dim() == 3 else found


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


def test_text_brings_a_roberta_closer_to_the_original(convert, load, prenorm, toy_data, tmp_path):
    text = ("--calibrate", toy_data, "--calibrate-sentences", 200)
    steps = ("--refine-steps", 40, "--distill-steps", 30, "--data", toy_data)
    expected = logits(load(prenorm)[0]).log_softmax(-1)
    reports, distances = [], []
    for flags in ((), text, (*text, *steps)):
        report, printed = convert(prenorm, "--key-dim", 16, *flags)
        reports.append(report)
        found = logits(load(tmp_path / "converted.pt")[0]).log_softmax(-1)
        distances.append(torch.nn.functional.kl_div(found, expected, log_target=True, reduction="batchmean").item())
    plain, weighted, distilled = distances
    assert max(weighted, distilled) < plain, distances
    assert all(0 < row["score_error"] < row["weight_error"] for row in reports[1]["rows"])
    for row in reports[2]["rows"]:
        assert row["output_error"] < row["output_error_before"]
    assert 0 < reports[2]["divergence"][1] < reports[2]["divergence"][0]
    assert "|attn:encoder|calib:200|refine:40|distill:30|" in printed and "loss on valid, bits a token" in printed
    assert "key cache" not in printed and "fairseq-validate" in printed


def test_the_loss_it_prints_is_fairseq_s(convert, fairseq, masked_lm, classifier, toy_data, toy_classes, plugin_dir):
    for path, data in ((masked_lm, toy_data), (classifier, toy_classes)):
        report, printed = convert(path, "--key-dim", 24, "--data", data)
        command = re.search(r"use:       fairseq-(.*)", printed).group(1).split()
        flags = ("--cpu", "--num-workers", 0, "--required-batch-size-multiple", 1)
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


@pytest.mark.parametrize("variant", ("masked_lm", "classifier"))
def test_there_and_back_is_stock_and_answers_alike(request, convert, load, toy_data, toy_classes, tmp_path, variant):
    converted, back = tmp_path / "converted.pt", tmp_path / "back.pt"
    data = toy_classes if variant == "classifier" else toy_data
    convert(request.getfixturevalue(variant), "--key-dim", 16)
    assert main(["--to-concatenated", "--path", str(converted), "--output", str(back)]) == 0
    state = torch.load(back)
    assert not any("mixing" in key or key.endswith(".pick") for key in state["model"])
    assert state["cfg"]["model"].arch == "roberta"
    expected, found = (logits(load(one, data=str(data))[0]) for one in (converted, back))
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("variant", ("masked_lm", "prenorm", "classifier"))
def test_the_printed_flags_rebuild_the_model(
    request, convert, fairseq, toy_data, toy_classes, plugin_dir, tmp_path, variant
):
    _, printed = convert(request.getfixturevalue(variant), "--key-dim", 16)
    data = toy_classes if variant == "classifier" else toy_data
    assert_flags_rebuild(fairseq, printed, data, plugin_dir, tmp_path)


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
    told = refused(classifier, *small, "--calibrate", toy_classes / "input0")
    assert f"is only a part of the data; give the folder above it, {toy_classes}" in told
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
