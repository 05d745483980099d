"""Where incrementally decoded requests keep their state: one row per slot, in one arena whose addresses never change.

A row is a number of *pages*, each as large as what one frame leaves in the transformer::

    [ histories of all convolutions, filled up to whole pages | frame 0 | frame 1 | … | frame W − 2 ]

The frames are a ring: frame t lies in page t mod (W − 1), so that a step writes its own frames only. Graphs read and write rows
in place by slot number. Which frame a row has reached is not kept here: callers say it with every step. A stream begins at frame 0,
and what its row held before is of no account then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .decoder import Code2WavDecoder
from .layers import CausalConv1d, CausalConvTranspose1d

__all__ = ["LookBack", "StateArena", "history_size", "look_backs"]


@dataclass(frozen=True, slots=True)
class LookBack:
    """What one layer keeps of its input.

    Attributes:
        channels: of the input.
        samples: earlier ones that it reads.
        per_frame: samples of the input in one frame.
        place: where they begin in an arena's row, which holds them as [channels, samples].
    """

    channels: int
    samples: int
    per_frame: int
    place: int

    @property
    def end(self) -> int:
        """Where they end in the row."""
        return self.place + self.channels * self.samples


def look_backs(decoder: Code2WavDecoder) -> tuple[LookBack, ...]:
    """The layers that look back, in the order in which they run. Their histories lie one behind the other."""
    found: list[LookBack] = []
    per_frame = 1
    for layer in decoder.modules():
        if isinstance(layer, CausalConv1d | CausalConvTranspose1d):
            if layer.left_context:
                place = found[-1].end if found else 0
                found.append(LookBack(layer.conv.in_channels, layer.left_context, per_frame, place))
            if isinstance(layer, CausalConvTranspose1d):
                per_frame *= layer.stride
    return tuple(found)


def history_size(decoder: Code2WavDecoder) -> int:
    """Numbers that one row's convolutions keep: for each layer its input channels times the earlier samples that it reads."""
    return look_backs(decoder)[-1].end


class StateArena(nn.Module):
    """Rows of convolution histories and of keys and values.

    The last slot belongs to no request: padded rows of a batch read and write it.

    Args:
        decoder: gives sizes, device and dtype.
        slots: rows that requests can have.
    """

    rows: Tensor  # [slots + 1, pages, page size], in the decoder's dtype

    def __init__(self, decoder: Code2WavDecoder, slots: int) -> None:
        super().__init__()
        g = decoder.geometry
        self.ring = g.sliding_window - 1
        self.spare_slot = slots
        self._frame_shape = (g.num_hidden_layers, 2, g.num_key_value_heads, g.head_dim)
        page = g.num_hidden_layers * 2 * g.num_key_value_heads * g.head_dim
        self._look_backs = look_backs(decoder)
        self._history_size = self._look_backs[-1].end
        self._history_pages = -(-self._history_size // page)
        pages = self._history_pages + self.ring
        with torch.inference_mode(False):  # rows are written in and outside of that mode
            rows = torch.zeros(slots + 1, pages, page, device=decoder.device, dtype=decoder.dtype)
            self.register_buffer("rows", rows, persistent=False)

    @property
    def nbytes(self) -> int:
        """Memory of all rows."""
        return self.rows.nbytes

    @property
    def bytes_per_request(self) -> int:
        """Memory of one row."""
        return self.rows[0].nbytes

    # Steps. ``slots`` is int64 [B] on the arena's device.

    def histories(self, slots: Tensor, first: Tensor) -> Tensor:
        """What the convolutions of some rows keep before frame ``first``, copied out: [B, ·]. Before frame 0 it is zero."""
        return self._histories.index_select(0, slots).masked_fill_((first == 0)[:, None], 0)

    def no_histories(self, count: int) -> Tensor:
        """The same of requests that have not begun."""
        return self.rows.new_zeros(count, self._history_size)

    def write_histories(self, slots: Tensor, histories: Tensor) -> None:
        """Replace what the convolutions of some rows keep."""
        self._histories.index_copy_(0, slots, histories)

    def frames_before(self, slots: Tensor, first: Tensor) -> Tensor:
        """The W − 1 frames before frame ``first`` of each row, oldest first, copied out.

        Args:
            slots: int64 [B].
            first: int64 [B].

        Returns:
            [B, W − 1, layers, 2, kv_heads, head_dim]. Frames below 0 are zero, whatever an earlier request left there.
        """
        frames = self._frames.index_select(0, self._pages(slots, first, self.ring)).view(-1, self.ring, self._frames.shape[1])
        has_been = first[:, None] + torch.arange(-self.ring, 0, device=first.device) >= 0
        return frames.masked_fill_(~has_been[..., None], 0).view(-1, self.ring, *self._frame_shape)

    def write_frames(self, slots: Tensor, first: Tensor, frames: Tensor) -> None:
        """Keep consecutive frames of each row, at most W − 1 of them: [B, n, page size], beginning with frame ``first`` [B]."""
        self._frames.index_copy_(0, self._pages(slots, first, frames.shape[1]), frames.flatten(0, 1))

    def _pages(self, slots: Tensor, first: Tensor, count: int) -> Tensor:
        """Pages of ``count`` consecutive frames of each row, int64 [B * count]. Frames W − 1 apart share one."""
        in_ring = (first[:, None] + torch.arange(count, device=first.device)) % self.ring
        return (slots[:, None] * self.rows.shape[1] + self._history_pages + in_ring).flatten()

    @property
    def _histories(self) -> Tensor:
        return self.rows.flatten(1)[:, : self._history_size]

    @property
    def _frames(self) -> Tensor:
        return self.rows.flatten(0, 1)

    def frames_of_layer(self, index: int) -> Tensor:
        """One layer's ring in place: [slots + 1, W − 1, 2 · kv_heads · head_dim], keys before values; frame t lies at t mod (W − 1)."""
        size = self.rows.shape[2] // self._frame_shape[0]
        return self.rows[:, self._history_pages :, index * size : (index + 1) * size]

    # Slots, between steps.

    def copy_of(self, slots: Sequence[int]) -> tuple[slice | Tensor, Tensor]:
        """Whole rows, copied out, and where they belong. Neighbouring rows are copied in one piece, without an index on the device."""
        begin, end = min(slots), max(slots) + 1
        if end - begin == len(slots):
            return slice(begin, end), self.rows[begin:end].clone()
        where = torch.tensor(slots).to(self.rows.device, non_blocking=True)
        return where, self.rows.index_select(0, where)

    def put_back(self, where: slice | Tensor, rows: Tensor) -> None:
        """Whole rows as :meth:`copy_of` returned them."""
        self.rows[where] = rows

    def parts_of(self, slots: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """What some rows hold, copied out: the history of each layer, [B, channels · samples], and the ring, [B, W − 1, page size]."""
        rows = self.rows[slots]
        histories = rows.flatten(1)
        return [histories[:, layer.place : layer.end] for layer in self._look_backs], rows[:, self._history_pages :]
