"""The recipes: the batch on any number of processes, the commands they would run, and what they refuse."""

from __future__ import annotations

import importlib
import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fairseq_collab.errors import CollabError

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = (
    *("KEY_DIM", "COLAB", "MIX_DIM", "MIX_LAYOUT", "SEED", "DATA", "SAVE_DIR", "AVERAGE", "MAX_TOKENS"),
    *("MAX_SENTENCES", "NPROC_PER_NODE", "NNODES", "NODE_RANK", "SLURM_STEP_ID", "DRY_RUN"),
)
SCRIPTS = {"wmt": "train_wmt", "mlbench": "train_mlbench", "iwslt": "train_iwslt", "roberta": "pretrain_roberta"}


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def settings():
    return importlib.import_module("recipe_settings")


@pytest.fixture
def recipes():
    return importlib.import_module("recipes")


@pytest.fixture
def dry_run(recipes, monkeypatch, capsys):
    """`dry_run("wmt", "--tiny", KEY_DIM="64")` returns the commands that would run, each as a list of words."""

    def run(*arguments, **variables):
        for name, value in {"DRY_RUN": "1", **variables}.items():
            monkeypatch.setenv(name, str(value))
        assert recipes.main(list(map(str, arguments))) == 0, capsys.readouterr().err
        return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]

    return run


def value(command, flag):
    """What follows the last `flag`, as fairseq reads it."""
    return command[len(command) - command[::-1].index(flag)]


def training(commands):
    return next(command for command in commands if command[0].endswith("launch.sh"))


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 5, 7, 8, 12, 16, 64])
def test_batch_stays_the_same_on_any_number_of_processes(settings, processes):
    for batch in (settings.MLBENCH.batch, settings.Batch(total=28672, share=3584, least=64)):
        update_freq, share = batch.divide(processes)
        assert share <= batch.share
        product = update_freq * share * processes
        assert 0 <= batch.total - product < update_freq * processes
        said = batch.describe(processes)
        assert f"= {product:,} an update" in said
        assert ("rounded down from" in said) == (product != batch.total)


def test_batch_of_the_papers_four_gpus_is_the_published_one(settings):
    assert settings.WMT.batch.divide(4) == (2, 3584)
    assert settings.WMT.batch.divide(1) == (8, 3584)
    assert settings.MLBENCH.batch.divide(1) == (16, 8192)
    assert settings.MLBENCH.batch.divide(16) == (1, 8192)
    assert settings.ROBERTA.batch.divide(8) == (16, 16)


@pytest.mark.parametrize("processes", [1, 3, 8])
def test_fairseq_makes_batches_of_as_many_sequences_as_a_process_takes(dry_run, processes):
    import numpy
    from fairseq.data import data_utils

    train = training(dry_run("roberta", NPROC_PER_NODE=processes))
    share, multiple = (int(value(train, flag)) for flag in ("--batch-size", "--required-batch-size-multiple"))
    lengths = numpy.full(100, 512)
    batches = data_utils.batch_by_size(
        *(numpy.arange(100), lambda index: 512, lengths), max_sentences=share, required_batch_size_multiple=multiple
    )
    assert {len(batch) for batch in batches[:-1]} == {share} == {15 if processes == 3 else 16}


def test_batch_that_cannot_be_divided_is_refused(settings):
    with pytest.raises(CollabError, match="28,672 tokens cannot be divided among 64 processes.*at most 28 processes"):
        settings.WMT.batch.divide(64)
    with pytest.raises(CollabError, match="MAX_TOKENS=100 is too little"):
        settings.Batch(total=28672, share=100, least=1024).divide(1)


def test_paper_run_is_the_published_command(dry_run):
    train, score = dry_run("wmt", KEY_DIM=512, COLAB="none", NPROC_PER_NODE=4)
    assert train[0] == str(ROOT / "scripts/launch.sh") and train[1] == str(ROOT / "data/wmt16/bin")
    expected = {
        "--arch": "transformer_collab_wmt_en_de", "--key-dim": "512", "--collaborative-heads": "none",
        "--adam-betas": "(0.9, 0.98)", "--clip-norm": "0.0", "--lr": "0.0007", "--stop-min-lr": "1e-09",
        "--lr-scheduler": "inverse_sqrt", "--warmup-updates": "4000", "--warmup-init-lr": "1e-07", "--dropout": "0.1",
        "--weight-decay": "0.0", "--label-smoothing": "0.1", "--max-tokens": "3584", "--update-freq": "2",
        "--save-dir": str(ROOT / "checkpoints/wmt16-en-de/base-d-512-colab-none"), "--seed": "1",
    }  # fmt: skip
    assert {flag: value(train, flag) for flag in expected} == expected
    assert "--share-all-embeddings" in train
    assert {flag: value(score, flag) for flag in ("--average", "--beam", "--lenpen", "--detokenizer")} == {
        "--average": "10", "--beam": "4", "--lenpen": "0.6", "--detokenizer": "moses"
    }  # fmt: skip
    assert "--compound-split" in score


