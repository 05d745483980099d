"""Stateless decoding: windows of codes, each decoded on its own, with left context that is cut from the result.

This is what serves requests when chunks are not streamed (``async_chunk: false``). One Target,
``qwen3_tts.stateless``, answers one window; :func:`decode_windows` walks a whole utterance with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from vgraph_lab.errors import ConfigError, InputError
from vgraph_lab.graphs.descriptor import Descriptor
from vgraph_lab.graphs.routine import Buffers, Resolution, Routine
from vgraph_lab.graphs.target import Target

from .decoder import Code2WavDecoder
from .inputs import validate_codes

__all__ = [
    "DECODE_CHUNK_FRAMES",
    "DECODE_LEFT_CONTEXT_FRAMES",
    "STATELESS_TARGET_ID",
    "StatelessRoutine",
    "decode_windows",
    "stateless_buckets",
    "stateless_target",
]

STATELESS_TARGET_ID = "qwen3_tts.stateless"
DECODE_CHUNK_FRAMES = 300
DECODE_LEFT_CONTEXT_FRAMES = 25
_SMALL_BUCKET_FRAMES = 150


def stateless_buckets(
    configured: Iterable[int] = (),
    *,
    chunk_frames: int = DECODE_CHUNK_FRAMES,
    left_context_frames: int = DECODE_LEFT_CONTEXT_FRAMES,
) -> tuple[int, ...]:
    """Frame buckets to capture: 150, a whole window with its context, and what the configuration adds. Ascending."""
    return tuple(sorted({_SMALL_BUCKET_FRAMES, chunk_frames + left_context_frames, *configured}))


def stateless_target(
    decoder: Code2WavDecoder,
    *,
    bucket_frames: Sequence[int] | None = None,
    batch_sizes: Sequence[int] = (1,),
    debug: bool = False,
    clone_output: bool = True,
) -> Target[Tensor]:
    """The Target ``qwen3_tts.stateless``: codes [B, Q, T] → waveform [B, 1, T * samples_per_frame].

    Args:
        decoder: the eager decoder; graphs read its weights in place.
        bucket_frames: frame counts to capture, by default :func:`stateless_buckets`.
        batch_sizes: row counts to capture for each of them.
        debug: check the values of device tensors too.
        clone_output: see :class:`~vgraph_lab.graphs.target.Target`.

    Raises:
        ConfigError: a bucket is larger than the decoder's ``max_position_embeddings``, or a size is not positive.
    """
    longest = decoder.geometry.max_position_embeddings
    buckets = stateless_buckets() if bucket_frames is None else bucket_frames
    for name, sizes in (("bucket_frames", buckets), ("batch_sizes", batch_sizes)):
        if isinstance(sizes, int) or not sizes:
            raise ConfigError(f"{name} must be one or more whole numbers in a list or tuple, got {sizes!r}.")
        bad = [size for size in sizes if not isinstance(size, int) or isinstance(size, bool) or size < 1]
        if bad:
            raise ConfigError(f"{name} must be whole numbers from 1, got {bad}.")
    too_long = [frames for frames in buckets if frames > longest]
    if too_long:
        raise ConfigError(f"bucket_frames {too_long} exceed the decoder's max_position_embeddings, {longest}. Use shorter windows.")
    descriptors = [Descriptor(batch, frames) for batch in batch_sizes for frames in buckets]
    return Target(STATELESS_TARGET_ID, StatelessRoutine(decoder, descriptors, debug=debug), descriptors, clone_output=clone_output)


class StatelessRoutine(Routine[Tensor]):
    """Static codes in, waveform out; short windows are padded on the right and cut.

    Every step of the decoder is causal, so padding on the right cannot change the frames before it, and rows of a
    batch do not see each other: what fills the rest of the buffer never reaches a real sample. It is filled all the
    same, so that every code is valid and replays are reproducible.

    Args:
        decoder: the eager decoder.
        descriptors: the graphs that may exist, for resolution.
        debug: check the values of device tensors too.
        pad_code: what fills frames and rows that a call does not cover.
    """

    def __init__(self, decoder: Code2WavDecoder, descriptors: Sequence[Descriptor], *, debug: bool = False, pad_code: int = 0) -> None:
        self.decoder, self.debug, self.pad_code = decoder, debug, pad_code
        self._device, self._samples_per_frame = decoder.device, decoder.samples_per_frame  # read once: calls are counted in µs
        by_work = sorted(descriptors, key=lambda d: (d.work, d.frames))

        @lru_cache(maxsize=4096)
        def covering(batch_size: int, frames: int) -> Resolution:
            fitting = tuple(d for d in by_work if d.batch_size >= batch_size and d.frames >= frames)
            return Resolution(Descriptor(batch_size, frames), fitting)

        self._covering: Callable[[int, int], Resolution] = covering

    def captured_modules(self) -> Iterable[nn.Module]:
        """The decoder's weights are read in place."""
        return (self.decoder,)

    def validate_runtime_inputs(self, codes: Tensor) -> None:
        """Codes [B, num_quantizers, T] on the decoder's device or on the host."""
        validate_codes(codes, self.decoder.geometry, device=self._device, debug=self.debug)

    def resolve(self, codes: Tensor) -> Resolution:
        """All graphs that cover the rows and frames, the one with the least work first."""
        batch_size, _, frames = codes.shape
        return self._covering(batch_size, frames)

    def make_descriptor(self, key: Descriptor) -> Descriptor:
        """Capture exactly the shape that came."""
        return key

    def allocate_buffers(self, descriptor: Descriptor) -> Buffers:
        """``codes``: int64 [batch_size, num_quantizers, frames]."""
        shape = (descriptor.batch_size, self.decoder.geometry.num_quantizers, descriptor.frames)
        return {"codes": torch.zeros(shape, dtype=torch.int64, device=self._device)}

    def prepare_for_capture(self, descriptor: Descriptor, buffers: Buffers) -> None:
        """Fill the buffer with a valid code."""
        buffers["codes"].fill_(self.pad_code)

    def forward_for_capture(self, descriptor: Descriptor, buffers: Buffers) -> Tensor:
        """The eager mathematics on the static codes."""
        return self.decoder.decode(buffers["codes"])

    def copy_runtime_inputs(self, descriptor: Descriptor, buffers: Buffers, codes: Tensor) -> None:
        """Put the codes into the upper left corner and the pad code everywhere else."""
        static = buffers["codes"]
        if static.shape != codes.shape:
            static.fill_(self.pad_code)
            static = static[: codes.shape[0], :, : codes.shape[2]]
        static.copy_(codes)

    def output_after_replay(self, descriptor: Descriptor, buffers: Buffers, output: Tensor, codes: Tensor) -> Tensor:
        """Cut padded rows, and the samples of padded frames counted from the end.

        Counting from the end keeps decoders right whose output is shorter than frames * samples_per_frame.
        """
        batch_size, _, frames = codes.shape
        if frames != descriptor.frames:
            output = output.narrow(2, 0, output.shape[2] - (descriptor.frames - frames) * self._samples_per_frame)
        if batch_size != descriptor.batch_size:
            output = output.narrow(0, 0, batch_size)
        return output

    def eager_call(self, codes: Tensor) -> Tensor:
        """The decoder itself, which validates."""
        return self.decoder(codes)  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped


