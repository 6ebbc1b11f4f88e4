"""The sentencepiece model that cuts text into pieces: its options, and its training. What is cut is the caller's.

Text is not normalised, so joining the pieces gives back the line.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from fairseq_collab.errors import CollabError


def add_model_arguments(parser: argparse._ActionsContainer, vocab_size: int, character_coverage: float) -> None:
    """Add ``--vocab-size`` and ``--character-coverage`` with these defaults."""
    parser.add_argument("--vocab-size", type=int, default=vocab_size, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--character-coverage",
        type=float,
        default=character_coverage,
        metavar="X",
        help="share of the characters that get a piece of their own (default: %(default)s)",
    )


def check_model_options(vocab_size: int, character_coverage: float) -> None:
    """Refuse values out of range with a `CollabError`."""
    if not 100 <= vocab_size <= 1_000_000:
        raise CollabError(f"--vocab-size {vocab_size} is out of range: give 100 to 1000000")
    if not 0.98 <= character_coverage <= 1:
        raise CollabError(f"--character-coverage {character_coverage} is out of range: give 0.98 to 1")


def train_model(
    sentences: Iterable[str], prefix: Path, *, vocab_size: int, character_coverage: float, model_type: str = "unigram"
) -> sentencepiece.SentencePieceProcessor:
    """Train ``{prefix}.model`` and return it. The same sentences and options give the same model.

    Args:
        vocab_size: pieces, an upper bound where there is little text. model_type: ``bpe`` or ``unigram``.

    Raises:
        CollabError: sentencepiece refuses the text or the vocabulary size.
    """
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_prefix=str(prefix),
            model_type=model_type,
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            normalization_rule_name="identity",
            max_sentence_length=1 << 16,
            hard_vocab_limit=False,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise CollabError(f"sentencepiece made no model of {vocab_size} pieces: {error}") from error
    return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
