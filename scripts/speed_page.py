"""Writes the page of speeds from what ``benchmark.py`` measured: ``speed_page.py --json-dir DIR --out docs/speed.md``.

DIR holds SUITE.json as ``benchmark.py SUITE --json DIR/SUITE.json`` writes it, of one machine; several folders make a
part of the page each. ``--again DIR`` is a second measurement of the first machine: its ratios stand beside those of
the first one, which alone makes pictures and advice. Every figure on the page comes from those files, sentences of
advice included; pictures are drawn from them into the folder ``speed`` beside the page. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import scaling  # noqa: E402
from benchmarks.advice import advice  # noqa: E402
from benchmarks.attention import BOTH, FORWARD  # noqa: E402
from benchmarks.common import BUSY, Row  # noqa: E402
from benchmarks.layers import CONCATENATED  # noqa: E402
from markdown_table import markdown_table  # noqa: E402

from fairseq_collab.cli.ending import run_command  # noqa: E402
from fairseq_collab.errors import CollabError  # noqa: E402
from fairseq_collab.files import read_json, write_text  # noqa: E402

SUITES = {
    "attention": "One attention layer",
    "variants": "Other ways to compute it",
    "scaling": "Lengths and key dims",
    "train": "Training",
    "generate": "Beam search",
}
Suites = dict[str, list[Row]]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="speed_page.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("--json-dir", type=Path, nargs="+", required=True, metavar="DIR", help="a machine's files each")
    parser.add_argument("--again", type=Path, metavar="DIR", help="the first machine's files of another time")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the page, e.g. docs/speed.md")
    return parser


def load(folder: Path) -> Suites:
    """The rows of each suite that was measured.

    Raises:
        CollabError: there are none, or a file is not what the benchmark writes.
    """
    suites = {}
    for name in SUITES:
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        rows = read_json(path)
        if not isinstance(rows, list) or not rows or not all(row.get("suite") == name for row in rows):
            raise CollabError(f"{path} is not what scripts/benchmark.py {name} --json writes; measure it again")
        suites[name] = rows
    if not suites:
        commands = f"scripts/benchmark.py SUITE --json {folder}/SUITE.json"
        raise CollabError(f"{folder} holds none of {', '.join(SUITES)} (.json); make them with {commands}")
    return suites


def page(machines: dict[Path, Suites], again: Suites, out: Path) -> str:
    """The whole text; draws the pictures beside ``out``.

    Args:
        again: suites of the first machine that were measured twice.
    """
    parts = [
        "# Speed\n",
        "Every figure is a ratio of two things measured in turns in one run (A B A B ...), the median of the ratios of "
        "all rounds; below 1, ours needs less. Absolute times are medians of the same rounds. This page is written by "
        "`scripts/speed_page.py` from the files of `scripts/benchmark.py`. On a machine with a GPU, "
        "`scripts/gpu_check.sh` runs the tests that need one and the suites attention, train, generate and scaling, "
        "and writes such a page.\n",
        "B is the batch, T the length, D the width, H the heads, R the key dim. *Fork-style* is a layer that works as "
        "the paper's published code does: it mixes the keys of every head, and caches them all. *Of the limit* is the "
        "share of the rate of a large matrix product that ours and theirs reach. The backends are those of "
        "`fairseq_collab.functional.backend_used`.\n",
    ]
    for number, (folder, suites) in enumerate(machines.items()):
        pictures = out.parent / "speed" / folder.name if len(machines) > 1 else out.parent / "speed"
        pictures.mkdir(parents=True, exist_ok=True)
        parts += machine_part(suites, {} if number else again, folder, pictures, out.parent)
    return "\n".join(parts)


def machine_part(suites: Suites, again: Suites, folder: Path, pictures: Path, base: Path) -> list[str]:
    """The part of one machine: its facts, the advice, a section a suite."""
    rows = [row for suite in suites.values() for row in suite]
    repeated = [row for suite in again.values() for row in suite]
    parts = [f"## {heading(rows[0]['host'])}\n", *warnings([*rows, *repeated]), f"{targets_met(rows, repeated)}\n"]
    parts += [f"- {sentence}" for sentence in advice(suites)]
    for name, suite in suites.items():
        module = importlib.import_module(f"benchmarks.{name}")
        parts.append(f"\n### {SUITES[name]}\n\n{module.__doc__.strip()}\n")
        parts.append(f"    python scripts/benchmark.py {name} --json {folder.name}/{name}.json\n")
        parts.append(f"{host_line(suite)}\n")
        if name in again:
            parts.append(f"Again: {host_line(again[name])}\n")
        drawn = module.plot(suite, pictures) if hasattr(module, "plot") else []
        parts += [f"![{path.stem}]({path.relative_to(base)})\n" for path in drawn]
        if name == "scaling":
            parts += [*crossing_tables(suite), *drift(suite, again.get(name, []))]
        else:
            parts.append(table(suite, again.get(name, [])))
    return parts


def targets_met(rows: Sequence[Row], again: Sequence[Row]) -> str:
    """How many targets were met, the first time, the second time, and both times."""
    first = {key_of(row) for row in rows if row["met"]}
    judged = sum(row["met"] is not None for row in rows)
    if not again:
        return f"{len(first)} of {judged} targets that the project set itself were met; the tables name each of them."
    second = {key_of(row) for row in again if row["met"]}
    return (
        f"Of {judged} targets that the project set itself, {len(first)} were met when it was measured first, "
        f"{len(second)} when it was measured again, {len(first & second)} both times; the tables name each of them."
    )


def key_of(row: Row) -> tuple[str, str, str]:
    """What tells a row from all others."""
    return row["suite"], row["case"], row["peer"]


def drift(rows: Sequence[Row], again: Sequence[Row]) -> list[str]:
    """How far the second measurement of the same points lies from the first."""
    second = {key_of(row): row["ratio"] for row in again}
    apart = sorted(abs(second[key_of(row)] / row["ratio"] - 1) for row in rows if key_of(row) in second)
    if not apart:
        return []
    typical, most = statistics.median(apart), apart[int(0.95 * (len(apart) - 1))]
    return [
        f"Measured again, half of the {len(apart)} ratios changed by less than {typical:.1%} and 95 in 100 by less "
        f"than {most:.1%}.\n"
    ]


def heading(host: dict) -> str:
    return host.get("gpu") or f"{host['cpu']}, {host['threads']} threads"


def host_line(rows: Sequence[Row]) -> str:
    """The host of a suite and the rounds behind its figures."""
    facts = ", ".join(f"{key} {value}" for key, value in rows[0]["host"].items())
    rounds = sorted({row["rounds"] for row in rows})
    return f"Host: {facts}. Rounds: {' or '.join(map(str, rounds))}."


def warnings(rows: Sequence[Row]) -> list[str]:
    """What forbids to cite the figures, if anything does."""
    found = []
    if any(row["quick"] for row in rows):
        found.append("**Not to be cited: measured with `--quick`, on less work.**\n")
    if any(row["host"]["load"] > BUSY for row in rows):
        found.append("**Not to be cited: other programs were running on the machine.**\n")
    return found


def table(rows: Sequence[Row], again: Sequence[Row]) -> str:
    """The rows of a suite with their targets and absolute figures, and the ratios of ``again`` beside them."""
    second = {key_of(row): row for row in again}
    marks = {None: "", True: "yes", False: "**no**"}
    rated = any("rate" in row for row in rows)
    lines = []
    for row in rows:
        found, target = ratio_of(row), "" if row["target"] is None else f"{row['target']:.3f}"
        if "speedup" in row:
            found += f" ({row['speedup']:.2f}x)"
            target += f" ({row['wanted_speedup']:.2f}x)"
        figures = [row["case"], row["peer"], found, target, marks[row["met"]]]
        if second:
            other = second.get(key_of(row))
            figures += [ratio_of(other), marks[other["met"]]] if other else ["", ""]
        figures += absolute(row)
        if rated:
            shares = [f"{row[side] / row['limit_rate']:.0%}" for side in ("rate", "peer_rate") if side in row]
            figures.append(" / ".join(shares))
        lines.append([*figures, row["backend"]])
    head = [
        "case",
        "against",
        "ratio",
        "at most",
        "met",
        *(["again", "met"] if second else []),
        "ours",
        "theirs",
        *(["of the limit"] if rated else []),
    ]
    return markdown_table([*head, "backend"], lines)


def ratio_of(row: Row) -> str:
    """The ratio; a dash where one side could not be measured."""
    return "–" if row["ratio"] is None else f"{row['ratio']:.3f}"


def absolute(row: Row) -> tuple[str, str]:
    """Ours and theirs in their units."""
    for key, unit, factor in (
        ("words_per_second", "words/s", 1),
        ("tokens_per_second", "tokens/s", 1),
        ("seconds", "ms", 1000),
        ("bytes", "MB", 1e-6),
    ):
        if key in row:
            return tuple(f"{row[side + key] * factor:,.4g} {unit}" for side in ("", "peer_"))
    return "", ""


def crossing_tables(rows: Sequence[Row]) -> list[str]:
    """Where each layout passes concatenated heads: along T for every R, along R for every T."""
    parts = []
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        chosen = [row for row in rows if row["dtype"] == dtype]
        for what in (FORWARD, BOTH):
            for axis, letter, fixed, fixed_letter in (("length", "T", "key_dim", "R"), ("key_dim", "R", "length", "T")):
                lines = []
                for value in sorted({row[fixed] for row in chosen}):
                    curves = [scaling.curve(chosen, axis, what, layout, **{fixed: value}) for layout in layouts]
                    lines.append([str(value), *(scaling.said(one, letter) if one else "" for one in curves)])
                parts.append(f"Against {CONCATENATED} heads along {letter}, {what}, {dtype}:\n")
                parts.append(markdown_table([fixed_letter, *layouts], lines))
        best = max(chosen, key=lambda row: row["rate"] / row["limit_rate"])
        parts.append(
            f"The machine's own matrix product runs at {best['limit_rate'] / 1e9:,.4g} billion operations a second in "
            f"{dtype}; the best of all points is {best['rate'] / best['limit_rate']:.0%} of it ({best['case']}).\n"
        )
    return parts


def write(args: argparse.Namespace) -> None:
    """Reads all folders, then writes the page."""
    machines = {folder: load(folder) for folder in args.json_dir}
    again = load(args.again) if args.again else {}
    write_text(args.out, page(machines, again, args.out))
    print(f"wrote {args.out}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line: 0 when the page was written."""
    args = build_parser().parse_args(argv)
    return run_command("speed_page.py", lambda: write(args), "the page was not written")


if __name__ == "__main__":
    sys.exit(main())
