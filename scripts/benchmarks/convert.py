"""Conversion of a whole checkpoint by ``fairseq-collab-convert`` in a fresh process: its seconds and peak memory.

The checkpoint is of transformer_wmt_en_de with a joined dictionary of 32,000 words and shared embeddings, random
weights and the state of Adam, saved by fairseq's trainer as in training. Peak memory is the resident set of the
converting process (Linux only), everything that it imports included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import Row, make_row
from fairseq_collab.errors import CollabError

HELP = "seconds and peak memory of converting a transformer_wmt_en_de checkpoint"
ROOT = Path(__file__).resolve().parents[2]
SECONDS, MEMORY = 60.0, 2.5
ROUNDS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this suite."""
    parser.add_argument("--key-dim", type=int, default=128, metavar="R", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--workdir", type=Path, metavar="DIR", help="place for 1.3 GB of temporary files")


def run(args: argparse.Namespace) -> list[Row]:
    """A row of seconds and one of memory."""
    return measure_convert(
        "transformer_wmt_en_de", 32_000, args.key_dim, 1 if args.quick else args.rounds, args.workdir
    )


def measure_convert(
    arch: str, words: int, key_dim: int, rounds: int, workdir: Path | None = None, options: Sequence[str] = ()
) -> list[Row]:
    """Makes a checkpoint of ``arch`` and converts it ``rounds`` times.

    Args:
        words: of the joined dictionary. options: further ones of fairseq-train.

    Raises:
        CollabError: fairseq is missing, or the conversion failed.
    """
    with tempfile.TemporaryDirectory(dir=workdir) as scratch:
        folder = Path(scratch)
        path, output = folder / "in.pt", folder / "out.pt"
        _run([sys.executable, "-m", "benchmarks.convert", str(folder), str(path), arch, str(words), *options])
        size = path.stat().st_size
        command = [sys.executable, "-m", "fairseq_collab.cli.convert", "--path", str(path), "--output", str(output)]
        command += ["--key-dim", str(key_dim)]
        seconds, peaks = [], []
        for number in range(rounds):
            output.unlink(missing_ok=True)
            print(f"converting {size / 1e6:,.0f} MB, round {number + 1} of {rounds}", flush=True)
            elapsed, peak = _run(command)
            seconds.append(elapsed)
            peaks.append(peak)
        facts = {"file_bytes": size, "output_bytes": output.stat().st_size, "all_seconds": seconds}
    case = f"{arch}, {size / 1e6:,.0f} MB, R={key_dim}"
    backend = {"backend": "torch float64, cpu", "rounds": rounds}
    rows = [
        make_row("convert", f"{case}: seconds", "-", statistics.median(seconds), SECONDS, unit="s", **backend, **facts)
    ]
    if all(peaks):
        peak = max(peaks)
        memory = {**backend, **facts, "peak_bytes": peak}
        rows.append(make_row("convert", f"{case}: peak memory", "size of the file", peak / size, MEMORY, **memory))
    return rows


def _run(command: Sequence[str]) -> tuple[float, int | None]:
    """Seconds of a process, and the high-water mark of its resident memory in bytes, None where /proc is missing."""
    paths = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    peak = None
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                peak = _high_water(process.pid) or peak
                time.sleep(0.01)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        seconds = time.perf_counter() - started
        if process.returncode:
            log.seek(0)
            lines = log.read().decode(errors="replace").split("\n")
            last = [line for line in lines if line.strip()][-1:] or ["no message"]
            raise CollabError(f"{' '.join(command[1:3])} failed with exit code {process.returncode}: {last[0][:300]}")
    return seconds, peak


def _high_water(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def make_checkpoint(folder: Path, path: Path, arch: str, words: int, options: Sequence[str] = ()) -> None:
    """Saves a checkpoint after one step of Adam on gradients of zero, as fairseq-train would.

    Args:
        folder: for the two dictionaries. words: of each, the same ones.
    """
    import torch
    from fairseq import options as fairseq_options
    from fairseq import tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.trainer import Trainer

    for language in ("src", "tgt"):
        (folder / f"dict.{language}.txt").write_text("".join(f"word{i} {words - i}\n" for i in range(words)))
    arguments = [str(folder), "--task", "translation", "--source-lang", "src", "--target-lang", "tgt"]
    arguments += ["--arch", arch, "--share-all-embeddings", "--optimizer", "adam", "--lr", "5e-4", "--cpu"]
    arguments += ["--lr-scheduler", "inverse_sqrt", "--criterion", "label_smoothed_cross_entropy"]
    arguments += ["--max-tokens", "3500", *options]
    parser = fairseq_options.get_training_parser()
    config = convert_namespace_to_omegaconf(fairseq_options.parse_args_and_arch(parser, arguments))
    torch.manual_seed(1)
    task = tasks.setup_task(config.task)
    trainer = Trainer(config, task, task.build_model(config.model), task.build_criterion(config.criterion))
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()
    trainer.consolidate_optimizer()
    trainer.save_checkpoint(str(path), {"train_iterator": {"epoch": 1}, "val_loss": 0.0})


if __name__ == "__main__":
    make_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5:])
