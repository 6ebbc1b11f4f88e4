"""`fairseq-collab-convert` on fine-tuned encoders of transformers: the paper's second step, and folders to serve."""

import re
import shutil

import pytest
import torch

pytest.importorskip("transformers")
import _hf as hf  # noqa: E402

from fairseq_collab import load_collaborative  # noqa: E402
from fairseq_collab.cli.convert import main  # noqa: E402


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """`data(KIND)` has pairs of sentences."""
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(f"{kind}_data")
            hf.write_pairs(made[kind], hf.make_tokenizer(kind), {"train": hf.pairs(48), "valid": hf.pairs(16, seed=1)})
        return made[kind]

    return get


@pytest.fixture(scope="module")
def finetuned(plugin, data, tmp_path_factory):
    """`finetuned(KIND)` is a checkpoint as a training of a model with ordinary heads saves it."""
    from fairseq.dataclass.configs import FairseqConfig
    from omegaconf import OmegaConf

    made = {}

    def get(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(f"{kind}_finetuned")
            hf.make_folder(folder / "model", kind, "ForSequenceClassification", num_labels=3)
            task = hf.pair_task(data(kind))
            model = hf.start(task, kind, folder / "model")
            cfg = OmegaConf.to_container(OmegaConf.structured(FairseqConfig()), enum_to_str=True)
            task_cfg = {key: getattr(task.cfg, key) for key in vars(task.cfg) if not key.startswith("__")}
            cfg.update(model=model.args, task={**task_cfg, "_name": "sentence_prediction"})
            state = {"cfg": cfg, "args": None, "model": model.state_dict(), "last_optimizer_state": None}
            state["optimizer_history"] = [{"optimizer_name": "none", "lr_scheduler_state": {}, "num_updates": 0}]
            state["extra_state"] = {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}, "val_loss": None}
            torch.save(state, made.setdefault(kind, folder / "in.pt"))
        return made[kind]

    return get


def load(path, data, kind):
    """The model of a checkpoint and the logits that it has for the validation text."""
    from fairseq import checkpoint_utils

    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], {"data": str(data(kind))})
    with torch.no_grad():
        batch = hf.whole_batch(task)["net_input"]
        return model.eval(), model(**batch, features_only=True, classification_head_name=hf.HEAD)[0]


def convert(*args):
    return main([str(arg) for arg in args])


def distance(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("kind", hf.KINDS)
def test_conversion_keeps_predictions_as_far_as_the_key_dim_allows(data, finetuned, tmp_path, capsys, kind):
    path = finetuned(kind)
    _, expected = load(path, data, kind)
    found = {}
    for key_dim, flags in ((32, ()), (8, ("--calibrate", data(kind), "--refine-steps", 20)), (1, ())):
        output = tmp_path / f"{key_dim}.pt"
        assert convert("--path", path, "--output", output, "--key-dim", key_dim, *flags) == 0
        model, logits = load(output, data, kind)
        dims = {one.key_dim for one in model.modules() if hasattr(one, "key_dim")}
        assert dims == {key_dim}
        found[key_dim] = distance(logits, expected)
    assert found[32] < 1e-5 < found[8] < found[1]
    printed = capsys.readouterr().out
    assert "conv:cp|R:8|P:K" in printed and "calib:48|refine:20" in printed
    assert f"--arch {kind}_collab --task sentence_prediction" in printed
    assert f"--finetune-from-model {tmp_path}/8.pt" in printed


def test_a_converted_checkpoint_is_fine_tuned_with_the_printed_flags(
    fairseq, plugin_dir, data, finetuned, tmp_path, capsys
):
    output = tmp_path / "small.pt"
    assert convert("--path", finetuned("bert"), "--output", output, "--key-dim", 8) == 0
    flags = re.search(r"fine-tune: fairseq-train DATA --user-dir fairseq_collab (.*)", capsys.readouterr().out)[1]
    command = ("--user-dir", plugin_dir, *flags.split(), "--cpu", "--num-workers", 0, "--max-epoch", 1)
    done = fairseq("train", data("bert"), *command, "--save-dir", tmp_path / "saved")
    assert "loading pretrained model from" in done.stdout
    before, after = torch.load(output)["model"], torch.load(tmp_path / "saved" / "checkpoint_last.pt")["model"]
    assert before.keys() == after.keys()
    name = "encoder.model.bert.encoder.layer.0.attention.self.mixing"
    assert before[name].shape == after[name].shape and 0 < distance(after[name], before[name]) < 1


@pytest.mark.parametrize("kind", hf.KINDS)
@pytest.mark.parametrize("key_dim", (None, 8), ids=("plain", "shared"))
def test_a_folder_written_for_transformers_has_the_same_logits(data, finetuned, tmp_path, capsys, kind, key_dim):
    path = finetuned(kind)
    if key_dim is not None:
        assert convert("--path", path, "--output", tmp_path / "small.pt", "--key-dim", key_dim) == 0
        path = tmp_path / "small.pt"
    assert convert("--path", path, "--output", tmp_path / "folder", "--to-hf") == 0
    assert "ForSequenceClassification; load it with" in capsys.readouterr().out
    if key_dim is None:
        model = hf.transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "folder").eval()
    else:
        model = load_collaborative(tmp_path / "folder")
    tokenizer = hf.transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    inputs = tokenizer(*map(list, zip(*hf.pairs(16, seed=1), strict=True)), padding=True, return_tensors="pt")
    with torch.no_grad():
        found = model(**inputs).logits
    ours, expected = load(path, data, kind)
    assert torch.equal(found, expected)
    assert convert("--path", path, "--output", tmp_path / "folder", "--to-hf") == 1


