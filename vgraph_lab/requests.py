"""What a request hands to a model chunk by chunk, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .errors import RequestError

__all__ = ["ChunkRequest", "ChunkResult"]

ChunkResult = Tensor | RequestError
"""Samples of one chunk (float32 [samples], on the model's device), or why there are none."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRequest:
    """One chunk of one request. A chunk that is refused ends its request: its state is freed, later chunks are refused with its reason.

    Attributes:
        request_id: unique; an id is not used again after its request has ended (the last 65,536 ends are remembered). A chunk
            of an id that is neither live nor remembered begins a new request.
        codes: integers [num_quantizers, F], on the host or the model's device. The first chunk holds the reference frames
            and then the first new ones, later chunks only new ones. F may be 0 if ``finished``.
        ref_frames: how many leading columns of the first chunk are reference. They are taken as they come: cutting a reference to
            ``codec_left_context_frames`` is the connector's part, and one longer than W runs eager. Later
            chunks say 0 or the same number again.
        finished: whether this is the request's last chunk.
    """

    request_id: str
    codes: Tensor
    ref_frames: int = 0
    finished: bool = False
