"""Data preparation: what is extracted, split and dropped, and what happens to folders and downloads that go wrong.

The archive is a small wheel made here with the layout of the real package; nothing is downloaded but in the test
marked `network`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import sentencepiece

from data_prep import common, homeassistant, parallel
from data_prep.__main__ import main
from fairseq_collab.errors import CollabError

ROOT = Path(__file__).resolve().parents[2]
WORDS = "the device lost its connection while waiting for an answer from another room".split()


def component_names(split: str, count: int) -> list[str]:
    names = (f"part{number}" for number in range(10_000))
    return [name for name in names if homeassistant.split_of(name) == split][:count]


def write_wheel(path: Path, components: dict[str, dict[str, dict]]) -> str:
    """Write component -> language -> texts as a wheel and return its SHA-256."""
    with zipfile.ZipFile(path, "w") as wheel:
        for name, langs in components.items():
            for lang, texts in langs.items():
                member = f"homeassistant/components/{name}/translations/{lang}.json"
                wheel.writestr(member, json.dumps(texts, ensure_ascii=False))
        wheel.writestr("homeassistant/components/part0/strings.json", "{}")
    return common.sha256_of(path)


def texts(name: str, suffix: str = "") -> dict:
    rows = {f"k{i}": " ".join(w + suffix for w in WORDS[i % 7 : i % 7 + 3 + i % 5]) + f" {name} {i}" for i in range(12)}
    return {"config": {"step": rows}, "title": f"Title of {name}{suffix}"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("wheel") / "small.whl"
    names = component_names("train", 20) + component_names("valid", 2) + component_names("test", 2)
    components = {
        name: {"en": texts(name), "de": texts(name, "en"), "pt-BR": texts(name, "o"), "es-419": texts(name, "a")}
        for name in names
    }
    return path, write_wheel(path, components)


def arguments(wheel: tuple[Path, str], destdir: Path, *more: str) -> list[str]:
    archive = ["--archive", str(wheel[0]), "--sha256", wheel[1]]
    return ["homeassistant", "--destdir", str(destdir), "--vocab-size", "200", *archive, *more]


@pytest.fixture
def no_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace fairseq-preprocess, which takes seconds to start, by an empty dictionary."""

    def write_binary(pieces: Path, folder: Path, source: str, target: str) -> dict:
        (folder / f"dict.{target}.txt").write_text("")
        return {"dictionary": 0}

    monkeypatch.setattr(parallel, "write_binary", write_binary)


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_command_line_makes_what_fairseq_reads_and_a_second_run_reuses_it(wheel, tmp_path, capfd):
    destdir = tmp_path / "new" / "data"
    assert main(arguments(wheel, destdir, "--langs", "en-pt-BR")) == 0
    first = capfd.readouterr().out
    binaries = {path.name for path in (destdir / "bin").iterdir()}
    for split in parallel.SPLITS:
        assert {f"{split}.en-pt_BR.{lang}.{kind}" for lang in ("en", "pt_BR") for kind in ("bin", "idx")} <= binaries
    assert (destdir / "bin/dict.en.txt").read_bytes() == (destdir / "bin/dict.pt_BR.txt").read_bytes()
    assert main(arguments(wheel, destdir, "--langs", "en-pt-BR")) == 0
    second = capfd.readouterr().out
    assert second.count("reusing") == 3 and "making" not in second
    table = first[first.index("split ") :]
    assert second.endswith(table)
    assert "train        260" in table
    assert hidden(destdir) == []


def test_pieces_join_to_the_reference_text(wheel, tmp_path, no_binary):
    main(arguments(wheel, tmp_path))
    for lang in ("en", "de"):
        pieces = (tmp_path / f"pieces/test.{lang}").read_text(encoding="utf-8")
        joined = pieces.replace(" ", "").replace("\u2581", " ").replace("\n ", "\n").lstrip(" ")
        assert joined == (tmp_path / f"text/test.{lang}").read_text(encoding="utf-8")


