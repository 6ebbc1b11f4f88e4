"""Encoders of transformers trained by fairseq's own commands: saved, resumed, validated, swapped when they start."""

import re
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
import _hf as hf  # noqa: E402

FLAGS = (
    *("--optimizer", "adam", "--lr", 0.001, "--batch-size", 8, "--cpu", "--num-workers", 0, "--log-format", "simple"),
    *("--log-interval", 1000, "--seed", 3, "--required-batch-size-multiple", 1),
)
CLASSIFY = (
    *("--task", "sentence_prediction", "--criterion", "sentence_prediction", "--num-classes", 3, "--init-token", 0),
    *("--max-positions", 40),
)
MASKED = ("--task", "masked_lm", "--criterion", "masked_lm", "--sample-break-mode", "eos", "--tokens-per-sample", 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`folder(KIND)` is a folder of a tiny classifier of three classes, made once."""
    made = {}

    def get(kind: str = "bert") -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(f"{kind}_model")
            hf.make_folder(made[kind], kind, "ForSequenceClassification", num_labels=3)
        return made[kind]

    return get


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """`data(KIND)` has pairs of sentences for `sentence_prediction` and, in `text`, single ones for `masked_lm`."""
    made = {}

    def get(kind: str = "bert") -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(f"{kind}_data")
            tokenizer = hf.make_tokenizer(kind)
            hf.write_pairs(made[kind], tokenizer, {"train": hf.pairs(48), "valid": hf.pairs(16, seed=1)})
            texts = {"train": hf.sentences(64), "valid": hf.sentences(16, seed=1)}
            hf.write_text(made[kind] / "text", tokenizer, texts)
        return made[kind]

    return get


@pytest.fixture(scope="module")
def trained(fairseq, plugin_dir, tmp_path_factory):
    """`trained(DATA, FLAG, ...)` trains for two epochs and returns the folder of the checkpoints."""

    def run(data: Path, *flags: object) -> Path:
        saved = tmp_path_factory.mktemp("saved")
        fairseq("train", data, "--user-dir", plugin_dir, "--save-dir", saved, "--max-epoch", 2, *FLAGS, *flags)
        return saved

    return run


def weights(path: Path) -> dict[str, torch.Tensor]:
    import fairseq_collab  # noqa: F401 (lets torch.load accept fairseq's checkpoints)

    return torch.load(path)["model"]


def valid_losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"\| valid \| .*?\| loss ([\d.]+)", output)]


@pytest.mark.parametrize(("kind", "key_dim"), (("bert", None), ("distilbert", 8), ("albert", 8)))
def test_a_resumed_classifier_continues_bit_for_bit_without_its_folder(
    fairseq, trained, plugin_dir, folder, data, tmp_path, kind, key_dim
):
    source = tmp_path / "model"
    shutil.copytree(folder(kind), source)
    flags = [*CLASSIFY, "--arch", f"{kind}_collab", "--hf-model", source, *FLAGS]
    if key_dim is not None:
        flags += ["--key-dim", key_dim, "--calibrate", "--calibrate-sentences", 16]
    saved = trained(data(kind), *flags)
    final = weights(saved / "checkpoint_last.pt")
    if key_dim is not None:
        assert [p.shape[0] for name, p in final.items() if name.endswith("q_proj.weight")] == [8] * (
            1 if kind == "albert" else 2
        )
    shutil.rmtree(source)
    again = tmp_path / "again"
    again.mkdir()
    shutil.copy(saved / "checkpoint1.pt", again / "checkpoint_last.pt")
    run = (data(kind), "--user-dir", plugin_dir, "--save-dir", again, "--max-epoch", 2, *flags)
    fairseq("train", *run)
    resumed = weights(again / "checkpoint_last.pt")
    assert resumed.keys() == final.keys()
    assert all(torch.equal(resumed[name], final[name]) for name in final)
    done = fairseq(
        "validate", data(kind), "--user-dir", plugin_dir, "--path", saved / "checkpoint_last.pt", *CLASSIFY[:4],
        *("--num-classes", 3, "--init-token", 0, "--batch-size", 8, "--cpu", "--num-workers", 0),
    )  # fmt: skip
    assert "loss" in done.stdout


def test_a_masked_language_model_trains_on_the_head_of_the_folder(trained, data, tmp_path, fairseq, plugin_dir):
    hf.make_folder(tmp_path / "model", "bert")
    flags = (*MASKED, "--arch", "bert_collab", "--hf-model", tmp_path / "model", "--key-dim", 16, "--calibrate")
    saved = trained(data() / "text", *flags)
    command = ("--path", saved / "checkpoint_last.pt", *MASKED[:4], "--batch-size", 8, "--cpu", "--num-workers", 0)
    done = fairseq("validate", data() / "text", "--user-dir", plugin_dir, *command)
    assert "ppl" in done.stdout
