"""fairseq-preprocess in a process of its own, with a progress bar, and a sentence when it fails."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from fairseq_collab.errors import CollabError

_BINARISED = re.compile(r"\[\w+\] (.+): \d+ sents, \d+ tokens, ([\d.e+-]+)% replaced")


def preprocess(options: Sequence[str], files: int) -> dict[str, float]:
    """Run fairseq-preprocess and return by file name how many percent of its tokens the dictionary does not know.

    Args:
        options: of fairseq-preprocess. files: how many it will write, for the progress bar.

    Raises:
        CollabError: fairseq is not installed, or refused the text.
    """
    command = [sys.executable, "-m", "fairseq_cli.preprocess", *options]
    unknown: dict[str, float] = {}
    last = "no message"
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    try:
        with tqdm(total=files, desc="fairseq-preprocess", unit="file") as progress:
            for line in process.stdout:
                last = line.strip() or last
                if match := _BINARISED.search(line):
                    unknown[Path(match[1]).name] = float(match[2])
                    progress.update()
        process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    finally:
        process.stdout.close()
    if process.returncode != 0:
        raise CollabError(f"fairseq-preprocess failed ({last}); is fairseq installed for {sys.executable}?")
    return unknown
