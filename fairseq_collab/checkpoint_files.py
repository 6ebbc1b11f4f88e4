"""Checkpoint files that stay whole, and sentences for those that are not.

Reading, saving and copying of files only; what is inside a checkpoint is compared in `attention_mismatch.py`.
The functions named after fairseq's are put in their places by `patches.install`.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fairseq_collab.errors import CollabError

_DAMAGE = re.compile(
    r"PytorchStreamReader|central directory|corrupt|unexpected EOF|Ran out of input|invalid magic number"
    r"|pickle data was truncated|unexpected pos|storage has wrong byte size|file is truncated",
    re.IGNORECASE,
)
_REFUSED = re.compile(r"(?:GLOBAL|class|function)\s+`?((?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*)")
# as fairseq calls the checkpoints of a training, and what follows for one part of several
_OF_A_RUN = re.compile(
    r"checkpoint(?:_last|_best|\d+|_\d+_\d+|\.best_\w+_-?[\d.]+?)(?P<part>-(?:shard|rank|model_part).*)?\.pt"
)
_SAVE_ATTEMPTS = 3
_SECONDS_BETWEEN_ATTEMPTS = 2.5


def damage(path: str | os.PathLike) -> str | None:
    """What is visibly wrong with the checkpoint file `path`, without reading its tensors; None when nothing is.

    torch writes zip archives whose directory comes last, so a file that was cut short has none.
    The older format of torch < 1.6 carries no such mark: of it only an empty file is recognised.
    """
    path = Path(path)
    size = path.stat().st_size
    if size == 0:
        return "it is empty"
    with path.open("rb") as file:
        magic = file.read(4)
    if magic[:2] == b"PK":
        return None if _zip_is_whole(path) else f"its end is missing, only {size:,} bytes are there"
    if not magic.strip(b"\0"):
        return f"its {size:,} bytes begin with zeros"
    return None


def newest_readable_of_run(path: str | os.PathLike) -> Path | None:
    """The youngest whole checkpoint of the training that saved `path`, other than `path` itself; None without any.

    Checkpoints are of one training when they lie in one folder under the names that fairseq gives them.
    """
    path = Path(path)
    own = _OF_A_RUN.fullmatch(path.name)
    others = [
        other
        for other in path.parent.glob("*.pt")
        if (found := _OF_A_RUN.fullmatch(other.name)) and own and found["part"] == own["part"]
        if other.name != path.name and other.is_file()
    ]
    for other in sorted(others, key=lambda other: (other.stat().st_mtime_ns, other.name), reverse=True):
        if _zip_is_whole(other):
            return other
    return None


def require_readable(path: str | os.PathLike) -> None:
    """Raise CollabError when the checkpoint file `path` exists and is visibly damaged."""
    if os.path.isfile(path) and (reason := damage(path)) is not None:
        raise _damaged(path, reason)


def _zip_is_whole(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("data.pkl") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError):
        return False


def _damaged(path: str | os.PathLike, reason: str) -> CollabError:
    if (other := newest_readable_of_run(path)) is not None:
        advice = (
            f"the newest readable one of the same training is {other}: "
            f"continue training with --restore-file {other}, or name it where {Path(path).name} was named"
        )
    elif _OF_A_RUN.fullmatch(Path(path).name):
        advice = "no other readable checkpoint lies beside it: take it from a copy, or move it away to begin anew"
    else:
        advice = "take it from a copy, or make it again"
    return CollabError(f"checkpoint {path} is damaged ({reason}); {advice}")


def load_checkpoint_to_cpu(stock: Callable[..., dict]) -> Callable[..., dict]:
    """Stock fails on a damaged or a refused file with an exception of torch's that names neither file nor way out."""

    def load(path: str, *args: Any, **kwargs: Any) -> dict:
        try:
            return stock(path, *args, **kwargs)
        except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, pickle.UnpicklingError) as error:
            if isinstance(error, CollabError) or not os.path.isfile(path):
                raise
            unpickling = re.search(r"WeightsUnpickler error: (.+)", str(error))
            first_line = (unpickling[1] if unpickling else str(error)).strip() or type(error).__name__
            first_line = first_line.splitlines()[0]
            if (reason := damage(path)) is not None:
                raise _damaged(path, reason) from error
            if "eights only" in str(error) and (refused := _REFUSED.search(str(error))) is not None:
                raise CollabError(
                    f"checkpoint {path} was not loaded: it wants to run {refused.group(1)}, which is not data; if you "
                    "trust whoever wrote the file, set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 and try again"
                ) from error
            if isinstance(error, (EOFError, pickle.UnpicklingError)) or _DAMAGE.search(str(error)):
                raise _damaged(path, first_line) from error
            if isinstance(error, KeyError):
                raise CollabError(
                    f"{path} is not a fairseq checkpoint: torch reads it, but it has no entry {first_line}"
                ) from error
            raise

    return load


