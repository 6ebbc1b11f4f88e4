"""What fine-tuning needs to know of a pretrained model and of a task: command-line flags, and nothing that runs.

A model is a folder of Hugging Face (``config.json``) or of fairseq's RoBERTa (``model.pt``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fairseq_collab.errors import CollabError  # noqa: E402

# model_type of a Hugging Face configuration -> architecture
HF_ARCHITECTURES = {"bert": "bert_collab", "distilbert": "distilbert_collab", "albert": "albert_collab"}
ROBERTA_DROPOUT = ["--dropout", "0.1", "--attention-dropout", "0.1"]


@dataclass(frozen=True)
class Pretrained:
    """A pretrained model.

    Args:
        vocabulary: the option of ``data_prep glue`` that names its folder.
        first: flags of ``fairseq-train`` to start from it.
        again: the same for a converted checkpoint that was fine-tuned before.
    """

    vocabulary: tuple[str, Path]
    first: list[str]
    again: Callable[[Path], list[str]]


def find_model(folder: Path) -> Pretrained:
    """The model in a folder.

    Raises:
        CollabError: there is none, or of a kind that has no architecture here.
    """
    if not folder.is_dir():
        raise CollabError(f"--model {folder}: there is no such folder")
    if (folder / "config.json").is_file():
        return _hf_model(folder)
    if (folder / "model.pt").is_file():
        return _roberta(folder)
    raise CollabError(f"--model {folder} has neither config.json (Hugging Face) nor model.pt (fairseq's RoBERTa)")


def _hf_model(folder: Path) -> Pretrained:
    try:
        model_type = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        raise CollabError(f"{folder / 'config.json'} is no model's configuration ({error})") from error
    if model_type not in HF_ARCHITECTURES:
        known = ", ".join(HF_ARCHITECTURES)
        raise CollabError(
            f"{folder / 'config.json'} has model_type {model_type!r}; there are architectures for {known}"
        )
    arch = ["--arch", HF_ARCHITECTURES[model_type]]
    return Pretrained(
        ("--hf-model", folder),
        [*arch, "--hf-model", str(folder)],
        lambda checkpoint: [*arch, "--finetune-from-model", str(checkpoint)],
    )


def _roberta(folder: Path) -> Pretrained:
    from fairseq_collab.adapters.fairseq_options import architecture_flags
    from fairseq_collab.adapters.fairseq_transformer import model_name
    from fairseq_collab.checkpoint import load_checkpoint, model_options

    path = folder / "model.pt"
    options = model_options(load_checkpoint(path), str(path))
    arch = str(getattr(options, "arch", None) or getattr(options, "_name", None))
    if model_name(options) != "roberta" or "collab" in arch:
        raise CollabError(f"{path} is a {arch} model; give a RoBERTa of fairseq with ordinary attention")
    if getattr(options, "max_positions", None) is None:
        # older checkpoints tell the positions by the length of the pretraining's blocks
        options.max_positions = getattr(options, "tokens_per_sample", 512)
    collab = [*architecture_flags(options, "roberta"), *ROBERTA_DROPOUT]
    stock = [flag.replace("roberta_collab", "roberta") for flag in collab]
    return Pretrained(
        ("--roberta", folder),
        [*stock, "--finetune-from-model", str(path)],
        lambda checkpoint: [
            *collab,
            *("--collab-config", str(checkpoint), "--finetune-from-model", str(checkpoint)),
        ],
    )


@dataclass(frozen=True)
class Recipe:
    """How a task is fine-tuned.

    Args:
        batch: sentences a batch. epochs: passes over train. metric: fairseq's name of what chooses the best epoch.
        reports: the flag that makes fairseq compute it, if it is not the accuracy.
        lr: peak learning rate. warmup: share of the updates in which it rises; it falls linearly to 0 afterwards.
    """

    batch: int
    epochs: int
    metric: str = "accuracy"
    reports: str | None = None
    lr: float = 2e-5
    warmup: float = 0.06

    def overridden(self, **given: Any) -> Recipe:
        """The recipe with the values that are not None.

        Raises:
            CollabError: one of them is out of range.
        """
        recipe = replace(self, **{name: value for name, value in given.items() if value is not None})
        for name, least in (("batch", 1), ("epochs", 1)):
            if getattr(recipe, name) < least:
                raise CollabError(f"--{name} {getattr(recipe, name)} is out of range: give {least} or more")
        if not recipe.lr > 0:
            raise CollabError(f"--lr {recipe.lr:g} is out of range: give more than 0")
        if not 0 <= recipe.warmup < 1:
            raise CollabError(f"--warmup {recipe.warmup:g} is out of range: give a share from 0 to below 1")
        return recipe

    def flags(self, examples: int) -> list[str]:
        """The flags of ``fairseq-train`` for so many training examples.

        A fairseq that does not compute the metric (0.12.2 knows none but the accuracy) goes by the loss.
        """
        updates = self.updates(examples)
        best = ["--best-checkpoint-metric", self.metric, "--maximize-best-checkpoint-metric"]
        if self.reports:
            best = [*best, self.reports] if _computes(self.reports) else ["--best-checkpoint-metric", "loss"]
        return [
            *("--batch-size", str(self.batch), "--max-epoch", str(self.epochs)),
            *("--lr-scheduler", "polynomial_decay", "--lr", str(self.lr), "--total-num-update", str(updates)),
            *("--warmup-updates", str(max(1, round(self.warmup * updates)))),
            *best,
        ]

    def updates(self, examples: int) -> int:
        """The updates of the whole training."""
        return self.epochs * -(-examples // self.batch)

    def settings(self) -> dict[str, Any]:
        """What `overridden` can change, as JSON values."""
        return asdict(self)


def _computes(flag: str) -> bool:
    """Whether the installed fairseq has this flag of its criterion for sentences."""
    from fairseq.criterions.sentence_prediction import SentencePredictionConfig

    return hasattr(SentencePredictionConfig, flag.removeprefix("--").replace("-", "_"))


_F1 = {"metric": "acc_and_f1", "reports": "--report-acc-and-f1"}
# large tasks get few epochs, small ones the ten of RoBERTa's own recipe
RECIPES = {
    "CoLA": Recipe(16, 10, "mcc", "--report-mcc"),
    "SST-2": Recipe(32, 3),
    "MRPC": Recipe(16, 10, **_F1),
    "STS-B": Recipe(16, 10, "pearson_and_spearman", "--report-pearson-and-spearman"),
    "QQP": Recipe(32, 3, **_F1),
    "MNLI": Recipe(32, 3),
    "QNLI": Recipe(32, 3),
    "RTE": Recipe(16, 10),
}
OPTIMIZER = [
    *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--adam-eps", "1e-06"),
    *("--weight-decay", "0.1", "--clip-norm", "0.0", "--required-batch-size-multiple", "1"),
]