def test_a_folder_is_written_without_the_tokenizer_that_was_lost(data, finetuned, tmp_path, capsys):
    state = torch.load(finetuned("bert"))
    shutil.copytree(state["cfg"]["model"].hf_model, tmp_path / "model")
    state["cfg"]["model"].hf_model = str(tmp_path / "model")
    torch.save(state, tmp_path / "in.pt")
    for path in (tmp_path / "model").glob("*token*"):
        path.unlink()
    lost = ("--path", tmp_path / "in.pt", "--to-hf", "--output")
    assert convert(*lost, tmp_path / "without") == 0
    told = capsys.readouterr().out
    assert f"without a tokenizer, which {tmp_path / 'model'} has no longer: to have one, export again" in told
    assert "--tokenizer DIR" in told and not list((tmp_path / "without").glob("*token*"))
    shutil.rmtree(tmp_path / "model")
    assert convert(*lost, tmp_path / "gone") == 0
    assert "without a tokenizer, whose folder is gone: to have one" in capsys.readouterr().out
    assert convert(*lost, tmp_path / "wrong", "--tokenizer", tmp_path / "without") == 1
    assert f"--tokenizer {tmp_path / 'without'} has no tokenizer" in capsys.readouterr().err
    hf.make_tokenizer("bert").save_pretrained(tmp_path / "words")
    assert convert(*lost, tmp_path / "with", "--tokenizer", tmp_path / "words") == 0
    assert list((tmp_path / "with").glob("tokenizer.json"))


def test_data_that_cannot_be_calibrated_on_is_told_in_a_sentence(data, finetuned, tmp_path, capsys):
    shutil.copytree(data("bert"), tmp_path / "data")
    flags = ("--path", finetuned("bert"), "--output", tmp_path / "out.pt", "--key-dim", 8, "--calibrate")
    assert convert(*flags, tmp_path / "data/input0") == 1
    error = capsys.readouterr().err
    assert f"input0 is only a part of the data; give the folder above it, {tmp_path / 'data'}\n" in error
    for path in (tmp_path / "data/input0").glob("train.*"):
        path.unlink()
    assert convert(*flags, tmp_path / "data") == 1
    assert f"calibration needs the train split, which {tmp_path / 'data'} does not have" in capsys.readouterr().err
    (tmp_path / "data/input0/dict.txt").unlink()
    assert convert(*flags, tmp_path / "data") == 1
    assert "data has no input0/dict.txt; give a folder that" in capsys.readouterr().err


def test_what_cannot_be_converted_is_refused_with_all_reasons(data, finetuned, tmp_path, capsys):
    path, output = finetuned("bert"), tmp_path / "out.pt"
    assert convert("--path", path, "--output", output, "--budget", 0.5, "--data", data("bert")) == 1
    error = capsys.readouterr().err
    assert "give --key-dim" in error and "use fairseq-validate" in error
    assert convert("--path", path, "--output", output, "--key-dim", 8, "--calibrate", data("albert")) == 1
    assert "binarise the text with the same tokenizer" in capsys.readouterr().err
    assert convert("--path", path, "--output", output, "--to-concatenated") == 1
    assert "--to-hf writes a folder" in capsys.readouterr().err
    assert not output.exists()
    assert convert("--path", path, "--output", output, "--key-dim", 8) == 0
    assert convert("--path", output, "--output", tmp_path / "again.pt", "--key-dim", 4) == 1
    assert "has collaborative heads already" in capsys.readouterr().err
