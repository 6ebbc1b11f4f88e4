"""BART with collaborative attention: pretraining, fine-tuning to translate and to classify, beams."""

import re

import pytest
import torch
from _tools import (
    SMALL_ENCODER,
    attentions,
    build,
    classifier_flags,
    denoising_flags,
    shaken,
    train_flags,
)

import fairseq_collab  # noqa: F401 (lets torch.load accept fairseq's checkpoints)
from fairseq_collab.errors import CollabError

SIZES = (*SMALL_ENCODER, "--decoder-layers", 2, "--decoder-attention-heads", 4)
POSITIONS = ("--max-source-positions", 64, "--max-target-positions", 64)
BART = ("--arch", "bart_collab_base")
MIXINGS = {
    "dense": ("--key-dim", 16),
    "window": ("--key-dim", 16, "--mix-layout", "window", "--mix-dim", 8),
    "picked": ("--key-dim", 18, "--mix-layout", "picked", "--mix-dim", 7),
}


@pytest.fixture(scope="module")
def train_bart(fairseq, toy_data, plugin_dir):
    def run(folder, *flags, data=toy_data, base=None, check=True):
        base = denoising_flags() if base is None else base
        command = (data, "--user-dir", plugin_dir, "--save-dir", folder, *BART, *base, *flags)
        return fairseq("train", *command, check=check)

    return run


@pytest.fixture(scope="module")
def pretrained(train_bart, tmp_path_factory):
    """The folder of a denoising model with windows."""
    folder = tmp_path_factory.mktemp("pretrained")
    train_bart(folder, *MIXINGS["window"], "--max-epoch", 6)
    return folder


@pytest.fixture(scope="module", params=("bart_collab_base", "mbart_collab_base"))
def translator(request, train_bart, tmp_path_factory):
    """The checkpoint of a model trained to translate."""
    folder = tmp_path_factory.mktemp("translator")
    flags = ("--arch", request.param, *SIZES, *POSITIONS, *MIXINGS["window"])
    train_bart(folder, *flags, base=train_flags())
    return shaken(folder / "checkpoint_last.pt")


@pytest.mark.parametrize("mixing", MIXINGS)
def test_a_denoising_model_learns_reloads_and_goes_on(train_bart, load, tmp_path, mixing):
    first = train_bart(tmp_path, *MIXINGS[mixing], "--max-epoch", 1)
    second = train_bart(tmp_path, *MIXINGS[mixing], "--max-epoch", 4)
    losses = dict(first.losses() + second.losses())
    assert sorted(losses) == [1, 2, 3, 4]
    assert losses[4] < losses[1]
    (model,) = load(tmp_path / "checkpoint_last.pt")
    found = attentions(model)
    assert len(found) == 6
    assert {module.key_dim for module in found.values()} == {MIXINGS[mixing][1]}


def test_a_denoising_model_is_fine_tuned_to_translate(train_bart, generate, pretrained, tmp_path):
    """The embedding of <mask>, which translation does not know, is left out on the way."""
    path = pretrained / "checkpoint_last.pt"
    flags = (*SIZES, *POSITIONS, "--collab-config", path, "--finetune-from-model", path, "--max-epoch", 3)
    base = [flag for flag in train_flags() if flag != "--share-all-embeddings"]
    done = train_bart(tmp_path, *flags, base=base)
    losses = dict(done.losses())
    assert losses[3] < losses[1]
    assert len(generate(tmp_path / "checkpoint_last.pt", "--beam", 4).hypotheses()) == 30


def test_a_classifier_is_fine_tuned_and_predicts_alike_when_reloaded(
    plugin, train_bart, toy_classes, pretrained, tmp_path
):
    from fairseq_collab.models.bart import BARTCollabModel

    path = pretrained / "checkpoint_last.pt"
    flags = (*SIZES, "--collab-config", path, "--finetune-from-model", path, "--add-prev-output-tokens")
    base = (*classifier_flags(), *POSITIONS, "--max-positions", 64, "--lr", 0.002)
    done = train_bart(tmp_path, *flags, "--max-epoch", 6, data=toy_classes, base=base)
    losses = dict(done.losses())
    assert losses[6] < losses[1]
    state = torch.load(tmp_path / "checkpoint_last.pt")["model"]
    hubs = [
        BARTCollabModel.from_pretrained(str(tmp_path), "checkpoint_last.pt", str(toy_classes), bpe="characters").eval()
        for _ in range(2)
    ]
    tokens = torch.tensor([0, 5, 6, 7, 2])
    head = "sentence_classification_head"
    scores = [one.predict(head, tokens) for one in hubs]
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=0)
    own = hubs[0].model.classification_heads[head].out_proj.weight
    assert torch.equal(own, state[f"classification_heads.{head}.out_proj.weight"])
    layers = hubs[0].extract_features(tokens.unsqueeze(0), return_all_hiddens=True)
    assert [layer.shape for layer in layers] == [(1, 5, 64)] * 3


