"""Hugging Face's BERT with its attentions observed, converted and put back. Reads no files and measures nothing.

Notation: B batch, T length, D width, H heads, N sentences.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from fairseq_collab.attention import CollaborativeAttention
from fairseq_collab.decomposition.layer import CollaborativeLayer, ConcatenatedLayer
from fairseq_collab.decomposition.observation import Observation

Batch = dict[str, Tensor]  # input_ids and attention_mask, (B, T)


class ObservedBert:
    """A ``BertModel`` with unlabelled text, as calibration and layer-wise refinement want it.

    It predicts no tokens, hence offers no ``log_probs`` to distil from.

    Args:
        model: in evaluation mode. train, held_out: text to fit to and to judge by.
    """

    def __init__(self, model: nn.Module, train: Sequence[Batch], held_out: Sequence[Batch]):
        self.model = model
        self._batches = {False: train, True: held_out}

    def batches(self, held_out: bool) -> Sequence[Batch]:
        """The calibration text."""
        return self._batches[held_out]

    @torch.no_grad()
    def observe(self, batch: Batch, see: Callable[[Observation], None]) -> None:
        """Runs the model, calling ``see`` with what each attention got and gave before the residual sum."""
        valid = batch["attention_mask"].bool()
        inputs: dict[str, Tensor] = {}
        hooks = []
        for name, attention in attentions(self.model).items():

            def keep(_module: nn.Module, args: tuple, kwargs: dict[str, Any], name: str = name) -> None:
                inputs[name] = args[0] if args else kwargs["hidden_states"]

            def show(_module: nn.Module, _args: tuple, output: Tensor, name: str = name) -> None:
                see(Observation(name, inputs[name], inputs[name], valid, valid, None, output))

            hooks.append(attention.self.register_forward_pre_hook(keep, with_kwargs=True))
            hooks.append(attention.output.dense.register_forward_hook(show))
        try:
            self.model(**batch)
        finally:
            for hook in hooks:
                hook.remove()


class ConvertedAttention(nn.Module):
    """In the place of a ``BertAttention``: collaborative scores; values, output and normalisation stay.

    Args:
        attention: with the output projection that ``BertSelfOutput`` had. norm: its layer normalisation.
        content_bias: (H, D), added to the scores before scaling, for methods that keep it apart; none if not given.
    """

    def __init__(self, attention: CollaborativeAttention, norm: nn.LayerNorm, content_bias: Tensor | None = None):
        super().__init__()
        self.attention = attention
        self.norm = norm
        self.register_buffer("content_bias", content_bias)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """(B, T, D) and (B, 1, ., T), boolean or added to the scores, -> (B, T, D)."""
        padding = None
        if attention_mask is not None:
            last = attention_mask[:, 0, -1]  # (B, T)
            padding = ~last if last.dtype == torch.bool else last < 0
        scores = None
        if self.content_bias is not None:
            by_key = hidden_states @ self.content_bias.T * self.attention.scale  # (B, T, H)
            length = by_key.size(1)
            scores = by_key.transpose(1, 2).flatten(0, 1).unsqueeze(1).expand(-1, length, -1)  # (B*H, T, T)
        output, _ = self.attention(hidden_states, key_padding_mask=padding, attn_mask=scores)
        return self.norm(output + hidden_states), None


def attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The ``BertAttention`` of each layer, by name."""
    return {f"layer.{i}": layer.attention for i, layer in enumerate(model.encoder.layer)}


def concatenated_layers(model: nn.Module) -> dict[str, ConcatenatedLayer]:
    """What there is to convert, by the names of :func:`attentions`."""
    heads = model.config.num_attention_heads
    parts = {name: attention.self for name, attention in attentions(model).items()}
    return {n: ConcatenatedLayer(p.query.weight, p.query.bias, p.key.weight, heads) for n, p in parts.items()}


def collaborative_attention(attention: nn.Module, layer: CollaborativeLayer) -> CollaborativeAttention:
    """A converted layer with the values and output of the ``BertAttention`` it was made from."""
    value, output = attention.self.value, attention.output.dense
    (heads, mix_dim), key_dim = layer.mixing.shape, len(layer.q_weight)
    layout = "dense" if mix_dim == key_dim else "picked"
    module = CollaborativeAttention(output.out_features, heads, key_dim, mix_dim=mix_dim, mix_layout=layout)
    with torch.no_grad():
        module.q_proj.weight.copy_(layer.q_weight)
        module.k_proj.weight.copy_(layer.k_weight)
        module.mixing.copy_(layer.mixing)
        module.query_bias.copy_(layer.query_bias)
        module.pick.copy_(layer.pick)
    module.v_proj.load_state_dict(value.state_dict())
    module.out_proj.load_state_dict(output.state_dict())
    return module.eval()


def with_attentions(
    model: nn.Module,
    layers: dict[str, CollaborativeAttention],
    content_biases: dict[str, Tensor] | None = None,
) -> nn.Module:
    """A copy of a ``BertModel`` in which ``layers`` attend."""
    converted = copy.deepcopy(model)
    for i, (name, module) in enumerate(layers.items()):
        layer = converted.encoder.layer[i]
        bias = None if content_biases is None else content_biases[name].float()
        layer.attention = ConvertedAttention(module, layer.attention.output.LayerNorm, bias)
    return converted.eval()


@torch.no_grad()
def embed(model: nn.Module, batches: Sequence[Batch], title: str) -> Tensor:
    """Normalised mean of each sentence's last hidden states, padding left out: (N, D) in float64."""
    found = []
    for batch in tqdm(batches, desc=title, unit="batch", leave=False):
        hidden = model(**batch).last_hidden_state.double()
        mask = batch["attention_mask"].unsqueeze(-1).double()
        found.append(nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(found)


def distortion(original: Tensor, converted: Tensor) -> float:
    """Mean of 1 - cosine between embeddings (N, D) of the same sentences."""
    return (1 - (original * converted).sum(-1)).mean().item()
