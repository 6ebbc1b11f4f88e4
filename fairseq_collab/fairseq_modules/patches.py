"""Everything that the plugin changes in fairseq itself, in one list: `install()` puts it in place.

checkpoint_utils.load_checkpoint_to_cpu   stock: torch's exception for a damaged or refused file
                                          here: the file, why, and the newest readable one of its run
checkpoint_utils.torch_persistent_save    stock: tries again into the half-written file
                                          here: every attempt writes a new file
PathManager.copy                          stock: overwrites checkpoint_last.pt in place
                                          here: a temporary file, then a rename
BaseFairseqModel.load_state_dict          stock: lists of missing names and wrong sizes
                                          here: the converter, or the flag to give
interactive.make_batches                  stock: an over-long line ends the run (also in translate() of hub models)
                                          here: the line is cut, with a warning
Dictionary.add_from_file                  stock: FileNotFoundError
data_utils.infer_language_pair            stock: FileNotFoundError or a bare Exception
                                          here: what the data folder lacks
data_utils.batch_by_size                  stock: leaves out a last batch that is no multiple of 8
                                          here: keeps it, so no test sentence is lost
FairseqTask.get_batch_iterator            stock: a resumed run puts other sentences together than the one it resumes
                                          here: the same batches, so the loss curve goes on
EpochBatchIterator.(load_)state_dict      stock: the place in an epoch is a number of batches of one process, so another
                                          number of processes repeats, leaves out, or refuses the rest
                                          here: the same share of the epoch
checkpoint_utils.load_checkpoint          stock: trains anew, silently, when --restore-file does not exist
                                          here: refuses, and says in a line why it cannot --finetune-from-model
distributed.utils._broadcast_object_slow  stock: since torch 2.6 a run of several processes cannot resume
                                          here: what one process of the job sends to the others is trusted
SequenceGenerator.generate                stock: diverse beams look up numbers of the data set in a table of the batch
                                          here: numbers of the batch
eval_lm.eval_lm                           stock: perplexity 1.00 when every block was skipped as too long
                                          here: says so
TranslationFromPretrainedBARTTask.args    stock: AttributeError, its parent has given the options another name
                                          here: both names, so that mBART can be fine-tuned
numpy.compat                              stock: AttributeError with numpy 2 (--sample-break-mode eos)
                                          here: the one name that fairseq uses of it
sys.excepthook                            stock: a traceback
                                          here: one line for a CollabError

A name that the installed fairseq does not have is passed over. What concerns one file or one state dict is written in
`checkpoint_files.py` and `attention_mismatch.py`; nothing about the attention itself lives here.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import torch

from fairseq_collab import checkpoint_files
from fairseq_collab.errors import CollabError
from fairseq_collab.fairseq_modules import attention_mismatch, decoding

logger = logging.getLogger(__name__)

TRACEBACK_VARIABLE = "FAIRSEQ_COLLAB_TRACEBACK"
_MARK = "_fairseq_collab_stock"


def install() -> None:
    """Put every patch of the list above in place. Calling it again changes nothing."""
    from fairseq import checkpoint_utils, hub_utils
    from fairseq.data import Dictionary, EpochBatchIterator, data_utils
    from fairseq.distributed import utils as distributed_utils
    from fairseq.file_io import PathManager
    from fairseq.models import BaseFairseqModel
    from fairseq.sequence_generator import SequenceGenerator
    from fairseq.tasks import FairseqTask
    from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask

    _patch(checkpoint_utils, "load_checkpoint_to_cpu", checkpoint_files.load_checkpoint_to_cpu)
    _patch(checkpoint_utils, "load_checkpoint", _load_checkpoint)
    _patch(checkpoint_utils, "torch_persistent_save", checkpoint_files.torch_persistent_save)
    _patch(distributed_utils, "_broadcast_object_slow", _broadcast_object)
    _patch(PathManager, "copy", checkpoint_files.copy, static=True)
    _patch(BaseFairseqModel, "load_state_dict", attention_mismatch.load_state_dict)
    _patch(Dictionary, "add_from_file", _add_from_file)
    _patch(data_utils, "infer_language_pair", _infer_language_pair)
    _patch(data_utils, "batch_by_size", _batch_by_size)
    _patch(FairseqTask, "get_batch_iterator", _get_batch_iterator)
    _patch(EpochBatchIterator, "state_dict", _state_of_iterator)
    _patch(EpochBatchIterator, "load_state_dict", _load_state_of_iterator)
    _patch(getattr(hub_utils, "GeneratorHubInterface", None), "_build_batches", decoding.build_batches)
    _patch(SequenceGenerator, "generate", decoding.generate)
    for name in ("fairseq_cli.interactive", "fairseq_cli.eval_lm", "__main__", "__mp_main__"):
        module = sys.modules.get(name)
        if hasattr(module, "buffered_read"):
            _patch(module, "make_batches", decoding.make_batches)
        if hasattr(module, "WordStat"):
            _patch(module, "eval_lm", decoding.eval_lm)
    if not hasattr(TranslationFromPretrainedBARTTask, "args"):
        TranslationFromPretrainedBARTTask.args = property(lambda task: task.cfg)
    if not hasattr(numpy, "compat"):
        numpy.compat = SimpleNamespace(long=int)
    if not hasattr(sys.excepthook, _MARK):
        sys.excepthook = _marked(_excepthook(sys.excepthook), sys.excepthook)


def _patch(owner: Any, name: str, wrap: Callable[[Callable], Callable], static: bool = False) -> None:
    """Replace `owner.name`, where `owner` itself defines it, by `wrap(owner.name)`, once."""
    if owner is None or name not in vars(owner):
        return
    stock = getattr(owner, name)
    if not hasattr(stock, _MARK):
        wrapped = _marked(functools.wraps(stock)(wrap(stock)), stock)
        setattr(owner, name, staticmethod(wrapped) if static else wrapped)


def _marked(function: Callable, stock: Callable) -> Callable:
    setattr(function, _MARK, stock)
    return function


def _load_checkpoint(stock: Callable) -> Callable:
    """Stock: "No existing checkpoint found", and a training from random weights."""

    def load_checkpoint(cfg, trainer, **kwargs):
        path = cfg.restore_file
        if os.path.basename(path) != path or not path.startswith("checkpoint_last"):
            sharded = path.replace(".pt", f"{trainer.checkpoint_suffix or ''}.pt")
            if "://" not in path and not (os.path.isfile(path) or os.path.isfile(sharded)):
                raise CollabError(
                    f"--restore-file {path} does not exist: give an existing checkpoint, or leave the option out to "
                    "go on from checkpoint_last.pt in --save-dir, or anew if there is none"
                )
        try:
            return stock(cfg, trainer, **kwargs)
        except ValueError as error:
            if not str(error).startswith("--finetune-from-model"):
                raise
            # one of these sentences goes on with all options of the training
            raise CollabError(str(error).partition(": ")[0]) from error

    return load_checkpoint


def _broadcast_object(stock: Callable) -> Callable:
    """Stock reads what the first process sends, the options of a checkpoint among it, with `torch.load`, which since
    torch 2.6 refuses their classes: "Weights only load failed" on all other processes."""

    def broadcast_object(obj, src_rank, group, dist_device):
        sends, buffer = torch.distributed.get_rank() == src_rank, io.BytesIO()
        if sends:
            torch.save(obj, buffer)
        box = [buffer.getvalue()]
        torch.distributed.broadcast_object_list(box, src=src_rank, group=group, device=dist_device)
        return obj if sends else torch.load(io.BytesIO(box[0]), map_location="cpu", weights_only=False)

    return broadcast_object


def _add_from_file(stock: Callable) -> Callable:
    """Stock: `FileNotFoundError`, from wherever a task asks for its dictionary."""

    def add_from_file(self, f):
        try:
            return stock(self, f)
        except FileNotFoundError as error:
            folder, name = os.path.split(os.path.abspath(f))
            raise CollabError(
                f"no dictionary {name} in data folder {folder} ({_contents(folder)}): give a folder that "
                "fairseq-preprocess wrote, and the languages and the task it was written for"
            ) from error

    return add_from_file


def _contents(folder: str) -> str:
    if not os.path.isdir(folder):
        return "there is no such folder"
    dictionaries = sorted(name for name in os.listdir(folder) if re.fullmatch(r"dict\.(.+\.)?txt", name))
    return "it has " + (", ".join(dictionaries) if dictionaries else "no dictionary at all")


def _infer_language_pair(stock: Callable) -> Callable:
    """Stock: `FileNotFoundError` without a folder, (None, None) and a bare `Exception` without binarised data."""

    def infer_language_pair(path):
        if not os.path.isdir(path) and "://" not in str(path):
            raise CollabError(f"there is no data folder {os.path.abspath(path)}: make it with fairseq-preprocess")
        pair = stock(path)
        if pair[0] is None:
            raise CollabError(
                f"the languages are unknown: {os.path.abspath(path)} has no files like train.de-en.de.bin; give a "
                "folder that fairseq-preprocess wrote, or --source-lang and --target-lang"
            )
        return pair

    return infer_language_pair


def _batch_by_size(stock: Callable) -> Callable:
    """Stock: `--required-batch-size-multiple` (8 by default) is documented as "less than N or a multiple of N", but
    a last batch that is no multiple is thrown away: training, validation and `fairseq-generate` never see up to seven
    of the longest sentences, and a set of fewer than eight has no batch at all."""

    def batch_by_size(indices, *args, fixed_shapes=None, **kwargs):
        batches = stock(indices, *args, fixed_shapes=fixed_shapes, **kwargs)
        if fixed_shapes is None:
            batched = sum(len(batch) for batch in batches)
            rest = list(indices[batched:])
            batches = [*batches, rest] if rest else batches
        return batches

    return batch_by_size


def _get_batch_iterator(stock: Callable) -> Callable:
    """Stock makes the batches of a data set once, with the number of the epoch in the seed, and keeps them for all
    epochs that follow: a run that is resumed in epoch 5 makes those of epoch 5 where the run before had those of
    epoch 1, so in a resumed epoch some sentences are seen twice and others not at all."""

    def get_batch_iterator(self, dataset, *args, **kwargs):
        epoch = kwargs.get("epoch", 1)
        kept_for_all_epochs = self.can_reuse_epoch_itr(dataset) and not (
            kwargs.get("disable_iterator_cache") or kwargs.get("update_epoch_batch_itr")
        )
        if not kept_for_all_epochs or epoch <= 1 or dataset in self.dataset_to_epoch_iter:
            return stock(self, dataset, *args, **kwargs)
        iterator = stock(self, dataset, *args, **{**kwargs, "epoch": 1})
        iterator.epoch = epoch
        dataset.set_epoch(epoch)
        return iterator

    return get_batch_iterator


def _state_of_iterator(stock: Callable) -> Callable:
    """Stock says how many batches a process has had, and not of how many."""

    def state_dict(self):
        return {**stock(self), "batches": len(self)}

    return state_dict


def _load_state_of_iterator(stock: Callable) -> Callable:
    """Stock takes up the same number of batches of a process, whatever an epoch has of them now: "Cannot resume
    training due to dataloader mismatch" where that is less."""

    def load_state_dict(self, state_dict):
        place, before, now = state_dict.get("iterations_in_epoch", 0), state_dict.get("batches"), len(self)
        if place and before and before != now:
            state_dict = {**state_dict, "iterations_in_epoch": min(place * now // before, now - 1)}
        return stock(self, state_dict)

    return load_state_dict


def _excepthook(previous: Callable) -> Callable:
    """One line for a mistake of the user's, the previous hook for everything else."""

    def excepthook(kind, error, traceback):
        sentence = user_error(error)
        if sentence is None or os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
            previous(kind, error, traceback)
        else:
            sys.stdout.flush()
            print(f"fairseq_collab: error: {sentence}", file=sys.stderr, flush=True)

    return excepthook


def user_error(error: BaseException | None) -> str | None:
    """The sentence of the CollabError that `error` is, was caused by, or reports from a spawned process; else None.

    fairseq answers whatever goes wrong in `Trainer.load_checkpoint` with a bare `Exception`, so of those the
    exception that was being handled counts as well, after the name of the checkpoint that fairseq was loading.
    """
    where, seen = "", set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, CollabError):
            return where + str(error)
        if type(error).__name__ == "ProcessRaisedException":
            reported = re.findall(r"^(?:[\w.]*\.)?CollabError: (.+(?:\n.+)*)", str(error), re.MULTILINE)
            return reported[-1] if reported else None
        handled = error.__context__ if type(error) is Exception and not error.__suppress_context__ else None
        loading = re.match("Cannot load model parameters from checkpoint (.+?);", str(error))
        if handled is not None and loading is not None:
            where = f"{loading[1]}: "
        error = error.__cause__ or handled
    return None
