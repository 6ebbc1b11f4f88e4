"""The suites attention, scaling, train and generate on tiny models, and the page that is written from their files.

No time is judged here.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import benchmark  # noqa: E402
import speed_page  # noqa: E402
from benchmarks import advice, attention, common, device, generate, layers, models, scaling, train, variants  # noqa: E402

from fairseq_collab.errors import CollabError  # noqa: E402

KEYS = {"suite", "case", "peer", "ratio", "target", "met", "backend", "rounds", "unit"}
FP32 = [torch.float32]
HOST = {"cpu": "one", "cores": 2, "threads": 2, "torch": "2", "python": "3", "load": 0.1}


def check_rows(rows: list[common.Row], suite: str) -> None:
    for row in rows:
        assert row.keys() >= KEYS and row["suite"] == suite and row["rounds"] >= 1
        assert row["met"] is (None if row["target"] is None else row["ratio"] <= row["target"])
    assert len({(row["case"], row["peer"]) for row in rows}) == len(rows)
    json.dumps(rows)


def make_args(suite: str, *options: str) -> argparse.Namespace:
    return benchmark.build_parser().parse_args([suite, *options])


@pytest.fixture(scope="module")
def attention_rows() -> list[common.Row]:
    targets = attention.Targets(dict(windows=0.7), dict(windows=0.8))
    return attention.measure_cases({layers.Shape(3, 6, 32, 4, 16): targets}, "cpu", FP32, 2, 0.0)


@pytest.fixture(scope="module")
def scaling_rows() -> list[common.Row]:
    return scaling.measure_grid(scaling.make_grid((4, 8), (8, 12, 32), 32, 4, 16), "cpu", FP32, 1, 0.0)


@pytest.fixture(scope="module")
def train_rows() -> list[common.Row]:
    lengths = [(n, n + 1) for n in range(3, 9)]
    return train.measure_steps("transformer_tiny", 50, 48, lengths, 30, 2, "cpu")


@pytest.fixture(scope="module")
def generate_rows() -> list[common.Row]:
    return generate.measure_generation("transformer_tiny", 50, 48, 3, 7, 2, "cpu", FP32)


def test_attention_gives_time_and_memory_against_both_peers(attention_rows):
    check_rows(attention_rows, "attention")
    found = {(row["measure"], row["layout"], row["peer"]): row for row in attention_rows}
    targets = {key: row["target"] for key, row in found.items() if row["target"] is not None}
    memory = {("peak memory", layout, layers.CONCATENATED): 1.0 for layout in attention.OURS}
    assert targets == {
        ("forward", "windows", layers.CONCATENATED): 0.7,
        ("forward+backward", "windows", layers.CONCATENATED): 0.8,
        ("forward+backward", "dense", layers.FORK): 1.0,
        **memory,
    }
    backends = {row["layout"]: row["backend"] for row in attention_rows}
    assert backends == {"dense": "dense-blocks", "windows": "windows-sdpa", "picked": "one_hot-sdpa"}
    both = found["forward+backward", "dense", layers.CONCATENATED]
    shape = layers.Shape(3, 6, 32, 4, 16)
    assert both["rate"] == pytest.approx(3 * layers.operations("dense", shape) / both["seconds"])
    assert both["limit_rate"] > 0


def test_attention_measures_the_shapes_of_the_targets():
    assert [tuple(vars(shape).values()) for shape in attention.CASES] == [
        (64, 32, 512, 8, 128),
        (16, 128, 512, 8, 128),
        (4, 512, 768, 12, 192),
        (1, 2048, 768, 12, 192),
    ]
    forward = [targets.forward for targets in attention.CASES.values()]
    both = [targets.both for targets in attention.CASES.values()]
    assert [one["windows"] for one in (*forward, *both)] == [0.68, 0.70, 0.72, 0.78, 0.72, 0.77, 0.80, 0.85]
    assert [one["picked"] for one in (*forward, *both)] == [0.75, 0.80, 0.80, 0.85, 0.75, 0.78, 0.85, 0.90]


def test_scaling_leaves_out_groups_that_do_not_exist(scaling_rows):
    check_rows(scaling_rows, "scaling")
    grouped = {row["key_dim"] for row in scaling_rows if row["layout"] == layers.GROUPED}
    assert grouped == {8, 32}
    assert {(row["length"], row["batch"]) for row in scaling_rows} == {(4, 4), (8, 2)}
    assert len(scaling_rows) == 2 * 2 * (3 * 4 + 2)


@pytest.mark.parametrize(
    "points, found, words",
    (
        ([(16, 0.5), (64, 2.0)], [32], "faster up to T = 32, slower up to T = 64"),
        ([(64, 0.5), (16, 2.0)], [32], "slower up to T = 32, faster up to T = 64"),
        ([(16, 0.5), (64, 0.9)], [], "faster from T = 16 to T = 64"),
        ([(16, 1.5), (64, 1.1)], [], "slower from T = 16 to T = 64"),
        (
            [(1, 0.5), (4, 2.0), (16, 0.5)],
            [2, 8],
            "faster up to T = 2, slower up to T = 8, faster up to T = 16",
        ),
    ),
)
def test_crossings_lie_between_neighbours_on_logarithmic_scales(points, found, words):
    assert scaling.crossings(points) == pytest.approx(found)
    assert scaling.said(points, "T") == words


def test_a_training_step_is_compared_in_words_a_second(train_rows):
    check_rows(train_rows, "train")
    assert [(row["layout"], row["peer"]) for row in train_rows] == [
        (layout, peer) for layout in ("dense", "windows") for peer in (layers.CONCATENATED, layers.FORK)
    ]
    assert [row["target"] for row in train_rows] == [1 / 1.08, 1.0] * 2
    assert "dense-blocks" in train_rows[0]["backend"] and "windows-" in train_rows[2]["backend"]
    for row in train_rows:
        assert row["speedup"] == pytest.approx(1 / row["ratio"]) and row["words_per_second"] > 0


def test_all_models_of_a_comparison_are_those_named():
    counts = {}
    for name in models.NAMES:
        model = models.build(name, "transformer_tiny", 50, 16)[2]
        kinds = {type(module).__name__ for module in model.modules() if hasattr(module, "_get_input_buffer")}
        counts[name] = (kinds.pop(), model.decoder.layers[0].encoder_attn.k_proj.out_features)
        assert not kinds
    ours = ("CollaborativeMultiheadAttention", 16)
    assert counts == {
        "dense": ours,
        "windows": ours,
        layers.FORK: ("ForkStyleAttention", 16),
        layers.CONCATENATED: ("MultiheadAttention", 64),
    }


def test_batches_are_fairseqs_from_short_to_long_sentences():
    generator = random.Random(0)
    lengths = [(generator.randint(2, 20), generator.randint(2, 20)) for _ in range(500)] + [(70, 2)]
    batches = models.choose_batches(lengths, 60, 4)
    assert len(batches) == 4 and all(batch for batch in batches)
    assert all(len(batch) * max(map(max, batch)) <= 60 for batch in batches)
    longest = [max(target for _, target in batch) for batch in batches]
    assert longest == sorted(longest) and longest[0] < longest[-1]


def test_lengths_are_those_of_the_pieces_and_their_end_mark(tmp_path):
    for folder in ("bin", "pieces"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bin/train.en-pt_BR.en.idx").touch()
    (tmp_path / "pieces/train.en").write_text("a b\nc\n")
    (tmp_path / "pieces/train.pt_BR").write_text("x\ny z w\n")
    assert models.real_lengths(tmp_path) == [(3, 2), (2, 4)]


def test_a_folder_without_sentences_names_the_command(tmp_path, capsys):
    assert benchmark.main(["train", "--data", str(tmp_path)]) == 1
    assert "holds no prepared training pairs; make it with python -m data_prep" in capsys.readouterr().err
    assert benchmark.main(["train", "--data", str(tmp_path / "no")]) == 1
    assert "--data" in capsys.readouterr().err


def test_training_in_a_precision_that_fairseq_lacks_is_refused(tmp_path):
    with pytest.raises(CollabError, match="fairseq trains in fp32 on this device: choose one with --dtype"):
        train.run(make_args("train", "--device", "cpu", "--dtype", "bf16"))


def test_the_cache_of_shared_keys_is_exactly_as_narrow_as_they_are(generate_rows):
    check_rows(generate_rows, "generate")
    caches = [row for row in generate_rows if row["measure"] == "key cache"]
    assert [(row["layout"], row["peer"], row["ratio"]) for row in caches] == [
        (layout, peer, ratio)
        for layout in ("dense", "windows")
        for peer, ratio in ((layers.CONCATENATED, 48 / 64), (layers.FORK, 1 / 2))
    ]
    # transformer_tiny: 2 layers; 3 sentences x 5 beams, 7 target positions, 60 source positions, 4 bytes
    assert caches[0]["bytes"] == 2 * 15 * (7 + 60) * 48 * 4
    assert caches[0]["met"] and caches[1]["target"] is None
    times = [row for row in generate_rows if row["measure"] == "time"]
    assert [row["target"] for row in times] == [1 / 1.10, 1 / 1.15] * 2
    assert "dense-product" in times[0]["backend"] and "spread-product" in times[2]["backend"]


def test_every_hypothesis_has_exactly_the_steps_asked_for():
    _, task, model = models.build("windows", "transformer_tiny", 50, 16)
    found = generate.generation(model.eval(), task.target_dictionary, 2, 6, "cpu")(0)
    assert [len(one["tokens"]) for sentence in found for one in sentence] == [6] * 10


@pytest.mark.parametrize(
    "options, dtypes", (([], FP32), (["--dtype", "bf16", "fp32"], [torch.float32, torch.bfloat16]))
)
def test_precisions_are_those_asked_for(options, dtypes):
    assert device.dtypes_of(make_args("attention", "--device", "cpu", *options)) == dtypes
    assert len(device.dtypes_of(make_args("attention", "--device", "cuda"))) == 3


VARIANT = layers.Shape(3, 6, 32, 4, 16)


@pytest.mark.parametrize("way", [way for way in variants.WAYS if "ompile" not in way and way != "FlexAttention"])
def test_other_ways_compute_the_same_and_are_compared(way):
    rows = variants.measure_way(way, VARIANT, "cpu", torch.float32, 2, 0.0)
    check_rows(rows, "variants")
    wanted = ["forward", "forward+backward"] if variants.WAYS[way][2] else ["forward"]
    assert [row["measure"] for row in rows] == wanted and all(row["ratio"] > 0 for row in rows)


def test_a_way_that_computes_something_else_is_not_timed(monkeypatch):
    def other(layer):
        changed = variants.Folded(layer)
        torch.nn.init.normal_(changed.bias)
        return changed, variants.unchanged

    monkeypatch.setitem(variants.WAYS, "folded weights", ("windows", other, False))
    (row,) = variants.measure_way("folded weights", VARIANT, "cpu", torch.float32, 2, 0.0)
    assert row["ratio"] is None and row["backend"] == "not possible here (AssertionError)"


@pytest.fixture
def measured(tmp_path, attention_rows, scaling_rows, train_rows, generate_rows) -> Path:
    folder = tmp_path / "json"
    folder.mkdir()
    suites = {"attention": attention_rows, "scaling": scaling_rows, "train": train_rows, "generate": generate_rows}
    for name, rows in suites.items():
        text = json.dumps([{**row, "quick": False, "host": HOST} for row in rows])
        (folder / f"{name}.json").write_text(text)
    return folder


def test_the_page_says_what_the_files_say(measured, tmp_path, train_rows, scaling_rows):
    pytest.importorskip("matplotlib")
    out = tmp_path / "docs" / "speed.md"
    assert speed_page.main(["--json-dir", str(measured), "--out", str(out)]) == 0
    text = out.read_text()
    for name in ("attention-fp32", "scaling-fp32", "train", "generate"):
        assert f"![{name}](speed/{name}.png)" in text and (out.parent / f"speed/{name}.png").stat().st_size > 0
    row = train_rows[0]
    assert f"{row['ratio']:.3f} ({row['speedup']:.2f}x) | 0.926 (1.08x)" in text
    assert scaling.said(scaling.curve(scaling_rows, "length", "forward", "dense", key_dim=12), "T") in text
    assert "the key cache of dense mixing has 0.75 of the bytes" in text
    assert "Not to be cited" not in text
    assert "\n## one, 2 threads\n" in text


def test_a_second_measurement_stands_beside_the_first(measured, tmp_path):
    pytest.importorskip("matplotlib")
    again = tmp_path / "again"
    again.mkdir()
    for path in measured.glob("*.json"):
        rows = [
            {**row, "ratio": row["ratio"] * 1.5, "met": row["target"] and False} for row in json.loads(path.read_text())
        ]
        (again / path.name).write_text(json.dumps(rows))
    first = json.loads((measured / "train.json").read_text())
    first = [{**row, "met": True} for row in first]
    (measured / "train.json").write_text(json.dumps(first))
    out = tmp_path / "speed.md"
    assert speed_page.main(["--json-dir", str(measured), "--again", str(again), "--out", str(out)]) == 0
    text = out.read_text()
    assert f"| yes | {1.5 * first[0]['ratio']:.3f} | **no** |" in text
    assert ", 0 when it was measured again, 0 both times" in text
    assert "changed by less than 50.0% and 95 in 100 by less than 50.0%" in text


def test_the_page_warns_of_figures_that_are_not_to_be_cited(measured, tmp_path):
    pytest.importorskip("matplotlib")
    rows = json.loads((measured / "train.json").read_text())
    changed = [{**row, "quick": True, "host": {**HOST, "load": 3.0}} for row in rows]
    (measured / "train.json").write_text(json.dumps(changed))
    assert speed_page.main(["--json-dir", str(measured), "--out", str(tmp_path / "p.md")]) == 0
    text = (tmp_path / "p.md").read_text()
    assert "measured with `--quick`" in text and "other programs were running" in text


@pytest.mark.parametrize(
    "content, message", ((None, "holds none of attention, variants, scaling"), ("{}", "is not what"))
)
def test_a_page_of_nothing_is_one_sentence(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "train.json").write_text(content)
    out = tmp_path / "speed.md"
    assert speed_page.main(["--json-dir", str(tmp_path), "--out", str(out)]) == 1
    assert message in capsys.readouterr().err and not out.exists()


def test_advice_follows_the_figures():
    def row(layout: str, length: int, key_dim: int, ratio: float) -> common.Row:
        facts = {"dtype": "fp32", "measure": "forward+backward", "width": 512}
        return {"layout": layout, "length": length, "key_dim": key_dim, "ratio": ratio, **facts}

    ratios = {"dense": (0.8, 3.2), "windows": (1.6, 1.6), "picked": (0.9, 0.9)}
    rows = [row(layout, *at, value) for layout, pair in ratios.items() for at, value in zip(POINTS, pair, strict=True)]
    first, second = advice.advice({"scaling": rows})
    assert first.endswith(
        "at R = 128, window mixing compared with dense mixing is slower up to T = 64, faster up to T = 128."
    )
    assert "dense mixing is slower from R = 128 to R = 128" in second


POINTS = ((32, 128), (128, 128))
