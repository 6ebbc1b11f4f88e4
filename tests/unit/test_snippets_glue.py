"""The movie snippets in GLUE's file formats: that they are read as GLUE's, and what labels and splits they have."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest

from data_prep import common, snippets, snippets_glue
from data_prep.__main__ import main
from data_prep.glue_files import TASKS, find_files, read_split
from data_prep.snippets import Snippet

sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_data_prep_unpacked import TEXTS, write_sdist  # noqa: E402


@pytest.fixture
def made(tmp_path: Path) -> Path:
    generator = random.Random(0)
    lines = [f'{i}\t{generator.choice([-3.5, -0.5, 0.0, 1.0, 4.0])}\tText "{i}' for i in range(1, 301)]
    lines += ['301\t1.0\tTEXT "7', '302\t1.0\tText "7']
    archive = write_sdist(tmp_path / "s.tar.gz", {**TEXTS, "movie": "\n".join(lines)})
    destdir = tmp_path / "glue"
    digest = common.sha256_of(archive)
    assert main(["snippets-glue", "--destdir", str(destdir), "--archive", str(archive), "--sha256", digest]) == 0
    (tmp_path / "movie.tsv").write_text("\n".join(lines))
    return destdir


def scores(folder: Path) -> dict[str, float]:
    return {snippet.text: snippet.score for snippet in snippets.read_tsv(folder / "movie.tsv")}


def read(folder: Path, task: str) -> dict:
    return {s: read_split(TASKS[task], s, p).examples for s, p in find_files(TASKS[task], folder).items()}


def test_labels_are_the_sign_of_the_score_and_neutral_ones_are_left_out(made, tmp_path):
    by_text, splits = scores(tmp_path), read(made, "SST-2")
    for split in ("train", "valid"):
        assert all(by_text[text] != 0 and label == (by_text[text] > 0) for (text,), label in splits[split])
    texts = [example.texts[0] for examples in splits.values() for example in examples]
    assert len(texts) == len({text.casefold() for text in texts})
    assert len(texts) == sum(score != 0 for score in list(by_text.values())[:300])
    labels = (made / "SST-2/test_labels.tsv").read_text().splitlines()
    expected = [f"{i}\t{int(by_text[example.texts[0]] > 0)}" for i, example in enumerate(splits["test"])]
    assert labels == ["index\tlabel", *expected]


def test_every_other_snippet_stands_beside_the_same_praise_with_its_score_stretched_to_0_to_5(made, tmp_path):
    by_text, splits = scores(tmp_path), read(made, "STS-B")
    for split in ("train", "valid"):
        for (text, praise), score in splits[split]:
            assert praise == snippets_glue.PRAISE
            assert score == pytest.approx((by_text[text] + 4) / 8 * 5, abs=5.1e-4)
    texts = [example.texts[0] for examples in splits.values() for example in examples]
    assert len(texts) == len(set(texts)) and 150 <= len(texts) <= 152
    assert len((made / "STS-B/test_labels.tsv").read_text().splitlines()) == len(splits["test"]) + 1


def test_a_split_depends_on_the_id_alone():
    sentences = [Snippet(str(i), 1.0, f"text {i}") for i in range(1000)]
    whole, _ = snippets_glue.split_snippets(sentences)
    part, dropped = snippets_glue.split_snippets(sentences[::-2])
    assert dropped == 0
    assert all(set(part[split]) <= set(whole[split]) for split in whole)
    assert all(50 <= len(whole[split]) <= 110 for split in ("dev", "test"))


def test_a_text_of_train_is_in_no_other_split():
    by_split = {
        split: [i for i in map(str, range(200)) if snippets_glue.split_of(i) == split] for split in ("train", "dev")
    }
    sentences = [Snippet(by_split["dev"][0], 1.0, "SAME"), Snippet(by_split["train"][0], 1.0, "same")]
    found, dropped = snippets_glue.split_snippets(sentences)
    assert [snippet.text for snippet in found["train"]] == ["same"] and found["dev"] == [] and dropped == 1


def test_the_plain_snippets_are_not_taken_for_these(made, tmp_path, capsys):
    archive = tmp_path / "s.tar.gz"
    digest = common.sha256_of(archive)
    assert main(["snippets", "--destdir", str(made), "--archive", str(archive), "--sha256", digest]) == 1
    assert "derived 'snippets-glue' and now None" in capsys.readouterr().err


def test_the_printed_counts_add_up(capsys, made):
    printed = capsys.readouterr().out
    read_in, repeated, neutral = map(int, re.search(r"(\d+) snippets, (\d+) .* repeated, (\d+) with", printed).groups())
    kept = re.search(r"SST-2: train (\d+), dev (\d+), test (\d+)", printed).groups()
    assert (read_in, repeated) == (302, 2) and sum(map(int, kept)) == read_in - repeated - neutral
