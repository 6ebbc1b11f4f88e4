"""The suites of scripts/benchmark.py on tiny models: what rows they give, what a row says, and what is refused.

No figure is judged here; times of tiny cases mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from fairseq_collab._transformers import import_transformers
from fairseq_collab.decomposition import cp

ROOT = Path(__file__).resolve().parents[2]
KEYS = {"suite", "case", "peer", "ratio", "target", "met", "backend", "rounds", "unit"}
sys.path.insert(0, str(ROOT / "scripts"))

import benchmark  # noqa: E402
from benchmarks import common, convert, decompose, distortion  # noqa: E402


def check_rows(rows: list[common.Row], suite: str) -> None:
    for row in rows:
        assert row.keys() >= KEYS and row["suite"] == suite and row["rounds"] >= 1
        if row["target"] is None:
            assert row["met"] is None
        else:
            assert row["met"] is (row["ratio"] <= row["target"])
    assert len({(row["case"], row["peer"]) for row in rows}) == len(rows)
    json.dumps(rows)


@pytest.mark.parametrize(
    ("ratio", "target", "met"), [(0.5, 1.0, True), (1.0, 1.0, True), (1.5, 1.0, False), (2, None, None)]
)
def test_a_target_is_met_up_to_its_figure(ratio, target, met):
    row = common.make_row("s", "c", "p", ratio, target, backend="b", rounds=1)
    assert row["met"] is met
    assert {True: " yes", False: " NO", None: "c"}[met] in common.table([row]).splitlines()[1]


def test_never_reaching_the_peer_is_not_met_and_is_valid_json(tmp_path):
    row = common.make_row("s", "c", "p", None, 0.01, backend="b", rounds=1)
    assert row["met"] is False and "never" in common.table([row])
    common.write_json(tmp_path / "deep/rows.json", [row])
    assert json.loads((tmp_path / "deep/rows.json").read_text()) == [row]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["rows.json"]


@pytest.fixture
def small_case() -> decompose.Case:
    return decompose.synthetic_case(16, 2, 8)


def test_decompose_gives_errors_and_times_of_each_case(small_case, tmp_path):
    pytest.importorskip("tensorly")
    rows = decompose.measure_cases([small_case], rounds=2)
    check_rows(rows, "decompose")
    final, until, whole = rows
    assert (final["target"], until["target"], whole["target"]) == (1.0, 0.01, None)
    heads = cp.Heads.from_weights(small_case.q, small_case.k, small_case.heads)
    assert final["error"] == pytest.approx(cp.decompose(heads, 8)[2][-1])
    assert final["ratio"] == pytest.approx(final["error"] / final["peer_error"])
    assert until["sweeps"] is None or until["sweeps"] <= whole["sweeps"]
    pytest.importorskip("matplotlib")
    assert [path.stat().st_size > 0 for path in decompose.plot(rows, tmp_path)] == [True]


def test_decompose_says_when_it_never_gets_as_far_as_the_peer(small_case, monkeypatch):
    pytest.importorskip("tensorly")
    member, q, k = (
        getattr(cp.Heads.from_weights(small_case.q, small_case.k, small_case.heads), part)
        for part in ("member", "q", "k")
    )
    monkeypatch.setattr(decompose, "from_cp_tensor", lambda _: cp.Factors(member, 1.001 * q, k))
    rows = decompose.measure_cases([small_case], rounds=1)
    assert rows[0]["peer_error"] == pytest.approx(0.001)
    assert rows[0]["met"] is False
    assert rows[1]["measure"] == "time until no worse"
    assert rows[1]["ratio"] is None and rows[1]["met"] is False


def test_synthetic_projections_share_half_of_their_norm_between_heads():
    case = decompose.synthetic_case(64, 4, 16)
    bound = math.sqrt(6 / 128)
    assert case.q.norm().item() == pytest.approx(64 * bound / math.sqrt(3), rel=0.1)
    tail = torch.linalg.svdvals(case.q)[16:].square().sum() / case.q.square().sum()
    assert 0.2 < tail < 0.5  # all of it lies in 16 directions, or none of it stands out, if this fails
    assert torch.equal(case.q, decompose.synthetic_case(64, 4, 16).q)


@pytest.fixture(scope="module")
def tiny_bert():
    pytest.importorskip("transformers")
    import_transformers()
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        initializer_range=0.5,
        attn_implementation="eager",
    )
    model = BertModel(config, add_pooling_layer=False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model.eval()


def random_batches(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [torch.randint(3, 9, (8, 1), generator=generator) for _ in range(count)]
    return [
        {
            "input_ids": torch.randint(50, (8, 8), generator=generator),
            "attention_mask": (torch.arange(8) < length).long(),
        }
        for length in lengths
    ]


@pytest.fixture(scope="module")
def random_text() -> distortion.Text:
    return distortion.Text(random_batches(4, 0), random_batches(1, 1), random_batches(2, 2))


def test_distortion_measures_every_way_and_holds_ours_to_the_targets(tiny_bert, random_text, tmp_path):
    rows = distortion.measure_model(tiny_bert, random_text, [2, 4, 8, 12], steps=2)
    check_rows(rows, "distortion")
    alone = {(row["way"], row["key_dim"]): row["ratio"] for row in rows if row["unit"] == "1-cos"}
    assert len(alone) == 4 * len(distortion.WAYS) and all(0 < value < 1 for value in alone.values())
    compared = [row for row in rows if row["unit"] == "x"]
    assert [(row["peer"], row["target"]) for row in compared[:2]] == [("plain CP, R=4", 1 / 8), ("plain CP, R=12", 1.0)]
    assert compared[0]["ratio"] == pytest.approx(alone["weighted", 4] / alone["plain CP", 4])
    assert {row["key_dim"] for row in compared} == {4} and len(compared) == 8
    pytest.importorskip("matplotlib")
    assert [path.stat().st_size > 0 for path in distortion.plot(rows, tmp_path)] == [True]


def test_attentions_that_change_the_model_at_full_key_dim_are_not_measured(tiny_bert, random_text, monkeypatch):
    monkeypatch.setattr(
        distortion.bert, "distortion", lambda *_: pytest.fail("measured although the layers were wrong")
    )
    monkeypatch.setattr(
        distortion.bert.ConvertedAttention, "forward", lambda self, hidden_states, *_, **__: (hidden_states, None)
    )
    with pytest.raises(AssertionError, match="differ from BERT's own"):
        distortion.measure_model(tiny_bert, random_text, [4, 12], steps=1, everything=False)


def test_padding_is_kept_out_of_converted_attention(tiny_bert, random_text):
    way = distortion.Way("exact", weighted=False)
    exact_model = distortion.convert_model(tiny_bert, way, 16, {}, None, 0)
    batch = random_text.evaluation[0]
    other = {**batch, "input_ids": torch.where(batch["attention_mask"].bool(), batch["input_ids"], 7)}
    first, second = (distortion.bert.embed(exact_model, [one], "") for one in (batch, other))
    assert not torch.equal(batch["input_ids"], other["input_ids"])
    assert torch.allclose(first, second, atol=1e-6)


def test_calibration_and_evaluation_share_no_sentence(tmp_path, monkeypatch):
    from data_prep import snippets

    monkeypatch.setattr(distortion, "CALIBRATION", 20)
    monkeypatch.setattr(distortion, "EVALUATION", 30)
    for name in snippets.SOURCES:
        rows = "".join(f"{i}\t0.5\t{name} {i % 29}\n" for i in range(40))
        (tmp_path / f"{name}.tsv").write_text(rows)
    calibration, evaluation = distortion.calibration_and_evaluation(tmp_path)
    assert (len(set(calibration)), len(set(evaluation))) == (20, 30)
    assert not set(calibration) & set(evaluation)
    assert all(int(text.split()[1]) < 20 for text in calibration)


def test_convert_times_a_fresh_process_and_its_memory(tmp_path):
    options = ["--encoder-layers", "1", "--decoder-layers", "1", "--encoder-embed-dim", "16"]
    options += ["--decoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16", "--decoder-ffn-embed-dim", "16"]
    options += ["--encoder-attention-heads", "2", "--decoder-attention-heads", "2"]
    rows = convert.measure_convert("transformer", 50, 4, 1, tmp_path, options)
    check_rows(rows, "convert")
    seconds, memory = rows
    assert seconds["unit"] == "s" and seconds["ratio"] > 0.1
    assert memory["ratio"] == pytest.approx(memory["peak_bytes"] / memory["file_bytes"])
    assert 50e6 < memory["peak_bytes"] < 5e9
    assert list(tmp_path.iterdir()) == []


def test_a_failed_conversion_is_one_sentence(tmp_path):
    with pytest.raises(convert.CollabError, match="-m no_such_module failed with exit code 1: .*No module named"):
        convert._run([sys.executable, "-m", "no_such_module"])


class FakeSuite:
    """A suite whose one figure is known."""

    HELP = "fake"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--fail", action="store_true")

    @staticmethod
    def run(args: argparse.Namespace) -> list[common.Row]:
        if args.fail:
            raise convert.CollabError("the sentence")
        return [common.make_row("fake", "case", "-", 3.0, 4.0, unit="s", backend="none", rounds=1)]


@pytest.fixture
def fake_suite(monkeypatch):
    monkeypatch.setitem(sys.modules, "benchmarks.fake", FakeSuite)
    monkeypatch.setattr(benchmark, "SUITES", ("fake",))


def test_command_line_prints_host_and_table_and_writes_rows(fake_suite, tmp_path, capsys):
    assert benchmark.main(["fake", "--json", str(tmp_path / "rows.json")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("host: cpu ") and "torch " in out[0]
    assert any(line.split()[:5] == ["case", "-", "3", "s", "4"] for line in out)
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row.keys() > KEYS and row["met"] is True and row["quick"] is False
    assert row["host"]["torch"] == torch.__version__


def test_a_failed_suite_is_one_sentence_and_writes_nothing(fake_suite, tmp_path, capsys):
    assert benchmark.main(["fake", "--fail", "--json", str(tmp_path / "rows.json")]) == 1
    assert capsys.readouterr().err == "benchmark fake: error: the sentence\n"
    assert list(tmp_path.iterdir()) == []


def test_a_missing_data_folder_names_the_command_that_makes_it(tmp_path, capsys):
    assert benchmark.main(["decompose", "--minilm", str(tmp_path / "no")]) == 1
    assert f"python -m data_prep minilm --destdir {tmp_path / 'no'}" in capsys.readouterr().err


@pytest.mark.network
def test_decompose_runs_on_the_real_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert benchmark.main(["decompose", "--quick", "--rounds", "1", "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["case"].split(" D=")[0] for row in rows] == ["MiniLM layer 0"] * 3
    assert rows[0]["met"]
