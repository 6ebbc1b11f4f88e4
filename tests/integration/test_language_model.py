"""fairseq's commands with language models: train, resume, evaluate, generate, adaptive softmax, fusion."""

import re

import pytest
import torch
from _tools import attentions

import fairseq_collab  # noqa: F401 (lets torch.load accept fairseq's checkpoints)

LM = ("--task", "language_modeling", "--arch", "transformer_lm_collab_gpt2_tiny", "--decoder-attention-heads", 4)
FLAGS = (
    *("--optimizer", "adam", "--lr", 0.005, "--dropout", 0.0, "--max-tokens", 800, "--required-batch-size-multiple", 1),
    *("--tokens-per-sample", 32, "--num-workers", 0, "--cpu", "--log-format", "simple", "--log-interval", 1000),
)
MIXINGS = {
    "dense": ("--key-dim", 16),
    "window": ("--key-dim", 16, "--mix-layout", "window", "--mix-dim", 8),
    "picked": ("--key-dim", 18, "--mix-layout", "picked", "--mix-dim", 7),
    "concatenated": ("--collaborative-heads", "none", "--key-dim", 16),
}


@pytest.fixture(scope="module")
def train_lm(fairseq, toy_data, plugin_dir):
    def run(folder, *flags):
        return fairseq("train", toy_data, "--user-dir", plugin_dir, "--save-dir", folder, *LM, *FLAGS, *flags)

    return run


@pytest.fixture(scope="module")
def language_model(train_lm, tmp_path_factory):
    """The folder of a language model with windows whose dictionary is that of the translation models."""
    folder = tmp_path_factory.mktemp("lm")
    train_lm(folder, *MIXINGS["window"], "--max-epoch", 6, "--sample-break-mode", "eos")
    return folder


@pytest.mark.parametrize("mixing", MIXINGS)
def test_a_language_model_learns_resumes_and_is_evaluated(train_lm, fairseq, toy_data, plugin_dir, tmp_path, mixing):
    first = train_lm(tmp_path, *MIXINGS[mixing], "--max-epoch", 1)
    second = train_lm(tmp_path, *MIXINGS[mixing], "--max-epoch", 4)
    losses = dict(first.losses() + second.losses())
    assert sorted(losses) == [1, 2, 3, 4]
    assert losses[4] < losses[1]
    done = fairseq(
        "eval-lm",
        *(toy_data, "--user-dir", plugin_dir, "--path", tmp_path / "checkpoint_best.pt", "--cpu"),
        *("--gen-subset", "valid", "--tokens-per-sample", 32, "--required-batch-size-multiple", 1),
        *("--max-tokens", 800, "--num-workers", 0),
    )
    evaluated = float(re.search(r"Loss \(base 2\): ([\d.]+)", done.stdout).group(1))
    validated = min(float(loss) for loss in re.findall(r"\| valid \| .*?\| loss ([\d.]+)", second.stdout))
    assert evaluated == pytest.approx(validated, abs=0.02)


def test_adaptive_softmax_trains_and_is_evaluated(train_lm, fairseq, toy_data, plugin_dir, tmp_path):
    done = train_lm(
        tmp_path,
        *(*MIXINGS["dense"], "--adaptive-softmax-cutoff", "20,60", "--criterion", "adaptive_loss"),
        *("--ddp-backend", "legacy_ddp", "--max-epoch", 2),
    )
    losses = dict(done.losses())
    assert losses[2] < losses[1]
    done = fairseq(
        "eval-lm",
        *(toy_data, "--user-dir", plugin_dir, "--path", tmp_path / "checkpoint_best.pt", "--cpu"),
        *("--gen-subset", "valid", "--tokens-per-sample", 32, "--required-batch-size-multiple", 1, "--num-workers", 0),
    )
    assert 1 < float(re.search(r"Perplexity: ([\d.]+)", done.stdout).group(1)) < 128


