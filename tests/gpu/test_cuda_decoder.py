"""The real decoder on a CUDA device: golden vectors, graphs against eager, padding, rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import vgraph_lab as vg
from vgraph_lab.graphs import VocoderCUDAGraphManager
from vgraph_lab.graphs.backends.base import GraphBackend
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.stateless import stateless_target

TINY = Path(__file__).parents[1] / "data" / "tiny-12hz"


def codes(batch: int, frames: int, seed: int = 0, size: int = 64) -> torch.Tensor:
    return torch.randint(0, size, (batch, 16, frames), generator=torch.Generator().manual_seed(seed))


def test_golden_vectors(backend: GraphBackend) -> None:
    decoder = vg.load_decoder(TINY, "cuda")
    golden = np.load(TINY / "stateless.npz")
    for name in ("1", "2", "5", "15", "16", "17", "40", "b3_33"):
        wave = decoder(torch.from_numpy(golden[f"codes_{name}"])).cpu().numpy()
        assert np.abs(wave - golden[f"wav_{name}"]).max() < 2e-4, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_graph_equals_eager(backend: GraphBackend, dtype: torch.dtype) -> None:
    decoder = vg.load_decoder(TINY, "cuda", dtype)
    target = stateless_target(decoder, bucket_frames=(8, 25, 40), batch_sizes=(1, 4))
    with VocoderCUDAGraphManager(backend, [target]) as manager:
        report = manager.capture()
        assert (report.captured, report.failed) == (6, 0), str(report)
        for batch, frames in ((1, 8), (1, 25), (4, 25), (4, 40)):
            for seed in range(3):
                c = codes(batch, frames, seed)
                assert torch.equal(target(c), decoder(c)), (batch, frames, seed)
                assert torch.equal(target(c.cuda()), decoder(c)), (batch, frames, seed)
        exact = vg.load_decoder(TINY, "cuda")
        for batch, frames in ((1, 1), (1, 13), (3, 7), (2, 33)):
            c = codes(batch, frames)
            eager, graph, truth = decoder(c), target(c), exact(c)
            assert graph.shape == eager.shape
            # A padded shape may get other kernels. That may cost what the dtype itself costs, and no more.
            allowed = 2e-4 if dtype == torch.float32 else 2 * (eager.float() - truth).abs().max()
            assert (graph.float() - eager.float()).abs().max() <= allowed, (batch, frames)
        assert manager.stats().fallbacks() == 0


def test_padding_never_reaches_real_samples(backend: GraphBackend) -> None:
    """Different fills and neighbours, same kernels: the valid region is the same bit for bit."""
    decoder = vg.load_decoder(TINY, "cuda")
    target = stateless_target(decoder, bucket_frames=(40,), batch_sizes=(4,))
    with VocoderCUDAGraphManager(backend, [target]) as manager:
        manager.capture()
        c = codes(2, 29)
        first = target(c)
        for fill in (1, 31, 63):
            target.routine.pad_code = fill  # type: ignore[attr-defined]
            target(codes(4, 40, seed=fill))
            assert torch.equal(target(c), first)
            beside = torch.cat((c, codes(2, 29, seed=fill)))
            assert torch.equal(target(beside)[:2], first)


def test_device_codes_are_checked_in_debug_mode(backend: GraphBackend) -> None:
    decoder = vg.load_decoder(TINY, "cuda")
    target = stateless_target(decoder, bucket_frames=(8,), debug=True)
    with pytest.raises(vg.errors.InputError, match=r"\[0, 63\]"):
        target.routine.validate_runtime_inputs(codes(1, 8).cuda() + 60)


def test_published_geometry_captures(backend: GraphBackend) -> None:
    from vgraph_lab.qwen3_tts.checkpoint import random_decoder
    from vgraph_lab.qwen3_tts.geometry import published_geometry

    decoder: Code2WavDecoder = random_decoder(published_geometry(), "cuda", torch.bfloat16)
    target = stateless_target(decoder, bucket_frames=(25,), batch_sizes=(1,))
    with VocoderCUDAGraphManager(backend, [target]) as manager:
        manager.capture()
        c = codes(1, 25, size=2048)
        wave = target(c)
        assert torch.equal(wave, decoder(c))
        assert wave.float().std() > 1e-3, "a silent decoder would prove nothing"
