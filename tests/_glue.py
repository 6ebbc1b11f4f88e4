"""Small tokenizers of transformers and of fairseq, for the tests that prepare GLUE with them. No tests here.

The texts are those of ``scripts/glue_tiny.py``, which also writes GLUE's files.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from glue_tiny import WORDS, write_task  # noqa: E402, F401

CORPUS = [" ".join(WORDS[i : i + 5]) + ". good bad it's \"x" for i in range(0, 60, 5)] * 3


def write_tokenizer(folder: Path, kind: str, extra_tokens: tuple[str, ...] = (), **config: object) -> Path:
    """A tokenizer of transformers with a ``config.json``.

    Args:
        kind: ``wordpiece`` ([CLS] a [SEP] b [SEP]), ``unigram`` (the same, pieces with an underscore) or ``bytes``
            (byte-level BPE, <s> a </s></s> b </s>).
        extra_tokens: further ordinary tokens, with the ids after all others.
        config: what to change in ``config.json``.
    """
    import tokenizers as tk
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if kind == "bytes":
        names = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
        tokenizer = tk.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=list(names.values()), initial_alphabet=alphabet, show_progress=False
        )
        single, pair = "<s> $A </s>", "<s> $A </s> </s> $B </s>"
        start, end = "<s>", "</s>"
    else:
        pad, unk = ("[PAD]", "[UNK]") if kind == "wordpiece" else ("<pad>", "<unk>")
        names = {"pad": pad, "unk": unk, "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
        special = list(names.values())
        if kind == "wordpiece":
            tokenizer = tk.Tokenizer(models.WordPiece(unk_token=unk))
            tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
            tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False)
        else:
            tokenizer = tk.Tokenizer(models.Unigram())
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
            trainer = trainers.UnigramTrainer(
                vocab_size=100, special_tokens=special, unk_token=unk, show_progress=False
            )
        single, pair = "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"
        start, end = "[CLS]", "[SEP]"
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([tk.AddedToken(token, normalized=False) for token in extra_tokens])
    ids = [(token, tokenizer.token_to_id(token)) for token in (start, end)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
    special_tokens = {f"{role}_token": token for role, token in names.items()}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens).save_pretrained(folder)
    settings = {"model_type": "bert", "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 128}
    (folder / "config.json").write_text(json.dumps({**settings, **config}), encoding="utf-8")
    return folder


def write_roberta(folder: Path) -> Path:
    """The files of fairseq's RoBERTa for the vocabulary of ``write_tokenizer(..., "bytes")``, without specials."""
    import tokenizers as tk
    from tokenizers import models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tk.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.model.save(str(folder))
    (folder / "vocab.json").rename(folder / "encoder.json")
    merges = (folder / "merges.txt").read_text(encoding="utf-8")
    (folder / "merges.txt").unlink()
    (folder / "vocab.bpe").write_text(merges, encoding="utf-8")
    # by frequency in the corpus, not by id, as in the dictionary of the published models
    order = random.Random(5).sample(range(tokenizer.get_vocab_size()), tokenizer.get_vocab_size())
    (folder / "dict.txt").write_text("".join(f"{id} {1000 - n}\n" for n, id in enumerate(order)), encoding="utf-8")
    return folder
