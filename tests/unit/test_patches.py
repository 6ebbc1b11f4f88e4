"""What the plugin changes in fairseq itself: batches, dictionaries, long lines, and uncaught mistakes."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, EpochBatchIterator, FairseqDataset, data_utils
from fairseq.file_io import PathManager
from fairseq.tasks import FairseqTask

from fairseq_collab.errors import CollabError
from fairseq_collab.fairseq_modules import decoding, patches


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    patches.install()


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


def epoch_of_numbers(shards: int, shard: int = 0) -> EpochBatchIterator:
    """An epoch of 120 batches of one number, divided among processes."""
    return EpochBatchIterator(
        *(SortedByChance(), lambda batch: batch[0], [[n] for n in range(120)]), num_shards=shards, shard_id=shard
    )


@pytest.mark.parametrize(("before", "now"), [(1, 8), (8, 1), (2, 3), (3, 3)])
def test_an_epoch_goes_on_where_it_was_on_another_number_of_processes(before, now):
    seen, states = [], []
    for shard in range(before):
        batches = epoch_of_numbers(before, shard)
        iterator = batches.next_epoch_itr()
        seen += [next(iterator) for _ in range(96 // before)]
        states.append(batches.state_dict())
    for shard in range(now):
        batches = epoch_of_numbers(now, shard)
        batches.load_state_dict(states[0])
        seen += list(batches.next_epoch_itr())
    assert sorted(seen) == list(range(120))


def test_a_state_without_the_length_of_its_epoch_is_taken_as_it_is():
    batches = epoch_of_numbers(2)
    batches.load_state_dict({"version": 2, "epoch": 3, "iterations_in_epoch": 7, "shuffle": True})
    assert batches.iterations_in_epoch == 7 and len(list(batches.next_epoch_itr())) == 53


def test_restore_file_that_does_not_exist_is_refused_instead_of_training_anew(tmp_path):
    cfg = SimpleNamespace(restore_file=str(tmp_path / "gone.pt"), save_dir=str(tmp_path))
    trainer = SimpleNamespace(checkpoint_suffix="")
    with pytest.raises(CollabError, match="--restore-file .*gone.pt does not exist"):
        checkpoint_utils.load_checkpoint(cfg, trainer)


def test_numpy_2_has_what_fairseq_asks_of_numpy_1():
    assert np.zeros(2, dtype=np.compat.long).dtype == np.int64


def test_overlong_line_is_cut_keeps_its_end_mark_and_is_told(caplog):
    limit = decoding.source_limit((4, 1024), max_tokens=None)
    lines = decoding.cut([torch.tensor([7, 2]), torch.tensor([11, 12, 13, 14, 15, 2]), "audio.wav"], limit)
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
    assert decoding.source_limit(max_positions, max_tokens) == limit


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
        raise Exception("Cannot load model parameters from checkpoint x.pt; please ...")  # noqa: B904


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
    where = "x.pt: " if chain is as_fairseq_reports_loading else ""
    assert capsys.readouterr().err == f"fairseq_collab: error: {where}the sentence\n"


def test_all_lines_of_a_spawned_process_s_reasons_are_told():
    kind = type("ProcessRaisedException", (Exception,), {})
    rest = "\n\nDuring handling of the above exception, another exception occurred:\n\nTraceback ..."
    error = kind("Traceback ...\nfairseq_collab.errors.CollabError: one reason.\nanother reason." + rest)
    assert patches.user_error(error) == "one reason.\nanother reason."


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
