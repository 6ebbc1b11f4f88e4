"""What a conversion shows: the table, the signature, the files."""

import json
import sys

import pytest
import torch

from fairseq_collab import __version__
from fairseq_collab.report import ConversionReport


@pytest.fixture
def report():
    rows = [
        {"name": f"encoder.layers.{i}.self_attn", "before": 64, "key_dim": 16 + 8 * i, "mix_dim": 16, "seconds": 1.25}
        | {"weight_error": 0.5, "score_error": 0.25 / (i + 1)}
        for i in range(2)
    ]
    return ConversionReport(
        rows=rows,
        parameters=[2000000, 1500000],
        key_query_parameters=[66560, 18432],
        cache_bytes=[[1024, 512], [256, 128]],
        file_bytes=[8_000_000, 3_000_000],
        bits_per_token=[3.0, 3.5],
        settings={"conv": "cp", "R": "16-24", "eval": "valid"},
        curves={row["name"]: {8: 0.5, 64: 0.0} for row in rows},
        mixing={row["name"]: torch.rand(4, 16) for row in rows},
    )


def test_the_table_has_a_line_an_attention_and_the_totals(report):
    lines = report.table().splitlines()
    assert lines[0].split() == [
        "attention",
        "K*H",
        "key",
        "dim",
        "mix",
        "dim",
        "weight",
        "error",
        "score",
        "error",
        "seconds",
    ]
    assert lines[2].split() == ["encoder.layers.1.self_attn", "64", "24", "16", "0.5000", "0.1250", "1.2"]
    assert len({len(line) for line in lines[:3]}) == 1
    assert lines[3:] == [
        "query and key parameters: 66,560 -> 18,432",
        "all parameters: 2,000,000 -> 1,500,000",
        "key cache, bytes a token (generated + source): 1,024 + 512 -> 256 + 128",
        "file size in MB: 8.0 -> 3.0",
        "loss on valid, bits a token: 3.0000 -> 3.5000",
        "perplexity on valid: 8.000 -> 11.314",
    ]
    assert report.signature == f"conv:cp|R:16-24|eval:valid|version:{__version__}"


def test_columns_that_nothing_was_found_for_are_left_out(report):
    for row in report.rows:
        row["score_error"] = None
    assert "score" not in report.table()


def test_files_are_json_and_pictures(report, tmp_path):
    paths = report.save(tmp_path / "deep" / "folder")
    assert {path.name for path in paths} == {"report.json", "errors.png", "mixing.png", "curves.png"}
    assert set(paths) == set((tmp_path / "deep" / "folder").iterdir())
    data = json.loads(paths[0].read_text())
    assert data["signature"] == report.signature and data["rows"] == report.rows
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths[1:])


def test_without_matplotlib_there_is_json_alone(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert [path.name for path in report.save(tmp_path)] == ["report.json"]
