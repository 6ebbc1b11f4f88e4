"""A folder that is complete or absent: filled under another name, then renamed; its digests tell whether it is whole.

What goes into it is the caller's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_prep.common import sha256_of
from fairseq_collab.errors import CollabError
from fairseq_collab.files import differences, read_json, write_json


def make(destdir: Path, manifest: str, source: dict[str, Any], build: Callable[[Path], None]) -> bool:
    """Fill `destdir` unless it is whole already.

    Args:
        destdir: the folder; one of these, empty, or not there.
        manifest: name of the JSON file in it that keeps `source` and the digests of all other files.
        source: whatever decides the content, as JSON values; other than in the manifest is refused.
        build: called with a new folder that takes the name of `destdir` afterwards.

    Returns:
        whether anything was made.

    Raises:
        CollabError: the folder holds something else, or was made from something else.
    """
    begun = check(destdir, manifest, source)
    if begun and _is_whole(destdir, manifest):
        print(f"reusing {destdir}")
        return False
    destdir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".partial-{destdir.name}-", dir=destdir.parent) as scratch:
        folder = Path(scratch) / "new"
        folder.mkdir()
        build(folder)
        digests = {str(p.relative_to(folder)): sha256_of(p) for p in sorted(folder.rglob("*")) if p.is_file()}
        write_json(folder / manifest, {**source, "files": digests})
        if begun:
            os.replace(destdir, Path(scratch) / "old")
        os.replace(folder, destdir)
    return True


def check(destdir: Path, manifest: str, source: dict[str, Any]) -> bool:
    """Whether `destdir` was made before, from the same `source`.

    Raises:
        CollabError: it holds something else, or was made from something else.
    """
    if destdir.exists() and not destdir.is_dir():
        raise CollabError(f"{destdir} is a file: --destdir must name a folder")
    if not destdir.exists() or not any(destdir.iterdir()):
        return False
    found = read_manifest(destdir, manifest)
    if "files" not in found:
        raise CollabError(f"{destdir} is not empty and was not made by data_prep; choose another --destdir")
    del found["files"]
    if other := differences(found, source):
        raise CollabError(
            f"{destdir} was made from something else ({other}); choose another --destdir, or remove that folder"
        )
    return True


def read_manifest(destdir: Path, manifest: str) -> dict[str, Any]:
    """The content of the manifest, empty if there is no readable one."""
    found = read_json(destdir / manifest)
    return found if isinstance(found, dict) else {}


def _is_whole(destdir: Path, manifest: str) -> bool:
    files = read_manifest(destdir, manifest)["files"]
    return all((destdir / name).is_file() and sha256_of(destdir / name) == digest for name, digest in files.items())
