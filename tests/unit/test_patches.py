"""What the plugin changes in fairseq: messages for bad files and data, and checkpoints that stay whole.

A symbolic link to /dev/full in the place of a temporary file makes every write to it fail as on a full disk.
"""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, FairseqDataset, data_utils
from fairseq.file_io import PathManager
from fairseq.tasks import FairseqTask

from fairseq_collab.checkpoint_files import newest_readable_beside, require_readable
from fairseq_collab.errors import CollabError
from fairseq_collab.fairseq_modules import patches
from fairseq_collab.fairseq_modules.attention_mismatch import check_attentions

WIDTH, HEADS = 8, 2


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    patches.install()


def save(path, age=0):
    """A whole checkpoint file, saved `age` seconds ago."""
    torch.save({"model": {"weight": torch.arange(1000.0)}}, path)
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def fill_disk_for(path):
    path.with_name(path.name + ".tmp").symlink_to("/dev/full")


def test_install_twice_wraps_once():
    def current():
        return (
            checkpoint_utils.load_checkpoint_to_cpu,
            checkpoint_utils.torch_persistent_save,
            PathManager.copy,
            Dictionary.add_from_file,
            data_utils.infer_language_pair,
            sys.excepthook,
        )

    before = current()
    patches.install()
    assert current() == before
    assert all(hasattr(function, "_fairseq_collab_stock") for function in before)


@pytest.mark.parametrize(
    "break_file",
    [
        truncate,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        lambda path: path.write_bytes(b"\x80\x02" + bytes(range(149, 199))),
    ],
    ids=["truncated", "empty", "zeros", "noise"],
)
def test_damaged_checkpoint_is_named_and_the_newest_readable_one_offered(tmp_path, break_file):
    last = save(tmp_path / "checkpoint_last.pt")
    truncate(save(tmp_path / "checkpoint3.pt", age=10))
    save(tmp_path / "checkpoint2.pt", age=20)
    save(tmp_path / "checkpoint1.pt", age=30)
    break_file(last)
    with pytest.raises(CollabError) as caught:
        checkpoint_utils.load_checkpoint_to_cpu(str(last))
    message = str(caught.value)
    assert f"checkpoint {last} is damaged" in message
    assert f"--restore-file {tmp_path / 'checkpoint2.pt'}" in message
    assert "\n" not in message


def test_damaged_checkpoint_without_company_offers_nothing(tmp_path):
    last = truncate(save(tmp_path / "checkpoint_last.pt"))
    with pytest.raises(CollabError, match="no other readable checkpoint"):
        require_readable(last)
    assert newest_readable_beside(last) is None


def test_whole_or_absent_checkpoint_passes_the_check_before_a_launch(tmp_path):
    require_readable(save(tmp_path / "checkpoint_last.pt"))
    require_readable(tmp_path / "absent.pt")


class Harmful:
    def __reduce__(self):
        return os.system, ("true",)


