"""fairseq models that run on binarised text while they are converted: observed, distilled from, evaluated.

Loads a checkpoint's state that is in memory together with a folder of ``fairseq-preprocess``. What is learnt from it is
``fairseq_collab.decomposition``; beam search with scores is ``translate``.
"""

import copy
import math
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, tasks
from fairseq import utils as fairseq_utils
from fairseq.data import Dictionary, data_utils
from omegaconf import OmegaConf, open_dict
from torch import Tensor
from tqdm import tqdm

import fairseq_collab.models  # noqa: F401 (registers the architectures)
from fairseq_collab.adapters import fairseq_transformer as adapter
from fairseq_collab.checkpoint import model_options
from fairseq_collab.config import AttentionConfig, CollabConfig
from fairseq_collab.decomposition.observation import Observation
from fairseq_collab.errors import CollabError

HELD_OUT, MOST_HELD_OUT = 8, 256  # one in so many sentences of the calibration text is held out, at most so many
MAX_TOKENS = 2000  # padded tokens of a calibration batch


def check_data(state: dict[str, Any], data: str | os.PathLike, flag: str) -> list[str]:
    """Why this folder cannot serve a checkpoint, as far as that can be known before anything is loaded.

    Args:
        state: the checkpoint. data: the folder. flag: the option that named it.
    """
    folder = Path(data)
    if not folder.is_dir():
        return [f"{flag} {data}: there is no such folder; make it with fairseq-preprocess"]
    cfg = _config(state)
    try:
        dictionaries = _dictionaries(cfg, state["model"], folder)
    except CollabError:
        return [f"{flag} {data} has no binarised text of two languages; give a folder that fairseq-preprocess made"]
    reasons = []
    for side, embedding, name in dictionaries:
        if not (folder / name).is_file():
            reasons.append(f"{flag} {data} has no {name}; give a folder that fairseq-preprocess made for this model")
            continue
        dictionary = Dictionary.load(str(folder / name))
        if len(dictionary) != len(embedding):
            reasons.append(
                f"{flag} {data}: {name} has {len(dictionary)} entries, the {side} embeddings of the model "
                f"{len(embedding)}; "
                "binarise the text with the model's own dictionary (fairseq-preprocess --srcdict, --tgtdict)"
            )
            continue
        trained_on = Path(str(_get(cfg.task, "data")).split(os.pathsep)[0]) / name
        if trained_on.is_file() and trained_on.resolve() != (folder / name).resolve():
            if Dictionary.load(str(trained_on)).symbols != dictionary.symbols:
                reasons.append(
                    f"{flag} {data}: {name} is as long as the model's dictionary but differs from {trained_on}; "
                    "binarise the text with the model's own dictionary (fairseq-preprocess --srcdict, --tgtdict)"
                )
    return reasons


