"""Admission of chunks: which live request each belongs to, what step it takes, or why it is refused.

Nothing here changes a request. What a call would change is collected in a :class:`Step` per chunk and in a dict of
refusals; the model applies both once the whole call has succeeded.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vgraph_lab.errors import RequestError, RequestErrorKind
from vgraph_lab.requests import ChunkRequest

from .chunk_checks import problem_with_chunk, values_in_range
from .geometry import DecoderGeometry
from .stream_routines import Mode, OwnState
from .transitions import Transition, TransitionTable

__all__ = ["LiveRequest", "RequestBook", "Step"]

_REMEMBERED_ENDS = 65536


@dataclass(slots=True)
class LiveRequest:
    """What is known of a request between two chunks.

    Attributes:
        request_id: its name.
        mode: with a reference (``icl``) or without (``xvec``).
        ref_frames: length of the reference as declared.
        slot: its row of the state table; -1 until its first chunk is done.
        suffix_frames: new frames so far; once the window rolls, W plus those of the last chunk.
        own_state: state of a request whose reference is longer than W, in place of its row.
    """

    request_id: str
    mode: Mode
    ref_frames: int
    slot: int = -1
    suffix_frames: int = 0
    own_state: OwnState | None = None


@dataclass(slots=True)
class Step:
    """One chunk that will be decoded.

    Attributes:
        request: whose.
        codes: the new frames [Q, n], n ≥ 1.
        reference: the reference [Q, P] of a first chunk; None if it has none or is a later one.
        is_last: whether the request ends with it.
        width: frames that the step is padded to: the transition's if the chunk fits it, otherwise n.
    """

    request: LiveRequest
    codes: Tensor
    reference: Tensor | None
    is_last: bool
    width: int

    @property
    def frames(self) -> int:
        """New frames n."""
        return self.codes.shape[1]

    @property
    def is_first(self) -> bool:
        """Whether the request begins with it."""
        return self.request.suffix_frames == 0


class RequestBook:
    """All live requests, the free slots, and how past requests ended.

    Args:
        slots: live requests at most.
        transitions: the schedule.
        geometry: the decoder's sizes.
        device: where the model is.
        debug: look at the values of device codes, too.
    """

    def __init__(
        self, slots: int, transitions: TransitionTable, geometry: DecoderGeometry, device: torch.device, *, debug: bool = False
    ) -> None:
        self._slots, self._transitions, self._geometry, self._device, self._debug = slots, transitions, geometry, device, debug
        # Keys of a rotary table: a reference of whatever length, the kept frames, the new ones.
        self._longest_reference = geometry.max_position_embeddings - geometry.sliding_window - transitions.largest_chunk
        self.reset()

    def reset(self) -> None:
        """Forget every request, live and past."""
        self.live: dict[str, LiveRequest] = {}
        self._free = list(range(self._slots - 1, -1, -1))  # the lowest number is given out first
        self._ended: OrderedDict[str, tuple[RequestErrorKind, str]] = OrderedDict()

    # ------------------------------------------------------------------------------------------------ admission

    def admit(self, chunks: Sequence[ChunkRequest]) -> tuple[list[Step], list[str], dict[str, RequestError]]:
        """Sort the chunks of one call.

        Returns:
            Steps to decode, ids that end without samples, and refusals by id. Nothing has changed.
        """
        refused: dict[str, RequestError] = {}
        for request_id, count in Counter(chunk.request_id for chunk in chunks).items():
            if count > 1:
                message = f"{count} chunks in one batch. Send one chunk of a request per call; this one has to begin again under a new id."
                refused[request_id] = RequestError(request_id, RequestErrorKind.DUPLICATE, message)
        steps: list[Step] = []
        ending: list[str] = []
        for chunk in self._sound(chunks, refused):
            step = self._admit(chunk)
            if isinstance(step, Step):
                steps.append(step)
            elif step is None:
                ending.append(chunk.request_id)
            else:
                refused[chunk.request_id] = step
        return self._within_slots(steps, ending, refused), ending, refused

    def _sound(self, chunks: Sequence[ChunkRequest], refused: dict[str, RequestError]) -> list[ChunkRequest]:
        """Chunks with nothing wrong in themselves, of requests that have not ended; the others are refused."""
        sound: list[ChunkRequest] = []
        for chunk in chunks:
            request_id = chunk.request_id
            if request_id in refused:
                continue
            if request_id in self._ended:
                refused[request_id] = RequestError(request_id, *self._ended[request_id])
                continue
            problem = problem_with_chunk(chunk, self._geometry, self._device)
            if problem:
                refused[request_id] = RequestError(request_id, RequestErrorKind.INVALID_INPUT, problem)
            else:
                sound.append(chunk)
        problems = values_in_range([chunk.codes for chunk in sound], self._geometry, debug=self._debug)
        for chunk, problem in zip(sound, problems, strict=True):
            if problem:
                refused[chunk.request_id] = RequestError(chunk.request_id, RequestErrorKind.INVALID_INPUT, problem)
        return [chunk for chunk in sound if chunk.request_id not in refused]

    def _within_slots(self, steps: list[Step], ending: list[str], refused: dict[str, RequestError]) -> list[Step]:
        """Refuse new requests for which no slot is left, those included that end in this call."""
        room = len(self._free) + sum(step.is_last and not step.is_first for step in steps) + sum(name in self.live for name in ending)
        kept: list[Step] = []
        for step in steps:
            if step.is_first and not step.is_last:
                if room == 0:
                    name = step.request.request_id
                    message = f"all {self._slots} slots are in use. Send fewer requests at a time or raise max_num_seqs."
                    refused[name] = RequestError(name, RequestErrorKind.NO_FREE_SLOT, message)
                    continue
                room -= 1
            kept.append(step)
        return kept

    def _admit(self, chunk: ChunkRequest) -> Step | RequestError | None:
        """The step of a sound chunk; None if it ends its request without samples."""
        request_id, codes, ref_frames = chunk.request_id, chunk.codes, chunk.ref_frames
        request, total = self.live.get(request_id), codes.shape[1]

        def invalid(message: str) -> RequestError:
            return RequestError(request_id, RequestErrorKind.INVALID_INPUT, message)

        if request is not None:
            if ref_frames not in (0, request.ref_frames):
                return invalid(
                    f"ref_frames changed from {request.ref_frames} to {ref_frames}. Later chunks say 0 or the first value again."
                )
            return self._step(request, codes, None, chunk.finished) if total else None
        if total == 0:
            return RequestError(request_id, RequestErrorKind.UNKNOWN, "an end without a beginning: no chunk of this request came before.")
        if total < ref_frames or (total == ref_frames and not chunk.finished):
            return invalid(
                f"the first chunk has {total} frames, its reference alone {ref_frames}. "
                "Send all reference frames and then at least one new one."
            )
        if ref_frames > self._longest_reference:
            return invalid(
                f"the reference has {ref_frames} frames; with what follows it, the decoder's {self._geometry.max_position_embeddings} "
                f"positions take at most {self._longest_reference}. Keep its last frames, as a connector does (codec_left_context_frames)."
            )
        if total == ref_frames:
            return None
        request = LiveRequest(request_id, "icl" if ref_frames else "xvec", ref_frames)
        return self._step(request, codes[:, ref_frames:], codes[:, :ref_frames] if ref_frames else None, chunk.finished)

    def _step(self, request: LiveRequest, codes: Tensor, reference: Tensor | None, is_last: bool) -> Step | RequestError:
        frames, largest = codes.shape[1], self._transitions.largest_chunk
        if frames > largest:
            return RequestError(
                request.request_id,
                RequestErrorKind.INVALID_INPUT,
                f"the chunk brings {frames} new frames, the connector delivers at most {largest} at a time. "
                "Send smaller chunks or raise codec_chunk_frames.",
            )
        transition: Transition | None = self._transitions.after(request.suffix_frames, frames)
        fits = transition is not None and (frames == transition.new_frames or (is_last and frames < transition.new_frames))
        return Step(request, codes, reference, is_last, transition.new_frames if fits and transition else frames)

    # ------------------------------------------------------------------------------------------------ changes

    def slots_for(self, count: int, leaving: Iterable[str]) -> list[int]:
        """Slots for new requests: free ones first, then those of live requests that are about to end. Nothing changes."""
        return [*reversed(self._free), *(self.live[name].slot for name in leaving if name in self.live)][:count]

    def begin(self, request: LiveRequest, slot: int) -> None:
        """Keep a new request in a free slot."""
        self._free.remove(slot)
        request.slot = slot
        self.live[request.request_id] = request

    def end(self, request_id: str, kind: RequestErrorKind, message: str) -> None:
        """Release a request's state, if it has any, and remember how it ended."""
        request = self.live.pop(request_id, None)
        if request is not None:
            self._free.append(request.slot)
        self._ended[request_id] = (kind, message)
        while len(self._ended) > _REMEMBERED_ENDS:
            self._ended.popitem(last=False)

    def finish(self, request_ids: Iterable[str]) -> None:
        """End requests whose last chunk is done."""
        for request_id in request_ids:
            self.end(request_id, RequestErrorKind.FINISHED, "its last chunk came before. Ids are not used again: start a new request.")

    def abort(self, request_id: str) -> bool:
        """End a live request early; False if it ended before or never began."""
        if request_id not in self.live:
            return False
        self.end(request_id, RequestErrorKind.ABORTED, "it was aborted. Ids are not used again: start a new request.")
        return True

    def refuse(self, refused: Iterable[RequestError]) -> None:
        """Let requests fail; whatever came of them later is refused with the same words."""
        for error in refused:
            has_ended = error.request_id in self._ended  # and is refused for that already
            if error.kind is not RequestErrorKind.UNKNOWN and not has_ended:
                why = str(error).partition(": ")[2]
                self.end(error.request_id, RequestErrorKind.FAILED_BEFORE, f"an earlier chunk failed ({error.kind}): {why}")
