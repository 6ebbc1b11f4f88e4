"""The parts of scripts/evaluate_bleu.py that need no trained model: finished translations, scores, refusals."""

from __future__ import annotations

import json

import pytest
import sacrebleu

REFERENCES = ["the cat sat on the mat", "a dog barked at the moon all night", "it rains", "open the front door please"]
GOOD = ["the cat sat on a mat", "a dog barked at the moon all night", "it rains", "open the front door"]
POOR = ["cat mat", "dog barked moon", "", "front door open"]


@pytest.fixture
def files(tmp_path):
    def write(name, lines):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return str(tmp_path / name)

    return {"good": write("good.txt", GOOD), "poor": write("poor.txt", POOR), "ref": write("ref.txt", REFERENCES)}


def test_files_of_translations_get_sacrebleus_scores_and_a_test_with_a_fixed_seed(
    evaluate_bleu, files, tmp_path, capsys
):
    output = tmp_path / "figures.json"
    command = ["--compare", files["poor"], files["good"], "--ref", files["ref"], "--json", str(output)]
    assert evaluate_bleu.main(command) == 0
    figures = json.loads(output.read_text())
    for system, lines in zip(figures["systems"], (POOR, GOOD), strict=True):
        assert system["bleu"]["score"] == pytest.approx(sacrebleu.corpus_bleu(lines, [REFERENCES]).score)
        assert system["chrf"]["score"] == pytest.approx(sacrebleu.corpus_chrf(lines, [REFERENCES]).score)
        assert "version:" in system["bleu"]["signature"] and "nrefs:1" in system["chrf"]["signature"]
    assert [system["empty_translations"] for system in figures["systems"]] == [1, 0]
    comparison = figures["comparison"]["bleu"]
    assert comparison["difference"] > 0
    assert 0 < comparison["p_value"] < 0.2
    assert "seed:12345" in comparison["signature"] and "bs:1000" in comparison["signature"]
    first = capsys.readouterr().out
    assert evaluate_bleu.main(command) == 0
    assert capsys.readouterr().out == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures.json", "good.txt", "poor.txt", "ref.txt"]


def test_translations_equal_to_each_other_differ_by_nothing(evaluate_bleu, files, tmp_path):
    output = tmp_path / "figures.json"
    evaluate_bleu.main(["--compare", files["good"], files["good"], "--ref", files["ref"], "--json", str(output)])
    comparison = json.loads(output.read_text())["comparison"]["bleu"]
    assert comparison["difference"] == 0
    assert comparison["p_value"] == 1


def test_empty_and_unusual_lines_are_scored_not_dropped(evaluate_bleu, files, tmp_path):
    path = tmp_path / "unusual.txt"
    path.write_text(
        "the cat sat on the mat\n\n\U0001f600 \u4f60\u597d\nopen the front\u2028 door please\n", encoding="utf-8"
    )
    assert len(evaluate_bleu.read_lines(path)) == 4
    output = tmp_path / "figures.json"
    evaluate_bleu.main(["--compare", str(path), files["good"], "--ref", files["ref"], "--json", str(output)])
    assert json.loads(output.read_text())["systems"][0]["empty_translations"] == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--compare", "{good}", "{poor}"], "need their references: give --ref FILE"),
        (["--compare", "{good}", "model.pt"], "two checkpoints (*.pt) or two files"),
        (["--compare", "{good}", "nowhere.txt", "--ref", "{ref}"], "there is no file nowhere.txt"),
        (["--compare", "{good}", "{short}", "--ref", "{ref}"], "has 1 lines, "),
        (["--compare", "{good}", "{binary}", "--ref", "{ref}"], "is not UTF-8 text (byte 1)"),
        (["--compare", "{good}", "{poor}", "--ref", "{ref}", "--tokenize", "klingon"], "no usable tokenizer 'klingon'"),
        (["DATA", "--path", "nowhere.pt"], "there is no checkpoint nowhere.pt"),
        (["--path", "{checkpoint}"], "DATA is missing"),
        (["nowhere", "--path", "{checkpoint}"], "there is no data folder nowhere"),
        (["{folder}", "--path", "{checkpoint}", "--user-dir", "nowhere"], "there is no folder nowhere"),
        (["{folder}", "--path", "{checkpoint}", "--model-overrides", "{{'a'"], "is no Python dictionary"),
        (["{folder}", "--path", "{checkpoint}", "--model-overrides", "[1]"], "is no Python dictionary"),
        (["{folder}", "--path", "{checkpoint}", "-s", "de"], "belong together"),
        (["{folder}", "--path", "nowhere", "--average", "3"], "there is no folder nowhere"),
        (["{folder}", "--path", "{folder}", "--average", "3"], "has no checkpoints of epochs or updates"),
        (["--compare", "{good}", "{poor}", "--ref", "{ref}", "--average", "3"], "goes with --path SAVE_DIR"),
        (["{folder}", "--path", "{checkpoint}"], "is damaged (it is empty)"),
    ],
)
def test_what_cannot_be_evaluated_is_said_in_one_sentence(evaluate_bleu, files, tmp_path, capsys, arguments, sentence):
    (tmp_path / "short.txt").write_text("one\n")
    (tmp_path / "binary.txt").write_bytes(b"a\xff\xfe")
    (tmp_path / "empty.pt").touch()
    places = {"short": "short.txt", "binary": "binary.txt", "checkpoint": "empty.pt", "folder": "."}
    named = {**files, **{key: str(tmp_path / name) for key, name in places.items()}}
    output = tmp_path / "figures.json"
    assert evaluate_bleu.main([argument.format(**named) for argument in arguments] + ["--json", str(output)]) == 1
    error = capsys.readouterr().err.strip()
    assert error.splitlines()[-1].startswith("evaluate_bleu.py: error: ")
    assert sentence in error.splitlines()[-1]
    assert not output.exists()


@pytest.mark.parametrize(
    ("symbols", "rule"),
    [(["a", "\u2581the"], "sentencepiece"), (["a@@", "b"], "subword_nmt"), (["the", "cat"], None)],
)
def test_how_pieces_are_joined_is_read_from_the_dictionary(evaluate_bleu, symbols, rule):
    from fairseq_collab.fairseq_modules.translate import joining_rule

    assert joining_rule(symbols) == rule
