"""The commands of a Markdown document, as a shell would take them apart."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

PLACEHOLDER = {"...", "…"}


@dataclass(frozen=True)
class Command:
    """One command of a document.

    Attributes:
        file: name of the document.
        text: the command on one line, without its comment.
        variables: what stands in front of it, `KEY=VALUE`.
        program: its name, of a module or script where it is run by python or srun.
        path: the script's path below the project's root, None where it is a program.
        words: its arguments, without `...`; single capitals, which stand for numbers, are 8.
        abbreviated: whether there was a `...`.
    """

    file: str
    text: str
    variables: tuple[str, ...]
    program: str
    path: str | None
    words: list[str]
    abbreviated: bool

    def __hash__(self) -> int:
        return hash((self.file, self.text))


def commands_of(document: Path) -> list[Command]:
    """All commands in the ``sh`` and ``bash`` blocks of a document; lines that are options only are no commands."""
    text = document.read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, re.M | re.S):
        block = re.sub(r"<<'EOF'.*?^EOF$", "", block, flags=re.M | re.S)
        for line in block.replace("\\\n", " ").splitlines():
            command = _command(document.name, line)
            if command is not None:
                found.append(command)
    return found


def _command(file: str, line: str) -> Command | None:
    words = shlex.split(line, comments=True)
    if not words or words[0].startswith("-"):
        return None
    text = " ".join(line.split("  #")[0].split())
    if "|" in words:  # what is piped into the last command
        words = words[len(words) - words[::-1].index("|") :]
    if ">" in words:
        words = words[: words.index(">")]
    variables = []
    while re.match(r"[A-Z_]+=", words[0]):
        variables.append(words.pop(0))
    if words[0] in ("srun", "source"):
        words.pop(0)
    path = None
    if words[0] == "python" and words[1] == "-m":
        program, words = words[2], words[3:]
        path = f"{program}/__main__.py" if program == "data_prep" else None
    elif words[0] == "python":
        if words[1] == "-":
            return None
        path, words = words[1], words[2:]
        program = Path(path).name
    else:
        program, words = words[0], words[1:]
        if "/" in program:
            path = program.removeprefix("./")
            program = Path(path).name
    abbreviated = not PLACEHOLDER.isdisjoint(words)
    words = ["8" if re.fullmatch(r"[A-Z]", word) else word for word in words if word not in PLACEHOLDER]
    return Command(file, text, tuple(variables), program, path, words, abbreviated)
