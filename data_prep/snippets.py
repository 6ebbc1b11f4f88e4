"""Sentences that people scored from -4 (most negative) to 4: reviews of films and goods, editorials, tweets.

The package vaderSentiment (MIT) carries them in an archive inside its source distribution. It is downloaded, checked
and read as an archive; none of its code runs, and it is never installed.

DESTDIR, when done:
  movie.tsv, amazon.tsv, nyt.tsv, tweets.tsv      lines of id, mean score and text, separated by tabs
  README.txt, LICENSE.txt                         the authors' description, and the licence
  unpacked.json                                   the archive it came from, and the digest of each file
"""

from __future__ import annotations

import argparse
import tarfile
from pathlib import Path
from typing import NamedTuple

from data_prep import unpacked
from data_prep.common import PackageFile
from fairseq_collab.errors import CollabError

HELP = "23,703 sentences with a sentiment score (2.5 MB download)"
PACKAGE = PackageFile(
    requirement="vaderSentiment==2.5",
    filename="vaderSentiment-2.5.tar.gz",
    sha256="b960c954831f5ca58afee61780cc04ed48e551b91e783bfcbfb2c18bb8081a84",
    size=2_451_781,
)
ROOT = "vaderSentiment-2.5/"
INNER = "additional_resources/hutto_ICWSM_2014.tar.gz"
SOURCES = {
    "movie": "movieReviewSnippets_GroundTruth.txt",
    "amazon": "amazonReviewSnippets_GroundTruth.txt",
    "nyt": "nytEditorialSnippets_GroundTruth.txt",
    "tweets": "tweets_GroundTruth.txt",
}


class Snippet(NamedTuple):
    """One sentence: the authors' id, the mean of the scores that people gave (-4 to 4), and the text in one line."""

    id: str
    score: float
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this package."""
    unpacked.add_arguments(parser, PACKAGE)


def prepare(args: argparse.Namespace) -> None:
    """Make ``args.destdir`` and print how many sentences each file has.

    Raises:
        CollabError: unreachable registry, damaged archive, or a folder that holds something else.
    """
    unpacked.unpack(args, PACKAGE, _build)
    for name in SOURCES:
        scores = [snippet.score for snippet in read_tsv(args.destdir / f"{name}.tsv")]
        print(f"{name + '.tsv':<12}{len(scores):>8,} sentences, scores {min(scores):.2f} to {max(scores):.2f}")


def read_tsv(path: Path) -> list[Snippet]:
    """The sentences of a file that `prepare` made.

    Raises:
        CollabError: the file is missing, or a line is not id, score and text.
    """
    if not path.is_file():
        raise CollabError(f"there is no {path}; make it with python -m data_prep snippets")
    return parse(path.read_bytes(), str(path))


def parse(content: bytes, name: str) -> list[Snippet]:
    """Lines of id, score and text, separated by tabs; white space inside a text becomes single spaces.

    Args:
        content: UTF-8 with any of the usual line ends. name: what to call it in messages.

    Raises:
        CollabError: it is not UTF-8, has no line, or a line is not of that form.
    """
    try:
        lines = content.decode("utf-8-sig").replace("\r\n", "\n").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise CollabError(f"{name} is not UTF-8 ({error})") from error
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            key, score, text = line.split("\t", 2)
            found.append(Snippet(key.strip(), float(score), " ".join(text.split())))
        except ValueError as error:
            raise CollabError(f"{name}, line {number} is not id, score and text: {line[:60]!r}") from error
    return found


def read_archive(archive: Path) -> tuple[dict[str, list[Snippet]], bytes, bytes]:
    """The sentences of each of `SOURCES`, the authors' description, and the licence, out of the downloaded archive.

    Raises:
        CollabError: it is not readable, another package, or has a line that `parse` refuses.
    """
    try:
        with tarfile.open(archive) as outer:
            licence = _read(outer, ROOT + "LICENSE.txt", archive)
            with (
                outer.extractfile(_member(outer, ROOT + INNER, archive)) as stream,
                tarfile.open(fileobj=stream, mode="r:gz") as inner,
            ):
                readme = _read(inner, "hutto_ICWSM_2014/_README_.txt", archive)
                found = {
                    name: parse(_read(inner, f"hutto_ICWSM_2014/{source}", archive), source)
                    for name, source in SOURCES.items()
                }
    except (tarfile.TarError, EOFError, OSError) as error:
        reason = " ".join(str(error).split())
        raise CollabError(f"{archive} is not a readable source distribution ({reason})") from error
    return found, readme, licence


def _build(archive: Path, folder: Path) -> None:
    found, readme, licence = read_archive(archive)
    (folder / "README.txt").write_bytes(readme)
    (folder / "LICENSE.txt").write_bytes(licence)
    for name, sentences in found.items():
        rows = "".join(f"{s.id}\t{s.score!r}\t{s.text}\n" for s in sentences)
        (folder / f"{name}.tsv").write_text(rows, encoding="utf-8", newline="\n")


def _member(archive: tarfile.TarFile, name: str, path: Path) -> tarfile.TarInfo:
    try:
        member = archive.getmember(name)
    except KeyError as error:
        raise CollabError(f"{path} has no {name}: it is another package or version") from error
    if not member.isfile():
        raise CollabError(f"{path}: {name} is no ordinary file")
    return member


def _read(archive: tarfile.TarFile, name: str, path: Path) -> bytes:
    with archive.extractfile(_member(archive, name, path)) as stream:
        return stream.read()
