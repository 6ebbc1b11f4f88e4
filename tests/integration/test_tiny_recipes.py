"""Each recipe with --tiny from the corpus to the score, on a small wheel; one is interrupted, on two processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def start(archive, tmp_path, fairseq_env, processes):
    """`start("wmt", "--max-epoch", "4", KEY_DIM="16")` starts that recipe; `out`, `log` are below tmp_path."""

    def run(name, *flags, **variables):
        command = [sys.executable, ROOT / "scripts/recipes.py", name, "--tiny", "--archive", archive[0]]
        command += ["--sha256", archive[1], *flags]
        taken = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "DRY_RUN")
        env = {key: value for key, value in fairseq_env().items() if key not in taken and "SLURM" not in key}
        return processes(
            subprocess.Popen(
                list(map(str, command)),
                stdout=(tmp_path / "log").open("a"),
                stderr=subprocess.STDOUT,
                env={**env, "SAVE_DIR": str(tmp_path / "out"), **variables},
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        )

    return run


def options_of(checkpoint):
    from fairseq_collab.checkpoint import load_checkpoint

    return load_checkpoint(checkpoint)["cfg"]["model"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wmt", "mlbench", "iwslt"])
def test_tiny_translation_recipe_ends_with_scores(start, tmp_path, name):
    process = start(name, KEY_DIM="16", COLAB="encoder_cross")
    assert process.wait(500) == 0, (tmp_path / "log").read_text()[-6000:]
    log, out = (tmp_path / "log").read_text(), tmp_path / "out"
    (system,) = json.loads((out / "scores.json").read_text())["systems"]
    assert system["path"].endswith("average_of_last_3.pt")
    assert len((out / "translations/translations.txt").read_text().split("\n")) == system["sentences"] + 1
    assert system["bleu"]["signature"] in log
    model = options_of(out / "average_of_last_3.pt")
    assert model.collaborative_heads == "encoder_cross" and model.key_dim == 16
    validations = [line for line in (out / "train.log").read_text().splitlines() if '_bleu": ' in line]
    if name == "mlbench":
        assert 3 * 5 <= len(validations) <= 4 * 5  # every 30% of an epoch and at its end
        assert "BLEU 5: " in log and "BLEU 2: " in log
    else:
        assert len(validations) == (5 if name == "iwslt" else 0)


@pytest.mark.slow
def test_tiny_pretraining_ends_with_the_perplexity_of_masked_words(start, tmp_path):
    process = start("roberta", "--max-epoch", "4")
    assert process.wait(500) == 0, (tmp_path / "log").read_text()[-6000:]
    figures = json.loads((tmp_path / "out/scores.json").read_text())
    assert figures["split"] == "test" and figures["perplexity"] == pytest.approx(2 ** figures["loss"], rel=0.01)
    assert "masked words of test: " in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_interrupted_recipe_goes_on_with_another_number_of_processes_and_is_not_repeated(start, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    process = start("wmt", "--max-epoch", "60")
    deadline = time.time() + 300
    while not (out / "checkpoint3.pt").exists() and process.poll() is None and time.time() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, log.read_text()[-6000:]
    assert "the same command continues" in log.read_text() and not (out / "trained.json").exists()
    epochs = [path.stem.removeprefix("checkpoint") for path in out.glob("checkpoint[0-9]*.pt")]
    done = max(map(int, epochs))
    process = start("wmt", "--max-epoch", str(done + 2), NPROC_PER_NODE="2")
    assert process.wait(500) == 0, log.read_text()[-6000:]
    assert "2 process(es) x --update-freq 1 x 500 tokens = 1,000 an update" in log.read_text()
    assert "Loaded checkpoint" in (out / "train.log").read_text()
    assert options_of(out / "average_of_last_3.pt").key_dim == 32
    process = start("wmt", "--max-epoch", str(done + 2))
    assert process.wait(300) == 0
    assert "training is finished" in log.read_text()
