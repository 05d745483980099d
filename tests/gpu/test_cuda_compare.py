"""The comparison on a CUDA device: what the profiler sees inside graphs, and figures that only a device has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vgraph_lab as vg
from vgraph_lab.bench.compare import bench_compare
from vgraph_lab.bench.record import MeasurementRecord
from vgraph_lab.graphs.backends.base import GraphBackend
from vgraph_lab.inspect.kernel_times import REST, kernel_times, part_times

TINY = Path(__file__).parents[1] / "data" / "tiny-12hz"
PLAIN = ["published-eager", "published-graphs", "incremental-eager", "incremental-graphs"]


@pytest.fixture
def record(backend: GraphBackend) -> MeasurementRecord:
    decoder = vg.load_decoder(TINY, backend.device, torch.bfloat16)
    return bench_compare(decoder, batch_sizes=(1, 2), contenders=PLAIN, chunk_frames=16, repeats=3, seconds=0.0)


def test_figures_of_a_device(record: MeasurementRecord) -> None:
    assert [row["contender"] for row in record.rows] == PLAIN * 2
    assert record.settings["nodes_unknown"] is None, "cuda-bindings list the nodes"
    for row in record.rows:
        assert row["steady_burst_host_us"] > 0
        assert row["snr_db"] > 10, "bf16 against fp32 of the same weights"
        by_kind = row["kernel_ms_by_kind"]
        assert {"convolution", "elementwise", "matrix product"} <= set(by_kind), "kernels inside graphs are seen, too"
        assert 0 <= row["conversion_share"] < 1
        if row["contender"].endswith("graphs"):
            assert row["graph_fallbacks"] == 0
            assert set(row["nodes_by_kind"]) >= {"convolution", "elementwise"}
        else:
            assert row["part_ms"]["block 3"] > 0
        assert ("handle_burst_host_us" in row) == (row["contender"] == "incremental-graphs")


def test_eager_and_replay_run_the_same_kernels(record: MeasurementRecord) -> None:
    """A replay is traced kernel by kernel, not as one launch: its time is of the same size, whoever launches."""
    for size in (1, 2):
        rows = {row["contender"]: row for row in record.rows if row["batch_size"] == size}
        eager, graphs = (sum(rows[f"incremental-{form}"]["kernel_ms_by_kind"].values()) for form in ("eager", "graphs"))
        assert 0.4 < graphs / eager < 2.5


def test_parts_add_up(backend: GraphBackend) -> None:
    """Device time by part is the time of the kernels that it launches."""
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)).to(backend.device)
    x = torch.randn(256, 512, device=backend.device)

    def run() -> None:
        model(x).sin()

    with torch.no_grad():
        parts = part_times(run, backend.device, {"first": [model[0]], "second": [model[1]]}, repeats=5)
        kernels = kernel_times(run, backend.device, repeats=5)
    assert all(parts[name] > 0 for name in ("first", "second", REST))
    assert sum(parts.values()) == pytest.approx(kernels["total_ms"].sum(), rel=0.5)
    assert "matrix product" in set(kernels["work"])
