"""scripts/time_to_bleu.py: the time of training up to a validation, over resumed runs, from fairseq's log."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("time_to_bleu")


def line(second, name, message):
    return f"2026-01-01 00:{second // 60:02}:{second % 60:02} | INFO | {name} | {message}\n"


def start(second):
    return line(second, "fairseq_cli.train", "Start iterating over samples")


def validation(second, updates, bleu, seconds=10, save=5):
    figures = f'{{"epoch": 1, "test_loss": "9.1", "test_bleu": "{bleu}", "test_num_updates": "{updates}"}}'
    where = f"@ {updates} updates"
    return (
        line(second, "fairseq_cli.train", 'begin validation on "test" subset')
        + line(second + seconds, "test", figures)
        + line(second + seconds, "fairseq.checkpoint_utils", f"Preparing to save checkpoint for epoch 1 {where}")
        + line(second + seconds + save, "fairseq.checkpoint_utils", f"Saved checkpoint x.pt (epoch 1 {where}, score 1)")
    )


RUN = start(10) + validation(110, 100, 12.5) + validation(225, 200, "21.0") + validation(440, 300, 26)


def test_validation_and_saving_are_not_counted(script):
    found = script.read_validations(RUN.splitlines())
    assert [(v.updates, v.bleu, v.seconds) for v in found] == [(100, 12.5, 100), (200, 21.0, 200), (300, 26.0, 400)]


def test_resumed_run_goes_on_from_the_saved_checkpoint_and_drops_what_was_lost(script):
    lost = start(10) + validation(110, 100, 12.5) + line(300, "train_inner", '{"loss": "5"}')
    again = (
        line(1000, "fairseq.trainer", "Loaded checkpoint x.pt (epoch 1 @ 100 updates)")
        + start(1010)
        + validation(1110, 200, 21.0)
    )
    found = script.read_validations((lost + again).splitlines())
    assert [(v.updates, v.seconds) for v in found] == [(100, 100), (200, 200)]


def test_name_of_the_subset_may_have_an_underscore(script):
    run = RUN.replace("| test |", "| new_test |").replace('"test_', '"new_test_')
    assert script.read_validations(run.splitlines()) == script.read_validations(RUN.splitlines()) != []


def test_run_that_began_anew_forgets_the_one_before(script):
    anew = line(900, "fairseq.trainer", "No existing checkpoint found x.pt") + start(910) + validation(960, 100, 3)
    assert [(v.updates, v.seconds) for v in script.read_validations((RUN + anew).splitlines())] == [(100, 50)]


def test_new_epoch_does_not_count_the_pause_before_it(script):
    epochs = start(0) + validation(50, 100, 3) + start(100) + validation(150, 200, 4)
    assert [v.seconds for v in script.read_validations(epochs.splitlines())] == [50, 100]


def test_epoch_without_validation_or_saving_counts(script):
    end = line(50, "fairseq_cli.train", "end of epoch 1 (average epoch stats below)")
    epochs = start(0) + end + start(60) + validation(100, 200, 4)
    assert [v.seconds for v in script.read_validations(epochs.splitlines())] == [90]


def test_first_validation_that_reaches_a_goal_gives_its_time(script):
    text = script.report(script.read_validations(RUN.splitlines()), (25, 20, 28))
    assert text.splitlines() == [
        "BLEU 25: 400 s (0.11 h) of training, 300 updates, validation BLEU 26.00",
        "BLEU 20: 200 s (0.06 h) of training, 200 updates, validation BLEU 21.00",
        "BLEU 28: not reached in 400 s (0.11 h) of training, best validation BLEU 26.00 after 300 updates",
    ]


def test_command_line_reads_a_log_and_refuses_one_without_bleu(script, tmp_path, capsys):
    log = tmp_path / "train.log"
    log.write_text(RUN)
    assert script.main([str(log), "--goal", "20"]) == 0
    assert capsys.readouterr().out.startswith("BLEU 20: 200 s")
    log.write_text(start(1))
    assert script.main([str(log)]) == 1
    assert "has no validation with BLEU" in capsys.readouterr().err
    assert script.main([str(tmp_path / "nowhere")]) == 1
