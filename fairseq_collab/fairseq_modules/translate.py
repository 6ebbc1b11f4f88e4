"""Checkpoints made ready to translate a binarised test set, sentence for sentence, for scoring.

The command line that compares systems and reads raw references is `scripts/evaluate_bleu.py`.
"""

from __future__ import annotations

import ast
import hashlib
import os
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, utils
from fairseq.data import encoders
from omegaconf import open_dict
from tqdm import tqdm

from fairseq_collab.errors import CollabError
from fairseq_collab.fairseq_modules.kept_translations import KeptTranslations, fingerprint


def joining_rule(symbols: Sequence[str]) -> str | None:
    """fairseq's name for the way the pieces in a dictionary are joined, by what the entries look like."""
    if any(symbol.startswith("\u2581") for symbol in symbols):
        return "sentencepiece"
    if any(symbol.endswith("@@") for symbol in symbols):
        return "subword_nmt"
    return None


class LoadedSystem:
    """Checkpoint(s) with their task and test set, ready to decode.

    Raises CollabError for a missing file, a task other than translation, a missing dictionary, an unknown language
    pair, a missing split, an empty set and a vocabulary that is not the checkpoint's.
    """

    def __init__(self, path: str, args: Namespace):
        self.path = path
        self.use_cuda = torch.cuda.is_available() and not args.cpu
        if args.fp16 and not self.use_cuda:
            raise CollabError("--fp16 needs a GPU, and none is used here: leave it out")
        files = path.split(":")
        for file in files:
            if not os.path.isfile(file):
                raise CollabError(f"there is no checkpoint {file}")
        if args.data is None:
            raise CollabError("DATA is missing: give the folder that fairseq-preprocess wrote")
        if not args.data.is_dir():
            raise CollabError(f"there is no data folder {args.data}: make it with fairseq-preprocess")
        if (args.source_lang is None) != (args.target_lang is None):
            raise CollabError("--source-lang and --target-lang belong together: give both or neither")
        overrides = {"data": str(args.data), "eval_bleu": False, **_parse_overrides(args.model_overrides)}
        overrides.update({k: getattr(args, k) for k in ("source_lang", "target_lang") if getattr(args, k)})
        try:
            self.models, self.cfg, self.task = checkpoint_utils.load_model_ensemble_and_task(files, overrides)
        except RuntimeError as error:
            if "embed_tokens.weight" not in str(error):
                raise
            raise CollabError(
                f"the vocabulary of {path} is not that of {args.data}: give the folder it was trained on, or one that "
                "was prepared with the same dictionaries"
            ) from error
        if not hasattr(self.task, "src_dict") or not hasattr(self.task, "tgt_dict"):
            raise CollabError(f"{path} was trained for task {self.cfg.task._name}: give a translation model")
        self.langs = (self.task.cfg.source_lang, self.task.cfg.target_lang)
        for model in self.models:
            if args.fp16:
                model.half()
            if self.use_cuda:
                model.cuda()
            model.prepare_for_inference_(Namespace(generation=Namespace(beam=args.beam)))
        limits = utils.resolve_max_positions(self.task.max_positions(), *[m.max_positions() for m in self.models])
        self.max_positions = limits
        self._load_split(args)

    def _load_split(self, args: Namespace) -> None:
        longest = self.max_positions[0]
        self._load_dataset(args)
        self.truncated = int((self.dataset.src_sizes > longest).sum())
        if self.truncated:
            with open_dict(self.task.cfg):
                self.task.cfg.truncate_source = True
                self.task.cfg.max_source_positions = longest
            self._load_dataset(args)
        if len(self.dataset) == 0:
            raise CollabError(f"{args.gen_subset} of {args.data} has no sentences")

    def _load_dataset(self, args: Namespace) -> None:
        try:
            self.task.load_dataset(args.gen_subset, task_cfg=self.cfg.task)
        except FileNotFoundError as error:
            splits = {name.name.split(".")[0] for name in args.data.glob(f"*.{'-'.join(self.langs)}.*.idx")}
            there = f"it has {', '.join(sorted(splits))}" if splits else "it has no data of these languages"
            raise CollabError(
                f"{args.data} has no split {args.gen_subset} for {'-'.join(self.langs)} ({there})"
            ) from error
        self.dataset = self.task.dataset(args.gen_subset)

    def joined(self, dictionary: Any, rule: str | None, detokenize: Callable[[str], str]) -> Callable[..., str]:
        """A function from tokens to detokenised text."""

        def text(tokens: Any, escape_unk: bool = False) -> str:
            return detokenize(dictionary.string(tokens, rule, escape_unk=escape_unk)).strip()

        return text

    def references(self, text: Callable[..., str]) -> list[str]:
        """The binarised target side as text; pieces that were unknown to the dictionary match no translation."""
        if self.dataset.tgt is None:
            raise CollabError(f"the set has no target side: give the references with --ref ({self.path})")
        return [text(self.dataset.tgt[index], escape_unk=True) for index in range(len(self.dataset))]

    def decode(
        self, text: Callable[..., str], args: Namespace, partial: Path | None = None
    ) -> tuple[list[str], dict[str, Any]]:
        """Translations in the order of the corpus, and the figures of decoding them.

        Args:
            partial: file that keeps what is translated, from which an interrupted call goes on.
        """
        dataset = self.dataset
        # Batches are made by source length alone: a long reference must not cost its sentence.
        dataset.tgt, dataset.tgt_sizes, dataset.sizes = None, None, dataset.src_sizes
        longest = int(dataset.src_sizes.max())
        batches = self.task.get_batch_iterator(
            dataset=dataset,
            max_tokens=max(args.max_tokens, longest),
            max_sentences=args.batch_size,
            max_positions=self.max_positions,
            ignore_invalid_inputs=False,
            required_batch_size_multiple=1,
            num_workers=0,
            disable_iterator_cache=True,
        ).next_epoch_itr(shuffle=False)
        options = {name: getattr(args, name) for name in ("beam", "lenpen", "max_len_a", "max_len_b")}
        kept = KeptTranslations(partial, self._identity(args, options) if partial else {})
        generator = self.task.build_generator(self.models, Namespace(**options))
        with tqdm(total=len(dataset), desc=Path(self.path).name, unit=" sentences", mininterval=1) as bar:
            bar.update(len(kept.found))
            for sample in batches:
                if kept.found.keys() >= set(sample["id"].tolist()):
                    continue
                source = sample["net_input"]["src_tokens"]
                unknown = int((source == self.task.src_dict.unk()).sum())
                sample = utils.move_to_cuda(sample) if self.use_cuda else sample
                started = time.perf_counter()
                results = self.task.inference_step(generator, self.models, sample)
                if self.use_cuda:
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - started
                best = [
                    found[0]["tokens"].int().cpu() if found else torch.empty(0, dtype=torch.int) for found in results
                ]
                sentences = zip(sample["id"].tolist(), best, strict=True)
                kept.add({index: (text(tokens), tokens.numel()) for index, tokens in sentences}, seconds, unknown)
                bar.update(len(results))
        lines = [kept.found[index][0] for index in range(len(dataset))]
        tokens, seconds = sum(count for _, count in kept.found.values()), kept.seconds
        figures = {
            "sentences": len(lines),
            "tokens": tokens,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(tokens / seconds, 2),
            "sentences_per_second": round(len(lines) / seconds, 3),
            "device": torch.cuda.get_device_name() if self.use_cuda else "cpu",
            "source_lines_cut": self.truncated,
            "unknown_source_tokens": kept.unknown,
            "parameters": [sum(p.numel() for p in model.parameters()) for model in self.models],
        }
        return lines, figures

    def _identity(self, args: Namespace, options: dict[str, Any]) -> dict[str, Any]:
        """What decides the translations, and the batches and the device for which their figures hold."""
        pair = "-".join(self.langs)
        files = [*args.data.glob(f"{args.gen_subset}.*.{self.langs[0]}.*"), *args.data.glob("dict.*.txt")]
        return {
            "weights": fingerprint(self.models),
            "model": hashlib.sha256(str([str(model) for model in self.models]).encode()).hexdigest(),
            "data": [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)],
            "langs": pair,
            "fp16": args.fp16,
            "batches": [args.max_tokens, args.batch_size],
            "cuda": self.use_cuda,
            "overrides": args.model_overrides,
            "joined": getattr(args, "remove_bpe", None),
            **options,
        }


