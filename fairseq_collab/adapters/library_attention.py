"""The module put in the place of another library's attention: our attention, called as that library calls its own.

Where a library keeps its attentions is ``base`` and the adapters beside it; nothing here imports the library.

Notation: B batch, T target length, S source length, D width, H heads, R shared key dims, V value dims a head.
"""

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any, Mapping, Optional

import torch
from torch import Tensor, nn

from fairseq_collab.attention import CollaborativeAttention
from fairseq_collab.errors import CollabError

# the names that versions of transformers gave to one thing
HIDDEN, SOURCE = ("hidden_states", "query"), ("encoder_hidden_states", "key")
MASK, CACHE = ("attention_mask", "mask"), ("cache", "past_key_values", "past_key_value")
# tensors among an attention's own parameters that may be left unread; `value` is what `key` is
UNREAD = ("value", "head_mask", "cache_position", "position_ids", "encoder_attention_mask")
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@dataclass(frozen=True)
class Call:
    """What an attention was called with.

    Args:
        hidden: (B, T, D). source: (B, S, width of keys) of cross-attention, or None.
        mask: 2-D (B, S) or 4-D, broadcasting to (B, H, T, S); as the library means it: floating masks are added, in
            others what is not zero may be seen.
        cache: the library's cache. others: the remaining arguments by name.
    """

    hidden: Tensor
    source: Optional[Tensor]
    mask: Optional[Tensor]
    cache: Any
    others: Mapping[str, Any]


def read_call(names: tuple[str, ...], args: tuple, kwargs: Mapping[str, Any]) -> Call:
    """Sorts the arguments of an attention whose parameters have these names, whichever version gave them.

    Raises:
        CollabError: a mask of a kind that cannot be read, or a tensor of unknown meaning.
    """
    given = {**dict(zip(names, args, strict=False)), **kwargs}

    def take(known: tuple[str, ...]) -> Any:
        found = None
        for name in known:
            value = given.pop(name, None)
            found = value if found is None else found
        return found

    hidden, mask, source, cache = take(HIDDEN), take(MASK), take(SOURCE), take(CACHE)
    if mask is not None and not isinstance(mask, Tensor):
        raise CollabError(
            f"Collaborative heads cannot read a mask of type {type(mask).__name__}; load the model with "
            'attn_implementation="sdpa" or "eager".'
        )
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    for name, value in given.items():
        # what else comes by name is for kernels that are not used here, or for the loss
        own = name in names or name == "position_bias"
        if own and name not in UNREAD and isinstance(value, (Tensor, tuple)):
            raise CollabError(
                f"An attention was given {name}, which collaborative heads cannot take into account; without it their "
                "output would be another."
            )
    if source is hidden:
        source = None
    return Call(hidden, source, mask, cache, given)


def mask_to_add(mask: Tensor) -> Tensor:
    """A mask of the library as ``merge_masks`` takes it: (B, 1, 1, S) or broadcasting to (B, H, T, S)."""
    if mask.dim() == 2:
        mask = mask[:, None, None, :]
    return mask if mask.is_floating_point() else mask == 0


def causal_mask(length: int, source_length: int, device: torch.device) -> Tensor:
    """(T, S), True where the key comes after the query."""
    return torch.ones(length, source_length, dtype=torch.bool, device=device).triu(1)


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """What a module calls its positional arguments."""
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD)


def is_causal(module: nn.Module, call: Call) -> bool:
    """Whether an attention that gets no mask hides what comes later: its argument says so, or else the module."""
    asked = call.others.get("is_causal")
    return _is_causal(module) if asked is None else bool(asked)


def _is_causal(module: nn.Module) -> bool:
    return bool(getattr(module, "is_causal", getattr(module, "is_decoder", False)))


