"""A Hugging Face vocabulary as a fairseq dictionary, and texts as fairseq reads them, equal to HF's own ids.

The convention, for a dictionary of `<s> <pad> </s> <unk>`, the lines of ``dict.txt``, and `<mask>` at the end, which
fairseq's tasks add themselves:

* `<s>` is the tokenizer's cls token (its bos token if it has no cls), `</s>` its sep token (or eos), and `<pad>`,
  `<unk>`, `<mask>` are its pad, unk and mask tokens. These five are not in ``dict.txt``.
* ``dict.txt`` has all other tokens of the vocabulary in the order of their HF ids, as ``TOKEN 1``.
* A token whose name cannot stand there is written as ``madeupwordNNNN``, N being its HF id, at least four digits: one
  that is empty or holds white space or a lone surrogate, one that is named like a special symbol of fairseq without
  being it, and one named ``madeupwordNNNN`` with an N that is not its id. So a name of that form always tells the id.
* Ids without a token (rows of padding in an embedding matrix) have no line.

The names of special tokens in a text are special tokens, as HF reads them, but for the separator. By it a model in
fairseq finds where the second sentence begins, so one that is named in a text becomes `<unk>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from data_prep.glue_text import EOS, UNKNOWN, EncodedText, rebuild
from fairseq_collab._transformers import VOCABULARY_FILES, load_tokenizer
from fairseq_collab.errors import CollabError

FAIRSEQ_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
MASK = "<mask>"
_ROLES = {"<s>": ("cls", "bos"), "<pad>": ("pad",), "</s>": ("sep", "eos"), "<unk>": ("unk",), MASK: ("mask",)}
_SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
_MADE_UP = re.compile(r"madeupword\d+")


@dataclass(frozen=True)
class HFVocabulary:
    """The symbols of the dictionary and the HF id of each.

    Args:
        symbols: all symbols of the dictionary as fairseq's tasks have it, from `<s>` to `<mask>`.
        hf_ids: the HF id of each symbol.
    """

    symbols: tuple[str, ...]
    hf_ids: tuple[int, ...]

    @cached_property
    def fairseq_ids(self) -> dict[int, int]:
        """HF id -> place in the dictionary."""
        return {hf_id: place for place, hf_id in enumerate(self.hf_ids)}

    def dictionary_text(self) -> str:
        """The content of ``dict.txt``."""
        return "".join(f"{symbol} 1\n" for symbol in self.symbols[len(FAIRSEQ_SPECIALS) : -1])


def symbol_of(token: str, hf_id: int) -> str:
    """The name of an ordinary token in ``dict.txt``."""
    made_up = f"madeupword{hf_id:04d}"
    unusable = not token or any(c.isspace() or "\ud800" <= c <= "\udfff" for c in token)
    if unusable or token in (*FAIRSEQ_SPECIALS, MASK) or _MADE_UP.fullmatch(token):
        return made_up
    return token


def vocabulary_of(tokenizer: Any, path: Path) -> HFVocabulary:
    """The vocabulary of a tokenizer of transformers by the convention above.

    Args:
        tokenizer: the tokenizer. path: its folder, for messages.

    Raises:
        CollabError: it lacks one of the five special tokens, two of them are the same, or two tokens have one id.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    tokens = {hf_id: token for token, hf_id in vocabulary.items()}
    if len(tokens) != len(vocabulary):
        raise CollabError(f"the tokenizer in {path} has several tokens of one id; the vocabulary is damaged")
    special: dict[str, int] = {}
    for symbol, roles in _ROLES.items():
        names = [getattr(tokenizer, f"{role}_token", None) for role in roles]
        token = next((name for name in names if name is not None), None)
        if token is None or token not in vocabulary:
            raise CollabError(
                f"the tokenizer in {path} has no {' or '.join(roles)} token, which becomes {symbol}; give the folder "
                "of an encoder such as BERT, DistilBERT or ALBERT"
            )
        special[symbol] = vocabulary[token]
    if len(set(special.values())) != len(special):
        raise CollabError(f"the tokenizer in {path} uses one token for two of {', '.join(special)}; they must differ")
    others = sorted(tokens.keys() - set(special.values()))
    mask = special.pop(MASK)
    symbols = (*FAIRSEQ_SPECIALS, *(symbol_of(tokens[hf_id], hf_id) for hf_id in others), MASK)
    return HFVocabulary(symbols, (*special.values(), *others, mask))


