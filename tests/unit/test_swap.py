"""What swap_to_collaborative does to a model besides its outputs, and what it reports."""

import copy
import io

import numpy as np
import pytest
import torch
from _swap import ATTENTION, batches, distance, swap
from torch import nn

from fairseq_collab import (
    ALBERTCollaborativeAdapter,
    BERTCollaborativeAdapter,
    CollaborativeAttention,
    CollaborativeLayerAdapter,
    DistilBERTCollaborativeAdapter,
)
from fairseq_collab.adapters.base import AttentionParts
from fairseq_collab.adapters.observed import ObservedLibraryModel
from fairseq_collab.decomposition.observation import collect_moments


class TensorAttention(nn.Module):
    """An attention of no library that returns a tensor."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(48, 48) for _ in range(3))

    def forward(self, hidden_states):
        parts = (one(hidden_states).unflatten(-1, (4, 12)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)


def test_the_swap_is_in_place_and_reported(hf_model):
    model = hf_model("Bert")
    report = swap(model, [24, 12])
    first, second = (layer.attention.self for layer in model.encoder.layer)
    assert isinstance(first, CollaborativeAttention)
    assert (first.key_dim, first.mix_dim, first.mix_layout) == (24, 12, "picked")
    assert (second.key_dim, second.mix_dim, second.mix_layout) == (12, 12, "dense")
    assert first.scale == pytest.approx(12**-0.5)
    assert [row["key_dim"] for row in report.rows] == [24, 12]
    before, after = report.key_query_parameters
    assert report.parameters[0] - report.parameters[1] == before - after > 0
    assert report.parameters[1] == sum(one.numel() for one in model.parameters())
    assert report.signature.startswith("conv:cp|R:12-24|P:K|adapter:BERTCollaborativeAdapter|calib:none")
    assert ATTENTION in report.table()


@pytest.mark.parametrize("mix_dim, found", [(None, 12), ("dense", 24), (24, 24), (8, 8)])
def test_mix_dim(hf_model, mix_dim, found):
    model = hf_model("Bert")
    report = swap(model, mix_dim=mix_dim)
    assert model.get_submodule(ATTENTION).mix_dim == found
    assert {row["mix_dim"] for row in report.rows} == {found}


def test_training_mode_gradients_hooks_and_dtype_are_kept(hf_model):
    model = hf_model("Bert").to(torch.bfloat16).train()
    model.encoder.layer[0].attention.self.query.weight.requires_grad_(False)
    seen = []
    model.get_submodule(ATTENTION).register_forward_hook(lambda *_: seen.append(1))
    value = model.get_submodule(ATTENTION).value
    swap(model, calibration=batches(2))
    calibrated = len(seen)
    module = model.get_submodule(ATTENTION)
    assert module.training and model.training and module.v_proj is value
    assert {one.dtype for one in module.parameters()} == {torch.bfloat16}
    assert module.mixing.requires_grad and not model.encoder.layer[0].attention.self.q_proj.weight.requires_grad
    model(**batches(1)[0])
    assert len(seen) == calibrated + 1


def test_text_brings_outputs_closer(hf_model):
    model = hf_model("Bert")
    found = []
    for options in ({}, {"calibration": batches(24)}, {"calibration": batches(24), "refine_steps": 60}):
        collab = copy.deepcopy(model)
        report = swap(collab, **options)
        found.append(distance(model, collab))
    assert max(found[1:]) < found[0]
    for row in report.rows:
        assert row["output_error"] <= row["output_error_before"]
        assert row["score_error"] is not None
    assert report.settings["calib"] == 96 and report.settings["refine"] == 60


def test_calibration_leaves_padding_out(hf_model):
    """Moments do not depend on what lies under the padding."""
    model = hf_model("Bert")
    found = BERTCollaborativeAdapter().find(model)
    other = copy.deepcopy(batches(2))
    for batch in other:
        batch["input_ids"][1::2, 7:] = 3
    first, second = (
        collect_moments(ObservedLibraryModel(model, found, text, []), progress=False)[ATTENTION]
        for text in (batches(2), other)
    )
    assert first[0].count == 2 * (2 * 10 + 2 * 7)
    torch.testing.assert_close(first[1].second, second[1].second)


def test_cross_attention_is_calibrated_by_both_sides(hf_model):
    model = hf_model("Bert", is_decoder=True, add_cross_attention=True)
    text = [{**one, "encoder_hidden_states": torch.randn(4, 5, 48)} for one in batches(6)]
    found = BERTCollaborativeAdapter().find(model)
    moments = collect_moments(ObservedLibraryModel(model, found, text, []), progress=False)
    query, key = moments["encoder.layer.0.crossattention.self"]
    assert (query.count, key.count) == (6 * (2 * 10 + 2 * 7), 6 * 4 * 5)
    report = swap(model, calibration=text, refine_steps=5)
    assert all(row["output_error"] <= row["output_error_before"] for row in report.rows)


def test_a_decoder_is_refined_with_its_causal_mask(hf_model):
    """At full key dim nothing is left to learn, unless the layer that learns sees other tokens than the original."""
    model = hf_model("Bert", is_decoder=True)
    report = swap(model, 48, calibration=batches(4), refine_steps=1)
    assert all(row["output_error_before"] < 1e-5 for row in report.rows)


@pytest.mark.parametrize("family, adapter", [("DistilBert", DistilBERTCollaborativeAdapter), ("Albert", None)])
def test_refinement_compares_with_the_output_of_the_library(hf_model, family, adapter):
    model = hf_model(family)
    report = swap(model, 48, adapter or ALBERTCollaborativeAdapter, calibration=batches(4), refine_steps=1)
    assert all(row["output_error_before"] < 1e-5 for row in report.rows)


def test_a_shared_attention_is_swapped_once_with_all_its_uses(hf_model):
    model = hf_model("Albert", num_hidden_layers=3)
    found = ALBERTCollaborativeAdapter().find(model)
    moments = collect_moments(ObservedLibraryModel(model, found, batches(2), []), progress=False)
    ((query, _),) = moments.values()
    assert query.count == 3 * 2 * (2 * 10 + 2 * 7)
    report = swap(model, 24, ALBERTCollaborativeAdapter, calibration=batches(4), refine_steps=5)
    assert len(report.rows) == 1
    assert sum(isinstance(one, CollaborativeAttention) for one in model.modules()) == 1


def test_an_attention_with_two_owners_is_replaced_in_both(hf_model):
    model = hf_model("Bert")
    model.encoder.layer[1].attention = model.encoder.layer[0].attention
    assert len(swap(model).rows) == 1
    assert model.encoder.layer[1].attention.self is model.encoder.layer[0].attention.self


def test_the_same_seed_makes_the_same_model(hf_model):
    found = []
    for _ in range(2):
        model = hf_model("Bert")
        swap(model, calibration=batches(6), refine_steps=5, seed=3)
        found.append(model.state_dict())
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_copies_state_dicts_and_pickles(hf_model):
    model = hf_model("Bert")
    swap(model)
    copied = copy.deepcopy(model)
    assert copied.get_submodule(ATTENTION) is not model.get_submodule(ATTENTION)
    assert distance(model, copied) == 0
    with torch.no_grad():
        copied.get_submodule(ATTENTION).mixing.zero_()
    assert distance(model, copied) > 0
    copied.load_state_dict(model.state_dict())
    assert distance(model, copied) == 0
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert distance(model, torch.load(file, weights_only=False)) == 0


@pytest.mark.parametrize("frozen", ("query.weight", "query.bias", "key.weight", "value.weight"))
def test_what_was_frozen_alone_is_frozen_alone(hf_model, frozen):
    model = hf_model("Bert")
    model.get_submodule(ATTENTION).get_parameter(frozen).requires_grad_(False)
    swap(model)
    still = {name for name, one in model.get_submodule(ATTENTION).named_parameters() if not one.requires_grad}
    counterpart = {"query.weight": "q_proj.weight", "query.bias": "query_bias", "key.weight": "k_proj.weight"}
    assert still == {counterpart.get(frozen, "v_proj.weight")}


@pytest.mark.parametrize(
    "key_dim, mix_dim, found",
    [
        (np.int64(24), np.int64(8), [24, 24]),
        (np.array([24, 16]), 8, [24, 16]),
        (torch.tensor(24), None, [24, 24]),
        ((dim for dim in (24, 16)), None, [24, 16]),
    ],
)
def test_whole_numbers_may_be_those_of_numpy_and_torch(hf_model, tmp_path, key_dim, mix_dim, found):
    report = swap(hf_model("Bert"), key_dim, mix_dim=mix_dim)
    assert [row["key_dim"] for row in report.rows] == found
    assert report.save(tmp_path)


def test_float64_stays_float64(hf_model):
    model = hf_model("Bert").double()
    for parameter in model.parameters():
        parameter.data += 1e-9 * torch.rand_like(parameter)  # what float32 cannot hold
    original = copy.deepcopy(model)
    swap(model, 48)
    assert distance(model, original) ** 0.5 < 1e-13


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_swap_without_gradients_is_refined_and_can_be_trained(hf_model, mode):
    model, usual = hf_model("Bert"), hf_model("Bert")
    swap(usual, calibration=batches(2), refine_steps=5)
    with mode():
        swap(model, calibration=batches(2), refine_steps=5)
    assert distance(model, usual) == 0
    model(**batches(1)[0])[0].sum().backward()
    assert model.get_submodule(ATTENTION).mixing.grad is not None


def test_an_adapter_of_ones_own():
    class Adapter(CollaborativeLayerAdapter):
        class_names = ("TensorAttention",)

        def parts(self, module, parent):
            return AttentionParts(module.q, module.k, module.v, num_heads=4)

    model = nn.Sequential(TensorAttention(), nn.Linear(48, 48)).eval()
    collab = copy.deepcopy(model)
    swap(collab, 48, Adapter)
    out, _ = collab[0](torch.ones(2, 3, 48))
    torch.testing.assert_close(out, model[0](torch.ones(2, 3, 48)))
