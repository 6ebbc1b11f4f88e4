"""A tiny GLUE and a tiny RoBERTa, to see that `glue.py` runs: about a minute, and no figure of it means anything.

The files have the official formats with their quirks: headers that differ by split, quotation marks, broken lines of
QQP. The tests read them, too.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from glue_models import ROOT
from glue_steps import MODEL, strip
from quickstart_steps import PLUGIN, run

sys.path.insert(0, str(ROOT))

from data_prep.glue import write_inputs  # noqa: E402
from data_prep.glue_files import TASKS as ALL_TASKS  # noqa: E402
from data_prep.glue_files import Example  # noqa: E402
from data_prep.glue_text import RobertaTextEncoder  # noqa: E402
from fairseq_collab.errors import CollabError  # noqa: E402

TASKS, KEY_DIMS, EPOCHS, EXAMPLES, LR = "SST-2,STS-B", "32,8", 2, 96, 1e-3
SIZES = [
    *("--encoder-layers", 2, "--encoder-embed-dim", 32, "--encoder-ffn-embed-dim", 64, "--encoder-attention-heads", 4),
    *("--max-positions", 128),
]
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


def fill(args: argparse.Namespace, lock_fd: int) -> None:
    """Put the tiny files and model into the arguments of the command ``table``, made under ``args.out`` if missing.

    Raises:
        CollabError: the arguments name a model or files of their own, or the training failed.
    """
    if args.model is not None or args.raw is not None:
        raise CollabError("--tiny brings its own model and files; leave --model and --raw out")
    folder = args.out / "tiny"
    args.raw, args.model = folder / "raw", folder / "roberta"
    args.tasks = args.tasks or TASKS
    if args.key_dims is None and not args.mix_heads:
        args.key_dims = KEY_DIMS
    args.epochs, args.lr = args.epochs or EPOCHS, args.lr or LR
    for number, task in enumerate(ALL_TASKS):
        if not (args.raw / task).is_dir():
            write_task(args.raw, task, EXAMPLES, seed=number)
    if not (args.model / MODEL).exists():
        write_bpe(args.model)
        pretrain(args.model, folder / "text", lock_fd)


def write_bpe(folder: Path) -> None:
    """GPT-2's BPE of single bytes, and a dictionary of them."""
    from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode

    folder.mkdir(parents=True, exist_ok=True)
    symbols = list(bytes_to_unicode().values())
    encoder = json.dumps({symbol: number for number, symbol in enumerate(symbols)})
    (folder / "encoder.json").write_text(encoder, encoding="utf-8")
    (folder / "vocab.bpe").write_text("#version: 0.2\n", encoding="utf-8")
    (folder / "dict.txt").write_text("".join(f"{number} 1\n" for number in range(len(symbols))), encoding="utf-8")


def pretrain(folder: Path, text: Path, lock_fd: int, updates: int = 20) -> None:
    """Train a RoBERTa of `SIZES` with the vocabulary in `folder` for a moment, into ``model.pt`` there."""
    encoder, generator = RobertaTextEncoder(folder, 128), random.Random(3)
    (text / "input0").mkdir(parents=True, exist_ok=True)
    (text / "input0/dict.txt").write_text(encoder.dictionary_text, encoding="utf-8")
    for split in ("train", "valid"):
        write_inputs(text, split, [Example((sentence(generator),), None) for _ in range(64)], encoder)
    command: list[Any] = [sys.executable, "-m", "fairseq_cli.train", text / "input0", "--user-dir", PLUGIN]
    command += ["--task", "masked_lm", "--criterion", "masked_lm", "--arch", "roberta", *SIZES]
    command += ["--sample-break-mode", "eos", "--tokens-per-sample", 128, "--optimizer", "adam", "--lr", 1e-3]
    command += ["--batch-size", 16, "--max-update", updates, "--cpu", "--num-workers", 0, "--save-dir", folder]
    run([*command, "--no-epoch-checkpoints", "--log-format", "none"], "pretraining a tiny RoBERTa", lock_fd)
    strip(folder)
