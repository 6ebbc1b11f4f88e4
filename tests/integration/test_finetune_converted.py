"""Training goes on from a converted checkpoint, in both ways that fairseq knows, and only with flags that fit it."""

import pytest
from _tools import HEADS, SMALL, train_flags, weights_of

from fairseq_collab.cli.convert import main

RESET = ("--reset-optimizer", "--reset-lr-scheduler", "--reset-dataloader", "--reset-meters")
LR = 0.002


@pytest.fixture(scope="module")
def converted(train, tmp_path_factory):
    """A stock model of a few epochs, converted to 24 shared dims of which each head picks 16."""
    stock = train("stock", "--arch", "transformer_tiny", *HEADS, "--max-epoch", 4) / "checkpoint_last.pt"
    output = tmp_path_factory.mktemp("converted") / "converted.pt"
    assert main(["--path", str(stock), "--output", str(output), "--key-dim", "24"]) == 0
    return output


@pytest.fixture
def tune(fairseq, toy_data, plugin_dir, tmp_path):
    """`tune(FLAG, ...)` trains into an empty folder."""

    def run(*flags, check=True):
        command = ("train", toy_data, "--user-dir", plugin_dir, "--save-dir", tmp_path / "tuned", *train_flags())
        return fairseq(*command, "--lr", LR, *flags, check=check)

    return run


@pytest.fixture
def refused(tune, tmp_path):
    """As `tune`, for a training that must end with one sentence and leave nothing; returns the sentence."""

    def run(*flags):
        done = tune(*flags, check=False)
        assert done.returncode != 0 and "Traceback" not in done.stdout
        assert not list((tmp_path / "tuned").glob("*"))
        sentence = done.stdout.strip().splitlines()[-1]
        assert sentence.startswith("fairseq_collab: error: ")
        return sentence

    return run


def start(way, checkpoint):
    return ("--finetune-from-model", checkpoint) if way == "finetune" else ("--restore-file", checkpoint, *RESET)


@pytest.mark.parametrize("way", ("finetune", "restore"))
def test_training_starts_from_the_converted_weights_and_goes_on(tune, converted, tmp_path, way):
    flags = (*SMALL, "--collab-config", converted, *start(way, converted), "--max-epoch", 6)
    done = tune(*flags, "--save-interval-updates", 1, "--no-epoch-checkpoints")
    epochs, losses = zip(*done.losses(), strict=True)
    assert epochs == (1, 2, 3, 4, 5, 6)
    assert losses[-1] < 0.9 * losses[0]
    before, first = weights_of(converted), weights_of(tmp_path / "tuned" / "checkpoint_1_1.pt")
    assert before.keys() == first.keys()
    moved = {key: (first[key] - before[key]).abs().max() for key in before}
    # the first step of Adam changes no parameter by more than the learning rate
    assert max(moved.values()) <= 1.001 * LR
    changed = {key.rpartition(".")[2] for key, by in moved.items() if by > 0}
    assert {"weight", "bias", "mixing", "query_bias"} <= changed and "pick" not in changed


def test_fine_tuning_that_is_taken_up_goes_on_where_it_stopped(tune, converted):
    flags = (*SMALL, "--collab-config", converted, *start("finetune", converted), "--no-epoch-checkpoints")
    losses = tune(*flags, "--max-epoch", 2).losses()
    more = tune(*flags, "--max-epoch", 3).losses()
    assert [epoch for epoch, _ in losses + more] == [1, 2, 3]
    assert more[0][1] < losses[0][1]


RIGHT = "give --key-dim 24 --mix-dim 16 --mix-layout picked, or the checkpoint itself to --collab-config"


@pytest.mark.parametrize(
    ("way", "flags", "wrong", "right"),
    (
        ("restore", (), "key dim is 24 in the checkpoint and 16 in the model", RIGHT),
        ("finetune", ("--key-dim", 24), "mix dim is 16 in the checkpoint and 24", "--mix-dim 16 --mix-layout picked"),
        (
            "restore",
            ("--key-dim", 24, "--mix-dim", 16),
            "mix layout is picked in the checkpoint and window",
            "picked, ",
        ),
        (
            *("finetune", ("--key-dim", 24, "--collaborative-heads", "encoder_cross", "--decoder-key-dim", 64)),
            "the checkpoint has collaborative heads and the model concatenated heads",
            "repeat its --collaborative-heads encoder_cross_decoder, or give the checkpoint itself to --collab-config",
        ),
        (
            *("restore", ("--arch", "transformer_tiny")),
            "the checkpoint has collaborative heads and the model concatenated heads",
            "fairseq-collab-convert --to-concatenated",
        ),
    ),
    ids=("no flags", "key dim only", "other layout", "other heads", "stock architecture"),
)
def test_flags_of_another_model_are_refused_with_those_of_this_one(refused, converted, way, flags, wrong, right):
    told = refused(*SMALL, *flags, *start(way, converted))
    assert f"{converted}: " in told and wrong in told and right in told


@pytest.mark.parametrize(
    ("flags", "wrong"),
    (
        (("--key-dim", 16), "key_dim 16 in the encoder attention of layer 0"),
        (("--mix-dim", 8), "mix_dim 8"),
        (("--collaborative-heads", "cross"), "collaborative False in the encoder attention"),
    ),
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_flags_beside_the_configuration_of_the_checkpoint_must_agree(refused, converted, flags, wrong):
    told = refused(*SMALL, "--collab-config", converted, *start("restore", converted), *flags)
    assert wrong in told and "leave the option out" in told


@pytest.mark.parametrize(
    ("flags", "expected"),
    (
        (("--finetune-from-model", "gone.pt"), "--finetune-from-model gone.pt does not exist"),
        (("--finetune-from-model", "gone.pt", "--reset-optimizer"), "can not be set together with"),
        (("--finetune-from-model", "a.pt", "--restore-file", __file__), "can not be specified together"),
    ),
    ids=("missing", "with resets", "both ways"),
)
def test_a_start_that_cannot_be_is_told_in_a_sentence(refused, flags, expected):
    assert refused(*SMALL, *flags).count(expected) == 1
