"""What all ways of making ids of texts have in common, and fairseq's own for RoBERTa: GPT-2's byte-level BPE.

A way is an object with ``encode``, ``dictionary_text``, ``size``, ``separators``, ``source_files`` and ``describe``;
the other one is `hf_vocabulary.HFTextEncoder`. Importing this imports neither fairseq nor transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fairseq_collab.errors import CollabError

BOS, EOS, UNKNOWN = 0, 2, 3  # fairseq's ids of <s>, </s> and <unk>
ROBERTA_FILES = ("encoder.json", "vocab.bpe", "dict.txt")


class EncodedText(NamedTuple):
    """The ids of a text.

    Args:
        inputs: of ``input0`` (and ``input1``), each ending with `</s>`.
        was_cut: whether tokens were cut off.
        has_separator: whether the text itself named the separator, which was then read as `<unk>`.
    """

    inputs: tuple[list[int], ...]
    was_cut: bool
    has_separator: bool = False


class TextEncoder(Protocol):
    """Texts to ids of a fairseq dictionary."""

    separators: int

    @property
    def dictionary_text(self) -> str:
        """The content of ``dict.txt``."""

    @property
    def size(self) -> int:
        """The number of symbols, `<mask>` included."""

    @property
    def source_files(self) -> list[Path]:
        """The files that decide the ids."""

    def describe(self) -> dict[str, Any]:
        """What ``preparation.json`` says about it."""

    def encode(self, texts: Sequence[tuple[str, ...]]) -> list[EncodedText]:
        """The inputs of each one or two sentences."""


def task_flags(separators: int) -> list[str]:
    """The flags with which ``sentence_prediction`` builds the sequences.

    Args:
        separators: how many `</s>` lie between two sentences, 1 or 2.
    """
    return ["--init-token", str(BOS), *(["--separator-token", str(EOS)] if separators == 2 else [])]


def rebuild(inputs: Sequence[list[int]], separators: int) -> list[int]:
    """The sequence that ``sentence_prediction`` builds with `task_flags`."""
    sequence = [BOS, *inputs[0]]
    for following in inputs[1:]:
        sequence += [EOS] * (separators - 1) + following
    return sequence


def truncate(inputs: Sequence[list[int]], room: int) -> list[list[int]]:
    """Sentences cut at their ends to `room` tokens in all, the longer one first, as HF's fast tokenizers cut them.

    Args:
        inputs: ids of one or two sentences without special tokens. room: tokens to keep.
    """
    if sum(map(len, inputs)) <= room:
        return list(inputs)
    if len(inputs) == 1:
        return [inputs[0][:room]]
    first, second = map(len, inputs)
    shorter = min(first, second)
    if 2 * shorter <= room:
        keep = {True: shorter, False: room - shorter}
    else:
        keep = {True: room // 2, False: room - room // 2}
    first_is_shorter = first <= second
    return [inputs[0][: keep[first_is_shorter]], inputs[1][: keep[not first_is_shorter]]]


class RobertaTextEncoder:
    """Texts through fairseq's GPT-2 BPE and the dictionary of a RoBERTa.

    Args:
        path: folder with `ROBERTA_FILES`, and perhaps the ``model.pt`` that they belong to.
        max_length: longest sequence, special tokens included.

    Raises:
        CollabError: a file is missing or unreadable, or they do not fit each other.
    """

    separators = 2

    def __init__(self, path: Path, max_length: int) -> None:
        if not path.is_dir():
            raise CollabError(f"--roberta {path}: there is no such folder; give one with {', '.join(ROBERTA_FILES)}")
        if missing := [name for name in ROBERTA_FILES if not (path / name).is_file()]:
            raise CollabError(
                f"--roberta {path} has no {', '.join(missing)}; encoder.json and vocab.bpe belong to GPT-2's BPE, "
                "dict.txt lies beside RoBERTa's model.pt"
            )
        self.path, self.max_length = path, max_length
        self.source_files = [path / name for name in ROBERTA_FILES]
        from fairseq.data import Dictionary
        from fairseq.data.encoders.gpt2_bpe_utils import get_encoder

        try:
            self._bpe = get_encoder(str(path / "encoder.json"), str(path / "vocab.bpe"))
            self._dictionary = Dictionary.load(str(path / "dict.txt"))
        except (ValueError, RuntimeError, KeyError) as error:
            raise CollabError(f"--roberta {path}: a file is damaged ({str(error)[:200]})") from error
        self.size = len(self._dictionary) + 1
        if not any(str(id) in self._dictionary for id in self._bpe.decoder):
            raise CollabError(
                f"--roberta {path}: dict.txt has none of the ids of encoder.json; they belong to two models"
            )
        _check_embedding(path, self.size)

    @property
    def dictionary_text(self) -> str:
        """The content of ``dict.txt``."""
        return (self.path / "dict.txt").read_text(encoding="utf-8")

    def describe(self) -> dict[str, Any]:
        """What ``preparation.json`` says about the tokenizer."""
        return {"kind": "gpt2-bpe", "tokenizer": "fairseq gpt2 BPE", "model_type": "roberta", "token_type_ids": False}

    def encode(self, texts: Sequence[tuple[str, ...]]) -> list[EncodedText]:
        """The inputs of each one or two sentences."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: tuple[str, ...]) -> EncodedText:
        whole = [[self._dictionary.index(str(piece)) for piece in self._bpe.encode(side)] for side in text]
        specials = 2 if len(whole) == 1 else 2 + self.separators
        kept = truncate(whole, self.max_length - specials)
        return EncodedText(tuple([*side, EOS] for side in kept), kept != whole)


def _check_embedding(path: Path, size: int) -> None:
    if not (path / "model.pt").is_file():
        return
    from fairseq_collab.checkpoint import load_checkpoint

    weights = load_checkpoint(path / "model.pt")["model"]
    rows = {key: tensor.size(0) for key, tensor in weights.items() if key.endswith("embed_tokens.weight")}
    for key, found in rows.items():
        if found != size:
            raise CollabError(
                f"{path / 'dict.txt'} does not fit model.pt: with the four special symbols and <mask> it has {size} "
                f"symbols, and {key} has {found} rows"
            )
