"""Predictions of a fine-tuned checkpoint, GLUE's scores of them, and the files that GLUE's server takes.

The scores are those of scikit-learn and scipy, in percent. Nothing here trains.
"""

from __future__ import annotations

import json
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data_prep.glue_files import MAX_SCORE  # noqa: E402
from fairseq_collab.errors import CollabError  # noqa: E402

PLUGIN = ROOT / "fairseq_collab"
HEAD = "sentence_classification_head"
BATCH = 64
Values = Sequence[float]


def accuracy(predicted: Values, true: Values) -> float:
    from sklearn.metrics import accuracy_score

    return accuracy_score(true, predicted)


def f1(predicted: Values, true: Values) -> float:
    """F1 of class 1."""
    from sklearn.metrics import f1_score

    return f1_score(true, predicted, zero_division=0)


def matthews(predicted: Values, true: Values) -> float:
    """Matthews' correlation; 0 where all predictions are the same class."""
    from sklearn.metrics import matthews_corrcoef

    return matthews_corrcoef(true, predicted)


def pearson(predicted: Values, true: Values) -> float:
    """Pearson's correlation; 0 where it is undefined because all predictions are the same."""
    from scipy.stats import pearsonr

    return _correlation(pearsonr, predicted, true)


def spearman(predicted: Values, true: Values) -> float:
    """Spearman's rank correlation; 0 where it is undefined because all predictions are the same."""
    from scipy.stats import spearmanr

    return _correlation(spearmanr, predicted, true)


def _correlation(function: Callable[..., Any], predicted: Values, true: Values) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = float(function(predicted, true)[0])
    return 0.0 if np.isnan(value) else value


# what GLUE reports for each task, in the order in which its table shows them
METRICS = {
    "CoLA": {"matthews": matthews},
    "SST-2": {"accuracy": accuracy},
    "MRPC": {"f1": f1, "accuracy": accuracy},
    "STS-B": {"pearson": pearson, "spearman": spearman},
    "QQP": {"f1": f1, "accuracy": accuracy},
    "MNLI": {"accuracy": accuracy},
    "QNLI": {"accuracy": accuracy},
    "RTE": {"accuracy": accuracy},
}


def score(task: str, predicted: Values, true: Values) -> dict[str, float]:
    """GLUE's scores of a task in percent.

    Args:
        predicted, true: classes, or scores on the same scale.
    """
    return {name: 100 * float(metric(predicted, true)) for name, metric in METRICS[task].items()}


def read_preparation(data: Path) -> dict[str, Any]:
    """What ``data_prep glue`` wrote beside its data.

    Raises:
        CollabError: there is no such folder, or ``data_prep glue`` did not make it.
    """
    file = data / "preparation.json"
    if not file.is_file():
        raise CollabError(f"{data} has no preparation.json; make it with python -m data_prep glue --destdir {data}")
    return json.loads(file.read_text(encoding="utf-8"))


