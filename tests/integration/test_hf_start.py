"""How models around encoders of transformers begin: heads, dropouts, swaps, and a sentence for everything wrong."""

import json
import shutil
from argparse import Namespace

import pytest
import torch

pytest.importorskip("transformers")
import _hf as hf  # noqa: E402

from fairseq_collab.errors import CollabError  # noqa: E402

pytestmark = pytest.mark.usefixtures("plugin")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    hf.write_pairs(folder, hf.make_tokenizer("bert"), {"train": hf.pairs(40), "valid": hf.pairs(8, seed=1)})
    return folder


@pytest.fixture
def task(data):
    return hf.pair_task(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A classifier of three classes."""
    path = tmp_path_factory.mktemp("bert")
    hf.make_folder(path, "bert", "ForSequenceClassification", num_labels=3, hidden_dropout_prob=0.3)
    return path


def logits(model, task):
    with torch.no_grad():
        batch = hf.whole_batch(task)["net_input"]
        return model(**batch, features_only=True, classification_head_name=hf.HEAD)[0]


def refused(task, kind, folder, **options):
    with pytest.raises(CollabError) as error:
        hf.start(task, kind, folder, **options)
    return str(error.value)


def test_a_swap_of_the_full_width_keeps_the_logits_and_every_smaller_one_is_farther(task, folder):
    exact, found = logits(hf.start(task, "bert", folder), task), {}
    for key_dim in (32, 16, 4):
        model = hf.start(task, "bert", folder, key_dim=key_dim)
        config = json.loads(model.args.collab_config)["encoder"]
        assert [(one["key_dim"], one["mix_dim"]) for one in config] == [(key_dim, min(8, key_dim))] * 2
        found[key_dim] = (logits(model, task) - exact).norm() / exact.norm()
    assert found[32] < 1e-5 < found[16] < found[4]


def test_text_and_refinement_take_part_when_asked_and_the_seed_decides(task, folder):
    def weight(**options):
        model = hf.start(task, "bert", folder, key_dim=8, **options)
        return model.encoder.model.state_dict()["bert.encoder.layer.1.attention.self.q_proj.weight"]

    plain, text = weight(), weight(calibrate=True, calibrate_sentences=20)
    refined = weight(calibrate=True, calibrate_sentences=20, refine_steps=20)
    assert not torch.equal(plain, text) and not torch.equal(text, refined)
    assert torch.equal(refined, weight(calibrate=True, calibrate_sentences=20, refine_steps=20))


def test_dense_mixing_is_that_of_the_paper(task, folder):
    model = hf.start(task, "bert", folder, key_dim=16, mix_layout="dense")
    (one, _) = json.loads(model.args.collab_config)["encoder"]
    assert (one["mix_dim"], one["mix_layout"]) == (16, "dense")
    assert logits(model, task).isfinite().all()


@pytest.mark.parametrize(
    ("head", "config", "kept"),
    (
        ("ForSequenceClassification", {"num_labels": 3}, ["dense", "out_proj"]),
        ("ForSequenceClassification", {"num_labels": 5}, ["dense"]),
        ("ForTokenClassification", {"num_labels": 3}, []),
        ("Model", {}, ["dense"]),
        ("ForMaskedLM", {}, []),
    ),
)
def test_a_head_starts_as_far_as_the_folder_has_one(task, tmp_path, head, config, kept):
    source = hf.make_folder(tmp_path, "bert", head, **config)
    model = hf.start(task, "bert", tmp_path)
    theirs = {key.removeprefix("bert."): tensor for key, tensor in source.state_dict().items()}
    ours = model.classification_heads[hf.HEAD]
    assert len(ours.out_proj.bias) == 3
    for name, key in (("dense", "pooler.dense.weight"), ("out_proj", "classifier.weight")):
        weight = getattr(ours, name).weight
        same = key in theirs and theirs[key].shape == weight.shape and torch.equal(theirs[key], weight)
        assert same == (name in kept)
        assert same or 0.01 < weight.std() < 0.03


def test_dropouts_are_the_folders_unless_given(task, folder):
    model = hf.start(task, "bert", folder)
    layer = model.encoder.model.bert.encoder.layer[0]
    assert (layer.output.dropout.p, layer.attention.self.dropout.p) == (0.3, 0.1)
    assert model.classification_heads[hf.HEAD].dropout.p == 0.3
    model = hf.start(task, "bert", folder, dropout=0.0, attention_dropout=0.2, pooler_dropout=0.4, key_dim=8)
    layer = model.encoder.model.bert.encoder.layer[0]
    assert (layer.output.dropout.p, layer.attention.self.dropout) == (0.0, 0.2)
    assert model.classification_heads[hf.HEAD].dropout.p == 0.4


def test_heads_of_a_checkpoint_are_kept_or_dropped_as_by_roberta(task, folder):
    source, model = hf.start(task, "bert", folder), hf.start(task, "bert", folder)
    source.register_classification_head("other", 4)
    state = dict(source.state_dict())
    model.load_state_dict(state)
    assert set(model.classification_heads) == {hf.HEAD}
    model.args.load_checkpoint_heads = True
    model.load_state_dict(dict(source.state_dict()))
    assert model.classification_heads["other"].out_proj.out_features == 4


@pytest.mark.parametrize("key_dim", (None, 8), ids=("plain", "shared"))
def test_half_precision_is_as_close_as_half_precision_can_be(task, folder, key_dim):
    model = hf.start(task, "bert", folder, key_dim=key_dim)
    exact = logits(model, task)
    found = logits(model.bfloat16(), task)
    assert found.dtype == torch.bfloat16 and model.encoder.hf_ids.dtype == torch.long
    assert (found.float() - exact).norm() / exact.norm() < 0.05


def test_hidden_states_come_as_from_roberta(task, folder):
    model, batch = hf.start(task, "bert", folder, key_dim=8), hf.whole_batch(task)["net_input"]
    with torch.no_grad():
        x, extra = model(**batch, features_only=True, return_all_hiddens=True)
    assert len(extra["inner_states"]) == 3
    assert torch.equal(extra["inner_states"][-1].transpose(0, 1), x)
    assert model.max_positions() == 40


def test_tokens_that_no_dictionary_can_hold_are_named_by_their_id(tmp_path, folder):
    data = tmp_path / "data"
    hf.write_pairs(data, hf.make_tokenizer("bert"), {"valid": hf.pairs(4)})
    for path in data.glob("input*/dict.txt"):
        path.write_text(path.read_text().replace("[unused0] 1", "madeupword0001 1"))
    task = hf.pair_task(data)
    model = hf.start(task, "bert", folder)
    assert model.encoder.hf_ids[task.source_dictionary.index("madeupword0001")] == 1


def test_entries_that_fairseq_preprocess_fills_a_dictionary_up_with_are_no_tokens(tmp_path, folder):
    hf.write_pairs(tmp_path, hf.make_tokenizer("bert"), {"valid": hf.pairs(4)})
    for path in tmp_path.glob("input*/dict.txt"):
        lines = path.read_text().replace("[unused0] 1\n", "")
        path.write_text(lines + "madeupword0000 0\nmadeupword0001 0\nmadeupword0006 1\n")
    task = hf.pair_task(tmp_path)
    dictionary, hf_ids = task.source_dictionary, hf.start(task, "bert", folder).encoder.hf_ids
    unknown = hf_ids[dictionary.unk()]
    assert hf_ids[dictionary.index("ba")] == 6
    # as [PAD], as a token that the text lacks, and as one that it has
    for symbol in ("madeupword0000", "madeupword0001", "madeupword0006"):
        assert dictionary.index(symbol) != dictionary.unk() and hf_ids[dictionary.index(symbol)] == unknown


def test_relative_positions_that_transformers_no_longer_computes_are_refused(task, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "relative")
    config = json.loads((tmp_path / "relative/config.json").read_text())
    (tmp_path / "relative/config.json").write_text(json.dumps({**config, "position_embedding_type": "relative_key"}))
    if any(hasattr(one, "distance_embedding") for one in hf.start(task, "bert", folder).modules()):
        pytest.skip("this version of transformers computes them")
    message = refused(task, "bert", tmp_path / "relative")
    assert "relative has relative_key position embeddings, which the installed transformers no longer" in message


def test_folders_that_are_wrong_are_refused_in_a_sentence(task, folder, tmp_path):
    assert refused(task, "bert", None).startswith("--hf-model is missing: give the folder of a bert model")
    assert "there is no such folder" in refused(task, "bert", tmp_path / "none")
    assert "holds a bert model, and the architecture is for distilbert: give --arch bert_collab" in refused(
        task, "distilbert", folder
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no config.json" in refused(task, "bert", empty)
    (empty / "config.json").write_text("[]")
    assert "is no configuration" in refused(task, "bert", empty)
    weightless = tmp_path / "weightless"
    shutil.copytree(folder, weightless)
    (weightless / "model.safetensors").unlink()
    assert "has a configuration but no weights" in refused(task, "bert", weightless)
    (weightless / "model.safetensors").write_bytes(b"nothing of the kind")
    assert "the weights could not be loaded" in refused(task, "bert", weightless)
    wordless = tmp_path / "wordless"
    shutil.copytree(folder, wordless)
    for path in wordless.glob("*token*"):
        path.unlink()
    assert "has no tokenizer; it needs one of tokenizer.json" in refused(task, "bert", wordless)
    (wordless / "tokenizer.json").write_text("no tokenizer")
    assert "has no tokenizer that transformers can load" in refused(task, "bert", wordless)
    deeper = tmp_path / "deeper"
    shutil.copytree(folder, deeper)
    config = json.loads((deeper / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert "of the encoder's weights are not in its files" in refused(task, "bert", deeper)


def test_a_folder_of_save_collaborative_is_no_start(task, folder, tmp_path):
    from fairseq_collab import save_collaborative

    save_collaborative(hf.start(task, "bert", folder, key_dim=8).encoder.model, tmp_path / "shared")
    assert "was written by save_collaborative" in refused(task, "bert", tmp_path / "shared")


def test_a_dictionary_of_other_words_is_refused(folder, tmp_path):
    hf.write_pairs(tmp_path, hf.make_tokenizer("albert"), {"valid": hf.pairs(4)})
    message = refused(hf.pair_task(tmp_path), "bert", folder)
    assert "symbols of the data's dictionary are not in the vocabulary of" in message and "the first is" in message


def test_options_that_say_nothing_without_a_key_dim_are_refused(task, folder):
    assert "--mix-dim says how attentions are swapped" in refused(task, "bert", folder, mix_dim=8)
    assert "--calibrate says how" in refused(task, "bert", folder, calibrate=True)
    assert "needs text to train on: give --calibrate" in refused(task, "bert", folder, key_dim=8, refine_steps=9)
    assert "more than the model width 32" in refused(task, "bert", folder, key_dim=64)


def test_calibration_without_a_train_split_is_refused_in_a_sentence(folder, tmp_path):
    hf.write_pairs(tmp_path, hf.make_tokenizer("bert"), {"valid": hf.pairs(4)})
    message = refused(hf.pair_task(tmp_path), "bert", folder, key_dim=8, calibrate=True)
    assert message.startswith(f"calibration needs the train split, which {tmp_path} does not have")
    assert message.endswith("binarise one, or leave --calibrate out")


def test_a_checkpoint_decides_about_its_model(task, folder, data, tmp_path):
    model = hf.start(task, "bert", folder, key_dim=8)
    model.args.arch = model.args._name = "bert_collab"
    state = {"args": None, "cfg": {"model": model.args}, "model": model.state_dict()}
    torch.save(state, tmp_path / "saved.pt")
    begin = {"save_dir": str(tmp_path), "restore_file": str(tmp_path / "saved.pt")}
    again = hf.start(task, "bert", None, **begin)
    again.load_state_dict(model.state_dict())
    assert torch.equal(logits(again, task), logits(model, task))
    assert "ask for key_dim 16" in refused(task, "bert", folder, key_dim=16, **begin)
    assert "is a bert model; give --arch bert_collab" in refused(task, "albert", None, **begin)
    begin["restore_file"] = str(tmp_path / "none.pt")
    assert "--restore-file" in refused(task, "bert", folder, **begin)
    begin.update(restore_file="checkpoint_last.pt", finetune_from_model=str(tmp_path / "none.pt"))
    assert "--finetune-from-model" in refused(task, "bert", folder, **begin)
    hf.write_pairs(tmp_path / "data", hf.make_tokenizer("albert"), {"valid": hf.pairs(4)})
    other = hf.pair_task(tmp_path / "data")
    assert "is not the one that the checkpoint was trained with" in refused(
        other, "bert", None, save_dir=str(tmp_path), finetune_from_model=str(tmp_path / "saved.pt")
    )


def test_a_checkpoint_of_another_kind_cannot_be_continued(task, tmp_path):
    torch.save({"args": Namespace(arch="roberta"), "cfg": None, "model": {}}, tmp_path / "checkpoint_last.pt")
    assert "is a roberta model and cannot be continued as bert_collab" in refused(
        task, "bert", None, save_dir=str(tmp_path)
    )
