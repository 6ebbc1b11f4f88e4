"""Models of transformers before and after the swap: the same outputs at full key dim, in every mode."""

import copy
from importlib.metadata import version

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


def agree(model, collab, *args, exact=None, **kwargs):
    """Runs the original, the swapped model and a float64 original, and compares what they return first."""
    exact = copy.deepcopy(model).double() if exact is None else exact
    exact_kwargs = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in kwargs.items()}
    with torch.no_grad():
        plain, fast = model(*args, **kwargs), collab(*args, **kwargs)
        exact = exact(*args, **exact_kwargs)
    assert_as_exact_as(fast[0], plain[0], exact[0])
    return fast, plain, exact


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["Bert", "Roberta", "Electra"])
def test_a_decoder_sees_no_later_token(hf_model, family, implementation):
    if family == "Electra" and implementation == "sdpa":
        implementation = "eager"
    model = hf_model(family, implementation=implementation, is_decoder=True)
    collab = swapped(model, BERTCollaborativeAdapter)
    ids, mask = text(11, 6)
    # version 4 of transformers cannot make causal masks in float64 for sdpa
    exact = hf_model(family, implementation="eager", is_decoder=True).double()
    agree(model, collab, ids, exact=exact)
    agree(model, collab, ids, exact=exact, attention_mask=mask)
    changed = ids.clone()
    changed[:, 7:] = 7
    with torch.no_grad():
        before, after = collab(ids)[0], collab(changed)[0]
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_mask_per_query_is_honoured(hf_model, implementation):
    """Three dims in version 4 of transformers; in version 5 four, as the attention takes it."""
    model = hf_model("Bert", implementation=implementation)
    collab = swapped(model, BERTCollaborativeAdapter)
    ids, _ = text(9, 9)
    seen = torch.rand(2, 9, 9, generator=torch.Generator().manual_seed(1)) < 0.6
    seen |= torch.eye(9, dtype=torch.bool)
    mask = seen.unsqueeze(1)
    if int(version("transformers").split(".")[0]) < 5:
        mask = seen.long()
    elif implementation == "eager":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
    exact = hf_model("Bert", implementation="eager").double()
    exact_mask = mask if mask.dim() == 3 else torch.zeros(mask.shape).masked_fill(~seen.unsqueeze(1), -1e9).double()
    with torch.no_grad():
        outputs = [
            one(ids, attention_mask=given)[0] for one, given in ((collab, mask), (model, mask), (exact, exact_mask))
        ]
    assert_as_exact_as(*outputs)
    with torch.no_grad():
        assert not torch.allclose(outputs[0], collab(ids)[0])


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "Albert"])
def test_padding_is_invisible(hf_model, family):
    model = hf_model(family)
    collab = swapped(model, FAMILIES[family], 24)
    ids, mask = text(12, 5)
    with torch.no_grad():
        padded = collab(ids, attention_mask=mask)[0]
        ids[1, 5:] = 99
        other = collab(ids, attention_mask=mask)[0]
        alone = collab(ids[1:, :5])[0]
    assert torch.equal(padded[1, :5], other[1, :5])
    torch.testing.assert_close(padded[1:, :5], alone)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "Electra"])
def test_cross_attention(hf_model, family):
    model = hf_model(family, implementation="eager", is_decoder=True, add_cross_attention=True)
    collab = swapped(model, BERTCollaborativeAdapter)
    ids, mask = text(6, 8)
    source = torch.randn(2, 13, WIDTH, generator=torch.Generator().manual_seed(2))
    source_mask = (torch.arange(13) < torch.tensor([[13], [4]])).long()
    given = {"attention_mask": mask, "encoder_hidden_states": source}
    agree(model, collab, ids, **given)
    fast, plain, _ = agree(model, collab, ids, **given, encoder_attention_mask=source_mask, output_attentions=True)
    assert [one.shape for one in fast.cross_attentions] == [one.shape for one in plain.cross_attentions]
    torch.testing.assert_close(fast.cross_attentions[1], plain.cross_attentions[1], atol=1e-4, rtol=1e-4)


def test_keys_of_another_width(hf_model):
    model = hf_model("Bert", is_decoder=True, add_cross_attention=True)
    for layer in model.encoder.layer:
        for name in ("key", "value"):
            torch.manual_seed(3)
            setattr(layer.crossattention.self, name, torch.nn.Linear(20, WIDTH))
    collab = swapped(model, BERTCollaborativeAdapter)
    assert collab.encoder.layer[0].crossattention.self.k_proj.in_features == 20
    agree(model, collab, text(5)[0], encoder_hidden_states=torch.randn(1, 7, 20))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("before", [True, False])
