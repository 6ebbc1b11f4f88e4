"""What folders of ``fairseq-preprocess`` look like for the task of a checkpoint, and what is wrong with one.

Only files and dictionaries; what runs on their text is ``observed``.
"""

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary, data_utils

from fairseq_collab.adapters import fairseq_task
from fairseq_collab.adapters import fairseq_transformer as adapter
from fairseq_collab.checkpoint import model_options, task_options
from fairseq_collab.errors import CollabError


def check_data(state: dict[str, Any], data: str | os.PathLike, flag: str) -> list[str]:
    """Why this folder cannot serve a checkpoint, as far as that can be known before anything is loaded.

    Args:
        state: the checkpoint. data: the folder. flag: the option that named it.
    """
    folder = Path(data)
    if not folder.is_dir():
        return [f"{flag} {data}: there is no such folder; make it with fairseq-preprocess"]
    options = task_options(state)
    task = fairseq_task.task_name(options)
    if task not in fairseq_task.KNOWN:
        known = ", ".join(fairseq_task.KNOWN)
        return [f"{flag} cannot read text for the task {task}, only for {known}; convert without text"]
    embeddings = adapter.FAMILIES[adapter.model_name(model_options(state, "the checkpoint"))].embeddings
    try:
        names = dictionary_files(options, folder)
    except CollabError:
        return [f"{flag} {data} has no binarised text of two languages; give a folder that fairseq-preprocess made"]
    reasons = []
    for side, weight in embeddings.items():
        if reason := _dictionary_reason(options, folder, names[side], side, len(state["model"][weight])):
            reasons.append(f"{flag} {data}{reason}")
    if fairseq_task.predicts_numbers(options):
        if flag == "--data":
            reasons.append("--data measures what classes are given, and this model predicts numbers; leave it out")
    elif task == fairseq_task.CLASSIFICATION and not (folder / "label" / "dict.txt").is_file():
        reasons.append(f"{flag} {data} has no label/dict.txt; give a folder laid out as the one of the training")
    return reasons


def splits(data: str, task: str) -> list[str]:
    """The splits that a folder has."""
    folder = Path(data) / "input0" if task == fairseq_task.CLASSIFICATION else Path(data)
    return sorted({file.name.split(".")[0] for file in folder.glob("*.idx")})


def dictionary_files(options: Namespace, folder: Path) -> dict[str, str]:
    """The file of the dictionary of each side of a model for the task of these options.

    Raises:
        CollabError: the languages are not known, and the folder does not tell.
    """
    task = fairseq_task.task_name(options)
    if task not in fairseq_task.TRANSLATION:
        name = "input0/dict.txt" if task == fairseq_task.CLASSIFICATION else "dict.txt"
        return {"encoder": name, "decoder": name}
    languages = getattr(options, "source_lang", None), getattr(options, "target_lang", None)
    if None in languages:
        languages = data_utils.infer_language_pair(str(folder))
    return {"encoder": f"dict.{languages[0]}.txt", "decoder": f"dict.{languages[1]}.txt"}


def no_dictionary(folder: Path, name: str) -> str:
    """What is wrong with a folder that lacks the dictionary `name`, to follow the folder's own name."""
    if (folder.parent / name).is_file():
        return f" is only a part of the data; give the folder above it, {folder.parent}"
    return f" has no {name}; give a folder that fairseq-preprocess made for this model"


def _dictionary_reason(options: Namespace, folder: Path, name: str, side: str, embeddings: int) -> str | None:
    if not (folder / name).is_file():
        return no_dictionary(folder, name)
    dictionary = Dictionary.load(str(folder / name))
    written = len(dictionary)
    for symbol in fairseq_task.added_symbols(options):
        dictionary.add_symbol(symbol)
    advice = "binarise the text with the model's own dictionary (fairseq-preprocess --srcdict, --tgtdict)"
    if len(dictionary) != embeddings:
        more = f" and the task adds {len(dictionary) - written}" if len(dictionary) > written else ""
        return f": {name} has {written} entries{more}, the {side} embeddings of the model {embeddings}; {advice}"
    trained_on = Path(str(getattr(options, "data", "")).split(os.pathsep)[0]) / name
    if trained_on.is_file() and trained_on.resolve() != (folder / name).resolve():
        original = Dictionary.load(str(trained_on))
        if original.symbols != dictionary.symbols[: len(original)]:
            return f": {name} is as long as the model's dictionary but differs from {trained_on}; {advice}"
    return None
