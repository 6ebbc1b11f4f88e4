"""The tasks of fairseq whose text can be read here, and the flags that name them. Reads no text.

The options are those of a checkpoint, see ``fairseq_collab.checkpoint.task_options``.
"""

from argparse import Namespace
from typing import Any

TRANSLATION = ("translation", "translation_from_pretrained_bart")
# tasks that read dict.txt and the text beside it
ONE_TEXT = ("language_modeling", "masked_lm", "denoising")
CLASSIFICATION = "sentence_prediction"
KNOWN = (*TRANSLATION, *ONE_TEXT, CLASSIFICATION)
# tasks that add <mask> to the end of the dictionary that they read
ADD_MASK = ("masked_lm", "denoising", CLASSIFICATION, "translation_from_pretrained_bart")

# flags that a task cannot do without, apart from its name
_NEEDED = {
    "language_modeling": ("tokens_per_sample",),
    "masked_lm": ("tokens_per_sample",),
    "denoising": ("tokens_per_sample",),
    CLASSIFICATION: (
        *("num_classes", "classification_head_name", "regression_target", "init_token", "separator_token"),
        *("max_positions", "add_prev_output_tokens"),
    ),
    "translation_from_pretrained_bart": ("langs",),
}
_CRITERIA = {"masked_lm": "masked_lm", CLASSIFICATION: "sentence_prediction"}


def task_name(options: Namespace) -> str:
    """What a model was last trained for, as ``--task`` names it."""
    return str(getattr(options, "task", None) or getattr(options, "_name", None))


def task_flags(options: Namespace) -> list[str]:
    """The flags of a task for a command line to repeat; none for plain translation, fairseq's default."""
    task = task_name(options)
    flags = [] if task == "translation" else ["--task", task]
    if task in _CRITERIA:
        flags += ["--criterion", _CRITERIA[task]]
    for key in _NEEDED.get(task, ()):
        value: Any = getattr(options, key, None)
        if value is not None and value is not False:
            flags += ["--" + key.replace("_", "-"), *([] if value is True else [str(value)])]
    return flags


def predicts_numbers(options: Namespace) -> bool:
    """Whether a model was trained for regression."""
    return task_name(options) == CLASSIFICATION and bool(getattr(options, "regression_target", False))


def added_symbols(options: Namespace) -> list[str]:
    """What the task adds to the dictionaries that it reads."""
    task = task_name(options)
    languages = str(getattr(options, "langs", "")) if task == "translation_from_pretrained_bart" else ""
    return [f"[{one}]" for one in languages.split(",") if one] + (["<mask>"] if task in ADD_MASK else [])
