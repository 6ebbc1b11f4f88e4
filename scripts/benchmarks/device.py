"""The processor that a suite measures on: its clock, its peak memory, its fused kernels, its own matrix products.

Nothing here knows any model. Memory on the CPU is what torch's allocator hands out, as its profiler records it block
by block: exact and the same in every run, where the resident set of a process holds what the C library keeps back.
Scratch space that a mathematics library takes for itself is in neither.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import MIN_SECONDS, measure_in_turns, seconds_of

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself otherwise

SHORT = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--device`` and ``--dtype``."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default, help="default: a GPU where there is one")
    names = list(SHORT.values())
    help_text = "precisions to measure; default: all on a GPU, fp32 on the CPU"
    parser.add_argument("--dtype", choices=names, nargs="+", help=help_text)


def dtypes_of(args: argparse.Namespace) -> list[torch.dtype]:
    """The precisions asked for, or those of the device."""
    names = args.dtype or (SHORT.values() if args.device == "cuda" else ["fp32"])
    return [dtype for dtype, name in SHORT.items() if name in names]


def min_seconds_of(args: argparse.Namespace) -> float:
    """The least time of a turn: a GPU's events are exact enough for a shorter one."""
    seconds = MIN_SECONDS / 4 if args.device == "cuda" else MIN_SECONDS
    return seconds / 20 if args.quick else seconds


def clock_of(device: str) -> Callable[[Callable[[], Any]], float]:
    """Seconds of a call on a device: those between two events of its stream on a GPU."""
    return cuda_seconds if device == "cuda" else seconds_of


def cuda_seconds(work: Callable[[], Any]) -> float:
    """Seconds that the GPU needed, from an idle stream to an idle stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000  # milliseconds


def peak_bytes(work: Callable[[], Any], device: str) -> int:
    """The most memory that ``work`` holds at a time beyond what was held before; it is called once to warm up."""
    work()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    blocks = sorted(
        (event["args"]["Ev Idx"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"
    )
    held = peak = 0
    for _, size in blocks:
        held += size
        peak = max(peak, held)
    return peak


def fused_kernels(work: Callable[[], Any], device: str) -> list[str]:
    """torch's fused attention kernels that can compute ``work`` by themselves; only asked on a GPU."""
    if device != "cuda":
        return []
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": getattr(SDPBackend, "CUDNN_ATTENTION", None),
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    able = []
    for name, kernel in kernels.items():
        if kernel is None:
            continue
        try:
            with warnings.catch_warnings(), sdpa_kernel(kernel):
                warnings.simplefilter("ignore")  # every reason why a kernel cannot is a warning
                work()
                torch.cuda.synchronize()
            able.append(name)
        except RuntimeError:
            continue
    return able


def product_rate(device: str, dtype: torch.dtype, *, rounds: int = 7, size: int | None = None) -> float:
    """Operations a second of the machine's own product of two square matrices, the median of the rounds."""
    size = size or (8192 if device == "cuda" else 1536)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = measure_in_turns({"product": lambda _: torch.mm(a, b)}, rounds, clock=clock_of(device))
    return 2 * size**3 / statistics.median(times["product"])
