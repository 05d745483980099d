"""Exact incremental decoding: each chunk costs its own frames, and every chunking gives the samples of the whole utterance.

Every layer that looks back carries over exactly what it would have seen: convolutions their last inputs, attention the keys
and values of the last W − 1 frames. The layers are the decoder's own, called with a past::

    codes ─quantise─▶ pre_conv ─▶ transformer ─▶ upsampling and waveform convolutions ─▶ samples of these frames
                         ▲            ▲                         ▲
                      history    ring of W − 1              histories                      one row of the arena

Keys are kept as they were before their rotation and rotated in their place in the window. Attention depends on differences of
positions only, so this equals the whole utterance, with angles that stay small: a stream may run for hours, beyond the rotary
table and beyond what fp32 angles resolve.

Both steps read and write rows of the arena by slot and look at no data, so graphs and eager calls share them. A step writes the
state of every row as though all its frames were real: frames that fill a chunk up on the right are for rows that end with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .decoder import Code2WavDecoder
from .incremental_state import StateArena
from .layers import CausalConv1d, CausalConvTranspose1d, in_order
from .transformer import KeyValue, sliding_window_mask

__all__ = ["begin_with_reference", "continue_stream", "plain_step", "render_context_frames"]


def continue_stream(decoder: Code2WavDecoder, arena: StateArena, codes: Tensor, slots: Tensor, first: Tensor) -> Tensor:
    """Decode the next frames of streams, each at a position of its own. A stream begins at frame 0, whatever its row held.

    Args:
        decoder: the decoder.
        arena: the state; the rows of ``slots`` move on by n frames.
        codes: int64 [B, num_quantizers, n].
        slots: int64 [B], different ones but for the spare slot.
        first: frame number of each row's first column, int64 [B].

    Returns:
        Waveform of these frames [B, 1, n * samples_per_frame].
    """
    frames, ring = codes.shape[-1], arena.ring
    histories = arena.histories(slots, first)
    past = _Histories(histories)
    conv: Tensor = decoder.pre_conv(decoder.quantize(codes), past)

    keys = torch.arange(ring + frames, device=codes.device)
    window = sliding_window_mask(keys[ring:], keys, decoder.geometry.sliding_window)
    has_been = keys + (first[:, None] - ring) >= 0
    before = [KeyValue(*layer.transpose(1, 3).unbind(2)) for layer in arena.frames_before(slots, first).unbind(2)]
    hidden, caches = decoder.pre_transformer(
        conv.transpose(1, 2), first_position=ring, mask=(window & has_been[:, None])[:, None], past=before, cache_plain_keys=True
    )
    waveform = _render(decoder, hidden.transpose(1, 2), past)
    _write(arena, slots, first + frames, histories, caches, frames)
    return waveform


def plain_step(decoder: Code2WavDecoder, arena: StateArena, codes: Tensor, places: Tensor) -> Tensor:
    """:func:`continue_stream` with ``places`` int64 [B, 2] (slot, number of the first frame); fp32 [B, n * samples_per_frame]."""
    slots, first = places.unbind(1)
    return continue_stream(decoder, arena, codes, slots, first)[:, 0].float()


def begin_with_reference(
    decoder: Code2WavDecoder, arena: StateArena, codes: Tensor, slots: Tensor, first: Tensor, *, new_frames: int
) -> Tensor:
    """Begin streams with a reference and decode the first new frames. Of the reference, only the end is rendered.

    Args:
        decoder: the decoder.
        arena: the state; the rows of ``slots`` are replaced, whatever they held.
        codes: int64 [B, num_quantizers, P + new_frames], left-padded with any valid code.
        slots: int64 [B], different ones but for the spare slot.
        first: minus the number of padded columns of each row, int64 [B].
        new_frames: columns that are not reference.

    Returns:
        Waveform of the new frames [B, 1, new_frames * samples_per_frame].
    """
    frames, g = codes.shape[-1], decoder.geometry
    columns = torch.arange(frames, device=codes.device)
    is_real = columns + first[:, None] >= 0  # [B, frames]
    histories = arena.no_histories(codes.shape[0])
    past = _Histories(histories, is_real)
    conv: Tensor = decoder.pre_conv(decoder.quantize(codes), past)

    window = sliding_window_mask(columns, columns, g.sliding_window)
    # Padded queries see themselves, so that no row of the softmax is empty; convolutions see zeros in their place.
    mask = (window & is_real[:, None]) | torch.eye(frames, dtype=torch.bool, device=codes.device)
    hidden, caches = decoder.pre_transformer(conv.transpose(1, 2), mask=mask[:, None], cache_plain_keys=True)

    rendered = min(frames, render_context_frames(decoder) + new_frames)
    past.is_real = is_real[:, -rendered:]
    waveform = _render(decoder, hidden[:, -rendered:].transpose(1, 2), past)
    _write(arena, slots, first + frames, histories, caches, frames)
    return waveform[..., -new_frames * decoder.samples_per_frame :]


def render_context_frames(decoder: Code2WavDecoder) -> int:
    """Hidden frames before a frame that its samples depend on."""
    layers = [*decoder.upsample.modules(), *decoder.decoder.modules()]
    earliest = 0  # sample of a layer's output that is needed, counted from the frame's first one; then of its input
    for layer in reversed(layers):
        if isinstance(layer, CausalConv1d):
            earliest -= layer.left_context
        elif isinstance(layer, CausalConvTranspose1d):
            earliest = -((layer.stride + layer.overlap - 1 - earliest) // layer.stride)
    return -earliest


class _Histories:
    """The past of one batch (:class:`~.layers.Past`): packed rows in the order in which layers run, renewed as they are read.

    Args:
        rows: [B, ·], written to.
        is_real: bool [B, frames] of the input, if some of it is padding on the left: layers see zeros there.
    """

    def __init__(self, rows: Tensor, is_real: Tensor | None = None) -> None:
        self.is_real, self._rows, self._next = is_real, rows, 0

    def extend(self, x: Tensor, samples: int) -> Tensor:
        if not samples:
            return x
        if self.is_real is not None:
            frames = self.is_real.shape[1]
            x = x * self.is_real[:, None, :, None].expand(-1, -1, -1, x.shape[2] // frames).flatten(2)
        size = x.shape[1] * samples
        history = self._rows[:, self._next : self._next + size].unflatten(1, (x.shape[1], samples))
        self._next += size
        longer = torch.cat((history, x), dim=2)
        history.copy_(longer[..., -samples:])
        return longer


def _render(decoder: Code2WavDecoder, hidden: Tensor, past: _Histories) -> Tensor:
    return in_order((decoder.upsample, decoder.decoder), hidden, past).clamp(-1, 1)


def _write(arena: StateArena, slots: Tensor, end: Tensor, histories: Tensor, caches: Sequence[KeyValue], frames: int) -> None:
    """Keep what a step leaves behind; ``end`` is the frame that comes next in each row."""
    kept = min(frames, arena.ring)
    newest = [part[:, :, -kept:].transpose(1, 2) for cache in caches for part in cache]
    arena.write_frames(slots, end - kept, torch.stack(newest, dim=2).flatten(2))
    arena.write_histories(slots, histories)
