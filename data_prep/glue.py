"""A task of GLUE, from the files of its server to what fairseq's sentence_prediction reads.

The texts become ids by the tokenizer of a Hugging Face folder (--hf-model) or by GPT-2's BPE and the dictionary of a
fairseq RoBERTa (--roberta), special tokens and truncation included; how is in ``hf_vocabulary.py``.

DESTDIR, when done, is the DATA of fairseq-train:
  input0/, input1/        binarised texts (input1 for pairs) with dict.txt
  label/                  binarised classes with dict.txt, or SPLIT.label with scores divided by 5
  preparation.json        task, labels, tokenizer, flags to pass to fairseq-train, counts
  prepared.json           what it was made from, and the digest of each file
Splits are train, valid, test, and for MNLI valid (matched), valid1 (mismatched), test and test1. Test has no labels.
Lines of QQP that its own line ends broke are dropped, each with a sentence; any other malformed line is refused.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep import whole_folder
from data_prep.common import sha256_of
from data_prep.glue_files import MAX_SCORE, TASKS, Example, GlueTask, Split, find_files, find_task, read_split
from data_prep.glue_text import UNKNOWN, RobertaTextEncoder, TextEncoder, task_flags
from fairseq_collab.errors import CollabError
from fairseq_collab.files import write_json

HELP = "a task of GLUE, from files downloaded before, for fairseq's sentence_prediction"
MANIFEST = "prepared.json"
PREPARATION = "preparation.json"
FEWEST_TOKENS = 8
_CHUNK = 1000
_FIRST_LABEL, _END_OF_LABEL = 4, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this corpus."""
    parser.add_argument("--task", required=True, metavar="TASK", help=", ".join(TASKS))
    parser.add_argument(
        "--raw", required=True, type=Path, metavar="DIR", help="folder of the unzipped archives, or of this task in it"
    )
    parser.add_argument("--destdir", required=True, type=Path, help="output folder")
    vocabulary = parser.add_mutually_exclusive_group(required=True)
    vocabulary.add_argument("--hf-model", type=Path, metavar="DIR", help="Hugging Face folder: its own tokenizer")
    vocabulary.add_argument("--roberta", type=Path, metavar="DIR", help="folder with encoder.json, vocab.bpe, dict.txt")
    parser.add_argument(
        "--max-length", type=int, default=128, metavar="N", help="longest sequence in tokens (default: %(default)s)"
    )


def prepare(args: argparse.Namespace) -> None:
    """Make ``args.destdir`` and print its counts.

    Raises:
        CollabError: unknown task, missing folder or file, malformed file, unusable tokenizer, or a folder of something
            else.
    """
    task = find_task(args.task)
    files = find_files(task, args.raw)
    if args.max_length < FEWEST_TOKENS:
        raise CollabError(f"--max-length {args.max_length} is out of range: give {FEWEST_TOKENS} or more")
    encoder = make_encoder(args.hf_model, args.roberta, args.max_length)
    source: dict[str, Any] = {"corpus": "glue", "task": task.name, "max_length": args.max_length}
    source |= {path.name: sha256_of(path) for path in (*files.values(), *encoder.source_files)}
    whole_folder.make(args.destdir, MANIFEST, source, lambda folder: _build(folder, task, files, encoder, args))
    preparation = whole_folder.read_manifest(args.destdir, PREPARATION)
    print(counts_table(preparation))
    print(f"fairseq-train {args.destdir} {' '.join(preparation['flags'])} ...")


def make_encoder(hf_model: Path | None, roberta: Path | None, max_length: int) -> TextEncoder:
    """The way from texts to ids of the one folder that is given.

    Raises:
        CollabError: see the classes.
    """
    if roberta is not None:
        return RobertaTextEncoder(roberta, max_length)
    from data_prep.hf_vocabulary import HFTextEncoder

    return HFTextEncoder(hf_model, max_length)


def _build(folder: Path, task: GlueTask, files: dict[str, Path], encoder: TextEncoder, args: Any) -> None:
    # all files are read before the first text is encoded, so that a bad line shows at once
    splits = {split: read_split(task, split, path) for split, path in files.items()}
    for found in splits.values():
        for sentence in found.dropped:
            print(f"dropped: {sentence}")
    inputs = [f"input{number}" for number in range(len(task.texts))]
    for name in (*inputs, "label"):
        (folder / name).mkdir()
    for name in inputs:
        (folder / name / "dict.txt").write_text(encoder.dictionary_text, encoding="utf-8", newline="\n")
    if not task.is_regression:
        rows = "".join(f"{label} 1\n" for label in task.labels)
        (folder / "label" / "dict.txt").write_text(rows, encoding="utf-8", newline="\n")
    counts = {}
    for split, found in splits.items():
        counts[split] = {**write_inputs(folder, split, found.examples, encoder), **_count(task, found)}
        if number := counts[split]["separators"]:
            print(
                f"{split}: {number:,} examples name the separator in their text, where it is read as <unk>; it would "
                "look like the end of a sentence"
            )
        if not split.startswith("test"):
            write_labels(folder / "label", split, task, found.examples)
    write_json(folder / PREPARATION, describe(task, encoder, args.max_length, counts))


