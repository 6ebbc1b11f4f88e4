"""Reading, pairing, cleaning and cutting parallel text: which lines are lost, why, and that none is lost silently."""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sentencepiece

from data_prep import bitext, cleaning, markup, subwords
from data_prep.bitext import EMPTY, NOT_UTF8, ONE_SIDED, OVER_LONG, RATIO, FilePair
from data_prep.cleaning import Cleaning, write_tokens
from data_prep.subwords import Subwords, write_subwords
from fairseq_collab.errors import CollabError

ROOT = Path(__file__).resolve().parents[2]
LANGS = ("en", "de")


def file_pair(folder: Path, name: str, source: bytes, target: bytes) -> FilePair:
    (folder / f"{name}.en").write_bytes(source)
    (folder / f"{name}.de").write_bytes(target)
    return FilePair(folder / f"{name}.en", folder / f"{name}.de")


def read(folder: Path, name: str) -> list[str]:
    return (folder / name).read_bytes().decode().split("\n")[:-1]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def awkward(tmp_path: Path) -> dict[str, list[FilePair]]:
    """Byte order mark, CRLF, other separators of Unicode, quotes, empty lines, bad bytes, no last line feed."""
    train = file_pair(
        tmp_path,
        "train",
        codecs.BOM_UTF8
        + b'one  two\r\nsplit\xe2\x80\xa8here \xc2\x85 too\n\n\nbad \xff byte\n  "quoted" <b>\n\xc2\xa0\nlast',
        b"eins zwei\r\nhier\rgeteilt\n\nallein\nschlecht\n'zitiert'\nauch allein\r\nletzte\n",
    )
    valid = file_pair(tmp_path, "valid", b"a\n\nc \xff\n", b"x\ny\nz\n")
    return {"train": [train], "valid": [valid], "test": [file_pair(tmp_path, "test", b"t\n", b"u\n")]}


@pytest.mark.parametrize(
    ("content", "lines"), [(b"", 0), (b"a", 1), (b"a\n", 1), (b"\n\n", 2), (b"a\r\xe2\x80\xa8b\nc", 2)]
)
def test_lines_end_at_line_feeds_only(tmp_path, content, lines):
    (tmp_path / "f").write_bytes(content)
    assert bitext.count_lines(tmp_path / "f") == lines


def test_natural_text_keeps_pairs_together_and_counts_what_it_drops(awkward, out):
    counts = bitext.write_natural(out, awkward, LANGS)
    assert read(out, "train.en") == ["one two", "split here too", '"quoted" <b>', "last"]
    assert read(out, "train.de") == ["eins zwei", "hier geteilt", "'zitiert'", "letzte"]
    assert counts["read"]["train"] == 8
    assert counts["dropped"]["train"] == {EMPTY: 1, ONE_SIDED: 2, NOT_UTF8: 1}
    assert counts["splits"] == {"train": 4, "valid": 3, "test": 1}


def test_valid_and_test_keep_every_line(awkward, out):
    counts = bitext.write_natural(out, awkward, LANGS)
    assert read(out, "valid.en") == ["a", "", "c \ufffd"]
    assert read(out, "valid.de") == ["x", "y", "z"]
    assert counts["kept"]["valid"] == {ONE_SIDED: 1, NOT_UTF8: 1}


def test_different_numbers_of_lines_are_refused_before_anything_is_written(awkward, tmp_path, out):
    other = file_pair(tmp_path, "web", b"a\nb\nc\n", b"x\n" * 1200)
    with pytest.raises(CollabError) as caught:
        bitext.write_natural(out, {**awkward, "train": [*awkward["train"], other]}, LANGS)
    assert str(caught.value) == (
        f"{tmp_path}/web.en has 3 lines and {tmp_path}/web.de has 1,200: their lines do not translate each other"
    )
    assert list(out.iterdir()) == []