def test_sentencepiece_model_is_the_same_in_every_run(wheel, tmp_path, no_binary):
    for name in ("a", "b"):
        main(arguments(wheel, tmp_path / name))
    models = [sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / n / "pieces/spm.model")) for n in "ab"]
    assert [models[0].id_to_piece(i) for i in range(len(models[0]))] == [
        models[1].id_to_piece(i) for i in range(len(models[1]))
    ]
    for split in parallel.SPLITS:
        assert (tmp_path / f"a/pieces/{split}.de").read_bytes() == (tmp_path / f"b/pieces/{split}.de").read_bytes()


def test_splits_follow_the_component_name_and_share_no_source(wheel, tmp_path, no_binary):
    main(arguments(wheel, tmp_path))
    rows = [line.split("\t") for line in (tmp_path / "text/components.tsv").read_text().splitlines()]
    assert {component: split for component, split in rows} == {c: homeassistant.split_of(c) for c, _ in rows}
    assert {split for _, split in rows} == set(parallel.SPLITS)
    sources = {s: (tmp_path / f"text/{s}.en").read_text().splitlines() for s in parallel.SPLITS}
    for split in ("valid", "test"):
        names = component_names(split, 2)
        assert all(any(name in line for name in names) for line in sources[split])


def test_split_of_a_component_is_fixed():
    """The split is part of every published score: these must never change."""
    known = {"mqtt": "train", "hue": "train", "miele": "valid"}
    assert {name: homeassistant.split_of(name) for name in known} == known


def test_selection_drops_by_reason_and_earlier_splits_win():
    text = parallel.select(
        [
            ("test", "Turn on", "Einschalten"),
            ("test", "New  here\n", "Neu hier"),
            ("valid", "Restart", "Neustart"),
            ("test", "restart", "Neu starten"),
            ("train", "turn ON", "Anschalten"),
            ("train", "turn ON", "Einschalten"),
            ("train", "Same", "Same"),
            ("train", " \u00a0", "leer"),
        ]
    )
    assert text.pairs == {
        "train": [("turn ON", "Anschalten")],
        "valid": [("Restart", "Neustart")],
        "test": [("New here", "Neu hier")],
    }
    assert text.dropped == {
        "source in an earlier split": 2,
        "source repeated": 1,
        "both sides equal": 1,
        "empty side": 1,
    }


def test_texts_pair_by_key_path_and_one_sided_ones_are_counted(tmp_path, no_binary, capsys):
    components = {n: {"en": texts(n), "de": texts(n, "en")} for s in parallel.SPLITS for n in component_names(s, 2)}
    one = component_names("train", 1)[0]
    components[one] = {
        "en": {"a": {"b": "inner\u2028text"}, "b": "outer text", "gone": "only English", "number": 3},
        "de": {"b": "Text außen", "a": {"b": "Text innen", "c": "nur deutsch"}},
    }
    sha = write_wheel(tmp_path / "w.whl", components)
    assert main(arguments((tmp_path / "w.whl", sha), tmp_path / "d")) == 0
    assert "2 translation missing" in capsys.readouterr().out
    sources = (tmp_path / "d/text/train.en").read_text(encoding="utf-8").split("\n")
    targets = (tmp_path / "d/text/train.de").read_text(encoding="utf-8").split("\n")
    pairs = set(zip(sources, targets, strict=True))
    assert {("inner text", "Text innen"), ("outer text", "Text außen")} <= pairs