def describe(task: GlueTask, encoder: TextEncoder, max_length: int, counts: dict[str, Any]) -> dict[str, Any]:
    """The content of ``preparation.json``."""
    classes = ["--num-classes", str(len(task.labels) or 1)]
    regression = ["--regression-target"] if task.is_regression else []
    flags = ["--task", "sentence_prediction", "--criterion", "sentence_prediction", *classes, *regression]
    return {
        "task": task.name,
        "labels": list(task.labels),
        "label_scale": MAX_SCORE if task.is_regression else None,
        "pairs": len(task.texts) == 2,
        "vocabulary": {**encoder.describe(), "symbols": encoder.size, "max_length": max_length},
        "flags": [*flags, *task_flags(encoder.separators)],
        "splits": counts,
    }


def write_inputs(folder: Path, split: str, examples: list[Example], encoder: TextEncoder) -> dict[str, int]:
    """Write ``input0`` (and ``input1``) of a split, and return counts of its tokens and of what happened to them."""
    import torch
    from fairseq.data import indexed_dataset

    names = [f"input{number}" for number in range(len(examples[0].texts))]
    builders = [
        indexed_dataset.make_builder(str(folder / name / f"{split}.bin"), impl="mmap", vocab_size=encoder.size)
        for name in names
    ]
    counts: Counter[str] = Counter(tokens=0, unknown=0, cut=0, separators=0)
    with tqdm(total=len(examples), desc=f"encode {split}", unit="example") as progress:
        for start in range(0, len(examples), _CHUNK):
            chunk = examples[start : start + _CHUNK]
            for encoded in encoder.encode([example.texts for example in chunk]):
                counts["cut"] += encoded.was_cut
                counts["separators"] += encoded.has_separator
                for builder, ids in zip(builders, encoded.inputs, strict=True):
                    builder.add_item(torch.tensor(ids, dtype=torch.int32))
                    counts["tokens"] += len(ids) - 1
                    counts["unknown"] += ids.count(UNKNOWN)
            progress.update(len(chunk))
    for builder, name in zip(builders, names, strict=True):
        builder.finalize(str(folder / name / f"{split}.idx"))
    return dict(counts)


def write_labels(folder: Path, split: str, task: GlueTask, examples: list[Example]) -> None:
    """Write the labels of a split as fairseq-preprocess would, or as numbers from 0 to 1, one a line."""
    if task.is_regression:
        rows = "".join(f"{example.label / MAX_SCORE:.6g}\n" for example in examples)
        (folder / f"{split}.label").write_text(rows, encoding="utf-8")
        return
    import torch
    from fairseq.data import indexed_dataset

    size = _FIRST_LABEL + len(task.labels)
    builder = indexed_dataset.make_builder(str(folder / f"{split}.bin"), impl="mmap", vocab_size=size)
    for example in examples:
        builder.add_item(torch.tensor([_FIRST_LABEL + example.label, _END_OF_LABEL], dtype=torch.int32))
    builder.finalize(str(folder / f"{split}.idx"))


def _count(task: GlueTask, found: Split) -> dict[str, Any]:
    labels = Counter(example.label for example in found.examples)
    by_label = {name: labels[place] for place, name in enumerate(task.labels)} if None not in labels else {}
    return {"examples": len(found.examples), "dropped": len(found.dropped), "labels": by_label}


def counts_table(preparation: dict[str, Any]) -> str:
    """The counts as lines of columns."""
    columns = ("examples", "tokens", "unknown", "cut", "dropped")
    lines = [f"{preparation['task']:<9}" + "".join(f"{name:>13}" for name in columns) + "   labels"]
    for split, counts in preparation["splits"].items():
        labels = ", ".join(f"{name}: {number:,}" for name, number in counts["labels"].items())
        scores = "none" if split.startswith("test") else "scores"
        lines.append(f"{split:<9}" + "".join(f"{counts[name]:>13,}" for name in columns) + f"   {labels or scores}")
    return "\n".join(lines)