def torch_persistent_save(stock: Callable[..., None]) -> Callable[..., None]:
    """Stock tries three times *into the same open file*: after a failed attempt a "successful" one appends to
    what the failed one had written, and the unreadable result replaces the good checkpoint.
    Here every attempt starts an empty file, which replaces the old one only once it is on the disk."""

    def save(obj: Any, filename: str, async_write: bool = False) -> None:
        if async_write or not _is_local(filename):
            return stock(obj, filename, async_write=async_write)
        for attempt in range(1, _SAVE_ATTEMPTS + 1):
            try:
                return _replace(filename, lambda file: torch.save(obj, file))
            except (OSError, RuntimeError) as error:
                if attempt == _SAVE_ATTEMPTS or _is_full(error):
                    raise CollabError(_not_written(filename, error)) from error
                time.sleep(_SECONDS_BETWEEN_ATTEMPTS)

    return save


def copy(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Stock writes straight into the old `checkpoint_last.pt`: a full disk or a kill leaves half a file there."""

    def copy_whole(src_path: str, dst_path: str, overwrite: bool = False) -> Any:
        if not (_is_local(src_path) and _is_local(dst_path)) or (not overwrite and os.path.exists(dst_path)):
            return stock(src_path, dst_path, overwrite=overwrite)
        try:
            with open(src_path, "rb") as source:
                _replace(dst_path, lambda file: shutil.copyfileobj(source, file, 16 * 2**20))
        except OSError as error:
            raise CollabError(_not_written(dst_path, error)) from error
        return True

    return copy_whole


def _replace(filename: str, write: Callable[[Any], Any]) -> None:
    """Let `write` fill a temporary file beside `filename`, then rename it; a failure leaves `filename` as it was."""
    temporary = filename + ".tmp"
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, filename)
    except BaseException:
        if os.path.lexists(temporary):
            os.remove(temporary)
        raise


def _is_local(path: Any) -> bool:
    from fairseq.file_io import PathManager

    return isinstance(path, (str, os.PathLike)) and not PathManager.path_requires_pathmanager(str(path))


def _os_error(error: BaseException | None) -> OSError | None:
    """torch.save reports a failed write as a RuntimeError that hides the system's error."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _is_full(error: BaseException) -> bool:
    cause = _os_error(error)
    return cause is not None and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _not_written(filename: str, error: BaseException) -> str:
    cause = _os_error(error) or error
    reason = getattr(cause, "strerror", None) or str(cause).splitlines()[0]
    folder = os.path.dirname(os.path.abspath(filename))
    free = f", {shutil.disk_usage(folder).free:,} bytes are free there" if os.path.isdir(folder) else ""
    if os.path.isfile(filename):
        rest = "the file of that name is still the one saved before"
    elif (other := newest_readable_of_run(filename)) is not None:
        rest = f"the last checkpoint that was saved whole is {other}"
    else:
        rest = "no checkpoint has been saved there yet"
    return f"checkpoint {filename} could not be written ({reason}{free}); {rest}: make room and start again to resume"
