"""The bench of vLLM's own path: what is in its record, and that the modes agree; not how fast anything was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from vgraph_lab.bench.tables import v1_table
from vgraph_lab.bench.v1 import bench_v1
from vgraph_lab.cli import app
from vgraph_lab.errors import InputError
from vgraph_lab.vllm_v1 import WorkloadConfig

CPU = torch.device("cpu")


def test_every_mode_is_measured_and_gives_the_same_logits() -> None:
    told: list[str] = []
    record = bench_v1(WorkloadConfig(), CPU, batch_sizes=(3, 1), prompt_tokens=4, repeats=2, progress=told.append)
    assert told == ["capturing: NONE", "capturing: PIECEWISE", "capturing: FULL", "decoding, batch size 1", "decoding, batch size 3"]
    assert [row["batch_size"] for row in record.rows] == [1, 3]
    assert {name: figures["graphs"] for name, figures in record.settings["captures"].items()} == {"eager": 0, "piecewise": 2, "full": 2}
    for row in record.rows:
        assert row["largest_difference_piecewise"] < 1e-5
        assert row["largest_difference_full"] < 1e-5
        assert row["piecewise_nodes"]["host"] == WorkloadConfig().num_layers, "one break for each attention"
        assert "host" not in row["full_nodes"]
        assert sum(row["full_nodes"].values()) > sum(row["piecewise_nodes"].values())
        assert row["speedup_full"] == pytest.approx(row["eager_wall_ms"] / row["full_wall_ms"])
    assert v1_table(record).renderables


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": ()}, "at least 1"),
        ({"batch_sizes": (0,)}, "at least 1"),
        ({"repeats": 1}, "at least 1, 1 and 2"),
        ({"repeats": 80}, r"88 tokens are needed, max_model_len is 64"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, object], message: str) -> None:
    given = {"batch_sizes": (1,), "prompt_tokens": 4, "repeats": 2} | changes
    with pytest.raises(InputError, match=message):
        bench_v1(WorkloadConfig(), CPU, **given)  # type: ignore[arg-type]


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    output = tmp_path / "v1.json"
    result = CliRunner().invoke(app, ["bench", "v1", "--device", "cpu", "--batch-sizes", "1", "--repeats", "2", "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "÷ full" in result.stdout
    assert json.loads(output.read_text())["bench"] == "v1"
