"""The tables of a live runner on a CUDA device. Truth: the allocator's snapshot, the runtime API's node lists, the driver."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from contracts.incremental import running, stage
from contracts.streaming import MIXED, play

import vgraph_lab as vg
from vgraph_lab import inspect
from vgraph_lab.graphs.backends.base import GraphBackend
from vgraph_lab.graphs.structure import tensors
from vgraph_lab.inspect.kernel_times import added_times, kernel_times
from vgraph_lab.inspect.ledger import LEDGER_PARTS
from vgraph_lab.qwen3_tts.checkpoint import random_decoder
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry

TINY = Path(__file__).parents[1] / "data" / "tiny-12hz"
MIB = 2**20


@pytest.fixture
def runner(backend: GraphBackend) -> Iterator[vg.GPUGenerationModelRunner]:
    cfg = vg.StageConfig.from_dict(
        {
            "connector": {"codec_chunk_frames": 5, "initial_codec_chunk_frames": 2, "codec_left_context_frames": 16},
            "max_num_seqs": 4,
            "vocoder_cudagraph": {"capture_batch_sizes": [1, 2], "num_warmups": 1},
        }
    )
    with vg.GPUGenerationModelRunner(cfg, str(backend.device)) as live:
        live.load_model(vg.Qwen3TTSCode2Wav.from_checkpoint(TINY, cfg, str(backend.device)))
        live.profile_memory()
        live.capture_model()
        yield live


def pool_segments_of_the_allocator(runner: vg.GPUGenerationModelRunner) -> dict[int, dict[str, Any]]:
    """Segments of the pool in which the first graph's output lives, by address."""
    address = next(tensors(runner.manager.entries()[0].output)).untyped_storage().data_ptr()
    segments = torch._C._cuda_memorySnapshot(None)["segments"]  # memory_snapshot() passes a tuple on; see allocator_segments
    home = next(s for s in segments if s["address"] <= address < s["address"] + s["total_size"])
    pool = tuple(home["segment_pool_id"])
    assert pool != (0, 0)
    return {s["address"]: s for s in segments if tuple(s["segment_pool_id"]) == pool}


def test_segments_are_those_of_the_allocators_snapshot(runner: vg.GPUGenerationModelRunner) -> None:
    table, snapshot = inspect.segments_table(runner), pool_segments_of_the_allocator(runner)
    assert {s.address: s.size_bytes for s in runner.manager.pool.segments()} == {a: s["total_size"] for a, s in snapshot.items()}
    assert table["segment"].nunique() == len(snapshot)
    assert sorted(table["block_mib"] * MIB) == sorted(block["size"] for s in snapshot.values() for block in s["blocks"])
    live = sorted(block["size"] for s in snapshot.values() for block in s["blocks"] if block["state"] != "inactive")
    assert sorted(table.loc[table["is_live"], "block_mib"] * MIB) == live
    assert table["block_mib"].sum() * MIB == runner.manager.pool.reserved_bytes


def test_every_output_is_found_in_the_pool(runner: vg.GPUGenerationModelRunner) -> None:
    table = inspect.segments_table(runner)
    for entry in runner.manager.entries():
        outputs, inputs = ({t.untyped_storage().data_ptr() for t in tensors(each)} for each in (entry.output, dict(entry.buffers)))
        assert (table["held_by"] == f"{entry.target_id} {entry.descriptor}").sum() == len(outputs - inputs)
    grown = table.drop_duplicates("segment").groupby("made_by")["segment_mib"].sum() * MIB
    deltas = {f"{e.target_id} {e.descriptor}": e.cost.pool_delta_bytes for e in runner.manager.entries()}
    assert grown.to_dict() == {name: delta for name, delta in deltas.items() if delta}


