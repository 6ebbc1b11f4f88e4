"""save_collaborative and load_collaborative: what comes back, and what is refused."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from fairseq_collab import (
    ALBERTCollaborativeAdapter,
    BERTCollaborativeAdapter,
    CollabError,
    DistilBERTCollaborativeAdapter,
    load_collaborative,
    save_collaborative,
    swap_to_collaborative,
)

FAMILIES = {
    "Bert": BERTCollaborativeAdapter,
    "Roberta": BERTCollaborativeAdapter,
    "Electra": BERTCollaborativeAdapter,
    "DistilBert": DistilBERTCollaborativeAdapter,
    "Albert": ALBERTCollaborativeAdapter,
}
IDS = torch.randint(5, 100, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def swapped(hf_model):
    def make(family="Bert", head="Model", key_dim=24, swap=None, **options):
        model = hf_model(family, head, **options)
        swap_to_collaborative(model, FAMILIES[family], key_dim, progress=False, **(swap or {}))
        return model

    return make


def outputs(model, **more):
    with torch.no_grad():
        return model(IDS, **more)[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", ["Model", "SequenceClassification", "MaskedLM"])
def test_what_was_saved_comes_back(swapped, tmp_path, family, head):
    model = swapped(family, head, implementation="eager")
    save_collaborative(model, tmp_path / "model")
    again = load_collaborative(tmp_path / "model")
    assert type(again) is type(model) and not again.training
    assert torch.equal(outputs(again), outputs(model))
    assert again.state_dict().keys() == model.state_dict().keys()
    assert sum(one.numel() for one in again.parameters()) == sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("swap", [{"mix_dim": "dense"}, {"mix_dim": 8}, {}])
def test_dims_by_layer_and_layouts(swapped, tmp_path, swap):
    model = swapped(key_dim=[30, 11 if swap.get("mix_dim") != 8 else 9], swap=swap)
    assert torch.equal(outputs(load_collaborative(save_collaborative(model, tmp_path))), outputs(model))


def test_half_precision_and_a_model_without_pooler(hf_model, tmp_path):
    from transformers import BertModel

    model = BertModel(hf_model("Bert").config, add_pooling_layer=False).to(torch.bfloat16).eval()
    swap_to_collaborative(model, BERTCollaborativeAdapter, 24, progress=False)
    again = load_collaborative(save_collaborative(model, tmp_path))
    assert {one.dtype for one in again.parameters()} == {torch.bfloat16}
    assert torch.equal(outputs(again), outputs(model))


def test_a_decoder_generates_the_same(swapped, tmp_path):
    model = swapped("Bert", "LMHeadModel", is_decoder=True)
    model.generation_config.max_new_tokens = 5
    model.generation_config.pad_token_id = 0
    again = load_collaborative(save_collaborative(model, tmp_path))
    assert again.generation_config.max_new_tokens == 5
    assert torch.equal(again.generate(IDS, do_sample=False), model.generate(IDS, do_sample=False))


def test_an_encoder_decoder_comes_back(hf_model, tmp_path):
    from transformers import EncoderDecoderConfig, EncoderDecoderModel

    encoder, decoder = hf_model("Bert").config, hf_model("Bert", is_decoder=True, add_cross_attention=True).config
    model = EncoderDecoderModel(config=EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)).eval()
    swap_to_collaborative(model, BERTCollaborativeAdapter, 24, progress=False)
    again = load_collaborative(save_collaborative(model, tmp_path))
    assert torch.equal(outputs(again, decoder_input_ids=IDS), outputs(model, decoder_input_ids=IDS))


def test_a_fresh_process_gets_the_same_bits(swapped, tmp_path, fairseq_env):
    model = swapped("Bert", "SequenceClassification")
    save_collaborative(model, tmp_path)
    torch.save({"ids": IDS, "wanted": outputs(model)}, tmp_path / "test.pt")
    code = (
        "import sys, torch; from fairseq_collab import load_collaborative; "
        "saved = torch.load(sys.argv[1] + '/test.pt'); model = load_collaborative(sys.argv[1]); "
        "assert torch.equal(model(saved['ids'])[0], saved['wanted'])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=fairseq_env(), timeout=120)


def test_training_goes_on_after_loading(swapped, tmp_path):
    again = load_collaborative(save_collaborative(swapped("Bert", "SequenceClassification"), tmp_path)).train()
    again(IDS, labels=torch.tensor([0, 1])).loss.backward()
    module = again.bert.encoder.layer[0].attention.self
    assert module.mixing.grad.abs().sum() > 0 and module.q_proj.weight.grad.abs().sum() > 0


def test_a_compiled_model_is_saved_as_what_it_wraps(swapped, tmp_path):
    model = swapped()
    save_collaborative(torch.compile(model, backend="eager"), tmp_path / "model")
    again = load_collaborative(tmp_path / "model")
    assert type(again) is type(model) and torch.equal(outputs(again), outputs(model))


def test_transformers_itself_refuses_the_folder(swapped, tmp_path):
    """It could only fill the attentions with random numbers."""
    from transformers import AutoConfig, AutoModel, BertModel

    save_collaborative(swapped(), tmp_path)
    with pytest.raises((ValueError, KeyError), match="fairseq_collab"):
        AutoConfig.from_pretrained(tmp_path)
    with pytest.raises((ValueError, KeyError, OSError)):
        AutoModel.from_pretrained(tmp_path)
    with pytest.raises(OSError):
        BertModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("key_dim", [24, 48])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_save_pretrained_wrote_is_refused_as_well(swapped, hf_model, tmp_path, family, key_dim):
    """As in the checkpoints of a Trainer: those can be resumed from, but not loaded into ordinary attentions."""
    model = swapped(family, key_dim=key_dim, implementation="eager")
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="size|mismatch"):
        type(model).from_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="size mismatch"):
        hf_model(family, implementation="eager").load_state_dict(model.state_dict(), strict=False)


def test_a_tokenizer_may_lie_in_the_folder(swapped, tmp_path):
    from transformers import AutoTokenizer, BertTokenizerFast

    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    save_collaborative(swapped(), tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("a b")["input_ids"] == [2, 5, 6, 3]


def test_nothing_is_overwritten_without_force(swapped, tmp_path):
    model, other = swapped(), swapped(key_dim=12)
    save_collaborative(model, tmp_path)
    with pytest.raises(CollabError, match="holds a model already; give another folder, or force=True"):
        save_collaborative(other, tmp_path)
    assert torch.equal(outputs(load_collaborative(tmp_path)), outputs(model))
    save_collaborative(other, tmp_path, force=True)
    assert torch.equal(outputs(load_collaborative(tmp_path)), outputs(other))


def test_a_folder_of_another_model_is_left_alone(swapped, hf_model, tmp_path):
    hf_model("Bert").save_pretrained(tmp_path)
    with pytest.raises(CollabError, match=r"holds another model \(model.safetensors\)"):
        save_collaborative(swapped(), tmp_path, force=True)


def test_a_failed_write_leaves_the_folder_as_it_was(swapped, tmp_path, monkeypatch):
    model = swapped()
    save_collaborative(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CollabError, match="could not be written .No space left on device"):
        save_collaborative(swapped(key_dim=12), tmp_path, force=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_models_that_were_not_swapped_are_not_saved(hf_model, tmp_path):
    with pytest.raises(CollabError, match="This BertModel has no shared keys to save"):
        save_collaborative(hf_model("Bert"), tmp_path)
    assert not list(tmp_path.iterdir())


def change(folder, **entries):
    settings = json.loads((folder / "config.json").read_text())
    settings.update(entries)
    (folder / "config.json").write_text(json.dumps(settings))


def test_folders_that_cannot_be_right_are_refused(swapped, hf_model, tmp_path):
    def refused(message):
        with pytest.raises(CollabError, match=message):
            load_collaborative(folder)

    folder = tmp_path / "none"
    refused("none has no config.json; give a folder that save_collaborative wrote")
    folder = tmp_path / "plain"
    hf_model("Bert").save_pretrained(folder)
    refused("is of a bert model without shared keys")
    folder = tmp_path / "model"
    save_collaborative(swapped(), folder)
    weights = (folder / "collaborative.safetensors").read_bytes()
    settings = json.loads((folder / "config.json").read_text())
    change(folder, format_version=2, fairseq_collab_version="9.0")
    refused("has format 2, and this version reads up to 1; it was written by fairseq_collab 9.0")
    change(folder, format_version=1, model_class="MyModel")
    refused("is of the class MyModel, which transformers .* does not have; give it as model_class")
    attentions = copy.deepcopy(settings["attentions"])
    next(iter(attentions.values()))["key_dim"] = 20
    change(folder, model_class="BertModel", attentions=attentions)
    refused(
        r"has encoder.layer.0.attention.self.q_proj.weight of shape \(24, 48\), the configuration makes it \(20, 48\)"
    )
    next(iter(attentions.values())).update(key_dim=24, adapter="MyAdapter")
    change(folder, attentions=attentions)
    refused("was swapped with MyAdapter, which is none of this package; give it as adapter")
    change(folder, attentions=settings["attentions"], config={**settings["config"], "num_hidden_layers": 3})
    refused("has no encoder.layer.2")
    change(folder, config=settings["config"])
    (folder / "collaborative.safetensors").write_bytes(weights[:-100])
    refused("collaborative.safetensors is damaged")
    (folder / "collaborative.safetensors").unlink()
    refused("has no collaborative.safetensors; copy the whole folder again")
    (folder / "config.json").write_text("{")
    refused("config.json is no JSON")


def test_a_class_and_an_adapter_of_ones_own(hf_model, tmp_path):
    from transformers import BertModel

    class Adapter(BERTCollaborativeAdapter):
        pass

    class Tagger(BertModel):
        def __init__(self, config):
            super().__init__(config, add_pooling_layer=False)
            self.tags = nn.Linear(config.hidden_size, 3)

        def forward(self, *args, **kwargs):
            return (self.tags(super().forward(*args, **kwargs)[0]),)

    model = Tagger(hf_model("Bert").config).eval()
    swap_to_collaborative(model, Adapter, 24, progress=False)
    save_collaborative(model, tmp_path)
    again = load_collaborative(tmp_path, model_class=Tagger, adapter=Adapter)
    assert torch.equal(outputs(again), outputs(model))
