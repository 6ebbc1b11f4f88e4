"""Scores beside sacreBLEU's own: words cut at hyphens as in older papers, and the detokenizer that undoes it."""

from __future__ import annotations

import json
import math

import pytest

from fairseq_collab.scoring import score_compound_split, split_compounds


@pytest.mark.parametrize(
    ("line", "cut"),
    [
        ("der Ost-West Konflikt", "der Ost ##AT##-##AT## West Konflikt"),
        ("a-b-c", "a ##AT##-##AT## b-c"),  # as the Perl expression of the papers: matches do not overlap
        ("aa-bb-cc", "aa ##AT##-##AT## bb ##AT##-##AT## cc"),
        # so does this one, where the data had cut the word before
        ("a ##AT##-##AT## b", "a ##AT## ##AT##-##AT## ##AT## b"),
        ("- a -b c- 3 - 4", "- a -b c- 3 - 4"),
        ("", ""),
    ],
)
def test_words_are_cut_at_hyphens_between_characters(line, cut):
    assert split_compounds(line) == cut


def test_compound_split_bleu_counts_the_parts_without_smoothing():
    system = {}
    score_compound_split(system, ["the Ost-West affair is over"], ["the Ost-West affair was over"], "tok:data")
    # 7 tokens on each side: 6 of 7 words match, 4 of 6 pairs, 3 of 5 triples, 2 of 4 quadruples
    expected = 100 * math.exp(sum(map(math.log, (6 / 7, 4 / 6, 3 / 5, 2 / 4))) / 4)
    assert system["compound_split"]["score"] == pytest.approx(expected)
    signature = system["compound_split"]["signature"]
    assert signature.startswith("compound-split|tok:data|") and "tok:none" in signature and "smooth:none" in signature
    score_compound_split(system, ["nothing in common here"], ["the Ost-West affair was over"], "tok:data")
    assert system["compound_split"]["score"] == 0


def test_files_of_natural_text_are_tokenised_and_cut_on_request(evaluate_bleu, tmp_path, capsys):
    pytest.importorskip("sacremoses")
    for name, line in (("a", "Der Ost-West-Konflikt, heute."), ("b", "Der Ost-Konflikt, heute.")):
        (tmp_path / f"{name}.txt").write_text(f"{line}\n", encoding="utf-8")
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt", "a.txt")]
    output = tmp_path / "figures.json"
    command = ["--compare", *files[:2], "--ref", files[2], "-s", "en", "-t", "de", "--compound-split"]
    assert evaluate_bleu.main([*command, "--samples", "10", "--json", str(output)]) == 0
    first, second = json.loads(output.read_text())["systems"]
    assert first["compound_split"]["score"] == pytest.approx(100) and second["compound_split"]["score"] < 100
    assert "compound-split|tok:moses-de|nrefs:1" in capsys.readouterr().out


def test_compound_split_without_sacremoses_is_said_before_decoding(evaluate_bleu, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "sacremoses", None)
    assert evaluate_bleu.main(["DATA", "--path", "nowhere.pt", "--compound-split"]) == 1
    assert "pip install sacremoses" in capsys.readouterr().err


def test_detokenizer_joins_words_that_the_data_cut_at_hyphens():
    pytest.importorskip("sacremoses")
    from fairseq_collab.fairseq_modules.translate import build_detokenizer

    detokenize = build_detokenizer("moses", ("en", "de"))
    assert detokenize("der Ost ##AT##-##AT## West @-@ Konflikt .") == "der Ost-West-Konflikt."