def test_node_counts_are_those_of_the_raw_graphs(runner: vg.GPUGenerationModelRunner) -> None:
    from cuda.bindings import runtime

    table = inspect.entries_table(runner)
    for entry in runner.manager.entries():
        raw = runtime.cudaGraph_t(entry.graph._graph.raw_cuda_graph())  # type: ignore[attr-defined]
        _, _, count = runtime.cudaGraphGetNodes(raw)
        _, nodes, count = runtime.cudaGraphGetNodes(raw, count)
        kinds = [runtime.cudaGraphNodeGetType(node)[1] for node in nodes]
        kernels = kinds.count(runtime.cudaGraphNodeType.cudaGraphNodeTypeKernel)
        row = table[(table["target"] == entry.target_id) & (table["descriptor"] == str(entry.descriptor))].iloc[0]
        assert (row["nodes"], row["kernel_nodes"]) == (count, kernels)
        found = inspect.anatomy(entry).kernels
        assert found.loc[found["kind"] == "kernel", "nodes"].sum() == kernels


def test_the_ledger_is_the_drivers(runner: vg.GPUGenerationModelRunner) -> None:
    table = inspect.ledger_table(runner).set_index("part")
    free, total = torch.cuda.mem_get_info()
    assert table.at["total", "now_mib"] * MIB == total
    assert table.at["free", "now_mib"] * MIB == pytest.approx(free, abs=64 * MIB), "other programs move it between two readings"
    for column in ("before_mib", "now_mib"):
        assert table.loc[list(LEDGER_PARTS), column].sum() == pytest.approx(table.at["total", column])
    assert table.at["pool", "now_mib"] * MIB == runner.manager.pool.reserved_bytes
    assert table.at["other", "now_mib"] > 0, "the driver's context is there"


def test_the_estimate_is_near_what_was_captured(runner: vg.GPUGenerationModelRunner) -> None:
    total = inspect.estimate_table(runner).iloc[-1]
    assert abs(total["error_share"]) < 0.05


def test_a_recording_holds_the_same_tables(runner: vg.GPUGenerationModelRunner, tmp_path: Path) -> None:
    play(runner, MIXED[:2])
    made = inspect.record(runner)
    loaded = inspect.Recording.load(made.save(tmp_path / "x.vgl"))
    for table in (inspect.entries_table, inspect.coverage_table, inspect.segments_table, inspect.ledger_table, inspect.estimate_table):
        pd.testing.assert_frame_equal(table(loaded), table(made))
    assert inspect.coverage_table(loaded)["calls"].sum() == runner.stats().calls() > 0
    assert "NVIDIA" in loaded.machine["card"]


def test_kernels_that_overlap_are_not_counted_twice(backend: GraphBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast form's kernels, by name as the graph's nodes are; and all together the time in which any of them ran."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    geometry = DecoderGeometry(
        codebook_size=32, codebook_dim=128, latent_dim=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32, sliding_window=23, max_position_embeddings=512, upsampling_ratios=(2,),
        upsample_rates=(3,), decoder_dim=192,
    )  # fmt: skip
    spans: list[tuple[float, float]] = []

    def noted(given: list[tuple[float, float]]) -> list[float]:
        spans.extend(given)
        return added_times(given)

    device, settings = backend.device, {"qwen3_tts.incremental": {"form": "fast", "autotune": False}}
    decoder = random_decoder(geometry, device, torch.bfloat16, seed=4)
    with running(str(device), stage([2], targets=settings), decoder=decoder) as runner:
        assert runner.manager is not None
        entry = next(e for e in runner.manager.entries() if not e.descriptor.state)
        nodes = Counter(node.name for node in entry.graph.nodes())
        with monkeypatch.context() as patch, runner.manager.pool.exclusive():
            patch.setattr("vgraph_lab.inspect.kernel_times.added_times", noted)
            table = kernel_times(entry.graph.replay, device, repeats=5)
    assert dict(zip(table["name"], table["calls"], strict=True)) == nodes
    assert set(table["work"]) == {"own kernels"}
    busy, end = 0.0, -math.inf
    for start, stop in sorted(spans):
        busy, end = busy + max(0.0, stop - max(start, end)), max(end, stop)
    assert len(spans) == 5 * nodes.total()
    assert table["total_ms"].sum() * 5 * 1e3 == pytest.approx(busy)