class HFTextEncoder:
    """Texts through the tokenizer of an HF folder, with its own special tokens and truncation.

    Args:
        path: a folder with ``config.json`` and a tokenizer; nothing is fetched, and no code in it runs.
        max_length: longest sequence, special tokens included; longer ones lose tokens from the longer sentence first.

    Raises:
        CollabError: there is no such folder or no usable tokenizer in it, it does not fit the model, its sequences
            are not of a form that fairseq's ``sentence_prediction`` can build, or `max_length` is too long.
    """

    def __init__(self, path: Path, max_length: int) -> None:
        self.path, self.max_length = path, max_length
        config = _read_config(path)
        self.model_type = config.get("model_type")
        self._tokenizer = _load_tokenizer(path)
        self.vocabulary = vocabulary_of(self._tokenizer, path)
        _check_fit(config, self.vocabulary, max_length, path)
        self.separators = 1
        self._find_separators()

    @property
    def dictionary_text(self) -> str:
        """The content of ``dict.txt``."""
        return self.vocabulary.dictionary_text()

    @property
    def size(self) -> int:
        """The number of symbols, `<mask>` included."""
        return len(self.vocabulary.symbols)

    @property
    def source_files(self) -> list[Path]:
        """The files that decide the ids."""
        names = (*VOCABULARY_FILES, *_SETTINGS_FILES)
        return [self.path / name for name in names if (self.path / name).is_file()]

    def describe(self) -> dict[str, Any]:
        """What ``preparation.json`` says about the tokenizer."""
        return {
            "kind": "hf",
            "tokenizer": type(self._tokenizer).__name__,
            "model_type": self.model_type,
            "token_type_ids": "token_type_ids" in self._tokenizer.model_input_names,
        }

    def encode(self, texts: Sequence[tuple[str, ...]]) -> list[EncodedText]:
        """The inputs of each one or two sentences, checked to build HF's own sequence again.

        Raises:
            CollabError: they do not, with the text.
        """
        sides = [list(side) for side in zip(*texts, strict=True)]
        batch = self._tokenizer(*sides, truncation="longest_first", max_length=self.max_length)
        return [
            self._split(text, ids, batch.sequence_ids(number), bool(batch.encodings[number].overflowing))
            for number, (text, ids) in enumerate(zip(texts, batch["input_ids"], strict=True))
        ]

    def _split(self, text: tuple[str, ...], hf_ids: list[int], sides: list[int | None], cut: bool) -> EncodedText:
        whole = [self.vocabulary.fairseq_ids[hf_id] for hf_id in hf_ids]
        ids = [UNKNOWN if id == EOS and side is not None else id for id, side in zip(whole, sides, strict=True)]
        inputs = tuple(
            [*(id for id, side in zip(ids, sides, strict=True) if side == number), EOS] for number in range(len(text))
        )
        if rebuild(inputs, self.separators) != ids:
            names = [self.vocabulary.symbols[id] for id in ids]
            raise CollabError(
                f"the tokenizer in {self.path} makes {' '.join(names)[:200]} of {text!r}"[:500] + ", and fairseq's "
                "sentence_prediction can only build <s> A </s>, <s> A </s> B </s> and <s> A </s> </s> B </s>"
            )
        return EncodedText(inputs, cut, ids != whole)

    def _find_separators(self) -> None:
        pair = self._tokenizer(["a"], ["a"])
        between = sum(side is None for side in pair.sequence_ids(0)) - 2
        self.separators = 2 if between == 2 else 1
        # refuses any other form
        self.encode([("a",)])
        self.encode([("a", "a")])


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise CollabError(f"--hf-model {path}: there is no such folder; give one that save_pretrained made")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CollabError(
            f"--hf-model {path} has no readable config.json ({error}); is it a model's folder?"
        ) from error
    return config if isinstance(config, dict) else {}


def _load_tokenizer(path: Path) -> Any:
    tokenizer = load_tokenizer(path)
    if not tokenizer.is_fast:
        raise CollabError(f"the tokenizer in {path} exists in slow form only; save it with its tokenizer.json")
    return tokenizer


def _check_fit(config: dict[str, Any], vocabulary: HFVocabulary, max_length: int, path: Path) -> None:
    rows, last = config.get("vocab_size"), max(vocabulary.hf_ids)
    if isinstance(rows, int) and last >= rows:
        raise CollabError(
            f"the tokenizer in {path} does not fit its model: its ids go up to {last}, and config.json has vocab_size "
            f"{rows}"
        )
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and max_length > positions:
        raise CollabError(f"--max-length {max_length} is more than the {positions} positions of the model in {path}")
