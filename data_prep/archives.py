"""Archives of a corpus, downloaded or already at hand, packed or unpacked, and the files in them.

Files are found by their base names, wherever in an archive or folder they lie. What they hold is the caller's.
"""

from __future__ import annotations

import argparse
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from data_prep.common import default_cache
from data_prep.downloads import RemoteFile, expected_digest, fault, fetch_remote
from fairseq_collab.errors import CollabError


@dataclass(frozen=True)
class Archive:
    """A tar archive of a public address.

    Args:
        remote: the archive. members: names of the files that are read from it.
    """

    remote: RemoteFile
    members: tuple[str, ...]


@dataclass(frozen=True)
class Located:
    """An archive as it was found: packed at `path`, or unpacked as `files` by base name."""

    archive: Archive
    path: Path | None
    files: dict[str, Path]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--raw``, ``--cache`` and ``--no-checksums``."""
    group = parser.add_argument_group("source")
    group.add_argument(
        "--raw", type=Path, metavar="DIR", help="folder that has the archives, or their files; no download"
    )
    group.add_argument("--cache", type=Path, help="folder of downloads (default: $XDG_CACHE_HOME/fairseq-collab)")
    group.add_argument(
        "--no-checksums", action="store_true", help="take archives of another size or digest than the published one"
    )


def locate(archives: Iterable[Archive], args: argparse.Namespace, corpus: str) -> list[Located]:
    """Find all archives, downloading what is not there; with ``--raw`` nothing is downloaded.

    Args:
        archives: what is wanted. args: of `add_arguments`. corpus: name of their folder in the cache.

    Raises:
        CollabError: the folder lacks some of them, one is not the published one, or a download failed.
    """
    wanted = list(archives)
    if args.no_checksums:
        wanted = [replace(a, remote=replace(a.remote, size=None, digest=None)) for a in wanted]
    if args.raw is None:
        folder = (args.cache or default_cache()) / corpus
        return [Located(archive, fetch_remote(archive.remote, folder), {}) for archive in wanted]
    if not args.raw.is_dir():
        raise CollabError(f"--raw {args.raw}: there is no such folder")
    found = [_look_up(archive, args.raw) for archive in wanted]
    if missing := [a.remote for a, located in zip(wanted, found, strict=True) if located is None]:
        names = ", ".join(f"{remote.filename} ({remote.url})" for remote in missing)
        raise CollabError(f"--raw {args.raw} has neither {names} nor the files in it; add them, or leave --raw out")
    for located in found:
        if located.path is None:
            continue
        remote = located.archive.remote
        if (reason := fault(located.path, remote, expected_digest(located.path, remote))) is not None:
            raise CollabError(
                f"{located.path} is not the published archive ({reason}); replace it, or pass --no-checksums to take it"
            )
    return found


def unpack(located: Iterable[Located], folder: Path) -> dict[str, Path]:
    """Paths of all members by base name, those of packed archives written into `folder`.

    Raises:
        CollabError: an archive is damaged or lacks a member.
    """
    paths: dict[str, Path] = {}
    for source in located:
        paths |= source.files or _extract(source.path, source.archive.members, folder)
    return paths


def _look_up(archive: Archive, folder: Path) -> Located | None:
    path = folder / archive.remote.filename
    if path.is_file():
        return Located(archive, path, {})
    files = {}
    for member in archive.members:
        name = PurePosixPath(member).name
        candidates = (folder / member, folder / name)
        if (file := next((path for path in candidates if path.is_file()), None)) is None:
            return None
        files[name] = file
    return Located(archive, None, files)


def _extract(path: Path, members: Iterable[str], folder: Path) -> dict[str, Path]:
    wanted = {PurePosixPath(member).name for member in members}
    found: dict[str, Path] = {}
    try:
        with (
            path.open("rb") as packed,
            tqdm(total=path.stat().st_size, unit="B", unit_scale=True, desc=f"unpack {path.name}") as bar,
            tarfile.open(fileobj=packed, mode="r|*") as archive,
        ):
            for member in archive:
                name = PurePosixPath(member.name).name
                if not member.isfile() or name not in wanted - found.keys():
                    continue
                with archive.extractfile(member) as source, (folder / name).open("wb") as target:
                    while block := source.read(1 << 20):
                        target.write(block)
                        bar.update(packed.tell() - bar.n)
                found[name] = folder / name
                if len(found) == len(wanted):
                    break
            bar.update(bar.total - bar.n)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise CollabError(f"{path} is damaged or no tar archive ({error}); remove it and get it again") from error
    if missing := sorted(wanted - found.keys()):
        raise CollabError(f"{path} has no {', '.join(missing)}: it is another archive")
    return found
