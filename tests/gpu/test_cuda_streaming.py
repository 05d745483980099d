"""The streaming contract on a CUDA device, and what only a device shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from chunks_on_device import OnDevice
from contracts.streaming import MIXED, Stream, StreamingContract, play, running, samples_of, stage
from qwen3_tts.streams import golden_requests, stage_of

import vgraph_lab as vg
from vgraph_lab.graphs.backends.base import GraphBackend
from vgraph_lab.requests import ChunkRequest

TINY = Path(__file__).parents[1] / "data" / "tiny-12hz"


@pytest.fixture
def device(backend: GraphBackend) -> str:
    return str(backend.device)


class TestStreaming(OnDevice, StreamingContract):
    """On the device."""

    most_copies = 9  # codes and slots in, slots again for the commit, three outputs cloned, two fields of the state written


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
