"""The golden streams, and one way to play them: chunk by chunk, as the published path batches and pads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vgraph_lab.config import StageConfig
from vgraph_lab.requests import ChunkRequest
from vgraph_lab.runner import GPUGenerationModelRunner

NAMES = ["stream_xvec", "stream_icl", "stream_icl_short_prefix", "stream_ramp", "stream_mixed_batch"]


@dataclass(frozen=True)
class GoldenRequest:
    """One request of a golden file: its codes cut into chunks, and what the published code returned for each."""

    name: str
    prefix_frames: int
    chunks: list[Tensor]  # [1, 16, frames]; the first one begins with the reference
    waveforms: list[np.ndarray]
    states: list[dict[str, Any]]
    chunk_frames: int


def golden_requests(folder: Path, name: str) -> Iterator[GoldenRequest]:
    """All requests of one file."""
    data = np.load(folder / f"{name}.npz")
    for request in sorted({key.split("_")[0] for key in data if key.startswith("r") and key[1].isdigit()}):
        codes, sizes = torch.from_numpy(data[f"{request}_codes"]), data[f"{request}_sizes"].tolist()
        steps = range(len(sizes))
        fields = ("suffix_quantized", "suffix_conv", "suffix_frames", "prefix_pad", "decoder_prefix")
        yield GoldenRequest(
            name=f"{name}/{request}",
            prefix_frames=int(data[f"{request}_prefix"]),
            chunks=list(codes.split(sizes, dim=-1)),
            waveforms=[data[f"{request}_wav_{i}"] for i in steps],
            states=[{f: data[f"{request}_{f}_{i}"] for f in fields} for i in steps],
            chunk_frames=int(data["chunk"]),
        )


def stage_of(folder: Path, name: str, *, graphs: bool, **graph_settings: Any) -> StageConfig:
    """The configuration under which a golden file was made."""
    data = np.load(folder / f"{name}.npz")
    connector = {"codec_chunk_frames": int(data["chunk"]), "initial_codec_chunk_frames": int(data["init"]), "codec_left_context_frames": 16}
    if name == "stream_ramp":
        connector["codec_chunk_ramp"] = [2, 3, 4, 6]
    return StageConfig.from_dict(
        {"connector": connector, "enforce_eager": not graphs, "max_num_seqs": 6, "vocoder_cudagraph": {"strict": True, **graph_settings}}
    )


def play_golden(runner: GPUGenerationModelRunner, requests: list[GoldenRequest]) -> dict[str, float]:
    """Play requests side by side through a runner; the largest distance to the golden waveforms and states of each."""
    streaming = runner.model.streaming  # type: ignore[attr-defined]
    worst = {request.name: 0.0 for request in requests}
    for i in range(max(len(request.chunks) for request in requests)):
        batch = [request for request in requests if i < len(request.chunks)]
        tails = {r.name: i > 0 and i == len(r.chunks) - 1 and r.chunks[i].shape[-1] < r.chunk_frames for r in batch}
        found = runner.execute_model(
            [ChunkRequest(r.name, r.chunks[i][0], r.prefix_frames if i == 0 else 0, finished=tails[r.name]) for r in batch]
        )
        for r in batch:
            samples = found[r.name]
            assert isinstance(samples, Tensor), samples
            golden = r.waveforms[i].reshape(-1)
            assert samples.dtype is torch.float32
            assert samples.shape == golden.shape
            distances = [np.abs(samples.cpu().numpy() - golden).max()]
            if not tails[r.name]:
                record, prefix, suffix = streaming.state_of(r.name)
                golden_state = r.states[i]
                assert record.suffix_frames == golden_state["suffix_frames"]
                if prefix is not None:
                    assert int(prefix.pad_frames) == golden_state["prefix_pad"]
                    assert prefix.keys_values.shape[4] == golden_state["decoder_prefix"]
                for field, ours in (("suffix_quantized", suffix.quantized), ("suffix_conv", suffix.conv)):
                    assert ours.shape == golden_state[field].shape, (r.name, i, field)
                    distances.append(np.abs(ours.cpu().numpy() - golden_state[field]).max())
            worst[r.name] = max(worst[r.name], *map(float, distances))
    return worst
