"""scripts/experiments.py end to end: a tiny grid that is killed, goes on, and repeats nothing that it finished."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "experiments.py"
CELLS = "original,distilled R=16,distilled R=16 + 1 epoch"

pytestmark = pytest.mark.slow


def command(data: Path, out: Path, *arguments: Any) -> list[str]:
    words = [sys.executable, SCRIPT, "run", "nmt-convert", "--tiny", "--seeds", 1, "--cells", CELLS]
    return [str(word) for word in [*words, "--data", data, "--out", out, "--device", "cpu", *arguments]]


def wait_for(condition: Any, process: subprocess.Popen, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < until, "the run ended, or did nothing"
        time.sleep(0.05)


def steps(out: Path) -> dict[str, list[str]]:
    """Finished steps by run."""
    files = sorted((out / "runs").glob("*/steps.json"))
    return {file.parent.name.rsplit("-", 1)[0]: list(json.loads(file.read_text())) for file in files}


def test_a_killed_grid_goes_on_and_repeats_nothing(toy_translation, tmp_path):
    out = tmp_path / "out"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    trained, converted = "seed1-trained-concatenated-R64", "seed1-converted-picked-R16"

    # in the middle of decoding the first model: SIGTERM ends the decoding, too
    started = subprocess.Popen(command(toy_translation, out), env=environment, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: steps(out).get(trained) == ["train"], started)
    started.send_signal(signal.SIGTERM)
    assert started.wait(60) == 130
    assert "the same command continues where it was" in started.stderr.read()
    assert steps(out) == {trained: ["train"]} and not (out / "results.jsonl").exists()
    (model,) = (out / "runs").glob("*/model.pt")
    before = model.stat().st_mtime_ns

    # killed outright, while it converts; what it was doing is left alone or ended by us
    started = subprocess.Popen(command(toy_translation, out), env=environment, stderr=subprocess.DEVNULL, text=True)
    wait_for(lambda: list((out / "runs").glob("*converted*/convert.log")), started)
    started.kill()
    started.wait()
    assert len((out / "results.jsonl").read_text().splitlines()) == 1
    with (out / "results.jsonl").open("a") as stream:
        stream.write('{"kind": "run", "half')
    until = time.monotonic() + 120
    while True:
        finished = subprocess.run(command(toy_translation, out), env=environment, capture_output=True, text=True)
        if "is still working in" not in finished.stderr:
            break
        assert time.monotonic() < until
        time.sleep(0.5)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert model.stat().st_mtime_ns == before
    assert steps(out) == {
        trained: ["train", "decode"],
        converted: ["convert", "validate", "decode"],
        "seed1-tuned-picked-R16": ["train", "decode"],
    }
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    found = {line["cell"]: line for line in lines if line["kind"] == "run"}
    assert list(found) == CELLS.split(",") and len(lines) == 3 + 2
    original, distilled, tuned = found.values()
    assert original["updates"] == 30 and original["key_query_parameters"] == 3 * 2 * (64 * 64 + 64)
    assert distilled["key_query_parameters"] == 3 * (2 * 64 * 16 + 2 * 8 * 8) == tuned["key_query_parameters"]
    assert [one["name"] for one in distilled["errors"]][0] == "encoder.layers.0.self_attn"
    assert all(0 < line["bits"] < 20 and line["bleu_signature"].startswith("nrefs:1|") for line in found.values())
    assert "| distilled R=16 + 1 epoch | original |" in finished.stdout

    # nothing is left to do
    again = subprocess.run(command(toy_translation, out, "--dry-run"), env=environment, capture_output=True, text=True)
    assert "3 runs, 3 finished; the others take about 0.0 hours" in again.stdout
    arguments = ["page", "--results", out / "results.jsonl", "--out", tmp_path / "results.md"]
    subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], check=True, env=environment)
    assert "## Converting a trained model" in (tmp_path / "results.md").read_text()


def test_runs_side_by_side_give_the_models_of_runs_in_turn(toy_translation, tmp_path):
    found = {}
    for jobs in (1, 2):
        words = ["run", "nmt-key-dim", "--tiny", "--seeds", "1", "--cells", "dense R=16,windows R=16*", "--jobs", jobs]
        words += ["--data", toy_translation, "--out", tmp_path / str(jobs), "--device", "cpu"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, SCRIPT, *map(str, words)], check=True, env=environment, capture_output=True)
        lines = map(json.loads, (tmp_path / str(jobs) / "results.jsonl").read_text().splitlines())
        of_runs = [line for line in lines if line["kind"] == "run"]
        found[jobs] = {line["cell"]: (line["run"], line["bits"], line["bleu"]) for line in of_runs}
    assert len(found[1]) == 2 and found[1] == found[2]
    assert len({bits for _, bits, _ in found[1].values()}) == 2
