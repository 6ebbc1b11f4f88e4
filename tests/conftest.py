"""Fixtures shared by all tests: toy corpora, and fairseq commands in fresh processes.

Assertions and helpers of one test module only belong in that module.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# before torch is imported: threads that wait for each other make small products slower, and the machine has other work
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
PLUGIN_DIR = ROOT / "fairseq_collab"

SPLIT_SIZES = {"train": 300, "valid": 30, "test": 30}


def _sentences(generator: random.Random, count: int) -> list[list[str]]:
    words = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
    return [[generator.choice(words) for _ in range(generator.randint(3, 8))] for _ in range(count)]


def _translate(words: list[str]) -> list[str]:
    """The toy language pair: every word has one translation, and the order is reversed."""
    return [word[::-1] + "x" for word in reversed(words)]


def _environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env.update(extra or {})
    return env


@pytest.fixture(scope="session")
def plugin_dir() -> Path:
    """The folder to give to `--user-dir`."""
    return PLUGIN_DIR


@pytest.fixture(scope="session")
def fairseq_env() -> Callable[..., dict[str, str]]:
    """A function that returns the environment of `run_fairseq`, for tests that start processes themselves."""
    return _environment


@pytest.fixture(scope="session")
def run_fairseq(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess]:
    """`run_fairseq("train", DATA, "--arch", ...)` runs that fairseq command in a fresh process.

    Keywords: `check` (fail the test when the exit status is not 0; default), `env` (variables to add),
    `timeout` (seconds), `input` (text for standard input), `cwd` (default: an empty folder).
    Standard output and error come back as text in one stream, `stdout`.
    """
    default_cwd = tmp_path_factory.mktemp("cwd")

    def run(
        command: str,
        *args: object,
        check: bool = True,
        env: dict[str, str] | None = None,
        timeout: float = 300,
        input: str | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess:
        module = "fairseq_cli." + command.removeprefix("fairseq-").replace("-", "_")
        process = subprocess.run(
            [sys.executable, "-m", module, *map(str, args)],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL if input is None else None,
            input=input,
            text=True,
            encoding="utf-8",
            env=_environment({"PYTHONIOENCODING": "utf-8", **(env or {})}),
            cwd=cwd or default_cwd,
            timeout=timeout,
        )
        if check and process.returncode != 0:
            pytest.fail(f"fairseq {command} ended with status {process.returncode}:\n{process.stdout[-6000:]}")
        return process

    return run


@pytest.fixture(scope="session")
def toy_translation(tmp_path_factory: pytest.TempPathFactory, run_fairseq) -> Path:
    """A binarised corpus, languages `src` and `tgt`, one joined dictionary; the raw `train.src` etc. lie beside it."""
    folder = tmp_path_factory.mktemp("toy_translation")
    generator = random.Random(0)
    for split, count in SPLIT_SIZES.items():
        sentences = _sentences(generator, count)
        (folder / f"{split}.src").write_text("".join(" ".join(s) + "\n" for s in sentences), encoding="utf-8")
        (folder / f"{split}.tgt").write_text(
            "".join(" ".join(_translate(s)) + "\n" for s in sentences), encoding="utf-8"
        )
    prefixes = [f"--{split}pref={folder / split}" for split in SPLIT_SIZES]
    run_fairseq(
        "preprocess",
        *("--source-lang", "src", "--target-lang", "tgt", "--joined-dictionary"),
        *(*prefixes, "--destdir", folder, "--workers", 1),
    )
    return folder


@pytest.fixture(scope="session")
def toy_lm(tmp_path_factory: pytest.TempPathFactory, run_fairseq) -> Path:
    """A binarised monolingual corpus (`dict.txt`); the raw `train.txt` etc. lie beside it."""
    folder = tmp_path_factory.mktemp("toy_lm")
    generator = random.Random(1)
    for split, count in SPLIT_SIZES.items():
        sentences = _sentences(generator, count)
        lines = [" ".join(sorted(sentence)) + "\n" for sentence in sentences]
        (folder / f"{split}.txt").write_text("".join(lines), encoding="utf-8")
    prefixes = [f"--{split}pref={folder / split}.txt" for split in SPLIT_SIZES]
    run_fairseq("preprocess", "--only-source", *prefixes, "--destdir", folder, "--workers", 1)
    return folder


@pytest.fixture(scope="session")
def hf_model() -> Callable[..., Any]:
    """`hf_model("Bert", "MaskedLM", is_decoder=True)` is a small random model of transformers in evaluation mode.

    The kind of head is `Model` when left out; other keywords go to the configuration, `implementation` to the model.
    """
    pytest.importorskip("transformers")
    from fairseq_collab._transformers import import_transformers

    transformers = import_transformers()
    transformers.utils.logging.set_verbosity_error()
    import torch

    def make(family: str, head: str = "Model", *, implementation: str = "sdpa", seed: int = 0, **options: Any) -> Any:
        torch.manual_seed(seed)
        names = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        if family == "DistilBert":
            names = {"dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
        small = {"vocab_size": 100, "max_position_embeddings": 64, "embedding_size": 32, "initializer_range": 0.3}
        config = getattr(transformers, f"{family}Config")(**{**small, **names, **options})
        kind = getattr(transformers, f"{family}{'' if head == 'Model' else 'For'}{head}", None)
        if kind is None:
            kind = getattr(transformers, f"{family}{head}")
        model = kind._from_config(config, attn_implementation=implementation)
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases start at 0 and could be forgotten
                parameter.data += 0.3 * torch.randn_like(parameter)
        return model.eval()

    return make


@pytest.fixture(scope="module")
def evaluate_bleu() -> Iterator[ModuleType]:
    """The script of that name as a module."""
    spec = importlib.util.spec_from_file_location("evaluate_bleu", ROOT / "scripts" / "evaluate_bleu.py")
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], Any]]:
    """A function that starts a server of one file; downloads do not pause before they are resumed."""
    from _server import Server

    from data_prep import downloads

    monkeypatch.setattr(downloads, "PAUSE", 0.0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)

    with ExitStack() as stack:

        def start(content: bytes) -> Server:
            server = stack.enter_context(Server(content))
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return server

        yield start
