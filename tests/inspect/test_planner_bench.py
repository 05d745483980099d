"""The planner's bench: what is in its record, not how fast anything was."""

from __future__ import annotations

import tracemalloc

import pytest

from vgraph_lab.bench.planner import bench_planner
from vgraph_lab.errors import InputError


def test_record_of_every_case() -> None:
    told: list[str] = []
    record = bench_planner(calls=12, repeats=1, progress=told.append)
    assert record.bench == "planner"
    assert [row["case"] for row in record.rows] == ["stateless calls", "streamed calls", "streamed statistics"]
    assert told == [f"planning for 12 calls: {row['case']}" for row in record.rows]
    for row in record.rows:
        assert row["total_s"] == pytest.approx(row["summarise_s"] + row["plan_s"])
        assert row["calls"] == 12
        assert 0 < row["traffic_rows"] <= 12
        assert row["front_points"] > 1
        assert 0 < row["coverage_recommended"] <= 1
        assert row["peak_bytes"] > 12
    assert not tracemalloc.is_tracing()


def test_bench_needs_calls() -> None:
    with pytest.raises(InputError, match="at least 1, got 0 and 3"):
        bench_planner(calls=0)
