"""A trained model on text as users have it: over-long and empty lines, unseen words and emoji."""

from __future__ import annotations

import json
import re
import shutil

import pytest

LONGEST = 12
SIZES = ("--encoder-embed-dim", 32, "--decoder-embed-dim", 32, "--encoder-ffn-embed-dim", 32)
UNUSUAL = ["ba be bi", "", "\U0001f600 ba zzz", " ".join(["ba"] * (LONGEST + 30)), "do du"]


@pytest.fixture(scope="module")
def checkpoints(toy_translation, fairseq, plugin_dir, tmp_path_factory):
    """A collaborative and a stock checkpoint of the same sizes, trained for a moment.

    Their encoders are pre-norm, so that stock fairseq 0.12.2 decodes them with torch 2, too.
    """
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = {}
    for name, arch in (("collab", "transformer_collab_tiny"), ("stock", "transformer_tiny")):
        plugin = ("--user-dir", plugin_dir) if name == "collab" else ()
        fairseq(
            *("train", toy_translation, *plugin, "--arch", arch, *SIZES, "--cpu", "--max-tokens", 1000),
            *("--max-source-positions", LONGEST, "--optimizer", "adam", "--lr", "1e-2", "--max-epoch", 10),
            *("--no-epoch-checkpoints", "--disable-validation", "--save-dir", folder / name),
            "--encoder-normalize-before",
        )
        paths[name] = folder / name / "checkpoint_last.pt"
    return paths


