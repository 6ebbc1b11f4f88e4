"""`scripts/setup_env.sh`: what it says when something is missing, and that a finished environment is left alone.

A stand-in for Python answers the script's questions and plays pip, so that nothing is downloaded.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = "awk bash cat cp df dirname flock grep head mkdir mv rm sed sleep tail tee touch tr".split()

# Behaves as a Python of version $FAKE_VERSION. `-m venv` puts a copy of it into the environment; `-m pip` writes its
# log as $FAKE_PIP says; everything else is run by the real Python.
FAKE_PYTHON = """#!{bash}
case "$1 ${{2:-}}" in
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; exit ;;
"-m pip")
    echo "pip $*" >>"$FAKE_RECORD"
    echo "constraints: $(head -n 1 "$PIP_CONSTRAINT")" >>"$FAKE_RECORD"
    [[ -z "${{FAKE_PIP_WAITS:-}}" ]] || {{ touch "$FAKE_RECORD.started"; sleep 10; }}
    [[ -z "${{FAKE_PIP_SAYS:-}}" ]] || {{ echo "ERROR: $FAKE_PIP_SAYS" >>"$PIP_LOG"; exit 1; }}
    exit 0 ;;
"-c import venv, ensurepip") [[ -z "${{FAKE_NO_VENV:-}}" ]]; exit ;;
"-c import sys; print"*) echo "${{FAKE_VERSION:-3.11}}"; exit ;;
"-c import platform"*) [[ -z "${{FAKE_NEEDS_COMPILER:-}}" ]]; exit ;;
esac
exec {python} "$@"
"""


class Checkout:
    """A copy of what the script needs, in a folder with a space in its name, and a PATH that holds only our tools."""

    def __init__(self, folder: Path):
        self.root = folder / "a checkout"
        self.bin = folder / "bin"
        self.record = folder / "record"
        for name in ("setup.py", "pyproject.toml", "scripts/setup_env.sh", "scripts/constraints.txt"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "fairseq_collab").mkdir()
        shutil.copy(ROOT / "fairseq_collab" / "__init__.py", self.root / "fairseq_collab")
        self.bin.mkdir()
        for tool in TOOLS:
            if shutil.which(tool):
                (self.bin / tool).symlink_to(shutil.which(tool))
        self.venv = self.root / ".venv"

    def add_python(self, name: str = "python3.11") -> Path:
        path = self.bin / name
        path.write_text(FAKE_PYTHON.format(bash=shutil.which("bash"), python=sys.executable))
        path.chmod(0o755)
        return path

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen:
        return subprocess.Popen(
            [shutil.which("bash"), self.root / "scripts" / "setup_env.sh", *arguments],
            cwd=self.root.parent,
            env={"PATH": str(self.bin), "HOME": str(self.root), "FAKE_RECORD": str(self.record), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        process = self.start(*arguments, **variables)
        stdout, stderr = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def installs(self) -> int:
        return self.record.read_text().count("pip -m pip install") if self.record.exists() else 0


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def assert_refused(done: subprocess.CompletedProcess, *parts: str) -> None:
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("setup_env: error: ")
    for part in parts:
        assert part in line


def test_without_python_it_says_which_are_looked_for(checkout):
    assert_refused(checkout.run(), "no Python 3.10, 3.11 or 3.12 was found", "PYTHON=")
    assert not checkout.venv.exists()


@pytest.mark.parametrize("version", ["3.9", "3.13"])
def test_a_python_of_another_version_is_not_taken(checkout, version):
    checkout.add_python("python3")
    assert_refused(checkout.run(FAKE_VERSION=version), "no Python 3.10, 3.11 or 3.12 was found")


def test_a_launcher_that_does_not_run_is_passed_over(checkout):
    broken = checkout.add_python("python3.11")
    broken.write_text("#!/bin/sh\nexit 127\n")
    checkout.add_python("python3.12")
    done = checkout.run(FAKE_VERSION="3.12")
    assert done.returncode == 0, done.stderr
    assert "Python 3.12" in done.stdout


def test_a_chosen_python_that_does_not_fit_is_named(checkout):
    checkout.add_python()
    assert_refused(checkout.run(PYTHON="/no/such/python"), "PYTHON=/no/such/python")


def test_a_missing_venv_module_is_named(checkout):
    checkout.add_python()
    assert_refused(checkout.run(FAKE_NO_VENV="1"), "has no venv module", "python3.11-venv")


def test_a_missing_compiler_matters_only_where_fairseq_is_compiled(checkout):
    checkout.add_python()
    assert_refused(checkout.run(FAKE_NEEDS_COMPILER="1"), "no C++ compiler", "Python 3.11")
    assert not checkout.venv.exists()
    assert checkout.run().returncode == 0


@pytest.mark.parametrize(
    ("pip_says", "part"),
    [
        ("Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        ("Retrying after NewConnectionError: Failed to establish a new connection", "registry cannot be reached"),
        ("error: command '/usr/bin/g++' failed with exit code 1", "compiling fairseq failed"),
        ("No matching distribution found for torch==2.13.0", "No matching distribution found for torch==2.13.0"),
    ],
)
def test_what_stops_pip_is_said_in_one_sentence(checkout, pip_says, part):
    checkout.add_python()
    assert_refused(checkout.run(FAKE_PIP_SAYS=pip_says), part)
    assert checkout.run().returncode == 0
    assert checkout.installs() == 2


def test_an_environment_of_someone_else_is_left_alone(checkout):
    checkout.add_python()
    (checkout.venv / "bin").mkdir(parents=True)
    assert_refused(checkout.run(), "was not made by this script")
    assert (checkout.venv / "bin").exists()


def test_an_unknown_argument_is_refused(checkout):
    assert_refused(checkout.run("--hurry"), "unknown argument '--hurry'")


def test_a_second_run_does_nothing_and_says_nothing(checkout):
    checkout.add_python()
    first = checkout.run()
    assert first.returncode == 0, first.stderr
    assert "minutes" in first.stdout
    assert "constraints: # The versions" in checkout.record.read_text()
    second = checkout.run()
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert checkout.installs() == 1


def test_changed_requirements_are_installed_into_the_same_environment(checkout):
    checkout.add_python()
    checkout.run()
    (checkout.venv / "mine").touch()
    with (checkout.root / "scripts" / "constraints.txt").open("a") as file:
        file.write("six==1.17.0\n")
    assert "updating" in checkout.run().stdout
    assert checkout.installs() == 2
    assert (checkout.venv / "mine").exists()


def test_a_moved_checkout_gets_a_new_environment(checkout):
    checkout.add_python()
    checkout.run()
    (checkout.venv / "mine").touch()
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    assert checkout.run().returncode == 0
    assert checkout.installs() == 2
    assert not (checkout.root / ".venv" / "mine").exists()


def test_a_killed_installation_is_done_again(checkout):
    checkout.add_python()
    process = checkout.start(FAKE_PIP_WAITS="1")
    wait_for(Path(f"{checkout.record}.started"))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    done = checkout.run()
    assert done.returncode == 0, done.stderr
    assert "incomplete" in done.stdout
    assert checkout.installs() == 2


@pytest.mark.skipif(not shutil.which("flock"), reason="runs wait for each other by flock")
def test_two_runs_at_once_install_once(checkout):
    checkout.add_python()
    processes = [checkout.start() for _ in range(3)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert checkout.installs() == 1


def wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


@pytest.mark.slow
def test_an_unreachable_registry_is_named_by_the_real_pip(checkout):
    done = checkout.run(
        PYTHON=sys.executable,
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_RETRIES="0",
        PIP_NO_CACHE_DIR="1",
    )
    assert done.returncode != 0
    assert "registry cannot be reached" in done.stderr.splitlines()[-1]
