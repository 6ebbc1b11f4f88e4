"""The average of a training's last checkpoints: the mean, with the options of the last; what does not fit is said."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from fairseq_collab.averaging import average_checkpoints, average_last, last_checkpoints
from fairseq_collab.checkpoint import load_checkpoint
from fairseq_collab.errors import CollabError


def save(path, weight, dtype=torch.float32, pick=(0, 1), **more):
    embedding = torch.as_tensor(weight, dtype=dtype)
    model = {"embed": embedding, "output": embedding, "attn.pick": torch.tensor(pick), **more}
    cfg = {"model": Namespace(arch="transformer_collab", collab_config={"encoder": {"key_dim": 8}})}
    torch.save({"cfg": cfg, "model": model, "last_optimizer_state": {"step": 3}, "extra_state": {"epoch": 2}}, path)
    return path


def test_average_is_the_mean_and_keeps_options_ties_and_picks(tmp_path):
    values = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    paths = [save(tmp_path / f"checkpoint{n}.pt", value) for n, value in enumerate(values, start=1)]
    output = average_checkpoints(paths, tmp_path / "mean.pt")
    state = load_checkpoint(output)
    exact = sum(value.double() for value in values) / 3
    assert torch.equal(state["model"]["embed"], exact.float())
    assert state["model"]["embed"].data_ptr() == state["model"]["output"].data_ptr()
    assert torch.equal(state["model"]["attn.pick"], torch.tensor([0, 1]))
    assert state["cfg"]["model"].collab_config == {"encoder": {"key_dim": 8}}
    assert state["last_optimizer_state"] is None


def test_half_precision_is_averaged_in_single(tmp_path):
    paths = [save(tmp_path / f"checkpoint{n}.pt", [value], torch.float16) for n, value in ((1, 1.0), (2, 1.0009765625))]
    mean = load_checkpoint(average_checkpoints(paths, tmp_path / "mean.pt"))["model"]["embed"]
    assert mean.dtype == torch.float32 and mean.item() == 1.00048828125


def test_last_are_those_of_epochs_by_number_or_of_updates_where_there_are_none(tmp_path):
    for name in (
        "checkpoint2",
        "checkpoint10",
        "checkpoint9",
        "checkpoint_3_400",
        "checkpoint_last",
        "checkpoint_best",
    ):
        (tmp_path / f"{name}.pt").touch()
    assert [path.name for path in last_checkpoints(tmp_path, 2)] == ["checkpoint9.pt", "checkpoint10.pt"]
    for path in tmp_path.glob("checkpoint[0-9]*.pt"):
        path.unlink()
    (tmp_path / "checkpoint_3_1000.pt").touch()
    assert [path.name for path in last_checkpoints(tmp_path, 2)] == ["checkpoint_3_400.pt", "checkpoint_3_1000.pt"]


def test_average_of_a_folder_is_written_beside_its_checkpoints(tmp_path):
    for number in (1, 2, 3):
        save(tmp_path / f"checkpoint{number}.pt", [float(number)])
    output = average_last(tmp_path, 2)
    assert output == tmp_path / "average_of_last_2.pt"
    assert load_checkpoint(output)["model"]["embed"].item() == 2.5


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ({"weight": [1.0, 2.0]}, "embed has shape"),
        ({"weight": [1.0], "pick": (1, 0)}, "attn.pick"),
        ({"weight": [1.0], "more": torch.zeros(1)}, "more"),
    ],
)
def test_checkpoints_of_different_models_are_refused(tmp_path, second, sentence):
    paths = [save(tmp_path / "checkpoint1.pt", [1.0]), save(tmp_path / "checkpoint2.pt", **second)]
    with pytest.raises(CollabError, match=sentence):
        average_checkpoints(paths, tmp_path / "mean.pt")
    assert not (tmp_path / "mean.pt").exists()


def test_too_few_missing_or_damaged_checkpoints_are_refused(tmp_path):
    save(tmp_path / "checkpoint1.pt", [1.0])
    with pytest.raises(CollabError, match="has 1 checkpoint.* of epochs and 3 are to be averaged"):
        last_checkpoints(tmp_path, 3)
    with pytest.raises(CollabError, match="no checkpoints are given"):
        average_checkpoints([], tmp_path / "mean.pt")
    with pytest.raises(CollabError, match="--average 0"):
        last_checkpoints(tmp_path, 0)
    with pytest.raises(CollabError, match="there is no folder"):
        last_checkpoints(tmp_path / "nowhere", 1)
    (tmp_path / "checkpoint2.pt").write_bytes(b"PK\3\4 and no more")
    with pytest.raises(CollabError, match="checkpoint2.pt is damaged"):
        average_last(tmp_path, 2)
