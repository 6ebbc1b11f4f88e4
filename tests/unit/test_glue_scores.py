"""Scores, prediction files, recipes and the table of scripts/glue.py; no model runs here."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import glue  # noqa: E402
import glue_models  # noqa: E402
import glue_scores  # noqa: E402
import glue_table  # noqa: E402

from data_prep.glue_files import TASKS  # noqa: E402
from fairseq_collab.errors import CollabError  # noqa: E402

TRUE = [1, 1, 1, 0, 0, 0, 1, 0]
PREDICTED = [1, 1, 0, 0, 0, 1, 1, 0]  # three of four positives found, one of four negatives taken for one


def test_scores_are_those_of_the_definitions():
    assert glue_scores.score("SST-2", PREDICTED, TRUE) == {"accuracy": 75.0}
    # true positives 3, false 1, true negatives 3, false 1
    assert glue_scores.score("CoLA", PREDICTED, TRUE)["matthews"] == pytest.approx(100 * (3 * 3 - 1 * 1) / 16)
    assert glue_scores.score("MRPC", PREDICTED, TRUE) == pytest.approx({"f1": 100 * 6 / 8, "accuracy": 75.0})
    predicted, true = [0.0, 1.0, 4.0, 2.0], [0.0, 2.5, 3.0, 2.0]
    centred = [[value - sum(side) / 4 for value in side] for side in (predicted, true)]
    product = sum(a * b for a, b in zip(*centred, strict=True))
    pearson = product / math.sqrt(math.prod(sum(value**2 for value in side) for side in centred))
    found = glue_scores.score("STS-B", predicted, true)
    assert found == pytest.approx({"pearson": 100 * pearson, "spearman": 80.0})


def test_every_task_has_the_metrics_that_glue_reports():
    names = {task: tuple(metrics) for task, metrics in glue_scores.METRICS.items()}
    assert names.keys() == TASKS.keys() == glue_models.RECIPES.keys()
    assert names["CoLA"] == ("matthews",) and names["STS-B"] == ("pearson", "spearman")
    assert names["MRPC"] == names["QQP"] == ("f1", "accuracy")
    assert {names[task] for task in ("SST-2", "MNLI", "QNLI", "RTE")} == {("accuracy",)}


def test_predictions_that_are_all_the_same_score_zero_and_are_valid_json():
    found = glue_scores.score("STS-B", [1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) | glue_scores.score("CoLA", [1] * 8, TRUE)
    assert found == {"pearson": 0.0, "spearman": 0.0, "matthews": 0.0}
    assert glue_scores.score("MRPC", [0] * 8, TRUE) == {"f1": 0.0, "accuracy": 50.0}


@pytest.mark.parametrize(
    ("task", "split", "name"),
    [("CoLA", "test", "CoLA.tsv"), ("MNLI", "test", "MNLI-m.tsv"), ("MNLI", "test1", "MNLI-mm.tsv")],
)
def test_prediction_files_are_named_as_the_server_wants(task, split, name):
    assert glue_scores.file_name(task, split) == name


def test_prediction_files_hold_label_names_or_clipped_scores():
    mnli = glue_scores.prediction_text([2, 0], TASKS["MNLI"].labels)
    assert mnli == "index\tprediction\n0\tentailment\n1\tcontradiction\n"
    assert glue_scores.prediction_text([1, 0], ("0", "1")) == "index\tprediction\n0\t1\n1\t0\n"
    scores = glue_scores.prediction_text([-0.1, 2.34567, 5.2], ())
    assert scores == "index\tprediction\n0\t0.00000\n1\t2.34567\n2\t5.00000\n"


def test_labels_of_test_are_read_and_a_wrong_line_is_named(tmp_path):
    path = tmp_path / "gold.tsv"
    path.write_text("index\tlabel\n0\tentailment\n1\tnot_entailment\n")
    assert glue_scores.read_gold(path, TASKS["RTE"].labels) == [0.0, 1.0]
    with pytest.raises(CollabError, match="line 2 is .*, expected 0, a tab, and a number"):
        glue_scores.read_gold(path, ())
    path.write_text("index\tlabel\n0\t1.5\n2\t3\n")
    with pytest.raises(CollabError, match="line 3 is '2.t3', expected 1, a tab, and a number"):
        glue_scores.read_gold(path, ())
    with pytest.raises(CollabError, match="there is no such file"):
        glue_scores.read_gold(tmp_path / "nowhere", ())


STAGES_AFTER = ("converted", "finetuned")


def result(task: str, seed: int, key_dim: int | None, stage: str, **scores: dict) -> dict:
    return {"task": task, "seed": seed, "key_dim": key_dim, "stage": stage, "scores": scores}


RESULTS = [
    result("MRPC", 1, None, "original", valid={"f1": 90.0, "accuracy": 80.0}),
    result("MNLI", 1, None, "original", valid={"accuracy": 84.0}, valid1={"accuracy": 86.0}),
    result("MRPC", 1, 8, "finetuned", valid={"f1": 70.0, "accuracy": 60.0}),
    result("MRPC", 2, 8, "finetuned", valid={"f1": 72.0, "accuracy": 64.0}),
    result("MRPC", 1, 8, "converted", valid={"f1": 50.0, "accuracy": 40.0}),
    result("MRPC", 1, 16, "converted", valid={"f1": 51.0, "accuracy": 41.0}),
    result("MNLI", 1, 16, "converted", valid={"accuracy": 70.0}, valid1={"accuracy": 71.0}),
]


def test_table_has_the_original_first_then_key_dims_before_and_after():
    tasks = ["MRPC", "MNLI"]
    rows = glue_table.make_rows(RESULTS, tasks)
    assert [(row["key_dim"], row["stage"]) for row in rows] == [
        (None, "original"),
        (16, "converted"),
        (8, "converted"),
        (8, "finetuned"),
    ]
    assert rows[0]["average"] == pytest.approx((85 + 85) / 2)
    assert rows[3]["tasks"]["MRPC"] == [71.0, 62.0] and rows[3]["average"] is None
    json.dumps(rows)
    lines = glue_table.markdown(rows, tasks).splitlines()
    assert lines[0] == "| key dim |  | MRPC | MNLI | average |"
    assert lines[2] == "|  | original | 90.0/80.0 | 84.0/86.0 | 85.00 |"
    assert lines[5] == "| 8 | fine-tuned again | 71.0/62.0 |  |  |"
    assert lines[-1].endswith("MRPC F1/accuracy, MNLI matched/mismatched accuracy. Seeds: 1, 2 (means).")


def test_rows_from_the_weights_alone_follow_those_of_their_key_dim():
    plain = [result("MRPC", 1, 8, f"plain-{stage}", valid={"f1": 1.0, "accuracy": 2.0}) for stage in STAGES_AFTER]
    rows = glue_table.make_rows([*plain, *RESULTS], ["MRPC"])
    assert [row["stage"] for row in rows if row["key_dim"] == 8] == [*STAGES_AFTER, *(one["stage"] for one in plain)]
    assert "| 8 | converted from the weights alone | 1.0/2.0 | 1.50 |" in glue_table.markdown(rows, ["MRPC"])


def test_picture_is_drawn_where_there_are_averages(tmp_path):
    pytest.importorskip("matplotlib")
    assert glue_table.plot(glue_table.make_rows(RESULTS, ["MRPC"]), tmp_path / "table.png")
    assert [path.name for path in tmp_path.iterdir()] == ["table.png"]
    assert not glue_table.plot(glue_table.make_rows(RESULTS[:2], ["MRPC"]), tmp_path / "none.png")


def test_a_recipe_counts_its_updates_and_its_warm_up():
    flags = glue_models.RECIPES["CoLA"].flags(examples=100)
    values = dict(zip(flags[::2], flags[1::2], strict=False))
    assert values["--total-num-update"] == str(10 * 7) and values["--warmup-updates"] == "4"
    assert values["--best-checkpoint-metric"] == "mcc" and "--report-mcc" in flags
    changed = glue_models.RECIPES["CoLA"].overridden(lr=1e-5, epochs=2, batch=None, warmup=0.5)
    assert (changed.lr, changed.epochs, changed.batch, changed.warmup) == (1e-5, 2, 16, 0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": 0.0}, "--lr 0"),
        ({"epochs": 0}, "--epochs 0"),
        ({"batch": 0}, "--batch 0"),
        ({"warmup": 1.0}, "--warmup 1"),
    ],
)
def test_a_recipe_out_of_range_is_refused(given, message):
    with pytest.raises(CollabError, match=f"{message} is out of range"):
        glue_models.RECIPES["RTE"].overridden(**given)


@pytest.mark.parametrize(("kind", "arch"), glue_models.HF_ARCHITECTURES.items())
def test_a_hugging_face_folder_gets_the_architecture_of_its_type(tmp_path, kind, arch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    model = glue_models.find_model(tmp_path)
    assert model.vocabulary == ("--hf-model", tmp_path)
    assert model.first == ["--arch", arch, "--hf-model", str(tmp_path)]
    assert model.again(Path("c.pt")) == ["--arch", arch, "--finetune-from-model", "c.pt"]


def save_roberta(path: Path, arch: str, **options: object) -> None:
    args = Namespace(arch=arch, encoder_embed_dim=32, encoder_layers=2, tokens_per_sample=64, **options)
    torch.save({"model": {}, "args": args}, path)


def test_a_roberta_keeps_its_sizes_with_both_kinds_of_heads(tmp_path):
    save_roberta(tmp_path / "model.pt", "roberta_base")
    model = glue_models.find_model(tmp_path)
    assert model.vocabulary == ("--roberta", tmp_path)
    first, again = model.first, model.again(Path("c.pt"))
    for flags, arch in ((first, "roberta"), (again, "roberta_collab")):
        assert flags[:2] == ["--arch", arch]
        for flag, value in (("--encoder-embed-dim", "32"), ("--encoder-layers", "2"), ("--max-positions", "64")):
            assert flags[flags.index(flag) + 1] == value
    assert first[-2:] == ["--finetune-from-model", str(tmp_path / "model.pt")]
    assert again[-4:] == ["--collab-config", "c.pt", "--finetune-from-model", "c.pt"]


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(CollabError, match="there is no such folder"):
        glue_models.find_model(tmp_path / "nowhere")
    with pytest.raises(CollabError, match="has neither config.json .* nor model.pt"):
        glue_models.find_model(tmp_path)
    save_roberta(tmp_path / "model.pt", "roberta_collab_base", collab_config="{}")
    with pytest.raises(CollabError, match="is a roberta_collab_base model; give a RoBERTa"):
        glue_models.find_model(tmp_path)
    save_roberta(tmp_path / "model.pt", "transformer")
    with pytest.raises(CollabError, match="is a transformer model; give a RoBERTa"):
        glue_models.find_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(CollabError, match="model_type 'gpt2'; there are architectures for bert, distilbert, albert"):
        glue_models.find_model(tmp_path)


def dims(*arguments: str) -> list[int]:
    return glue.key_dims_of(glue.build_parser().parse_args(["table", "--out", "o", *arguments]))


def test_key_dims_have_two_spellings():
    assert dims() == [768, 384, 256, 128]
    assert dims("--key-dims", "16,64,16") == [64, 16]
    assert dims("--mix_heads", "--mix_size", "64") == [64]
    for wrong in (["--mix_size", "64"], ["--mix_heads"]):
        with pytest.raises(CollabError, match="belong together"):
            dims(*wrong)
    with pytest.raises(CollabError, match="another spelling"):
        dims("--mix_heads", "--mix_size", "64", "--key-dims", "64")
    with pytest.raises(CollabError, match="give positive whole numbers"):
        dims("--key-dims", "64,half")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table"], "--model DIR and --raw DIR are missing; or give --tiny"),
        (["table", "--tiny", "--model", "."], "--tiny brings its own model and files"),
        (["table", "--model", ".", "--raw", ".", "--tasks", "WNLI"], "--tasks has WNLI; known are all, CoLA"),
        (["table", "--model", ".", "--raw", ".", "--seeds", "0"], "the seeds are '0'"),
        (["finetune", "--model", "{tmp}", "--data", "."], "has neither config.json"),
        (["finetune", "--model", "{hf}", "--data", "{tmp}"], "has no preparation.json; make it with python -m"),
        (["finetune", "--model", "{hf}", "--data", "{data}", "--key-dim", "8"], "--from FINETUNED.pt and --key-dim R"),
        (["finetune", "--model", "{hf}", "--data", "{data}", "--from", "c.pt"], "--from FINETUNED.pt and --key-dim R"),
        (["evaluate", "--path", "nowhere.pt", "--data", "{data}"], "there is no checkpoint"),
        (["evaluate", "--path", "nowhere.pt", "--data", "{tmp}"], "has no preparation.json"),
    ],
)
def test_wrong_options_are_one_sentence(tmp_path, capsys, arguments, message):
    places = {name: tmp_path / name for name in ("hf", "data", "tmp")}
    for folder in places.values():
        folder.mkdir()
    (places["hf"] / "config.json").write_text('{"model_type": "bert"}')
    (places["data"] / "preparation.json").write_text('{"task": "RTE", "labels": ["a", "b"], "splits": {}}')
    given = [argument.format(**places) for argument in arguments]
    assert glue.main([*given, "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err.splitlines()
    assert error[-1].startswith("glue.py: error: ") and message in error[-1]
