"""The quickstart: how it spends its time, what it refuses, and a whole small run that is interrupted and continued."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("quickstart")


def test_fewer_models_come_before_fewer_updates(quickstart):
    overhead = quickstart.START_SECONDS + quickstart.SCORE_SECONDS
    converted = quickstart.CONVERT_SECONDS + quickstart.SCORE_SECONDS
    three = converted + 3 * (overhead + quickstart.FULL_UPDATES / 10)
    assert quickstart.fit(three + 1, 10) == quickstart.FULL_UPDATES
    two = converted + 2 * (overhead + quickstart.FULL_UPDATES / 10)
    assert quickstart.fit(two + 1, 10) == quickstart.FULL_UPDATES
    assert quickstart.FEWEST_UPDATES < quickstart.fit(two - 100, 10) < quickstart.FULL_UPDATES
    assert quickstart.fit(0, 10) == quickstart.FEWEST_UPDATES


@pytest.mark.parametrize(("flag", "value"), [("--updates", "5"), ("--minutes", "0"), ("--minutes", "nan")])
def test_option_out_of_range_is_named_and_makes_nothing(quickstart, tmp_path, capsys, flag, value):
    assert quickstart.main(["--out", str(tmp_path / "out"), flag, value]) == 1
    assert f"{flag} {value} is out of range" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_folder_begun_with_another_budget_is_refused(quickstart, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quickstart, "prepare_data", lambda args, lock_fd: tmp_path)
    monkeypatch.setattr(quickstart, "make_models", lambda *_: pytest.fail("training began"))
    (tmp_path / "plan.json").write_text(json.dumps({"updates": 40, "updates_per_second": None, "settings": []}))
    assert quickstart.main(["--out", str(tmp_path), "--updates", "60"]) == 1
    assert "was begun with 40 updates" in capsys.readouterr().err


def test_second_quickstart_in_the_same_folder_is_refused(quickstart, tmp_path, capsys):
    with quickstart.lock(tmp_path):
        assert quickstart.main(["--out", str(tmp_path)]) == 1
    assert "another quickstart" in capsys.readouterr().err


def test_failing_training_is_said_with_the_end_of_its_log(quickstart, tmp_path):
    with quickstart.lock(tmp_path) as lock_fd, pytest.raises(quickstart.CollabError, match="no-such-data"):
        quickstart.train("concatenated", Path("no-such-data"), tmp_path / "model", 20, lock_fd)


def start(archive: tuple[Path, str], out: Path, log: Path, *more: str) -> subprocess.Popen:
    command = [sys.executable, ROOT / "scripts/quickstart.py", "--out", out, "--archive", archive[0]]
    command += ["--sha256", archive[1], "--vocab-size", "120", "--updates", "40", *more]
    return subprocess.Popen(
        list(map(str, command)),
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        # a shell that runs the tests in the background ignores interrupts, and what it starts would, too
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.slow
def test_interrupted_quickstart_continues_to_one_table(archive, tmp_path, processes):
    out, log = tmp_path / "out", tmp_path / "log"
    process = processes(start(archive, out, log))
    deadline = time.time() + 400
    while not (out / "concatenated/row.json").exists() and process.poll() is None and time.time() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, log.read_text()
    assert "the same command continues" in log.read_text()
    first = json.loads((out / "concatenated/row.json").read_text())

    process = processes(start(archive, out, log))
    assert process.wait(400) == 0, log.read_text()
    text = log.read_text()
    assert "concatenated: finished before" in text
    assert (out / "results.md").read_text() in text
    rows = {row["model"]: row for row in json.loads((out / "results.json").read_text())}
    assert list(rows) == ["concatenated", "converted", "collaborative-dense", "collaborative-window"]
    assert rows["concatenated"] == first
    for row in rows.values():
        assert row["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a")
        assert (row["train_words_per_second"] is None) == (row["model"] == "converted")
        assert row["decode_tokens_per_second"] > 0
    caches = {name: (row["cache_self"], row["cache_cross"]) for name, row in rows.items()}
    assert caches == {  # 2 layers of 128 or 32 float32 numbers
        "concatenated": (1024, 1024),
        "converted": (256, 256),
        "collaborative-dense": (256, 256),
        "collaborative-window": (256, 256),
    }
    # 6 attentions: two projections of 128 x 128 with biases; two of 128 x 32, mixing and query bias of 8 heads
    assert rows["concatenated"]["key_query_parameters"] == 6 * 2 * (128 * 128 + 128)
    assert rows["converted"]["key_query_parameters"] == 6 * (2 * 128 * 32 + 2 * 8 * 16)
    assert rows["collaborative-dense"]["key_query_parameters"] == 6 * (2 * 128 * 32 + 2 * 8 * 32)
    assert rows["collaborative-window"]["key_query_parameters"] == 6 * (2 * 128 * 32 + 2 * 8 * 16)


@pytest.mark.slow
def test_optional_model_is_left_out_when_time_is_short_and_added_later(archive, tmp_path, processes):
    out, log = tmp_path / "out", tmp_path / "log"
    process = processes(start(archive, out, log, "--minutes", "0.05"))
    assert process.wait(400) == 0, log.read_text()
    assert "collaborative-window: left out" in log.read_text() and "converted: left out" in log.read_text()
    assert len(json.loads((out / "results.json").read_text())) == 2
    process = processes(start(archive, out, log))
    assert process.wait(400) == 0, log.read_text()
    assert len(json.loads((out / "results.json").read_text())) == 4
