"""fairseq's beam search with a translation model: tokens a second and the key cache, against its own and the fork's.

The model is transformer_wmt_en_de with a dictionary of 8,000 words and random weights, prepared for generation as
fairseq-generate does. 64 sources of 20 to 60 tokens are translated with beam 5 in exactly 60 steps: ends are forbidden
before. The key cache is what all attentions hold as keys (``prev_key``) when it is largest, in the same run: keys of
the target so far, which grow, and of the source.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from benchmarks import device as devices
from benchmarks import models, pictures
from benchmarks.common import ROUNDS, Row, make_row, measure_in_turns, turns_row
from benchmarks.layers import CONCATENATED, FORK

HELP = "tokens a second of beam search and bytes of the key cache, against fairseq's own and the fork's"
ARCH, WORDS, KEY_DIM = "transformer_wmt_en_de", 8000, 128
BEAM, BATCH, STEPS = 5, 64, 60
SPEEDUPS = {CONCATENATED: 1.10, FORK: 1.15}
OURS = ("dense", "windows")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite."""
    devices.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")


def run(args: argparse.Namespace) -> list[Row]:
    """Rows of dense and window mixing; few sentences and steps with ``--quick``."""
    dtypes = devices.dtypes_of(args)
    if args.quick:
        return measure_generation(ARCH, 2000, KEY_DIM, 8, 20, 2, args.device, dtypes)
    return measure_generation(ARCH, WORDS, KEY_DIM, BATCH, STEPS, args.rounds, args.device, dtypes)


def measure_generation(
    arch: str,
    words: int,
    key_dim: int,
    batch: int,
    steps: int,
    rounds: int,
    device: str,
    dtypes: Sequence[torch.dtype],
) -> list[Row]:
    """Two rows of time and two of the key cache for each of ours, in each precision."""
    rows = []
    for dtype in dtypes:
        works, seen, caches = {}, {}, {}
        for name in tqdm(models.NAMES, desc=f"generate {devices.SHORT[dtype]}: models", unit="model"):
            _, task, model = models.build(name, arch, words, key_dim)
            model = model.to(device, dtype).eval()
            works[name] = generation(model, task.target_dictionary, batch, steps, device)
            with models.backends_seen(model) as seen[name], largest_key_caches(model) as caches[name]:
                works[name](0)
            width = model.decoder.embed_dim
        with tqdm(total=rounds + 1, desc=f"generate {devices.SHORT[dtype]}", unit="round") as bar:
            last = models.NAMES[-1]
            works[last] = _then(works[last], bar.update)
            times = measure_in_turns(works, rounds, min_seconds=0, clock=devices.clock_of(device))
        facts = {"dtype": devices.SHORT[dtype], "key_dim": key_dim, "steps": steps, "batch": batch, "beam": BEAM}
        case = f"{arch} R={key_dim}, batch {batch}, beam {BEAM}, {steps} steps, {words} words, {devices.SHORT[dtype]}"
        for name in OURS:
            rows += _rows(case, name, times, seen[name], caches, key_dim / width, facts)
    return rows


def _rows(
    case: str,
    name: str,
    times: dict[str, list[float]],
    seen: Counter[str],
    caches: dict[str, dict[str, int]],
    cache_target: float,
    facts: dict[str, Any],
) -> list[Row]:
    rows = []
    tokens = facts["batch"] * facts["steps"]
    backend = models.in_words(seen)
    for peer, speedup in SPEEDUPS.items():
        row = turns_row(
            "generate",
            f"{case}: {name}",
            times,
            name,
            peer,
            1 / speedup,
            backend=backend,
            measure="time",
            layout=name,
            tokens_per_second=tokens / statistics.median(times[name]),
            peer_tokens_per_second=tokens / statistics.median(times[peer]),
            wanted_speedup=speedup,
            **facts,
        )
        rows.append({**row, "speedup": 1 / row["ratio"]})
    for peer in SPEEDUPS:
        ours, theirs = sum(caches[name].values()), sum(caches[peer].values())
        target = cache_target if peer == CONCATENATED else None
        sizes = {"measure": "key cache", "layout": name, "bytes": ours, "peer_bytes": theirs, **facts}
        rows.append(
            make_row(
                "generate",
                f"{case}, key cache: {name}",
                peer,
                ours / theirs,
                target,
                backend=backend,
                rounds=1,
                **sizes,
            )
        )
    return rows


def generation(model: nn.Module, dictionary: Any, batch: int, steps: int, device: str) -> Callable[[int], Any]:
    """A translation of ``batch`` random sources in ``steps`` steps of the decoder."""
    from fairseq.sequence_generator import SequenceGenerator

    model.make_generation_fast_(beamable_mm_beam_size=BEAM, need_attn=False)
    generator = SequenceGenerator(
        [model], dictionary, beam_size=BEAM, max_len_a=0, max_len_b=steps - 1, min_len=steps - 1
    )
    lengths = [(int(length), 1) for length in torch.linspace(20, 60, batch)]
    sample = models.make_sample(dictionary, lengths)
    source = {key: sample["net_input"][key].to(device) for key in ("src_tokens", "src_lengths")}

    def generate(_: int) -> Any:
        return generator.generate([model], {"net_input": source})

    return generate


@contextlib.contextmanager
def largest_key_caches(model: nn.Module) -> Iterator[dict[str, int]]:
    """Bytes of the keys in the cache of each attention of the decoder, at their largest while this context is open."""
    largest: dict[str, int] = {}
    handles = []
    for name, module in model.decoder.named_modules():
        if not hasattr(module, "_get_input_buffer"):
            continue

        def note(attention: nn.Module, _: Any, given: dict[str, Any], __: Any, name: str = name) -> None:
            keys = attention._get_input_buffer(given["incremental_state"])["prev_key"]
            largest[name] = max(largest.get(name, 0), keys.numel() * keys.element_size())

        handles.append(module.register_forward_hook(note, with_kwargs=True))
    try:
        yield largest
    finally:
        for handle in handles:
            handle.remove()


def _then(work: Callable[[int], Any], after: Callable[[], Any]) -> Callable[[int], Any]:
    def both(number: int) -> None:
        work(number)
        after()

    return both


def plot(rows: list[Row], folder: Path) -> list[Path]:
    """Bars of time and of the key cache, by peer."""
    panels = {}
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for what in ("time", "key cache"):
            found = {
                (row["layout"], row["peer"]): row for row in rows if row["measure"] == what and row["dtype"] == dtype
            }
            panels[f"{what}, {dtype}"] = {
                name: [(found[name, peer]["ratio"], found[name, peer]["target"]) for peer in SPEEDUPS] for name in OURS
            }
    groups = [f"/ {peer}" for peer in SPEEDUPS]
    return [pictures.bars(folder / "generate.png", "beam search", groups, panels)]