def test_fusion_adds_the_language_model_to_the_beam(generate, window_model, language_model):
    path = window_model / "checkpoint_last.pt"
    alone = generate(path, "--beam", 3)
    fused = generate(path, "--beam", 3, "--lm-path", language_model / "checkpoint_best.pt", "--lm-weight", 0.5)
    assert set(fused.hypotheses()) == set(range(30))
    assert fused.lines("H") != alone.lines("H")
    ignored = generate(path, "--beam", 3, "--lm-path", language_model / "checkpoint_best.pt", "--lm-weight", 0.0)
    assert {n: words for n, (words, _) in ignored.hypotheses().items()} == {
        n: words for n, (words, _) in alone.hypotheses().items()
    }


def test_python_scores_and_continues_text(plugin, toy_data, language_model):
    from fairseq_collab.models.transformer_lm import TransformerLanguageModelCollab

    hub = TransformerLanguageModelCollab.from_pretrained(
        str(language_model), checkpoint_file="checkpoint_best.pt", data_name_or_path=str(toy_data)
    )
    line = (toy_data / "test.tgt").read_text().splitlines()[0]
    score = hub.score(line)["positional_scores"]
    assert len(score) == len(line.split()) and score.isfinite().all()
    assert hub.sample(line, beam=2, max_len_b=20).startswith(line)
    (attention,) = {module.mix_layout for module in attentions(hub.models[0]).values()}
    assert attention == "window"


def test_a_context_window_is_read_but_not_scored(fairseq, toy_data, plugin_dir, language_model):
    found = {}
    for context in (0, 16):
        done = fairseq(
            "eval-lm",
            *(toy_data, "--user-dir", plugin_dir, "--path", language_model / "checkpoint_best.pt", "--cpu"),
            *("--tokens-per-sample", 32, "--context-window", context, "--batch-size", 4, "--num-workers", 0),
        )
        tokens, bits = re.search(r"Evaluated (\d+) tokens.*?Loss \(base 2\): ([\d.]+)", done.stdout, re.DOTALL).groups()
        found[context] = float(bits), int(tokens)
    assert found[0][0] != found[16][0]
    assert found[0][0] == pytest.approx(found[16][0], abs=0.5)
    assert found[0][1] == found[16][1] > 100


def test_a_language_model_goes_on_after_a_prefix(fairseq, toy_data, plugin_dir, language_model):
    done = fairseq(
        "generate",
        *(toy_data, "--user-dir", plugin_dir, "--path", language_model / "checkpoint_best.pt", "--cpu"),
        *("--task", "language_modeling", "--tokens-per-sample", 32, "--sample-break-mode", "eos"),
        *("--prefix-size", 2, "--beam", 2, "--batch-size", 4, "--num-workers", 0, "--max-len-b", 10),
    )
    targets = done.lines("T")
    assert len(targets) == 30
    for number, (words, _) in done.hypotheses().items():
        assert words.split()[:2] == targets[number][0].split()[:2]


def test_without_a_preset_norms_stand_where_the_stock_model_has_them(fairseq, toy_data, plugin_dir, tmp_path):
    sizes = ("--decoder-layers", 1, "--decoder-attention-heads", 2, "--decoder-embed-dim", 16)
    found = {}
    for arch in ("transformer_lm", "transformer_lm_collab"):
        for more in ((), ("--decoder-normalize-before",)):
            folder = tmp_path / arch / str(len(more))
            command = (toy_data, "--user-dir", plugin_dir, "--save-dir", folder, "--task", "language_modeling", *FLAGS)
            fairseq("train", *command, "--arch", arch, *sizes, *more, "--max-epoch", 1)
            path = folder / "checkpoint_last.pt"
            fairseq("eval-lm", toy_data, "--user-dir", plugin_dir, "--path", path, "--cpu", "--tokens-per-sample", 32)
            model = torch.load(path, weights_only=True)["model"]
            found[arch, more] = "decoder.layer_norm.weight" in model
    assert list(found.values()) == [False, True, False, True]


def test_evaluating_nothing_is_no_perplexity_of_1(fairseq, toy_data, plugin_dir, language_model):
    done = fairseq(
        *("eval-lm", toy_data, "--user-dir", plugin_dir, "--path", language_model / "checkpoint_best.pt", "--cpu"),
        *("--gen-subset", "valid", "--num-workers", 0),
        check=False,
    )
    assert done.returncode == 1
    assert "fairseq_collab: error: nothing was evaluated" in done.stdout and "--tokens-per-sample" in done.stdout
    assert "Perplexity: 1.00" not in done.stdout
