"""Fixtures of the integration tests: fairseq commands in forks, and small models trained once with them.

Corpora and commands in fresh processes are in the `conftest.py` above. The vocabulary of the models here is the joined
dictionary of `toy_translation`, so that they can be put together.
"""

import hashlib
import json
import os
import shutil
import subprocess
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _tools import DENSE, WINDOW, CommandServer, train_flags

from data_prep.homeassistant import split_of


@pytest.fixture(scope="session")
def fairseq(tmp_path_factory: pytest.TempPathFactory, fairseq_env) -> Iterator[CommandServer]:
    """`fairseq("train", DATA, ...)` runs that command as the console script would and returns a `Finished`."""
    server = CommandServer(tmp_path_factory.mktemp("commands"), fairseq_env())
    yield server
    server.close()


@pytest.fixture(scope="session")
def plugin(plugin_dir: Path) -> None:
    """The plugin, imported into the process of the tests as fairseq imports it."""
    from fairseq import utils

    utils.import_user_module(Namespace(user_dir=str(plugin_dir)))


@pytest.fixture(scope="session")
def toy_data(toy_translation: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`toy_translation` whose target side is also a monolingual corpus (`dict.txt`, `train.bin` ...)."""
    folder = tmp_path_factory.mktemp("data") / "toy"
    shutil.copytree(toy_translation, folder)
    shutil.copy(folder / "dict.tgt.txt", folder / "dict.txt")
    for split in ("train", "valid", "test"):
        for kind in ("bin", "idx"):
            os.link(folder / f"{split}.src-tgt.tgt.{kind}", folder / f"{split}.{kind}")
    return folder


@pytest.fixture(scope="session")
def toy_classes(toy_data: Path, fairseq: CommandServer, tmp_path_factory) -> Path:
    """The target sides of `toy_data` in the layout of sentence prediction; the class is that of the first letter."""
    folder = tmp_path_factory.mktemp("classes")
    raw = tmp_path_factory.mktemp("raw")
    for split in ("train", "valid"):
        lines = (toy_data / f"{split}.tgt").read_text().splitlines()
        (raw / f"{split}.input0").write_text("".join(line + "\n" for line in lines))
        (raw / f"{split}.label").write_text("".join("vowel\n" if line[0] in "aei" else "other\n" for line in lines))
    for name, more in (("input0", ("--srcdict", toy_data / "dict.txt")), ("label", ())):
        prefixes = [flag for split in ("train", "valid") for flag in (f"--{split}pref", raw / f"{split}.{name}")]
        fairseq("preprocess", "--only-source", *prefixes, "--destdir", folder / name, "--workers", 1, *more)
    return folder


@pytest.fixture(scope="session")
def train(fairseq: CommandServer, toy_data: Path, plugin_dir: Path, tmp_path_factory) -> Callable[..., Path]:
    """`train(NAME, FLAG, ...)` trains a translation model and returns the folder of its checkpoints."""

    def run(name: str, *flags: object) -> Path:
        folder = tmp_path_factory.mktemp(name)
        fairseq("train", toy_data, "--user-dir", plugin_dir, "--save-dir", folder, *train_flags(), *flags)
        return folder

    return run


@pytest.fixture(scope="session")
def window_model(train) -> Path:
    """A folder with `checkpoint10.pt`, `checkpoint20.pt` and `checkpoint_last.pt` of a model with window mixing."""
    return train("window", *WINDOW, "--max-epoch", 20, "--save-interval", 10)


@pytest.fixture(scope="session")
def dense_model(train) -> Path:
    """As `window_model`, with dense mixing."""
    return train("dense", *DENSE, "--max-epoch", 20, "--save-interval", 10)


@pytest.fixture(scope="session")
def generate(fairseq: CommandServer, toy_data: Path, plugin_dir: Path) -> Callable[..., object]:
    """`generate(CHECKPOINT, FLAG, ...)` translates the test set with fairseq-generate."""

    def run(path: object, *flags: object, check: bool = True):
        return fairseq(
            "generate",
            *(toy_data, "--user-dir", plugin_dir, "--path", path, "--cpu", "--num-workers", 0),
            *("--required-batch-size-multiple", 1, *flags),
            check=check,
        )

    return run


@pytest.fixture(scope="session")
def load(plugin, toy_data: Path) -> Callable[..., list]:
    """`load(CHECKPOINT, ...)` returns the models of these checkpoints in eval mode; keywords override their options."""
    from fairseq import checkpoint_utils

    def run(*paths: Path, **overrides: object) -> list:
        models, _, _ = checkpoint_utils.load_model_ensemble_and_task(
            [str(path) for path in paths], arg_overrides={"data": str(toy_data), **overrides}
        )
        return [model.eval() for model in models]

    return run


@pytest.fixture(scope="session")
def train_stock(fairseq, toy_data, plugin_dir, tmp_path_factory):
    """`train_stock(ARCH, FLAG, ...)` returns the checkpoint of an ordinary model."""

    def run(arch, *flags, data=toy_data):
        folder = tmp_path_factory.mktemp(arch)
        fairseq("train", data, "--user-dir", plugin_dir, "--save-dir", folder, "--arch", arch, *flags)
        return folder / "checkpoint_last.pt"

    return run


@pytest.fixture
def convert(tmp_path, capsys):
    """`convert(PATH, FLAG, ...)` writes `converted.pt` into `tmp_path`; returns the report and what was printed."""

    from fairseq_collab.cli.convert import main

    def run(path, *flags):
        output, folder = tmp_path / "converted.pt", tmp_path / "report"
        arguments = ["--path", path, "--output", output, "--force", "--report", folder, *flags]
        assert main([str(argument) for argument in arguments]) == 0, capsys.readouterr().err
        return json.loads((folder / "report.json").read_text()), capsys.readouterr().out

    return run


@pytest.fixture
def refused(tmp_path, capsys):
    """As `convert`, for what ends with one sentence and writes nothing; returns the sentence."""

    from fairseq_collab.cli.convert import main

    def run(path, *flags):
        output = tmp_path / "refused.pt"
        assert main([str(argument) for argument in ("--path", path, "--output", output, *flags)]) == 1
        assert not output.exists()
        _, start, reasons = capsys.readouterr().err.strip().partition("fairseq-collab-convert: error: ")
        assert start and "Traceback" not in reasons
        return reasons

    return run


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A small wheel with the layout of the real package, and its SHA-256."""
    path = tmp_path_factory.mktemp("wheel") / "small.whl"
    words = ["device", "room", "light", "door", "opens", "closes", "slowly", "never", "again", "today"]
    names = [f"part{number}" for number in range(60)]
    assert {split_of(name) for name in names} == {"train", "valid", "test"}
    with zipfile.ZipFile(path, "w") as wheel:
        for number, name in enumerate(names):
            rows = [[words[(number + i * j) % 10] for j in range(3 + i % 4)] + [name] for i in range(8)]
            for lang, end in (("en", ""), ("de", "en")):
                texts = {f"key{i}": " ".join(word + end for word in row) for i, row in enumerate(rows)}
                wheel.writestr(f"homeassistant/components/{name}/translations/{lang}.json", json.dumps(texts))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def processes() -> Callable[[subprocess.Popen], subprocess.Popen]:
    """Registers a process that must not outlive the test."""
    started: list[subprocess.Popen] = []
    yield lambda process: started.append(process) or process
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()
