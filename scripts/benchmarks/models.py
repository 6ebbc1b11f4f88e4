"""Translation models of fairseq that differ only in their attention, and batches with the lengths of real sentences.

Used by `train` and `generate`; nothing is timed here. Words are random and mean nothing.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import import_fairseq
from benchmarks.layers import CONCATENATED, FORK
from fairseq_collab import functional
from fairseq_collab.attention import CollaborativeAttention
from fairseq_collab.errors import CollabError

LAYOUTS = {"dense": "dense", "windows": "window", FORK: "dense"}
NAMES = (*LAYOUTS, CONCATENATED)
Sample = dict[str, Any]
Lengths = list[tuple[int, int]]  # of source and target, with the end mark


def build(name: str, arch: str, words: int, key_dim: int, options: Sequence[str] = ()) -> tuple[Any, Any, nn.Module]:
    """fairseq's whole configuration, the task and the model, with a joined dictionary of made-up words.

    Args:
        name: one of `NAMES`. arch: of fairseq's own; the others take its twin with collaborative attention.
        words: of the dictionary, fairseq's four symbols not counted. options: further ones of fairseq-train.

    Raises:
        CollabError: fairseq cannot be imported, or the dims do not fit.
    """
    import_fairseq()
    from fairseq import options as fairseq_options
    from fairseq import tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hydra's, of its own options
        for language in ("src", "tgt"):
            text = "".join(f"word{i} {words - i}\n" for i in range(words))
            (Path(folder) / f"dict.{language}.txt").write_text(text, encoding="utf-8")
        arguments = [folder, "--task", "translation", "--source-lang", "src", "--target-lang", "tgt"]
        arguments += ["--share-all-embeddings", "--criterion", "label_smoothed_cross_entropy"]
        arguments += ["--label-smoothing", "0.1", "--optimizer", "adam", "--adam-betas", "(0.9, 0.98)"]
        arguments += ["--lr-scheduler", "inverse_sqrt", "--lr", "5e-4", "--max-tokens", "3500", *options]
        if name == CONCATENATED:
            arguments += ["--arch", arch]
        else:
            arguments += ["--arch", arch.replace("transformer", "transformer_collab", 1)]
            arguments += ["--key-dim", str(key_dim), "--mix-layout", LAYOUTS[name]]
        parser = fairseq_options.get_training_parser()
        config = convert_namespace_to_omegaconf(fairseq_options.parse_args_and_arch(parser, arguments))
        torch.manual_seed(1)
        task = tasks.setup_task(config.task)
        model = task.build_model(config.model)
    if name == FORK:
        from benchmarks.fork_style import to_fork_style

        model = to_fork_style(model)
    return config, task, model


def real_lengths(folder: Path) -> Lengths:
    """Lengths in pieces of a corpus's training pairs, in its order.

    Args:
        folder: made by ``data_prep`` from a parallel corpus.

    Raises:
        CollabError: there are no such files.
    """
    prepared = next((folder / "bin").glob("train.*-*.*.idx"), None)
    if prepared is None:
        raise CollabError(f"{folder} holds no prepared training pairs; make it with python -m data_prep homeassistant")
    sides = []
    for language in prepared.name.split(".")[1].split("-"):
        lines = (folder / "pieces" / f"train.{language}").read_text(encoding="utf-8").splitlines()
        sides.append([len(line.split()) + 1 for line in lines])
    return list(zip(*sides, strict=True))


def choose_batches(lengths: Lengths, tokens: int, count: int) -> list[Lengths]:
    """``count`` of the batches that fairseq would make, from evenly spaced places between the shortest and longest.

    Args:
        tokens: the most of a batch, padding included, on its longer side; longer sentences are left out.
    """
    import numpy
    from fairseq.data import data_utils

    fitting = (i for i, pair in enumerate(lengths) if max(pair) <= tokens)
    order = sorted(fitting, key=lambda i: (lengths[i][1], lengths[i][0]))
    batches = data_utils.batch_by_size(
        numpy.array(order), lambda i: max(lengths[i]), max_tokens=tokens, required_batch_size_multiple=8
    )
    places = (int((i + 0.5) * len(batches) / count) for i in range(count))
    return [[lengths[i] for i in batches[place]] for place in places]


def make_sample(dictionary: Any, lengths: Lengths, seed: int = 0) -> Sample:
    """A batch of random words as fairseq's collater makes it."""
    from fairseq.data.language_pair_dataset import collate

    generator = torch.Generator().manual_seed(seed)

    def sentence(length: int) -> Tensor:
        words = torch.randint(dictionary.nspecial, len(dictionary), (length - 1,), generator=generator)
        return torch.cat([words, torch.tensor([dictionary.eos()])])

    pairs = [{"id": i, "source": sentence(a), "target": sentence(b)} for i, (a, b) in enumerate(lengths)]
    return collate(pairs, pad_idx=dictionary.pad(), eos_idx=dictionary.eos())


@contextlib.contextmanager
def backends_seen(model: nn.Module) -> Iterator[Counter[str]]:
    """Counts what each of our attentions in ``model`` runs while this context is open."""
    seen: Counter[str] = Counter()

    def note(*_: Any) -> None:
        seen[functional.backend_used() or "unknown"] += 1

    attentions = [module for module in model.modules() if isinstance(module, CollaborativeAttention)]
    handles = [module.register_forward_hook(note) for module in attentions]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def in_words(seen: Counter[str]) -> str:
    """The backends, the most frequent first."""
    return ", ".join(name for name, _ in seen.most_common())
