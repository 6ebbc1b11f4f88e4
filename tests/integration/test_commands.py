"""fairseq's commands with translation models: train, resume, fine-tune, generate, validate, average, combine, fuse.

Language models have `test_language_model.py`; what must agree in decoding is in `test_decoding.py`.
"""

import math
import re

import pytest
import torch
from _tools import DENSE, SMALL, WINDOW, assert_same_weights, attentions, key_dims, train_flags, weights_of

import fairseq_collab  # noqa: F401 (lets torch.load accept fairseq's checkpoints)

LEGACY_DDP = ("--ddp-backend", "legacy_ddp")


def state_of(path):
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def plain(generate, window_model):
    """What the window model generates from the test set with a beam of 4."""
    return generate(window_model / "checkpoint_last.pt", "--beam", 4)


@pytest.fixture(scope="module")
def train_again(fairseq, toy_data, plugin_dir):
    """Runs `fairseq-train` into a folder that may hold checkpoints already."""

    def run(folder, *flags):
        return fairseq("train", toy_data, "--user-dir", plugin_dir, "--save-dir", folder, *train_flags(), *flags)

    return run


def test_commands_in_fresh_processes_train_and_generate(run_fairseq, toy_data, plugin_dir, tmp_path):
    flags = (toy_data, "--user-dir", plugin_dir)
    run_fairseq("train", *flags, "--save-dir", tmp_path, *train_flags(), *WINDOW)
    done = run_fairseq("generate", *flags, "--path", tmp_path / "checkpoint_best.pt", "--cpu", "--num-workers", 0)
    assert re.search(r"^Generate test with beam=5: BLEU4 = ", done.stdout, re.MULTILINE)


def test_a_model_learns_and_its_loss_is_that_of_validation(fairseq, toy_data, plugin_dir, window_model, dense_model):
    for folder in (window_model, dense_model):
        done = fairseq(
            "validate",
            *(toy_data, "--user-dir", plugin_dir, "--path", folder / "checkpoint_last.pt", "--cpu"),
            *("--task", "translation", "--max-tokens", 800, "--required-batch-size-multiple", 1),
            *("--log-format", "simple"),
        )
        loss = float(re.findall(r"\| valid .*?\| loss ([\d.]+)", done.stdout)[-1])
        words = len((toy_data / "dict.tgt.txt").read_text().splitlines())
        assert loss < 0.75 * math.log2(words)
        assert loss == pytest.approx(
            float(state_of(folder / "checkpoint_last.pt")["extra_state"]["val_loss"]), abs=2e-3
        )


@pytest.mark.parametrize("layout", ["window", "picked"])
def test_training_that_is_taken_up_again_ends_where_uninterrupted_training_does(train_again, tmp_path, layout):
    flags = (*SMALL, "--key-dim", 16, "--mix-dim", 8, "--mix-layout", layout, "--dropout", 0.2, "--eval-bleu")
    flags = (*flags, "--eval-bleu-args", '{"beam": 2, "max_len_b": 8}', "--best-checkpoint-metric", "bleu")
    flags = (*flags, "--maximize-best-checkpoint-metric", "--no-epoch-checkpoints")
    whole = train_again(tmp_path / "whole", *flags, "--max-epoch", 3)
    first = train_again(tmp_path / "parts", *flags, "--max-epoch", 1)
    second = train_again(tmp_path / "parts", *flags, "--max-epoch", 3)
    assert [epoch for epoch, _ in second.losses()] == [2, 3]
    assert first.losses() + second.losses() == whole.losses()
    assert_same_weights(tmp_path / "parts" / "checkpoint_last.pt", tmp_path / "whole" / "checkpoint_last.pt")


def test_fine_tuning_starts_from_the_weights_of_the_model(train, window_model):
    source = window_model / "checkpoint_last.pt"
    folder = train("tuned", *WINDOW, "--finetune-from-model", source, "--lr", 1e-30, "--seed", 7)
    assert_same_weights(folder / "checkpoint_last.pt", source)
    updates = [
        state_of(path)["optimizer_history"][-1]["num_updates"] for path in (folder / "checkpoint_last.pt", source)
    ]
    assert updates[0] < updates[1], "the new training counts from its own start"


def test_generation_translates_every_sentence_once(plain):
    assert set(plain.hypotheses()) == set(range(30))
    unigrams = float(re.search(r"BLEU4 = [\d.]+, ([\d.]+)/", plain.stdout).group(1))
    assert unigrams > 15


