"""The incremental contract on a CUDA device, and what only a device shows."""

from __future__ import annotations

import pytest
import torch
from contracts.incremental import IncrementalContract, running, stage
from contracts.streaming import MIXED, Stream, play, same

from vgraph_lab.graphs.backends.base import GraphBackend


@pytest.fixture
def device(backend: GraphBackend) -> str:
    return str(backend.device)


class TestIncremental(IncrementalContract):
    """On the device."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_graphs_equal_eager(device: str, dtype: torch.dtype) -> None:
    found = []
    for graphs in (True, False):
        with running(device, stage([2], enforce_eager=not graphs, decode_batch_max_size=2), dtype=dtype) as runner:
            found.append(play(runner, [Stream(s.name, s.reference, [1, 3, 3, 3], seed=1) for s in MIXED[:2]]))
    for name, pieces in found[0].items():
        assert torch.allclose(torch.cat(pieces), torch.cat(found[1][name]), atol=0.05)


def test_device_codes_give_the_same_samples(device: str) -> None:
    with running(device, stage()) as runner:
        expected = play(runner, MIXED[:3])
    moved = [Stream(s.name, s.reference, s.sizes, seed=0) for s in MIXED[:3]]
    for stream, original in zip(moved, MIXED, strict=False):
        stream.codes = original.codes.to(device)
    with running(device, stage()) as runner:
        assert same(play(runner, moved), expected)


def test_a_steady_chunk_launches_little(device: str) -> None:
    """Work is counted, not timed: what the host launches for one steady chunk of four requests."""
    from torch.profiler import ProfilerActivity, profile

    streams = [Stream(f"r{i}", 6, [1, 3, 3, 3, 3], seed=i) for i in range(4)]
    with running(device, stage([4])) as runner:
        for i in range(4):
            runner.execute_model([s.chunk(i) for s in streams])
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as prof:
            runner.execute_model([s.chunk(4, finished=False) for s in streams])
            torch.cuda.synchronize()
    launches = {e.key: e.count for e in prof.key_averages() if e.key in ("cudaGraphLaunch", "cudaLaunchKernel", "cudaMemcpyAsync")}
    assert launches["cudaGraphLaunch"] == 1
    # slots in and rows copied, codes and places in, the samples cloned
    assert launches["cudaMemcpyAsync"] + launches.get("cudaLaunchKernel", 0) <= 5, launches
