"""The grids of scripts/experiments.py: what runs there are, what is done again, and what tables say of made results.

Nothing is trained here; tests/integration/test_experiment_runs.py does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from fairseq_collab.errors import CollabError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import experiments  # noqa: E402
from experiment_grids import cells, estimate, grids, pool, runs  # noqa: E402
from experiment_grids.cells import Setup, collaborative, concatenated, model_flags  # noqa: E402
from experiment_grids.store import Store, latest  # noqa: E402

SETUP = Setup()


def names(experiment: str, setup: Setup = SETUP, seed: int = 1) -> dict[str, str]:
    return {cell.name: cell.run.name(setup) for cell in grids.expand(experiment, setup, [seed])[seed]}


@pytest.mark.parametrize("setup", [SETUP, cells.TINY], ids=["full", "tiny"])
@pytest.mark.parametrize("experiment", grids.EXPERIMENTS)
def test_cells_of_a_grid_are_different_runs_compared_with_earlier_cells(experiment, setup):
    of_seed = grids.expand(experiment, setup, [1, 2])
    for seed, found in of_seed.items():
        assert len({cell.name for cell in found}) == len(found) == len({cell.run.name(setup) for cell in found})
        assert len(found) > 5 and all(cell.run.seed == seed for cell in found)
        for number, cell in enumerate(found):
            assert set(cell.against) <= {earlier.name for earlier in found[:number]}
            assert number == 0 or cell.against
    assert not {cell.run for cell in of_seed[1]} & {cell.run for cell in of_seed[2]}


@pytest.mark.parametrize("tiny", [[], ["--tiny"]], ids=["full", "tiny"])
def test_models_of_every_experiment_can_be_built(tmp_path, capsys, tiny):
    arguments = ["run", *grids.EXPERIMENTS, "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert experiments.main([*arguments, *tiny, "--dry-run"]) == 0, capsys.readouterr().err


def test_experiments_share_runs_of_the_same_configuration():
    main, mixing, where, convert = map(names, grids.EXPERIMENTS)
    assert mixing["dense R=32 noisy"] == main["dense R=32"] == where["dense R=32 all"]
    assert mixing["windows R=32 P=16 all_ones"] == main["windows R=32 P=16"] == where["windows R=32 all"]
    assert mixing["picked R=32 P=16 all_ones"] == main["picked R=32 P=16"]
    assert convert["original"] == main["concatenated R=128"] == mixing["concatenated R=128"]
    grid = {name: grids.expand(name, SETUP, [1]) for name in ("nmt-key-dim", "nmt-mixing")}
    assert len(grids.all_runs(grid)) == 7 + 6


def test_a_name_follows_every_part_of_the_configuration():
    first = concatenated(1, 32).name(SETUP)
    assert first == concatenated(1, 32).name(Setup())
    others = [concatenated(2, 32), concatenated(1, 16), collaborative(1, "dense", 32), cells.tuned(concatenated(1, 32))]
    different = {first, concatenated(1, 32).name(Setup(updates=7)), *(run.name(SETUP) for run in others)}
    assert len(different) == 6


def test_flags_rebuild_the_model_of_a_cell():
    assert model_flags(concatenated(1, 128), SETUP) == ["--arch", "transformer"]
    small = model_flags(concatenated(1, 32), SETUP)
    assert small[2:] == ["--collaborative-heads", "none", "--key-dim", 32]
    window = model_flags(collaborative(1, "window", 32, 16), SETUP)
    assert window[2:] == ["--key-dim", 32, "--mix-layout", "window", "--mixing-init", "all_ones", "--mix-dim", 16]
    cross = model_flags(collaborative(1, "dense", 32, attentions="cross"), SETUP)
    assert cross[2:6] == ["--collaborative-heads", "cross", "--cross-key-dim", 32] and "--key-dim" not in cross


def test_only_chosen_cells_and_what_they_begin_with_remain():
    grid = {"nmt-convert": grids.expand("nmt-convert", SETUP, [3])}
    chosen = [cell.name for cell in grids.select(grid, ["*epoch"])["nmt-convert"][3]]
    assert chosen == ["original", "original + 1 epoch", "distilled R=32", "distilled R=32 + 1 epoch"]
    with pytest.raises(CollabError, match="fits no row; known are original, "):
        grids.select(grid, ["nothing"])


def test_rows_keep_their_places_when_only_some_are_chosen():
    grid = {"nmt-convert": grids.expand("nmt-convert", SETUP, [1])}
    places = {cell.name: cell.order for cell in grid["nmt-convert"][1]}
    assert list(places.values()) == list(range(len(places)))
    chosen = grids.select(grid, ["distilled*"])["nmt-convert"][1]
    assert {cell.name: cell.order for cell in chosen} == {cell.name: places[cell.name] for cell in chosen}


def test_estimate_takes_finished_runs_of_the_same_kind():
    first, second = concatenated(1, 128), concatenated(2, 32)
    row = {"model": "trained", "layout": "concatenated", "flags": [], "seconds": 100}
    assert estimate.seconds_left([first, second], SETUP, [row, {**row, "seconds": 200}]) == 300
    dense = collaborative(1, "dense", 32)
    assert estimate.seconds_left([dense], SETUP, [row]) == estimate.expected_seconds(dense, SETUP) > 300


# one run


class Commands:
    """Stands in for processes: writes what each would leave, and fails where it is told to."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.fail_at = ""

    def __call__(self, command, log: Path) -> float:
        self.steps.append(log.stem)
        if log.stem == self.fail_at:
            raise CollabError(f"{log.stem} ended with status 1")
        folder = log.parent
        if log.stem == "train":
            lines = [
                f'x | INFO | valid | {{"valid_loss": "{loss}", "valid_nll_loss": "{bits}", "valid_num_updates": "{n}"}}'
                for loss, bits, n in (("3.0", "4.5", 10), ("2.5", "4.25", 20), ("2.75", "4.0", 30))
            ]
            log.write_text("noise\n" + "\n".join(lines) + "\n")
        if log.stem == "decode":
            score = {"score": 10.0, "signature": "s"}
            system = {"bleu": score, "chrf": score, "langs": ["a", "b"], "sentences": 2, "parameters": [7]}
            (folder / "scores.json").write_text(json.dumps({"systems": [system]}))
        return 1.5


