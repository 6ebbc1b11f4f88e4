"""Replacing words of a batch, for distillation on text that the model has not seen."""

import torch
from fairseq.data import Dictionary

from fairseq_collab.fairseq_modules import noise


def dictionary():
    found = Dictionary(extra_special_symbols=["<extra>"])
    for symbol in ("a", "[", "<", "word", "b", "<mask>", "[de_DE]"):
        found.add_symbol(symbol)
    return found


def test_special_symbols_are_no_words():
    text = dictionary()
    assert [text[index] for index in noise.words(text).nonzero().flatten().tolist()] == ["a", "[", "<", "word", "b"]


def test_a_share_of_the_words_is_replaced_by_words_of_the_batch():
    text = dictionary()
    is_word, a, b, unused = noise.words(text), text.index("a"), text.index("b"), text.index("word")
    tokens = torch.tensor([a, b]).repeat(400, 20)
    tokens[:, 0], tokens[:, 39], tokens[:, 20] = text.bos(), text.eos(), text.index("<mask>")
    tokens[::2, 30:] = text.pad()
    before, generator = tokens.clone(), torch.Generator().manual_seed(0)
    found = [noise.replace_words(tokens, is_word, generator) for _ in range(2)]
    assert torch.equal(tokens, before) and not torch.equal(*found)
    for one in found:
        changed = one != tokens
        assert is_word[tokens[changed]].all() and not (one == unused).any()
        # half of the words drawn are what was there
        assert abs(changed.sum() / is_word[tokens].sum() - noise.SHARE / 2) < 0.01


def test_a_batch_without_words_stays_as_it_is():
    text = dictionary()
    tokens = torch.full((3, 4), text.pad())
    assert torch.equal(noise.replace_words(tokens, noise.words(text), torch.Generator()), tokens)
