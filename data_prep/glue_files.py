"""The eight tasks of GLUE in the files that its server hands out: columns, labels, splits, and what is refused.

Quotation marks are data: a line is its fields between tabs and nothing else. Nothing here tokenises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fairseq_collab.errors import CollabError


@dataclass(frozen=True)
class GlueTask:
    """One task.

    Args:
        name: as GLUE spells it, also the name of its folder.
        texts: the columns of the one or two sentences.
        label: the column of the label in train and dev.
        labels: the possible labels; the position is the class. Empty for a score.
        bare_columns: the columns of train and dev where these have no header.
        files: fairseq's name of a split -> GLUE's, without ``.tsv``.
        drops_malformed: train and dev are known to hold lines broken by line ends; they are dropped and reported.
    """

    name: str
    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    bare_columns: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=lambda: {"train": "train", "valid": "dev", "test": "test"})
    drops_malformed: bool = False

    @property
    def is_regression(self) -> bool:
        """Whether the label is a score from 0 to `MAX_SCORE`."""
        return not self.labels


MAX_SCORE = 5.0
_PAIR = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
_MNLI_FILES = {
    "train": "train",
    "valid": "dev_matched",
    "valid1": "dev_mismatched",
    "test": "test_matched",
    "test1": "test_mismatched",
}
TASKS = {
    task.name: task
    for task in (
        GlueTask("CoLA", ("sentence",), "label", ("0", "1"), ("source", "label", "mark", "sentence")),
        GlueTask("SST-2", ("sentence",), "label", ("0", "1")),
        GlueTask("MRPC", ("#1 String", "#2 String"), "Quality", ("0", "1")),
        GlueTask("STS-B", _PAIR, "score", ()),
        GlueTask("QQP", ("question1", "question2"), "is_duplicate", ("0", "1"), drops_malformed=True),
        # the order of the classes is that of fairseq's own roberta.large.mnli
        GlueTask("MNLI", _PAIR, "gold_label", ("contradiction", "neutral", "entailment"), files=_MNLI_FILES),
        GlueTask("QNLI", ("question", "sentence"), "label", _ENTAILMENT),
        GlueTask("RTE", _PAIR, "label", _ENTAILMENT),
    )
}


class Example(NamedTuple):
    """One or two sentences, and the class (int), the score (float) or None in test."""

    texts: tuple[str, ...]
    label: int | float | None


class Split(NamedTuple):
    """The examples of a file in its order, and a sentence for each line that was dropped."""

    examples: list[Example]
    dropped: list[str]


def find_task(name: str) -> GlueTask:
    """The task of that name.

    Raises:
        CollabError: there is none.
    """
    if name not in TASKS:
        raise CollabError(f"--task {name} is no task of GLUE known here; give one of {', '.join(TASKS)}")
    return TASKS[name]


def find_files(task: GlueTask, raw: Path) -> dict[str, Path]:
    """fairseq's name of a split -> its file, in ``raw/TASK`` or in `raw` itself. A test split may be missing.

    Raises:
        CollabError: there is no such folder, or a train or dev file is missing in it.
    """
    if not raw.is_dir():
        raise CollabError(f"--raw {raw}: there is no such folder; give the one that GLUE's archives were unzipped into")
    folder = raw / task.name if (raw / task.name).is_dir() else raw
    found = {split: folder / f"{file}.tsv" for split, file in task.files.items()}
    missing = [path.name for split, path in found.items() if not split.startswith("test") and not path.is_file()]
    if missing:
        raise CollabError(
            f"{folder} has no {', '.join(missing)}; --raw must be the folder {task.name} of GLUE, or the one it lies in"
        )
    return {split: path for split, path in found.items() if path.is_file()}


def read_split(task: GlueTask, split: str, path: Path) -> Split:
    """The examples of one file; labels are read in train and valid splits only.

    Raises:
        CollabError: with file, line and what was expected: not UTF-8, no line, a missing column, another number of
            fields (in QQP's train and dev these lines are dropped instead), or a label that the task does not have.
    """
    lines = _read_lines(path)
    labelled = not split.startswith("test")
    if labelled and task.bare_columns:
        columns, first = list(task.bare_columns), 1
    else:
        columns, first = lines.pop(0).split("\t"), 2
    wanted = [*task.texts, *([task.label] if labelled else [])]
    if missing := [name for name in wanted if name not in columns]:
        raise CollabError(
            f"{path}, line 1: the header has no column {', '.join(map(repr, missing))}; it has "
            f"{', '.join(map(repr, columns))[:300]}"
        )
    places = [columns.index(name) for name in wanted]
    found = Split([], [])
    for number, line in enumerate(lines, start=first):
        fields = line.split("\t")
        if len(fields) != len(columns):
            sentence = f"{path}, line {number}: {len(fields)} fields, expected {len(columns)} ({', '.join(columns)})"
            if not (labelled and task.drops_malformed):
                raise CollabError(sentence)
            found.dropped.append(sentence)
            continue
        values = [fields[place] for place in places]
        label = _parse_label(task, values.pop(), f"{path}, line {number}") if labelled else None
        found.examples.append(Example(tuple(values), label))
    if not found.examples:
        raise CollabError(f"{path} has no examples; it must have at least one")
    return found


def _read_lines(path: Path) -> list[str]:
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise CollabError(f"{path}, line {line} is not UTF-8 ({error.reason})") from error
    # only these end a line: texts hold separators that str.splitlines would take for line ends
    lines = content.replace("\r\n", "\n").split("\n")
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise CollabError(f"{path} is empty")
    return lines


def _parse_label(task: GlueTask, text: str, where: str) -> int | float:
    if not task.is_regression:
        if text in task.labels:
            return task.labels.index(text)
        raise CollabError(f"{where}: the {task.label} is {text!r}, expected one of {', '.join(task.labels)}")
    try:
        score = float(text)
    except ValueError:
        score = float("nan")
    if not 0 <= score <= MAX_SCORE:
        raise CollabError(f"{where}: the {task.label} is {text!r}, expected a number from 0 to {MAX_SCORE:g}")
    return score
