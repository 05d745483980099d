"""How codes reach the vocoder: one utterance cut into chunks, each with the time at which it can be handed over.

The talker makes one frame after another; frame k exists k frame times after its request began. The connector collects
them and hands over the first chunk as soon as ``initial_codec_chunk_frames`` are there, then one chunk per
``codec_chunk_frames``, and the rest when the utterance ends. With 60 frames, an initial chunk of 1 and chunks of 25::

    frames     1 | 2 ………… 26 | 27 ………… 51 | 52 …… 60
    handed over at   1     26             51         60 (finished)

A ramp takes the place of the initial chunk: its entries are the sizes of the first chunks. Without either, the first
chunk depends on load. The reference travels with the first chunk, cut to its last ``codec_left_context_frames`` frames.

When does the connector learn that the utterance is over? With the last frame (``end_delay_frames=0``), the chunk that
holds it is marked as finished, even if it is a full one. A talker that says so with an extra step, as one that samples
an end token does, delays the rest by that step (``end_delay_frames=1``); and if the utterance ended exactly with a full
chunk, that chunk is long gone, so an empty finished one follows it. Either way a schedule follows from its arguments
alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice, repeat

import torch
from torch import Tensor

from vgraph_lab.config import ConnectorConfig
from vgraph_lab.errors import InputError
from vgraph_lab.requests import ChunkRequest

__all__ = ["PlannedChunk", "ScheduledChunk", "chunk_plan", "chunk_schedule", "chunk_sizes"]


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A chunk in numbers alone.

    Attributes:
        new_frames: its frames without the reference; 0 for the empty chunk that only ends a request.
        available_after_frames: frame times from the request's beginning until the chunk is complete.
        is_last: whether it is marked as the request's last.
    """

    new_frames: int
    available_after_frames: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """One chunk and when it can be handed over.

    Attributes:
        request: what the runner gets.
        new_frames: its frames without the reference; 0 for the empty chunk that only ends a request.
        available_after_frames: frame times from the request's beginning until the chunk is complete.
    """

    request: ChunkRequest
    new_frames: int
    available_after_frames: int


def chunk_sizes(frames: int, connector: ConnectorConfig, *, load: float = 0.0) -> list[int]:
    """New frames of each chunk of an utterance; they add up to ``frames``, and only the last may be short.

    Args:
        frames: frames of the utterance, at least 1.
        connector: how chunks are delivered.
        load: share of the service's capacity in use when the request begins, 0 to 1; it decides about the first chunk
            where the connector does not.

    Raises:
        InputError: no frames, or a load outside 0 to 1.
    """
    if frames < 1:
        raise InputError(f"an utterance of {frames} frames has no chunks. Leave it out.")
    sizes: list[int] = []
    for full in _full_sizes(connector, load):
        sizes.append(min(full, frames - sum(sizes)))
        if sum(sizes) == frames:
            break
    return sizes


def _full_sizes(connector: ConnectorConfig, load: float) -> Iterator[int]:
    """What chunks have if the utterance lasts, without end."""
    first = connector.first_chunk_frames(load)
    yield from connector.ramp or (first,)
    yield from repeat(connector.codec_chunk_frames)


def chunk_plan(frames: int, connector: ConnectorConfig, *, load: float = 0.0, end_delay_frames: int = 0) -> tuple[PlannedChunk, ...]:
    """Sizes and times of all chunks of one utterance, in order; :func:`chunk_schedule` cuts codes by it.

    Args:
        frames: see :func:`chunk_sizes`.
        connector: how chunks are delivered.
        load: see :func:`chunk_sizes`.
        end_delay_frames: frame times between the last frame and the news that it was the last; see the module.

    Raises:
        InputError: an argument is out of range.
    """
    if end_delay_frames < 0:
        raise InputError(f"end_delay_frames is {end_delay_frames}; the end cannot be known before the last frame. Accepted: 0 or more.")
    sizes = chunk_sizes(frames, connector, load=load)
    last_if_full = next(islice(_full_sizes(connector, load), len(sizes) - 1, None))
    ends_later = end_delay_frames > 0 and sizes[-1] == last_if_full  # it was handed over before anyone knew that it was the last
    chunks: list[PlannedChunk] = []
    for size, done in zip(sizes, accumulate(sizes), strict=True):
        is_last = done == frames and not ends_later
        chunks.append(PlannedChunk(size, done + (end_delay_frames if is_last else 0), is_last))
    if ends_later:
        chunks.append(PlannedChunk(0, frames + end_delay_frames, True))
    return tuple(chunks)


def chunk_schedule(
    request_id: str,
    codes: Tensor,
    connector: ConnectorConfig,
    *,
    reference: Tensor | None = None,
    load: float = 0.0,
    end_delay_frames: int = 0,
) -> tuple[ScheduledChunk, ...]:
    """All chunks of one request, in order.

    Args:
        request_id: the request.
        codes: the utterance's frames, integers [num_quantizers, T], T ≥ 1.
        connector: how chunks are delivered.
        reference: frames of the voice to continue, integers [num_quantizers, P]; None for an x-vector request.
        load: see :func:`chunk_sizes`; fixed for the request's life.
        end_delay_frames: frame times between the last frame and the news that it was the last; see the module.

    Raises:
        InputError: codes or reference are not [num_quantizers, frames], or an argument is out of range.
    """
    _check_shapes(codes, reference)
    plan = chunk_plan(codes.shape[1], connector, load=load, end_delay_frames=end_delay_frames)
    context = codes[:, :0] if reference is None else reference[:, max(0, reference.shape[1] - connector.codec_left_context_frames) :]
    chunks, done = [], 0
    for index, planned in enumerate(plan):
        new, done = codes[:, done : done + planned.new_frames], done + planned.new_frames
        first = index == 0
        request = ChunkRequest(
            request_id, torch.cat((context, new), dim=1) if first else new, context.shape[1] if first else 0, planned.is_last
        )
        chunks.append(ScheduledChunk(request, planned.new_frames, planned.available_after_frames))
    return tuple(chunks)


def _check_shapes(codes: Tensor, reference: Tensor | None) -> None:
    if codes.dim() != 2:
        raise InputError(f"codes must be [num_quantizers, frames], got {list(codes.shape)}. For a batch of one try codes[0].")
    if reference is not None and (reference.dim() != 2 or reference.shape[0] != codes.shape[0]):
        raise InputError(f"reference must be [{codes.shape[0]}, frames] like the codes, got {list(reference.shape)}.")
