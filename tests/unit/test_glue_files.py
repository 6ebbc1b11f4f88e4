"""GLUE's files: what is read of each task, what differs between its splits, and what is refused with file and line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from data_prep.glue_files import TASKS, Example, find_files, find_task, read_split
from fairseq_collab.errors import CollabError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _glue import write_task  # noqa: E402

ALL_LABELS = {name: set(range(len(task.labels))) for name, task in TASKS.items()}


def read(folder: Path, name: str) -> dict:
    task = TASKS[name]
    return {split: read_split(task, split, path) for split, path in find_files(task, folder).items()}


def replace(path: Path, line: int, text: str) -> None:
    lines = path.read_text(encoding="utf-8").split("\n")
    lines[line - 1] = text
    path.write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.parametrize("name", TASKS)
def test_every_split_has_its_examples_with_labels_but_in_test(tmp_path, name):
    write_task(tmp_path, name)
    splits = read(tmp_path, name)
    assert list(splits) == list(TASKS[name].files)
    for split, found in splits.items():
        assert len(found.examples) == 12
        assert all(len(example.texts) == len(TASKS[name].texts) for example in found.examples)
        assert all(text.split()[0] in ("good", "bad") for example in found.examples for text in example.texts)
        labels = {example.label for example in found.examples}
        if split.startswith("test"):
            assert labels == {None}
        elif name == "STS-B":
            assert labels == {0.0, 1.0, 2.0, 3.0, 4.0, 5.0}
        else:
            assert labels == ALL_LABELS[name]


def test_files_are_found_in_the_folder_of_all_tasks_and_in_the_tasks_own(tmp_path):
    write_task(tmp_path, "RTE")
    assert find_files(TASKS["RTE"], tmp_path) == find_files(TASKS["RTE"], tmp_path / "RTE")


def test_quotes_and_unusual_separators_are_data(tmp_path):
    write_task(tmp_path, "SST-2")
    text = '"a "" b \u2028 c\u00a0d \x1c\' '
    replace(tmp_path / "SST-2/train.tsv", 2, f"{text}\t1")
    assert read(tmp_path, "SST-2")["train"].examples[0] == Example((text,), 1)


def test_windows_line_ends_and_a_byte_order_mark_are_no_data(tmp_path):
    write_task(tmp_path, "MRPC")
    content = (tmp_path / "MRPC/train.tsv").read_bytes()
    assert content.startswith(b"\xef\xbb\xbf") and b"\r\n" in content
    assert not any("\r" in text for example in read(tmp_path, "MRPC")["train"].examples for text in example.texts)


def test_classes_of_mnli_come_from_the_gold_label(tmp_path):
    write_task(tmp_path, "MNLI")
    found = [example.label for example in read(tmp_path, "MNLI")["valid1"].examples[:3]]
    assert [TASKS["MNLI"].labels[label] for label in found] == ["entailment", "neutral", "contradiction"]


def test_broken_lines_of_qqp_are_dropped_with_file_line_and_expectation(tmp_path):
    write_task(tmp_path, "QQP")
    found = read(tmp_path, "QQP")["train"]
    assert len(found.examples) == 12
    columns = "expected 6 (id, qid1, qid2, question1, question2, is_duplicate)"
    path = tmp_path / "QQP/train.tsv"
    assert found.dropped == [f"{path}, line 4: 4 fields, {columns}", f"{path}, line 5: 3 fields, {columns}"]


def test_a_missing_test_split_is_left_out_and_a_missing_dev_split_refused(tmp_path):
    write_task(tmp_path, "MNLI")
    (tmp_path / "MNLI/test_mismatched.tsv").unlink()
    assert list(find_files(TASKS["MNLI"], tmp_path)) == ["train", "valid", "valid1", "test"]
    (tmp_path / "MNLI/dev_matched.tsv").unlink()
    with pytest.raises(CollabError, match="has no dev_matched.tsv; --raw must be the folder MNLI"):
        find_files(TASKS["MNLI"], tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "line", "text", "message"),
    [
        ("CoLA", "train", 3, "gj04\tmaybe\t\tIt is.", "line 3: the label is 'maybe', expected one of 0, 1"),
        ("CoLA", "dev", 2, "gj04\t1\tIt is.", r"line 2: 3 fields, expected 4 \(source, label, mark, sentence\)"),
        ("SST-2", "dev", 1, "text\tlabel", "line 1: the header has no column 'sentence'; it has 'text', 'label'"),
        ("SST-2", "train", 5, "a\tb\t1", r"line 5: 3 fields, expected 2 \(sentence, label\)"),
        ("MRPC", "train", 1, "Quality\t#1 ID\t#2 ID\t#1 String\tx", "line 1: the header has no column '#2 String'"),
        ("STS-B", "train", 2, "0\tm\tM\t1\t1\tn\tn\ta\tb\tfive", "the score is 'five', expected a number from 0 to 5"),
        ("STS-B", "dev", 2, "0\tm\tM\t1\t1\tn\tn\ta\tb\t5.5", "the score is '5.5', expected a number from 0 to 5"),
        ("STS-B", "dev", 2, "0\tm\tM\t1\t1\tn\tn\ta\tb\tnan", "the score is 'nan', expected a number from 0 to 5"),
        ("QQP", "test", 4, "3\tWhy", r"line 4: 2 fields, expected 3 \(id, question1, question2\)"),
        ("QQP", "dev", 2, "0\t1\t2\ta\tb\t2", "the is_duplicate is '2', expected one of 0, 1"),
        ("RTE", "train", 2, "0\ta\tb\tneutral", "the label is 'neutral', expected one of entailment, not_entailment"),
        ("QNLI", "train", 7, "", "line 7: 1 fields, expected 4"),
    ],
)
def test_a_bad_line_is_refused_with_file_line_and_expectation(tmp_path, name, file, line, text, message):
    write_task(tmp_path, name)
    replace(tmp_path / name / f"{file}.tsv", line, text)
    with pytest.raises(CollabError, match=f"{name}/{file}.tsv, {message}" if "line" in message else message):
        read(tmp_path, name)


def test_what_is_no_text_is_refused_with_its_line(tmp_path):
    write_task(tmp_path, "RTE")
    path = tmp_path / "RTE/train.tsv"
    path.write_bytes(path.read_bytes() + b"12\t\xff\tb\tentailment\n")
    with pytest.raises(CollabError, match="train.tsv, line 14 is not UTF-8"):
        read(tmp_path, "RTE")
    path.write_text("index\tsentence1\tsentence2\tlabel\n")
    with pytest.raises(CollabError, match="train.tsv has no examples"):
        read(tmp_path, "RTE")
    path.write_text("")
    with pytest.raises(CollabError, match="train.tsv is empty"):
        read(tmp_path, "RTE")


def test_an_unknown_task_and_a_missing_folder_are_one_sentence(tmp_path):
    with pytest.raises(CollabError, match="--task WNLI is no task of GLUE known here; give one of CoLA, SST-2"):
        find_task("WNLI")
    with pytest.raises(CollabError, match="there is no such folder"):
        find_files(TASKS["RTE"], tmp_path / "nowhere")
