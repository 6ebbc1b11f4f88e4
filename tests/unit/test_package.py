"""The package as a whole: its version, what importing it costs, and what it lets `torch.load` accept."""

import argparse
import json
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import numpy
import pytest
import torch

import fairseq_collab
from fairseq_collab._plugin_path import PluginPath

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_the_same_everywhere():
    assert re.search(
        rf"^## {re.escape(fairseq_collab.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    shown = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown.stdout.split()[-1] == fairseq_collab.__version__
    for distribution in metadata.distributions(name="fairseq_collab"):
        assert distribution.version == fairseq_collab.__version__


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """The modules that a fresh process has after importing the package, and after using its public names."""
    code = (
        "import fairseq_collab, json, sys; at_first = sorted(sys.modules)\n"
        "for name in fairseq_collab.__all__: getattr(fairseq_collab, name)\n"
        "print(json.dumps({'at first': at_first, 'in the end': sorted(sys.modules)}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return {when: set(names) for when, names in json.loads(done.stdout).items()}


def test_importing_the_package_imports_neither_fairseq_nor_transformers(imported):
    assert not {"fairseq", "transformers", "matplotlib", "tensorly"} & imported["in the end"]


def test_public_names_are_imported_on_first_use(imported):
    assert "fairseq_collab.attention" not in imported["at first"]
    assert "fairseq_collab.attention" in imported["in the end"]
    assert set(fairseq_collab.__all__) <= set(dir(fairseq_collab))


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'fairseq_collab' has no attribute 'Nonsense'"):
        fairseq_collab.Nonsense  # noqa: B018


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """What stock fairseq saves when a metric is kept in numpy numbers, as `--eval-bleu` does."""
    path = tmp_path / "checkpoint.pt"
    metrics = [
        numpy.array([1, 2, 3]),
        numpy.float64(0.5),
        numpy.int64(7),
        numpy.array([0.5], dtype="float32"),
        numpy.bool_(1),
    ]
    torch.save({"cfg": {"model": argparse.Namespace(arch="transformer_collab")}, "metrics": metrics}, path)
    return path


def assert_loads(path: Path) -> None:
    loaded = torch.load(path, weights_only=True)
    assert loaded["cfg"]["model"].arch == "transformer_collab"
    assert loaded["metrics"][0].tolist() == [1, 2, 3]
    assert [value.item() for value in loaded["metrics"][1:]] == [0.5, 7, 0.5, True]


def test_fairseq_checkpoints_load_without_switching_off_safe_loading(checkpoint):
    assert_loads(checkpoint)


@pytest.mark.parametrize("core", ["core", "_core"])
def test_checkpoints_saved_with_numpy_1_and_numpy_2_load(checkpoint, tmp_path, core):
    other = tmp_path / "other.pt"
    with zipfile.ZipFile(checkpoint) as source, zipfile.ZipFile(other, "w") as target:
        for info in source.infolist():
            content = source.read(info)
            target.writestr(info, re.sub(rb"numpy\._?core\.multiarray", f"numpy.{core}.multiarray".encode(), content))
    assert f"numpy.{core}.multiarray".encode() in other.read_bytes()
    assert_loads(other)


class RunsOnLoading:
    def __reduce__(self):
        return exec, ("raise SystemExit('code in a checkpoint was run')",)


@pytest.mark.parametrize("hidden", [RunsOnLoading(), numpy.array([RunsOnLoading()]), numpy.array([{}])])
def test_safe_loading_still_refuses_code_and_arrays_of_objects(tmp_path, hidden):
    torch.save({"metrics": hidden}, tmp_path / "checkpoint.pt")
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(tmp_path / "checkpoint.pt", weights_only=True)


def test_only_copies_of_the_package_pass_for_its_folder(tmp_path):
    package = tmp_path / "fairseq_collab"
    for folder in (package, tmp_path / "other" / "fairseq_collab", tmp_path / "copy" / "fairseq_collab"):
        folder.mkdir(parents=True)
    (package / "__init__.py").touch()
    (tmp_path / "copy" / "fairseq_collab" / "__init__.py").touch()
    (tmp_path / "__init__.py").touch()
    path = PluginPath([str(package)])
    assert str(tmp_path / "copy" / ".." / "fairseq_collab") in path
    assert str(tmp_path / "copy" / "fairseq_collab") in path
    assert str(tmp_path / "other" / "fairseq_collab") not in path
    assert str(tmp_path) not in path
