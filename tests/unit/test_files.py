"""Small files and how commands end."""

import json

import pytest

from fairseq_collab import files
from fairseq_collab.cli.ending import run_command
from fairseq_collab.errors import CollabError


def test_a_written_file_is_there_with_its_folder_and_nothing_beside_it(tmp_path):
    files.write_json(tmp_path / "deep/rows.json", ["ü", 1])
    assert files.read_json(tmp_path / "deep/rows.json") == ["ü", 1]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["rows.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    files.write_json(path, [1])

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(OSError):
        files.write_json(path, [2])
    assert json.loads(path.read_text()) == [1]
    assert [one.name for one in tmp_path.iterdir()] == ["rows.json"]


def test_what_is_no_json_reads_as_none(tmp_path):
    (tmp_path / "half.json").write_text("[1, ")
    assert files.read_json(tmp_path / "half.json") is None and files.read_json(tmp_path / "none.json") is None


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (CollabError("x is missing: give it"), 1, "prog: error: x is missing: give it"),
        (OSError(28, "No space left on device", "/x"), 1, "prog: error: [Errno 28] No space left on device: '/x'"),
        (KeyboardInterrupt(), 130, "prog: interrupted; nothing was written"),
    ],
)
def test_a_command_ends_with_a_status_and_one_sentence(capsys, error, status, message):
    def work():
        raise error

    assert run_command("prog", work, "nothing was written") == status
    assert capsys.readouterr().err == message + "\n"


def test_a_command_that_worked_ends_with_0_and_a_mistake_in_the_code_is_not_hidden(capsys):
    assert run_command("prog", lambda: None, "") == 0
    with pytest.raises(ZeroDivisionError):
        run_command("prog", lambda: print(1 // 0), "")
