"""How an adapter says where a model keeps its attentions, and how they are found and replaced. Knows no library.

An adapter names classes of the library and, for a module of such a class, its projections. What is put in its place is
``library_attention``; what is computed for it is ``fairseq_collab.swap``.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import nn

from fairseq_collab.adapters import ADAPTERS
from fairseq_collab.adapters.library_attention import Call, LibraryAttention, NoWeight, argument_names, is_causal
from fairseq_collab.attention import CollaborativeAttention
from fairseq_collab.config import AttentionConfig
from fairseq_collab.decomposition.layer import CollaborativeLayer, ConcatenatedLayer
from fairseq_collab.errors import PLACE, CollabError, merge_places

IMPLEMENTATIONS = ("eager", "sdpa")


@dataclass(frozen=True)
class AttentionParts:
    """The parts of a library's attention.

    Args:
        query, key, value: its projections, H*K outputs each.
        num_heads: H.
        output: the projection of what was attended to, in the module or next to it; None if there is none.
        owns_output: the module applies ``output`` itself.
        dropout: of the weights.
        scale: on the scores; ``1 / sqrt(K)`` when None.
    """

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    num_heads: int
    output: Optional[nn.Linear] = None
    owns_output: bool = False
    dropout: float = 0.0
    scale: Optional[float] = None

    @property
    def layer(self) -> ConcatenatedLayer:
        """What is decomposed, in float64 on the CPU."""
        q, k = self.query.weight.detach().double().cpu(), self.key.weight.detach().double().cpu()
        bias = None if self.query.bias is None else self.query.bias.detach().double().cpu()
        return ConcatenatedLayer(q, bias, k, self.num_heads)


class CollaborativeLayerAdapter:
    """Where a family of models keeps its attentions. Subclass it for another library or model.

    Class attributes:
        class_names: names of the attention classes; a module matches that is of such a class or of a subclass of one.
        module_class: what is put in their place.
    """

    class_names: tuple[str, ...] = ()
    module_class: type[LibraryAttention] = LibraryAttention

    def parts(self, module: nn.Module, parent: nn.Module) -> AttentionParts:
        """The projections of an attention.

        Args:
            module: of a class of ``class_names``. parent: the module that holds it.
        """
        raise NotImplementedError

    def matches(self, module: nn.Module) -> bool:
        """Whether this is an attention of the family that was not replaced yet."""
        return not isinstance(module, LibraryAttention) and self._is_one(module)

    def _is_one(self, module: nn.Module) -> bool:
        return any(one.__name__ in self.class_names for one in type(module).__mro__)

    def find(self, model: nn.Module) -> dict[str, "FoundAttention"]:
        """The attentions of a model by name, each once, in its order.

        Raises:
            CollabError: there are none, or they were swapped before.
        """
        found = {name: FoundAttention(self, name, *pair) for name, *pair in _modules(model) if self.matches(pair[0])}
        if found:
            return found
        name = type(model).__name__
        if any(isinstance(one, LibraryAttention) and self._is_one(one) for one in model.modules()):
            raise CollabError(f"The attentions of this {name} were swapped before; start from the original model.")
        raise CollabError(
            f"{type(self).__name__} found no attention in this {name}: it looks for {', '.join(self.class_names)}; "
            f"there are adapters for {_known_adapters()}."
        )

    def problems(self, model: nn.Module, found: dict[str, "FoundAttention"]) -> list[str]:
        """Why these attentions cannot be replaced, a sentence each."""
        reasons = []
        for name, part in model.named_modules():
            if not any(one == name or one.startswith(f"{name}.") or not name for one in found):
                continue
            implementation = getattr(getattr(part, "config", None), "_attn_implementation", None)
            if isinstance(implementation, str) and implementation not in IMPLEMENTATIONS:
                reason = (
                    f"The attention implementation {implementation} cannot work with shared keys; load the model with "
                    'attn_implementation="sdpa" or "eager".'
                )
                if reason not in reasons:
                    reasons.append(reason)
        return reasons + merge_places((one.name, reason) for one in found.values() for reason in one.problems())


@dataclass(frozen=True)
class FoundAttention:
    """An attention in a model: its name, the module, and the module that holds it."""

    adapter: CollaborativeLayerAdapter
    name: str
    module: nn.Module
    parent: nn.Module

    @property
    def parts(self) -> AttentionParts:
        return self.adapter.parts(self.module, self.parent)

    @property
    def width(self) -> int:
        """H*K: of the keys, the most that can be shared."""
        return self.parts.query.out_features

    def problems(self) -> list[str]:
        """Why this attention cannot be replaced, with ``errors.PLACE`` for its name."""
        parts, reasons = self.parts, []
        for role in ("query", "key", "value"):
            if reason := _unusable(getattr(parts, role)):
                return [f"The {role} projection of {PLACE} {reason}."]
        width = parts.query.in_features
        # transformers 5 leaves them out without a word
        config = getattr(self.module, "config", None)
        embedding = getattr(self.module, "position_embedding_type", getattr(config, "position_embedding_type", None))
        if embedding not in ("absolute", None):
            reasons.append(f"The scores of {PLACE} have {embedding} position embeddings, which shared keys lack.")
        if any(one.out_features != width for one in (parts.query, parts.key, parts.value)) or width % parts.num_heads:
            reasons.append(
                f"There are {parts.query.out_features} query dims for {parts.num_heads} heads and a width of {width} "
                f"in {PLACE}: pruned heads, or heads of another width, cannot be swapped."
            )
        for role in ("query", "key"):
            for key, tensor in getattr(parts, role).named_parameters():
                if not torch.isfinite(tensor).all():
                    reasons.append(
                        f"The {key} of the {role} projection of {PLACE} holds NaN or infinite values; repair or "
                        "retrain the model."
                    )
        return reasons

    @property
    def argument_names(self) -> tuple[str, ...]:
        """What the attention calls its positional arguments."""
        return argument_names(self.module)

    def is_causal(self, call: Call) -> bool:
        """Whether the attention hides what comes later, where it is given no mask."""
        return is_causal(self.module, call)

    def make(self, config: AttentionConfig) -> LibraryAttention:
        """The module that can take the attention's place; its queries and keys are still to be filled."""
        parts = self.parts
        module = self.adapter.module_class.from_config(
            config, parts.query.in_features, parts.num_heads, kdim=parts.key.in_features, vdim=parts.value.in_features
        )
        module.to(parts.query.weight)
        module.dropout = parts.dropout
        module.adapter = type(self.adapter).__name__
        _freeze(module, parts)
        module.v_proj = parts.value
        module.out_proj = parts.output if parts.owns_output else nn.Identity()
        for name, child in self.module.named_children():
            if child is parts.query and not hasattr(module, name):
                module.add_module(name, NoWeight(parts.query.weight))
        module.stand_in_for(self.module)
        return module

    def standalone(self, config: AttentionConfig, layer: CollaborativeLayer) -> CollaborativeAttention:
        """A converted layer with copies of the original's values and output projection, in float32 and frozen."""
        parts = self.parts
        module = CollaborativeAttention.from_config(
            config, parts.query.in_features, parts.num_heads, kdim=parts.key.in_features, vdim=parts.value.in_features
        )
        fill(module, layer)
        module.v_proj = _copy(parts.value)
        module.out_proj = nn.Identity() if parts.output is None else _copy(parts.output)
        return module.float().eval().requires_grad_(False).to(parts.query.weight.device)

    def replace(self, model: nn.Module, module: LibraryAttention) -> None:
        """Puts ``module`` in the place of the attention, wherever ``model`` uses it."""
        for parent in list(model.modules()):
            for name, child in list(parent._modules.items()):
                if child is self.module:
                    setattr(parent, name, module)


