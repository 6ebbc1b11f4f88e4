"""What scripts/experiments.py says of results: means, spreads, significance, pictures and the page. No run is made."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import experiments  # noqa: E402
from experiment_grids import glue_runs, page, pictures, significance, tables  # noqa: E402
from experiment_grids.cells import Setup  # noqa: E402
from experiment_grids.grids import expand  # noqa: E402
from experiment_grids.runs import Workplace  # noqa: E402
from experiment_grids.store import Store  # noqa: E402

SETUP = Setup()
PNG = b"\x89PNG"


def made_lines(experiment: str, seeds: tuple[int, ...] = (1, 2, 3)) -> list[dict[str, Any]]:
    """A line for every cell and seed: BLEU is 10 + the number of the cell + the seed, bits 4 - a tenth of that."""
    lines = []
    for seed, cells in expand(experiment, SETUP, seeds).items():
        for order, cell in enumerate(cells):
            run = cell.run
            line = {"kind": "run", "experiment": experiment, "cell": cell.name, "order": order, "seed": seed}
            line |= {"run": run.name(SETUP), "model": run.kind, "layout": run.layout, "key_dim": run.key_dim}
            line |= {"mix_dim": run.mix_dim, "init": run.init, "updates": 3000, "seconds": 360.0, "device": "cpu"}
            line |= {"attentions": None if run.layout == "concatenated" else run.attentions, "langs": "en-de"}
            line |= {"bits": 4 - (order + seed) / 10, "bleu": 10.0 + order + seed, "chrf": 30.0, "sentences": 866}
            line |= {"bleu_signature": "B", "chrf_signature": "C", "versions": {"torch": "2"}}
            line |= {"parameters": 1_000_000 + run.key_dim, "key_query_parameters": run.key_dim}
            if run.kind == "converted":
                layers = [f"{side}.layers.{n}.self_attn" for side in ("encoder", "decoder") for n in (0, 1)]
                line["errors"] = [{"name": name, "weight_error": 0.5 + order / 100} for name in layers]
            lines.append(line)
            for against in cell.against:
                comparison = {"kind": "comparison", "experiment": experiment, "cell": cell.name, "against": against}
                comparison |= {"order": order, "seeds": [seed], "signature": "bs:1000", "difference": 0.0}
                lines.append({**comparison, "p_value": 0.01 if seed == 1 else 0.2})
                lines.append({**comparison, "seeds": list(seeds), "p_value": 0.03})
    return lines


def cells_of(table: str, row: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.startswith(f"| {row} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_means_and_standard_deviations():
    table = tables.results_table(made_lines("nmt-key-dim"), "nmt-key-dim")
    assert cells_of(table, "") == [
        *("", "key dim `R`", "mix dim `P`", "mixing", "its start", "collaborative attentions"),
        *("bits a token", "BLEU", "chrF2", "parameters", "of queries and keys"),
    ]
    # the second cell: BLEU 12, 13, 14 and bits 3.8, 3.7, 3.6
    second = cells_of(table, "concatenated R=32")
    assert second[-5:] == ["3.700 ± 0.100", "13.00 ± 1.00", "30.00 ± 0.00", "1,000,032", "32"]
    assert second[1:6] == ["32", "", "", "", "none"]
    assert cells_of(table, "windows R=32 P=16")[1:5] == ["32", "16", "windows", "all_ones"]
    assert "Seeds 1, 2, 3: means ± standard deviation." in table and "Trained for 3,000 updates." in table
    assert "2.1 hours of processes" in table  # 7 runs x 3 seeds of 6 minutes


def test_columns_that_say_the_same_everywhere_are_told_once():
    lines = [line for line in made_lines("nmt-mixing", (1,)) if line["cell"].startswith("dense")]
    table = tables.results_table(lines, "nmt-mixing")
    assert cells_of(table, "")[1] == "its start"
    assert "In all: key dim `R` 32; mix dim `P` 32; mixing dense; collaborative attentions encoder, cross" in table
    assert "One seed, 1." in table and "±" not in cells_of(table, "dense R=32 noisy")[-4]


def test_missing_seeds_and_values_are_seen():
    lines = [line for line in made_lines("nmt-where") if (line["cell"], line.get("seed")) != ("dense R=32 cross", 2)]
    for line in lines:
        if line["cell"] == "dense R=32 decoder" and line["kind"] == "run":
            line["bits"] = None
        if (line["cell"], line.get("seed")) == ("dense R=32 encoder", 1):
            line["bits"] = None
    table = tables.results_table(lines, "nmt-where")
    assert "seeds" in cells_of(table, "") and "2" in cells_of(table, "dense R=32 cross")
    assert "not finite" in cells_of(table, "dense R=32 decoder")
    assert "3.650 ± 0.071 (of 2, the others not finite)" in cells_of(table, "dense R=32 encoder")
    assert "| dense R=32 decoder | concatenated R=128 |  | +3.00" in tables.comparison_table(lines, "nmt-where")


def test_comparisons_are_of_the_same_seeds():
    table = tables.comparison_table(made_lines("nmt-convert"), "nmt-convert")
    rows = [line for line in table.splitlines() if line.startswith("| weighted R=32 | original ")]
    # four cells later: 4 BLEU more and 0.4 bits fewer in every seed, plain CP dense 0.2 fewer
    expected = ["-0.400 ± 0.000", "2.00", "+4.00 ± 0.00 (+4.00 to +4.00)", "0.030", "1 of 3"]
    assert [cell.strip() for cell in rows[0].strip("|").split("|")][2:] == expected


def test_shares_of_different_seeds_are_not_divided():
    lines = made_lines("nmt-convert")
    missing = {("plain CP dense R=32", 3), ("weighted R=32", 1)}
    kept = [line for line in lines if (line["cell"], line.get("seed")) not in missing]
    table = tables.comparison_table(kept, "nmt-convert")
    row = next(line for line in table.splitlines() if line.startswith("| weighted R=32 | original "))
    assert [cell.strip() for cell in row.strip("|").split("|")][2:4] == ["-0.400 ± 0.000", ""]


def decoded(folder: Path, translations: list[str], references: list[str]) -> Path:
    folder.mkdir(parents=True)
    for name, lines in (("translations", translations), ("references", references)):
        (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
    return folder


def sentences(seed: int, count: int = 80) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choice("abcdefghij") * 3 for _ in range(8)) for _ in range(count)]


def test_equal_translations_do_not_differ_and_better_ones_do(tmp_path):
    references = sentences(1)
    worse = [line if number % 2 else line[::-1] + " x y z" for number, line in enumerate(references)]
    bad = decoded(tmp_path / "bad", worse, references)
    good = decoded(tmp_path / "good", references, references)
    same = significance.paired([(bad, bad), (good, good)], "de")
    assert same["p_value"] == 1 and same["difference"] == 0
    better = significance.paired([(bad, good), (bad, good)], "de")
    assert better["p_value"] < 0.01 and better["difference"] > 10 and "bs:1000" in better["signature"]
    # a sentence more or less is chance
    other = decoded(tmp_path / "other", [worse[1][::-1], *worse[1:]], references)
    assert significance.paired([(bad, other)], "de")["p_value"] > 0.05


def test_only_comparisons_that_are_missing_are_made(tmp_path):
    place = Workplace(tmp_path, tmp_path, SETUP, "cpu", 1)
    by_seed = expand("nmt-where", SETUP, [1, 2])
    for seed, cells in by_seed.items():
        for cell in cells[: 3 if seed == 1 else 2]:
            folder = place.folder(cell.run)
            decoded(folder / "decoded", sentences(seed), sentences(0))
            (folder / "row.json").write_text('{"langs": "en-de"}')
    store = Store(tmp_path / "results.jsonl")
    first = list(significance.pending("nmt-where", by_seed, place, []))
    assert [(line["cell"], line["seeds"]) for line, _ in first] == [
        *(("dense R=32 encoder", seeds) for seeds in ([1], [2], [1, 2])),
        ("dense R=32 cross", [1]),
    ]
    for line, pairs in first[1:]:
        store.append(significance.compare(line, pairs, place))
    again = list(significance.pending("nmt-where", by_seed, place, store.load()))
    assert [(line["cell"], line["seeds"]) for line, _ in again] == [("dense R=32 encoder", [1])]


EXPECTED = {
    "nmt-key-dim": {"cells", "key-dim", "parameters"},
    "nmt-mixing": {"cells", "mix-dim", "parameters"},
    "nmt-where": {"cells", "parameters"},
    "nmt-convert": {"cells", "parameters", "layers"},
}


@pytest.mark.parametrize("experiment", EXPECTED)
def test_pictures_are_drawn(tmp_path, experiment):
    pytest.importorskip("matplotlib")
    lines = made_lines(experiment)
    lines[0]["bits"] = None
    files = pictures.draw(lines, experiment, tmp_path)
    assert {file.stem.removeprefix(f"{experiment}-") for file in files} == EXPECTED[experiment]
    assert all(file.read_bytes()[:4] == PNG for file in files)
    assert sorted(tmp_path.iterdir()) == sorted(files)


def test_trainings_that_all_diverged_are_left_out_of_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    lines = made_lines("nmt-mixing")
    for line in lines:
        if line["kind"] == "run" and line["layout"] == "concatenated":
            line["bits"] = None
    assert len(pictures.draw(lines, "nmt-mixing", tmp_path)) == 3


def glue_lines() -> list[dict[str, Any]]:
    stages = ((None, "original"), (32, "converted"), (32, "finetuned"))
    return [
        {
            "kind": "glue",
            "experiment": "glue-convert",
            "task": "SST-2",
            "seed": seed,
            "key_dim": key_dim,
            "stage": stage,
            "scores": {"valid": {"accuracy": 80.0 + seed}},
        }
        for seed in (1, 2)
        for key_dim, stage in stages
    ]


def test_glue_results_become_lines_once(tmp_path):
    folder = tmp_path / "glue" / "runs" / "SST-2" / "seed-1" / "original"
    folder.mkdir(parents=True)
    result = {key: glue_lines()[0][key] for key in ("task", "seed", "key_dim", "stage", "scores")}
    (folder / "result.json").write_text(json.dumps(result))
    (line,) = glue_runs.new_lines(tmp_path, [])
    assert {**glue_lines()[0], "versions": line["versions"]} == line
    assert list(glue_runs.new_lines(tmp_path, [line])) == []
    assert "| 32 | converted | 81.5 | 81.50 |" in glue_runs.table(glue_lines())


def test_the_page_is_made_from_the_lines_alone(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    store = Store(tmp_path / "results.jsonl")
    for line in [*made_lines("nmt-convert"), *made_lines("nmt-key-dim"), *glue_lines()]:
        store.append(line)
    out = tmp_path / "docs" / "results.md"
    assert experiments.main(["page", "--results", str(store.path), "--out", str(out)]) == 0
    text = out.read_text()
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        "## Key dims and mixings, trained from scratch",
        "## Converting a trained model",
        "## Converting fine-tuned encoders",
    ]
    linked = {line.split("](")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")}
    assert len(linked) == 7 and all((out.parent / name).read_bytes()[:4] == PNG for name in linked)
    assert page.tables_of("nmt-mixing", store.load()) == ""
    capsys.readouterr()
    assert experiments.main(["table", "nmt-convert", "--results", str(store.path)]) == 0
    assert capsys.readouterr().out.count("| distilled R=32 + 1 epoch |") == 4


def test_missing_results_are_told(tmp_path, capsys):
    assert experiments.main(["table", "--results", str(tmp_path / "none.jsonl")]) == 1
    assert "there are no results in" in capsys.readouterr().err
    (tmp_path / "empty.jsonl").write_text("")
    for command in (["table", "nmt-where"], ["page", "--out", str(tmp_path / "page.md")]):
        assert experiments.main([*command, "--results", str(tmp_path / "empty.jsonl")]) == 1
        assert "the results hold no runs of" in capsys.readouterr().err
    assert experiments.main(["table", "unknown", "--results", str(tmp_path / "empty.jsonl")]) == 1
    assert "there is no experiment unknown" in capsys.readouterr().err