@pytest.fixture(scope="module")
def unusual_data(toy_translation, fairseq, tmp_path_factory):
    """A test set of `UNUSUAL` lines, with a reference that is longer than any target the model takes."""
    folder = tmp_path_factory.mktemp("unusual")
    references = ["abx ebx ibx", "", "abx", " ".join(["abx"] * 1500), "udx odx"]
    for side, lines in (("src", UNUSUAL), ("tgt", references)):
        (folder / f"raw.{side}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    dictionary = toy_translation / "dict.src.txt"
    fairseq(
        *("preprocess", "--source-lang", "src", "--target-lang", "tgt", "--testpref", folder / "raw"),
        *("--srcdict", dictionary, "--joined-dictionary", "--destdir", folder / "bin", "--workers", 1),
    )
    return folder


def evaluate(evaluate_bleu, tmp_path, *arguments):
    output = tmp_path / "figures.json"
    assert evaluate_bleu.main([*map(str, arguments), "--json", str(output), "--cpu"]) == 0
    return json.loads(output.read_text())


def test_score_and_order_are_those_of_fairseq_generate(
    evaluate_bleu, checkpoints, toy_translation, fairseq, plugin_dir, tmp_path
):
    figures = evaluate(
        *(evaluate_bleu, tmp_path, toy_translation, "--path", checkpoints["collab"], "--out", tmp_path),
        *("--max-len-a", 0, "--max-len-b", 200, "--ref", toy_translation / "test.tgt"),
    )
    stock = fairseq(
        *("generate", toy_translation, "--user-dir", plugin_dir, "--path", checkpoints["collab"], "--cpu"),
        *("--scoring", "sacrebleu", "--beam", 5),
    ).stdout
    hypotheses = {int(n): text for n, text in re.findall(r"^D-(\d+)\t[^\t]*\t(.*)$", stock, re.MULTILINE)}
    assert (tmp_path / "translations.txt").read_text().splitlines() == [hypotheses[n] for n in range(30)]
    (system,) = figures["systems"]
    assert system["sentences"] == 30
    score = re.search(r"BLEU = ([\d.]+)|\"score\": ([\d.]+)", stock)
    assert system["bleu"]["score"] == pytest.approx(float(score.group(1) or score.group(2)), abs=0.05)
    assert system["tokens"] == sum(len(text.split()) + 1 for text in hypotheses.values())
    assert system["tokens_per_second"] > 0


def test_interrupted_decode_goes_on_and_ends_with_the_same_figures(
    evaluate_bleu, checkpoints, toy_translation, tmp_path, monkeypatch, capsys
):
    from fairseq.tasks.translation import TranslationTask

    stock, batches = TranslationTask.inference_step, []

    def counting(*args, **kwargs):
        batches.append(1)
        if len(batches) == fails_at:
            raise KeyboardInterrupt
        return stock(*args, **kwargs)

    monkeypatch.setattr(TranslationTask, "inference_step", counting)
    command = (tmp_path, toy_translation, "--path", checkpoints["collab"], "--batch-size", 8)
    fails_at = 0
    whole = evaluate(evaluate_bleu, *command, "--out", tmp_path / "whole")["systems"][0]
    assert len(batches) == 4 and not list((tmp_path / "whole").glob("*.partial"))
    batches, fails_at = [], 3
    arguments = [*map(str, command[1:]), "--cpu", "--out", str(tmp_path / "parts")]
    assert evaluate_bleu.main(arguments) == 130
    assert "goes on where it was" in capsys.readouterr().err
    batches, fails_at = [], 0
    parts = evaluate(evaluate_bleu, *command, "--out", tmp_path / "parts")["systems"][0]
    assert len(batches) == 2
    assert [parts[key] for key in ("bleu", "tokens", "sentences")] == [
        whole[key] for key in ("bleu", "tokens", "sentences")
    ]
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["references.txt", "translations.txt"]


def test_every_unusual_line_is_translated_counted_and_scored(
    evaluate_bleu, checkpoints, unusual_data, tmp_path, capsys
):
    figures = evaluate(
        *(evaluate_bleu, tmp_path, unusual_data / "bin", "--path", checkpoints["collab"], "--out", tmp_path),
    )
    (system,) = figures["systems"]
    assert system["sentences"] == len(UNUSUAL)
    assert system["source_lines_cut"] == 1
    assert system["unknown_source_tokens"] == 2
    translations = (tmp_path / "translations.txt").read_text(encoding="utf-8").split("\n")
    assert len(translations) == len(UNUSUAL) + 1 and translations[-1] == ""
    assert "1 source lines were longer than the model takes" in capsys.readouterr().out


def test_words_are_cut_at_hyphens_where_the_data_has_no_target_side(evaluate_bleu, checkpoints, unusual_data, tmp_path):
    pytest.importorskip("sacremoses")
    shutil.copytree(unusual_data / "bin", tmp_path / "bin", ignore=shutil.ignore_patterns("test.*.tgt.*"))
    for detokenizer in ("none", "moses"):
        (system,) = evaluate(
            *(evaluate_bleu, tmp_path, tmp_path / "bin", "--path", checkpoints["collab"], "--compound-split"),
            *("--ref", unusual_data / "raw.tgt", "--detokenizer", detokenizer),
        )["systems"]
        assert system["compound_split"]["signature"].startswith("compound-split|tok:moses-tgt|")


def test_model_without_the_plugin_and_ensemble_are_evaluated_alike(
    evaluate_bleu, checkpoints, toy_translation, tmp_path
):
    ensemble = f"{checkpoints['collab']}:{checkpoints['stock']}"
    figures = evaluate(
        *(evaluate_bleu, tmp_path, toy_translation, "--compare", checkpoints["stock"], ensemble, "--samples", 100),
        *("--gen-subset", "valid", "--beam", 2),
    )
    stock, both = figures["systems"]
    assert (len(stock["parameters"]), len(both["parameters"])) == (1, 2)
    assert stock["parameters"][0] == both["parameters"][1] != both["parameters"][0]
    assert figures["comparison"]["bleu"]["difference"] == both["bleu"]["score"] - stock["bleu"]["score"]
    assert 0 < figures["comparison"]["chrf"]["p_value"] <= 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gen-subset", "dev"], "has no split dev for src-tgt (it has test, train, valid)"),
        (["--model-overrides", "{'key_dim': 16}"], "16"),
        (["--ref", "{data}/train.tgt"], "has 300 lines for 30 sentences"),
        (["-s", "xx", "-t", "tgt"], "no dictionary dict.xx.txt"),
    ],
)
def test_set_or_option_that_does_not_fit_the_checkpoint_is_said(
    evaluate_bleu, checkpoints, toy_translation, capsys, arguments, sentence
):
    arguments = [argument.replace("{data}", str(toy_translation)) for argument in arguments]
    assert evaluate_bleu.main([str(toy_translation), "--path", str(checkpoints["collab"]), *arguments]) == 1
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_other_vocabulary_is_said(evaluate_bleu, checkpoints, unusual_data, fairseq, tmp_path, capsys):
    raw = unusual_data / "raw"
    fairseq(
        *("preprocess", "--source-lang", "src", "--target-lang", "tgt", "--trainpref", raw, "--testpref", raw),
        *("--destdir", tmp_path / "other", "--joined-dictionary", "--workers", 1),
    )
    assert evaluate_bleu.main([str(tmp_path / "other"), "--path", str(checkpoints["collab"])]) == 1
    assert "vocabulary" in capsys.readouterr().err.splitlines()[-1]


def test_interactive_translates_every_unusual_line(checkpoints, toy_translation, fairseq, plugin_dir):
    output = fairseq(
        *("interactive", toy_translation, "--user-dir", plugin_dir, "--path", checkpoints["collab"], "--cpu"),
        *("--buffer-size", 8, "--batch-size", 8, "--source-lang", "src", "--target-lang", "tgt"),
        input="".join(f"{line}\n" for line in UNUSUAL),
    ).stdout
    assert re.findall(r"^H-(\d+)", output, re.MULTILINE) == [str(n) for n in range(len(UNUSUAL))]
    tokens = LONGEST + 31
    assert f"line 4 of the batch has {tokens} tokens and the model takes {LONGEST}" in output


def test_hub_model_translates_an_overlong_line(checkpoints, toy_translation, caplog):
    from fairseq_collab.models.transformer import TransformerCollabModel

    path = checkpoints["collab"]
    hub = TransformerCollabModel.from_pretrained(str(path.parent), path.name, str(toy_translation))
    translations = hub.translate(UNUSUAL, beam=1)
    assert len(translations) == len(UNUSUAL)
    assert f"the model takes {LONGEST}" in caplog.text