@torch.no_grad()
def fill(module: CollaborativeAttention, layer: CollaborativeLayer) -> None:
    """Copies a converted layer into a module of its dims."""
    module.q_proj.weight.copy_(layer.q_weight)
    module.k_proj.weight.copy_(layer.k_weight)
    module.mixing.copy_(layer.mixing)
    module.query_bias.copy_(layer.query_bias)
    module.pick.copy_(layer.pick)


def _unusable(projection: nn.Module) -> Optional[str]:
    """Why the weight of a projection cannot be read, or is not all that it does."""
    if not isinstance(projection, nn.Linear) or not projection.weight.is_floating_point():
        return (
            f"is {type(projection).__name__} and no Linear with plain weights; merge adapters such as LoRA, and load "
            "the model without quantisation"
        )
    if any(tensor.is_meta for tensor in projection.parameters()):
        return "has no weights in memory; load the model without device_map and off the meta device"
    return None


def _copy(linear: nn.Linear) -> nn.Linear:
    """Without hooks, on the CPU."""
    made = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    made.load_state_dict(linear.state_dict())
    return made


def _freeze(module: CollaborativeAttention, parts: AttentionParts) -> None:
    """What stands for frozen parameters is frozen: mixing, which comes of both sides, if both are."""
    query, key = parts.query.weight.requires_grad, parts.key.weight.requires_grad
    bias = parts.query.bias
    module.q_proj.requires_grad_(query)
    module.k_proj.requires_grad_(key)
    module.mixing.requires_grad_(query or key)
    module.query_bias.requires_grad_(query if bias is None else bias.requires_grad)


def as_adapter(adapter: Any) -> CollaborativeLayerAdapter:
    """An adapter from one, or from its class.

    Raises:
        CollabError: it is neither.
    """
    if isinstance(adapter, type) and issubclass(adapter, CollaborativeLayerAdapter):
        return adapter()
    if isinstance(adapter, CollaborativeLayerAdapter):
        return adapter
    what = adapter.__name__ if isinstance(adapter, type) else f"a {type(adapter).__name__}"
    raise CollabError(
        f"{what} is no adapter: give the model first, and then {_known_adapters()}, or a subclass of "
        "CollaborativeLayerAdapter."
    )


def known_adapter(name: str) -> Optional[CollaborativeLayerAdapter]:
    """The adapter of this package of that name, if there is one."""
    if name not in ADAPTERS:
        return None
    return getattr(importlib.import_module(f"fairseq_collab.adapters.{ADAPTERS[name]}"), name)()


def _known_adapters() -> str:
    return ", ".join(ADAPTERS)


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Name, module and parent of all modules below ``model``, each module once."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if name:
            yield name, module, modules[name.rpartition(".")[0]]
