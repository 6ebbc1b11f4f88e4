"""The command lines of the translation corpora, on small archives with the true names and formats inside."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _corpora import sentences, write_iwslt14, write_wmt16, write_wmt17  # noqa: E402

from data_prep import iwslt14_de_en, parallel, wmt16_en_de_bpe32k, wmt17_en_de  # noqa: E402
from data_prep.__main__ import main  # noqa: E402
from data_prep.downloads import RemoteFile  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ("--tokenizer", "none", "--vocab-size", "120", "--workers", "1", "--no-checksums")
SPLITS = parallel.SPLITS


@pytest.fixture
def no_binary(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Replace fairseq-preprocess, which takes seconds to start; returns how it was called."""
    calls: list[dict] = []

    def write_binary(pieces: Path, folder: Path, source: str, target: str, **how: object) -> dict:
        calls.append(how)
        return {"dictionary": 8, "dictionaries": {source: 8, target: 8}, "unknown": {}}

    monkeypatch.setattr(parallel, "write_binary", write_binary)
    return calls


def read(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def last_error(capsys: pytest.CaptureFixture) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def own_files(folder: Path, train: int = 90) -> list[str]:
    folder.mkdir(exist_ok=True)
    for split, count, start in (("train", train, 0), ("valid", 4, 700), ("test", 3, 800)):
        for lang, side in zip(("en", "de"), sentences(count, start), strict=True):
            (folder / f"{split}.{lang}").write_text("".join(f"{line}\n" for line in side), encoding="utf-8")
    arguments = ["files", "--source-lang", "en", "--target-lang", "de", "--vocab-size", "120", "--workers", "1"]
    for split in SPLITS:
        arguments += [f"--{split}", str(folder / split)]
    return arguments


def test_own_files_become_what_fairseq_reads_with_several_workers(tmp_path, capfd):
    arguments = own_files(tmp_path / "own")
    arguments[arguments.index("--workers") + 1] = "3"
    out = tmp_path / "new/out"
    assert main([*arguments, "--destdir", str(out)]) == 0
    printed = capfd.readouterr().out
    names = {path.name for path in (out / "bin").iterdir()}
    for split in SPLITS:
        assert {f"{split}.en-de.{lang}.{kind}" for lang in ("en", "de") for kind in ("bin", "idx")} <= names
    assert (out / "bin/dict.en.txt").read_bytes() == (out / "bin/dict.de.txt").read_bytes()
    assert (
        "dropped of 90 training pairs: 0 empty, 0 misaligned (one side empty), 0 not UTF-8, 0 over-long, 0 length"
        in printed
    )
    from fairseq.data import Dictionary, data_utils

    dictionary = Dictionary.load(str(out / "bin/dict.de.txt"))
    data = data_utils.load_indexed_dataset(str(out / "bin/train.en-de.de"), dictionary)
    assert [dictionary.string(data[number]) for number in range(90)] == read(out / "pieces/train.de")
    assert main([*arguments, "--destdir", str(out)]) == 0
    again = capfd.readouterr().out
    assert again.count("reusing") == 4 and "making" not in again
    assert again.endswith(printed[printed.index("split ") :])


def test_several_prefixes_follow_each_other(tmp_path, no_binary):
    arguments = own_files(tmp_path)
    arguments.insert(arguments.index("--train") + 2, str(tmp_path / "valid"))
    assert main([*arguments, "--destdir", str(tmp_path / "out")]) == 0
    assert read(tmp_path / "out/text/train.de") == read(tmp_path / "train.de") + read(tmp_path / "valid.de")


def test_losses_are_printed_and_kept_in_the_stages(tmp_path, no_binary, capsys):
    arguments = own_files(tmp_path)
    with (tmp_path / "train.en").open("ab") as english, (tmp_path / "train.de").open("ab") as german:
        english.write(b"\nonly English\nbad \xff\n" + b"w " * 300 + b"\na b c d e\n")
        german.write(b"\n\nschlecht\n" + b"w " * 300 + b"\na\n")
    assert main([*arguments, "--destdir", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    sentence = "1 empty, 1 misaligned (one side empty), 1 not UTF-8, 1 over-long, 1 length ratio"
    assert f"dropped of 95 training pairs: {sentence}" in printed
    kept = [
        json.loads((tmp_path / f"out/{s}/stage.json").read_text())["counts"]["dropped"]["train"]
        for s in ("text", "tokens")
    ]
    assert kept == [{"empty": 1, "misaligned (one side empty)": 1, "not UTF-8": 1}, {"over-long": 1, "length ratio": 1}]
    assert "train" in printed and " 90 " in printed


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--test", "{dir}/nowhere"], "there is no file {dir}/nowhere.en"),
        (["--source-lang", "zh-CN"], "--source-lang zh-CN: fairseq takes letters, digits and _ only"),
        (["--target-lang", "en"], "--source-lang and --target-lang are both en"),
        (["--vocab-size", "7"], "--vocab-size 7 is out of range: give 100 to 1000000"),
        (["--max-ratio", "0.5"], "--max-ratio 0.5 is out of range"),
        (["--max-length", "-1"], "--max-length -1 is out of range"),
        (["--workers", "0"], "--workers 0 is out of range: give 1 or more"),
        (["--character-coverage", "2"], "--character-coverage 2.0 is out of range"),
        (["--test", "{dir}/uneven"], "{dir}/uneven.en has 2 lines and {dir}/uneven.de has 1: their lines do not"),
        (["--test", "{dir}/hollow"], "{dir}/hollow.en and {dir}/hollow.de are empty"),
    ],
)
def test_mistakes_are_one_sentence_before_the_folder_is_made(tmp_path, capsys, more, sentence):
    arguments = own_files(tmp_path)
    for name, english, german in (("uneven", "a\nb\n", "a\n"), ("hollow", "", "")):
        (tmp_path / f"{name}.en").write_text(english)
        (tmp_path / f"{name}.de").write_text(german)
    more = [text.format(dir=tmp_path) for text in more]
    assert main([*arguments, "--destdir", str(tmp_path / "out"), *more]) == 1
    assert sentence.format(dir=tmp_path) in last_error(capsys)
    assert not (tmp_path / "out").exists()


def test_other_options_and_other_text_are_refused(tmp_path, no_binary, capsys):
    arguments = [*own_files(tmp_path), "--destdir", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert main([*arguments, "--vocab-size", "130", "--joined", "none"]) == 1
    error = last_error(capsys)
    assert "vocab_size 120 and now 130" in error and "joined 'both' and now 'none'" in error
    with (tmp_path / "test.de").open("a") as stream:
        stream.write("mehr\n")
    with (tmp_path / "test.en").open("a") as stream:
        stream.write("more\n")
    assert main(arguments) == 1
    assert "was made with other options (test [" in last_error(capsys)


def test_dictionaries_are_shared_as_asked(tmp_path, no_binary):
    arguments = own_files(tmp_path)
    for joined in ("both", "subwords", "none"):
        assert main([*arguments, "--destdir", str(tmp_path / joined), "--joined", joined]) == 0
    assert [call["joined"] for call in no_binary] == [True, False, False]
    assert no_binary[0]["more"] == ["--nwordssrc", "121", "--nwordstgt", "121"]
    assert (tmp_path / "subwords/pieces/spm.model").exists()
    assert (tmp_path / "none/pieces/spm.de.model").exists() and not (tmp_path / "none/pieces/spm.model").exists()


@pytest.mark.parametrize("stage", ["text", "tokens", "pieces", "bin"])
def test_a_preparation_killed_in_any_stage_goes_on_with_it(tmp_path, no_binary, capsys, stage):
    """The process is killed outright while it works in the stage; the same command then goes on with that stage."""
    arguments = [*own_files(tmp_path / "own"), "--destdir"]
    hang = (
        "import os, runpy, sys, pathlib\nfrom data_prep import parallel, stages\n"
        "def hang(*inputs, **_):\n"
        "    folder = next(path for path in inputs if '.partial-' in str(path))\n"
        "    (pathlib.Path(folder) / 'half').write_text('half')\n"
        "    os.kill(os.getpid(), 9)\n"
        "module, name = {'text': (stages, 'write_natural'), 'tokens': (stages, 'write_tokens'),\n"
        "    'pieces': (stages, 'write_subwords'), 'bin': (parallel, 'write_binary')}[sys.argv.pop(1)]\n"
        "setattr(module, name, hang)\nfrom data_prep.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", hang, stage, *arguments, str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "out" / stage).exists()
    assert list((tmp_path / "out").glob(".partial-*/half"))
    assert main([*arguments, str(tmp_path / "out")]) == 0
    order = ["text", "tokens", "pieces", "bin"]
    words = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith(("reusing", "making"))]
    assert words == ["reusing"] * order.index(stage) + ["making"] * (4 - order.index(stage))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([*order, "options.json"])
    assert not list((tmp_path / "out").rglob("half"))


def test_iwslt_is_cut_as_in_fairseqs_example(tmp_path, no_binary, capsys):
    write_iwslt14(tmp_path / "raw")
    out = tmp_path / "out"
    assert main(["iwslt14_de_en", "--destdir", str(out), "--raw", str(tmp_path / "raw"), *PLAIN]) == 0
    english, german = ([line.lower() for line in side] for side in sentences(120))
    assert read(out / "text/valid.en") == english[22::23]
    assert read(out / "text/train.de") == [line for number, line in enumerate(german, start=1) if number % 23]
    test = read(out / "text/test.en")
    starts = [int(line.split()[-1]) for line in test[::2]]
    assert starts == [1000, 1010, 1020, 1030, 1040] and test[0].startswith("it's ") and len(test) == 10
    assert read(out / "raw/test.en")[0].startswith("It's ")
    assert "1 misaligned (one side empty), 1 not UTF-8, 0 over-long, 1 length ratio" in capsys.readouterr().out
    assert no_binary[0]["joined"] is False
    assert {path.name for path in (out / "raw").iterdir()} == {
        f"{s}.{lang}" for s in ("train", "test") for lang in ("de", "en")
    } | {"stage.json"}


def test_iwslt_options_are_those_of_the_example():
    from data_prep.__main__ import build_parser

    args = build_parser().parse_args(["iwslt14_de_en", "--destdir", "x"])
    assert (args.tokenizer, args.lowercase, args.max_length, args.max_ratio) == ("moses", True, 175, 1.5)
    assert (args.vocab_size, args.subword_model, args.split_dashes) == (10_000, "bpe", False)


def test_iwslt_with_moses_tokens(tmp_path, no_binary):
    pytest.importorskip("sacremoses")
    write_iwslt14(tmp_path / "raw")
    more = [option for option in PLAIN if option not in ("--tokenizer", "none")]
    assert main(["iwslt14_de_en", "--destdir", str(tmp_path / "out"), "--raw", str(tmp_path / "raw"), *more]) == 0
    assert read(tmp_path / "out/text/test.en")[0].startswith("it &apos;s ")


def test_wmt17_joins_its_corpora_and_reads_the_test_sets(tmp_path, no_binary):
    write_wmt17(tmp_path / "raw")
    for name, more in (("three", []), ("four", ["--rapid2016"])):
        command = ["wmt17_en_de", "--destdir", str(tmp_path / name), "--raw", str(tmp_path / "raw"), *PLAIN, *more]
        assert main(command) == 0
    numbers = [int(line.split()[-1]) for line in read(tmp_path / "three/text/train.en")]
    assert numbers == [*range(40), *range(100, 140), *range(200, 240)]
    assert len(read(tmp_path / "four/text/train.de")) == 160
    assert read(tmp_path / "three/text/valid.de") == sentences(4, 900)[1]
    assert read(tmp_path / "three/text/test.en") == sentences(3, 950)[0]
    assert no_binary[0]["joined"] is True


def test_wmt17_takes_unpacked_files_and_leaves_them_alone(tmp_path, no_binary):
    write_wmt17(tmp_path / "packed")
    raw = tmp_path / "raw"
    raw.mkdir()
    for path in (tmp_path / "packed").iterdir():
        with tarfile.open(path) as archive:
            archive.extractall(raw, filter="data")
    for path in [*raw.glob("test-full/*")]:
        path.rename(raw / path.name)
    before = {path: path.stat().st_mtime_ns for path in raw.rglob("*") if path.is_file()}
    assert main(["wmt17_en_de", "--destdir", str(tmp_path / "out"), "--raw", str(raw), *PLAIN]) == 0
    assert len(read(tmp_path / "out/text/train.de")) == 120
    assert {path: path.stat().st_mtime_ns for path in raw.rglob("*") if path.is_file()} == before


def test_missing_archives_are_named_with_their_addresses(tmp_path, capsys):
    write_wmt17(tmp_path / "raw")
    (tmp_path / "raw/dev.tgz").unlink()
    (tmp_path / "raw/training-parallel-europarl-v7.tgz").unlink()
    assert main(["wmt17_en_de", "--destdir", str(tmp_path / "out"), "--raw", str(tmp_path / "raw"), *PLAIN]) == 1
    error = last_error(capsys)
    assert "training-parallel-europarl-v7.tgz (https://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz)" in error
    assert "dev.tgz (https" in error and "test-full" not in error
    assert not (tmp_path / "out").exists()


def wmt16_command(folder):
    return ["wmt16_en_de_bpe32k", "--destdir", str(folder / "out"), "--raw", str(folder / "raw")]


def test_wmt16_keeps_the_archives_units_and_its_natural_test_sets(tmp_path, no_binary, capsys):
    write_wmt16(tmp_path / "raw")
    command = [*wmt16_command(tmp_path), "--no-checksums"]
    assert main(command) == 0
    assert read(tmp_path / "out/pieces/train.de") == sentences(60)[1]
    assert read(tmp_path / "out/pieces/test.en") == [f"{line} @-@ ." for line in sentences(3, 950)[0]]
    assert read(tmp_path / "out/text/test.de") == [f"{line}." for line in sentences(3, 950)[1]]
    assert "dropped of 61 training pairs: 0 empty, 1 misaligned (one side empty)" in capsys.readouterr().out
    assert no_binary[0]["joined"] is True and no_binary[0]["more"] == ["--nwordssrc", "32768", "--nwordstgt", "32768"]
    assert main(command) == 0
    assert capsys.readouterr().out.count("reusing") == 4
    (tmp_path / "raw/wmt16_en_de.tar.gz").unlink()
    assert main(command) == 0


def test_wmt16_with_the_archives_dictionary(tmp_path, capfd):
    write_wmt16(tmp_path / "raw")
    out = tmp_path / "out"
    assert main([*wmt16_command(tmp_path), "--no-checksums", "--dictionary", "archive", "--workers", "1"]) == 0
    listed = read(out / "archive/vocab.bpe.32000")
    assert [line.split()[0] for line in read(out / "bin/dict.en.txt")][: len(listed)] == listed
    assert not (out / "bin/listed.txt").exists()
    row = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("test"))
    assert row.split()[1] == "3" and not row.endswith(" 0%")


