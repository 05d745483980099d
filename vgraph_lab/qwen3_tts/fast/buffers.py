"""Where activations lie that a later layer looks back at: each behind its earlier samples, all in one piece of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.incremental_state import StateArena
from vgraph_lab.qwen3_tts.layers import CausalConv1d, CausalConvTranspose1d

from . import kernels

__all__ = ["LookBack", "LookBacks"]

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class LookBack:
    """One layer's input: channels, earlier samples that it needs, and samples per frame."""

    channels: int
    samples: int
    per_frame: int


class LookBacks(nn.Module):
    """The inputs of all layers that look back, in the order in which they run, which is the arena's, too."""

    _programs: Tensor  # [P, 2]: layer, first element

    def __init__(self, decoder: Code2WavDecoder) -> None:
        super().__init__()
        self.layers = tuple(_look_backs(decoder))
        starts = [(index, start) for index, layer in enumerate(self.layers) for start in range(0, layer.channels * layer.samples, _BLOCK)]
        self.register_buffer("_programs", torch.tensor(starts, device=decoder.device), persistent=False)
        self._tables: dict[tuple[int, int], Tensor] = {}

    def allocate(self, batch: int, frames: int, like: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Memory for all of them, and each as [B, samples + T, C]."""
        sizes = [layer.channels * (layer.samples + layer.per_frame * frames) for layer in self.layers]
        places = _places(sizes, batch)
        memory = like.new_empty(places[-1])
        views = [
            memory[place : place + batch * size].view(batch, -1, layer.channels)
            for place, size, layer in zip(places, sizes, self.layers, strict=False)
        ]
        return memory, views

    def load(self, arena: StateArena, memory: Tensor, places: Tensor, frames: int) -> None:
        """Earlier samples from the arena, in front of each buffer."""
        self._move(arena, memory, places, frames, save=False)

    def save(self, arena: StateArena, memory: Tensor, places: Tensor, frames: int) -> None:
        """The last samples of each buffer, back into the arena."""
        self._move(arena, memory, places, frames, save=True)

    def _move(self, arena: StateArena, memory: Tensor, places: Tensor, frames: int, *, save: bool) -> None:
        batch = places.shape[0]
        cast("Any", kernels.move_histories)[(self._programs.shape[0], batch)](
            arena.rows, memory, places, self._programs, self.table(batch, frames), arena.rows.stride(0), SAVE=save, BLOCK=_BLOCK
        )

    def table(self, batch: int, frames: int) -> Tensor:
        """What the kernel is told of each layer, made once for each shape: captures find it on the device."""
        if (batch, frames) not in self._tables:
            sizes = [layer.channels * (layer.samples + layer.per_frame * frames) for layer in self.layers]
            places, rows, kept = _places(sizes, batch), [], 0
            for layer, size, place in zip(self.layers, sizes, places, strict=False):
                rows.append((kept, layer.channels, layer.samples, layer.per_frame * frames, place, size))
                kept += layer.channels * layer.samples
            self._tables[batch, frames] = torch.tensor(rows, device=self._programs.device)
        return self._tables[batch, frames]


def _places(sizes: Sequence[int], batch: int) -> list[int]:
    """Where each buffer begins, on multiples of 16 elements, and where the last one ends."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-size * batch // 16) * 16)
    return places


def _look_backs(decoder: Code2WavDecoder) -> list[LookBack]:
    found, per_frame = [], 1
    for layer in decoder.modules():
        if isinstance(layer, CausalConv1d | CausalConvTranspose1d):
            if layer.left_context:
                found.append(LookBack(layer.conv.in_channels, layer.left_context, per_frame))
            if isinstance(layer, CausalConvTranspose1d):
                per_frame *= layer.stride
    return found
