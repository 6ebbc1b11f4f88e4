"""Models of transformers before and after the swap: the same outputs at full key dim, in every mode."""

import copy

import pytest
import torch
from rule import assert_as_exact_as

from fairseq_collab import (
    ALBERTCollaborativeAdapter,
    BERTCollaborativeAdapter,
    DistilBERTCollaborativeAdapter,
    swap_to_collaborative,
)

WIDTH = 48
FAMILIES = {
    "Bert": BERTCollaborativeAdapter,
    "Roberta": BERTCollaborativeAdapter,
    "XLMRoberta": BERTCollaborativeAdapter,
    "Camembert": BERTCollaborativeAdapter,
    "Electra": BERTCollaborativeAdapter,
    "DistilBert": DistilBERTCollaborativeAdapter,
    "Albert": ALBERTCollaborativeAdapter,
}


def swapped(model, adapter, key_dim=WIDTH, **options):
    collab = copy.deepcopy(model)
    swap_to_collaborative(collab, adapter, key_dim, progress=False, **options)
    return collab


def text(*lengths, seed=0):
    """Token indices and the mask of their padding, (B, longest)."""
    longest = max(lengths)
    ids = torch.randint(5, 100, (len(lengths), longest), generator=torch.Generator().manual_seed(seed))
    return ids, (torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)).long()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_full_key_dim_changes_no_output(hf_model, family, implementation):
    model = hf_model(family, implementation="eager" if family == "Electra" else implementation)
    collab, exact = swapped(model, FAMILIES[family]), copy.deepcopy(model).double()
    for ids, mask in (text(9, 9), text(7, 12, 3), text(1), text(16, 2)):
        for given in ({}, {"attention_mask": mask}):
            with torch.no_grad():
                outputs = [one(ids, **given)[0] for one in (collab, model, exact)]
            assert_as_exact_as(*outputs)
