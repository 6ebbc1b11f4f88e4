"""What an interrupted decode left: taken up when it is the same decode, and only whole lines of it."""

from __future__ import annotations

import torch

from fairseq_collab.fairseq_modules.kept_translations import KeptTranslations, fingerprint

FIRST, SECOND = {3: ("ein Satz", 3), 0: ("", 1)}, {1: ("Ü\u2028 noch", 4)}


def test_translations_are_taken_up_by_the_same_decode_only(tmp_path):
    path = tmp_path / "out" / "translations.partial"
    kept = KeptTranslations(path, {"beam": 4})
    kept.add(FIRST, 1.5, 2)
    kept.add(SECOND, 0.5, 1)
    again = KeptTranslations(path, {"beam": 4})
    assert again.found == {**FIRST, **SECOND} == kept.found
    assert (again.seconds, again.unknown) == (2.0, 3)
    assert KeptTranslations(path, {"beam": 5}).found == {}
    assert KeptTranslations(path, {"beam": 4}).found == {}


def test_line_that_was_not_finished_is_left_out_and_written_over(tmp_path):
    path = tmp_path / "translations.partial"
    kept = KeptTranslations(path, {})
    kept.add(FIRST, 1.0, 0)
    kept.add(SECOND, 1.0, 0)
    path.write_bytes(path.read_bytes()[:-9])
    again = KeptTranslations(path, {})
    assert again.found == FIRST
    again.add(SECOND, 1.0, 0)
    assert KeptTranslations(path, {}).found == {**FIRST, **SECOND}


def test_what_follows_a_damaged_line_is_left_out(tmp_path):
    path = tmp_path / "translations.partial"
    kept = KeptTranslations(path, {})
    for number in range(3):
        kept.add({number: ("text", 1)}, 1.0, 0)
    head, first, _, last = path.read_text().splitlines()
    for damaged in ("\0\0\0", "7", "{}"):
        path.write_text("\n".join((head, first, damaged, last, "")))
        assert KeptTranslations(path, {}).found == {0: ("text", 1)}
        assert path.read_text() == f"{head}\n{first}\n"


def test_nothing_is_written_without_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    KeptTranslations(None, {}).add(FIRST, 1.0, 0)
    assert not any(tmp_path.iterdir())


def test_fingerprint_is_that_of_the_weights():
    model = torch.nn.Linear(2, 3).bfloat16()
    before = fingerprint([model])
    assert fingerprint([model, model]) != before == fingerprint([model])
    model.weight.data[0, 0] += 1
    assert fingerprint([model]) != before