class Classifier:
    """A fine-tuned checkpoint with the folder that ``data_prep glue`` made.

    Raises:
        CollabError: the checkpoint is missing or damaged, does not belong to the data, or has no head.
    """

    def __init__(self, checkpoint: Path, data: Path, device: str) -> None:
        self.preparation = read_preparation(data)
        self.device = device
        if not checkpoint.is_file():
            raise CollabError(f"there is no checkpoint {checkpoint}")
        self._import_plugin()
        from fairseq import checkpoint_utils

        models, _, self.task = checkpoint_utils.load_model_ensemble_and_task(
            [str(checkpoint)], arg_overrides={"data": str(data)}
        )
        self.model = models[0].eval().to(device)
        heads = getattr(self.model, "classification_heads", {})
        if HEAD not in heads:
            raise CollabError(f"{checkpoint} has no {HEAD}; fine-tune it first")
        classes = len(self.preparation["labels"]) or 1
        if heads[HEAD].out_proj.out_features != classes:
            found = heads[HEAD].out_proj.out_features
            raise CollabError(
                f"{checkpoint} has a head of {found} outputs, and {self.preparation['task']} in {data} needs {classes}"
            )

    @staticmethod
    def _import_plugin() -> None:
        from fairseq import utils

        utils.import_user_module(Namespace(user_dir=str(PLUGIN)))

    def predict(self, split: str) -> tuple[list[float], list[float] | None]:
        """The classes (or scores from 0 to 5) of a split in the order of its file, and the true ones if it has them."""
        import torch
        from fairseq import utils

        dataset = self.task.load_dataset(split)
        batches = self.task.get_batch_iterator(dataset, max_sentences=BATCH).next_epoch_itr(shuffle=False)
        scale = self.preparation["label_scale"]
        predicted: dict[int, float] = {}
        true: dict[int, float] = {}
        with torch.no_grad(), tqdm(total=len(dataset), desc=f"predict {split}", unit="example") as progress:
            for sample in batches:
                if self.device != "cpu":
                    sample = utils.move_to_cuda(sample)
                logits, _ = self.model(**sample["net_input"], features_only=True, classification_head_name=HEAD)
                found = logits.argmax(-1).tolist() if scale is None else (scale * logits.view(-1).float()).tolist()
                ids = sample["id"].tolist()
                predicted.update(zip(ids, found, strict=True))
                if "target" in sample:
                    targets = sample["target"].view(-1)
                    values = targets.tolist() if scale is None else (scale * targets.float()).tolist()
                    true.update(zip(ids, values, strict=True))
                progress.update(len(ids))
        numbers = range(len(predicted))
        return [predicted[n] for n in numbers], [true[n] for n in numbers] if true else None


def file_name(task: str, split: str) -> str:
    """What GLUE's server wants the predictions of a test split to be called."""
    suffix = {"test": "-m", "test1": "-mm"}[split] if task == "MNLI" else ""
    return f"{task}{suffix}.tsv"


def prediction_text(predicted: Values, labels: Sequence[str]) -> str:
    """The content of a file for GLUE's server.

    Args:
        predicted: classes, or scores from 0 to 5 when `labels` is empty; scores out of that range are clipped.
    """
    if labels:
        shown = [labels[int(value)] for value in predicted]
    else:
        shown = [f"{min(MAX_SCORE, max(0.0, value)):.5f}" for value in predicted]
    return "index\tprediction\n" + "".join(f"{index}\t{value}\n" for index, value in enumerate(shown))


def read_gold(path: Path, labels: Sequence[str]) -> list[float]:
    """Labels of a test split: a header, then index and label on each line.

    Raises:
        CollabError: there is no such file, or a line is not of that form.
    """
    if not path.is_file():
        raise CollabError(f"--gold {path}: there is no such file")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[1:]):
        try:
            index, label = line.split("\t")
            if int(index) != number:
                raise ValueError(index)
            found.append(float(labels.index(label) if labels else label))
        except ValueError as error:
            expected = f"{number}, a tab, and {'one of ' + ', '.join(labels) if labels else 'a number'}"
            raise CollabError(f"{path}, line {number + 2} is {line[:60]!r}, expected {expected}") from error
    return found


def evaluate(
    checkpoint: Path, data: Path, device: str, gold: Path | None = None
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """The scores of each labelled split, and the prediction files of the test splits: name -> content.

    Args:
        gold: labels of test, which GLUE itself keeps to itself; see `read_gold`.

    Raises:
        CollabError: see `Classifier`; or `gold` does not fit the test split.
    """
    classifier = Classifier(checkpoint, data, device)
    task, labels = classifier.preparation["task"], classifier.preparation["labels"]
    if gold is not None and "test" not in classifier.preparation["splits"]:
        raise CollabError(f"--gold {gold}: {data} has no test split")
    scores, files = {}, {}
    for split in classifier.preparation["splits"]:
        if split == "train":
            continue
        predicted, true = classifier.predict(split)
        if split.startswith("test"):
            files[file_name(task, split)] = prediction_text(predicted, labels)
            if split == "test" and gold is not None:
                true = read_gold(gold, labels)
                if len(true) != len(predicted):
                    raise CollabError(f"{gold} has {len(true)} labels, the test split {len(predicted)} examples")
        if true is not None:
            scores[split] = score(task, predicted, true)
    return scores, files
