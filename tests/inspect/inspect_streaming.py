"""Runners over the tiny checkpoint (W = 16) that deliver 2 frames and then 5 at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vgraph_lab as vg
from vgraph_lab.workload import chunk_schedule

WINDOW = 16
STATES = [(0, 2), (2, 5), (7, 5), (12, 5), (16, 5)]
"""Kept and new frames of every transition, by hand: 2, 7, 12, 17 ≥ 16, and from there on 16 → 21."""


def tiny_runner(folder: Path, *, graphs: Any = None, connector: Any = None, **stage: Any) -> vg.GPUGenerationModelRunner:
    """A loaded runner that has not captured yet."""
    cfg = vg.StageConfig.from_dict(
        {
            "connector": {
                "codec_chunk_frames": 5,
                "initial_codec_chunk_frames": 2,
                "codec_left_context_frames": WINDOW,
                **(connector or {}),
            },
            "max_num_seqs": 4,
            "vocoder_cudagraph": {"capture_batch_sizes": [1], "num_warmups": 1, **(graphs or {})},
            **stage,
        }
    )
    runner = vg.GPUGenerationModelRunner(cfg, device="cpu")
    runner.load_model(vg.Qwen3TTSCode2Wav.from_checkpoint(folder, cfg))
    return runner


def tiny_codes(frames: int, seed: int = 0) -> Tensor:
    """Random codes [16, frames] that every codebook of the tiny checkpoint has."""
    return torch.randint(0, 32, (16, frames), generator=torch.Generator().manual_seed(seed))


def chunks_of(runner: vg.GPUGenerationModelRunner, name: str, codes: Tensor, reference: Tensor | None = None) -> list[vg.ChunkRequest]:
    """The chunks that the runner's connector would deliver."""
    return [chunk.request for chunk in chunk_schedule(name, codes, runner.cfg.connector, reference=reference)]