@pytest.mark.parametrize("size", (1, 7))
def test_beams_share_the_keys_of_their_sentence_and_find_the_same(generate, translator, size):
    """fairseq tells BART's encoder attentions how many beams there are, and then encodes each sentence once."""
    found = generate(translator, "--beam", 4, "--batch-size", size, "--max-len-b", 20).hypotheses()
    other = generate(translator, "--beam", 4, "--batch-size", 30, "--max-len-b", 20).hypotheses()
    assert {n: text for n, (text, _) in found.items()} == {n: text for n, (text, _) in other.items()}
    assert len({text for text, _ in found.values()}) > 10


def test_set_beam_size_reaches_the_attention_and_changes_no_hypothesis(plugin, load, toy_data, translator):
    from fairseq.data import Dictionary
    from fairseq.sequence_generator import SequenceGenerator

    (model,) = load(translator)
    dictionary = Dictionary.load(str(toy_data / "dict.tgt.txt"))
    source = torch.randint(4, 24, (3, 6), generator=torch.Generator().manual_seed(2))
    source[1, :2] = dictionary.pad()
    sample = {"net_input": {"src_tokens": source, "src_lengths": source.ne(dictionary.pad()).sum(1)}}
    generator = SequenceGenerator([model], dictionary, beam_size=4, max_len_b=10)

    def hypotheses():
        with torch.no_grad():
            return [[hypo["tokens"].tolist() for hypo in hypos] for hypos in generator(sample)]

    assert {layer.encoder_attn.beam_size for layer in model.decoder.layers} == {4}
    told = hypotheses()
    model.set_beam_size(1)
    del model.encoder.reorder_encoder_out  # back to the method, which repeats what was encoded for every beam
    assert hypotheses() == told


@pytest.mark.parametrize(
    ("flags", "sentence"),
    (
        (("--cross-key-dim", 65), "The key dim of the cross attention of layer 0 is 65, more than the model width 64"),
        (("--collaborative-heads", "encoder,crss"), "--collaborative-heads has 'crss'"),
        (("--decoder-layers-to-keep", "3"), "--decoder-layers-to-keep is '3'"),
    ),
)
def test_mistakes_are_told_in_a_sentence(plugin, flags, sentence):
    with pytest.raises(CollabError, match=re.escape(sentence)):
        build(plugin, (*BART, *SIZES, *flags))


def test_flags_that_contradict_the_checkpoint_are_refused(train_bart, pretrained, tmp_path):
    path = pretrained / "checkpoint_last.pt"
    for flags, sentence in (
        (("--key-dim", 24, "--restore-file", path), "key dim is 16 in the checkpoint and 24 in the model"),
        (("--collab-config", path, "--cross-key-dim", 24), "key_dim 24 in the cross attention of layer 0"),
        (("--arch", "bart_base", "--restore-file", path), "fairseq-collab-convert --to-concatenated"),
    ):
        done = train_bart(tmp_path, *flags, "--reset-optimizer", check=False)
        assert done.returncode != 0 and "Traceback" not in done.stdout
        assert sentence in done.stdout.strip().splitlines()[-1]


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("mixing", MIXINGS)
def test_a_scripted_model_gives_the_same_outputs(plugin, mixing):
    model = build(plugin, (*BART, *SIZES, *MIXINGS[mixing])).eval()
    source = torch.randint(4, 20, (2, 6), generator=torch.Generator().manual_seed(1))
    inputs = source, torch.tensor([6, 6]), source.roll(1, 1)
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.script(model)(*inputs)[0], model(*inputs)[0])