def test_a_split_of_which_nothing_is_left_is_refused(awkward, tmp_path, out):
    awkward["train"] = [file_pair(tmp_path, "empty", b"\n\n", b"a\nb\n")]
    with pytest.raises(CollabError, match="no pair is left for the train split: all 2 are empty or not UTF-8"):
        bitext.write_natural(out, awkward, LANGS)


def numbered(tmp_path: Path, lengths: list[tuple[int, int]]) -> dict[str, list[FilePair]]:
    sides = [
        "".join(" ".join([f"w{number}"] * pair[side]) + "\n" for number, pair in enumerate(lengths)).encode()
        for side in (0, 1)
    ]
    tiny = file_pair(tmp_path, "tiny", b"a a a a a a\n\n", b"b\nc\n")
    return {"train": [file_pair(tmp_path, "train", *sides)], "valid": [tiny], "test": [tiny]}


def test_long_and_unequal_pairs_leave_train_only_and_are_counted(tmp_path, out):
    lengths = [(4, 4), (5, 4), (4, 5), (2, 3), (3, 2), (2, 4), (1, 2), (4, 2), (0, 0), (0, 1)]
    limits = Cleaning(max_length=4, max_ratio=1.5)
    counts = write_tokens(numbered(tmp_path, lengths), out, LANGS, limits, workers=1)
    assert [line.split()[0] for line in read(out, "train.en")] == ["w0", "w3", "w4"]
    assert counts["dropped"]["train"] == {OVER_LONG: 2, RATIO: 3, EMPTY: 1, ONE_SIDED: 1}
    assert counts["read"]["train"] == 10 and counts["splits"]["train"] == 3
    assert read(out, "test.en") == ["a a a a a a", ""]
    assert counts["kept"]["test"] == {OVER_LONG: 1, ONE_SIDED: 1}
    assert counts["tokens"]["train"] == {"en": 9, "de": 9}


def test_limits_of_zero_keep_everything_with_text(tmp_path, out):
    counts = write_tokens(numbered(tmp_path, [(900, 1), (0, 3)]), out, LANGS, Cleaning(), workers=1)
    assert counts["splits"]["train"] == 1 and counts["dropped"]["train"] == {ONE_SIDED: 1}


def test_each_so_manyth_cleaned_pair_becomes_valid(tmp_path, out):
    splits = numbered(tmp_path, [(1, 1), (9, 1), (1, 1), (1, 1), (9, 9), (1, 1), (1, 1), (1, 1)])
    del splits["valid"]
    counts = write_tokens(splits, out, LANGS, Cleaning(max_ratio=2.0), workers=1, valid_every=3)
    assert read(out, "train.en") == ["w0", "w2", " ".join(["w4"] * 9), "w5", "w7"]
    assert read(out, "valid.de") == ["w3", "w6"]
    assert counts["splits"] == {"train": 5, "valid": 2, "test": 2}


def test_moses_tokens_are_the_same_with_any_number_of_workers(tmp_path, monkeypatch):
    pytest.importorskip("sacremoses")
    monkeypatch.setattr(cleaning, "_CHUNK", 7)
    text = "".join(f'It\'s "well-known", No. {number} & more…\n' for number in range(60)).encode()
    splits = dict.fromkeys(("train", "valid", "test"), [file_pair(tmp_path, "a", text, text)])
    contents = []
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        folder.mkdir()
        write_tokens(splits, folder, LANGS, Cleaning("moses", lowercase=True), workers)
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert contents[0] == contents[1]
    first = contents[0]["train.en"].decode().split("\n")[0]
    assert first == "it &apos;s &quot; well @-@ known &quot; , no. 0 &amp; more …"


def test_dashes_stay_whole_where_asked():
    pytest.importorskip("sacremoses")
    cleaner = cleaning.PairCleaner(Cleaning("moses", split_dashes=False), LANGS)
    assert cleaner(("well-known.", "", True)) == ("well-known .", "", ONE_SIDED)


def test_missing_sacremoses_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(CollabError, match="pip install sacremoses, or --tokenizer none"):
        Cleaning("moses").check()


