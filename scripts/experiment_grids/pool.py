"""Several runs at a time: a slot each, what each waits for, and how all of them are stopped. What they do is `runs`."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from experiment_grids.cells import ROOT
from fairseq_collab.errors import CollabError


class Stopped(Exception):
    """A run was given up because all are being stopped."""


class Processes:
    """Starts processes, and ends all that are running when asked to.

    Args:
        threads: of each process. keep_open: file descriptor that they inherit, such as a lock.
    """

    def __init__(self, threads: int, keep_open: int) -> None:
        self.threads, self.keep_open = threads, keep_open
        self.running: set[subprocess.Popen] = set()
        self.guard, self.stopping = threading.Lock(), False

    def execute(self, command: Sequence[Any], log: Path, gpu: str | None = None) -> float:
        """Runs a command; its output goes to the end of ``log``. Returns its seconds.

        Args:
            gpu: the only one that it sees, by its number or name.

        Raises:
            CollabError: it failed; the last line of its output is quoted.
            Stopped: everything is being stopped.
        """
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        environment["OMP_NUM_THREADS"] = str(self.threads)
        environment.setdefault("GOMP_SPINCOUNT", "5000")
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        log.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with log.open("ab") as stream:
            with self.guard:
                if self.stopping:
                    raise Stopped
                process = subprocess.Popen(
                    command,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    cwd=ROOT,
                    env=environment,
                    pass_fds=[self.keep_open],
                )
                self.running.add(process)
            status = process.wait()
        with self.guard:
            self.running.discard(process)
        if self.stopping:
            raise Stopped
        if status:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
            raise CollabError(f"{log.stem} ended with status {status}: {lines[-1][-300:]} (log: {log})")
        return time.monotonic() - started

    def stop(self) -> None:
        """Ends what is running, and starts nothing any more."""
        with self.guard:
            self.stopping = True
            for process in self.running:
                process.terminate()


Task = tuple[str, Callable[[int], Any], frozenset[str]]


def perform_all(
    tasks: Iterable[Task],
    slots: int,
    on_end: Callable[[str, Any], None],
    stop: Callable[[], None],
    on_wait: Callable[[list[str]], None] = lambda names: None,
    on_failure: Callable[[str, str], None] = lambda name, reason: None,
) -> dict[str, str]:
    """Does all tasks, in their order as far as they do not wait for others, a slot each.

    Args:
        tasks: name, what to do with the number of a free slot, and the names of the tasks to wait for.
        on_end: called here with name and result of each that is done. stop: makes running tasks end soon.
        on_wait: called here every now and then with the names of those that are running. on_failure: called here with
            the name of each that is not done, and why, as soon as that is known.

    Returns:
        why tasks were not done, by name: an error of theirs, or the task that they waited for.
    """
    left, failed = list(tasks), {}
    names = {name for name, _, _ in left}
    done: set[str] = set()
    free, running = list(range(slots)), {}
    with ThreadPoolExecutor(slots) as threads:
        try:
            while left or running:
                for task in list(left):
                    name, work, needs = task
                    if broken := needs & failed.keys():
                        failed[name] = f"it begins with {sorted(broken)[0]}, which failed"
                        left.remove(task)
                        on_failure(name, failed[name])
                    elif free and not (needs & names) - done:
                        left.remove(task)
                        slot = free.pop(0)
                        running[threads.submit(work, slot)] = (name, slot)
                if not running:
                    continue
                # a limit, so that signals are seen
                on_wait([name for name, _ in running.values()])
                finished, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in finished:
                    name, slot = running.pop(future)
                    free.insert(0, slot)
                    try:
                        result = future.result()
                    except (CollabError, OSError) as error:
                        failed[name] = str(error)
                        on_failure(name, failed[name])
                        continue
                    done.add(name)
                    on_end(name, result)
        except BaseException:
            stop()
            raise
    return failed