def test_attention_weights_are_returned(hf_model, family, before):
    model = hf_model(family, implementation="eager")
    ids, mask = text(9, 4)
    if before:  # transformers may hang its hooks to the modules that are replaced
        model(ids, attention_mask=mask, output_attentions=True)
    collab = swapped(model, FAMILIES[family])
    fast, plain, exact = agree(model, collab, ids, attention_mask=mask, output_attentions=True)
    assert len(fast.attentions) == len(plain.attentions) == 2
    for parts in zip(fast.attentions, plain.attentions, exact.attentions, strict=True):
        assert parts[0].shape == (2, 4, 9, 9)
        assert_as_exact_as(*parts)


def test_head_masks(hf_model):
    model = hf_model("Bert", implementation="eager")
    ids, _ = text(9, 9)
    head_mask = torch.tensor([[1.0, 0, 1, 0.5], [0, 1, 1, 1]])
    try:
        masked, plain = model(ids, head_mask=head_mask)[0], model(ids)[0]
    except TypeError:
        pytest.skip("this version of transformers has no head masks")
    if torch.equal(masked, plain):
        pytest.skip("this version of transformers has no head masks")
    agree(model, swapped(model, BERTCollaborativeAdapter), ids, head_mask=head_mask)


@pytest.mark.parametrize("key_dim", [WIDTH, 20])
@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_generation_with_a_cache_is_generation_without(hf_model, family, key_dim):
    model = hf_model(family, "LMHeadModel" if family == "Bert" else "CausalLM", is_decoder=True)
    collab = swapped(model, BERTCollaborativeAdapter, key_dim)
    ids, _ = text(4, 4)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options["attention_mask"] = torch.ones_like(ids)
    cached = collab.generate(ids, use_cache=True, **options)
    assert cached.shape == (2, 12)
    assert torch.equal(cached, collab.generate(ids, use_cache=False, **options))
    beams = collab.generate(ids, use_cache=True, num_beams=3, **options)
    assert torch.equal(beams, collab.generate(ids, use_cache=False, num_beams=3, **options))
    if key_dim == WIDTH:
        assert torch.equal(cached, model.generate(ids, **options))


def test_the_cache_holds_shared_keys(hf_model):
    collab = swapped(hf_model("Bert", is_decoder=True), BERTCollaborativeAdapter, 20)
    found = collab(text(7, 7)[0], use_cache=True)
    cache = found.get("cache", found.get("past_key_values"))
    cache = getattr(cache, "self_attention_cache", cache)
    assert cache.layers[0].keys.shape == (2, 1, 7, 20)
    assert cache.layers[0].values.numel() == 2 * 7 * WIDTH


def test_a_static_cache(hf_model):
    model = hf_model("Bert", "LMHeadModel", is_decoder=True)
    collab = swapped(model, BERTCollaborativeAdapter)
    ids, _ = text(4)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options["attention_mask"] = torch.ones_like(ids)
    try:
        wanted = model.generate(ids, cache_implementation="static", disable_compile=True, **options)
    except (ValueError, TypeError, RuntimeError):
        pytest.skip("this version of transformers has no static cache for BERT")
    assert torch.equal(collab.generate(ids, cache_implementation="static", disable_compile=True, **options), wanted)


@pytest.fixture
def encoder_decoder(hf_model):
    """BERT to BERT, in which the decoder has cross-attention."""
    from transformers import EncoderDecoderConfig, EncoderDecoderModel

    encoder, decoder = hf_model("Bert").config, hf_model("Bert", is_decoder=True, add_cross_attention=True).config
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    torch.manual_seed(4)
    return EncoderDecoderModel(config=config).eval()


def test_an_encoder_decoder(encoder_decoder):
    collab = swapped(encoder_decoder, BERTCollaborativeAdapter)
    ids, mask = text(9, 5)
    agree(encoder_decoder, collab, ids, attention_mask=mask, decoder_input_ids=text(4, 4, seed=1)[0])
    options = {"max_new_tokens": 6, "do_sample": False, "decoder_start_token_id": 1, "pad_token_id": 0}
    options["eos_token_id"] = None
    wanted = encoder_decoder.generate(ids, attention_mask=mask, **options)
    assert torch.equal(collab.generate(ids, attention_mask=mask, use_cache=True, **options), wanted)
    assert torch.equal(collab.generate(ids, attention_mask=mask, use_cache=False, **options), wanted)


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "Albert"])
@pytest.mark.parametrize("head", ["SequenceClassification", "MaskedLM"])
def test_models_with_heads(hf_model, family, head):
    model = hf_model(family, head)
    ids, mask = text(9, 5)
    agree(model, swapped(model, FAMILIES[family]), ids, attention_mask=mask)
