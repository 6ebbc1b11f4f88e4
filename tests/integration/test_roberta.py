"""RoBERTa with collaborative attention: pretraining, fine-tuning with heads, and the hub interface."""

import re

import pytest
import torch
from _tools import SMALL_ENCODER, attentions, build, classifier_flags, encoder_flags

import fairseq_collab  # noqa: F401 (lets torch.load accept fairseq's checkpoints)
from fairseq_collab.errors import CollabError

ROBERTA = ("--arch", "roberta_collab")
MIXINGS = {
    "dense": ("--key-dim", 16),
    "window": ("--key-dim", 16, "--mix-layout", "window", "--mix-dim", 8),
    "picked": ("--key-dim", 18, "--mix-layout", "picked", "--mix-dim", 7),
    "concatenated": ("--collaborative-heads", "none", "--key-dim", 16),
}
DESCRIBED = ("--task", "masked_lm", *ROBERTA, *SMALL_ENCODER, "--tokens-per-sample", 32)
HEAD = "sentence_classification_head"


@pytest.fixture(scope="module")
def train_roberta(fairseq, toy_data, plugin_dir):
    def run(folder, *flags, data=toy_data, base=None, check=True):
        base = encoder_flags() if base is None else base
        command = (data, "--user-dir", plugin_dir, "--save-dir", folder, *ROBERTA, *base, *flags)
        return fairseq("train", *command, check=check)

    return run


@pytest.fixture(scope="module")
def pretrained(train_roberta, tmp_path_factory):
    """The folder of a masked language model with windows."""
    folder = tmp_path_factory.mktemp("pretrained")
    train_roberta(folder, *MIXINGS["window"], "--max-epoch", 12)
    return folder


@pytest.fixture(scope="module")
def classifier(train_roberta, toy_classes, pretrained, tmp_path_factory):
    """The folder of a classifier made from `pretrained`, and what its training printed."""
    folder = tmp_path_factory.mktemp("classifier")
    flags = ("--collab-config", pretrained / "checkpoint_last.pt", "--max-epoch", 8, "--lr", 0.002)
    flags = (*flags, "--finetune-from-model", pretrained / "checkpoint_last.pt")
    done = train_roberta(folder, *flags, data=toy_classes, base=classifier_flags())
    return folder, done


def hub(folder, data):
    """The model of a folder as users of fairseq's hub get it, with words separated by spaces."""
    from fairseq_collab.models.roberta import RobertaCollabModel

    class Words:
        @staticmethod
        def encode(text):
            return text.strip()

        @staticmethod
        def decode(text):
            return f" {text.strip()}"

    found = RobertaCollabModel.from_pretrained(str(folder), "checkpoint_last.pt", str(data), bpe="characters").eval()
    found.bpe = Words
    return found


def valid_losses(finished):
    return [float(loss) for loss in re.findall(r"\| valid \| .*?\| loss ([\d.]+)", finished.stdout)]


@pytest.mark.parametrize("mixing", MIXINGS)
def test_a_masked_language_model_learns_reloads_and_goes_on(
    train_roberta, fairseq, toy_data, plugin_dir, tmp_path, mixing
):
    first = train_roberta(tmp_path, *MIXINGS[mixing], "--max-epoch", 1)
    second = train_roberta(tmp_path, *MIXINGS[mixing], "--max-epoch", 4)
    losses = dict(first.losses() + second.losses())
    assert sorted(losses) == [1, 2, 3, 4]
    assert losses[4] < losses[1]
    done = fairseq(
        *("validate", toy_data, "--user-dir", plugin_dir, "--path", tmp_path / "checkpoint_last.pt", "--cpu"),
        *("--task", "masked_lm", "--criterion", "masked_lm", "--max-tokens", 800, "--num-workers", 0),
        *("--sample-break-mode", "eos", "--tokens-per-sample", 32, "--required-batch-size-multiple", 1),
    )
    # of other masks than those of the training's own validation
    assert float(re.findall(r"\| loss ([\d.]+)", done.stdout)[-1]) == pytest.approx(valid_losses(second)[-1], abs=0.4)


def test_a_classifier_is_fine_tuned_and_predicts_alike_when_reloaded(plugin, toy_classes, classifier):
    folder, done = classifier
    losses = dict(done.losses())
    assert losses[8] < 0.8 * losses[1]
    one, other = (hub(folder, toy_classes) for _ in range(2))
    assert list(one.model.classification_heads) == [HEAD]
    right = 0
    lines = (toy_classes / "input0" / "dict.txt").read_text()
    words = [line.split()[0] for line in lines.splitlines() if not line.startswith("madeup")]
    for word in words:
        tokens = one.encode(word)
        scores = one.predict(HEAD, tokens)
        torch.testing.assert_close(other.predict(HEAD, tokens), scores, rtol=0, atol=0)
        label = one.task.label_dictionary.string(scores.argmax(-1) + one.task.label_dictionary.nspecial)
        right += label == ("vowel" if word[0] in "aei" else "other")
    assert right > 0.8 * len(words)


