"""What swap_to_collaborative refuses, and how it says so."""

import pytest
import torch
from _swap import ATTENTION, batches, refusal, swap
from torch import nn

from fairseq_collab import (
    BERTCollaborativeAdapter,
    CollabError,
    DistilBERTCollaborativeAdapter,
    swap_to_collaborative,
)


def test_tensors_of_unknown_meaning_are_refused(hf_model):
    model = hf_model("Bert")
    swap(model)
    module = model.get_submodule(ATTENTION)
    with pytest.raises(CollabError, match="An attention was given position_bias, which"):
        module(torch.ones(1, 3, 48), position_bias=torch.zeros(1, 4, 3, 3))
    with pytest.raises(CollabError, match="cannot read a mask of type BlockMask; load the model with attn_impl"):
        module(torch.ones(1, 3, 48), attention_mask=type("BlockMask", (), {})())


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


def test_positions_of_padding_do_not_count_where_text_is_too_long(hf_model):
    model = hf_model("Roberta", pad_token_id=1)
    places = model.config.max_position_embeddings
    long = {"input_ids": torch.full((2, places), 5)}
    message = refusal(model, calibration=[long])
    assert f"it has {places - 2} positions: " in message and message.endswith(f", max_length={places - 2}.")


def test_model_and_adapter_the_other_way_round_are_told_in_a_sentence(hf_model):
    with pytest.raises(CollabError, match="^a BertModel is no adapter: give the model first, and then BERT.{,200}$"):
        swap_to_collaborative(BERTCollaborativeAdapter, hf_model("Bert"), 24)


def test_an_attention_that_does_not_run_on_the_text_is_refused(hf_model):
    model = hf_model("Bert", is_decoder=True, add_cross_attention=True)
    message = refusal(model, calibration=batches(2))
    assert message.startswith("encoder.layer.0.crossattention.self did not run on the calibration text")
