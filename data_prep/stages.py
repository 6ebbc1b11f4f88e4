"""From the files of a corpus to a binarised folder: options, stages in their order, and the closing table.

The stages are natural text, tokens, pieces and binarised data, each in a folder of its own, made once. A corpus says
which files are which split; what a stage does is in ``bitext``, ``cleaning``, ``subwords`` and ``parallel``.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data_prep import parallel
from data_prep.bitext import REASONS, FilePair, write_natural
from data_prep.cleaning import Cleaning, write_tokens
from data_prep.common import StagedFolder
from data_prep.piece_model import add_model_arguments
from data_prep.subwords import BOTH, JOINED, LONGEST, Subwords, write_subwords
from fairseq_collab.errors import CollabError

Splits = dict[str, list[FilePair]]
Unpack = Callable[[Path], Splits]


def add_folder_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--destdir`` and ``--workers``."""
    parser.add_argument("--destdir", required=True, type=Path, help="output folder")
    parser.add_argument("--workers", type=int, default=_cores(), metavar="N", help="processes (default: all cores)")


def add_limits(parser: argparse._ActionsContainer, default: Cleaning) -> None:
    """Add ``--max-length`` and ``--max-ratio``."""
    parser.add_argument(
        "--max-length",
        type=int,
        default=default.max_length,
        metavar="N",
        help="drop training pairs with more tokens on a side, 0 for none (default: %(default)s)",
    )
    parser.add_argument(
        "--max-ratio",
        type=float,
        default=default.max_ratio,
        metavar="X",
        help="drop training pairs with one side more than X times as long, 0 for none (default: %(default)s)",
    )


def add_text_arguments(parser: argparse.ArgumentParser, cleaning: Cleaning, subwords: Subwords) -> None:
    """Add the options of `Cleaning` and `Subwords`, with a corpus's own defaults."""
    group = parser.add_argument_group("tokens")
    group.add_argument(
        "--tokenizer",
        choices=("moses", "none"),
        default=cleaning.tokenizer,
        help="moses needs sacremoses (default: %(default)s)",
    )
    group.add_argument(
        "--lowercase",
        action=argparse.BooleanOptionalAction,
        default=cleaning.lowercase,
        help=f"drop case (default: {'yes' if cleaning.lowercase else 'no'})",
    )
    add_limits(group, cleaning)
    group = parser.add_argument_group("pieces")
    add_model_arguments(group, subwords.vocab_size, subwords.character_coverage)
    group.add_argument(
        "--subword-model",
        choices=("bpe", "unigram"),
        default=subwords.model,
        help="of sentencepiece (default: %(default)s)",
    )
    group.add_argument(
        "--joined",
        choices=JOINED,
        default=subwords.joined,
        help="what the languages share: both subwords and dictionary, subwords only, or none (default: %(default)s)",
    )
    parser.set_defaults(split_dashes=cleaning.split_dashes)


def check_workers(args: argparse.Namespace) -> None:
    """Refuse ``--workers`` below 1 with a `CollabError`."""
    if args.workers < 1:
        raise CollabError(f"--workers {args.workers} is out of range: give 1 or more")


