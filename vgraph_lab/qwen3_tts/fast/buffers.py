"""Where activations lie that a later layer looks back at: each behind its earlier samples, all in one piece of memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.incremental_state import StateArena, look_backs

from . import kernels
from .launch import launch

__all__ = ["LookBacks"]

_BLOCK = 1024


class LookBacks(nn.Module):
    """The inputs of all layers that look back, in the order in which they run, which is the arena's, too."""

    _programs: Tensor  # [P, 2]: layer, first element

    def __init__(self, decoder: Code2WavDecoder) -> None:
        super().__init__()
        self.layers = look_backs(decoder)
        starts = [(index, start) for index, layer in enumerate(self.layers) for start in range(0, layer.end - layer.place, _BLOCK)]
        self.register_buffer("_programs", torch.tensor(starts, device=decoder.device), persistent=False)
        self._tables: dict[tuple[int, int], Tensor] = {}

    def allocate(self, batch: int, frames: int, like: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Memory for all of them, and each as [B, samples + T, C]."""
        spans, end = self._spans(batch, frames)
        memory = like.new_empty(end)
        views = [
            memory[begin : begin + batch * size].view(batch, -1, layer.channels)
            for layer, (begin, size) in zip(self.layers, spans, strict=True)
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
        launch(
            kernels.move_histories,
            (self._programs.shape[0], batch),
            arena.rows,
            memory,
            places,
            self._programs,
            self.table(batch, frames),
            arena.rows.stride(0),
            SAVE=save,
            BLOCK=_BLOCK,
        )

    def table(self, batch: int, frames: int) -> Tensor:
        """What the kernel is told of each layer, made once for each shape: captures find it on the device."""
        if (batch, frames) not in self._tables:
            rows = [
                (layer.place, layer.channels, layer.samples, layer.per_frame * frames, begin, size)
                for layer, (begin, size) in zip(self.layers, self._spans(batch, frames)[0], strict=True)
            ]
            self._tables[batch, frames] = torch.tensor(rows, device=self._programs.device)
        return self._tables[batch, frames]

    def _spans(self, batch: int, frames: int) -> tuple[list[tuple[int, int]], int]:
        """Where each buffer begins, on multiples of 16 elements, and the size of one of its rows; and where the last one ends."""
        spans, end = [], 0
        for layer in self.layers:
            size = layer.channels * (layer.samples + layer.per_frame * frames)
            spans.append((end, size))
            end += -(-size * batch // 16) * 16
        return spans, end
