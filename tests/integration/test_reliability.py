"""Training that is killed, meets a damaged checkpoint or a full disk: nothing is lost, and the way on is said.

A symbolic link to /dev/full in the place of a temporary file makes every write to it fail as on a full disk.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys

import pytest

UPDATES_KILLED_AT, EPOCHS = 17, 3
SIZES = ("--encoder-embed-dim", "32", "--decoder-embed-dim", "32", "--encoder-ffn-embed-dim", "32")


@pytest.fixture(scope="module")
def arguments(toy_translation, plugin_dir):
    """`arguments(SAVE_DIR)`: what to give to fairseq-train, with dropout, a checkpoint every 4 updates, JSON log."""

    def build(save_dir, *more):
        return [
            *(str(toy_translation), "--user-dir", str(plugin_dir), "--arch", "transformer_collab_tiny", *SIZES),
            *("--cpu", "--max-tokens", "200", "--optimizer", "adam", "--lr", "5e-3", "--dropout", "0.2"),
            *("--lr-scheduler", "inverse_sqrt", "--warmup-updates", "10", "--max-epoch", str(EPOCHS)),
            *("--save-interval-updates", "4", "--keep-interval-updates", "2", "--no-epoch-checkpoints"),
            *("--log-format", "json", "--log-interval", "1", "--save-dir", str(save_dir), *map(str, more)),
        ]

    return build


def loss_curve(output):
    """Loss, gradient norm and learning rate by update, as the log has them."""
    curve = {}
    for record in re.findall(r"train_inner \| (\{.*\})", output):
        figures = json.loads(record)
        curve[int(figures["num_updates"])] = (figures["loss"], figures["gnorm"], figures["lr"])
    return curve


@pytest.fixture(scope="module")
def killed(arguments, fairseq_env, tmp_path_factory):
    """The save-dir of a training that kill -9 ended in the second epoch, and its output."""
    save_dir = tmp_path_factory.mktemp("killed")
    process = subprocess.Popen(
        [sys.executable, "-m", "fairseq_cli.train", *arguments(save_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=fairseq_env(),
        cwd=save_dir,
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if f'"num_updates": "{UPDATES_KILLED_AT}"' in line and "train_inner" in line:
            process.send_signal(signal.SIGKILL)
            break
    lines += process.stdout.readlines()
    process.stdout.close()
    assert process.wait(timeout=60) == -signal.SIGKILL, "".join(lines)[-4000:]
    return save_dir, "".join(lines)


def test_loss_curve_after_a_kill_and_a_resume_is_that_of_one_run(arguments, killed, fairseq, tmp_path):
    save_dir, before = killed
    resumed_dir = tmp_path / "resumed"
    shutil.copytree(save_dir, resumed_dir)
    after = fairseq("train", *arguments(resumed_dir)).stdout
    whole = loss_curve(fairseq("train", *arguments(tmp_path / "whole")).stdout)
    first, second = loss_curve(before), loss_curve(after)
    start = int(re.search(r"Loaded checkpoint .*epoch (\d+) @ (\d+) updates", after).group(2))
    assert start >= UPDATES_KILLED_AT - 4 and start % 4 == 0
    assert min(second) == start + 1 and max(second) == max(whole)
    epoch_length = max(whole) // EPOCHS
    assert start % epoch_length != 0, "the kill was meant to fall into the middle of an epoch"
    assert {**first, **second} == whole
    assert {update: first[update] for update in first if update in second} == {
        update: second[update] for update in first if update in second
    }


def test_truncated_checkpoint_is_named_and_the_offered_one_continues(arguments, killed, fairseq, tmp_path):
    save_dir = tmp_path / "save"
    shutil.copytree(killed[0], save_dir)
    last = save_dir / "checkpoint_last.pt"
    last.write_bytes(last.read_bytes()[:-1000])
    failed = fairseq("train", *arguments(save_dir), check=False)
    assert failed.returncode == 1
    assert "Traceback" not in failed.stdout
    sentence = failed.stdout.strip().splitlines()[-1]
    assert sentence.startswith(f"fairseq_collab: error: checkpoint {last} is damaged")
    offered = re.search(r"--restore-file (\S+?),", sentence).group(1)
    continued = fairseq("train", *arguments(save_dir, "--restore-file", offered)).stdout
    assert f"Loaded checkpoint {offered}" in continued
    start = int(re.search(r"Loaded checkpoint .*@ (\d+) updates", continued).group(1))
    assert start > 0 and min(loss_curve(continued)) == start + 1


@pytest.mark.parametrize("name", ["checkpoint_last.pt", "checkpoint_2_20.pt"])
def test_full_disk_while_saving_leaves_the_last_good_checkpoint(arguments, killed, fairseq, tmp_path, name):
    save_dir = tmp_path / "save"
    shutil.copytree(killed[0], save_dir, ignore=shutil.ignore_patterns("*20.pt", "*24.pt", "*28.pt", "*32.pt"))
    last = save_dir / "checkpoint_last.pt"
    shutil.copyfile(save_dir / "checkpoint_2_16.pt", last)
    before = last.read_bytes()
    (save_dir / f"{name}.tmp").symlink_to("/dev/full")
    failed = fairseq("train", *arguments(save_dir), check=False)
    assert failed.returncode == 1
    sentence = failed.stdout.strip().splitlines()[-1]
    assert sentence.startswith(f"fairseq_collab: error: checkpoint {save_dir / name} could not be written")
    assert "No space left on device" in sentence
    assert last.read_bytes() == before
    assert not list(save_dir.glob("*.tmp"))


def test_stock_checkpoint_in_the_save_dir_names_the_converter(arguments, killed, toy_translation, fairseq, tmp_path):
    stock = [
        *("train", toy_translation, "--arch", "transformer_tiny", *SIZES, "--cpu", "--max-tokens", 200),
        *("--optimizer", "adam", "--lr", "5e-3", "--max-update", 1, "--disable-validation"),
    ]
    fairseq(*stock, "--save-dir", tmp_path / "stock", "--no-epoch-checkpoints")
    failed = fairseq("train", *arguments(tmp_path / "stock"), check=False)
    assert failed.returncode == 1
    assert "fairseq-collab-convert --path" in failed.stdout.strip().splitlines()[-1]


def test_data_folder_without_its_dictionary_is_said(arguments, toy_translation, fairseq, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(toy_translation, data, ignore=shutil.ignore_patterns("dict.tgt.txt"))
    failed = fairseq("train", str(data), *arguments(tmp_path / "save")[1:], check=False)
    assert failed.returncode == 1
    sentence = failed.stdout.strip().splitlines()[-1]
    assert sentence.startswith(f"fairseq_collab: error: no dictionary dict.tgt.txt in data folder {data}")
