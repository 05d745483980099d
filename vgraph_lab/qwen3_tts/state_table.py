"""Where streamed requests keep their state: one row per live request, at addresses that never change.

Graphs read rows in place by slot number, so that a step copies in nothing but codes and slots, however many requests it
serves. Rows are written by the model alone, after a call has succeeded.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .decoder import Code2WavDecoder
from .streaming import CONV_CONTEXT_FRAMES, RENDER_CONTEXT_FRAMES, PrefixState, SuffixState

__all__ = ["StateTable"]


class StateTable(nn.Module):
    """Rows of :class:`PrefixState` and :class:`SuffixState`, batched over slots.

    References are W frames long here; shorter ones are padded to that. A suffix is one packed row, so that a step's result is
    one tensor to hand over and one to write: the quantised frames, then the convolution's, each left-aligned in room for
    their largest number. The last slot belongs to no request: padded rows of a batch read it.

    Args:
        decoder: gives sizes, device and dtype.
        slots: live requests at most.
    """

    keys_values: Tensor  # [slots + 1, layers, 2, kv_heads, W, head_dim]
    quantized_tail: Tensor  # [slots + 1, codebook_dim, 2]
    hidden_tail: Tensor  # [slots + 1, latent_dim, min(W, 12)]
    pad_frames: Tensor  # int64 [slots + 1]
    suffixes: Tensor  # [slots + 1, codebook_dim * W + (W - 2) * latent_dim], packed

    def __init__(self, decoder: Code2WavDecoder, slots: int) -> None:
        super().__init__()
        g, rows = decoder.geometry, slots + 1
        self.spare_slot = slots
        window = g.sliding_window
        self._quantized_shape, self._conv_shape = (g.codebook_dim, window), (window - CONV_CONTEXT_FRAMES, g.latent_dim)
        shapes = {
            "keys_values": (g.num_hidden_layers, 2, g.num_key_value_heads, window, g.head_dim),
            "quantized_tail": (g.codebook_dim, CONV_CONTEXT_FRAMES),
            "hidden_tail": (g.latent_dim, min(window, RENDER_CONTEXT_FRAMES)),
            "suffixes": (g.codebook_dim * window + (window - CONV_CONTEXT_FRAMES) * g.latent_dim,),
        }
        with torch.inference_mode(False):  # rows are written in and outside of that mode
            for name, shape in shapes.items():
                self.register_buffer(name, torch.zeros(rows, *shape, device=decoder.device, dtype=decoder.dtype), persistent=False)
            self.register_buffer("pad_frames", torch.zeros(rows, device=decoder.device, dtype=torch.int64), persistent=False)

    @property
    def nbytes(self) -> int:
        """Memory of all rows."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def prefix(self, slots: Tensor) -> PrefixState:
        """References of some requests, copied out; ``slots`` is int64 [B] on the table's device."""
        fields = (self.keys_values, self.quantized_tail, self.hidden_tail, self.pad_frames)
        return PrefixState(*(field.index_select(0, slots) for field in fields))

    def suffix(self, slots: Tensor, frames: int) -> SuffixState:
        """The kept frames of requests that have ``frames`` of them (W for all states from W on), copied out."""
        return SuffixState(*(field.index_select(0, slots) for field in self.unpacked(self.suffixes, frames)))

    def packed(self, state: SuffixState) -> Tensor:
        """Next states as rows of the table, [B, ·]."""
        quantized = F.pad(state.quantized, (0, self._quantized_shape[1] - state.quantized.shape[-1]))
        conv = F.pad(state.conv, (0, 0, 0, self._conv_shape[0] - state.conv.shape[1]))
        return torch.cat((quantized.flatten(1), conv.flatten(1)), dim=1)

    def unpacked(self, rows: Tensor, frames: int) -> SuffixState:
        """Views of packed rows [B, ·] that keep ``frames`` frames, at most W."""
        quantized, conv = rows.split((prod(self._quantized_shape), prod(self._conv_shape)), dim=1)
        return SuffixState(
            quantized.unflatten(1, self._quantized_shape)[..., :frames],
            conv.unflatten(1, self._conv_shape)[:, :frames],
        )

    def write_prefix(self, slots: Tensor, state: PrefixState) -> None:
        """Keep references of W physical frames."""
        for field, rows in zip((self.keys_values, self.quantized_tail, self.hidden_tail, self.pad_frames), state, strict=True):
            field.index_copy_(0, slots, rows)

    def write_suffix(self, slots: Tensor, rows: Tensor) -> None:
        """Replace the kept frames of some requests by packed rows."""
        self.suffixes.index_copy_(0, slots, rows)
