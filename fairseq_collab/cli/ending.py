"""How every command line of this project ends: its exit status, and one sentence where something was wrong."""

import signal
import sys
from collections.abc import Callable
from types import FrameType

from fairseq_collab.errors import CollabError


def run_command(prog: str, work: Callable[[], None], when_interrupted: str) -> int:
    """Runs ``work`` and returns the exit status: 0, 1 after a sentence, 130 when interrupted.

    Args:
        prog: what messages begin with. when_interrupted: what is true then of the files.
    """
    try:
        work()
    except (CollabError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted; {when_interrupted}", file=sys.stderr)
        return 130
    return 0


def interrupt_when_terminated() -> None:
    """From now on SIGTERM is what Ctrl-C is, so that what was begun is ended in order."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
