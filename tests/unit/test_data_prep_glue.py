"""``data_prep glue``: what fairseq reads from the folder, when it is made again, and what is refused."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from data_prep.__main__ import main
from data_prep.glue_files import TASKS, find_files, read_split
from data_prep.glue_text import EOS, EncodedText, RobertaTextEncoder, rebuild

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _glue import CORPUS, write_roberta, write_task, write_tokenizer  # noqa: E402


@pytest.fixture
def roberta(tmp_path: Path) -> Path:
    return write_roberta(tmp_path / "roberta")


def run(task: str, raw: Path, destdir: Path, *options: Any) -> int:
    arguments = ["glue", "--task", task, "--raw", raw, "--destdir", destdir, *options]
    return main([str(argument) for argument in arguments])


def load(destdir: Path, split: str) -> tuple[Any, list[dict[str, Any]]]:
    """fairseq's task and its examples in the order of the file, with the flags that the preparation says."""
    from fairseq import options, tasks

    flags = json.loads((destdir / "preparation.json").read_text())["flags"]
    parser = options.get_training_parser(default_task="sentence_prediction")
    args = options.parse_args_and_arch(parser, [str(destdir), *flags, "--arch", "roberta_base", "--no-shuffle"])
    task = tasks.setup_task(Namespace(**{**vars(args), "seed": 1}))
    dataset = task.load_dataset(split)
    return task, sorted((dataset[i] for i in range(len(dataset))), key=lambda example: example["id"])


@pytest.mark.parametrize("name", TASKS)
def test_fairseq_reads_every_split_with_texts_and_labels(tmp_path, roberta, name, capsys):
    write_task(tmp_path / "raw", name)
    assert run(name, tmp_path / "raw", tmp_path / "data", "--roberta", roberta) == 0
    out = capsys.readouterr().out
    assert ("dropped: " in out) == (name == "QQP")
    preparation = json.loads((tmp_path / "data/preparation.json").read_text())
    task, encoder = TASKS[name], RobertaTextEncoder(roberta, 128)
    assert list(preparation["splits"]) == list(task.files)
    for split, path in find_files(task, tmp_path / "raw").items():
        expected = read_split(task, split, path).examples
        fairseq_task, found = load(tmp_path / "data", split)
        assert len(found) == len(expected) == preparation["splits"][split]["examples"]
        for example, (texts, label) in zip(found, expected, strict=True):
            assert example["net_input.src_tokens"].tolist() == rebuild(encoder.encode([texts])[0].inputs, 2)
            if label is None:
                assert "target" not in example
            elif name == "STS-B":
                assert example["target"] == pytest.approx([label / 5])
            else:
                assert example["target"].tolist() == [label]
        if split == "train" and name != "STS-B":
            symbols = fairseq_task.label_dictionary.symbols
            assert symbols[4 : 4 + len(task.labels)] == list(task.labels) == preparation["labels"]


def test_a_separator_in_a_text_is_counted_and_told(tmp_path, capsys):
    model = write_tokenizer(tmp_path / "hf", "wordpiece")
    write_task(tmp_path / "raw", "MRPC")
    path = tmp_path / "raw/MRPC/train.tsv"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1].rstrip("\n") + " [SEP] ba\n", *lines[2:]]), encoding="utf-8")
    assert run("MRPC", tmp_path / "raw", tmp_path / "data", "--hf-model", model) == 0
    assert "train: 1 examples name the separator in their text, where it is read as <unk>" in capsys.readouterr().out
    _, found = load(tmp_path / "data", "train")
    assert {example["net_input.src_tokens"].tolist().count(EOS) for example in found} == {2}


@pytest.mark.parametrize(("kind", "separator"), [("wordpiece", False), ("unigram", False), ("bytes", True)])
def test_fairseq_builds_the_ids_of_the_hf_tokenizer(tmp_path, kind, separator):
    from transformers import AutoTokenizer

    model = write_tokenizer(tmp_path / "hf", kind)
    write_task(tmp_path / "raw", "MRPC")
    assert run("MRPC", tmp_path / "raw", tmp_path / "data", "--hf-model", model, "--max-length", 16) == 0
    flags = json.loads((tmp_path / "data/preparation.json").read_text())["flags"]
    assert ("--separator-token" in flags) == separator
    task, found = load(tmp_path / "data", "train")
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [e.texts for e in read_split(TASKS["MRPC"], "train", tmp_path / "raw/MRPC/train.tsv").examples]
    roles = {"<s>": "cls bos", "</s>": "sep eos", "<pad>": "pad", "<unk>": "unk", "<mask>": "mask"}
    for example, text in zip(found, texts, strict=True):
        symbols = [task.dictionary[id] for id in example["net_input.src_tokens"].tolist()]
        names = [
            next(filter(None, (getattr(tokenizer, f"{role}_token") for role in roles.get(s, "").split())), s)
            for s in symbols
        ]
        expected = tokenizer([text[0]], [text[1]], truncation=True, max_length=16)["input_ids"][0]
        assert tokenizer.convert_tokens_to_ids(names) == expected