def test_mlbench_task_is_set_as_its_reference_run(dry_run):
    train, _ = dry_run("mlbench")
    expected = {
        "--adam-eps": "1e-09", "--lr": "0.001976", "--warmup-updates": "1000", "--max-epoch": "10", "--seed": "42",
        "--max-source-positions": "80", "--max-target-positions": "80", "--max-tokens": "8192", "--update-freq": "16",
        "--eval-bleu-args": '{"beam": 4, "lenpen": 0.6}', "--valid-subset": "test",
    }  # fmt: skip
    assert {flag: value(train, flag) for flag in expected} == expected


def test_half_precision_is_used_on_gpus_only(dry_run, monkeypatch):
    assert "--fp16" not in training(dry_run("mlbench"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    train = training(dry_run("mlbench"))
    assert "--fp16" in train and value(train, "--fp16-init-scale") == "128"
    assert value(train, "--fp16-scale-window") == "2000"
    assert value(train, "--update-freq") == "2"
    assert "--fp16" not in training(dry_run("mlbench", "--cpu"))


def test_variables_reach_the_training_and_name_its_folder(dry_run, tmp_path):
    given = {"COLAB": "encoder_cross", "KEY_DIM": 64, "MIX_LAYOUT": "window", "MIX_DIM": 32, "SEED": 7, "NNODES": 2}
    train = training(dry_run("wmt", "--log-interval", 10, DATA=tmp_path, NPROC_PER_NODE=2, **given))
    flags = ("--collaborative-heads", "--key-dim", "--mix-layout", "--mix-dim", "--seed", "--log-interval")
    assert [value(train, flag) for flag in flags] == ["encoder_cross", "64", "window", "32", "7", "10"]
    assert train[1] == str(tmp_path) and value(train, "--update-freq") == "2"
    assert Path(value(train, "--save-dir")).name == "base-d-64-colab-encoder_cross-window-mix-32-seed-7"
    assert value(training(dry_run("wmt", SAVE_DIR=tmp_path / "here")), "--save-dir") == str(tmp_path / "here")


@pytest.mark.parametrize("name", SCRIPTS)
def test_tiny_recipe_keeps_the_optimisation_and_prepares_its_corpus(dry_run, settings, name):
    corpus, *more, train, score = dry_run(name, "--tiny", "--archive", "x.whl")
    assert corpus[1:4] == ["-m", "data_prep", "homeassistant"] and value(corpus, "--archive") == str(
        Path("x.whl").resolve()
    )
    assert (len(more) == 1) == (name == "roberta")
    arch = [flags[flags.index("--arch") + 1] for flags in (settings.RECIPES[name].flags, train)]
    assert arch[0] == arch[1] and value(train, "--encoder-layers") == "2"
    assert train.count("--lr") == 1
    assert "3" in score or score[score.index("--path") + 1].endswith("average_of_last_3.pt")


def test_tensorboard_is_logged_to_where_it_is_installed(dry_run, monkeypatch):
    steps = importlib.import_module("recipe_steps")
    monkeypatch.setattr(steps, "find_spec", lambda name: None)
    assert "--tensorboard-logdir" not in training(dry_run("wmt"))
    monkeypatch.setattr(steps, "find_spec", lambda name: name == "tensorboard" or None)
    assert value(training(dry_run("wmt", SAVE_DIR="/s")), "--tensorboard-logdir") == "/s/tensorboard"


@pytest.mark.parametrize(
    ("name", "arguments", "variables", "sentence"),
    [
        ("wmt", [], {}, "make it with python -m data_prep wmt16_en_de_bpe32k --destdir data/wmt16"),
        ("mlbench", [], {}, "make it with python -m data_prep wmt17_en_de"),
        ("iwslt", [], {}, "make it with python -m data_prep iwslt14_de_en"),
        ("roberta", [], {}, "make it with python -m data_prep text"),
        ("wmt", ["--save-dir", "x"], {}, "--save-dir is set by the recipe: leave it out and set SAVE_DIR"),
        ("wmt", ["--max-tokens=9"], {}, "--max-tokens is set by the recipe: leave it out and set MAX_TOKENS"),
        ("wmt", [], {"KEY_DIM": "wide"}, "KEY_DIM is 'wide': give a whole number from 1 on"),
        ("wmt", [], {"KEY_DIM": "\u00b2"}, "KEY_DIM is '\u00b2': give a whole number from 1 on"),
        ("wmt", [], {"COLAB": "encoder_cros"}, "COLAB is 'encoder_cros': --collaborative-heads has 'cros'"),
        ("wmt", [], {"MIX_LAYOUT": "windows"}, "MIX_LAYOUT is 'windows': give one of dense, window, picked"),
        (
            "iwslt",
            [],
            {"AVERAGE": "20"},
            "AVERAGE is 20, but only the last 10 epochs are kept: add --keep-last-epochs 20",
        ),
        ("iwslt", ["--keep-last-epochs=4"], {"AVERAGE": "5"}, "only the last 4 epochs are kept"),
        ("iwslt", ["--keep-last-epochs", "20"], {"AVERAGE": "20"}, "make it with python -m data_prep iwslt14_de_en"),
        ("wmt", [], {"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE is '0'"),
        ("wmt", [], {"NPROC_PER_NODE": "64"}, "cannot be divided among 64 processes"),
    ],
)
def test_what_cannot_run_is_said_in_one_sentence_and_makes_nothing(
    recipes, monkeypatch, tmp_path, capsys, name, arguments, variables, sentence
):
    monkeypatch.setenv("SAVE_DIR", str(tmp_path / "out"))
    monkeypatch.setenv("DATA", str(tmp_path / "nowhere"))
    for key, text in variables.items():
        monkeypatch.setenv(key, text)
    assert recipes.main([name, *arguments]) == 1
    error = capsys.readouterr().err.strip()
    assert sentence in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.fixture
def small_data(tmp_path, monkeypatch):
    """A folder that looks binarised, as DATA; SAVE_DIR beside it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/dict.en.txt").touch()
    monkeypatch.setenv("DATA", str(tmp_path / "bin"))
    monkeypatch.setenv("SAVE_DIR", str(tmp_path / "out"))
    return tmp_path


def test_finished_training_is_not_repeated_unless_more_is_asked_for(recipes, small_data, monkeypatch, capsys):
    done = []
    monkeypatch.setattr(recipes.steps, "train", lambda *_: done.append("train"))
    monkeypatch.setattr(recipes.steps, "score", lambda *_: done.append("score"))
    assert recipes.main(["wmt"]) == 0
    assert "28,672 an update" in capsys.readouterr().out
    assert recipes.main(["wmt"]) == 0
    assert "training is finished" in capsys.readouterr().out
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    assert recipes.main(["wmt"]) == 0
    assert recipes.main(["wmt", "--max-update", "200000"]) == 0
    assert done == ["train", "score", "score", "score", "train", "score"]


def test_folder_with_checkpoints_of_other_settings_is_refused(recipes, small_data, monkeypatch, capsys):
    done = []
    monkeypatch.setattr(recipes.steps, "train", lambda *_: done.append("train"))
    monkeypatch.setattr(recipes.steps, "score", lambda *_: None)
    assert recipes.main(["wmt"]) == 0
    monkeypatch.setenv("KEY_DIM", "64")
    assert recipes.main(["wmt"]) == 0  # nothing was saved yet
    assert done == ["train", "train"]
    (small_data / "out/checkpoint_last.pt").touch()
    monkeypatch.setenv("KEY_DIM", "32")
    assert recipes.main(["wmt"]) == 1
    assert "begun with other settings (KEY_DIM 64 and now 32)" in capsys.readouterr().err
    assert done == ["train", "train"]


def test_folder_with_checkpoints_of_other_flags_is_refused(recipes, small_data, monkeypatch, capsys):
    """It would go on under the new flags, or be finished at once and pass for their result."""
    done = []
    monkeypatch.setattr(recipes.steps, "train", lambda *_: done.append("train"))
    monkeypatch.setattr(recipes.steps, "score", lambda *_: None)
    assert recipes.main(["wmt", "--dropout", "0.2"]) == 0
    (small_data / "out/checkpoint_last.pt").touch()
    assert recipes.main(["wmt", "--dropout", "0.3"]) == 1
    assert "flags ['--dropout 0.2'] and now ['--dropout 0.3']" in capsys.readouterr().err
    assert recipes.main(["wmt"]) == 1
    assert recipes.main(["wmt", "--max-update", "7", "--dropout=0.2", "--log-interval=1", "--cpu"]) == 0
    assert done == ["train", "train"]


def test_other_machines_only_train(recipes, small_data, monkeypatch):
    done = []
    monkeypatch.setattr(recipes.steps, "train", lambda *_: done.append("train"))
    monkeypatch.setattr(recipes.steps, "score", lambda *_: done.append("score"))
    for name, text in {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first"}.items():
        monkeypatch.setenv(name, text)
    assert recipes.main(["wmt"]) == 0
    assert done == ["train"] and not (small_data / "out/trained.json").exists()


def test_failed_training_is_not_taken_for_a_finished_one(recipes, small_data, monkeypatch, capsys):
    def fail(*_):
        raise CollabError("training wmt failed with exit status 1")

    monkeypatch.setattr(recipes.steps, "train", fail)
    assert recipes.main(["wmt"]) == 1
    assert not (small_data / "out/trained.json").exists()


@pytest.mark.parametrize(
    ("extra", "updates"),
    [([], 100_000), (["--max-update", "7"], 7), (["--max-update", "many"], None), (["--max-update"], None)],
)
def test_progress_goes_to_the_last_number_of_updates(recipes, small_data, monkeypatch, extra, updates):
    shown = []
    monkeypatch.setattr(recipes.steps, "run_training", lambda command, name, total, *_: shown.append(total))
    monkeypatch.setattr(recipes.steps, "score", lambda *_: None)
    assert recipes.main(["wmt", *extra]) == 0
    assert shown == [updates]


def test_validation_interval_is_the_share_of_the_epoch_that_fairseq_makes(
    recipes, settings, toy_translation, monkeypatch
):
    from dataclasses import replace

    steps = importlib.import_module("recipe_steps")
    flags = settings.override(settings.MLBENCH.flags, ("--source-lang", "src", "--target-lang", "tgt"))
    batch = settings.Batch(total=400, share=200, least=80)
    run = steps.Run(
        name="mlbench", recipe=replace(settings.MLBENCH, flags=flags, batch=batch), tiny=False, model={}, each=1,
        machines=1, node=0, cpu=True, average=0, out=toy_translation, data=toy_translation, extra=[],
    )  # fmt: skip
    interval = steps.validation_interval(run, toy_translation, 200, 2)
    # 300 sentences of 4 to 9 tokens in batches of 8 or a multiple of it: 16 or 24 sentences of up to 200 tokens
    updates = interval / 0.3
    assert 300 / 24 / 2 <= updates <= 300 / 16 / 2 + 4


def test_masked_figures_are_read_from_fairseqs_log():
    steps = importlib.import_module("recipe_steps")
    figures = json.dumps({"epoch": 1, "test_loss": "5.5", "test_ppl": "45.25", "test_wps": "0"})
    assert steps._figures(f"2026-01-01 00:00:00 | INFO | test | {figures}") == {
        "split": "test", "loss": 5.5, "perplexity": 45.25
    }  # fmt: skip
    assert steps._figures("nothing") is None


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["fine", "launch.sh: error: there is no data folder x"], "there is no data folder x"),
        (["fairseq_collab: error: --key-dim 7 is no", "x.ChildFailedError: y"], "--key-dim 7 is no"),
        (["[rank1]: ValueError: first", "[rank0]: RuntimeError: closed by peer"], "ValueError: first"),
        (["train.py: error: argument --arch/-a: invalid choice"], "argument --arch/-a: invalid choice"),
        (["2026-01-01 00:00:00 | INFO | train | no Error here"], None),
    ],
)
def test_first_error_of_a_training_is_the_one_that_is_told(lines, error):
    assert importlib.import_module("recipe_steps").first_error(lines) == error


@pytest.mark.parametrize("name", SCRIPTS)
def test_shell_script_prints_its_published_settings_as_help(name):
    script = ROOT / "scripts" / f"{SCRIPTS[name]}.sh"
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert f"scripts/{SCRIPTS[name]}.sh" in done.stdout and "published" in done.stdout
    assert not done.stdout.startswith("#") and "set -euo" not in done.stdout
    assert f"run_recipe {name} " in script.read_text()


def test_shell_script_makes_the_environment_and_hands_all_arguments_on(tmp_path):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for name in ("train_wmt.sh", "recipe_common.sh"):
        shutil.copy(ROOT / "scripts" / name, scripts)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    stubs = {scripts / "setup_env.sh": "echo made", tmp_path / ".venv/bin/python": 'printf "%s\\n" "$@"'}
    for path, line in stubs.items():
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    done = subprocess.run(
        [scripts / "train_wmt.sh", "--tiny", "--adam-betas", "(0.9, 0.99)"], capture_output=True, text=True, check=True
    )
    recipes = str(scripts / "recipes.py")
    assert done.stdout.splitlines() == ["made", recipes, "wmt", "--tiny", "--adam-betas", "(0.9, 0.99)"]
