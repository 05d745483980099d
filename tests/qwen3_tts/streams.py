"""The golden streams, and one way to play them: chunk by chunk, as the published path batches and pads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