def test_workers_end_with_a_killed_parent(tmp_path):
    """A preparation that is killed outright leaves no processes behind."""
    script = (
        "import os, signal, sys\nfrom data_prep import cleaning\n"
        "cleaning.PairCleaner = lambda *_: lambda pair: (*pair[:2], None)\n"
        "with cleaning._worker_pool(cleaning.Cleaning('moses'), ('en', 'de'), 2) as run:\n"
        "    next(run(iter([[('a', 'b', True)]] * 4)))\n"
        "    pool = run.__closure__[0].cell_contents\n"
        "    print(*pool._processes, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    children = [int(word) for word in done.stdout.split()]
    assert children
    limit = time.monotonic() + 10
    while (alive := [child for child in children if is_running(child)]) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not alive


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    folder = tmp_path / "tokens"
    folder.mkdir()
    for split, count in (("train", 200), ("valid", 7), ("test", 5)):
        english = "".join(f"the {word} of house {n}\n" for n, word in enumerate(["door", "window", "roof"] * 100))
        german = english.replace("the", "das").replace("of house", "vom Haus")
        for lang, text in (("en", english), ("de", german)):
            (folder / f"{split}.{lang}").write_text("".join(text.splitlines(keepends=True)[:count]), encoding="utf-8")
    return folder


@pytest.mark.parametrize("model", ["bpe", "unigram"])
def test_pieces_join_to_the_tokens_and_models_are_repeatable(tokens, tmp_path, monkeypatch, model):
    monkeypatch.setattr(subwords, "_CHUNK", 3)
    models = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        counts = write_subwords(tokens, folder, LANGS, Subwords(100, model, "both"), workers=2)
        models.append((folder / "spm.vocab").read_bytes())
        for split in ("train", "valid", "test"):
            for lang in LANGS:
                joined = [
                    line.replace(" ", "").replace("\u2581", " ").strip() for line in read(folder, f"{split}.{lang}")
                ]
                assert joined == read(tokens, f"{split}.{lang}")
                length = sum(len(line.split()) for line in read(folder, f"{split}.{lang}"))
                assert counts["splits"][split]["tokens"][lang] == length
    assert models[0] == models[1]


def test_separate_models_know_only_their_language(tokens, tmp_path, out):
    counts = write_subwords(tokens, out, LANGS, Subwords(100, "bpe", "none"), workers=1)
    pieces = {lang: sentencepiece.SentencePieceProcessor(model_file=str(out / f"spm.{lang}.model")) for lang in LANGS}
    assert pieces["de"].piece_to_id("H") != pieces["de"].unk_id()
    assert pieces["en"].piece_to_id("H") == pieces["en"].unk_id()
    assert counts["pieces"] == {lang: model.vocab_size() for lang, model in pieces.items()}


def test_of_too_much_text_evenly_spaced_lines_train_the_model(tmp_path):
    (tmp_path / "f").write_text("".join(f"{number}\n" for number in range(10)))
    assert list(subwords._spaced_lines([tmp_path / "f"] * 2, 4)) == ["0", "4", "8", "2", "6"]


def test_segments_are_found_whatever_surrounds_them(tmp_path):
    (tmp_path / "a.sgm").write_bytes(
        b'<srcset setid="x">\r\n<doc>\n<hl>\n<seg id="1"> It\xe2\x80\x99s "A" &amp; B </seg>\r\n</hl>\n<p>\n'
        b'<seg id="2"></seg><seg id="3">over\r\n two lines</seg>\n</p></doc>\n'
    )
    path = markup.write_segments([tmp_path / "a.sgm"], tmp_path / "a", replace=("\u2019", "'"))
    assert path.read_bytes() == b'It\'s "A" &amp; B\n\nover two lines\n'
    (tmp_path / "b.sgm").write_text("<seg id=1>open")
    with pytest.raises(CollabError, match="b.sgm has no <seg> … </seg>"):
        markup.write_segments([tmp_path / "b.sgm"], tmp_path / "b")
