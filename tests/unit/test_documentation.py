"""README.md and docs/: commands have options that exist, links lead somewhere, architectures are registered."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from _documents import Command, commands_of  # noqa: E402

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FAIRSEQ = {
    "fairseq-train": "get_training_parser",
    "launch.sh": "get_training_parser",
    "fairseq-generate": "get_generation_parser",
    "fairseq-interactive": "get_interactive_generation_parser",
    "fairseq-preprocess": "get_preprocessing_parser",
}
RECIPES = {f"{name}.sh": recipe for name, recipe in [("train_wmt", "wmt"), ("train_mlbench", "mlbench")]}
RECIPES |= {"train_iwslt.sh": "iwslt", "pretrain_roberta.sh": "roberta"}
# programs of others, words that Hydra checks, a loop
OTHERS = {"ct2-fairseq-converter", "pip", "fairseq-hydra-train", "for", "done", "test.sh", "setup_env.sh"}


@cache
def script(name: str) -> object:
    """A script of the project as a module."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        spec = importlib.util.spec_from_file_location(f"documented_{name.removesuffix('.py')}", ROOT / "scripts" / name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def parse_fairseq(program: str, words: list[str], arch: str) -> None:
    from fairseq import options

    parser = getattr(options, FAIRSEQ[program])()
    if program == "fairseq-preprocess":
        parser.parse_args(words)
    else:
        words = [str(ROOT / word) if word == "fairseq_collab" else word for word in words]
        words += ["--arch", arch] if arch and "--arch" not in words else []
        words += [] if "--user-dir" in words else ["--user-dir", str(ROOT / "fairseq_collab")]
        options.parse_args_and_arch(parser, input_args=words)


def is_like(command: Command, other: Command) -> bool:
    return command.file == other.file and command.program == other.program and "--arch" in command.words


def parser_of(command: Command) -> Callable[[list[str]], object] | None:
    """What reads the words of a command, None where that is another project's business."""
    program = command.program
    if program in FAIRSEQ:
        arch = ""
        if command.abbreviated:  # a document's first command of the kind has it
            arch = next((c.words[c.words.index("--arch") + 1] for c in COMMANDS if is_like(c, command)), "")
        return lambda words: parse_fairseq(program, words, arch)
    if program in RECIPES:
        return lambda words: script("recipes.py").build_parser().parse_args([RECIPES[program], *words])
    if program == "fairseq-collab-convert":
        return importlib.import_module("fairseq_collab.cli.convert").build_parser().parse_args
    if program == "data_prep":
        return importlib.import_module("data_prep.__main__").build_parser().parse_args
    if program == "quickstart.sh":
        return script("quickstart.py").build_parser().parse_args
    if program.endswith(".py"):
        return script(program).build_parser().parse_args
    assert program in OTHERS or program.startswith("examples."), f"no test knows how to read: {command.text}"
    return None


def identify(value: object) -> str:
    return f"{value.file}:{value.text[:50]}" if isinstance(value, Command) else str(value)


COMMANDS = [command for path in DOCUMENTS for command in commands_of(path)]


def test_commands_are_found():
    assert {command.file for command in COMMANDS} >= {"README.md", "training.md", "converting.md", "recipes.md"}
    assert {command.program for command in COMMANDS} >= {"fairseq-train", "fairseq-collab-convert", "data_prep"}


@pytest.mark.parametrize("command", COMMANDS, ids=identify)
def test_commands_have_options_that_exist(command, capsys):
    if command.path is not None:
        assert (ROOT / command.path).is_file(), command.text
    parse = parser_of(command)
    if parse is None:
        return
    try:
        parse(command.words)
    except SystemExit as stop:
        pytest.fail(f"{command.text}\n{stop}\n{capsys.readouterr().err[-500:]}")


def anchors(path: Path) -> set[str]:
    """The fragments that GitHub makes of a document's headings."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if re.match(r"https?://", target):
            continue
        name, _, fragment = target.partition("#")
        path = document.parent / name if name else document
        assert path.exists(), f"{document.name} links to {target}"
        assert not fragment or fragment in anchors(path), f"{document.name} links to {target}"


def test_every_picture_of_docs_is_shown_by_a_document():
    shown = set()
    for document in DOCUMENTS:
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", document.read_text(encoding="utf-8")):
            shown.add((document.parent / target).resolve())
    assert shown == set((ROOT / "docs").rglob("*.png"))


def test_architectures_of_the_readme_are_registered():
    from argparse import Namespace

    from fairseq import utils
    from fairseq.models import ARCH_MODEL_REGISTRY

    utils.import_user_module(Namespace(user_dir=str(ROOT / "fairseq_collab")))
    names = set(re.findall(r"`(\w+_collab(?:_\w+)?)`", (ROOT / "README.md").read_text(encoding="utf-8")))
    names -= {"fairseq_collab"}
    assert len(names) >= 4
    assert names <= set(ARCH_MODEL_REGISTRY), names - set(ARCH_MODEL_REGISTRY)