def test_roberta_texts_have_the_ids_of_fairseqs_own_encoder_and_hf_truncation(tmp_path, roberta):
    from fairseq.data import Dictionary
    from fairseq.data.encoders.gpt2_bpe_utils import get_encoder

    encoder, bpe = RobertaTextEncoder(roberta, 12), get_encoder(f"{roberta}/encoder.json", f"{roberta}/vocab.bpe")
    dictionary = Dictionary.load(f"{roberta}/dict.txt")
    line = CORPUS[0]
    expected = dictionary.encode_line(" ".join(map(str, bpe.encode(line))), add_if_not_exist=False).tolist()
    assert RobertaTextEncoder(roberta, 128).encode([(line,)])[0] == EncodedText((expected,), was_cut=False)
    pair = encoder.encode([(line, line)])[0]
    assert pair.was_cut and len(rebuild(pair.inputs, 2)) == 12
    assert [ids[:-1] for ids in pair.inputs] == [expected[:4]] * 2


def test_a_whole_folder_is_reused_and_a_damaged_one_made_again(tmp_path, roberta, capsys):
    write_task(tmp_path / "raw", "RTE")
    data = tmp_path / "out/data"
    run("RTE", tmp_path / "raw", data, "--roberta", roberta)
    content = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    assert run("RTE", tmp_path / "raw", data, "--roberta", roberta) == 0
    assert "reusing" in capsys.readouterr().out
    (data / "input1/train.bin").write_bytes(b"")
    assert run("RTE", tmp_path / "raw", data, "--roberta", roberta) == 0
    assert "reusing" not in capsys.readouterr().out
    assert {path: path.read_bytes() for path in data.rglob("*") if path.is_file()} == content
    assert [path.name for path in data.parent.iterdir()] == ["data"]


def test_other_texts_or_options_are_refused_and_nothing_is_touched(tmp_path, roberta, capsys):
    write_task(tmp_path / "raw", "RTE")
    run("RTE", tmp_path / "raw", tmp_path / "data", "--roberta", roberta)
    assert run("RTE", tmp_path / "raw", tmp_path / "data", "--roberta", roberta, "--max-length", 64) == 1
    assert "was made from something else (max_length 128 and now 64)" in capsys.readouterr().err
    write_task(tmp_path / "raw", "RTE", seed=1)
    assert run("RTE", tmp_path / "raw", tmp_path / "data", "--roberta", roberta) == 1
    assert "train.tsv" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").touch()
    assert run("RTE", tmp_path / "raw", tmp_path / "mine", "--roberta", roberta) == 1
    assert "was not made by data_prep" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "WNLI"], "--task WNLI is no task of GLUE"),
        (["--raw", "{tmp}/nowhere"], "there is no such folder"),
        (["--max-length", "4"], "--max-length 4 is out of range"),
        (["--roberta", "{tmp}/nowhere"], "--roberta {tmp}/nowhere: there is no such folder"),
        (["--roberta", "{tmp}/raw"], "has no encoder.json, vocab.bpe, dict.txt"),
        (["--roberta", "{tmp}/foreign"], "dict.txt has none of the ids of encoder.json"),
        (["--roberta", "{tmp}/trained"], "does not fit model.pt"),
    ],
)
def test_wrong_options_are_one_sentence_and_leave_no_folder(tmp_path, roberta, capsys, options, message):
    import torch

    write_task(tmp_path / "raw", "RTE")
    write_roberta(tmp_path / "foreign").joinpath("dict.txt").write_text("the 5\nof 4\n")
    write_roberta(tmp_path / "trained")
    weights = {"encoder.sentence_encoder.embed_tokens.weight": torch.zeros(7, 4)}
    torch.save({"model": weights, "args": Namespace(arch="roberta")}, tmp_path / "trained/model.pt")
    given = [option.format(tmp=tmp_path) for option in options]
    assert run("RTE", tmp_path / "raw", tmp_path / "data", "--roberta", roberta, *given) == 1
    error = capsys.readouterr().err.splitlines()
    assert error[-1].startswith("data_prep glue: error: ") and message.format(tmp=tmp_path) in error[-1]
    assert not (tmp_path / "data").exists()


def test_a_bad_line_leaves_no_folder(tmp_path, roberta, capsys):
    path = write_task(tmp_path / "raw", "RTE") / "test.tsv"
    path.write_text(path.read_text() + "12\tone field too few\n")
    assert run("RTE", tmp_path / "raw", tmp_path / "out/data", "--roberta", roberta) == 1
    assert "RTE/test.tsv, line 14: 2 fields, expected 3" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []
