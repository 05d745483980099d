"""Whole utterances (``async_chunk: false``): every request is one chunk, decoded in windows by one Target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from vgraph_lab.errors import RequestError, RequestErrorKind
from vgraph_lab.graphs.target import Target
from vgraph_lab.requests import ChunkRequest, ChunkResult

from .chunk_checks import problem_with_chunk, values_in_range
from .decoder import Code2WavDecoder
from .stateless import decode_windows, stateless_target

__all__ = ["StatelessPath"]


class StatelessPath:
    """Requests that come whole. Nothing is kept between calls.

    Args:
        decoder: the eager decoder.
        bucket_frames: frames of the windows to capture.
        batch_sizes: rows to capture for each of them.
        largest_batch: the most rows of one call; larger groups are split.
        chunk_frames: new frames per window.
        left_context_frames: earlier frames that a window sees again.
        debug: check the values of device codes, too.
    """

    def __init__(
        self,
        decoder: Code2WavDecoder,
        *,
        bucket_frames: Sequence[int],
        batch_sizes: Sequence[int],
        largest_batch: int,
        chunk_frames: int,
        left_context_frames: int,
        debug: bool = False,
    ) -> None:
        self.decoder, self._debug, self._largest_batch = decoder, debug, largest_batch
        self._chunk_frames, self._left_context_frames = chunk_frames, left_context_frames
        self._target = stateless_target(decoder, bucket_frames=bucket_frames, batch_sizes=batch_sizes, debug=debug)

    @property
    def targets(self) -> tuple[Target[Any], ...]:
        """The stateless Target."""
        return (self._target,)

    def forward(self, chunks: Sequence[ChunkRequest]) -> dict[str, ChunkResult]:
        """Decode whole utterances together; a reference's frames are context, their samples are cut."""
        results: dict[str, ChunkResult] = {}
        good: list[ChunkRequest] = []
        counts = Counter(chunk.request_id for chunk in chunks)
        for chunk in chunks:
            error = self._refusal(chunk, counts)
            if error is not None:
                results[chunk.request_id] = error
            else:
                good.append(chunk)
        good.sort(key=lambda chunk: chunk.codes.shape[1])  # neighbours of like length waste the least padding
        for start in range(0, len(good), self._largest_batch):
            results |= self._decode(good[start : start + self._largest_batch])
        return {request_id: results[request_id] for request_id in counts}

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Nothing is live between calls."""
        return []

    def reset(self) -> None:
        """There is nothing to forget."""

    def _decode(self, chunks: list[ChunkRequest]) -> dict[str, ChunkResult]:
        longest, per_frame = max(chunk.codes.shape[1] for chunk in chunks), self.decoder.samples_per_frame
        rows = [chunk.codes.to(self.decoder.device, torch.int64) for chunk in chunks]
        # Padding is on the right and every step is causal, so no real sample sees it.
        codes = torch.stack([F.pad(row, (0, longest - row.shape[1])) for row in rows])
        waveform = decode_windows(
            self._target,
            codes,
            samples_per_frame=per_frame,
            chunk_frames=self._chunk_frames,
            left_context_frames=self._left_context_frames,
        )[:, 0].float()
        return {
            chunk.request_id: samples[chunk.ref_frames * per_frame : chunk.codes.shape[1] * per_frame]
            for chunk, samples in zip(chunks, waveform, strict=True)
        }

    def _refusal(self, chunk: ChunkRequest, counts: Mapping[str, int]) -> RequestError | None:
        def invalid(message: str) -> RequestError:
            return RequestError(chunk.request_id, RequestErrorKind.INVALID_INPUT, message)

        if counts[chunk.request_id] > 1:
            return RequestError(chunk.request_id, RequestErrorKind.DUPLICATE, "it came twice in one batch.")
        problem = problem_with_chunk(chunk, self.decoder.geometry, self.decoder.device)
        if problem is None and not chunk.finished:
            problem = "with async_chunk: false a request comes whole, in one chunk with finished=True. To stream, set async_chunk: true."
        problem = problem or values_in_range([chunk.codes], self.decoder.geometry, debug=self._debug)[0]
        if problem:
            return invalid(problem)
        if chunk.ref_frames >= chunk.codes.shape[1]:
            return invalid(
                f"ref_frames must be 0 or more and less than the {chunk.codes.shape[1]} frames that came, got {chunk.ref_frames}."
            )
        return None