def prepare_natural(
    args: argparse.Namespace,
    options: dict[str, Any],
    langs: tuple[str, str],
    find: Callable[[], Unpack],
    *,
    names: tuple[str, str] = ("text", "tokens"),
    valid_every: int = 0,
) -> None:
    """Make all stages of ``args.destdir`` from natural text, reusing what is complete, and print the table.

    Args:
        args: of `add_folder_arguments` and `add_text_arguments`.
        options: what else decides the content, as JSON values.
        langs: source and target.
        find: called if the first stage is to be made, before the folder is; returns a function that puts the files
            of the splits into a folder for a while, as far as they do not lie ready.
        names: of the first two stages. valid_every: see `write_tokens`.

    Raises:
        CollabError: an option out of range, or of the stages.
    """
    check_workers(args)
    cleaning = Cleaning(args.tokenizer, args.split_dashes, args.lowercase, args.max_length, args.max_ratio)
    subwords = Subwords(args.vocab_size, args.subword_model, args.joined, args.character_coverage)
    cleaning.check()
    subwords.check()
    first, second = names
    folder = StagedFolder(args.destdir, {**options, **vars(cleaning), **vars(subwords)})
    unpack = None if folder.check() and folder.is_complete(first) else find()

    with folder.open():
        natural = folder.stage(first, lambda path: natural_stage(path, unpack, langs))
        files = {
            split: [FilePair(*(folder.path / first / f"{split}.{lang}" for lang in langs))]
            for split in natural["splits"]
        }
        tokens = folder.stage(
            second, lambda path: write_tokens(files, path, langs, cleaning, args.workers, valid_every)
        )
        pieces = folder.stage(
            "pieces", lambda path: write_subwords(folder.path / second, path, langs, subwords, args.workers)
        )
        # fairseq counts its four special symbols, sentencepiece its three
        limit = str(subwords.vocab_size + 1)
        more = ["--nwordssrc", limit, "--nwordstgt", limit]
        binary = folder.stage("bin", lambda path: binary_stage(folder.path, path, langs, args, subwords.joined, more))
        print(table(langs, tokens, binary, pieces, natural))
        parallel.print_end(folder.path, langs)


def natural_stage(path: Path, unpack: Unpack, langs: tuple[str, str]) -> dict[str, Any]:
    """`write_natural` of the files that `unpack` finds; what it unpacked is removed again."""
    with tempfile.TemporaryDirectory(prefix=".unpacked-", dir=path) as scratch:
        return write_natural(path, unpack(Path(scratch)), langs)


def binary_stage(
    folder: Path, path: Path, langs: tuple[str, str], args: argparse.Namespace, joined: str, more: Sequence[str]
) -> dict[str, Any]:
    """`parallel.write_binary` of the stage ``pieces``."""
    return parallel.write_binary(
        folder / "pieces", path, *langs, joined=joined == BOTH, workers=args.workers, more=more
    )


def table(
    langs: tuple[str, str],
    tokens: dict[str, Any],
    binary: dict[str, Any],
    pieces: dict[str, Any] | None = None,
    natural: dict[str, Any] | None = None,
) -> str:
    """The closing table: pairs and pieces by split, then what was dropped or is unusual, by reason.

    Args:
        langs: source and target. tokens: counts of `write_tokens`. binary: of `parallel.write_binary`.
        pieces: of `write_subwords`, where tokens are not pieces already. natural: of `write_natural`, where that came
            before.
    """
    lengths = {split: row["tokens"] for split, row in pieces["splits"].items()} if pieces else tokens["tokens"]
    rows = [["split", "pairs", *(f"{lang} pieces" for lang in langs), *(f"{lang} unknown" for lang in langs)]]
    for split in parallel.SPLITS:
        unknown = (binary["unknown"].get(f"{split}.{lang}", 0.0) for lang in langs)
        numbers = [f"{number:,}" for number in (tokens["splits"][split], *(lengths[split][lang] for lang in langs))]
        rows.append([split, *numbers, *(f"{share:.3g}%" for share in unknown)])
    lines = parallel.aligned(rows)
    first = natural or {"read": tokens["read"], "dropped": {}, "kept": {}}
    dropped = Counter(first["dropped"].get("train")) + Counter(tokens["dropped"].get("train"))
    all_reasons = {reason: dropped[reason] for reason in REASONS}
    lines.append(f"dropped of {first['read']['train']:,} training pairs: {_listed(all_reasons)}")
    for split in ("valid", "test"):
        if unusual := {**first["kept"].get(split, {}), **tokens["kept"].get(split, {})}:
            lines.append(f"unusual but kept in {split}: {_listed(unusual)}")
    if longer := {split: row["longer"] for split, row in (pieces or {"splits": {}})["splits"].items() if row["longer"]}:
        lines.append(f"pairs of more than {LONGEST:,} pieces: {_listed(longer, 'in ')}")
    entries = ", ".join(f"{lang} {number:,}" for lang, number in binary["dictionaries"].items())
    lines.append(f"entries of the dictionaries: {entries}")
    return "\n".join(lines)


def _listed(counts: dict[str, int], before: str = "") -> str:
    return ", ".join(f"{number:,} {before}{reason}" for reason, number in counts.items())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
