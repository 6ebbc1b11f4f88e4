"""``python -m data_prep text``: one language for pretraining; documents stay apart, and lost lines are counted."""

from __future__ import annotations

import pytest

from data_prep.__main__ import main

WORDS = "the light of the room opens slowly and the door never closes again today".split()


@pytest.fixture
def files(tmp_path):
    lines = [" ".join(WORDS[i % 7 : i % 7 + 4 + i % 3]) for i in range(60)]
    (tmp_path / "train").write_bytes(
        b"\xef\xbb\xbf" + "\n".join(lines[:50]).encode() + b"\n\nbad \xff\n  two  words\r\n"
    )
    (tmp_path / "valid").write_text("\n".join(lines[50:]) + "\n")
    return ["--train", str(tmp_path / "train"), "--valid", str(tmp_path / "valid"), "--vocab-size", "100"]


def test_text_becomes_pieces_and_a_binarised_folder_with_one_dictionary(files, tmp_path, capsys):
    destdir = tmp_path / "out"
    assert main(["text", *files, "--destdir", str(destdir), "--workers", "1"]) == 0
    lines = (destdir / "pieces/train.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert len(lines) == 52 and lines[50] == ""  # the empty line that ends a document
    assert "".join(lines[51].split()).replace("\u2581", " ") == " two words"
    assert sorted(path.name for path in (destdir / "bin").glob("*.idx")) == ["train.idx", "valid.idx"]
    assert (destdir / "bin/dict.txt").exists()
    printed = capsys.readouterr().out
    assert "not UTF-8: 1 of train, 0 of valid" in printed and "train     52" in printed
    assert main(["text", *files, "--destdir", str(destdir), "--workers", "1"]) == 0
    assert "reusing" in capsys.readouterr().out


def test_unknown_pieces_are_counted_in_a_folder_with_a_space(files, tmp_path, capsys):
    (tmp_path / "valid").write_text("quixotic zebras jump\n")
    destdir = tmp_path / "my out"
    assert main(["text", *files, "--destdir", str(destdir), "--workers", "1"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("valid"))
    assert float(row.split()[-1].rstrip("%")) > 0


def test_missing_or_empty_file_is_named(files, tmp_path, capsys):
    assert main(["text", *files[:2], "--valid", "nowhere", "--destdir", str(tmp_path / "out")]) == 1
    assert "there is no file nowhere" in capsys.readouterr().err
    (tmp_path / "empty").touch()
    assert main(["text", *files[:2], "--valid", str(tmp_path / "empty"), "--destdir", str(tmp_path / "out")]) == 1
    assert "there is no line in it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