def test_interactive_gives_the_hypotheses_of_generate(fairseq, toy_data, plugin_dir, window_model, plain):
    text = (toy_data / "test.src").read_text()
    for buffer in (1, 30):
        done = fairseq(
            "interactive",
            *(toy_data, "--user-dir", plugin_dir, "--path", window_model / "checkpoint_last.pt", "--cpu"),
            *("--beam", 4, "--buffer-size", buffer, "--max-tokens", 500),
            input=text,
        )
        expected, found = plain.hypotheses(), done.hypotheses()
        assert found.keys() == expected.keys()
        for number, (words, score) in expected.items():
            assert found[number][1] == pytest.approx(score, abs=1e-4)
            assert found[number][0] == words or abs(found[number][1] - score) * len(words.split()) < 1e-4


def test_python_translates_as_generate_does(plugin, toy_data, window_model, plain):
    from fairseq_collab.models.transformer import TransformerCollabModel

    hub = TransformerCollabModel.from_pretrained(
        str(window_model), checkpoint_file="checkpoint_last.pt", data_name_or_path=str(toy_data)
    )
    lines = (toy_data / "test.src").read_text().splitlines()
    found = hub.translate(lines, beam=4)
    expected = [plain.hypotheses()[number][0] for number in range(len(lines))]
    assert sum(ours == theirs for ours, theirs in zip(found, expected, strict=True)) >= len(lines) - 1


@pytest.mark.parametrize("layout", ["window", "picked"])
def test_the_average_of_checkpoints_generates(train, generate, load, tmp_path, layout):
    folder = train(
        f"averaged_{layout}", *SMALL, "--key-dim", 16, "--mix-dim", 8, "--mix-layout", layout, "--max-epoch", 2
    )
    states = [state_of(folder / f"checkpoint{epoch}.pt") for epoch in (1, 2)]
    average = {}
    for name, tensor in states[0]["model"].items():
        total = sum(state["model"][name] for state in states)
        average[name] = total / 2 if tensor.is_floating_point() else total // 2
    torch.save({**states[1], "model": average}, tmp_path / "average.pt")

    assert set(generate(tmp_path / "average.pt", "--beam", 1).hypotheses()) == set(range(30))
    first, second, model = load(folder / "checkpoint1.pt", folder / "checkpoint2.pt", tmp_path / "average.pt")
    found = [attentions(one)["cross.1"] for one in (first, second, model)]
    torch.testing.assert_close(found[2].mixing, (found[0].mixing + found[1].mixing) / 2)
    assert torch.equal(found[2].pick, found[0].pick)


def positional(finished):
    return {number: [float(x) for x in lines[0].split()] for number, lines in finished.lines("P").items()}


def test_an_ensemble_of_dense_and_window_mixing_averages_their_probabilities(generate, dense_model, window_model):
    paths = [folder / "checkpoint_last.pt" for folder in (dense_model, window_model)]
    dense, window, both = (
        positional(generate(path, "--score-reference")) for path in (*paths, ":".join(map(str, paths)))
    )
    assert dense != window
    for number, tokens in both.items():
        for ours, one, other in zip(tokens, dense[number], window[number], strict=True):
            assert ours == pytest.approx(math.log2((2**one + 2**other) / 2), abs=5e-3)
    assert len(generate(":".join(map(str, paths)), "--beam", 3).hypotheses()) == 30


def test_sampling_follows_the_seed(generate, window_model):
    flags = ("--sampling", "--sampling-topp", 0.9, "--beam", 2, "--nbest", 2)
    path = window_model / "checkpoint_last.pt"
    first, again, other = (generate(path, *flags, "--seed", seed).lines("H") for seed in (3, 3, 4))
    assert first == again != other
    assert all(len(lines) == 2 for lines in first.values())


def test_diverse_beams_differ_more_than_plain_ones(generate, window_model):
    path, flags = window_model / "checkpoint_last.pt", ("--beam", 4, "--nbest", 4)

    def first_words(*more):
        lines = generate(path, *flags, *more).lines("H").values()
        return sum(len({line.split("\t")[1].split(" ")[0] for line in four}) for four in lines)

    assert first_words("--diverse-beam-groups", 4, "--diverse-beam-strength", 2.0) > first_words() + 10


