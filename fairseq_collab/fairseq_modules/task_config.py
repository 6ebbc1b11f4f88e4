"""The configuration of the task that a checkpoint was trained for, on other data; with every version of omegaconf."""

import copy
import os
from argparse import Namespace
from typing import Any

from fairseq import checkpoint_utils
from omegaconf import DictConfig, OmegaConf, open_dict


def task_config(state: dict[str, Any], data: str | os.PathLike) -> DictConfig | Namespace:
    """A copy of the task's configuration in a checkpoint of any age, with ``data`` in the place of its own.

    It scores nothing by itself: ``eval_bleu`` is off. Tasks without a dataclass have a Namespace.
    """
    if state.get("cfg"):
        task = copy.deepcopy(state["cfg"]["task"])
    else:
        kept = {key: value for key, value in state.items() if key not in ("model", "last_optimizer_state")}
        old = {**copy.deepcopy(kept), "model": {}, "last_optimizer_state": None}
        task = checkpoint_utils._upgrade_state_dict(old)["cfg"]["task"]
    if isinstance(task, Namespace):
        task.data = os.fspath(data)
        return task
    task = OmegaConf.create(task)
    with open_dict(task):
        task.data = os.fspath(data)
        if "eval_bleu" in task:
            task.eval_bleu = False
    return task
