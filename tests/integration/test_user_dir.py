"""`--user-dir` in every spelling, with stock fairseq: as a path, by name, installed, editable, already imported.

fairseq looks for a name beside its own files, so each kind of install gets a small environment that holds fairseq.
Within one environment fairseq is imported once and a child is forked for every case, which then starts without the
plugin as a fresh process would.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

RUN_CASES = """
import argparse, json, logging, os, sys
import fairseq.models, fairseq.utils
assert "fairseq_collab" not in sys.modules

def run(case):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    os.chdir(case["cwd"])
    sys.path[:] = [entry for entry in sys.path if entry not in case["without"]]
    error = None
    try:
        exec(case["before"], {})
        for user_dir in case["user_dirs"]:
            fairseq.utils.import_user_module(argparse.Namespace(user_dir=user_dir))
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    package = sys.modules.get("fairseq_collab")
    return {
        "error": error,
        "registered": "transformer_collab" in fairseq.models.MODEL_REGISTRY,
        "used": package and package.__path__[0],
        "messages": messages,
    }

results = {}
for case in json.loads(sys.argv[1]):
    receive, send = os.pipe()
    if os.fork() == 0:
        os.write(send, json.dumps(run(case)).encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as stream:
        results[case["name"]] = json.load(stream)
    os.wait()
print(json.dumps(results))
"""


def make_checkout(folder: Path) -> Path:
    folder.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "fairseq_collab", folder / "fairseq_collab", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


class Environment:
    """A virtual environment with its own copy of fairseq; everything else comes from the one that runs the tests."""

    def __init__(self, folder: Path):
        self.python = folder / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        (self.site_packages,) = folder.glob("lib/python*/site-packages")
        outside = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
        (self.site_packages / "outside.pth").write_text("\n".join(outside) + "\n")
        fairseq = Path(importlib.util.find_spec("fairseq").origin).parent
        shutil.copytree(fairseq, self.site_packages / "fairseq", copy_function=link_or_copy)

    def pip(self, *arguments: str | Path) -> None:
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", self.python, *arguments],
            check=True,
            capture_output=True,
            env={**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        )

    def install(self, *what: str | Path) -> None:
        self.pip("install", "--no-deps", "--no-build-isolation", *what)

    def traces(self) -> list[str]:
        return sorted(path.name for path in self.site_packages.iterdir() if "collab" in path.name)

    def run(self, cases: list[dict]) -> dict[str, dict]:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            [self.python, "-c", RUN_CASES, json.dumps(cases)],
            capture_output=True,
            text=True,
            cwd=self.site_packages.parent,
            env={**environment, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


def case(name: str, cwd: Path, *user_dirs: str | Path, before: str = "", without: tuple = ()) -> dict:
    return {
        "name": name,
        "cwd": str(cwd),
        "user_dirs": [str(user_dir) for user_dir in user_dirs],
        "before": before,
        "without": [str(entry) for entry in without],
    }


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict], Path, Path]:
    """Results of the cases with an installed copy, the folder of that copy, and the folder of a checkout beside it."""
    folder = tmp_path_factory.mktemp("installed")
    checkout = make_checkout(folder / "checkout")
    environment = Environment(folder / "env")
    environment.install(checkout)
    package = checkout / "fairseq_collab"
    results = environment.run(
        [
            case("name", folder, "fairseq_collab"),
            case("path", folder, package),
            case("relative path", folder, "checkout/fairseq_collab"),
            case("path with a slash", folder, f"{package}/"),
            case("name in a checkout", checkout, "fairseq_collab"),
            case("dot in the package", package, "."),
            case("name, imported before", folder, "fairseq_collab", before="import fairseq_collab"),
            case("name, models imported before", folder, "fairseq_collab", before="import fairseq_collab.models"),
            case("checkout, other copy imported before", folder, package, before="import fairseq_collab"),
            case("name, then path", folder, "fairseq_collab", environment.site_packages / "fairseq_collab"),
        ]
    )
    return results, environment.site_packages / "fairseq_collab", package


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict], Path, Environment]:
    """Results of the cases with an editable install, the folder that it points to, and the environment."""
    folder = tmp_path_factory.mktemp("editable")
    checkout = make_checkout(folder / "a checkout")
    environment = Environment(folder / "env")
    environment.install("-e", checkout)
    package = checkout / "fairseq_collab"
    results = environment.run(
        [
            case("name", folder, "fairseq_collab"),
            case("path", folder, package),
            case("name in the checkout", checkout, "fairseq_collab"),
            case("name, imported before", folder, "fairseq_collab", before="import fairseq_collab"),
            case("path, then name", folder, package, "fairseq_collab"),
            case("folder gone", folder, "fairseq_collab", without=(checkout,)),
        ]
    )
    return results, package, environment


def assert_works(result: dict, used: Path) -> None:
    assert result["error"] is None
    assert result["registered"]
    assert Path(result["used"]).resolve() == used.resolve()


@pytest.mark.parametrize("name", ["name", "name, imported before", "name, models imported before", "name, then path"])
def test_an_installed_plugin_is_found_by_name(installed, name):
    results, copy, _ = installed
    assert_works(results[name], copy)
    assert not [message for message in results[name]["messages"] if "is the one in use" in message]


@pytest.mark.parametrize(
    "name", ["path", "relative path", "path with a slash", "name in a checkout", "dot in the package"]
)
def test_a_checkout_wins_over_an_installed_copy(installed, name):
    results, _, checkout = installed
    assert_works(results[name], checkout)


def test_a_second_copy_is_accepted_and_the_one_in_use_is_named(installed):
    results, copy, checkout = installed
    result = results["checkout, other copy imported before"]
    assert_works(result, copy)
    (warning,) = [message for message in result["messages"] if "is the one in use" in message]
    assert str(copy) in warning and str(checkout) in warning


@pytest.mark.parametrize("name", ["name", "path", "name in the checkout", "name, imported before", "path, then name"])
def test_an_editable_install_works_in_every_spelling(editable, name):
    results, package, _ = editable
    assert_works(results[name], package)


def test_an_editable_install_whose_folder_is_gone_says_so(editable):
    results, _, _ = editable
    assert "install it again" in results["folder gone"]["error"]


def test_uninstalling_an_editable_install_leaves_nothing(editable):
    _, _, environment = editable
    assert environment.traces()
    environment.pip("uninstall", "--yes", "fairseq_collab")
    assert environment.traces() == []
