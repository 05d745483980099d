"""What only a device shows of both ways of streaming."""

from __future__ import annotations

import pytest
import torch
from contracts.streaming import MIXED, ChunkContract, Stream, play, same

from vgraph_lab.graphs.backends.base import GraphBackend


class OnDevice(ChunkContract):
    """Subclasses say how much the host may launch."""

    most_copies: int  # and kernels, of a steady chunk beside its graph

    @pytest.fixture
    def device(self, backend: GraphBackend) -> str:
        return str(backend.device)

    def test_device_codes_give_the_same_samples(self, device: str) -> None:
        with self.running(device) as runner:
            expected = play(runner, MIXED[:3])
        moved = [Stream(s.name, s.reference, s.sizes, seed=0) for s in MIXED[:3]]
        for stream, original in zip(moved, MIXED, strict=False):
            stream.codes = original.codes.to(device)
        with self.running(device) as runner:
            assert same(play(runner, moved), expected)

    def test_a_steady_chunk_launches_little(self, device: str) -> None:
        """Work is counted, not timed: what the host launches for one steady chunk of four requests."""
        from torch.profiler import ProfilerActivity, profile

        streams = [Stream(f"r{i}", 6, [1, 3, 3, 3, 3], seed=i) for i in range(4)]
        with self.running(device, [4]) as runner:
            for i in range(4):
                runner.execute_model([s.chunk(i) for s in streams])
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as prof:
                runner.execute_model([s.chunk(4, finished=False) for s in streams])
                torch.cuda.synchronize()
        launches = {e.key: e.count for e in prof.key_averages() if e.key in ("cudaGraphLaunch", "cudaLaunchKernel", "cudaMemcpyAsync")}
        assert launches["cudaGraphLaunch"] == 1
        assert launches["cudaMemcpyAsync"] + launches.get("cudaLaunchKernel", 0) <= self.most_copies, launches