class LibraryAttention(CollaborativeAttention):
    """``CollaborativeAttention`` in the place of a library's attention.

    Values, the output projection where it belongs to the replaced module, and hooks are the library's own objects. It
    is also an instance of the class it replaces, by which transformers finds the modules whose outputs it collects.
    """

    adapter: str = ""
    argument_names: tuple[str, ...] = ()
    is_causal: bool = False
    layer_idx: Optional[int] = None
    config: Any = None

    def stand_in_for(self, original: nn.Module) -> None:
        """Takes over what the call of ``original`` depends on, and its class."""
        self.argument_names = argument_names(original)
        self.is_causal = _is_causal(original)
        self.layer_idx = getattr(original, "layer_idx", None)
        self.config = getattr(original, "config", None)
        for name in _HOOKS:
            setattr(self, name, getattr(original, name))
        self.train(original.training)
        self.__class__ = _both(type(self), type(original))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The library's arguments and result: what is attended to (B, T, D), and weights (B, H, T, S) or None."""
        call = read_call(self.argument_names, args, kwargs)
        q = self.q_proj(call.hidden)  # (B, T, R)
        k, v = self._keys_and_values(call)  # (B, S, R) and (B, S, D)
        v = v.view(v.size(0), v.size(1), self.num_heads, self.head_dim).transpose(1, 2)  # (B, H, S, V)
        mask = None
        if call.mask is not None:
            mask = mask_to_add(call.mask)
        elif call.source is None and q.size(1) > 1 and is_causal(self, call):
            mask = causal_mask(q.size(1), k.size(1), q.device)
        few_queries = call.cache is not None and q.size(1) == 1
        out, weights = self._attend(q, k, v, None, mask, self._wants_weights(call), few_queries)
        head_mask = call.others.get("head_mask")
        if head_mask is not None:
            factor = head_mask.reshape(1, 1, self.num_heads, 1)
            out = (out.view(*out.shape[:2], self.num_heads, self.head_dim) * factor).flatten(2).to(out.dtype)
            weights = None if weights is None else weights * factor.view(1, self.num_heads, 1, 1)
        weights = None if weights is None else weights.to(out.dtype)
        return self.result(self.finish(out, call.hidden), weights)

    def finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """What the replaced module does with the values attended to, (B, T, D) -> (B, T, D)."""
        return self.out_proj(attended)

    def result(self, out: Tensor, weights: Optional[Tensor]) -> Any:
        """What the replaced module returns."""
        return out, weights

    def prune_heads(self, heads: Any) -> None:
        """Refuses: heads that share their keys cannot be taken out one by one."""
        if len(heads):
            raise CollabError("Heads with shared keys cannot be pruned; prune before the swap, or not at all.")

    def __reduce_ex__(self, protocol: Any) -> tuple:
        own, library = getattr(type(self), "made_of", (type(self), None))
        return _empty, (own, library), self.__dict__.copy()

    def _wants_weights(self, call: Call) -> bool:
        asked = call.others.get("output_attentions")
        if asked is None:  # the library's eager attention always returns them
            return getattr(self.config, "_attn_implementation", None) == "eager"
        return bool(asked)

    def _keys_and_values(self, call: Call) -> tuple[Tensor, Tensor]:
        """Shared keys (B, S, R) and values (B, S, D), from the cache where there is one.

        In the cache both are stored as if there were one head, so that a token takes R and D numbers.
        """
        cache, cross = call.cache, call.source is not None
        both = cache is not None and hasattr(cache, "cross_attention_cache")
        if cross and both and cache.is_updated.get(self.layer_idx):
            layer = cache.cross_attention_cache.layers[self.layer_idx]
            return layer.keys.squeeze(1), layer.values.squeeze(1)
        states = call.source if cross else call.hidden
        k, v = self.k_proj(states), self.v_proj(states)
        if cache is None or (cross and not both):
            return k, v
        store = cache if not both else cache.cross_attention_cache if cross else cache.self_attention_cache
        more = {"cache_position": None if cross else call.others.get("cache_position")}
        k, v = store.update(k.unsqueeze(1), v.unsqueeze(1), self.layer_idx, more)
        if cross:
            cache.is_updated[self.layer_idx] = True
        return k.squeeze(1), v.squeeze(1)


class NoWeight(nn.Module):
    """Stands under the name of a projection that was replaced, with a ``weight`` of one number.

    So a state dict of a swapped model does not load into the library's own model, neither by ``from_pretrained`` nor
    with ``strict=False``: it would leave the attention random.
    """

    def __init__(self, like: Tensor):
        super().__init__()
        self.register_buffer("weight", torch.zeros(1, dtype=like.dtype, device=like.device))


@cache
def _both(own: type, library: type) -> type:
    """A class that is both, with the methods of ``own`` wherever it has them."""
    return type(f"Collaborative{library.__name__}", (own, library), {"made_of": (own, library)})


def _empty(own: type, library: Optional[type]) -> nn.Module:
    made = own if library is None else _both(own, library)
    return made.__new__(made)