@pytest.fixture
def place(tmp_path, monkeypatch) -> runs.Workplace:
    monkeypatch.setattr("quickstart_report.count_model", lambda path: {"key_query_parameters": 3})
    monkeypatch.setattr(runs, "_keep", lambda checkpoint, model: None)
    return runs.Workplace(tmp_path, tmp_path / "data", SETUP, "cpu", 1)


def test_a_finished_step_is_not_done_again(place):
    run, commands = concatenated(1, 128), Commands()
    commands.fail_at = "decode"
    with pytest.raises(CollabError, match="decode ended"):
        runs.perform(run, place, commands)
    assert place.finished(run) is None
    commands.fail_at = ""
    row = runs.perform(run, place, commands)
    assert commands.steps == ["train", "decode", "decode"]
    assert runs.perform(run, place, commands) == row == place.finished(run)
    assert commands.steps == ["train", "decode", "decode"]
    assert row["seconds"] == pytest.approx(3.0, abs=0.1)
    # of the checkpoint with the best loss, which need not have the fewest bits
    assert (row["bits"], row["bits_best"], row["bits_last"], row["updates"]) == (4.25, 4.25, 4.0, 30)


def test_tuned_models_are_the_last_ones(place):
    source = concatenated(1, 128)
    log = place.folder(source) / "train.log"
    log.parent.mkdir(parents=True)
    log.write_text('x | INFO | train | {"epoch": 1, "train_loss": "3.0", "train_num_updates": "286"}\n')
    row = runs.perform(cells.tuned(source), place, Commands())
    assert (row["bits"], row["bits_best"]) == (4.0, 4.25)
    command = json.loads((place.folder(cells.tuned(source)) / "steps.json").read_text())["train"]["command"]
    assert "--total-num-update 286" in command and "--arch transformer " in command


