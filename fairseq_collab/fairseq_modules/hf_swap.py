"""Shared keys in an encoder of transformers inside fairseq: swapped with the text of a task, or rebuilt as configured.

The swap itself is ``fairseq_collab.swap``; options and folders are ``hf_start``.
"""

import sys
from typing import Any, Optional, Union

import torch
from fairseq import utils as fairseq_utils
from fairseq.data import data_utils
from torch import Tensor, nn

from fairseq_collab.adapters.albert import ALBERTCollaborativeAdapter
from fairseq_collab.adapters.base import CollaborativeLayerAdapter
from fairseq_collab.adapters.bert import BERTCollaborativeAdapter
from fairseq_collab.adapters.distilbert import DistilBERTCollaborativeAdapter
from fairseq_collab.config import AttentionConfig, AttentionShape
from fairseq_collab.errors import CollabError
from fairseq_collab.fairseq_modules.hf_encoder import HFEncoder
from fairseq_collab.report import ConversionReport
from fairseq_collab.swap import swap_to_collaborative

ADAPTERS: dict[str, type[CollaborativeLayerAdapter]] = {
    "bert": BERTCollaborativeAdapter,
    "distilbert": DistilBERTCollaborativeAdapter,
    "albert": ALBERTCollaborativeAdapter,
}
MAX_TOKENS, LEAST_BATCHES = 2000, 8  # padded tokens of a calibration batch, and how many batches there are


def encoder_shape(config: Any) -> AttentionShape:
    """The attentions of a configuration of transformers; ALBERT's layers of one group share theirs."""
    layers = config.num_hidden_layers
    if config.model_type == "albert":
        layers = config.num_hidden_groups * config.inner_group_num
    return AttentionShape(config.hidden_size, config.num_attention_heads, layers)


def install(model: nn.Module, configs: tuple[AttentionConfig, ...]) -> None:
    """Puts collaborative attentions with weights yet to be loaded where ``configs`` has them, in the model's order."""
    found = ADAPTERS[model.config.model_type]().find(model)
    for one, config in zip(found.values(), configs, strict=True):
        if config.collaborative:
            one.replace(model, one.make(config))


def swap(
    model: nn.Module,
    configs: tuple[AttentionConfig, ...],
    calibration: Optional[list[dict[str, Tensor]]] = None,
    **options: Any,
) -> ConversionReport:
    """Swaps every attention of a model of transformers, in place.

    Args:
        configs: of the attentions in the model's order, with one mixing for all.
        calibration: from :func:`calibration_batches`. options: of ``swap_to_collaborative``.
    """
    dims, shape = [config.key_dim for config in configs], encoder_shape(model.config)
    mix_dim: Union[int, str, None] = configs[0].mix_dim
    if mix_dim == min(dims[0], shape.embed_dim // shape.num_heads):
        mix_dim = None  # the default, which is called K in signatures
    elif configs[0].mix_layout == "dense":
        mix_dim = "dense"
    return swap_to_collaborative(
        model.base_model,
        ADAPTERS[model.config.model_type],
        dims,
        mix_dim=mix_dim,
        calibration=calibration,
        progress=sys.stderr.isatty(),
        **options,
    )


def calibration_batches(task: Any, encoder: HFEncoder, sentences: int, seed: int) -> list[dict[str, Tensor]]:
    """Samples of a task's train split as the model of transformers takes them.

    Raises:
        CollabError: there is no train split, or there are fewer than two samples in it that the model can read.
    """
    kept = task.datasets.get("train")
    try:
        task.load_dataset("train", task_cfg=task.cfg)
    except (FileNotFoundError, AssertionError) as error:
        # the tasks name the file, but not why it is wanted
        raise CollabError(
            f"calibration needs the train split, which {task.cfg.data} does not have ({error}); binarise one, or leave "
            "--calibrate out"
        ) from error
    dataset = task.datasets.pop("train")
    if kept is not None:
        task.datasets["train"] = kept
    dataset.set_epoch(1)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()
    longest = fairseq_utils.resolve_max_positions(task.max_positions(), encoder.max_positions())
    fitting = [index for index in order if dataset.size(index) <= longest][:sentences]
    if len(fitting) < 2:
        raise CollabError(
            f"the train split has {len(fitting)} samples of at most {longest} tokens, and calibration needs at least 2"
        )
    indices = torch.tensor(sorted(fitting, key=dataset.size)).numpy()
    batches = data_utils.batch_by_size(
        indices,
        dataset.num_tokens,
        max_tokens=max(MAX_TOKENS, longest),
        # some batches are held out
        max_sentences=-(-len(fitting) // LEAST_BATCHES),
        required_batch_size_multiple=1,
    )
    samples = [dataset.collater([dataset[index] for index in batch]) for batch in batches]
    return [encoder.inputs(sample["net_input"]["src_tokens"]) for sample in samples]
