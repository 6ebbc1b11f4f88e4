"""Which differences of BLEU are more than chance: the paired bootstrap test, of each seed and of all together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from evaluate_bleu import read_lines

from experiment_grids.cells import Run
from experiment_grids.grids import Cell
from experiment_grids.runs import Workplace
from experiment_grids.store import Line
from fairseq_collab.scoring import metrics_for, paired_test

SAMPLES = 1000


def paired(folders: Sequence[tuple[Path, Path]], lang: str) -> dict[str, Any]:
    """Tests the second system of each pair against the first, with the test sets of all pairs as one.

    A sentence counts once a pair.

    Args:
        folders: of decoded test sets, translations.txt and references.txt in each. lang: target language.

    Returns:
        difference (second - first), p_value, signature.
    """
    systems = []
    for side in (0, 1):
        texts = {name: [] for name in ("translations", "references")}
        for pair in folders:
            for name, lines in texts.items():
                lines += read_lines(pair[side] / f"{name}.txt")
        systems.append({"path": "AB"[side], "lines": texts["translations"], "references": texts["references"]})
    metrics = {"bleu": metrics_for(None, lang)["bleu"]}
    result = paired_test(systems, metrics, SAMPLES)["bleu"]
    return {key: result[key] for key in ("difference", "p_value", "signature")}


def pending(
    experiment: str, cells: dict[int, list[Cell]], place: Workplace, lines: Sequence[Line]
) -> Iterator[tuple[Line, list[tuple[Run, Run]]]]:
    """The comparisons of an experiment that are not among its lines, of runs that are finished.

    Returns:
        a line without its result, and the pairs of runs, the one compared with first; for each seed, then for all.
    """
    known = {
        (line["cell"], line["against"], tuple(line["runs"]), tuple(line["against_runs"]))
        for line in lines
        if line.get("kind") == "comparison" and line.get("experiment") == experiment
    }
    pairs: dict[tuple[int, str, str], dict[int, tuple[Run, Run]]] = {}
    for seed, of_seed in cells.items():
        runs = {cell.name: cell.run for cell in of_seed}
        for cell in of_seed:
            for against in cell.against:
                pair = (runs.get(against), cell.run)
                if pair[0] and all(place.finished(run) for run in pair):
                    pairs.setdefault((cell.order, cell.name, against), {})[seed] = pair
    for (order, name, against), by_seed in pairs.items():
        groups = [[seed] for seed in by_seed] + ([list(by_seed)] if len(by_seed) > 1 else [])
        for seeds in groups:
            chosen = [by_seed[seed] for seed in seeds]
            first, second = ([pair[side].name(place.setup) for pair in chosen] for side in (0, 1))
            if (name, against, tuple(second), tuple(first)) not in known:
                line = {"kind": "comparison", "experiment": experiment, "cell": name, "against": against}
                yield {**line, "order": order, "seeds": seeds, "runs": second, "against_runs": first}, chosen


def compare(line: Line, pairs: Sequence[tuple[Run, Run]], place: Workplace) -> Line:
    """The line with its result."""
    folders = [tuple(place.folder(run) / "decoded" for run in pair) for pair in pairs]
    lang = place.finished(pairs[0][0])["langs"].split("-")[1]
    return {**line, **paired(folders, lang)}
