"""Sentences inside of the markup of evaluation campaigns: SGML and XML test sets, and the tagged text of talks.

None of it is well-formed, so it is read by its tags. Bytes stay as they are; entities are not decoded, which is how
sacreBLEU and fairseq's own preparations read these files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from fairseq_collab.errors import CollabError

_SEGMENT = re.compile(rb"<seg\b[^>]*>(.*?)</seg>", re.DOTALL)
_BREAKS = re.compile(rb"\s*[\r\n]\s*")
_HEADERS = (b"<url>", b"<talkid>", b"<keywords>")
_TAGS = re.compile(rb"</?(?:title|description)>")


def write_segments(files: Iterable[Path], target: Path, replace: tuple[str, str] = ("", "")) -> Path:
    """Write the texts between ``<seg …>`` and ``</seg>`` of `files`, one a line, and return `target`.

    Args:
        files: SGML or XML. target: file to write. replace: a text and what to put in its place.

    Raises:
        CollabError: a file has no segment.
    """
    old, new = (text.encode() for text in replace)
    with target.open("wb") as stream:
        for file in files:
            segments = _SEGMENT.findall(file.read_bytes())
            if not segments:
                raise CollabError(f"{file} has no <seg> … </seg>: it is no test set")
            for segment in segments:
                line = _BREAKS.sub(b" ", segment).strip()
                stream.write((line.replace(old, new) if old else line) + b"\n")
    return target


def write_talks(file: Path, target: Path) -> Path:
    """Write the sentences, titles and descriptions of ``train.tags`` files, one a line, and return `target`.

    Lines with an address, a number or keywords of a talk are left out.
    """
    with file.open("rb") as source, target.open("wb") as stream:
        for line in source:
            if not any(header in line for header in _HEADERS):
                stream.write(_TAGS.sub(b"", line))
    return target
