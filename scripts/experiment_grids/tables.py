"""Markdown from lines of results: an experiment's table, and its comparisons. Nothing but lines is read."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from markdown_table import markdown_table

from experiment_grids.grids import EXPERIMENTS, TITLES
from experiment_grids.store import Line, latest

LEVEL = 0.05
# columns that are told below the table where all rows say the same
DESCRIPTION: list[tuple[str, Callable[[Line], str]]] = [
    ("key dim `R`", lambda line: str(line["key_dim"])),
    ("mix dim `P`", lambda line: str(line["mix_dim"] or "")),
    ("mixing", lambda line: TITLES.get(line["layout"], "")),
    ("its start", lambda line: (line["init"] or "") if line["model"] == "trained" else ""),
    ("collaborative attentions", lambda line: (line["attentions"] or "none").replace("+", ", ")),
]


def spread(values: Sequence[float], form: str) -> str:
    """Mean, and standard deviation if there are several values.

    Args:
        form: of each figure, as in ``format``.
    """
    mean = format(statistics.fmean(values), form)
    return mean if len(values) == 1 else f"{mean} ± {format(statistics.stdev(values), form.lstrip('+'))}"


def by_cell(lines: Sequence[Line], experiment: str) -> dict[str, list[Line]]:
    """The runs of each cell of an experiment, by seed, in the order of the grid."""
    found: dict[str, list[Line]] = {}
    for line in latest(lines, "run", experiment):
        found.setdefault(line["cell"], []).append(line)
    return found


def results_table(lines: Sequence[Line], experiment: str) -> str:
    """Means over seeds of every cell, with a note on what is the same in all and how it was measured.

    Empty where the experiment has no runs.
    """
    cells = by_cell(lines, experiment)
    if not cells:
        return ""
    firsts = [runs[0] for runs in cells.values()]
    shown, same = [], []
    for title, show in DESCRIPTION:
        values = {show(line) for line in firsts}
        if len(values) > 1:
            shown.append((title, show))
        elif values != {""}:
            same.append(f"{title} {values.pop()}")
    seeds = sorted({run["seed"] for runs in cells.values() for run in runs})
    complete = all(len(runs) == len(seeds) for runs in cells.values())
    head = ["", *(title for title, _ in shown), *([] if complete else ["seeds"])]
    head += ["bits a token", "BLEU", "chrF2", "parameters", "of queries and keys"]
    rows = []
    for name, runs in cells.items():
        row = [name, *(show(runs[0]) for _, show in shown), *([] if complete else [str(len(runs))])]
        for key, form in (("bits", ".3f"), ("bleu", ".2f"), ("chrf", ".2f")):
            values = [run[key] for run in runs if run[key] is not None]
            row.append(spread(values, form) if values else "not finite")
            if 0 < len(values) < len(runs):
                row[-1] += f" (of {len(values)}, the others not finite)"
        rows.append([*row, f"{runs[0]['parameters']:,}", f"{runs[0]['key_query_parameters']:,}"])
    return markdown_table(head, rows) + "\n" + _note(firsts[0], seeds, same, lines, experiment)


def _note(first: Line, seeds: Sequence[int], same: Sequence[str], lines: Sequence[Line], experiment: str) -> str:
    numbers = ", ".join(map(str, seeds))
    runs = latest(lines, "run", experiment)
    notes = [f"Seeds {numbers}: means ± standard deviation." if len(seeds) > 1 else f"One seed, {numbers}."]
    updates = dict.fromkeys(f"{run['updates']:,}" for run in runs if run["model"] == "trained")
    if updates:
        notes.append(f"Trained for {_all(updates)} updates.")
    if same:
        notes.append(f"In all: {'; '.join(same)}.")
    notes.append(f"Bits a token on valid; BLEU and chrF2 of {first['sentences']:,} test sentences ({first['langs']}).")
    for title, key in (("BLEU", "bleu_signature"), ("chrF2", "chrf_signature")):
        notes.append(f"{title}: {_all(run[key] for run in runs)}.")
    programs = _all(", ".join(f"{name} {number}" for name, number in run["versions"].items()) for run in runs)
    hours = sum({run["run"]: run["seconds"] for run in runs}.values()) / 3600
    notes.append(f"With {programs}; {hours:.1f} hours of processes on {_all(run['device'] for run in runs)}.")
    return "\n".join(notes) + "\n"


def _all(values: Any) -> str:
    return " and ".join(dict.fromkeys(values))


def comparison_table(lines: Sequence[Line], experiment: str) -> str:
    """Differences of cells, and whether they are more than chance; empty where nothing was compared."""
    cells = by_cell(lines, experiment)
    pairs: dict[tuple[str, str], list[Line]] = {}
    for line in latest(lines, "comparison", experiment):
        pairs.setdefault((line["cell"], line["against"]), []).append(line)
    if not pairs:
        return ""
    unit = EXPERIMENTS[experiment].share_of if experiment in EXPERIMENTS else None
    head = ["", "against", "bits a token", *([f"share of {unit}'s"] if unit else [])]
    head += ["BLEU", "p", f"seeds with p < {LEVEL}"]
    rows = []
    for (name, against), found in pairs.items():
        bits, bleu = (list(differences(cells, name, against, key).values()) for key in ("bits", "bleu"))
        row = [name, against, spread(bits, "+.3f") if bits else ""]
        row += [_share(cells, name, against, unit)] if unit else []
        row.append(spread(bleu, "+.2f") if bleu else "")
        if len(bleu) > 1:
            row[-1] += f" ({min(bleu):+.2f} to {max(bleu):+.2f})"
        single = [line for line in found if len(line["seeds"]) == 1]
        together = max(found, key=lambda line: len(line["seeds"]))
        low = sum(line["p_value"] < LEVEL for line in single)
        rows.append([*row, f"{together['p_value']:.3f}", f"{low} of {len(single)}"])
    signature = _all(line["signature"] for found in pairs.values() for line in found)
    note = (
        "Differences by seed: means ± standard deviation, and the range. p: paired bootstrap test on the translations "
        "of all seeds as one test set, in which every sentence counts once a seed. The last column has the tests of "
        f"single seeds, which are more careful.\n{signature}\n"
    )
    return markdown_table(head, rows) + "\n" + note


def differences(cells: dict[str, list[Line]], name: str, against: str, key: str) -> dict[int, float]:
    """A figure of a cell minus that of another, by seed, for each seed that both have."""
    one, other = (
        {run["seed"]: run[key] for run in cells.get(cell, []) if run[key] is not None} for cell in (name, against)
    )
    return {seed: one[seed] - other[seed] for seed in one if seed in other}


def _share(cells: dict[str, list[Line]], name: str, against: str, unit: str) -> str:
    """What a conversion loses of the bits that the plain one to the same key dim loses, mean over seeds."""
    if against != next(iter(cells)) or name not in cells:
        return ""
    key_dim = cells[name][0]["key_dim"]
    plain = f"{unit} R={key_dim}"
    lost, whole = (differences(cells, cell, against, "bits") for cell in (name, plain))
    if lost.keys() != whole.keys() or not whole or min(map(abs, whole.values())) == 0:
        return ""
    return f"{statistics.fmean(lost[seed] / whole[seed] for seed in lost):.2f}"
