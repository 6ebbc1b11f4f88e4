"""HF vocabularies as fairseq dictionaries: fairseq's sequences are HF's ids, and what cannot be said is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from data_prep.glue_text import BOS, EOS, UNKNOWN, rebuild, truncate
from data_prep.hf_vocabulary import HFTextEncoder, symbol_of
from fairseq_collab.errors import CollabError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _glue import write_tokenizer  # noqa: E402

KINDS = ("wordpiece", "unigram", "bytes")
TEXTS = ["", "good ba be bi.", "  it's   \"x\tnot known", "zz \u4f60 [SEP] </s> <mask>", "ba " * 60, "bo bu " * 9]


def load_dictionary(encoder: HFTextEncoder, folder: Path) -> Any:
    from fairseq.data import Dictionary

    (folder / "dict.txt").write_text(encoder.dictionary_text, encoding="utf-8", newline="\n")
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    dictionary.add_symbol("<mask>")
    return dictionary


@pytest.mark.parametrize("kind", KINDS)
def test_dictionary_has_the_tokens_in_the_order_of_their_hf_ids(tmp_path, kind):
    encoder = HFTextEncoder(write_tokenizer(tmp_path / "hf", kind), 20)
    dictionary = load_dictionary(encoder, tmp_path)
    tokenizer = encoder._tokenizer
    assert dictionary.symbols == list(encoder.vocabulary.symbols) and len(dictionary) == encoder.size
    special = {"<s>": tokenizer.cls_token or tokenizer.bos_token, "</s>": tokenizer.sep_token or tokenizer.eos_token}
    special |= {"<pad>": tokenizer.pad_token, "<unk>": tokenizer.unk_token, "<mask>": tokenizer.mask_token}
    ordinary = encoder.vocabulary.hf_ids[4:-1]
    assert list(ordinary) == sorted(ordinary)
    for place, symbol in enumerate(dictionary.symbols):
        token = special.get(symbol, symbol)
        assert encoder.vocabulary.hf_ids[place] == tokenizer.convert_tokens_to_ids(token)
    assert sorted(encoder.vocabulary.hf_ids) == sorted(tokenizer.get_vocab().values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_length", [8, 9, 20, 128])
def test_sequences_are_those_of_the_tokenizer_pairs_and_truncation_included(tmp_path, kind, max_length):
    encoder = HFTextEncoder(write_tokenizer(tmp_path, kind), max_length)
    assert encoder.separators == (2 if kind == "bytes" else 1)
    separator = encoder.vocabulary.hf_ids[EOS]
    cases = [(a,) for a in TEXTS] + [(a, b) for a in TEXTS for b in TEXTS]
    for text in cases:
        # in batches: a single call takes an empty second sentence for none
        sides = [[side] for side in text]
        expected = encoder._tokenizer(*sides, truncation=True, max_length=max_length)["input_ids"][0]
        encoded = encoder.encode([text])[0]
        sequence = rebuild(encoded.inputs, encoder.separators)
        named = [place for place, id in enumerate(sequence) if id == UNKNOWN and expected[place] == separator]
        assert encoded.has_separator == bool(named)
        for place in named:
            expected[place] = encoder.vocabulary.hf_ids[UNKNOWN]
        assert [encoder.vocabulary.hf_ids[id] for id in sequence] == expected
        assert sequence[0] == BOS and all(ids[-1] == EOS for ids in encoded.inputs)
        whole = encoder._tokenizer(*sides)["input_ids"][0]
        assert encoded.was_cut == (len(whole) > max_length)


@pytest.mark.parametrize("kind", KINDS)
def test_a_separator_in_a_text_ends_no_sentence(tmp_path, kind):
    encoder = HFTextEncoder(write_tokenizer(tmp_path, kind), 40)
    name = encoder._tokenizer.convert_ids_to_tokens(encoder.vocabulary.hf_ids[EOS])
    plain, named = encoder.encode([("ba be", "bi"), (f"ba {name} be", "bi")])
    assert not plain.has_separator and named.has_separator
    assert all(side.count(EOS) == 1 and side[-1] == EOS for side in named.inputs)
    assert named.inputs[0].count(UNKNOWN) == 1 and named.inputs[1] == plain.inputs[1]


def test_tokens_that_a_dictionary_cannot_hold_are_named_by_their_id(tmp_path):
    extra = ("a b", "x\u00a0y", "<mask>", "<s>", "madeupword0007", "plain")
    encoder = HFTextEncoder(write_tokenizer(tmp_path / "hf", "wordpiece", extra_tokens=extra), 20)
    dictionary = load_dictionary(encoder, tmp_path)
    for token in extra:
        hf_id = encoder._tokenizer.convert_tokens_to_ids(token)
        symbol = token if token == "plain" else f"madeupword{hf_id:04d}"
        assert encoder.vocabulary.hf_ids[dictionary.index(symbol)] == hf_id
    assert len(dictionary) == encoder.size
    sequence = rebuild(encoder.encode([("a b <mask> plain",)])[0].inputs, 1)
    hf_ids = encoder._tokenizer("a b <mask> plain")["input_ids"]
    assert [encoder.vocabulary.hf_ids[id] for id in sequence] == hf_ids


@pytest.mark.parametrize(
    ("token", "hf_id", "symbol"),
    [
        ("word", 7, "word"),
        ("\u2581word", 12345, "\u2581word"),
        ("", 7, "madeupword0007"),
        ("\n", 12345, "madeupword12345"),
        ("\ud800", 7, "madeupword0007"),
        ("madeupword0007", 7, "madeupword0007"),
        ("madeupword0007", 8, "madeupword0008"),
        ("madeupword7", 7, "madeupword0007"),
        ("</s>", 7, "madeupword0007"),
    ],
)
def test_name_of_a_token(token, hf_id, symbol):
    assert symbol_of(token, hf_id) == symbol


def test_truncation_takes_from_the_longer_sentence_as_hf_does(tmp_path):
    tokenizer = HFTextEncoder(write_tokenizer(tmp_path, "wordpiece"), 20)._tokenizer
    for first in range(0, 12):
        for second in range(0, 12):
            for length in range(4, 20):
                text = ([" ".join(["ba"] * first)], [" ".join(["be"] * second)])
                sides = tokenizer(*text, truncation=True, max_length=length).sequence_ids(0)
                kept = truncate([[5] * first, [6] * second], length - 3)
                assert [len(side) for side in kept] == [sides.count(0), sides.count(1)], (first, second, length)


def rewrite(path: Path, change: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path):
    with pytest.raises(
        CollabError, match="does not fit its model: its ids go up to .* and config.json has vocab_size 30"
    ):
        HFTextEncoder(write_tokenizer(tmp_path, "wordpiece", vocab_size=30), 20)


def test_more_tokens_than_positions_are_refused(tmp_path):
    with pytest.raises(CollabError, match="--max-length 200 is more than the 128 positions"):
        HFTextEncoder(write_tokenizer(tmp_path, "wordpiece"), 200)


def test_a_tokenizer_without_mask_token_is_refused(tmp_path):
    write_tokenizer(tmp_path, "wordpiece")
    rewrite(tmp_path / "tokenizer_config.json", lambda content: content.pop("mask_token"))
    with pytest.raises(CollabError, match="has no mask token, which becomes <mask>"):
        HFTextEncoder(tmp_path, 20)


def test_sequences_of_another_form_are_refused(tmp_path):
    write_tokenizer(tmp_path, "wordpiece")

    def drop_end(content: dict) -> None:
        content["post_processor"]["single"] = content["post_processor"]["single"][:-1]

    rewrite(tmp_path / "tokenizer.json", drop_end)
    with pytest.raises(CollabError, match="sentence_prediction can only build"):
        HFTextEncoder(tmp_path, 20)


def test_folders_that_are_no_model_are_refused(tmp_path):
    with pytest.raises(CollabError, match="there is no such folder"):
        HFTextEncoder(tmp_path / "nowhere", 20)
    with pytest.raises(CollabError, match="has no readable config.json"):
        HFTextEncoder(tmp_path, 20)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CollabError, match="has no tokenizer; it needs one of tokenizer.json, vocab.txt"):
        HFTextEncoder(tmp_path, 20)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CollabError, match="has no tokenizer that transformers can load"):
        HFTextEncoder(tmp_path, 20)