def test_refused_pickle_is_named_with_what_it_wanted_to_run(tmp_path):
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": {}, "extra": Harmful()}, path)
    with pytest.raises(CollabError, match=r"checkpoint\.pt was not loaded: it wants to run (posix|os)\.system"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def test_file_of_another_program_is_no_fairseq_checkpoint(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(2)}, path)
    with pytest.raises(CollabError, match="not a fairseq checkpoint"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def test_full_disk_while_saving_keeps_the_previous_file(tmp_path):
    path = save(tmp_path / "checkpoint_last.pt")
    before = path.read_bytes()
    fill_disk_for(path)
    with pytest.raises(CollabError, match=r"checkpoint_last\.pt could not be written \(No space left on device"):
        checkpoint_utils.torch_persistent_save({"model": torch.zeros(10**6)}, str(path))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["checkpoint_last.pt"]


def test_full_disk_while_saving_a_new_name_tells_the_last_whole_checkpoint(tmp_path):
    old = save(tmp_path / "checkpoint1.pt")
    fill_disk_for(tmp_path / "checkpoint2.pt")
    with pytest.raises(CollabError, match=f"saved whole is {old}"):
        checkpoint_utils.torch_persistent_save({"model": torch.zeros(10**6)}, str(tmp_path / "checkpoint2.pt"))


def test_attempt_after_a_failed_one_starts_an_empty_file(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint_last.pt"
    real_save, attempts = torch.save, []

    def fail_once(obj, file):
        attempts.append(file)
        if len(attempts) == 1:
            file.write(b"half a checkpoint")
            raise OSError(5, "Input/output error")
        real_save(obj, file)

    monkeypatch.setattr(torch, "save", fail_once)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    checkpoint_utils.torch_persistent_save({"model": torch.arange(4)}, str(path))
    assert torch.load(path)["model"].tolist() == [0, 1, 2, 3]
    assert len(attempts) == 2


def test_full_disk_while_copying_keeps_the_previous_file(tmp_path):
    source, last = save(tmp_path / "checkpoint2.pt"), tmp_path / "checkpoint_last.pt"
    last.write_bytes(b"the last good one")
    fill_disk_for(last)
    with pytest.raises(CollabError, match="No space left on device.*still the one saved before"):
        PathManager.copy(str(source), str(last), overwrite=True)
    assert last.read_bytes() == b"the last good one"
    assert sorted(os.listdir(tmp_path)) == ["checkpoint2.pt", "checkpoint_last.pt"]


def test_copy_replaces_and_leaves_nothing_else(tmp_path):
    source, last = save(tmp_path / "checkpoint2.pt"), tmp_path / "checkpoint_last.pt"
    last.write_bytes(b"old")
    assert PathManager.copy(str(source), str(last), overwrite=True)
    assert last.read_bytes() == source.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint2.pt", "checkpoint_last.pt"]


PREFIXES = ("encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.encoder_attn")


def collaborative(key_dim, mix_dim=None, prefixes=PREFIXES, picked=False):
    state = {}
    for prefix in prefixes:
        state[f"{prefix}.q_proj.weight"] = torch.zeros(key_dim, WIDTH)
        state[f"{prefix}.mixing"] = torch.zeros(HEADS, mix_dim or key_dim)
        state[f"{prefix}.query_bias"] = torch.zeros(HEADS, mix_dim or key_dim)
        if picked:
            state[f"{prefix}.pick"] = torch.zeros(HEADS, mix_dim or key_dim, dtype=torch.long)
    return state


def concatenated(key_dim=WIDTH, prefixes=PREFIXES):
    state = {}
    for prefix in prefixes:
        state[f"{prefix}.q_proj.weight"] = torch.zeros(key_dim, WIDTH)
        state[f"{prefix}.q_proj.bias"] = torch.zeros(key_dim)
    return state


OLD_STOCK = {f"{prefix}.in_proj_weight": torch.zeros(3 * WIDTH, WIDTH) for prefix in PREFIXES}


@pytest.mark.parametrize(
    ("checkpoint", "model", "expected"),
    [
        (concatenated(), collaborative(4), "fairseq-collab-convert --path IN.pt --output OUT.pt --key-dim R"),
        (OLD_STOCK, collaborative(4), "fairseq-collab-convert --path IN.pt --output OUT.pt --key-dim R"),
        (collaborative(4), concatenated(), "fairseq-collab-convert --to-concatenated"),
        (
            {**collaborative(4, prefixes=PREFIXES[:1]), **concatenated(prefixes=PREFIXES[1:])},
            collaborative(4),
            "repeat its --collaborative-heads encoder",
        ),
        (
            {**collaborative(4, prefixes=PREFIXES[1:]), **concatenated(prefixes=PREFIXES[:1])},
            {**collaborative(4, prefixes=PREFIXES[:1]), **concatenated(prefixes=PREFIXES[1:])},
            "repeat its --collaborative-heads cross_decoder",
        ),
        (collaborative(4), collaborative(6), "key dim is 4 in the checkpoint and 6 in the model"),
        (collaborative(4), collaborative(6), "and 2 more attentions: give --key-dim 4"),
        (concatenated(4), concatenated(), "key dim is 4 in the checkpoint and 8 in the model"),
        (
            {**collaborative(4, prefixes=PREFIXES[:1]), **collaborative(6, prefixes=PREFIXES[1:])},
            collaborative(4),
            "give --encoder-key-dim 4 --cross-key-dim 6 --decoder-key-dim 6",
        ),
        (
            {**collaborative(4), **collaborative(6, prefixes=["encoder.layers.1.self_attn"])},
            collaborative(4, prefixes=[*PREFIXES, "encoder.layers.1.self_attn"]),
            "give the checkpoint itself to --collab-config",
        ),
        (collaborative(4, 2), collaborative(4), "mix dim is 2 in the checkpoint and 4 in the model"),
        (collaborative(4, 2), collaborative(4), "give --mix-dim 2"),
        (collaborative(4, 2, picked=True), collaborative(4, 2), "give --mix-layout picked"),
        (collaborative(4, 2), collaborative(4, 2, picked=True), "give --mix-layout window"),
    ],
)
def test_attentions_that_do_not_fit_get_the_way_out(checkpoint, model, expected):
    with pytest.raises(CollabError) as caught:
        check_attentions(checkpoint, model)
    assert expected in str(caught.value)


@pytest.mark.parametrize("state", [concatenated(), OLD_STOCK, collaborative(4, 2), {}])
def test_attentions_that_fit_pass(state):
    check_attentions(state, state)
    check_attentions(state, {})


def test_loading_into_a_fairseq_model_compares_the_attentions():
    from fairseq.models import BaseFairseqModel

    model = BaseFairseqModel()
    model.load_state_dict({}, strict=True)
    model.state_dict = lambda: collaborative(4)
    with pytest.raises(CollabError, match="fairseq-collab-convert"):
        model.load_state_dict(concatenated(), strict=True)


def test_layers_left_out_on_purpose_are_not_compared_by_number():
    from fairseq.models import BaseFairseqModel

    model = BaseFairseqModel()
    model.state_dict = lambda: collaborative(4)
    model.load_state_dict(collaborative(6), strict=False, model_cfg=SimpleNamespace(encoder_layers_to_keep="1"))


def test_missing_dictionary_names_folder_and_what_it_has(tmp_path):
    (tmp_path / "dict.en.txt").write_text("a 1\n")
    with pytest.raises(CollabError, match=r"no dictionary dict\.de\.txt in data folder .* \(it has dict\.en\.txt\)"):
        Dictionary.load(str(tmp_path / "dict.de.txt"))
    with pytest.raises(CollabError, match="there is no such folder"):
        Dictionary.load(str(tmp_path / "nowhere" / "dict.txt"))
    assert "a" in Dictionary.load(str(tmp_path / "dict.en.txt"))


def test_data_folder_without_binarised_files_has_unknown_languages(tmp_path):
    with pytest.raises(CollabError, match="the languages are unknown"):
        data_utils.infer_language_pair(str(tmp_path))
    with pytest.raises(CollabError, match="there is no data folder"):
        data_utils.infer_language_pair(str(tmp_path / "nowhere"))
    (tmp_path / "train.de-en.de.idx").touch()
    assert list(data_utils.infer_language_pair(str(tmp_path))) == ["de", "en"]


@pytest.mark.parametrize("count", [3, 8, 14, 30])
@pytest.mark.parametrize("max_sentences", [None, 16])
def test_every_sentence_is_in_a_batch(count, max_sentences):
    lengths = np.full(count, 5)
    batches = data_utils.batch_by_size(
        np.arange(count),
        lambda index: 5,
        num_tokens_vec=lengths,
        max_tokens=1000,
        max_sentences=max_sentences,
        required_batch_size_multiple=8,
    )
    assert np.concatenate(batches).tolist() == list(range(count))
    assert all(len(batch) % 8 == 0 for batch in batches[:-1])
    assert all(len(batch) <= (max_sentences or count) for batch in batches)


class SortedByChance(FairseqDataset):
    """Thirty sentences of one length, which every seed orders differently."""

    can_reuse_epoch_itr_across_epochs = True

    def __getitem__(self, index):
        return index

    def __len__(self):
        return 30

    def collater(self, samples):
        return samples

    def num_tokens(self, index):
        return 5

    def ordered_indices(self):
        return np.random.permutation(30)


def test_run_resumed_in_a_later_epoch_has_the_batches_of_the_run_before():
    patched = FairseqTask.get_batch_iterator
    stock = getattr(patched, patches._MARK)

    def iterator(epoch, make=patched, **kwargs):
        task = FairseqTask(SimpleNamespace())
        return make(task, SortedByChance(), max_sentences=4, seed=1, epoch=epoch, **kwargs)

    def batches(epoch, make=patched, **kwargs):
        return [list(batch) for batch in iterator(epoch, make, **kwargs).frozen_batches]

    assert iterator(3).epoch == 3
    assert batches(3) == batches(1)
    sharded = dict(disable_iterator_cache=True)
    assert batches(3, **sharded) == batches(3, stock, **sharded), "sharded data has batches of its own in every epoch"


def test_restore_file_that_does_not_exist_is_refused_instead_of_training_anew(tmp_path):
    cfg = SimpleNamespace(restore_file=str(tmp_path / "gone.pt"), save_dir=str(tmp_path))
    trainer = SimpleNamespace(checkpoint_suffix="")
    with pytest.raises(CollabError, match="--restore-file .*gone.pt does not exist"):
        checkpoint_utils.load_checkpoint(cfg, trainer)


def test_numpy_2_has_what_fairseq_asks_of_numpy_1():
    assert np.zeros(2, dtype=np.compat.long).dtype == np.int64


def test_overlong_line_is_cut_keeps_its_end_mark_and_is_told(caplog):
    limit = patches._source_limit((4, 1024), max_tokens=None)
    lines = patches._cut([torch.tensor([7, 2]), torch.tensor([11, 12, 13, 14, 15, 2]), "audio.wav"], limit)
    assert [line if isinstance(line, str) else line.tolist() for line in lines] == [
        [7, 2],
        [11, 12, 13, 2],
        "audio.wav",
    ]
    assert "line 2 of the batch has 6 tokens and the model takes 4" in caplog.text


@pytest.mark.parametrize(
    ("max_positions", "max_tokens", "limit"),
    [((10, 20), None, 10), (10, 5, 5), (None, None, float("inf")), ((None, 3), 7, 7)],
)
def test_longest_line_is_what_model_and_batch_take(max_positions, max_tokens, limit):
    assert patches._source_limit(max_positions, max_tokens) == limit


def raised(chain):
    try:
        chain()
    except Exception as error:
        return error
    return None


def as_cause():
    raise RuntimeError("outer") from CollabError("the sentence")


def as_fairseq_reports_loading():
    try:
        raise CollabError("the sentence")
    except Exception:
        raise Exception("Cannot load model parameters from checkpoint x")  # noqa: B904


def from_spawned_process():
    kind = type("ProcessRaisedException", (Exception,), {})
    raise kind("-- Process 0 terminated:\nTraceback ...\nfairseq_collab.errors.CollabError: the sentence\n")


def directly():
    raise CollabError("the sentence")


@pytest.mark.parametrize("chain", [directly, as_cause, as_fairseq_reports_loading, from_spawned_process])
def test_uncaught_user_error_is_one_line(chain, capsys, monkeypatch):
    monkeypatch.delenv(patches.TRACEBACK_VARIABLE, raising=False)
    error = raised(chain)
    sys.excepthook(type(error), error, error.__traceback__)
    assert capsys.readouterr().err == "fairseq_collab: error: the sentence\n"


def unrelated():
    try:
        raise CollabError("handled already")
    except CollabError:
        raise KeyError("something else")  # noqa: B904


def test_other_exceptions_and_wanted_tracebacks_go_to_the_previous_hook(capsys, monkeypatch):
    monkeypatch.delenv(patches.TRACEBACK_VARIABLE, raising=False)
    error = raised(unrelated)
    sys.excepthook(type(error), error, error.__traceback__)
    assert "KeyError: 'something else'" in capsys.readouterr().err
    monkeypatch.setenv(patches.TRACEBACK_VARIABLE, "1")
    error = raised(directly)
    sys.excepthook(type(error), error, error.__traceback__)
    assert "Traceback" in capsys.readouterr().err