def test_the_newest_log_tells_what_is_being_done(tmp_path):
    assert runs.status(tmp_path) == "starting"
    train = tmp_path / "train.log"
    train.write_text("x" * 5000 + '| train_inner | {"num_updates": "100"}\n| train_inner | {"num_updates": "1200"}\n')
    assert runs.status(tmp_path) == "train 1,200"
    os.utime(train, (1, 1))
    (tmp_path / "decode.log").write_text("")
    assert runs.status(tmp_path) == "decode"


# results as lines


def test_a_half_written_line_is_ignored_and_repaired(tmp_path):
    store = Store(tmp_path / "new" / "results.jsonl")
    assert store.load() == []
    store.append({"a": 1})
    store.append({"b": "é"})
    with store.path.open("a") as stream:
        stream.write('{"c": "half')
    assert store.load() == [{"a": 1}, {"b": "é"}]
    store.append({"d": 4})
    assert store.load() == [{"a": 1}, {"b": "é"}, {"d": 4}]
    assert store.path.read_text().count("\n") == 3


def test_a_whole_line_without_its_end_is_kept(tmp_path):
    store = Store(tmp_path / "results.jsonl")
    store.path.write_text('{"a": 1}\n{"b": 2}')
    assert store.load() == [{"a": 1}, {"b": 2}]
    store.append({"c": 3})
    assert store.load() == [{"a": 1}, {"b": 2}, {"c": 3}]


def test_a_broken_line_elsewhere_is_named(tmp_path):
    store = Store(tmp_path / "results.jsonl")
    store.path.write_text('{"a": 1}\nbroken\n{"b": 2}\n')
    with pytest.raises(CollabError, match="line 2 of .* is no JSON object"):
        store.load()


def test_the_last_line_of_a_cell_and_seed_counts():
    line = {"kind": "run", "experiment": "e", "cell": "c", "seed": 1, "order": 2}
    lines = [
        {**line, "bleu": 1},
        {**line, "seed": 2, "bleu": 5},
        {**line, "bleu": 2},
        {**line, "cell": "b", "order": 0},
    ]
    assert [(one["cell"], one.get("bleu")) for one in latest(lines, "run", "e")] == [("b", None), ("c", 2), ("c", 5)]


# several runs at a time


def test_tasks_wait_for_what_they_begin_with_and_all_are_done():
    order: list[str] = []

    def task(name: str, *needs: str) -> pool.Task:
        return name, lambda slot: order.append(name) or slot, frozenset(needs)

    ended: list[str] = []
    tasks = [task("late", "first", "second"), task("second", "first"), task("first"), task("free", "not here")]
    failed = pool.perform_all(tasks, 2, lambda name, result: ended.append(name), lambda: None)
    assert failed == {} and sorted(ended) == ["first", "free", "late", "second"]
    assert order.index("first") < order.index("second") < order.index("late")


def test_a_failure_leaves_out_only_what_begins_with_it():
    def fail(slot: int) -> None:
        raise CollabError("no space left")

    ended: list[str] = []
    tasks = [
        ("bad", fail, frozenset()),
        ("child", lambda slot: 1, frozenset(["bad"])),
        ("other", lambda slot: 1, frozenset()),
    ]
    told: list[tuple[str, str]] = []
    failed = pool.perform_all(
        *(tasks, 1, lambda name, result: ended.append(name), lambda: None),
        on_failure=lambda name, reason: told.append((name, reason)),
    )
    assert ended == ["other"] and dict(told) == failed and len(told) == 2
    assert failed == {"bad": "no space left", "child": "it begins with bad, which failed"}