def _parse_overrides(text: str) -> dict[str, Any]:
    try:
        overrides = ast.literal_eval(text)
    except (SyntaxError, ValueError) as error:
        raise CollabError(f"--model-overrides is no Python dictionary: {text!r}") from error
    if not isinstance(overrides, dict):
        raise CollabError(f"--model-overrides is no Python dictionary: {text!r}")
    return overrides


def build_detokenizer(name: str, langs: tuple[str, str]) -> Callable[[str], str]:
    """The function that undoes tokenisation."""
    if name == "none":
        return lambda line: line
    try:
        tokenizer = encoders.build_tokenizer(
            Namespace(tokenizer="moses", source_lang=langs[0], target_lang=langs[1], moses_no_dash_splits=False)
        )
    except ImportError as error:
        raise CollabError("--detokenizer moses needs the package sacremoses: pip install sacremoses") from error
    # Moses writes @-@ for a hyphen that it split off; Google's WMT 2016 text has it with the @ as ##AT##
    return lambda line: tokenizer.decode(line.replace("##AT##-##AT##", "@-@"))


def corpus_bleu(path: str, data: str | os.PathLike, split: str, cpu: bool) -> dict[str, Any]:
    """`score` and `signature` of sacreBLEU for a checkpoint on a split, beam 5, against the binarised target side.

    Raises:
        CollabError: as :class:`LoadedSystem`.
    """
    from sacrebleu.metrics import BLEU

    args = Namespace(
        data=Path(data), gen_subset=split, cpu=cpu, fp16=False, source_lang=None, target_lang=None,
        model_overrides="{}", beam=5, lenpen=1.0, max_len_a=1.2, max_len_b=10, max_tokens=4000, batch_size=None,
    )  # fmt: skip
    system = LoadedSystem(path, args)
    dictionary = system.task.tgt_dict
    text = system.joined(dictionary, joining_rule(dictionary.symbols), lambda line: line)
    references = system.references(text)
    lines, _ = system.decode(text, args)
    metric = BLEU()
    result = metric.corpus_score(lines, [references])
    return {"score": result.score, "signature": metric.get_signature().format(short=False)}