class FairseqModel:
    """A checkpoint's model in float32 and evaluation mode, with the text of a folder.

    Args:
        state: as loaded; its weights are copied.
        data: folder of ``fairseq-preprocess``.
        device: where the model runs.

    Raises:
        CollabError: the task cannot be set up on this folder.
    """

    def __init__(self, state: dict[str, Any], data: str | os.PathLike, device: str = "cpu"):
        self.device, self.data = torch.device(device), str(data)
        options = model_options(state, "the checkpoint")
        name = adapter.model_name(options)
        shapes = adapter.shapes(options, name)
        if not getattr(options, "collab_config", None):
            # the same model, whose attentions can be observed on every version of fairseq
            plain = {kind: (AttentionConfig(False, s.embed_dim),) * s.layers for kind, s in shapes.items()}
            options.collab_config = CollabConfig(**plain).to_json()
            options.arch = options._name = adapter.ARCHITECTURES[name]
        self.cfg = _config(state)
        _set(self.cfg.task, "data", self.data)
        if _get(self.cfg.task, "eval_bleu"):
            _set(self.cfg.task, "eval_bleu", False)
        try:
            self.task = tasks.setup_task(self.cfg.task)
        except FileNotFoundError as error:
            raise CollabError(f"{data} is no folder of fairseq-preprocess for this model: {error}") from error
        self.model = self.task.build_model(options)
        self.model.load_state_dict(state["model"], strict=True, model_cfg=options)
        self.model.float().eval().requires_grad_(False).to(self.device)
        self.pad = self.task.target_dictionary.pad()
        self.modules = {one.prefix: self.model.get_submodule(one.prefix) for one in adapter.attentions(shapes)}
        self.options = options
        self._batches: dict[bool, Sequence[Any]] = {}

    def load_split(self, split: str) -> Any:
        """The dataset of a split.

        Raises:
            CollabError: the folder has none of that name.
        """
        try:
            self.task.load_dataset(split, task_cfg=self.cfg.task)
        except FileNotFoundError as error:
            there = sorted({file.name.split(".")[0] for file in Path(self.data).glob("*.idx")})
            raise CollabError(
                f"{self.data} has no split {split}; it has {', '.join(there) or 'no binarised text'}"
            ) from error
        return self.task.dataset(split)

    def sample(self, split: str, sentences: int, seed: int = 0, progress: bool = True) -> int:
        """Draws the calibration text; returns how many sentences (blocks, for a language model) it has.

        Where the folder has no target side, the decoder gets the model's own greedy translations.

        Raises:
            CollabError: there is no sentence to draw.
        """
        dataset = self.load_split(split)
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()
        limits = fairseq_utils.resolve_max_positions(self.task.max_positions(), self.model.max_positions())
        longest = min(limits) if isinstance(limits, tuple) else limits
        chosen = []
        for index in order:
            if len(chosen) == sentences:
                break
            if max(_lengths(dataset, index)) <= longest:
                chosen.append(index)
        if len(chosen) < 2:
            raise CollabError(f"split {split} of {self.data} has fewer than 2 sentences to calibrate on")
        held_out = chosen[: min(MOST_HELD_OUT, max(1, len(chosen) // HELD_OUT))]
        for part, indices in ((True, held_out), (False, chosen[len(held_out) :])):
            self._batches[part] = self._collate(dataset, indices, seed, progress)
        return len(chosen)

    def _collate(self, dataset: Any, indices: list[int], seed: int, progress: bool) -> list[Any]:
        indices = sorted(indices, key=lambda index: max(_lengths(dataset, index)))
        groups, group = [], []
        for index in indices:
            if group and (len(group) + 1) * max(_lengths(dataset, index)) > MAX_TOKENS:
                groups.append(group)
                group = []
            group.append(index)
        groups.append(group)
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
        batches = [dataset.collater([dataset[index] for index in groups[number]]) for number in order]
        waiting = [batch for batch in batches if batch.get("target") is None]
        for batch in tqdm(waiting, desc="translating", unit="batch", disable=not progress or not waiting):
            self._translate(batch)
        return batches

    def _translate(self, batch: Any) -> None:
        """Adds greedy translations as targets."""
        options = Namespace(beam=1, max_len_a=1.5, max_len_b=10)
        generator = self.task.build_generator([self.model], options)
        results = self.task.inference_step(generator, [self.model], self._move(batch))
        tokens = [found[0]["tokens"].cpu() for found in results]
        eos = self.task.target_dictionary.eos()
        batch["target"] = data_utils.collate_tokens(tokens, self.pad, eos)
        batch["net_input"]["prev_output_tokens"] = data_utils.collate_tokens(
            tokens, self.pad, eos, move_eos_to_beginning=True
        )

    def _move(self, batch: Any) -> Any:
        return fairseq_utils.move_to_cuda(batch, self.device) if self.device.type == "cuda" else batch

    def batches(self, held_out: bool) -> Sequence[Any]:
        """See ``ObservedModel``; :meth:`sample` comes first."""
        return self._batches[held_out]

    def observe(self, batch: Any, see: Callable[[Observation], None]) -> None:
        """See ``ObservedModel``; names are the prefixes of the attentions' parameters."""
        batch = self._move(batch)
        inputs = batch["net_input"]
        sides = {"encoder": inputs["src_tokens"], "decoder": inputs.get("prev_output_tokens", inputs["src_tokens"])}

        def hook(name: str) -> Callable:
            valid = sides[name.split(".")[0]].ne(self.pad)

            def after(module: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
                query, key = kwargs["query"].transpose(0, 1), kwargs["key"].transpose(0, 1)
                padding = kwargs.get("key_padding_mask")
                key_valid = key.new_ones(key.shape[:2], dtype=torch.bool) if padding is None else ~padding.bool()
                output = result[0].transpose(0, 1)
                see(Observation(name, query, key, valid, key_valid, kwargs.get("attn_mask"), output))

            return after

        handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in self.modules.items()]
        try:
            with torch.no_grad():
                self.model(**inputs)
        finally:
            for handle in handles:
                handle.remove()

    def log_probs(self, batch: Any) -> Tensor:
        """See ``ObservedModel``; with gradients where they are on."""
        batch = self._move(batch)
        found = self.model.get_normalized_probs(self.model(**batch["net_input"]), log_probs=True)
        return found[batch["target"].ne(self.pad)]

    def bits_per_token(self, split: str, progress: bool = True) -> float:
        """Mean negative log-likelihood, base 2, of a split's targets: fairseq's ``nll_loss``.

        Raises:
            CollabError: the split is missing or has no targets.
        """
        batches = self.task.get_batch_iterator(
            self.load_split(split),
            max_tokens=2 * MAX_TOKENS,
            max_positions=fairseq_utils.resolve_max_positions(self.task.max_positions(), self.model.max_positions()),
            ignore_invalid_inputs=True,
            required_batch_size_multiple=1,
            disable_iterator_cache=True,
        ).next_epoch_itr(shuffle=False)
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in tqdm(batches, desc=f"evaluating on {split}", unit="batch", disable=not progress):
                if batch.get("target") is None:
                    raise CollabError(f"split {split} of {self.data} has no target side to evaluate on")
                batch = self._move(batch)
                found = self.model.get_normalized_probs(self.model(**batch["net_input"]), log_probs=True)
                target = batch["target"]
                picked = found.gather(-1, target.unsqueeze(-1)).squeeze(-1)[target.ne(self.pad)]
                total -= picked.double().sum().item()
                count += picked.numel()
        if not count:
            raise CollabError(f"split {split} of {self.data} has no targets to evaluate on")
        return total / count / math.log(2)


def _config(state: dict[str, Any]) -> Any:
    """The configuration of a checkpoint of any age, a copy."""
    kept = {key: value for key, value in state.items() if key not in ("model", "last_optimizer_state")}
    old = copy.deepcopy(kept)
    if not old.get("cfg"):
        old.update(model={}, last_optimizer_state=None)
        return checkpoint_utils._upgrade_state_dict(old)["cfg"]
    return OmegaConf.create(old["cfg"], flags={"allow_objects": True})


def _get(config: Any, key: str) -> Any:
    return config.get(key) if hasattr(config, "get") else getattr(config, key, None)


def _set(config: Any, key: str, value: Any) -> None:
    if hasattr(config, "get"):
        with open_dict(config):
            config[key] = value
    else:
        setattr(config, key, value)


def _dictionaries(cfg: Any, weights: dict[str, Tensor], folder: Path) -> list[tuple[str, Tensor, str]]:
    """The sides of a model with their embeddings and the names of their dictionaries.

    Raises:
        CollabError: the languages are not known, and the folder does not tell.
    """
    sides = {side: weights.get(f"{side}.embed_tokens.weight") for side in ("encoder", "decoder")}
    if not any(key.startswith("encoder.") for key in weights):
        names = {"decoder": "dict.txt"}
    else:
        languages = _get(cfg.task, "source_lang"), _get(cfg.task, "target_lang")
        if None in languages:
            languages = data_utils.infer_language_pair(str(folder))
        names = {"encoder": f"dict.{languages[0]}.txt", "decoder": f"dict.{languages[1]}.txt"}
    return [(side, sides[side], name) for side, name in names.items() if sides[side] is not None]


def _lengths(dataset: Any, index: int) -> tuple[int, ...]:
    size = dataset.size(index)
    return tuple(size) if isinstance(size, (tuple, list)) else (int(size),)