def test_processes_are_ended_and_failures_quoted(tmp_path):
    with (tmp_path / "lock").open("w") as stream:
        processes = pool.Processes(1, stream.fileno())
        with pytest.raises(CollabError, match="bad ended with status 3: why"):
            processes.execute([sys.executable, "-c", "print('why'); raise SystemExit(3)"], tmp_path / "bad.log")

        def interrupt(name: str, result: object) -> None:
            raise KeyboardInterrupt

        sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
        tasks = [
            ("long", lambda slot: processes.execute(sleep, tmp_path / "long.log"), frozenset()),
            ("short", lambda slot: 1, frozenset()),
        ]
        with pytest.raises(KeyboardInterrupt):
            pool.perform_all(tasks, 2, interrupt, processes.stop)
        assert not processes.running
        with pytest.raises(pool.Stopped):
            processes.execute(sleep, tmp_path / "more.log")


# the command line


def test_a_plan_says_what_is_finished_and_how_long_the_rest_takes(tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    out = tmp_path / "out"
    folder = out / "runs" / concatenated(1, 128).name(SETUP)
    folder.mkdir(parents=True)
    row = {"model": "trained", "layout": "concatenated", "flags": [], "seconds": 3600}
    (folder / "row.json").write_text(json.dumps(row))
    arguments = ["run", "nmt-key-dim", "--data", str(data), "--out", str(out), "--device", "cpu", "--seeds", "1"]
    assert experiments.main([*arguments, "--cells", "concatenated*", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("finished  concatenated R=128") == 1 and printed.count("to do") == 2
    assert "3 runs, 1 finished; the others take about 2.0 hours, 1 at a time" in printed
    assert not (out / "settings.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nmt-where"], "make it with python -m data_prep homeassistant"),
        (["nmt-where", "--data", ".", "--seeds", "1,x"], "--seeds 1,x is no list of whole numbers"),
        (["nmt-where", "--data", ".", "--cells", "unknown"], "--cells unknown fits no row"),
        (["nmt-where", "--data", ".", "--jobs", "0"], "--jobs 0 is out of range"),
        (["nmt-where", "--data", ".", "--updates", "0"], "--updates 0 is out of range"),
        (["nmt-where", "--data", ".", "--key-dims", ""], "--key-dims  is no list of whole numbers"),
        (["nmt-where", "--data", ".", "--key-dims", "20"], "--key-dims 20: Windows in the first attention of layer 0"),
        (["nmt-key-dim", "--data", ".", "--key-dims", "32,20"], "--key-dims 32,20: The key dim 20"),
        (["nmt-key-dim", "--data", ".", "--key-dims", "128"], "--key-dims 128: give less than the width 128"),
        (["glue-convert", "--"], "glue-convert needs a model and tasks"),
        (
            ["nmt-where", "--data", ".", "--", "--tiny"],
            "what follows -- is for glue-convert, which is not among nmt-where",
        ),
    ],
)
def test_mistakes_are_told_before_anything_is_made(tmp_path, capsys, arguments, message):
    assert experiments.main(["run", "--out", str(tmp_path / "out"), "--device", "cpu", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_begun_with_other_settings_is_refused(tmp_path):
    experiments.begin(runs.Workplace(tmp_path, tmp_path, SETUP, "cpu", 1))
    experiments.begin(runs.Workplace(tmp_path, tmp_path, Setup(), "cpu", 2))
    with pytest.raises(CollabError, match="updates 3000 and now 5"):
        experiments.begin(runs.Workplace(tmp_path, tmp_path, Setup(updates=5), "cpu", 1))


def test_flags_after_two_dashes_go_to_glue(tmp_path, monkeypatch):
    commands: list[list[str]] = []
    monkeypatch.setattr(experiments.glue_runs, "run", commands.append)
    arguments = ["run", "glue-convert", "--seeds", "4", "--out", str(tmp_path), "--device", "cpu"]
    assert experiments.main([*arguments, "--", "--tiny", "--tasks", "CoLA"]) == 0
    ((_, script, *flags),) = commands
    assert Path(script).name == "glue.py" and flags[0] == "table"
    assert flags[1:] == [
        *("--out", str(tmp_path / "glue"), "--seeds", "4", "--device", "cpu"),
        "--tiny",
        "--tasks",
        "CoLA",
    ]
