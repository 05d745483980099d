"""Streaming: one forward for a batch of chunks, composed of three Targets; request state stays here.

    chunks ─admit─▶ steps ─group by state and width─▶ Target calls ─all done─▶ commit state ─▶ samples

Nothing of a request changes before every Target call of the forward has succeeded: if one of them raises, all requests are as
they were, and the forward may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vgraph_lab.config import ConnectorConfig
from vgraph_lab.errors import ConfigError, InputError, RequestError, RequestErrorKind
from vgraph_lab.graphs.descriptor import Descriptor
from vgraph_lab.graphs.target import Target
from vgraph_lab.requests import ChunkRequest, ChunkResult

from .decoder import Code2WavDecoder
from .state_table import StateTable
from .stream_requests import LiveRequest, RequestBook, Step
from .stream_routines import IclPrefixRoutine, Mode, OwnState, StreamOutput, SuffixDescriptor, SuffixRoutine, XvecPrefixRoutine
from .streaming import PrefixState, SuffixState
from .transitions import TransitionTable

__all__ = ["ICL_PREFIX_TARGET_ID", "SUFFIX_TARGET_ID", "XVEC_PREFIX_TARGET_ID", "StreamingPath"]

ICL_PREFIX_TARGET_ID = "qwen3_tts.icl_prefix"
XVEC_PREFIX_TARGET_ID = "qwen3_tts.xvec_prefix"
SUFFIX_TARGET_ID = "qwen3_tts.suffix"

_Group = tuple[Mode, int, int, int]  # mode, kept frames, width, length of a long reference (0 for all others)


class StreamingPath:
    """Streamed requests of one model: Targets, routing, state.

    Args:
        decoder: the eager decoder.
        connector: how chunks are delivered.
        batch_sizes: rows to capture for every transition.
        largest_batch: the most rows of one call; larger groups are split.
        max_requests: live requests at most.
        debug: check the values of device codes, too.

    Raises:
        ConfigError: the connector's chunks do not fit the decoder's ``max_position_embeddings``.
    """

    def __init__(
        self,
        decoder: Code2WavDecoder,
        connector: ConnectorConfig,
        *,
        batch_sizes: Sequence[int],
        largest_batch: int,
        max_requests: int,
        debug: bool = False,
    ) -> None:
        self.decoder, self._largest_batch = decoder, largest_batch
        self._window, self._device = decoder.geometry.sliding_window, decoder.device
        self.transitions = TransitionTable.from_connector(connector, self._window)
        self.table = StateTable(decoder, max_requests)
        self._check_positions(decoder)
        self.book = RequestBook(max_requests, self.transitions, decoder.geometry, self._device, debug=debug)

        starts = [Descriptor(rows, start.new_frames) for rows in batch_sizes for start in self.transitions.starts]
        modes: tuple[Mode, ...] = ("icl", "xvec")
        steps = [
            SuffixDescriptor(rows, step.target, mode, step.source)
            for rows in batch_sizes
            for mode in modes
            for step in self.transitions.steps
        ]
        suffix = SuffixRoutine(decoder, self.table, self.transitions, steps, debug=debug)
        self._icl_prefix = Target(ICL_PREFIX_TARGET_ID, IclPrefixRoutine(decoder, self.table, starts, debug=debug), starts)
        self._xvec_prefix = Target(XVEC_PREFIX_TARGET_ID, XvecPrefixRoutine(decoder, self.table, starts, debug=debug), starts)
        self._suffix = Target(SUFFIX_TARGET_ID, suffix, steps)

    def _check_positions(self, decoder: Code2WavDecoder) -> None:
        longest, needed = decoder.geometry.max_position_embeddings, 2 * self._window + self.transitions.largest_chunk
        if needed > longest:
            raise ConfigError(
                f"connector: chunks of {self.transitions.largest_chunk} frames need {needed} positions (a reference and a window of "
                f"{self._window} frames each, and the chunk); the decoder has {longest}. Use smaller chunks."
            )

    @property
    def targets(self) -> tuple[Target[Any], ...]:
        """The three streaming Targets."""
        return (self._icl_prefix, self._xvec_prefix, self._suffix)

    def forward(self, chunks: Sequence[ChunkRequest]) -> dict[str, ChunkResult]:
        """Decode one batch of chunks; results in the order of the chunks."""
        steps, ending, refused = self.book.admit(chunks)
        done: list[tuple[list[Step], StreamOutput]] = []
        for group, members in self._grouped(steps).items():
            rows = 1 if group[3] else self._largest_batch
            for start in range(0, len(members), rows):
                piece = members[start : start + rows]
                done.append((piece, self._call(group, piece)))
        results: dict[str, ChunkResult] = {request_id: torch.zeros(0, device=self._device) for request_id in ending}
        results |= refused
        for members, output in done:
            results |= self._samples(members, output)
        self._commit(done, ending, refused)
        return {chunk.request_id: results[chunk.request_id] for chunk in chunks}

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests early and release their state; returns those that were live."""
        return [request_id for request_id in request_ids if self.book.abort(request_id)]

    def reset(self) -> None:
        """Forget every request."""
        self.book.reset()

    # ------------------------------------------------------------------------------------------------ grouping

    def _grouped(self, steps: Iterable[Step]) -> dict[_Group, list[Step]]:
        groups: dict[_Group, list[Step]] = {}
        for step in steps:
            request = step.request
            reference = request.ref_frames if request.ref_frames > self._window else 0
            group = (request.mode, self._kept_frames(request), step.width, reference)
            groups.setdefault(group, []).append(step)
        return groups

    def _kept_frames(self, request: LiveRequest) -> int:
        """Suffix frames whose state is kept: the last W at most."""
        return min(request.suffix_frames, self._window)

    # ------------------------------------------------------------------------------------------------ decoding

    def _call(self, group: _Group, members: list[Step]) -> StreamOutput:
        mode, kept, _, long_reference = group
        codes = self._stacked([step.codes for step in members], max(step.frames for step in members))
        is_last = all(step.is_last for step in members)
        if kept:
            state = members[0].request.own_state if long_reference else torch.tensor([step.request.slot for step in members])
            return self._suffix(codes, state, mode, kept, is_last)
        if mode == "xvec":
            return self._xvec_prefix(codes, is_last)
        frames = long_reference or self._window
        references = [step.reference for step in members if step.reference is not None]
        padding = torch.tensor([frames - reference.shape[1] for reference in references])
        return self._icl_prefix(codes, self._stacked(references, frames, left=True), padding, is_last)

    def _stacked(self, rows: list[Tensor], frames: int, *, left: bool = False) -> Tensor:
        """Rows [Q, ·] padded to ``frames`` → int64 [B, Q, frames], on the host if all of them are there."""
        if any(row.device.type != "cpu" for row in rows):
            rows = [row.to(self._device) for row in rows]
        if any(row.shape[1] != frames for row in rows):
            rows = [F.pad(row, (frames - row.shape[1], 0) if left else (0, frames - row.shape[1])) for row in rows]
        return torch.stack(rows).long()

    # ------------------------------------------------------------------------------------------------ commit

    def _commit(self, done: list[tuple[list[Step], StreamOutput]], ending: list[str], refused: dict[str, RequestError]) -> None:
        """Keep the next state of every request that goes on, and let go of the others.

        All that can be refused has been by now, and what can fail is done before the first write. Should a write fail all the
        same, rows may be half new: the requests of the call are ended then, rather than continued from them.
        """
        steps = [step for members, _ in done for step in members]
        leaving = [step.request.request_id for step in steps if step.is_last] + ending
        beginning = [step.request for step in steps if step.is_first and not step.is_last]
        slots = dict(zip((r.request_id for r in beginning), self.book.slots_for(len(beginning), leaving), strict=True))
        writes = [write for members, output in done for write in self._writes(members, output, slots)]
        try:
            for write in writes:
                write()
            self.book.finish(leaving)
            for request in beginning:
                self.book.begin(request, slots[request.request_id])
            for step in steps:
                step.request.suffix_frames = self._kept_frames(step.request) + step.frames
            self.book.refuse(refused.values())
        except BaseException as error:
            for step in steps:
                message = f"its state could not be written ({type(error).__name__}). Start a new request."
                self.book.end(step.request.request_id, RequestErrorKind.FAILED_BEFORE, message)
            raise

    def _writes(self, members: list[Step], output: StreamOutput, slots: dict[str, int]) -> list[Callable[[], None]]:
        """What to write for those of one Target call that go on."""
        going_on = [row for row, step in enumerate(members) if not step.is_last]
        if not going_on:
            return []
        prefix, suffix = output.prefix, output.suffix
        if len(going_on) < len(members):
            rows = torch.tensor(going_on).to(self._device, non_blocking=True)
            prefix = prefix and PrefixState(*(t.index_select(0, rows) for t in prefix))
            suffix = suffix.index_select(0, rows)
        first = members[going_on[0]]
        request = first.request
        if request.ref_frames > self._window:  # alone in its call
            before = request.own_state
            kept_prefix = prefix if before is None else before.prefix
            assert kept_prefix is not None
            frames = self._kept_frames(request) + first.frames
            return [partial(setattr, request, "own_state", OwnState(kept_prefix, self.table.unpacked(suffix, frames)))]
        requests = [members[row].request for row in going_on]
        places = torch.tensor([slots.get(r.request_id, r.slot) for r in requests]).to(self._device, non_blocking=True)
        writes: list[Callable[[], None]] = [] if prefix is None else [partial(self.table.write_prefix, places, prefix)]
        return [*writes, partial(self.table.write_suffix, places, suffix)]

    def _samples(self, members: list[Step], output: StreamOutput) -> dict[str, ChunkResult]:
        longest, per_frame = output.waveform.shape[1], self.decoder.samples_per_frame
        found: dict[str, ChunkResult] = {}
        for step, samples in zip(members, output.waveform.unbind(0), strict=True):
            length = step.frames * per_frame
            found[step.request.request_id] = samples if length == longest else samples[:length]
        return found

    # ------------------------------------------------------------------------------------------------ reading

    def state_of(self, request_id: str) -> tuple[LiveRequest, PrefixState | None, SuffixState]:
        """A live request's record and copies of its state (one row each).

        Raises:
            InputError: no such live request.
        """
        request = self.book.live.get(request_id)
        if request is None:
            raise InputError(f"no live request {request_id!r}. Live: {', '.join(self.book.live) or 'none'}.")
        if request.own_state is not None:
            return request, *request.own_state
        slots = torch.tensor([request.slot], device=self._device)
        prefix = self.table.prefix(slots) if request.mode == "icl" else None
        return request, prefix, self.table.suffix(slots, self._kept_frames(request))
