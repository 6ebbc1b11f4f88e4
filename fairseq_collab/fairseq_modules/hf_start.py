"""How a model around an encoder of transformers begins: from a folder, or as the checkpoint that will be loaded says.

A new training reads the folder that ``--hf-model`` names and swaps its attentions if ``--key-dim`` is given. The
options then carry both configurations (``hf_config``, ``collab_config``), so that a checkpoint needs no folder.
"""

import json
import logging
import os
from argparse import Namespace
from typing import Any, Optional

import torch
from torch import nn

from fairseq_collab._transformers import import_transformers, quiet
from fairseq_collab.checkpoint import load_checkpoint, model_options
from fairseq_collab.config import AttentionConfig, AttentionShape, CollabConfig
from fairseq_collab.errors import CollabError
from fairseq_collab.fairseq_modules import hf_folder
from fairseq_collab.fairseq_modules.hf_encoder import HFEncoder, HFEncoderModel
from fairseq_collab.fairseq_modules.hf_swap import calibration_batches, encoder_shape, install, swap
from fairseq_collab.fairseq_modules.options import build_with_config, fill_flags

logger = logging.getLogger(__name__)

OPTIONS = {
    "hf_model": None,
    "hf_config": None,
    "hf_dictionary": None,
    "dropout": None,
    "attention_dropout": None,
    "pooler_dropout": None,
    "calibrate": False,
    "calibrate_sentences": 512,
    "refine_steps": 0,
}
# what a checkpoint says about its model, and no flag may change
CARRIED = ("hf_config", "hf_dictionary", "collab_config")


def add_options(parser: Any) -> None:
    """Adds the flags to a model's argument group."""
    parser.add_argument("--hf-model", metavar="DIR", help="folder of transformers that a new training starts from")
    parser.add_argument("--dropout", type=float, metavar="D", help="dropout probability (default: the folder's)")
    parser.add_argument(
        "--attention-dropout", type=float, metavar="D", help="of attention weights (default: the folder's)"
    )
    parser.add_argument(
        "--pooler-dropout", type=float, metavar="D", help="in the classification head (default: the folder's)"
    )
    parser.add_argument(
        "--key-dim", type=int, metavar="R", help="shared dims of queries and keys (default: the folder's own attention)"
    )
    parser.add_argument("--mix-dim", type=int, metavar="P", help="dims that one head mixes (default: the head dim)")
    parser.add_argument("--mix-layout", choices=("picked", "dense"), help="default: picked")
    parser.add_argument(
        "--calibrate", action="store_true", help="weigh the decomposition by what the training text shows"
    )
    parser.add_argument("--calibrate-sentences", type=int, metavar="N", help="default: 512")
    parser.add_argument(
        "--refine-steps", type=int, metavar="N", help="training of each swapped layer on that text (default: 0)"
    )


def fill_options(args: Any) -> None:
    """Sets what ``args`` lacks, as old checkpoints and Hydra need."""
    for name, default in OPTIONS.items():
        if getattr(args, name, None) is None:
            setattr(args, name, default)
    fill_flags(args)


def checkpoint_to_load(options: Namespace) -> Optional[str]:
    """The checkpoint that fairseq will load into the model of a training, or None for a new one.

    Raises:
        CollabError: ``--restore-file`` or ``--finetune-from-model`` names no file.
    """
    folder, named = getattr(options, "save_dir", None), getattr(options, "restore_file", None)
    if folder is None:
        return None
    suffix = getattr(options, "checkpoint_suffix", None) or ""
    if named not in (None, "checkpoint_last.pt"):
        candidates = {"--restore-file": named.replace(".pt", f"{suffix}.pt") if suffix else named}
    else:
        last = os.path.join(folder, f"checkpoint_last{suffix}.pt")
        if os.path.isfile(last):
            return last
        candidates = {
            f"--{name.replace('_', '-')}": getattr(options, name, None)
            for name in ("continue_once", "finetune_from_model")
        }
    for flag, path in candidates.items():
        if path is not None and not os.path.isfile(path):
            raise CollabError(f"{flag} {path} does not exist: give an existing checkpoint, or leave the option out")
        if path is not None:
            return path
    return None


def _find_start(options: Namespace, model_type: str) -> Optional[str]:
    """Fills ``CARRIED`` from the checkpoint, or ``hf_config`` from the folder, which is then returned."""
    if options.hf_config:
        return None
    if path := checkpoint_to_load(options):
        theirs = model_options(load_checkpoint(path), path)
        if not getattr(theirs, "hf_config", None):
            arch = getattr(theirs, "arch", None) or getattr(theirs, "_name", None)
            raise CollabError(f"{path} is a {arch} model and cannot be continued as {model_type}_collab")
        found = json.loads(theirs.hf_config)["model_type"]
        if found != model_type:
            raise CollabError(f"{path} is a {found} model; give --arch {found}_collab")
        logger.info("the model is that of %s; --hf-model is not read", path)
        for name in CARRIED:
            setattr(options, name, getattr(theirs, name, None))
        return None
    if not options.hf_model:
        raise CollabError(
            f"--hf-model is missing: give the folder of a {model_type} model with its configuration, weights and "
            "tokenizer"
        )
    options.hf_config = hf_folder.read_config(options.hf_model, model_type)
    _check_swap_options(options)
    return options.hf_model


