"""Incremental streaming: one forward for a batch of chunks, composed of calls of one Target; request state stays in the arena.

    chunks ─admit─▶ steps ─cut into widths─▶ group by widths ─▶ Target calls ─all done─▶ samples

A call moves the state of its rows on, in place. So rows are copied before, and put back if a later call of the same forward
fails: then all requests are as they were, and the forward may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
from .incremental_forms import FormReport, StepForm
from .incremental_requests import IncrementalBook
from .incremental_routine import WITH_REFERENCE, IncrementalRoutine
from .incremental_state import StateArena
from .incremental_widths import ChunkWidths
from .stream_requests import LiveRequest, Step
from .transitions import TransitionTable

__all__ = ["INCREMENTAL_TARGET_ID", "IncrementalPath"]

INCREMENTAL_TARGET_ID = "qwen3_tts.incremental"
_MOST_EAGER_FRAMES = 300


@dataclass(frozen=True, slots=True)
class _Pieces:
    """How a chunk is decoded: by calls of these widths, the first one perhaps with a reference before it."""

    widths: tuple[int, ...]
    begins_with_reference: bool = False


@dataclass(slots=True)
class _Row:
    """One step with its place: ``codes`` are all columns that its calls decode, padding on the left included."""

    step: Step
    slot: int
    first: int
    codes: Tensor
    skipped_frames: int  # of the samples: a reference that is decoded like new frames
    pieces: _Pieces


class IncrementalPath:
    """Streamed requests of one model: Target, routing, state.

    Args:
        decoder: the eager decoder.
        connector: how chunks are delivered; all its sizes are captured.
        batch_sizes: rows to capture for every width.
        largest_batch: the most rows of one call; larger groups are split.
        max_requests: live requests at most.
        more_widths: further widths to capture.
        has_graphs: False leaves chunks in one piece, since no width has a graph.
        form: of the captured step; by default the plain one.
        form_report: how it was chosen.
        debug: check the values of device codes, too.

    Raises:
        ConfigError: a width does not fit the decoder's ``max_position_embeddings``.
    """

    def __init__(
        self,
        decoder: Code2WavDecoder,
        connector: ConnectorConfig,
        *,
        batch_sizes: Sequence[int],
        largest_batch: int,
        max_requests: int,
        more_widths: Sequence[int] = (),
        has_graphs: bool = True,
        form: StepForm | None = None,
        form_report: FormReport | None = None,
        debug: bool = False,
    ) -> None:
        self.decoder, self._largest_batch = decoder, largest_batch
        self._window, self._device = decoder.geometry.sliding_window, decoder.device
        self.transitions = TransitionTable.from_connector(connector, self._window)
        # Requests of a single chunk have no slot of their own; so many of them are decoded at a time.
        self._passing_slots = range(max_requests, max_requests + largest_batch)
        self.table = StateArena(decoder, max_requests + largest_batch)
        self.book = IncrementalBook(max_requests, self.transitions, decoder.geometry, self._device, debug=debug)

        starts = [start.new_frames for start in self.transitions.starts]
        widths = sorted({*starts, *connector.ramp, connector.codec_chunk_frames, *more_widths})
        room = decoder.geometry.max_position_embeddings - self._window
        if max(widths) > room:
            raise ConfigError(
                f"chunks of {max(widths)} frames need {max(widths) + self._window} positions (a window of {self._window} frames and the "
                f"chunk); the decoder has {decoder.geometry.max_position_embeddings}. Use smaller chunks."
            )
        most_eager = min(_MOST_EAGER_FRAMES, room)
        self.starts = ChunkWidths(starts if has_graphs else (), most_eager_frames=most_eager)
        self.widths = ChunkWidths(widths if has_graphs else (), most_eager_frames=most_eager)
        descriptors = [
            *(Descriptor(rows, frames) for rows in batch_sizes for frames in widths),
            *(Descriptor(rows, frames, WITH_REFERENCE) for rows in batch_sizes for frames in starts),
        ]
        self._routine = IncrementalRoutine(decoder, self.table, descriptors, form=form, form_report=form_report, debug=debug)
        self._target = Target(INCREMENTAL_TARGET_ID, self._routine, descriptors)

    @property
    def form_report(self) -> FormReport:
        """Which form the graphs have, and why that is another one than was asked for."""
        return self._routine.form_report

    @property
    def targets(self) -> tuple[Target[Any], ...]:
        """The incremental Target."""
        return (self._target,)

    def forward(self, chunks: Sequence[ChunkRequest]) -> dict[str, ChunkResult]:
        """Decode one batch of chunks; results in the order of the chunks."""
        steps, ending, refused = self.book.admit(chunks)
        leaving = [step.request.request_id for step in steps if step.is_last] + ending
        beginning = [step.request for step in steps if step.is_first and not step.is_last]
        slots = dict(zip((r.request_id for r in beginning), self.book.slots_for(len(beginning), leaving), strict=True))
        results: dict[str, ChunkResult] = {request_id: torch.zeros(0, device=self._device) for request_id in ending}
        results |= refused
        copies: list[tuple[slice | Tensor, Tensor]] = []
        try:
            for wave in self._waves(steps, slots):
                self._keep_copies(wave, copies)
                for members in self._grouped(wave):
                    results |= self._decode(members)
        except BaseException as error:
            self._put_back(steps, copies, error)
            raise
        self._commit(steps, slots, leaving, refused)
        return {chunk.request_id: results[chunk.request_id] for chunk in chunks}

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests early and release their state; returns those that were live."""
        return [request_id for request_id in request_ids if self.book.abort(request_id)]

    def reset(self) -> None:
        """Forget every request."""
        self.book.reset()

    # ------------------------------------------------------------------------------------------------ rows

    def _waves(self, steps: Sequence[Step], slots: dict[str, int]) -> list[list[_Row]]:
        """Steps with their rows. What has to wait for a row until an earlier wave is through comes in a later one."""
        held = {request.slot for request in self.book.live.values()}
        waves: list[list[_Row]] = [[], []]
        passing: list[Step] = []
        for step in steps:
            slot = slots.get(step.request.request_id, step.request.slot)
            if step.is_first and step.is_last:
                passing.append(step)
            elif step.is_first and slot in held:  # by a request that ends in this forward
                waves[1].append(self._row(step, slot))
            else:
                waves[0].append(self._row(step, slot))
        for number, step in enumerate(passing):
            turn, place = divmod(number, len(self._passing_slots))
            if turn == len(waves):
                waves.append([])
            waves[turn].append(self._row(step, self._passing_slots[place]))
        return [wave for wave in waves if wave]

    def _row(self, step: Step, slot: int) -> _Row:
        request, reference, codes = step.request, step.reference, step.codes
        if not step.is_first:
            return _Row(step, slot, request.ref_frames + request.suffix_frames, codes, 0, self._pieces(step.frames, step.is_last))
        if reference is None:
            return _Row(step, slot, 0, codes, 0, self._pieces(step.frames, step.is_last))
        columns, missing = torch.cat((reference.to(codes.device), codes), dim=1), self._window - reference.shape[1]
        if missing < 0:  # decoded like new frames, all of them: every one reaches the samples that follow, through the layers
            return _Row(step, slot, 0, columns, reference.shape[1], self._pieces(columns.shape[1], step.is_last))
        pieces = self._pieces(step.frames, step.is_last, begins_with_reference=True)
        return _Row(step, slot, -missing, F.pad(columns, (missing, 0)), 0, pieces)

    def _pieces(self, frames: int, is_last: bool, *, begins_with_reference: bool = False) -> _Pieces:
        if not begins_with_reference:
            return _Pieces(self.widths.pieces(frames, is_last=is_last))
        starts = self.starts.captured
        if frames in starts or (is_last and starts and frames < starts[-1]):
            return _Pieces(self.starts.pieces(frames, is_last=is_last), begins_with_reference=True)
        for first in reversed([start for start in starts if start < frames]):
            rest = self.widths.covering(frames - first, is_last)
            if rest:
                return _Pieces((first, *rest), begins_with_reference=True)
        return _Pieces(self.widths.eager(frames), begins_with_reference=True)

    def _keep_copies(self, wave: list[_Row], copies: list[tuple[slice | Tensor, Tensor]]) -> None:
        """Copy the rows of live requests."""
        held = {request.slot for request in self.book.live.values()}
        kept = [row.slot for row in wave if row.slot in held]
        if kept:
            copies.append(self.table.copy_of(kept))

    # ------------------------------------------------------------------------------------------------ decoding

    def _grouped(self, wave: Iterable[_Row]) -> list[list[_Row]]:
        """Rows that are decoded by calls of the same widths, no more than fit one call."""
        groups: dict[_Pieces, list[_Row]] = {}
        for row in wave:
            groups.setdefault(row.pieces, []).append(row)
        size = self._largest_batch
        return [members[start : start + size] for members in groups.values() for start in range(0, len(members), size)]

    def _decode(self, members: list[_Row]) -> dict[str, ChunkResult]:
        pieces, per_frame = members[0].pieces, self.decoder.samples_per_frame
        may_pad = all(row.step.is_last for row in members)
        on_host = all(row.codes.device.type == "cpu" for row in members)
        codes = [row.codes if on_host else row.codes.to(self._device) for row in members]
        found: list[Tensor] = []
        done = 0
        for number, width in enumerate(pieces.widths):
            has_reference = pieces.begins_with_reference and number == 0
            columns = width + (self._window if has_reference else 0)
            is_last = may_pad and number == len(pieces.widths) - 1
            taken = codes if len(pieces.widths) == 1 else [row[:, done : done + columns] for row in codes]
            longest = max(row.shape[1] for row in taken)
            taken = [row if row.shape[1] == longest else F.pad(row, (0, longest - row.shape[1])) for row in taken]
            places = torch.tensor([(row.slot, row.first + done) for row in members])
            found.append(self._target(torch.stack(taken).long(), places, has_reference, is_last))
            done += columns
        waveform = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        results: dict[str, ChunkResult] = {}
        total = waveform.shape[1]
        for row, samples in zip(members, waveform.unbind(0), strict=True):
            begin, length = row.skipped_frames * per_frame, row.step.frames * per_frame
            results[row.step.request.request_id] = samples if length == total else samples[begin : begin + length]
        return results

    # ------------------------------------------------------------------------------------------------ commit

    def _commit(self, steps: list[Step], slots: dict[str, int], leaving: list[str], refused: dict[str, RequestError]) -> None:
        """Note where every request is now; the rows are written already. If that fails, its requests end."""
        try:
            self.book.finish(leaving)
            for step in steps:
                request = step.request
                request.suffix_frames += step.frames
                if request.request_id in slots:
                    self.book.begin(request, slots[request.request_id])
            self.book.refuse(refused.values())
        except BaseException as error:
            self._end(steps, error)
            raise

    def _put_back(self, steps: list[Step], copies: list[tuple[slice | Tensor, Tensor]], error: BaseException) -> None:
        """Undo what a failed forward has done to rows, the latest first. If that fails, its requests end."""
        try:
            for where, rows in reversed(copies):
                self.table.put_back(where, rows)
        except BaseException:
            self._end(steps, error)
            raise

    def _end(self, steps: list[Step], error: BaseException) -> None:
        for step in steps:
            message = f"its state could not be written or brought back ({type(error).__name__}). Start a new request."
            self.book.end(step.request.request_id, RequestErrorKind.FAILED_BEFORE, message)

    # ------------------------------------------------------------------------------------------------ reading

    def state_of(self, request_id: str) -> tuple[LiveRequest, Tensor]:
        """A live request's record and a copy of its row, [pages, page size].

        Raises:
            InputError: no such live request.
        """
        request = self.book.live.get(request_id)
        if request is None:
            raise InputError(f"no live request {request_id!r}. Live: {', '.join(self.book.live) or 'none'}.")
        return request, self.table.rows[request.slot].clone()
