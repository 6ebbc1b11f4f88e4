"""Checkpoint files stay whole, and those that are not are named with the way out.

A symbolic link to /dev/full in the place of a temporary file makes every write to it fail as on a full disk.
"""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from fairseq_collab.checkpoint import load_checkpoint
from fairseq_collab.checkpoint_files import newest_readable_of_run, require_readable
from fairseq_collab.errors import CollabError
from fairseq_collab.fairseq_modules import patches


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    patches.install()


def save(path, age=0):
    """A whole checkpoint file, saved `age` seconds ago."""
    torch.save({"model": {"weight": torch.arange(1000.0)}}, path)
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def fill_disk_for(path):
    path.with_name(path.name + ".tmp").symlink_to("/dev/full")


@pytest.mark.parametrize(
    "break_file",
    [
        truncate,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        lambda path: path.write_bytes(b"\x80\x02" + bytes(range(149, 199))),
    ],
    ids=["truncated", "empty", "zeros", "noise"],
)
def test_damaged_checkpoint_is_named_and_the_newest_readable_one_offered(tmp_path, break_file):
    last = save(tmp_path / "checkpoint_last.pt")
    truncate(save(tmp_path / "checkpoint3.pt", age=10))
    save(tmp_path / "checkpoint2.pt", age=20)
    save(tmp_path / "checkpoint1.pt", age=30)
    break_file(last)
    with pytest.raises(CollabError) as caught:
        checkpoint_utils.load_checkpoint_to_cpu(str(last))
    message = str(caught.value)
    assert f"checkpoint {last} is damaged" in message
    assert f"--restore-file {tmp_path / 'checkpoint2.pt'}" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["finetuned.pt", "checkpoint_last-shard0.pt", "checkpoint_last.pt"])
def test_files_of_other_trainings_are_not_offered_for_a_damaged_one(tmp_path, name):
    for other in ("roberta.pt", "checkpoint_last-shard1.pt", "converted_checkpoint1.pt", "checkpoint_of_a_friend.pt"):
        save(tmp_path / other)
    damaged = truncate(save(tmp_path / name))
    with pytest.raises(CollabError) as caught:
        load_checkpoint(damaged)
    message = str(caught.value)
    assert message.startswith(f"checkpoint {damaged} is damaged (its end is missing")
    assert message.count(".pt") == 1 and "--restore-file" not in message
    assert message.endswith("or make it again" if name == "finetuned.pt" else "or move it away to begin anew")


@pytest.mark.parametrize(
    "name", ["checkpoint3.pt", "checkpoint_best.pt", "checkpoint_2_500.pt", "checkpoint.best_loss_-3.52.pt"]
)
def test_all_names_that_a_training_gives_count(tmp_path, name):
    last = truncate(save(tmp_path / "checkpoint_last.pt"))
    whole = save(tmp_path / name)
    assert newest_readable_of_run(last) == whole


def test_damaged_checkpoint_without_company_offers_nothing(tmp_path):
    last = truncate(save(tmp_path / "checkpoint_last.pt"))
    with pytest.raises(CollabError, match="no other readable checkpoint"):
        require_readable(last)
    assert newest_readable_of_run(last) is None


def test_whole_or_absent_checkpoint_passes_the_check_before_a_launch(tmp_path):
    for path in (save(tmp_path / "checkpoint_last.pt"), tmp_path / "absent.pt"):
        assert require_readable(path) is None


class Harmful:
    def __reduce__(self):
        return os.system, ("true",)


def test_refused_pickle_is_named_with_what_it_wanted_to_run(tmp_path):
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": {}, "extra": Harmful()}, path)
    with pytest.raises(CollabError, match=r"checkpoint\.pt was not loaded: it wants to run (posix|os)\.system"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def test_file_of_another_program_is_no_fairseq_checkpoint(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(2)}, path)
    with pytest.raises(CollabError, match="not a fairseq checkpoint"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def test_full_disk_while_saving_keeps_the_previous_file(tmp_path):
    path = save(tmp_path / "checkpoint_last.pt")
    before = path.read_bytes()
    fill_disk_for(path)
    with pytest.raises(CollabError, match=r"checkpoint_last\.pt could not be written \(No space left on device"):
        checkpoint_utils.torch_persistent_save({"model": torch.zeros(10**6)}, str(path))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["checkpoint_last.pt"]


def test_full_disk_while_saving_a_new_name_tells_the_last_whole_checkpoint(tmp_path):
    old = save(tmp_path / "checkpoint1.pt")
    fill_disk_for(tmp_path / "checkpoint2.pt")
    with pytest.raises(CollabError, match=f"saved whole is {old}"):
        checkpoint_utils.torch_persistent_save({"model": torch.zeros(10**6)}, str(tmp_path / "checkpoint2.pt"))


def test_attempt_after_a_failed_one_starts_an_empty_file(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint_last.pt"
    real_save, attempts = torch.save, []

    def fail_once(obj, file):
        attempts.append(file)
        if len(attempts) == 1:
            file.write(b"half a checkpoint")
            raise OSError(5, "Input/output error")
        real_save(obj, file)

    monkeypatch.setattr(torch, "save", fail_once)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    checkpoint_utils.torch_persistent_save({"model": torch.arange(4)}, str(path))
    assert torch.load(path)["model"].tolist() == [0, 1, 2, 3]
    assert len(attempts) == 2


def test_full_disk_while_copying_keeps_the_previous_file(tmp_path):
    source, last = save(tmp_path / "checkpoint2.pt"), tmp_path / "checkpoint_last.pt"
    last.write_bytes(b"the last good one")
    fill_disk_for(last)
    with pytest.raises(CollabError, match="No space left on device.*still the one saved before"):
        PathManager.copy(str(source), str(last), overwrite=True)
    assert last.read_bytes() == b"the last good one"
    assert sorted(os.listdir(tmp_path)) == ["checkpoint2.pt", "checkpoint_last.pt"]


def test_copy_replaces_and_leaves_nothing_else(tmp_path):
    source, last = save(tmp_path / "checkpoint2.pt"), tmp_path / "checkpoint_last.pt"
    last.write_bytes(b"old")
    assert PathManager.copy(str(source), str(last), overwrite=True)
    assert last.read_bytes() == source.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint2.pt", "checkpoint_last.pt"]
