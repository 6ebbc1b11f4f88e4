"""Files of public addresses: downloads that go on where they stopped, checked by published digests.

A file lies in a folder outside the repository, under its own name once it is whole; until then as ``.NAME.part``. Where
no digest is published, the SHA-256 of the first download is kept in ``NAME.sha256`` and checked from then on. What is
inside of a file is not known here.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import IO

from tqdm import tqdm

from fairseq_collab.errors import CollabError
from fairseq_collab.files import write_text

ATTEMPTS = 5
PAUSE = 2.0  # seconds before a broken download is resumed
_TIMEOUT = 60.0  # seconds without a byte
_BLOCK = 1 << 18
_PAGES = 3  # web pages to go through before the file


@dataclass(frozen=True)
class RemoteFile:
    """One file of a public address.

    Args:
        filename: name under which it is kept.
        url: where it is.
        size: its size in bytes, where that is published.
        digest: ``md5:…`` or ``sha256:…`` in hexadecimal, where that is published.
    """

    filename: str
    url: str
    size: int | None = None
    digest: str | None = None


def digest_of(path: Path, algorithm: str) -> str:
    """``algorithm:…`` of a file, in hexadecimal."""
    digest = hashlib.new(algorithm)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return f"{algorithm}:{digest.hexdigest()}"


def record_of(path: Path) -> Path:
    """Where the SHA-256 of the first download of `path` is kept, if no digest is published."""
    return path.with_name(f"{path.name}.sha256")


def expected_digest(path: Path, file: RemoteFile) -> str | None:
    """The published digest of `file`, else the one recorded beside `path`, else None."""
    record = record_of(path)
    if file.digest is None and record.is_file():
        return "sha256:" + record.read_text(encoding="utf-8").split()[0]
    return file.digest


def fault(copy: Path, file: RemoteFile, digest: str | None) -> str | None:
    """What is wrong with a local copy of `file`, or None.

    Args:
        copy: the copy. file: what it should be. digest: of `expected_digest`.
    """
    if file.size is not None and copy.stat().st_size != file.size:
        return f"it has {copy.stat().st_size:,} bytes instead of {file.size:,}"
    if digest is None or (found := digest_of(copy, digest.split(":")[0])) == digest:
        return None
    return f"its digest is {found} instead of {digest}"


def fetch_remote(file: RemoteFile, folder: Path) -> Path:
    """Path of `file` in `folder`, downloaded or resumed if it is not there or not whole.

    Raises:
        CollabError: the address cannot be reached or does not give the file, the connection broke, what came is not
            the file, or another process downloads it.
    """
    path = folder / file.filename
    digest = expected_digest(path, file)
    if path.exists():
        if (reason := fault(path, file, digest)) is None:
            print(f"reusing {path}")
            _record(path, digest)
            return path
        print(f"{path} is damaged ({reason}): downloading it again", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CollabError(f"another data_prep is downloading {path}; wait for it") from error
        try:
            _complete(file, stream)
        finally:
            if not part.stat().st_size:
                part.unlink()
        if (reason := fault(part, file, digest)) is not None:
            part.unlink()
            known = "published" if file.digest else "recorded"
            raise CollabError(
                f"{file.filename} from {file.url} is not the {known} file ({reason}): it was not kept; try again, or "
                "name a folder that has it with --raw"
            )
        os.replace(part, path)
    _record(path, digest)
    return path


def _record(path: Path, digest: str | None) -> None:
    if digest is None:
        found = digest_of(path, "sha256")
        write_text(record_of(path), f"{found.removeprefix('sha256:')}  {path.name}\n")
        print(f"{path}: no digest to check; {found} is recorded in {record_of(path).name} and checked from now on")


def _complete(file: RemoteFile, stream: IO[bytes]) -> None:
    """Append what is missing, resuming a connection that broke as long as it brings anything."""
    for attempt in range(1, ATTEMPTS + 1):
        before = stream.seek(0, os.SEEK_END)
        if before == file.size:
            return
        try:
            _receive(file, stream, before)
            return
        except urllib.error.HTTPError as error:
            if error.code == 416 and before:
                stream.truncate(0)
                continue
            raise CollabError(
                f"{file.filename}: {file.url} answered {error.code} {error.reason}; download it in another way and "
                "name its folder with --raw"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            stream.flush()
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            arrived = stream.seek(0, os.SEEK_END)
            if arrived <= before:
                raise CollabError(
                    f"{file.filename} could not be downloaded from {file.url} ({reason}); check the network and run "
                    "the same command again, or name a folder that has the file with --raw"
                ) from error
            if attempt == ATTEMPTS:
                raise CollabError(
                    f"the download of {file.url} broke off after {arrived:,} bytes ({reason}); the same command goes "
                    "on from there"
                ) from error
            print(f"the connection broke after {arrived:,} bytes ({reason}): resuming", flush=True)
            time.sleep(PAUSE)


def _receive(file: RemoteFile, stream: IO[bytes], start: int) -> None:
    with _open(file.url, start) as response:
        if response.status != 206 or not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            start = 0
            stream.truncate(0)
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else file.size
        if file.size is not None and total != file.size:
            raise CollabError(f"{file.url} offers {total:,} bytes instead of {file.size:,}: it is another file")
        arrived = start
        with tqdm(
            total=total, initial=start, unit="B", unit_scale=True, unit_divisor=1024, desc=f"download {file.filename}"
        ) as bar:
            while block := response.read(_BLOCK):
                stream.write(block)
                arrived += len(block)
                bar.update(len(block))
        stream.flush()
        if total is not None and arrived < total:
            raise ConnectionError(f"{arrived:,} of {total:,} bytes came")


@contextlib.contextmanager
def _open(url: str, start: int) -> Iterator[http.client.HTTPResponse]:
    """The answer that brings the file from byte `start` on; the forms in which Google Drive asks back are sent."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    headers = {"User-Agent": "fairseq-collab data_prep", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    address = url
    for _ in range(_PAGES):
        with opener.open(urllib.request.Request(address, headers=headers), timeout=_TIMEOUT) as response:
            if not response.headers.get("Content-Type", "").startswith("text/html"):
                yield response
                return
            page = response.read(1 << 20).decode("utf-8", errors="replace")
            address = _address_behind(page, response.url)
        if address is None:
            break
    title = re.search(r"<title>(.*?)</title>", page, re.DOTALL | re.IGNORECASE)
    said = f", titled {' '.join(title[1].split())!r}" if title else ""
    raise CollabError(
        f"{url} gave a web page{said}, not the file; download it with a browser and name its folder with --raw"
    )


class _Form(HTMLParser):
    """The form of a page that leads to a download: its address and its hidden fields."""

    def __init__(self) -> None:
        super().__init__()
        self.action: str | None = None
        self.fields: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if tag == "form" and "download" in found.get("action", ""):
            self.action = found["action"]
        elif tag == "input" and self.action and found.get("type") == "hidden":
            self.fields[found.get("name", "")] = found.get("value", "")


def _address_behind(page: str, url: str) -> str | None:
    form = _Form()
    form.feed(page)
    if form.action is None:
        return None
    parts = urllib.parse.urlsplit(urllib.parse.urljoin(url, form.action))
    query = dict(urllib.parse.parse_qsl(parts.query)) | form.fields
    return urllib.parse.urlunsplit(parts._replace(query=urllib.parse.urlencode(query)))
