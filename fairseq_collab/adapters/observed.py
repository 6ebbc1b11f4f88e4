"""Models of other libraries that run on unlabelled text while they are converted. What is learnt is ``decomposition``.

Notation: B batch, T and S lengths of queries and keys, D and E their widths.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Optional

import torch
from torch import Tensor, nn

from fairseq_collab.adapters.base import FoundAttention
from fairseq_collab.adapters.library_attention import Call, causal_mask, mask_to_add, read_call
from fairseq_collab.decomposition.observation import HELD_OUT, MOST_HELD_OUT, Observation
from fairseq_collab.errors import CollabError


def split(calibration: Iterable[Any], device: torch.device, seed: int = 0) -> tuple[list[Any], list[Any], int]:
    """Moves batches to a device and keeps some apart: what is fitted to, what is held out, and the sequences of both.

    Of a single batch nothing is held out.

    Raises:
        CollabError: there is no batch, or something that is none.
    """
    if isinstance(calibration, (str, Mapping, Tensor)) or not isinstance(calibration, Iterable):
        raise CollabError(
            f"calibration is one {type(calibration).__name__}; give a list of batches, each as the model takes it."
        )
    batches = [_moved(batch, device) for batch in calibration]
    if not batches:
        raise CollabError("calibration has no batch; give some text, or leave it out.")
    sizes = [_sequences(batch) for batch in batches]
    wanted = min(MOST_HELD_OUT, sum(sizes) / HELD_OUT)
    held_out: list[int] = []
    for number in torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed)).tolist():
        if len(held_out) < len(batches) - 1 and sum(sizes[one] for one in held_out) < wanted:
            held_out.append(number)
    train = [batch for number, batch in enumerate(batches) if number not in held_out]
    return train, [batches[number] for number in held_out], sum(sizes)


class ObservedLibraryModel:
    """A model with its attentions and calibration text, as moments and layer-wise refinement want it.

    It predicts nothing, hence offers no ``log_probs`` to distil from.

    Args:
        model: in evaluation mode. found: its attentions.
        train, held_out: batches to fit to and to judge by, as :func:`split` makes them.
    """

    def __init__(
        self, model: nn.Module, found: Mapping[str, FoundAttention], train: Sequence[Any], held_out: Sequence[Any]
    ):
        self.model, self.found = model, found
        self._batches = {False: train, True: held_out}

    def batches(self, held_out: bool) -> Sequence[Any]:
        """See ``ObservedModel``."""
        return self._batches[held_out]

    @torch.no_grad()
    def observe(self, batch: Any, see: Callable[[Observation], None]) -> None:
        """See ``ObservedModel``; an attention that serves several layers is seen once for each.

        Raises:
            CollabError: the model does not take the batch.
        """
        calls: dict[str, Call] = {}
        valid: list[Tensor] = []  # of the last self-attention: (B, T), of the queries that cross-attention gets
        hooks = []
        for name, one in self.found.items():
            names = one.argument_names

            def before(_: nn.Module, args: tuple, kwargs: dict[str, Any], name: str = name, names: tuple = names):
                calls[name] = read_call(names, args, kwargs)

            def after(module: nn.Module, _: tuple, output: Any, name: str = name) -> None:
                see(_observation(name, self.found[name], calls[name], output, valid))

            hooks.append(one.module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append((one.parts.output or one.module).register_forward_hook(after))
        try:
            self.model(**batch) if isinstance(batch, Mapping) else self.model(batch)
        except CollabError:
            raise
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise CollabError(_not_taken(self.model, batch, error)) from error
        finally:
            for hook in hooks:
                hook.remove()


def _observation(name: str, one: FoundAttention, call: Call, output: Any, valid: list[Tensor]) -> Observation:
    query = call.hidden.float()
    key = query if call.source is None else call.source.float()
    length, source_length = query.size(1), key.size(1)
    mask = None
    if call.mask is not None:
        mask = mask_to_add(call.mask)
    elif call.source is None and one.is_causal(call):
        mask = causal_mask(length, source_length, query.device)
    key_valid = torch.ones(key.shape[:2], dtype=torch.bool, device=key.device)
    if mask is not None:
        hidden = mask if mask.dtype == torch.bool else mask < torch.finfo(mask.dtype).min / 2
        key_valid &= ~hidden.all(dim=2).all(dim=1)
    if call.source is None:
        valid[:] = [key_valid]
    # what a decoder's queries are, its self-attention has shown before
    known = bool(valid) and valid[0].shape == query.shape[:2]
    query_valid = valid[0] if known else torch.ones(query.shape[:2], dtype=torch.bool, device=query.device)
    attended = output[0] if isinstance(output, tuple) else output
    return Observation(name, query, key, query_valid, key_valid, mask, attended.float())


def _not_taken(model: nn.Module, batch: Any, error: Exception) -> str:
    """Why the library's model did not run on a batch, and what to do."""
    tensors = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    shapes = ", ".join(f"{key} {tuple(one.shape)}" for key, one in tensors.items() if isinstance(one, Tensor))
    positions, ids = _positions(model), tensors.get("input_ids")
    if isinstance(ids, Tensor) and ids.dim() == 2 and positions is not None and ids.size(1) > positions:
        advice = f"it has {positions} positions: call the tokenizer with truncation=True, max_length={positions}"
    else:
        advice = "give batches that model(**batch) takes"
    reason = " ".join(str(error).split())[:200]
    return f"the {type(model).__name__} does not run on a calibration batch ({shapes}): {reason}; {advice}."


def _positions(model: Any) -> Optional[int]:
    """The longest sentence that the learnt positions of a model suffice for, or None without such positions."""
    tables = [getattr(one, "position_embeddings", None) for one in model.modules()]
    # those of RoBERTa begin after the one of padding
    sizes = [
        one.num_embeddings - (0 if one.padding_idx is None else one.padding_idx + 1)
        for one in tables
        if isinstance(one, nn.Embedding)
    ]
    return max(sizes, default=None)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Mapping):
        if not any(isinstance(one, Tensor) for one in batch.values()):
            raise CollabError('calibration has a batch without tensors; call the tokenizer with return_tensors="pt".')
        return {key: one.to(device) if isinstance(one, Tensor) else one for key, one in batch.items()}
    if isinstance(batch, Tensor):
        return batch.to(device)
    raise CollabError(
        f"calibration has a batch of type {type(batch).__name__}; give dicts of tensors as the tokenizer returns them, "
        "or tensors of token indices."
    )


def _sequences(batch: Any) -> int:
    tensors = batch.values() if isinstance(batch, Mapping) else [batch]
    return next((len(one) for one in tensors if isinstance(one, Tensor) and one.dim()), 1)
