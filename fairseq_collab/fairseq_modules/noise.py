"""Text that a model has not seen, from text that it has: words are replaced by others of the same batch."""

from typing import Any

import torch
from torch import Tensor

SHARE = 0.1  # of the words that are replaced


def words(dictionary: Any) -> Tensor:
    """(V,): whether a symbol is a word, rather than padding, a separator, a mask or the name of a language."""
    special = [symbol[:1] + symbol[-1:] in ("<>", "[]") and len(symbol) > 2 for symbol in dictionary.symbols]
    return torch.tensor([index >= dictionary.nspecial and not one for index, one in enumerate(special)])


def replace_words(tokens: Tensor, is_word: Tensor, generator: torch.Generator) -> Tensor:
    """A copy of ``tokens`` (B, T) in which a share of the words are others; what is no word stays where it is.

    Args:
        is_word: (V,), as :func:`words` makes it.
    """
    tokens, word = tokens.clone(), is_word[tokens]
    pool = tokens[word]
    replaced = word & torch.rand(tokens.shape, generator=generator).lt(SHARE)
    if len(pool):
        tokens[replaced] = pool[torch.randint(len(pool), (int(replaced.sum()),), generator=generator)]
    return tokens
