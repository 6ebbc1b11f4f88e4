"""What swap_to_collaborative does to a model besides its outputs, what it reports, and what it refuses."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

from fairseq_collab import (
    ALBERTCollaborativeAdapter,
    BERTCollaborativeAdapter,
    CollabError,
    CollaborativeAttention,
    CollaborativeLayerAdapter,
    DistilBERTCollaborativeAdapter,
    swap_to_collaborative,
)
from fairseq_collab.adapters.base import AttentionParts
from fairseq_collab.adapters.observed import ObservedLibraryModel
from fairseq_collab.decomposition.observation import collect_moments

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


class TensorAttention(nn.Module):
    """An attention of no library that returns a tensor."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(48, 48) for _ in range(3))

    def forward(self, hidden_states):
        parts = (one(hidden_states).unflatten(-1, (4, 12)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)


def test_tensors_of_unknown_meaning_are_refused(hf_model):
    model = hf_model("Bert")
    swap(model)
    module = model.get_submodule(ATTENTION)
    with pytest.raises(CollabError, match="An attention was given position_bias, which"):
        module(torch.ones(1, 3, 48), position_bias=torch.zeros(1, 4, 3, 3))
    with pytest.raises(CollabError, match="cannot read a mask of type BlockMask; load the model with attn_impl"):
        module(torch.ones(1, 3, 48), attention_mask=type("BlockMask", (), {})())


@pytest.mark.parametrize("frozen", ("query.weight", "query.bias", "key.weight", "value.weight"))
def test_what_was_frozen_alone_is_frozen_alone(hf_model, frozen):
    model = hf_model("Bert")
    model.get_submodule(ATTENTION).get_parameter(frozen).requires_grad_(False)
    swap(model)
    still = {name for name, one in model.get_submodule(ATTENTION).named_parameters() if not one.requires_grad}
    counterpart = {"query.weight": "q_proj.weight", "query.bias": "query_bias", "key.weight": "k_proj.weight"}
    assert still == {counterpart.get(frozen, "v_proj.weight")}


def refusal(model, *args, **options):
    before = [name for name, _ in model.named_modules()]
    with pytest.raises(CollabError) as caught:
        swap(model, *args, **options)
    assert [name for name, _ in model.named_modules()] == before
    return str(caught.value)


def test_a_model_without_such_attentions_is_refused(hf_model):
    message = refusal(hf_model("Bert"), adapter=DistilBERTCollaborativeAdapter)
    assert message == (
        "DistilBERTCollaborativeAdapter found no attention in this BertModel: it looks for DistilBertSelfAttention, "
        "MultiHeadSelfAttention; there are adapters for BERTCollaborativeAdapter, DistilBERTCollaborativeAdapter, "
        "ALBERTCollaborativeAdapter."
    )


def test_a_second_swap_is_refused(hf_model):
    model = hf_model("Bert")
    swap(model)
    assert refusal(model) == ("The attentions of this BertModel were swapped before; start from the original model.")


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention"])
def test_other_attention_implementations_are_refused(hf_model, implementation):
    model = hf_model("Bert")
    model.config._attn_implementation_internal = implementation
    assert refusal(model) == (
        f"The attention implementation {implementation} cannot work with shared keys; load the model with "
        'attn_implementation="sdpa" or "eager".'
    )


@pytest.mark.parametrize("key_dim", [0, -1, 49, 24.0, True, "24"])
def test_key_dims_out_of_range_are_refused(hf_model, key_dim):
    message = refusal(hf_model("Bert"), [24, key_dim])
    assert message == f"dim_shared_query_key is {key_dim!r} for {ATTENTION}; give a whole number from 1 to 48."


@pytest.mark.parametrize("key_dim", [None, 24.0, "24", {"a": 24, "b": 24}])
def test_what_is_neither_a_key_dim_nor_a_list_of_them_is_refused(hf_model, key_dim):
    assert refusal(hf_model("Bert"), key_dim).startswith(f"dim_shared_query_key is {key_dim!r} for encoder.layer.0")


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


def test_a_wrong_number_of_key_dims_is_refused(hf_model):
    assert "dim_shared_query_key has 3 entries for 2 attentions" in refusal(hf_model("Bert"), [24, 24, 24])


@pytest.mark.parametrize("mix_dim", [0, 5, 25, "sparse"])
def test_mix_dims_out_of_range_are_refused(hf_model, mix_dim):
    found = refusal(hf_model("Bert"), mix_dim=mix_dim)
    assert f"mix_dim is {mix_dim!r} for encoder.layer.0.attention.self, {ATTENTION}; give" in found


@pytest.mark.parametrize("role", ["query", "key"])
def test_nan_weights_are_refused_by_name(hf_model, role):
    model = hf_model("Bert")
    getattr(model.get_submodule(ATTENTION), role).weight.data[3, 3] = float("nan")
    assert refusal(model) == (
        f"The weight of the {role} projection of {ATTENTION} holds NaN or infinite values; repair or retrain the model."
    )


class Adapted(nn.Module):
    """A projection with low-rank weights beside it, under the names that peft gives them."""

    def __init__(self, linear):
        super().__init__()
        self.base_layer, self.extra = linear, nn.Linear(linear.in_features, linear.out_features)
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + self.extra(x)


@pytest.mark.parametrize("role", ["query", "key", "value"])
def test_projections_that_do_more_than_their_weight_are_refused(hf_model, role):
    model = hf_model("Bert")
    attention = model.get_submodule(ATTENTION)
    setattr(attention, role, Adapted(getattr(attention, role)))
    message = refusal(model)
    assert message.startswith(f"The {role} projection of {ATTENTION} is Adapted and no Linear")
    assert "merge adapters" in message


def test_quantised_projections_are_refused(hf_model):
    model = hf_model("Bert")
    query = model.get_submodule(ATTENTION).query
    query.weight = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    assert "load the model without quantisation" in refusal(model)


def test_weights_that_are_not_in_memory_are_refused(hf_model):
    message = refusal(hf_model("Bert").to("meta"))
    assert message.startswith(f"The query projection of encoder.layer.0.attention.self, {ATTENTION} has no weights")


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


def test_pruned_heads_are_refused(hf_model):
    model = hf_model("Bert")
    module = model.get_submodule(ATTENTION)
    for name in ("query", "key", "value"):
        setattr(module, name, nn.Linear(48, 36))
    module.num_attention_heads = 3
    assert refusal(model) == (
        f"There are 36 query dims for 3 heads and a width of 48 in {ATTENTION}: pruned heads, or heads of another "
        "width, cannot be swapped."
    )


def test_relative_positions_are_refused(hf_model):
    model = hf_model("Bert", position_embedding_type="relative_key", implementation="eager")
    message = refusal(model)
    assert ATTENTION in message and "have relative_key position embeddings, which shared keys lack." in message


def test_all_reasons_come_at_once_each_of_them_once_and_on_a_line_of_its_own(hf_model):
    model = hf_model("Bert")
    for layer in model.encoder.layer:
        layer.attention.self.key.bias.data[0] = float("inf")
    both = "encoder.layer.0.attention.self, encoder.layer.1.attention.self"
    assert refusal(model, 99).splitlines() == [
        f"The bias of the key projection of {both} holds NaN or infinite values; repair or retrain the model.",
        f"dim_shared_query_key is 99 for {both}; give a whole number from 1 to 48.",
    ]
    assert len(refusal(model, [99, 77]).splitlines()) == 3


@pytest.mark.parametrize(
    "options, message",
    [
        ({"method": "magic"}, "There is no method 'magic'"),
        ({"refine_steps": 5}, "refine_steps needs text"),
        ({"refine_steps": -5, "calibration": batches(2)}, "refine_steps is -5; give a whole number, at least 0"),
        ({"calibration": []}, "calibration has no batch"),
        ({"calibration": "some text"}, "calibration is one str"),
        ({"calibration": 512}, "calibration is one int"),
        ({"calibration": [["some text"]]}, "calibration has a batch of type list"),
        ({"calibration": [{"input_ids": [[5, 6], [7, 8]]}]}, 'call the tokenizer with return_tensors="pt"'),
        ({"calibration": batches(1), "refine_steps": 5}, "calibration has one batch"),
        ({"adapter": "BERT"}, "a str is no adapter: give the model first"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(hf_model, options, message):
    assert message in refusal(hf_model("Bert"), **options)


def test_text_that_the_model_does_not_take_is_told_with_what_to_do(hf_model):
    positions = hf_model("Bert").config.max_position_embeddings
    long = {"input_ids": torch.ones(2, positions + 5, dtype=torch.long)}
    message = refusal(hf_model("Bert"), calibration=[*batches(1), long])
    assert message.startswith(f"the BertModel does not run on a calibration batch (input_ids (2, {positions + 5})): ")
    assert message.endswith(f"truncation=True, max_length={positions}.")
    wrong = {"input_ids": torch.full((2, 4), 10**6)}
    message = refusal(hf_model("Bert"), calibration=[*batches(1), wrong])
    assert message.endswith("give batches that model(**batch) takes.")


def test_model_and_adapter_the_other_way_round_are_told_in_a_sentence(hf_model):
    with pytest.raises(CollabError, match="^a BertModel is no adapter: give the model first, and then BERT.{,200}$"):
        swap_to_collaborative(BERTCollaborativeAdapter, hf_model("Bert"), 24)


def test_an_attention_that_does_not_run_on_the_text_is_refused(hf_model):
    model = hf_model("Bert", is_decoder=True, add_cross_attention=True)
    message = refusal(model, calibration=batches(2))
    assert message.startswith("encoder.layer.0.crossattention.self did not run on the calibration text")


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
