"""Hugging Face's BERT with converted attentions put back, with exact content biases if wanted. Measures nothing.

Notation: B batch, T length, D width, H heads, N sentences.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from fairseq_collab.adapters.base import FoundAttention
from fairseq_collab.adapters.bert import BERTCollaborativeAdapter
from fairseq_collab.attention import CollaborativeAttention
from fairseq_collab.config import AttentionConfig
from fairseq_collab.decomposition.layer import CollaborativeLayer

Batch = dict[str, Tensor]  # input_ids and attention_mask, (B, T)


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


def attentions(model: nn.Module) -> dict[str, FoundAttention]:
    """The attention of each layer, by name."""
    return BERTCollaborativeAdapter().find(model)


def collaborative_attention(one: FoundAttention, layer: CollaborativeLayer) -> CollaborativeAttention:
    """A converted layer with the values and output of the attention it was made from."""
    mix_dim, key_dim = layer.mixing.size(1), len(layer.q_weight)
    layout = "dense" if mix_dim == key_dim else "picked"
    return one.standalone(AttentionConfig(True, key_dim, mix_dim, layout), layer)


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