def decode_windows(
    decode: Callable[[Tensor], Any],
    codes: Tensor,
    *,
    samples_per_frame: int,
    chunk_frames: int = DECODE_CHUNK_FRAMES,
    left_context_frames: int = DECODE_LEFT_CONTEXT_FRAMES,
) -> Tensor:
    """Decode utterances of any length window by window.

    ::

        chunk 300, context 25:   [0 … 299] · [275 … 599] · [575 … 899] …   the first 25 frames of a window are cut

    Args:
        decode: a Target or a decoder: codes [B, Q, T] → waveform [B, 1, samples].
        codes: integers [B, Q, T], T ≥ 1.
        samples_per_frame: the decoder's.
        chunk_frames: new frames per window.
        left_context_frames: earlier frames that a window sees again.

    Returns:
        Waveform [B, 1, T * samples_per_frame].

    Raises:
        InputError: no frames, or window sizes that make no window.
    """
    if chunk_frames < 1 or left_context_frames < 0:
        raise InputError(f"chunk_frames must be ≥ 1 and left_context_frames ≥ 0, got {chunk_frames} and {left_context_frames}.")
    if codes.dim() != 3 or codes.shape[-1] == 0:
        raise InputError(f"codes must have the shape [B, Q, T] with T ≥ 1, got {list(codes.shape)}.")
    pieces: list[Tensor] = []
    for start in range(0, codes.shape[-1], chunk_frames):
        context = min(start, left_context_frames)
        window = codes[..., start - context : start + chunk_frames]
        pieces.append(decode(window)[..., context * samples_per_frame :])
    return torch.cat(pieces, dim=-1)