def test_diverse_beams_of_a_sentence_do_not_depend_on_its_batch(generate, window_model):
    flags = ("--beam", 4, "--nbest", 4, "--diverse-beam-groups", 2, "--diverse-beam-strength", 1.0)
    one, several = (
        generate(window_model / "checkpoint_last.pt", *flags, "--batch-size", size).lines("H") for size in (30, 4)
    )
    words = [{n: [line.split("\t")[1] for line in lines] for n, lines in found.items()} for found in (one, several)]
    assert len(words[0]) == 30
    assert words[0] == words[1]


def test_prefix_tokens_come_first_in_every_hypothesis(generate, window_model):
    done = generate(window_model / "checkpoint_last.pt", "--prefix-size", 2, "--beam", 3)
    targets = {number: lines[0].split() for number, lines in done.lines("T").items()}
    assert len(targets) == 30
    for number, (words, _) in done.hypotheses().items():
        assert words.split()[:2] == targets[number][:2]


def test_hard_alignment_points_from_every_word_to_a_source_word(generate, window_model):
    done = generate(window_model / "checkpoint_last.pt", "--print-alignment", "hard", "--beam", 2)
    sources, hypotheses = done.lines("S"), done.hypotheses()
    for number, (pairs,) in ((number, lines[:1]) for number, lines in done.lines("A").items()):
        pairs = [tuple(map(int, pair.split("-"))) for pair in pairs.split()]
        assert [target for _, target in pairs] == list(range(len(hypotheses[number][0].split())))
        assert all(0 <= source <= len(sources[number][0].split()) for source, _ in pairs)


def test_soft_alignment_gives_weights_that_add_up_to_1(generate, dense_model):
    done = generate(dense_model / "checkpoint_last.pt", "--print-alignment", "soft", "--beam", 2)
    assert set(done.lines("A")) == set(range(30))
    for number, (line, *_) in done.lines("A").items():
        rows = [[float(weight) for weight in row.split(",")] for row in line.split()]
        assert all(len(row) == len(done.lines("S")[number][0].split()) + 1 for row in rows)
        assert all(sum(row) == pytest.approx(1, abs=1e-4) for row in rows)


def test_retained_dropout_reaches_the_attention(generate, window_model, plain):
    flags = ("--beam", 4, "--retain-dropout", "--retain-dropout-modules", "MultiheadAttention")
    dropout = ("--model-overrides", "{'attention_dropout': 0.5}")
    path = window_model / "checkpoint_last.pt"
    assert generate(path, "--beam", 4, *dropout).lines("H") == plain.lines("H")
    assert generate(path, *flags, *dropout).lines("H") != plain.lines("H")


def test_half_precision_decodes_nearly_as_full_precision(generate, window_model):
    path = window_model / "checkpoint_last.pt"
    full, half = (positional(generate(path, "--score-reference", *flags)) for flags in ((), ("--fp16",)))
    assert full != half
    for number, tokens in full.items():
        assert half[number] == pytest.approx(tokens, abs=0.1)


def test_constrained_decoding_keeps_the_words_asked_for(fairseq, toy_data, plugin_dir, window_model):
    word = (toy_data / "test.tgt").read_text().split()[0]
    done = fairseq(
        "interactive",
        *(toy_data, "--user-dir", plugin_dir, "--path", window_model / "checkpoint_last.pt", "--cpu"),
        *("--constraints", "--beam", 4),
        input=f"{(toy_data / 'test.src').read_text().splitlines()[0]}\t{word}\n",
    )
    assert word in done.hypotheses()[0][0].split()