def test_a_head_that_was_added_by_hand_comes_back_from_a_file(plugin, toy_data, pretrained, tmp_path):
    first = hub(pretrained, toy_data)
    first.register_classification_head("mine", num_classes=3)
    state = torch.load(pretrained / "checkpoint_last.pt")
    state["model"] = first.model.state_dict()
    torch.save(state, tmp_path / "checkpoint_last.pt")
    again = hub(tmp_path, toy_data)
    tokens = first.encode("bax dex fix")
    first.eval()
    torch.testing.assert_close(again.predict("mine", tokens), first.predict("mine", tokens), rtol=0, atol=0)


def test_features_of_every_layer_and_masks_filled(plugin, toy_data, pretrained):
    model = hub(pretrained, toy_data)
    line = (toy_data / "test.tgt").read_text().splitlines()[0]
    tokens = model.encode(line)
    features = model.extract_features(tokens)
    layers = model.extract_features(tokens, return_all_hiddens=True)
    assert features.shape == (1, len(line.split()) + 2, 64)
    assert len(layers) == 3
    torch.testing.assert_close(layers[-1], features)
    words = line.split()
    filled = model.fill_mask(" ".join([*words[:1], "<mask>", *words[2:]]), topk=3)
    assert len(filled) == 3
    text, probability, word = filled[0]
    assert text.split() == [*words[:1], *word.split(), *words[2:]] and 0 < probability < 1


def test_padding_changes_no_features(plugin, toy_data, pretrained):
    model = hub(pretrained, toy_data).model
    short, long = (torch.randint(4, 40, (length,)) for length in (5, 9))
    batch = torch.full((2, 9), 1)
    batch[0, :5], batch[1] = short, long
    with torch.no_grad():
        padded, _ = model(batch, features_only=True)
        alone, _ = model(short.unsqueeze(0), features_only=True)
    torch.testing.assert_close(padded[0, :5], alone[0])


def test_every_attention_runs_our_forward_in_eval_mode(plugin, monkeypatch):
    from fairseq_collab.fairseq_modules.multihead_attention import CollaborativeMultiheadAttention

    called = []
    forward = CollaborativeMultiheadAttention.forward
    monkeypatch.setattr(
        CollaborativeMultiheadAttention,
        "forward",
        lambda self, *args, **kwargs: called.append(self) or forward(self, *args, **kwargs),
    )
    model = build(plugin, DESCRIBED).eval()
    with torch.no_grad():
        model(torch.randint(4, 20, (2, 6)))
    assert sorted(map(id, called)) == sorted(map(id, attentions(model).values()))


@pytest.mark.parametrize("init", ("concatenate", "all_ones", "uniform", "noisy"))
def test_bert_s_initialisation_leaves_the_mixing_as_asked(plugin, init):
    from fairseq_collab.attention import CollaborativeAttention

    flags = (*DESCRIBED, "--key-dim", 64, "--mixing-init", init)
    for module in attentions(build(plugin, flags)).values():
        asked = CollaborativeAttention(64, 4, 64, mixing_init=init)
        assert module.mixing.mean().item() == pytest.approx(asked.mixing.mean().item(), abs=0.15)
        assert module.mixing.std().item() == pytest.approx(asked.mixing.std().item(), abs=0.1)
        assert not module.query_bias.any()
        assert module.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_layers_to_keep_keep_their_own_key_dims(train_roberta, load, toy_data, tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"encoder": [{"key_dim": 16}, {"key_dim": 24}]}')
    train_roberta(tmp_path, "--collab-config", config)
    (model,) = load(tmp_path / "checkpoint_last.pt", encoder_layers_to_keep="1")
    assert {name: module.key_dim for name, module in attentions(model).items()} == {"encoder.0": 24}
    tuned = tmp_path / "tuned"
    flags = ("--encoder-layers-to-keep", "1", "--collab-config", config)
    train_roberta(tuned, *flags, "--finetune-from-model", tmp_path / "checkpoint_last.pt")
    (model,) = load(tuned / "checkpoint_last.pt")
    assert {name: module.key_dim for name, module in attentions(model).items()} == {"encoder.0": 24}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    (
        (("--key-dim", 65), "The key dim of the encoder attention of layer 0 is 65, more than the model width 64"),
        (("--collaborative-heads", "encodre"), "--collaborative-heads has 'encodre'"),
        (("--mha-heads-to-keep", 2), "--mha-heads-to-keep prunes heads"),
        (("--mha-reg-scale-factor", 0.1), "--mha-reg-scale-factor regularises separate heads"),
        (("--encoder-layers-to-keep", "0,2"), "--encoder-layers-to-keep is '0,2'; it takes numbers from 0 to 1"),
    ),
)
def test_mistakes_are_told_in_a_sentence(plugin, flags, sentence):
    with pytest.raises(CollabError, match=re.escape(sentence)):
        build(plugin, (*DESCRIBED, *flags))


