"""A folder taken out of one archive of a package registry: complete or absent, checked by SHA-256, made once.

Which archive, and what is read from it, is the caller's.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from data_prep.common import PackageFile, fetch, sha256_of
from fairseq_collab.errors import CollabError
from fairseq_collab.files import write_json

MANIFEST = "unpacked.json"


def add_arguments(parser: argparse.ArgumentParser, package: PackageFile) -> None:
    """Add ``--destdir``, ``--archive``, ``--sha256`` and ``--cache``."""
    parser.add_argument("--destdir", required=True, type=Path, help="output folder")
    parser.add_argument("--archive", type=Path, help="use this downloaded file instead of downloading it")
    parser.add_argument("--sha256", default=package.sha256, help="what the archive must have (default: the pinned one)")
    parser.add_argument("--cache", type=Path, help="folder of downloads (default: $XDG_CACHE_HOME/fairseq-collab)")


def unpack(args: argparse.Namespace, package: PackageFile, build: Callable[[Path, Path], None]) -> bool:
    """Fill ``args.destdir`` unless it is whole already.

    Args:
        args: of `add_arguments`.
        package: the archive.
        build: called as ``build(archive, folder)``, writes the files into a new folder that takes the name of
            ``args.destdir`` afterwards.

    Returns:
        whether anything was made.

    Raises:
        CollabError: the folder is not one of these, or was made from another archive; or the archive is missing, has
            another digest, or is not what `build` expects.
    """
    destdir: Path = args.destdir
    source = {"package": package.requirement, "sha256": args.sha256}
    begun = _check(destdir, source)
    if begun and _is_whole(destdir):
        print(f"reusing {destdir}")
        return False
    archive = _archive(args, package)
    destdir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".partial-{destdir.name}-", dir=destdir.parent) as scratch:
        folder = Path(scratch) / "new"
        folder.mkdir()
        build(archive, folder)
        digests = {str(p.relative_to(folder)): sha256_of(p) for p in sorted(folder.rglob("*")) if p.is_file()}
        write_json(folder / MANIFEST, {**source, "files": digests})
        if begun:
            os.replace(destdir, Path(scratch) / "old")
        os.replace(folder, destdir)
    return True


def _archive(args: argparse.Namespace, package: PackageFile) -> Path:
    if args.archive is None:
        return fetch(replace(package, sha256=args.sha256), args.cache)
    if not args.archive.is_file():
        raise CollabError(f"--archive {args.archive}: there is no such file; leave it out to download one")
    digest = sha256_of(args.archive)
    if digest != args.sha256:
        raise CollabError(f"{args.archive} has SHA-256 {digest}, not {args.sha256}; pass --sha256 to accept it")
    return args.archive


def _check(destdir: Path, source: dict[str, str]) -> bool:
    """Whether the folder was made before, from the same archive."""
    if destdir.exists() and not destdir.is_dir():
        raise CollabError(f"{destdir} is a file: --destdir must name a folder")
    if not destdir.exists() or not any(destdir.iterdir()):
        return False
    manifest = _read_manifest(destdir)
    if "package" not in manifest:
        raise CollabError(f"{destdir} is not empty and was not made by data_prep; choose another --destdir")
    made_from = {key: manifest.get(key) for key in source}
    if made_from != source:
        old, new = (" ".join(str(value) for value in one.values()) for one in (made_from, source))
        raise CollabError(f"{destdir} was made from {old}, not {new}; choose another --destdir, or remove that folder")
    return True


def _is_whole(destdir: Path) -> bool:
    files = _read_manifest(destdir).get("files", {})
    return all((destdir / name).is_file() and sha256_of(destdir / name) == digest for name, digest in files.items())


def _read_manifest(destdir: Path) -> dict:
    try:
        found = json.loads((destdir / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
