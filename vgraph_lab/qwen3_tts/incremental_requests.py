"""Admission of chunks that are decoded incrementally: as in the published path, but no length is out of reach."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from .geometry import DecoderGeometry
from .stream_requests import LiveRequest, RequestBook, Step
from .transitions import TransitionTable

__all__ = ["IncrementalBook"]


class IncrementalBook(RequestBook):
    """All live requests, the free slots, and how past requests ended.

    A request's ``suffix_frames`` are all its new frames so far. Chunks and references may have any number of frames: they are
    decoded in pieces.
    """

    def __init__(
        self, slots: int, transitions: TransitionTable, geometry: DecoderGeometry, device: torch.device, *, debug: bool = False
    ) -> None:
        super().__init__(slots, transitions, geometry, device, debug=debug)
        self._longest_reference = sys.maxsize

    def _step(self, request: LiveRequest, codes: Tensor, reference: Tensor | None, is_last: bool) -> Step:
        return Step(request, codes, reference, is_last, codes.shape[1])
