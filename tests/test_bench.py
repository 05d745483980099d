"""The benches' records: what is in them, not how fast anything was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vgraph_lab.bench.record import MeasurementRecord, check_writable
from vgraph_lab.bench.stateless import bench_stateless
from vgraph_lab.bench.timing import host_time_in_bursts_us, time_interleaved
from vgraph_lab.errors import InputError
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder


def test_variants_run_in_turn_and_equally_often() -> None:
    order: list[str] = []
    timings = time_interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, torch.device("cpu"), repeats=4, warmups=1)
    assert order == ["a", "b"] * 5
    for timing in timings.values():
        assert timing.repeats == 4
        assert 0 <= timing.wall_p10_ms <= timing.wall_ms <= timing.wall_p90_ms
        assert timing.host_ms == timing.wall_ms


def test_bursts_are_bounded_by_number_and_by_time() -> None:
    calls: list[int] = []
    host_time_in_bursts_us(lambda: calls.append(1), torch.device("cpu"), calls=3, bursts=4, seconds=1e6)
    assert len(calls) == 3 * 4
    calls.clear()
    assert host_time_in_bursts_us(lambda: calls.append(1), torch.device("cpu"), calls=3, bursts=4, seconds=0) > 0
    assert len(calls) == 3, "one is always run"


def test_stateless_record(tiny_decoder: Code2WavDecoder, tmp_path: Path) -> None:
    seen: list[str] = []
    record = bench_stateless(tiny_decoder, batch_sizes=(2, 1), frames=(3,), repeats=2, settings={"weights": "tiny"}, progress=seen.append)
    assert [(row["batch_size"], row["frames"]) for row in record.rows] == [(1, 3), (2, 3)]
    for row in record.rows:
        assert not any("burst" in key or "overhead" in key for key in row), "on the CPU there is no host time of its own"
        assert row["speedup_replay"] == pytest.approx(row["eager_wall_ms"] / row["replay_wall_ms"])
        assert sum(row["nodes"].values()) > 100
    assert record.settings["capture"]["graphs"] == 2
    assert record.settings["capture_by_hand"] is None
    assert seen[-2:] == ["measuring B2×T3, shape 1 of 2", "measuring B1×T3, shape 2 of 2"]
    assert seen[0] == "capturing 0/2 qwen3_tts.stateless B2×T3"
    written = json.loads(record.write(tmp_path / "deep" / "record.json").read_text())
    assert {"bench", "settings", "rows", "machine", "command", "commit", "measured_at"} == set(written)
    assert written["machine"]["torch"] == torch.__version__


def test_a_place_for_a_record_is_tried_before_the_work(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "record.json")
    assert list((tmp_path / "new").iterdir()) == [], "the folder is made, and nothing is left in it"
    with pytest.raises(InputError, match=r"it is a folder\. Choose another --output"):
        check_writable(tmp_path / "new")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        check_writable(tmp_path / "file" / "record.json")


def test_benches_work_without_jupyter() -> None:
    """On a rented machine only torch and little else is installed."""
    code = (
        "import sys\n"
        "for name in ('IPython', 'ipywidgets', 'jupyter_client', 'nbclient', 'nbconvert', 'nbformat'): sys.modules[name] = None\n"
        "import vgraph_lab.cli, vgraph_lab.bench.stateless, vgraph_lab.bench.streaming, vgraph_lab.bench.service, vgraph_lab.bench.tables\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_commit_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VGRAPH_LAB_COMMIT", "abc123")
    assert MeasurementRecord("x", {}, [], {}).commit == "abc123"


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[1] / "data" / "measurements").glob("*.json")), ids=lambda p: p.name)
def test_shipped_measurements_say_where_they_are_from(path: Path) -> None:
    record = json.loads(path.read_text())
    has_gpu = not record["machine"]["card"].startswith("CPU")
    assert all(record["machine"].get(key) for key in ("card", "torch", *(("cuda", "driver") if has_gpu else ())))
    assert has_gpu is ("cuda" in record["machine"])
    assert len(record["commit"]) == 40
    assert record["command"].startswith("vgraph-lab ")
    assert record["rows"]