@pytest.mark.parametrize(
    "flags",
    [
        (*WINDOW, "--amp"),
        (*WINDOW, "--memory-efficient-fp16"),
        (*SMALL, "--key-dim", 16, "--mix-dim", 8, "--mix-layout", "picked", "--quant-noise-pq", 0.1),
        (*WINDOW, "--cross-self-attention"),
        (*DENSE, "--no-cross-attention"),
        (*WINDOW, "--no-cross-attention", "--cross-self-attention"),
        (*SMALL, "--key-dim", 16, "--collaborative-heads", "none"),
        (*WINDOW, "--collaborative-heads", "encoder_cross"),
        (*WINDOW, "--encoder-normalize-before", "--decoder-normalize-before", "--layernorm-embedding"),
        (*WINDOW, "--adaptive-softmax-cutoff", "20,60", "--criterion", "adaptive_loss", *LEGACY_DDP),
    ],
    ids=lambda flags: "_".join(str(flag) for flag in flags if str(flag).startswith("--"))[-60:],
)
def test_a_model_trains_and_generates_with(fairseq, toy_data, plugin_dir, generate, tmp_path, flags):
    shared = train_flags()
    if "--adaptive-softmax-cutoff" in flags:
        shared = tuple(flag for flag in shared if flag != "--share-all-embeddings")
    block = ("--quant-noise-pq-block-size", 4) if "--quant-noise-pq" in flags else ()
    done = fairseq(
        "train", toy_data, "--user-dir", plugin_dir, "--save-dir", tmp_path, *shared, *flags, *block, "--max-epoch", 2
    )
    losses = dict(done.losses())
    assert losses[2] < losses[1]
    assert len(generate(tmp_path / "checkpoint_last.pt", "--beam", 2, "--max-len-b", 5).hypotheses()) == 30


@pytest.mark.parametrize("flags", [WINDOW, DENSE], ids=["window", "dense"])
def test_activation_checkpointing_changes_nothing_but_memory(train, flags):
    flags = (*flags, "--attention-dropout", 0.2)
    paths = [train(name, *flags, *more) for name, more in (("plain", ()), ("again", ("--checkpoint-activations",)))]
    plain, recomputed = (weights_of(path / "checkpoint_last.pt") for path in paths)
    assert plain.keys() == recomputed.keys()
    learning_rate = train_flags()[train_flags().index("--lr") + 1]
    for name in plain:
        # gradients add up in another order, as in stock fairseq; other dropout would move weights by whole updates
        torch.testing.assert_close(plain[name], recomputed[name], rtol=0, atol=learning_rate / 100)


def test_layers_to_keep_keep_their_own_key_dims(train, generate, load, tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"encoder": [{"key_dim": 16}, {"key_dim": 24}, {"key_dim": 32}], "cross": {"key_dim": 16}}')
    folder = train("layerdrop", *SMALL, "--encoder-layers", 3, "--encoder-layerdrop", 0.3, "--collab-config", config)
    path = folder / "checkpoint_last.pt"
    kept = {"encoder_layers_to_keep": "2,1", "decoder_layers_to_keep": "1"}
    assert len(generate(path, "--model-overrides", repr(kept), "--beam", 2).hypotheses()) == 30
    (whole,), (pruned,) = load(path), load(path, **kept)
    assert key_dims(pruned) == {"encoder.0": 24, "encoder.1": 32, "cross.0": 16, "decoder.0": 64}
    for ours, theirs in (("encoder.0", "encoder.1"), ("encoder.1", "encoder.2"), ("cross.0", "cross.1")):
        assert torch.equal(attentions(pruned)[ours].mixing, attentions(whole)[theirs].mixing)


def test_training_goes_on_with_the_layers_to_keep(train_again, load, tmp_path):
    train_again(tmp_path / "whole", *WINDOW, "--encoder-layers", 3)
    whole = tmp_path / "whole" / "checkpoint_last.pt"
    flags = (*WINDOW, "--encoder-layers", 3, "--encoder-layers-to-keep", "0,2")
    flags = (*flags, "--decoder-layers-to-keep", "0,1", "--finetune-from-model", whole)
    train_again(tmp_path / "kept", *flags, "--lr", 1e-30)
    (model,) = load(tmp_path / "kept" / "checkpoint_last.pt")
    (source,) = load(whole)
    assert [name for name in attentions(model) if name.startswith("encoder")] == ["encoder.0", "encoder.1"]
    assert torch.equal(attentions(model)["encoder.1"].mixing, attentions(source)["encoder.2"].mixing)


def test_a_moving_average_of_the_weights_is_kept_and_taken_up_again(train_again, tmp_path):
    flags = (*WINDOW, "--store-ema", "--ema-decay", 0.5, "--ema-fp32")
    train_again(tmp_path, *flags)
    name = "encoder.layers.0.self_attn.mixing"
    state = state_of(tmp_path / "checkpoint_last.pt")
    average = state["extra_state"]["ema"][name]
    assert not torch.equal(average, state["model"][name])
    torch.testing.assert_close(average, state["model"][name], atol=0.1, rtol=0)
    done = train_again(tmp_path, *flags, "--max-epoch", 2)
    assert [epoch for epoch, _ in done.losses()] == [2]
