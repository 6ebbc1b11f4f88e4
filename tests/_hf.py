"""Tiny folders of Hugging Face's transformers, their texts binarised for fairseq, and models of both. No tests here.

The convention: `<s> <pad> </s> <unk>` of fairseq's dictionary stand for the tokenizer's cls, pad, sep and unk tokens,
`dict.txt` has the other tokens in the order of their ids, and fairseq's tasks add `<mask>` at the end.
"""

import random
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary, indexed_dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from fairseq_collab._transformers import import_transformers

transformers = import_transformers()

WORDS = [consonant + vowel for consonant in "bdfgklm" for vowel in "aeiou"]
SIZES = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "albert": {
        **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48},
        **{"embedding_size": 16, "num_hidden_groups": 1, "inner_group_num": 1},
    },
}
CLASSES = {"bert": "Bert", "distilbert": "DistilBert", "albert": "Albert"}
KINDS = tuple(SIZES)
PIECES = ["za", "ze", "zi"]


def make_tokenizer(kind: str) -> Any:
    """A fast tokenizer: word pieces for BERT and DistilBERT, a unigram model for ALBERT."""
    if kind == "albert":
        names = {"pad": "<pad>", "unk": "<unk>", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
        entries = [(name, 0.0) for name in names.values()]
        entries += [("\u2581" + word, -3.0) for word in WORDS] + [(piece, -5.0) for piece in (*PIECES, "\u2581")]
        tokenizer = Tokenizer(models.Unigram(entries, unk_id=1, byte_fallback=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        ids = {name: number for number, (name, _) in enumerate(entries)}
    else:
        names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
        order = [names["pad"], "[unused0]", names["unk"], names["cls"], names["sep"], names["mask"]]
        order += WORDS + ["##" + piece for piece in PIECES]
        ids = {token: number for number, token in enumerate(order)}
        tokenizer = Tokenizer(models.WordPiece(ids, unk_token=names["unk"]))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    cls, sep = names["cls"], names["sep"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, ids[cls]), (sep, ids[sep])],
    )
    inputs = ["input_ids", "attention_mask"] + ["token_type_ids"] * (kind != "distilbert")
    roles = {f"{role}_token": name for role, name in names.items()}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **roles)


def make_folder(folder: Path, kind: str, head: str = "ForMaskedLM", seed: int = 0, **config: Any) -> Any:
    """Saves a random model and its tokenizer, and returns the model.

    Args:
        kind: model type. head: end of the model's class name. config: entries of its configuration.
    """
    tokenizer = make_tokenizer(kind)
    settings = {"vocab_size": len(tokenizer) + 3, "max_position_embeddings": 40, **SIZES[kind], **config}
    config_class = getattr(transformers, f"{CLASSES[kind]}Config")
    torch.manual_seed(seed)
    model = getattr(transformers, CLASSES[kind] + head)(config_class(**settings)).eval()
    # biases and layer norms of a trained model are no zeros and ones
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def sentences(count: int, seed: int = 0) -> list[str]:
    """Sentences of different lengths, some with pieces of words, some with unknown words."""
    generator = random.Random(seed)
    words = [*WORDS, *(word + piece for word in WORDS for piece in PIECES), "QQ"]
    return [" ".join(generator.choice(words) for _ in range(generator.randint(1, 7))) for _ in range(count)]


def write_dictionary(path: Path, tokenizer: Any) -> Dictionary:
    """Writes `dict.txt` by the convention and returns the dictionary as fairseq's tasks have it."""
    special = (tokenizer.cls_token, tokenizer.pad_token, tokenizer.sep_token, tokenizer.unk_token, tokenizer.mask_token)
    ordered = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{token} 1\n" for token, _ in ordered if token not in special), encoding="utf-8")
    dictionary = Dictionary.load(str(path))
    dictionary.add_symbol("<mask>")
    return dictionary


def _write(prefix: Path, lines: Iterable[Sequence[int]], dictionary: Dictionary) -> None:
    builder = indexed_dataset.make_builder(f"{prefix}.bin", "mmap", len(dictionary))
    for line in lines:
        builder.add_item(torch.tensor([*line, dictionary.eos()]))
    builder.finalize(f"{prefix}.idx")


def encode(texts: Iterable[str], tokenizer: Any, dictionary: Dictionary) -> list[list[int]]:
    """Fairseq's ids of each text without special tokens."""
    unknown = tokenizer.unk_token
    found = []
    for text in texts:
        tokens = tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])
        found.append([dictionary.unk() if token == unknown else dictionary.index(token) for token in tokens])
    return found


def write_pairs(folder: Path, tokenizer: Any, splits: dict[str, Sequence[tuple[str, ...]]], classes: int = 3) -> None:
    """Data of `sentence_prediction`: one or two sentences each, with labels that go round."""
    for side in range(len(next(iter(splits.values()))[0])):
        dictionary = write_dictionary(folder / f"input{side}" / "dict.txt", tokenizer)
        for split, texts in splits.items():
            lines = encode((text[side] for text in texts), tokenizer, dictionary)
            _write(folder / f"input{side}" / split, lines, dictionary)
    (folder / "label").mkdir(parents=True)
    labels = Dictionary()
    for label in range(classes):
        labels.add_symbol(str(label))
    labels.save(str(folder / "label" / "dict.txt"))
    for split, texts in splits.items():
        _write(folder / "label" / split, ([labels.index(str(n % classes))] for n in range(len(texts))), labels)


def write_text(folder: Path, tokenizer: Any, splits: dict[str, Sequence[str]]) -> None:
    """Data of `masked_lm`."""
    dictionary = write_dictionary(folder / "dict.txt", tokenizer)
    for split, texts in splits.items():
        _write(folder / split, encode(texts, tokenizer, dictionary), dictionary)


HEAD = "sentence_classification_head"


def pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Pairs of sentences."""
    return list(zip(sentences(count, seed), sentences(count, seed + 100), strict=True))


def pair_task(data: Path, classes: int = 3) -> Any:
    """The task `sentence_prediction` as its command line sets it up for these vocabularies."""
    from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask

    config = SentencePredictionConfig(data=str(data), num_classes=classes, init_token=0, no_shuffle=True, seed=1)
    config.regression_target, config.classification_head_name, config.max_positions = False, HEAD, 40
    return SentencePredictionTask.setup_task(config)


def text_task(data: Path) -> Any:
    """The task `masked_lm`, a sentence a sample."""
    from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask

    return MaskedLMTask.setup_task(
        MaskedLMConfig(data=str(data), sample_break_mode="eos", tokens_per_sample=40, seed=1)
    )


def start(task: Any, kind: str, folder: Any, **options: Any) -> Any:
    """A new model of that folder in eval mode, as a training builds it."""
    args = Namespace(arch=f"{kind}_collab", hf_model=folder and str(folder), seed=1, **options)
    return task.build_model(args).eval()


def whole_batch(task: Any, split: str = "valid") -> dict[str, Any]:
    """All samples of a split as one batch."""
    task.load_dataset(split)
    dataset = task.dataset(split)
    return dataset.collater([dataset[number] for number in range(len(dataset))])
