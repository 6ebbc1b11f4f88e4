"""The code of docs/hugging-face.md runs, and its adapter passes what every adapter should. Copy the latter.

To test another adapter, change `adapter`, `model` and `inputs`.
"""

import copy
import re
from pathlib import Path

import pytest
import torch

from fairseq_collab import load_collaborative, save_collaborative, swap_to_collaborative

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hugging-face.md"


def blocks():
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def page(hf_model):
    """The names that the last block of the page defines."""
    names = {}
    torch.manual_seed(0)
    exec(blocks()[-1], names)
    return names


@pytest.fixture
def adapter(page):
    return page["CLIPCollaborativeAdapter"]


@pytest.fixture
def model(page):
    """Small, random and in evaluation mode, with attentions that are far from uniform."""
    model = copy.deepcopy(page["model"])
    for name, parameter in model.named_parameters():
        if "_proj.weight" in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture
def inputs():
    """Batches as the model takes them."""
    generator = torch.Generator().manual_seed(2)
    return [{"pixel_values": torch.rand(4, 3, 32, 32, generator=generator)} for _ in range(8)]


def outputs(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


def test_at_full_key_dim_only_rounding_changes(adapter, model, inputs):
    collab = copy.deepcopy(model)
    swap_to_collaborative(collab, adapter, 64, progress=False)
    exact = outputs(copy.deepcopy(model).double(), {key: value.double() for key, value in inputs[0].items()})
    plain, fast = outputs(model, inputs[0]), outputs(collab, inputs[0])
    error, plain_error = ((one - exact).square().mean().sqrt() for one in (fast, plain))
    assert error <= 2 * plain_error


def test_calibration_and_refinement_find_its_inputs(adapter, model, inputs):
    report = swap_to_collaborative(model, adapter, 64, calibration=inputs, refine_steps=1, progress=False)
    assert all(row["output_error_before"] < 1e-5 for row in report.rows)


def test_smaller_key_dims_are_smaller_and_close(adapter, model, inputs):
    original = copy.deepcopy(model)
    report = swap_to_collaborative(model, adapter, 32, calibration=inputs[:-1], progress=False)
    assert report.key_query_parameters[1] < 0.6 * report.key_query_parameters[0]
    wanted, found = (outputs(one, inputs[-1]) for one in (original, model))
    assert 0 < (found - wanted).square().mean() < 0.1 * wanted.var()


def test_a_saved_model_comes_back(adapter, model, inputs, tmp_path):
    swap_to_collaborative(model, adapter, 32, progress=False)
    again = load_collaborative(save_collaborative(model, tmp_path), adapter=adapter)
    assert torch.equal(outputs(again, inputs[0]), outputs(model, inputs[0]))


def test_the_quick_start_runs(hf_model, tmp_path, capsys):
    model = hf_model("Bert", hidden_size=768, num_attention_heads=12, num_hidden_layers=1, vocab_size=10000)
    model.save_pretrained(tmp_path)
    exec(blocks()[0].replace("bert-base-cased-finetuned-mrpc", str(tmp_path)), {})
    (error,) = re.findall(r"Max l1 error: (\S+)", capsys.readouterr().out)
    assert float(error) < 1e-4


def test_the_other_blocks_run(hf_model, tmp_path, monkeypatch, capsys):
    from transformers import BertTokenizerFast

    monkeypatch.chdir(tmp_path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    names = {"tokenizer": BertTokenizerFast(str(tmp_path / "vocab.txt"))}
    names["texts"] = [" ".join("abcdefgh"[: 1 + i % 8]) for i in range(512)]
    names["model"] = hf_model("Bert", hidden_size=384, num_hidden_layers=1)
    exec("from fairseq_collab import swap_to_collaborative, BERTCollaborativeAdapter", names)
    for block in blocks()[1:-1]:
        exec(block.replace("refine_steps=150", "refine_steps=5"), names)
    assert "conv:cp|R:192|P:K|adapter:BERTCollaborativeAdapter|calib:512|refine:5" in capsys.readouterr().out
    assert type(names["model"]).__name__ == "BertModel"
