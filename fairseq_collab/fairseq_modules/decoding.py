"""What the plugin changes in fairseq's decoding: lines that are too long, diverse beams, evaluation of nothing.

`patches.install` puts these wrappers in their places; the list of all patches is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fairseq_collab.errors import CollabError

logger = logging.getLogger(__name__)


def source_limit(max_positions: Any, max_tokens: int | None = None) -> float:
    """The most source tokens (with the end mark) that one line may have."""
    limit = max_positions[0] if isinstance(max_positions, (tuple, list)) else max_positions
    return min(float("inf") if bound is None else bound for bound in (limit, max_tokens))


def cut(tokens: Iterable[Any], limit: float) -> list[Any]:
    """`tokens` (a list of 1-D tensors, each with its end mark last), none of them longer than `limit`."""
    lines = []
    for number, line in enumerate(tokens):
        if torch.is_tensor(line) and line.dim() == 1 and line.numel() > limit:
            logger.warning(
                "line %d of the batch has %d tokens and the model takes %d: the rest of the line is left out",
                *(number + 1, line.numel(), limit),
            )
            line = torch.cat([line[: int(limit) - 1], line[-1:]])
        lines.append(line)
    return lines


class _CuttingTask:
    """A task whose interactive lines are no longer than `limit` tokens."""

    def __init__(self, task: Any, limit: float):
        self._task, self._limit = task, limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def get_interactive_tokens_and_lengths(self, lines, encode_fn):
        tokens, lengths = self._task.get_interactive_tokens_and_lengths(lines, encode_fn)
        tokens = cut(tokens, self._limit)
        return tokens, [t.numel() if torch.is_tensor(t) else n for t, n in zip(tokens, lengths, strict=True)]


def make_batches(stock: Callable) -> Callable:
    """Stock: `Exception: Size of sample #0 is invalid`, and the lines after it are never translated."""

    def make_batches(lines, cfg, task, max_positions, encode_fn):
        if not cfg.dataset.skip_invalid_size_inputs_valid_test:
            task = _CuttingTask(task, source_limit(max_positions, cfg.dataset.max_tokens))
        return stock(lines, cfg, task, max_positions, encode_fn)

    return make_batches


def build_batches(stock: Callable) -> Callable:
    """Stock: as in `make_batches`, for `from_pretrained(...).translate(...)`."""

    def build_batches(self, tokens, skip_invalid_size_inputs):
        if not skip_invalid_size_inputs:
            tokens = cut(tokens, source_limit(self.max_positions, self.cfg.dataset.max_tokens))
        return stock(self, tokens, skip_invalid_size_inputs)

    return build_batches


def generate(stock: Callable) -> Callable:
    """Stock numbers the sentences of a batch by their place in the data set, and diverse beam search uses that number
    as a row of a table that has a row for each sentence of the batch: an IndexError, or the row of another sentence."""
    from fairseq.search import DiverseBeamSearch

    def generate_(self, models, sample, **kwargs):
        if isinstance(self.search, DiverseBeamSearch):
            sample = {key: value for key, value in sample.items() if key != "id"}
        return stock(self, models, sample, **kwargs)

    return generate_


def eval_lm(stock: Callable) -> Callable:
    """Stock skips blocks that are longer than the model takes with a warning, and calls nothing a perplexity of 1."""

    def eval_lm_(*args, **kwargs):
        results = stock(*args, **kwargs)
        if not results["loss"]:
            raise CollabError(
                "nothing was evaluated, every block of text was skipped: give --tokens-per-sample N, at most the "
                "positions of the model (its own --tokens-per-sample), and look at --gen-subset and --max-tokens"
            )
        return results

    return eval_lm_