def test_archives_are_checked_and_damage_is_named(tmp_path, capsys):
    archive = write_wmt16(tmp_path / "raw")
    command = wmt16_command(tmp_path)
    assert main(command) == 1
    error = last_error(capsys)
    assert f"{archive} is not the published archive (its digest is md5:" in error and "--no-checksums" in error
    content = archive.read_bytes()
    archive.write_bytes(content[: len(content) // 2])
    assert main([*command, "--no-checksums"]) == 1
    assert f"{archive} is damaged or no tar archive" in last_error(capsys)
    archive.write_bytes(b"<html>")
    assert main([*command, "--no-checksums"]) == 1
    assert f"{archive} is damaged or no tar archive" in last_error(capsys)
    assert not (tmp_path / "out/archive").exists()


def test_an_archive_of_something_else_is_named(tmp_path, capsys):
    write_iwslt14(tmp_path / "raw").rename(tmp_path / "raw/wmt16_en_de.tar.gz")
    command = [*wmt16_command(tmp_path), "--no-checksums"]
    assert main(command) == 1
    error = last_error(capsys)
    assert "has no newstest2013.de, " in error and "it is another archive" in error


def test_a_missing_raw_folder_is_named(tmp_path, capsys):
    assert main(["iwslt14_de_en", "--destdir", str(tmp_path / "out"), "--raw", str(tmp_path / "no"), *PLAIN]) == 1
    assert f"--raw {tmp_path / 'no'}: there is no such folder" in last_error(capsys)


def test_a_failed_download_leaves_no_folder_and_the_next_run_resumes(tmp_path, no_binary, serve, monkeypatch, capsys):
    content = write_iwslt14(tmp_path / "raw").read_bytes()
    remote = RemoteFile("de-en.tgz", "", len(content), "sha256:" + hashlib.sha256(content).hexdigest())
    server = serve(content)
    archive = replace(iwslt14_de_en.ARCHIVE, remote=replace(remote, url=server.url + "/file"))
    monkeypatch.setattr(iwslt14_de_en, "ARCHIVE", archive)
    server.drops, server.drop_after = 99, 100
    options = [option for option in PLAIN if option != "--no-checksums"]
    command = ["iwslt14_de_en", "--destdir", str(tmp_path / "out"), "--cache", str(tmp_path / "cache"), *options]
    assert main(command) == 1
    assert "broke off after 500 bytes" in last_error(capsys)
    assert not (tmp_path / "out").exists()
    server.drops = 0
    assert main(command) == 0
    assert server.ranges[-1] == "bytes=500-"
    assert (tmp_path / "cache/iwslt14_de_en/de-en.tgz").read_bytes() == content
    assert main(command) == 0
    assert len(server.ranges) == 6


@pytest.mark.parametrize("corpus", [iwslt14_de_en, wmt16_en_de_bpe32k, wmt17_en_de])
def test_published_digests_have_the_length_of_their_kind(corpus):
    found = [value for value in vars(corpus).values() if isinstance(value, iwslt14_de_en.Archive)]
    assert found
    for archive in found:
        kind, digest = archive.remote.digest.split(":")
        assert len(bytes.fromhex(digest)) == {"md5": 16, "sha256": 32}[kind]
        assert archive.remote.url.startswith("https://")
