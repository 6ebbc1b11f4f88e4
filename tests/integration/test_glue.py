"""scripts/glue.py end to end: tiny encoders of transformers and of fairseq, through conversion to the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import _hf as hf  # noqa: E402
from _glue import write_task  # noqa: E402

from data_prep.__main__ import main as prepare  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
LONGER = ("--epochs", 3, "--seed", 5, "--lr", 0.005)


def run_glue(*arguments: Any, check: bool = True) -> subprocess.CompletedProcess:
    finished = subprocess.run(
        [sys.executable, ROOT / "scripts/glue.py", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert finished.returncode == 0 or not check, finished.stdout[-4000:]
    return finished


def prepared(folder: Path, kind: str, task: str) -> tuple[Path, Path]:
    """A tiny model of transformers, and a tiny task for it."""
    hf.make_folder(folder / "model", kind)
    write_task(folder / "raw", task, 40)
    arguments = ["--task", task, "--raw", folder / "raw", "--destdir", folder / "data", "--max-length", 40]
    assert prepare(["glue", *map(str, arguments), "--hf-model", str(folder / "model")]) == 0
    return folder / "model", folder / "data"


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A folder with model/, data/ and, in out/original/, a BERT fine-tuned on pairs."""
    folder = tmp_path_factory.mktemp("glue")
    model, data = prepared(folder, "bert", "STS-B")
    run_glue("finetune", "--data", data, "--model", model, "--out", folder / "out", *LONGER)
    return folder


def predictions(folder: Path) -> list[float]:
    lines = (folder / "STS-B.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction"
    assert [line.split("\t")[0] for line in lines[1:]] == [str(number) for number in range(40)]
    return [float(line.split("\t")[1]) for line in lines[1:]]


def test_fine_tuning_leaves_a_model_scores_and_a_file_for_the_server(original):
    folder = original / "out/original"
    found = result(folder)
    assert (found["task"], found["seed"], found["stage"], found["key_dim"]) == ("STS-B", 5, "original", None)
    assert found["scores"]["valid"].keys() == {"pearson", "spearman"}
    scores = predictions(folder / "predictions")
    assert len(set(scores)) > 10 and all(0 <= score <= 5 for score in scores)
    assert [path.name for path in folder.glob("*.pt")] == ["model.pt"]


def test_a_finished_training_is_not_repeated_and_other_settings_are_refused(original):
    same = ("finetune", "--data", original / "data", "--model", original / "model", "--out", original / "out")
    log = (original / "out/original/train.log").stat()
    again = run_glue(*same, *LONGER)
    assert "original valid: pearson " in again.stdout
    assert (original / "out/original/train.log").stat().st_mtime == log.st_mtime
    other = run_glue(*same, *LONGER, "--epochs", 4, check=False)
    assert other.returncode == 1
    assert "was begun with other settings (epochs 3 and now 4)" in other.stdout.splitlines()[-1]


def test_a_converted_model_is_fine_tuned_again_under_the_papers_flags(original, tmp_path):
    source = original / "out/original/model.pt"
    command = ("finetune", "--data", original / "data", "--model", original / "model", "--out", tmp_path, "--epochs", 1)
    run_glue(*command, "--lr", 0.001, "--from", source, "--mix_heads", "--mix_size", 32)
    converted, again = result(tmp_path / "converted"), result(tmp_path / "finetuned")
    # all of the width's 32 dims: the converted model is the original
    scores = predictions(original / "out/original/predictions")
    assert predictions(tmp_path / "converted/predictions") == pytest.approx(scores, abs=1e-4)
    assert predictions(tmp_path / "finetuned/predictions") != pytest.approx(scores, abs=1e-4)
    assert (converted["key_dim"], again["key_dim"], again["stage"]) == (32, 32, "finetuned")
    import torch

    state = torch.load(tmp_path / "finetuned/model.pt")
    assert "collab_config" in vars(state["cfg"]["model"])
    assert state["last_optimizer_state"] is None


def test_scores_of_a_checkpoint_do_not_depend_on_who_asks(original, tmp_path):
    gold = tmp_path / "gold.tsv"
    own = (original / "out/original/predictions/STS-B.tsv").read_text()
    gold.write_text(own)
    path = original / "out/original/model.pt"
    run_glue("evaluate", "--data", original / "data", "--path", path, "--out", tmp_path / "e", "--gold", gold)
    scores = result(tmp_path / "e")["scores"]
    assert scores["valid"] == result(original / "out/original")["scores"]["valid"]
    # its own predictions taken for the truth
    assert scores["test"] == pytest.approx({"pearson": 100, "spearman": 100}, abs=0.5)
    assert (tmp_path / "e/STS-B.tsv").read_text() == own


def test_data_of_another_task_are_refused(original, tmp_path):
    write_task(tmp_path / "raw", "MNLI", 12)
    arguments = ["--task", "MNLI", "--raw", tmp_path / "raw", "--destdir", tmp_path / "data", "--max-length", 40]
    assert prepare(["glue", *map(str, arguments), "--hf-model", str(original / "model")]) == 0
    path = original / "out/original/model.pt"
    done = run_glue("evaluate", "--data", tmp_path / "data", "--path", path, "--out", tmp_path / "e", check=False)
    assert done.returncode == 1
    assert "has a head of 1 outputs, and MNLI in" in done.stdout.splitlines()[-1]


def settings_of_trainings(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("settings.json") if "epochs" in json.loads(path.read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["distilbert", "albert"])
def test_the_other_encoders_of_transformers_make_a_table(tmp_path, kind):
    model, _ = prepared(tmp_path, kind, "RTE")
    command = ("table", "--model", model, "--raw", tmp_path / "raw", "--tasks", "RTE", "--key-dims", 8)
    command += ("--plain-key-dims", 8, "--epochs", 2, "--epochs-again", 1)
    run_glue(*command, "--max-length", 40, "--out", tmp_path / "out")
    rows = json.loads((tmp_path / "out/table.json").read_text())
    stages = [f"{way}{stage}" for way in ("", "plain-") for stage in ("converted", "finetuned")]
    assert [(row["key_dim"], row["stage"]) for row in rows] == [(None, "original"), *((8, stage) for stage in stages)]
    epochs = {path.parent.name: json.loads(path.read_text())["epochs"] for path in settings_of_trainings(tmp_path)}
    assert epochs == {"original": 2, "finetuned": 1}


@pytest.mark.slow
def test_the_tiny_table_of_roberta_is_made_once_and_reused(tmp_path):
    done = run_glue("table", "--tiny", "--out", tmp_path)
    rows = json.loads((tmp_path / "table.json").read_text())
    assert [row["key_dim"] for row in rows] == [None, 32, 32, 8, 8]
    assert all(row["average"] is not None and row["tasks"].keys() == {"SST-2", "STS-B"} for row in rows)
    # R = H*K is the original
    assert rows[1]["tasks"]["STS-B"] == pytest.approx(rows[0]["tasks"]["STS-B"], abs=0.01)
    assert (tmp_path / "table.md").read_text().splitlines()[0] in done.stdout
    assert sorted(path.parent.name for path in tmp_path.rglob("model.pt")) == ["original", "original", "roberta"]
    logs = {path: path.stat().st_mtime for path in tmp_path.rglob("train.log")}
    again = run_glue("table", "--tiny", "--out", tmp_path)
    assert (tmp_path / "table.md").read_text() in again.stdout
    assert {path: path.stat().st_mtime for path in tmp_path.rglob("train.log")} == logs
