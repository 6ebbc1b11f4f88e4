"""fairseq models that run on binarised text while they are converted: observed, distilled from, evaluated.

Loads a checkpoint's state that is in memory together with a folder of ``fairseq-preprocess``. What is learnt from it is
``fairseq_collab.decomposition``; beam search with scores is ``translate``.
"""

import math
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from fairseq import tasks
from fairseq import utils as fairseq_utils
from fairseq.data import data_utils
from torch import Tensor
from tqdm import tqdm

import fairseq_collab.models  # noqa: F401 (registers the architectures)
from fairseq_collab.adapters import fairseq_task
from fairseq_collab.adapters import fairseq_transformer as adapter
from fairseq_collab.adapters.fairseq_options import architecture
from fairseq_collab.checkpoint import model_options, task_options
from fairseq_collab.config import AttentionConfig, CollabConfig
from fairseq_collab.decomposition.observation import HELD_OUT, MOST_HELD_OUT, Observation
from fairseq_collab.errors import CollabError
from fairseq_collab.fairseq_modules import data_folder, noise
from fairseq_collab.fairseq_modules.task_config import task_config

MAX_TOKENS = 2000  # padded tokens of a calibration batch


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
            options.arch = options._name = architecture(options, name)
        options.load_checkpoint_heads = True
        self.task_cfg = task_config(state, self.data)
        self.task_name = fairseq_task.task_name(task_options(state))
        self.head: str | None = None
        if self.task_name == fairseq_task.CLASSIFICATION:
            self.head = self.task_cfg.classification_head_name
        try:
            self.task = tasks.setup_task(self.task_cfg)
        except FileNotFoundError as error:
            raise CollabError(f"{data} is no folder of fairseq-preprocess for this model: {error}") from error
        self.model = self.task.build_model(options)
        # a copy, because fairseq renames what is in it
        self.model.load_state_dict(dict(state["model"]), strict=True, model_cfg=options)
        self.model.float().eval().requires_grad_(False).to(self.device)
        self.pad = self.task.target_dictionary.pad()
        self.modules = {one.prefix: self.model.get_submodule(one.prefix) for one in adapter.attentions(name, shapes)}
        # what only the hidden states are wanted of needs no product with the vocabulary
        self._hidden_only = {"features_only": True} if name in ("roberta", "bart") else {}
        self.options = options
        self._batches: dict[bool, Sequence[Any]] = {}
        sides = {"src_tokens": self.task.source_dictionary, "prev_output_tokens": self.task.target_dictionary}
        self._words = {side: noise.words(dictionary) for side, dictionary in sides.items()}
        self._noise = torch.Generator()

    @property
    def unit(self) -> str:
        """What one prediction is made for."""
        return "token" if self.head is None else "sentence"

    def load_split(self, split: str) -> Any:
        """The dataset of a split.

        Raises:
            CollabError: the folder has none of that name.
        """
        there = data_folder.splits(self.data, self.task_name)
        missing = f"{self.data} has no split {split}; it has {', '.join(there) or 'no binarised text'}"
        if split not in there:
            raise CollabError(missing)
        try:
            self.task.load_dataset(split, task_cfg=self.task_cfg)
        except FileNotFoundError as error:
            raise CollabError(missing) from error
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
        self._noise.manual_seed(seed)
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
        with _fixed_noise(seed):
            batches = [dataset.collater([dataset[index] for index in groups[number]]) for number in order]
        waiting = [batch for batch in batches if batch.get("target") is None and self.head is None]
        for batch in tqdm(waiting, desc="translating", unit="batch", disable=not progress or not waiting):
            self._translate(batch)
        return batches

    def _translate(self, batch: Any) -> None:
        """Adds greedy translations as targets."""
        options = Namespace(beam=1, max_len_a=1.5, max_len_b=10)
        generator = self.task.build_generator([self.model], options)
        results = self.task.inference_step(generator, [self.model], self._move(batch))
        tokens = [found[0]["tokens"].cpu() for found in results]
        batch["target"] = data_utils.collate_tokens(tokens, self.pad)
        # what a translation ends with, which is mBART's language, is what the next one begins with
        batch["net_input"]["prev_output_tokens"] = data_utils.collate_tokens(
            tokens, self.pad, move_eos_to_beginning=True
        )

    def _move(self, batch: Any) -> Any:
        return fairseq_utils.move_to_cuda(batch, self.device) if self.device.type == "cuda" else batch

    def batches(self, held_out: bool) -> Sequence[Any]:
        """See ``ObservedModel``; :meth:`sample` comes first."""
        return self._batches[held_out]

    def noisy(self, batch: Any) -> Any:
        """See ``ObservedModel``; the words are those of the batch, and special symbols keep their places."""
        inputs = dict(batch["net_input"])
        for side in self._words.keys() & inputs.keys():
            inputs[side] = noise.replace_words(inputs[side], self._words[side], self._noise)
        return {**batch, "net_input": inputs}

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
                self.model(**inputs, **self._hidden_only)
        finally:
            for handle in handles:
                handle.remove()

    def log_probs(self, batch: Any) -> Tensor:
        """See ``ObservedModel``; with gradients where they are on. Masked language models predict what is masked,
        classifiers the class of each sentence, (sentences, classes).
        """
        batch = self._move(batch)
        if self.head is not None:
            return self._predict(batch, None)
        scored = batch["target"].ne(self.pad)
        # short sentences may have no mask at all
        return self._predict(batch, scored if scored.any() else batch["net_input"]["src_tokens"].ne(self.pad))

    def _predict(self, batch: Any, scored: Tensor | None) -> Tensor:
        """Log-probabilities (N, V) at the N positions that ``scored`` (B, T) marks, or of every sentence's class."""
        inputs = batch["net_input"]
        if self.head is not None:
            logits, _ = self.model(**inputs, features_only=True, classification_head_name=self.head)
            return torch.log_softmax(logits.float(), dim=-1)
        if self.task_name == "masked_lm":
            output = self.model(**inputs, masked_tokens=scored)
            return self.model.get_normalized_probs(output, log_probs=True)
        return self.model.get_normalized_probs(self.model(**inputs), log_probs=True)[scored]

    def bits_per_token(self, split: str, progress: bool = True) -> float:
        """Mean negative log-likelihood, base 2, of a split's targets: fairseq's ``nll_loss``, or for classifiers
        its ``loss``, of a sentence.

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
        with torch.no_grad(), _fixed_noise(0):
            for batch in tqdm(batches, desc=f"evaluating on {split}", unit="batch", disable=not progress):
                if batch.get("target") is None:
                    raise CollabError(f"split {split} of {self.data} has no target side to evaluate on")
                batch = self._move(batch)
                target = batch["target"]
                scored = target.ne(self.pad) if self.head is None else torch.ones_like(target, dtype=torch.bool)
                picked = self._predict(batch, scored).gather(-1, target[scored].unsqueeze(-1))
                total -= picked.double().sum().item()
                count += picked.numel()
        if not count:
            raise CollabError(f"split {split} of {self.data} has no targets to evaluate on")
        return total / count / math.log(2)


@contextmanager
def _fixed_noise(seed: int) -> Iterator[None]:
    """Within, noise that denoising draws from torch is the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _lengths(dataset: Any, index: int) -> tuple[int, ...]:
    size = dataset.size(index)
    return tuple(size) if isinstance(size, (tuple, list)) else (int(size),)
