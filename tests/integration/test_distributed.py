"""scripts/launch.sh: several processes are one job, and what would not be one is refused.

The trainings run with a plugin, `probe`, that imports ours and notes down what each process computes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[2] / "scripts" / "launch.sh"

PROBE = """
import hashlib, json, math, os

import fairseq_collab.models
from fairseq.trainer import Trainer

losses = []
reduce_and_log, lr_step = Trainer._reduce_and_log_stats, Trainer.lr_step


def noting_losses(self, logging_outputs, sample_size, *args, **kwargs):
    if self.model.training:
        losses.append(float(sum(log["loss"] for log in logging_outputs)) / float(sample_size) / math.log(2))
    return reduce_and_log(self, logging_outputs, sample_size, *args, **kwargs)


def noting_parameters(self, epoch_itr, *args, **kwargs):
    digest = hashlib.sha256()
    for parameter in self.model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    note = {"losses": losses, "parameters": digest.hexdigest(), "world_size": self.data_parallel_world_size}
    with open(os.path.join(os.environ["PROBE_DIR"], f"rank{self.data_parallel_rank}.json"), "w") as file:
        json.dump(note, file)
    return lr_step(self, epoch_itr, *args, **kwargs)


Trainer._reduce_and_log_stats, Trainer.lr_step = noting_losses, noting_parameters
"""


@pytest.fixture(scope="module")
def launch(fairseq_env, tmp_path_factory):
    """`launch(*arguments, **variables)` runs the script; variables of other launchers are taken out first."""
    cwd = tmp_path_factory.mktemp("cwd")

    def run(*arguments, **variables):
        env = fairseq_env({"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"})
        taken = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK")
        env = {key: value for key, value in env.items() if key not in taken and not key.startswith("SLURM_")}
        return subprocess.run(
            [str(LAUNCH), *map(str, arguments)],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**env, **variables},
            cwd=cwd,
            timeout=300,
        )

    return run


@pytest.fixture(scope="module")
def notes(toy_translation, run_fairseq, launch, tmp_path_factory):
    """What the probe noted in two processes, and in one that sums two batches; without dropout, plain SGD."""
    folder = tmp_path_factory.mktemp("distributed")
    (folder / "probe").mkdir()
    (folder / "probe" / "__init__.py").write_text(PROBE)
    flags = [
        *("--user-dir", folder / "probe", "--arch", "transformer_collab_tiny", "--dropout", 0, "--max-tokens", 200),
        *("--optimizer", "sgd", "--lr", "0.2", "--clip-norm", 0, "--max-epoch", 3, "--no-save", "--seed", 3),
        *("--disable-validation", "--criterion", "cross_entropy", "--num-workers", 0),
    ]
    for name in ("two", "one"):
        (folder / name).mkdir()
    done = launch(
        *(toy_translation, *flags, "--cpu", "--save-dir", folder / "two"),
        NPROC_PER_NODE="2",
        PROBE_DIR=str(folder / "two"),
    )
    assert done.returncode == 0, done.stdout[-6000:]
    run_fairseq(
        *("train", toy_translation, *flags, "--cpu", "--update-freq", 2, "--save-dir", folder / "one"),
        env={"PROBE_DIR": str(folder / "one")},
    )
    return {
        name: [json.loads(path.read_text()) for path in sorted((folder / name).glob("rank*.json"))]
        for name in ("two", "one")
    }


def test_both_processes_end_with_the_same_parameters(notes):
    first, second = notes["two"]
    assert first["world_size"] == second["world_size"] == 2
    assert first["parameters"] == second["parameters"]


def test_losses_of_two_processes_are_those_of_one_that_sums_two_batches(notes):
    two, (one,) = notes["two"][0]["losses"], notes["one"]
    assert one["world_size"] == 1
    assert len(two) == len(one["losses"]) > 10
    assert two[0] - two[-1] > 0.5, "the losses must move for their equality to mean something"
    # The two add up the same gradients in another order: every update may add one rounding of float32.
    rounding = 2.0**-23
    for update, (loss, expected) in enumerate(zip(two, one["losses"], strict=True), start=1):
        assert abs(loss - expected) <= rounding * update * expected


def test_killed_job_of_two_processes_resumes(toy_translation, launch, tmp_path):
    flags = [
        *("--arch", "transformer_collab_tiny", "--max-tokens", 400, "--optimizer", "adam", "--lr", "1e-3", "--cpu"),
        *("--save-dir", tmp_path, "--no-epoch-checkpoints", "--disable-validation", "--num-workers", 0),
    ]
    for epochs in (1, 2):
        done = launch(toy_translation, *flags, "--max-epoch", epochs, NPROC_PER_NODE="2")
        assert done.returncode == 0, done.stdout[-6000:]
    assert "Loaded checkpoint" in done.stdout and "(epoch 2 @ " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        ((), {}, "the first argument is the data folder"),
        (("--arch", "x"), {}, "the first argument is the data folder"),
        (("DATA",), {"RANK": "0"}, "RANK is set, so this runs inside torchrun"),
        (("DATA",), {"TORCHELASTIC_RUN_ID": "none"}, "TORCHELASTIC_RUN_ID is set"),
        (("DATA", "--distributed-world-size", "2"), {}, "--distributed-world-size is set by launch.sh"),
        (("DATA", "--distributed-port=1"), {}, "--distributed-port is set by launch.sh"),
        (("DATA", "--device-id", "0"), {}, "--device-id is set by launch.sh"),
        (("DATA",), {"NPROC_PER_NODE": "two"}, "NPROC_PER_NODE is 'two'"),
        (("DATA",), {"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE is '0'"),
        (("DATA",), {"NNODES": "2"}, "NNODES=2 needs MASTER_ADDR"),
        (("DATA",), {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK=2, but with NNODES=2"),
        (("DATA",), {"SLURM_JOB_NUM_NODES": "2"}, "start it with srun"),
        (
            ("DATA",),
            {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"},
            "srun started 4 tasks on 2 machines",
        ),
        (("nowhere",), {}, "there is no data folder nowhere"),
        (("{empty}",), {}, "has no dictionary"),
        (("{data}", "--restore-file", "nowhere.pt"), {}, "there is no checkpoint nowhere.pt"),
        (("{data}", "--save-dir", "{damaged}"), {}, "checkpoint_last.pt is damaged"),
    ],
)
def test_what_would_not_be_one_job_is_refused_in_one_sentence(
    launch, toy_translation, tmp_path, arguments, variables, sentence
):
    (tmp_path / "checkpoint_last.pt").write_bytes(b"PK\3\4 and no more")
    empty = tmp_path / "empty"
    empty.mkdir()
    named = {"data": toy_translation, "empty": empty, "damaged": tmp_path}
    refused = launch(*(argument.format(**named) for argument in arguments), **variables)
    assert refused.returncode == 1
    assert sentence in refused.stdout
    assert len(refused.stdout.strip().splitlines()) == 1
    assert refused.stdout.startswith("launch.sh: error: ")


def test_second_job_does_not_write_into_the_save_dir_of_the_first(launch, toy_translation, tmp_path):
    lock = tmp_path / "launch.lock"
    lock.write_text("process 1 on elsewhere\n")
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused = launch(toy_translation, "--save-dir", tmp_path)
    assert refused.returncode == 1
    assert f"another job is writing into {tmp_path} (process 1 on elsewhere)" in refused.stdout
    assert os.listdir(tmp_path) == ["launch.lock"]


@pytest.fixture
def recorded(tmp_path):
    """A copy of the script beside a Python that writes down what it would start; and that record."""
    root = tmp_path / "checkout"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(LAUNCH, root / "scripts")
    binary = root / ".venv" / "bin" / "python"
    binary.parent.mkdir(parents=True)
    record = tmp_path / "record.txt"
    binary.write_text(
        f'#!/bin/sh\nif [ "$1" = - ]; then cat >/dev/null; echo "$GPUS"; else printf "%s\\n" "$@" >{record}; fi\n'
    )
    binary.chmod(0o755)
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "scontrol").write_text('#!/bin/sh\n[ "$3" = "node[3-4]" ] && printf "node3\\nnode4\\n"\n')
    (bin_dir / "scontrol").chmod(0o755)

    (tmp_path / "DATA").mkdir()
    (tmp_path / "DATA" / "dict.txt").touch()

    def start(*arguments, **variables):
        kept = {"PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
        done = subprocess.run(
            [str(root / "scripts" / "launch.sh"), *arguments],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**kept, **variables},
            cwd=tmp_path,
            timeout=60,
        )
        return done, " ".join(record.read_text().split("\n")) if record.exists() else ""

    return start


def test_all_gpus_are_used_with_nccl_unless_told_otherwise(recorded):
    done, command = recorded("DATA", "--arch", "a", GPUS="4")
    assert done.returncode == 0, done.stdout
    assert "--standalone --nproc-per-node 4" in command
    assert "--distributed-backend nccl" in command and "--cpu" not in command
    assert "--distributed-init-method env:// --distributed-no-spawn" in command
    _, command = recorded("DATA", "--cpu", GPUS="4", NPROC_PER_NODE="2")
    assert "--nproc-per-node 2" in command
    assert "--distributed-backend gloo --cpu --ddp-backend legacy_ddp" in command


def test_more_processes_than_gpus_are_refused(recorded):
    done, command = recorded("DATA", GPUS="2", NPROC_PER_NODE="3")
    assert done.returncode == 1 and not command
    assert "NPROC_PER_NODE=3, but this machine has 2 GPU(s)" in done.stdout


def test_plugin_is_added_unless_one_is_given(recorded):
    assert "/checkout/fairseq_collab " in recorded("DATA", GPUS="0")[1].split("--user-dir ")[1]
    assert recorded("DATA", "--user-dir", "mine", GPUS="0")[1].count("--user-dir") == 1


def test_machines_of_a_slurm_step_are_one_job(recorded):
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "node[3-4]",
        "SLURM_NODEID": "1",
    }
    done, command = recorded("DATA", GPUS="8", **slurm)
    assert done.returncode == 0, done.stdout
    assert "--nnodes 2 --node-rank 1 --master-addr node3 --master-port 20007 --nproc-per-node 8" in command