def _check_swap_options(options: Namespace) -> None:
    if options.key_dim is None:
        for name in ("mix_dim", "mix_layout", "calibrate", "refine_steps"):
            if getattr(options, name):
                raise CollabError(
                    f"--{name.replace('_', '-')} says how attentions are swapped, but without --key-dim none is; give "
                    "--key-dim, for example a quarter of the model's width"
                )
    if options.refine_steps < 0:
        raise CollabError(f"--refine-steps is {options.refine_steps}; it must be at least 0")
    if options.refine_steps and not options.calibrate:
        raise CollabError("--refine-steps needs text to train on: give --calibrate")
    if options.calibrate_sentences < 2:
        raise CollabError(f"--calibrate-sentences is {options.calibrate_sentences}; it must be at least 2")


def _config(options: Namespace) -> Any:
    config = hf_folder.config_of(options.hf_config)
    family = hf_folder.FAMILIES[config.model_type]
    for name in ("dropout", "attention_dropout"):
        if getattr(options, name) is not None:
            setattr(config, getattr(family, name), getattr(options, name))
    return config


def build(args: Any, task: Any, model_type: str) -> HFEncoderModel:
    """The model that the options describe; afterwards they describe it without the folder.

    Args:
        args: as fairseq hands them to ``build_model``. task: with the dictionary, and the text to calibrate on.

    Raises:
        CollabError: options or a folder that are wrong, or do not fit the dictionary or the checkpoint.
    """
    start: dict[str, Optional[str]] = {}

    def shapes(options: Namespace) -> dict[str, AttentionShape]:
        start["folder"] = _find_start(options, model_type)
        if start["folder"] and options.key_dim is not None:
            options.mix_layout = options.mix_layout or "picked"
        elif start["folder"]:
            options.collaborative_heads = "none"
        return {"encoder": encoder_shape(_config(options))}

    def make(options: Namespace) -> HFEncoderModel:
        # these two only told the defaults for a folder
        options.collaborative_heads, options.mix_layout = None, getattr(args, "mix_layout", None)
        dictionary, folder = task.source_dictionary, start["folder"]
        if folder is None:
            return HFEncoderModel(options, _rebuild(options, dictionary))
        model, has_head = hf_folder.load_masked_lm(folder, _config(options))
        hf_ids = hf_folder.token_ids(dictionary, folder, model.config.vocab_size)
        if not has_head:
            logger.info("%s has no head for masked language modelling; a new one is made", folder)
        options.hf_dictionary = hf_folder.fingerprint(dictionary)
        encoder = HFEncoder(dictionary, model, hf_ids)
        if options.key_dim is not None:
            _swap(encoder, options, task)
        return HFEncoderModel(options, encoder, folder)

    return build_with_config(args, fill_options, shapes, make)


def _swap(encoder: HFEncoder, options: Namespace, task: Any) -> None:
    seed, batches = getattr(options, "seed", 1), None
    if options.calibrate:
        batches = calibration_batches(task, encoder, options.calibrate_sentences, seed)
    on_gpu = torch.cuda.is_available() and not getattr(options, "cpu", False)
    report = swap(
        encoder.model,
        options.collab.encoder,
        batches,
        refine_steps=options.refine_steps,
        seed=seed,
        device="cuda" if on_gpu and batches else None,
    )
    encoder.model.cpu()
    logger.info("attentions were swapped, %s:\n%s", report.signature, report.table())


def make_model(options: Namespace) -> nn.Module:
    """The model of transformers that a checkpoint's options describe, with weights yet to be loaded, in float32."""
    config = _config(options)
    with quiet():
        model = import_transformers().AutoModelForMaskedLM.from_config(config).float()
    hf_folder.check_positions(model, "the checkpoint's model")
    install(model, attention_configs(options))
    return model


def attention_configs(options: Namespace) -> tuple[AttentionConfig, ...]:
    """What a checkpoint's options say of each attention, in the order of the model."""
    shapes = {"encoder": encoder_shape(hf_folder.config_of(options.hf_config))}
    return CollabConfig.from_json(options.collab_config, shapes, "the checkpoint's collab_config").encoder


def check_dictionary(options: Namespace, dictionary: Any, where: str) -> None:
    """Raises CollabError when the dictionary is not the one that a checkpoint with these options was trained with."""
    if options.hf_dictionary != hf_folder.fingerprint(dictionary):
        raise CollabError(
            f"the dictionary of {where} is not the one that the checkpoint was trained with; binarise the text with "
            "the same tokenizer, or start from the folder with --hf-model"
        )


def _rebuild(options: Namespace, dictionary: Any) -> HFEncoder:
    check_dictionary(options, dictionary, "the data")
    return HFEncoder(dictionary, make_model(options), torch.zeros(len(dictionary), dtype=torch.long))
