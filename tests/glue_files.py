"""Small files in the official formats of GLUE, and small tokenizers, for the tests that prepare or fine-tune on them.

Written here with the quirks of the real files: headers that differ by split, quotation marks, broken lines of QQP.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = [c + v for c in "bdfgklmnprst" for v in "aeiou"]
MNLI_PARSES = "sentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
MNLI_HEADER = f"index\tpromptID\tpairID\tgenre\t{MNLI_PARSES}\tsentence1\tsentence2"
STSB_HEADER = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"


def sentence(generator: random.Random, positive: bool = True) -> str:
    """A few words, of which the first tells the class."""
    words = [generator.choice(WORDS) for _ in range(generator.randint(2, 6))]
    return " ".join([("good" if positive else "bad"), *words]) + generator.choice([".", ' "x', " it's"])


def write_task(folder: Path, task: str, count: int = 12, seed: int = 0) -> Path:
    """The files of a task below `folder`, `count` examples each; returns the task's folder."""
    generator = random.Random(seed)
    path = folder / task
    path.mkdir(parents=True, exist_ok=True)
    for name, lines in _files(task, count, generator).items():
        (path / f"{name}.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def _files(task: str, count: int, g: random.Random) -> dict[str, list[str]]:
    def texts(i: int) -> tuple[str, str]:
        return sentence(g, i % 2 == 1), sentence(g, i % 3 == 1)

    def numbered(header: str, label: list[str] | None, **splits: bool) -> dict[str, list[str]]:
        files = {}
        for split, labelled in splits.items():
            rows = [header + ("\t" + "label" if labelled else "")]
            for i in range(count):
                fields = [str(i), *texts(i), *([label[i % len(label)]] if labelled else [])]
                rows.append("\t".join(fields))
            files[split] = rows
        return files

    labelled_and_not = {"train": True, "dev": True, "test": False}
    if task == "CoLA":
        rows = [f"gj04\t{i % 2}\t{'' if i % 2 else '*'}\t{sentence(g, i % 2 == 1)}" for i in range(2 * count)]
        test = ["index\tsentence", *(f"{i}\t{sentence(g)}" for i in range(count))]
        return {"train": rows[:count], "dev": rows[count:], "test": test}
    if task == "SST-2":
        rows = [f"{sentence(g, i % 2 == 1)} \t{i % 2}" for i in range(2 * count)]
        test = ["index\tsentence", *(f"{i}\t{sentence(g)}" for i in range(count))]
        return {"train": ["sentence\tlabel", *rows[:count]], "dev": ["sentence\tlabel", *rows[count:]], "test": test}
    if task == "MRPC":
        columns = "#1 ID\t#2 ID\t#1 String\t#2 String"
        files = {}
        for split, first in (("train", "\ufeffQuality"), ("dev", "Quality"), ("test", "index")):
            values = [str(i % 2 if split != "test" else i) for i in range(count)]
            rows = ["\t".join([value, "70", "71", *texts(i)]) for i, value in enumerate(values)]
            files[split] = [f"{first}\t{columns}", *(f"{row}\r" for row in rows)]
        return files
    if task == "STS-B":
        files = {}
        for split in ("train", "dev", "test"):
            rows = [f"{STSB_HEADER}\tscore" if split != "test" else STSB_HEADER]
            for i in range(count):
                score = [f"{i % 6 / 1.0:.3f}"] if split != "test" else []
                rows.append("\t".join([str(i), "main", "MSR", "2012", "1", "none", "none", *texts(i), *score]))
            files[split] = rows
        return files
    if task == "QQP":
        files = {}
        for split in ("train", "dev"):
            rows = ["\t".join([str(i), "1", "2", *texts(i), str(i % 2)]) for i in range(count)]
            files[split] = ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", *rows]
        files["train"][3:3] = ["9\t1\t2\tHow is it", "broken?\tWhy\t0"]
        files["test"] = ["id\tquestion1\tquestion2", *("\t".join([str(i), *texts(i)]) for i in range(count))]
        return files
    if task == "MNLI":
        labels = ("entailment", "neutral", "contradiction")
        files = {}
        extra = {"train": "label1", "dev_matched": "label1\tlabel2\tlabel3\tlabel4\tlabel5"}
        for split in ("train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched"):
            votes = extra.get(split.replace("mismatched", "matched"), "")
            header = MNLI_HEADER + (f"\t{votes}\tgold_label" if votes else "")
            rows = [header]
            for i in range(count):
                fields = [str(i), "p", "q", "fiction", "( a )", "( b )", "(ROOT a)", "(ROOT b)", *texts(i)]
                if votes:
                    # the annotators' labels are not the gold one
                    fields += ["neutral"] * len(votes.split("\t")) + [labels[i % 3]]
                rows.append("\t".join(fields))
            files[split] = rows
        return files
    columns = {"QNLI": "index\tquestion\tsentence", "RTE": "index\tsentence1\tsentence2"}[task]
    return numbered(columns, ["entailment", "not_entailment"], **labelled_and_not)


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
