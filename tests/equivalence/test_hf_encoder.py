"""An encoder of transformers computes in fairseq, on binarised text, what it computes on its own on the text itself."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("fairseq")
import _hf as hf  # noqa: E402
from rule import assert_as_exact_as  # noqa: E402

import fairseq_collab.models  # noqa: E402, F401 (registers the architectures)
from data_prep.glue_text import rebuild  # noqa: E402
from data_prep.hf_vocabulary import HFTextEncoder  # noqa: E402

NAMES_IN_TEXT = [
    "ba [SEP] be",
    "[PAD] be [PAD]",
    "[CLS] ba",
    "ba [MASK] <mask>",
    "bi",
    "[SEP]",
    "</s> <pad> [SEP] [PAD]",
]


@pytest.mark.parametrize("kind", hf.KINDS)
@pytest.mark.parametrize("sides", (1, 2), ids=("single", "pairs"))
def test_a_fine_tuned_model_keeps_its_logits(kind, sides, tmp_path):
    source = hf.make_folder(tmp_path / "hf", kind, "ForSequenceClassification", num_labels=3)
    texts = [pair[:sides] for pair in hf.pairs(12)]
    hf.write_pairs(tmp_path / "data", hf.make_tokenizer(kind), {"valid": texts})
    task = hf.pair_task(tmp_path / "data")
    model, batch = hf.start(task, kind, tmp_path / "hf"), hf.whole_batch(task)["net_input"]
    inputs = hf.make_tokenizer(kind)(*map(list, zip(*texts, strict=True)), padding=True, return_tensors="pt")
    assert inputs["attention_mask"].sum(1).unique().numel() > 1
    ours = model.encoder.inputs(batch["src_tokens"])
    assert ("token_type_ids" in ours) == (kind != "distilbert")
    inputs = {name: inputs[name] for name in ours}
    assert {name: part.tolist() for name, part in ours.items()} == {n: part.tolist() for n, part in inputs.items()}
    with torch.no_grad():
        found, _ = model(**batch, features_only=True, classification_head_name=hf.HEAD)
        plain, exact = source(**inputs).logits, source.double()(**inputs).logits
    assert_as_exact_as(found, plain, exact)


@pytest.mark.parametrize("kind", hf.KINDS)
@pytest.mark.parametrize("sides", (1, 2), ids=("single", "pairs"))
def test_names_of_special_tokens_in_a_text_change_neither_segments_nor_masks(kind, sides, tmp_path):
    from fairseq.data import data_utils

    hf.make_folder(tmp_path / "hf", kind)
    tokenizer = hf.make_tokenizer(kind)
    texts = [(first, second)[:sides] for first in NAMES_IN_TEXT for second in NAMES_IN_TEXT]
    hf.write_pairs(tmp_path / "data", tokenizer, {"valid": [("ba", "be")]})
    model = hf.start(hf.pair_task(tmp_path / "data"), kind, tmp_path / "hf")
    encoder = HFTextEncoder(tmp_path / "hf", 40)
    rows = [torch.tensor(rebuild(one.inputs, encoder.separators)) for one in encoder.encode(texts)]
    for left_pad in (False, True):
        tokenizer.padding_side = "left" if left_pad else "right"
        expected = tokenizer(*map(list, zip(*texts, strict=True)), padding=True, return_tensors="pt")
        found = model.encoder.inputs(data_utils.collate_tokens(rows, model.encoder.dictionary.pad(), left_pad=left_pad))
        ids = expected.pop("input_ids")
        written = ids.eq(tokenizer.sep_token_id) & found["input_ids"].ne(tokenizer.sep_token_id)
        # a separator in a text is an unknown token
        assert found["input_ids"].tolist() == ids.masked_fill(written, tokenizer.unk_token_id).tolist()
        assert written.any() and found["input_ids"].eq(tokenizer.sep_token_id).sum() == sides * len(texts)
        assert found["attention_mask"].tolist() == expected["attention_mask"].tolist()
        if "token_type_ids" in found:
            assert found["token_type_ids"].tolist() == expected["token_type_ids"].tolist()


@pytest.mark.parametrize("kind", hf.KINDS)
def test_a_masked_language_model_keeps_its_logits_in_the_order_of_the_dictionary(kind, tmp_path):
    source = hf.make_folder(tmp_path / "hf", kind)
    tokenizer = hf.make_tokenizer(kind)
    hf.write_text(tmp_path / "data", tokenizer, {"valid": hf.sentences(12)})
    task = hf.text_task(tmp_path / "data")
    model, batch = hf.start(task, kind, tmp_path / "hf"), hf.whole_batch(task)
    tokens, masked = batch["net_input"]["src_tokens"], batch["target"].ne(task.source_dictionary.pad())
    assert tokens.eq(task.mask_idx).any()
    names = {"<s>": "cls", "<pad>": "pad", "</s>": "sep", "<unk>": "unk", "<mask>": "mask"}
    hf_names = [
        getattr(tokenizer, f"{names[symbol]}_token") if symbol in names else symbol
        for symbol in task.source_dictionary.symbols
    ]
    order = torch.tensor(tokenizer.convert_tokens_to_ids(hf_names))
    inputs = {"input_ids": order[tokens], "attention_mask": tokens.ne(task.source_dictionary.pad()).long()}
    with torch.no_grad():
        every, _ = model(**batch["net_input"])
        found, _ = model(**batch["net_input"], masked_tokens=masked)
        plain, exact = source(**inputs).logits, source.double()(**inputs).logits
    assert_as_exact_as(every, plain[..., order], exact[..., order])
    assert_as_exact_as(found, plain[masked][:, order], exact[masked][:, order])


@pytest.mark.parametrize("kind", hf.KINDS)
def test_gradients_of_a_classifier_are_those_of_transformers(kind, tmp_path):
    source = hf.make_folder(tmp_path / "hf", kind, "ForSequenceClassification", num_labels=3)
    hf.write_pairs(tmp_path / "data", hf.make_tokenizer(kind), {"valid": hf.pairs(6)})
    task = hf.pair_task(tmp_path / "data")
    model, batch = hf.start(task, kind, tmp_path / "hf"), hf.whole_batch(task)
    inputs = model.encoder.inputs(batch["net_input"]["src_tokens"])
    labels = batch["target"].view(-1)
    found, _ = model(**batch["net_input"], classification_head_name=hf.HEAD)
    torch.nn.functional.cross_entropy(found, labels).backward()
    torch.nn.functional.cross_entropy(source(**inputs).logits, labels).backward()
    ours = dict(model.encoder.model.base_model.named_parameters())
    theirs = {name: p for name, p in source.base_model.named_parameters() if "pooler" not in name}
    assert ours.keys() == theirs.keys()
    plain = {name: p.grad.clone() for name, p in theirs.items()}
    source.double().zero_grad()
    torch.nn.functional.cross_entropy(source(**inputs).logits, labels).backward()
    for name, parameter in theirs.items():
        assert_as_exact_as(ours[name].grad, plain[name], parameter.grad)
