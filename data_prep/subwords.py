"""Subwords of parallel text in files of any size: sentencepiece models, and the text as pieces.

Text is not normalised, so joining the pieces gives back the line.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import sentencepiece

from data_prep.bitext import FilePair, check_pairs, open_sides, pair_bar
from data_prep.parallel import SPLITS
from data_prep.piece_model import check_model_options, train_model

BOTH, SUBWORDS, NOTHING = "both", "subwords", "none"
JOINED = (BOTH, SUBWORDS, NOTHING)
LONGEST = 1024  # pieces that fairseq's models take by default
_MOST_SENTENCES = 5_000_000  # that a model is trained on
_CHUNK = 10_000


@dataclass(frozen=True)
class Subwords:
    """How tokens become pieces.

    Args:
        vocab_size: pieces of a model, an upper bound for small corpora.
        model: ``bpe`` or ``unigram``.
        joined: what the languages share: ``both`` subwords and dictionary, ``subwords`` only, or ``none``.
        character_coverage: share of the characters of the text that get a piece.
    """

    vocab_size: int = 32_000
    model: str = "bpe"
    joined: str = BOTH
    character_coverage: float = 0.9999

    def check(self) -> None:
        """Refuse values out of range with a `CollabError`."""
        check_model_options(self.vocab_size, self.character_coverage)


def write_subwords(
    source_folder: Path, folder: Path, langs: tuple[str, str], subwords: Subwords, workers: int
) -> dict[str, Any]:
    """Train the models on train, write ``{split}.{lang}`` as pieces, and return counts.

    The models are ``spm.model`` for both languages, or ``spm.{lang}.model``. The same text and options give the same
    model: of more than 5,000,000 lines, evenly spaced ones are taken.

    Raises:
        CollabError: sentencepiece refuses the text or the vocabulary size.
    """
    train = {lang: source_folder / f"train.{lang}" for lang in langs}
    if subwords.joined == NOTHING:
        models = {lang: _train([path], folder / f"spm.{lang}", subwords) for lang, path in train.items()}
    else:
        models = dict.fromkeys(langs, _train(list(train.values()), folder / "spm", subwords))
    counts: dict[str, Any] = {"pieces": {lang: model.vocab_size() for lang, model in models.items()}, "splits": {}}
    for split in SPLITS:
        pair = FilePair(*(source_folder / f"{split}.{lang}" for lang in langs))
        total, longer = check_pairs([pair]), 0
        pieces = dict.fromkeys(langs, 0)
        with ExitStack() as stack:
            write = stack.enter_context(open_sides(folder, split, langs))
            progress = stack.enter_context(pair_bar(f"pieces of {split}", total))
            streams = [stack.enter_context(path.open(encoding="utf-8", newline="\n")) for path in vars(pair).values()]
            while chunks := [[line.rstrip("\n") for line in islice(stream, _CHUNK)] for stream in streams]:
                if not chunks[0]:
                    break
                encoded = [
                    models[lang].encode(chunk, out_type=str, num_threads=workers)
                    for lang, chunk in zip(langs, chunks, strict=True)
                ]
                for sides in zip(*encoded, strict=True):
                    write(*map(" ".join, sides))
                    longer += max(map(len, sides)) > LONGEST
                    for lang, side in zip(langs, sides, strict=True):
                        pieces[lang] += len(side)
                progress.update(len(chunks[0]))
        counts["splits"][split] = {"sentences": total, "tokens": pieces, "longer": longer}
    return counts


def _train(files: list[Path], prefix: Path, subwords: Subwords) -> sentencepiece.SentencePieceProcessor:
    lines = sum(check_pairs([FilePair(path, path)]) for path in files)
    print(f"training {prefix.name}.model of {subwords.vocab_size:,} pieces on {lines:,} lines", flush=True)
    return train_model(
        _spaced_lines(files, -(-lines // _MOST_SENTENCES)),
        prefix,
        vocab_size=subwords.vocab_size,
        character_coverage=subwords.character_coverage,
        model_type=subwords.model,
    )


def _spaced_lines(files: Iterable[Path], step: int) -> Iterable[str]:
    number = 0
    for path in files:
        with path.open(encoding="utf-8", newline="\n") as stream:
            for line in stream:
                if number % step == 0:
                    yield line.rstrip("\n")
                number += 1
