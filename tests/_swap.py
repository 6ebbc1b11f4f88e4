"""Swapping attentions of small random models in tests, and text to do it on. No tests here."""

import pytest
import torch

from fairseq_collab import BERTCollaborativeAdapter, CollabError, swap_to_collaborative

ATTENTION = "encoder.layer.1.attention.self"


def swap(model, key_dim=24, adapter=BERTCollaborativeAdapter, **options):
    return swap_to_collaborative(model, adapter, key_dim, progress=False, **options)


def batches(count=6, rows=4, length=10):
    """Calibration text in which the last third of every second row is padding."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[1::2, length - length // 3 :] = 0
    ids = [torch.randint(5, 100, (rows, length), generator=generator) for _ in range(count)]
    return [{"input_ids": one, "attention_mask": mask} for one in ids]


def distance(one, other):
    """Mean squared difference of what two models return on text that was not calibrated on, without padding."""
    (batch,) = batches(1, rows=16, length=13)
    with torch.no_grad():
        difference = one(**batch)[0] - other(**batch)[0]
    return difference[batch["attention_mask"].bool()].square().mean().item()


def refusal(model, *args, **options):
    before = [name for name, _ in model.named_modules()]
    with pytest.raises(CollabError) as caught:
        swap(model, *args, **options)
    assert [name for name, _ in model.named_modules()] == before
    return str(caught.value)