def test_flags_that_contradict_the_checkpoint_are_refused(train_roberta, pretrained, tmp_path):
    path = pretrained / "checkpoint_last.pt"
    for flags, sentence in (
        (("--key-dim", 24, "--restore-file", path), "key dim is 16 in the checkpoint and 24 in the model"),
        (("--collab-config", path, "--key-dim", 24), "key_dim 24 in the encoder attention of layer 0"),
        (("--arch", "roberta", "--restore-file", path), "fairseq-collab-convert --to-concatenated"),
    ):
        done = train_roberta(tmp_path, *flags, "--reset-optimizer", check=False)
        assert done.returncode != 0 and "Traceback" not in done.stdout
        assert sentence in done.stdout.strip().splitlines()[-1]


def test_other_positions_than_the_checkpoint_s_are_told_with_the_flag(train_roberta, toy_classes, classifier, tmp_path):
    path = classifier[0] / "checkpoint_last.pt"
    for way in ("--finetune-from-model", "--restore-file"):
        flags = ("--collab-config", path, "--max-positions", 20, way, path)
        done = train_roberta(tmp_path, *flags, data=toy_classes, base=classifier_flags(), check=False)
        told = done.stdout.strip().splitlines()[-1]
        assert done.returncode != 0 and "Traceback" not in done.stdout
        assert "positions at encoder.sentence_encoder.embed_positions and the model 20: give --max-positions" in told
        right = int(told.rpartition(" ")[2])
    assert right == torch.load(path)["model"]["encoder.sentence_encoder.embed_positions.weight"].size(0) - 2
    flags = ("--collab-config", path, "--max-positions", right, "--finetune-from-model", path, "--max-epoch", 1)
    train_roberta(tmp_path, *flags, data=toy_classes, base=classifier_flags())


def test_an_old_checkpoint_with_ordinary_heads_is_sent_to_the_converter(plugin):
    model = build(plugin, DESCRIBED)
    stock = build(plugin, (*DESCRIBED, "--collaborative-heads", "none"))
    old = {key.replace("encoder.", "decoder.", 1): tensor for key, tensor in stock.state_dict().items()}
    with pytest.raises(CollabError, match="fairseq-collab-convert --path IN.pt"):
        model.load_state_dict(dict(old))
    stock.load_state_dict(dict(old))


def test_dropping_layers_and_quantisation_noise_train(train_roberta, tmp_path):
    flags = ("--encoder-layerdrop", 0.3, "--quant-noise-pq", 0.1, "--max-epoch", 2, *MIXINGS["window"])
    losses = dict(train_roberta(tmp_path, *flags).losses())
    assert losses[2] < losses[1]


def test_hydra_s_configuration_builds_the_preset_and_keeps_what_was_built(plugin):
    from fairseq.data import Dictionary
    from fairseq.models import build_model
    from omegaconf import OmegaConf

    class Task:
        source_dictionary = target_dictionary = Dictionary()

    cfg = OmegaConf.create({"_name": "roberta_collab", "key_dim": 24, "max_positions": 16, "encoder_layers": 2})
    model = build_model(cfg, Task)
    assert {name: module.key_dim for name, module in attentions(model).items()} == {"encoder.0": 24, "encoder.1": 24}
    assert model.encoder.sentence_encoder.embed_tokens.embedding_dim == 768 and model.max_positions() == 16
    assert '"key_dim": 24' in cfg.collab_config


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_model_gives_the_same_logits(plugin):
    model = build(plugin, (*DESCRIBED, *MIXINGS["window"])).eval()
    encoder = model.encoder.sentence_encoder
    tokens = torch.randint(4, 20, (2, 6))
    with torch.no_grad():
        found = torch.jit.script(encoder)(tokens)["encoder_out"][0]
        torch.testing.assert_close(found, encoder(tokens)["encoder_out"][0])
