"""The commands of the README, word for word and in its order, cut short by further options and on small corpora.

Each command has a line here that says what it gets in addition; a command without one fails the test. The two
commands of the set-up have tests of their own, test_quickstart.py and test_setup_env.py.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import _corpora  # noqa: E402
from _documents import commands_of  # noqa: E402

README = ROOT / "README.md"
SMALL = (
    "--encoder-layers 1 --decoder-layers 1 --encoder-ffn-embed-dim 64 --decoder-ffn-embed-dim 64 --cpu --max-update 4"
)
TRAINING = "--optimizer adam --lr 1e-3 --criterion cross_entropy --share-all-embeddings --max-tokens 500"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like the project's root to commands with relative paths."""
    for name in ("fairseq_collab", "scripts", "data_prep"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.fixture
def shell(folder, fairseq_env):
    """Runs a line with the programs of this Python's environment, and returns its output."""

    def run(line: str) -> str:
        env = fairseq_env({"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"})
        taken = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "DRY_RUN")
        env = {key: value for key, value in env.items() if key not in taken and "SLURM" not in key}
        done = subprocess.run(
            ["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False
        )
        output = done.stdout + done.stderr
        assert done.returncode == 0, f"{line}\n{output[-6000:]}"
        return output

    return run


@pytest.mark.slow
def test_every_command_of_the_readme_runs(folder, shell, archive):
    wheel = f"--archive {shlex.quote(str(archive[0]))} --sha256 {archive[1]}"
    _corpora.write_wmt16(folder / "raw")
    more = {  # the beginning of a command: what it gets in addition, and a word of its output
        "python -m data_prep homeassistant": (f"{wheel} --vocab-size 120", "train"),
        "python -m data_prep wmt16_en_de_bpe32k": ("--raw raw --no-checksums --workers 1", "train"),
        "fairseq-train DATA": (None, ""),  # the claim on the first screen; the next one has all its words
        "fairseq-train data/en-de/bin": (SMALL, "done training"),
        "python scripts/evaluate_bleu.py": ("--beam 1 --cpu", "BLEU"),
        "echo": ("--cpu", "D-0"),
        "KEY_DIM=128": (f"--tiny {wheel} --max-epoch 1 --keep-last-epochs 3", "BLEU"),
        "NPROC_PER_NODE=2": (f"{TRAINING} {SMALL} --save-dir several", "done training"),
        "fairseq-collab-convert --path stock.pt": ("", "parameters"),
        "fairseq-collab-convert --to-concatenated": ("", "back.pt"),
    }
    stock = (
        f"fairseq-train data/en-de/bin --arch transformer {TRAINING} {SMALL} --save-dir stock --user-dir fairseq_collab"
    )
    ran = set()
    for command in commands_of(README):
        if command.program in ("quickstart.sh", "test.sh", "setup_env.sh"):
            continue
        (start,) = [start for start in more if command.text.startswith(start)] or [None]
        assert start is not None, f"no line of this test says how to run: {command.text}"
        ran.add(start)
        addition, expected = more[start]
        if addition is None:
            continue
        if "stock.pt" in command.text:  # the one file that the README does not make
            shell(stock)
            (folder / "stock.pt").symlink_to(folder / "stock/checkpoint_last.pt")
        line = command.text.replace(" ...", "")
        assert expected in shell(f"{line} {addition}"), line
    assert ran == set(more), f"not in the README any more: {set(more) - ran}"
    assert (folder / "collab.pt").is_file() and (folder / "back.pt").is_file()
