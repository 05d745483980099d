"""The streaming contract on a CUDA device, and what only a device shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from contracts.streaming import MIXED, Stream, StreamingContract, play, running, samples_of, stage
from qwen3_tts.streams import golden_requests, stage_of

import vgraph_lab as vg
from vgraph_lab.graphs.backends.base import GraphBackend
from vgraph_lab.requests import ChunkRequest

TINY = Path(__file__).parents[1] / "data" / "tiny-12hz"


@pytest.fixture
def device(backend: GraphBackend) -> str:
    return str(backend.device)


class TestStreaming(StreamingContract):
    """On the device."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_graphs_equal_eager(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's half-precision transposed convolutions differ from run to run unless told not to."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    found = []
    for graphs in (True, False):
        cfg = stage_of(TINY, "stream_mixed_batch", graphs=graphs, capture_batch_sizes=[1], num_warmups=1)
        with vg.GPUGenerationModelRunner(cfg, device) as runner:
            runner.load_model(vg.Qwen3TTSCode2Wav.from_checkpoint(TINY, cfg, device, dtype))
            runner.capture_model()
            samples = []
            for request in golden_requests(TINY, "stream_mixed_batch"):
                for i, chunk in enumerate(request.chunks):
                    first = ChunkRequest(request.name, chunk[0], request.prefix_frames if i == 0 else 0)
                    samples.append(samples_of(runner.execute_model([first])[request.name]))
            found.append(samples)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_device_codes_give_the_same_samples(device: str) -> None:
    with running(device, stage()) as runner:
        expected = play(runner, MIXED[:2])
        moved = []
        for stream in MIXED[:2]:
            copy = Stream(stream.name + " on device", stream.reference, stream.sizes, seed=0)
            copy.codes = stream.codes.to(device)
            moved.append(copy)
        found = play(runner, moved)
    for stream in MIXED[:2]:
        assert all(torch.equal(a, b) for a, b in zip(expected[stream.name], found[stream.name + " on device"], strict=True))


def test_memory_returns_after_shutdown(device: str) -> None:
    def once() -> None:
        with running(device, stage()) as runner:
            play(runner, [Stream(s.name, s.reference, s.sizes, seed=1) for s in MIXED])

    once()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    once()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(device) <= before


def test_a_steady_chunk_copies_in_codes_and_slots_only(device: str) -> None:
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
    # codes and slots in, slots again for the commit, three outputs cloned, two fields of the state written
    assert launches["cudaMemcpyAsync"] + launches.get("cudaLaunchKernel", 0) <= 9, launches