def test_over_long_lines_leave_train_but_are_counted_and_stay_in_test(wheel, tmp_path, no_binary, capsys):
    assert main(arguments(wheel, tmp_path, "--max-length", "12")) == 0
    lines = {s: (tmp_path / f"text/{s}.de").read_text().splitlines() for s in parallel.SPLITS}
    pieces = {s: (tmp_path / f"pieces/{s}.de").read_text().splitlines() for s in parallel.SPLITS}
    lost = len(lines["train"]) - len(pieces["train"])
    assert lost > 0
    assert max(len(line.split()) for line in pieces["train"]) <= 12
    assert len(pieces["test"]) == len(lines["test"])
    over = sum(len(line.split()) > 12 for line in pieces["test"])
    out = capsys.readouterr().out
    assert f"{lost} over-long, from train" in out
    kept = int(out.split(" in test")[0].rsplit(" ", 1)[1])
    assert kept >= over > 0


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("en-de", ("en", "de")),
        ("en-pt-BR", ("en", "pt-BR")),
        ("pt-BR-es-419", ("pt-BR", "es-419")),
        ("pt-en", ("pt", "en")),
    ],
)
def test_language_codes_may_hold_the_separator(pair, expected):
    members = {"x": dict.fromkeys(["en", "de", "pt", "pt-BR", "es-419", "es"], "")}
    assert homeassistant.parse_langs(pair, members) == expected


@pytest.mark.parametrize("pair", ["en-xx", "en", "en-en", "-de", "pt_BR-en"])
def test_unknown_pair_lists_the_languages_and_makes_nothing(wheel, tmp_path, capsys, pair):
    assert main(arguments(wheel, tmp_path / "d", f"--langs={pair}")) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert pair in error and "pt-BR (24)" in error
    assert not (tmp_path / "d").exists()


def test_other_options_in_the_same_folder_are_refused(wheel, tmp_path, no_binary, capsys):
    main(arguments(wheel, tmp_path))
    before = (tmp_path / "text/train.en").read_bytes()
    assert main(arguments(wheel, tmp_path, "--vocab-size", "150", "--langs", "de-en")) == 1
    error = capsys.readouterr().err
    assert "vocab_size 200 and now 150" in error and "langs 'en-de' and now 'de-en'" in error
    assert (tmp_path / "text/train.en").read_bytes() == before


def test_foreign_folder_is_refused_untouched(wheel, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    assert main(arguments(wheel, tmp_path)) == 1
    assert "not made by data_prep" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_interrupted_stage_leaves_nothing_and_the_next_run_goes_on(wheel, tmp_path, monkeypatch, capsys):
    def interrupted(pieces: Path, folder: Path, source: str, target: str) -> dict:
        (folder / "dict.en.txt").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(parallel, "write_binary", interrupted)
    assert main(arguments(wheel, tmp_path)) == 130
    assert not (tmp_path / "bin").exists() and hidden(tmp_path) == []
    (tmp_path / ".partial-bin-killed").mkdir()
    monkeypatch.setattr(parallel, "write_binary", lambda *_: {"dictionary": 1})
    capsys.readouterr()
    assert main(arguments(wheel, tmp_path)) == 0
    out = capsys.readouterr().out
    assert f"reusing {tmp_path / 'pieces'}" in out and f"making {tmp_path / 'bin'}" in out
    assert hidden(tmp_path) == []


def test_damaged_stage_and_those_after_it_are_made_again(wheel, tmp_path, no_binary, capsys):
    main(arguments(wheel, tmp_path))
    whole = (tmp_path / "pieces/train.de").read_bytes()
    (tmp_path / "pieces/train.de").write_bytes(whole[:100])
    capsys.readouterr()
    assert main(arguments(wheel, tmp_path)) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[:3]] == ["reusing", "making", "making"]
    assert (tmp_path / "pieces/train.de").read_bytes() == whole


def test_two_preparations_of_one_folder_are_refused(wheel, tmp_path, no_binary, capsys):
    main(arguments(wheel, tmp_path))
    folder = common.StagedFolder(tmp_path, json.loads((tmp_path / "options.json").read_text()))
    with folder.open():
        assert main(arguments(wheel, tmp_path)) == 1
    assert "another data_prep is working" in capsys.readouterr().err


