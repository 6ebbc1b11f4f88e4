"""What a conversion asks of a running model: the inputs of its attentions, and what it predicts. Knows no model.

Notation: B batch, T and S lengths of queries and keys, D and E their widths, V size of the vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from fairseq_collab.attention import CollaborativeAttention
from fairseq_collab.decomposition.calibration import Moments
from fairseq_collab.errors import CollabError

HELD_OUT, MOST_HELD_OUT = 8, 256  # one in so many sequences of the calibration text is held out, at most so many


@dataclass(frozen=True)
class Observation:
    """One attention in one batch.

    Args:
        name: of the attention.
        query: (B, T, D). key: (B, S, E).
        query_valid: (B, T) and key_valid: (B, S), False at padding.
        attn_mask: as :func:`fairseq_collab.functional.merge_masks` takes it, or None.
        output: (B, T, D), what the attention returned.
    """

    name: str
    query: Tensor
    key: Tensor
    query_valid: Tensor
    key_valid: Tensor
    attn_mask: Tensor | None
    output: Tensor


class ObservedModel(Protocol):
    """A model in evaluation mode with unlabelled text to run on."""

    def batches(self, held_out: bool) -> Sequence[Any]:
        """The calibration text: what is fitted to, or what is held out to judge by."""

    def observe(self, batch: Any, see: Callable[[Observation], None]) -> None:
        """Runs the model without gradients, calling ``see`` after each attention."""

    def log_probs(self, batch: Any) -> Tensor:
        """Log-probabilities of the next token at every position that is no padding, (tokens, V)."""

    def noisy(self, batch: Any) -> Any:
        """The batch with other words in some places, others at each call: text that the original never saw."""


def collect_moments(model: ObservedModel, progress: bool = True) -> dict[str, tuple[Moments, Moments]]:
    """Moments of queries and keys by attention, over all calibration text, padding left out.

    Raises:
        CollabError: an input of an attention is NaN or infinite.
    """
    found: dict[str, tuple[Moments, Moments]] = {}

    def see(one: Observation) -> None:
        if one.name not in found:
            found[one.name] = Moments(one.query.size(-1)), Moments(one.key.size(-1))
        query, key = found[one.name]
        query.add(one.query, one.query_valid)
        key.add(one.key, one.key_valid)

    batches = [batch for held_out in (False, True) for batch in model.batches(held_out)]
    for batch in tqdm(batches, desc="calibrating", unit="batch", disable=not progress):
        model.observe(batch, see)
    for name, moments in found.items():
        if not all(torch.isfinite(one.second).all() for one in moments):
            raise CollabError(
                f"the inputs of {name} on the calibration text are NaN or infinite: the model itself is broken there, "
                "or the text is not what it was trained on"
            )
    return found


def output_error(student: CollaborativeAttention, one: Observation) -> Tensor:
    """Squared distance of a layer's output from what was observed, relative to its size; padding left out."""
    output, _ = CollaborativeAttention.forward(student, one.query, one.key, None, ~one.key_valid, one.attn_mask)
    size = one.output[one.query_valid].square().sum()
    return (output - one.output)[one.query_valid].square().sum() / size.clamp(min=torch.finfo(size.dtype).tiny)