def test_too_little_text_is_said(tmp_path, capsys):
    name = component_names("train", 1)[0]
    sha = write_wheel(tmp_path / "w.whl", {name: {"en": texts(name), "de": texts(name, "en")}})
    assert main(arguments((tmp_path / "w.whl", sha), tmp_path / "d")) == 1
    assert "no en-de pair is left for the valid split" in capsys.readouterr().err
    assert not (tmp_path / "d/text").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"no zip at all", "not a readable wheel"), (None, "is not JSON")],
)
def test_unreadable_archive_is_named(tmp_path, capsys, content, message):
    path = tmp_path / "broken.whl"
    if content is None:
        write_wheel(path, {"mqtt": {"en": {"a": "b"}}})
        with zipfile.ZipFile(path, "a") as wheel:
            wheel.writestr("homeassistant/components/mqtt/translations/de.json", "{")
    else:
        path.write_bytes(content)
    assert main(arguments((path, common.sha256_of(path)), tmp_path / "d")) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert str(path) in error and message in error
    assert not (tmp_path / "d").exists()


def test_archive_of_another_digest_is_refused(wheel, tmp_path, capsys):
    assert main(["homeassistant", "--destdir", str(tmp_path / "d"), "--archive", str(wheel[0])]) == 1
    assert wheel[1] in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("flag", "value"), [("--vocab-size", "5"), ("--max-length", "0"), ("--character-coverage", "1.5")]
)
def test_option_out_of_range_is_named(wheel, tmp_path, capsys, flag, value):
    assert main(arguments(wheel, tmp_path / "d", flag, value)) == 1
    assert f"{flag} {value} is out of range" in capsys.readouterr().err


@pytest.fixture
def package(wheel) -> common.PackageFile:
    return common.PackageFile("small==1", "small.whl", wheel[1], wheel[0].stat().st_size)


def test_truncated_cached_file_is_downloaded_again(wheel, package, tmp_path):
    calls = []

    def download(package: common.PackageFile, folder: Path) -> None:
        calls.append(package.requirement)
        (folder / package.filename).write_bytes(wheel[0].read_bytes())

    path = common.fetch(package, tmp_path, download)
    assert common.fetch(package, tmp_path, download) == path
    assert len(calls) == 1
    path.write_bytes(wheel[0].read_bytes()[:1000])
    common.fetch(package, tmp_path, download)
    assert len(calls) == 2
    assert path.read_bytes() == wheel[0].read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["small.whl"]


def test_download_with_a_wrong_digest_is_not_kept(package, tmp_path):
    def download(package: common.PackageFile, folder: Path) -> None:
        (folder / package.filename).write_bytes(b"something else")

    with pytest.raises(CollabError, match="instead of " + package.sha256):
        common.fetch(package, tmp_path, download)
    assert list(tmp_path.iterdir()) == []


def test_unreachable_registry_is_one_sentence_and_leaves_no_folder(tmp_path):
    command = [sys.executable, "-m", "data_prep", "homeassistant", "--destdir", str(tmp_path / "d")]
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith("data_prep homeassistant: error: homeassistant==2026.2.3 could not be downloaded by pip")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "d").exists()
    assert list((tmp_path / "cache/fairseq-collab").iterdir()) == []


@pytest.mark.network
def test_real_corpus_has_the_published_counts(tmp_path, no_binary):
    cache = tmp_path / "cache"
    assert main(["homeassistant", "--destdir", str(tmp_path / "d"), "--cache", str(cache)]) == 0
    counts = json.loads((tmp_path / "d/text/stage.json").read_text())["counts"]
    assert {split: row["sentences"] for split, row in counts["splits"].items()} == {
        "train": 21873,
        "valid": 1330,
        "test": 866,
    }
    assert [p.name for p in cache.iterdir()] == [homeassistant.PACKAGE.filename]


def test_every_corpus_is_offered_by_the_command_line(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "homeassistant" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["no-such-corpus"])
    assert stop.value.code == 2
