"""Admission of chunks: which live request each belongs to, what step it takes, or why it is refused.

Nothing here changes a request. What a call would change is collected in a :class:`Step` per chunk and in a dict of
refusals; the model applies both once the whole call has succeeded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vgraph_lab.errors import RequestError, RequestErrorKind
from vgraph_lab.requests import ChunkRequest

from .stream_routines import Mode, OwnState
from .transitions import Transition, TransitionTable

__all__ = ["LiveRequest", "RequestBook", "Step"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
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
        num_quantizers: rows that codes must have.
    """

    def __init__(self, slots: int, transitions: TransitionTable, num_quantizers: int) -> None:
        self.live: dict[str, LiveRequest] = {}
        self._slots, self._transitions, self._quantizers = slots, transitions, num_quantizers
        self._free = list(range(slots - 1, -1, -1))  # the lowest number is given out first
        self._ended: OrderedDict[str, tuple[RequestErrorKind, str]] = OrderedDict()

    # ------------------------------------------------------------------------------------------------ admission

    def admit(self, chunks: Sequence[ChunkRequest]) -> tuple[list[Step], list[str], dict[str, RequestError]]:
        """Sort the chunks of one call.

        Returns:
            Steps to decode, ids that end without samples, and refusals by id. Nothing has changed.
        """
        steps: list[Step] = []
        ending: list[str] = []
        refused: dict[str, RequestError] = {}
        seen: set[str] = set()
        begins = 0  # requests that will need a slot
        for chunk in chunks:
            if chunk.request_id in seen:
                refused[chunk.request_id] = RequestError(
                    chunk.request_id, RequestErrorKind.DUPLICATE, "two chunks in one batch. Send one chunk of a request per call."
                )
                continue
            seen.add(chunk.request_id)
            step = self._admit(chunk)
            if isinstance(step, Step):
                begins += step.is_first and not step.is_last
                if begins > len(self._free):
                    refused[chunk.request_id] = RequestError(
                        chunk.request_id,
                        RequestErrorKind.NO_FREE_SLOT,
                        f"all {self._slots} slots are in use. Send fewer requests at a time or raise max_num_seqs.",
                    )
                    begins -= 1
                else:
                    steps.append(step)
            elif step is None:
                ending.append(chunk.request_id)
            else:
                refused[chunk.request_id] = step
        if refused:
            steps = [step for step in steps if step.request.request_id not in refused]
            ending = [request_id for request_id in ending if request_id not in refused]
        return steps, ending, refused

    def _admit(self, chunk: ChunkRequest) -> Step | RequestError | None:
        request_id, codes = chunk.request_id, chunk.codes
        request = self.live.get(request_id)
        if request is None and request_id in self._ended:
            kind, message = self._ended[request_id]
            return RequestError(request_id, kind, message)
        problem = self._problem_with(chunk)
        if problem:
            return RequestError(request_id, RequestErrorKind.INVALID_INPUT, problem)
        total = codes.shape[1]
        if request is not None:
            if chunk.ref_frames not in (0, request.ref_frames):
                return RequestError(
                    request_id,
                    RequestErrorKind.INVALID_INPUT,
                    f"ref_frames changed from {request.ref_frames} to {chunk.ref_frames}. Later chunks say 0 or the first value again.",
                )
            if total == 0:
                return None
            return self._step(request, codes, None, chunk.finished)
        if total == 0:
            return RequestError(request_id, RequestErrorKind.UNKNOWN, "an end without a beginning: no chunk of this request came before.")
        if total < chunk.ref_frames or (total == chunk.ref_frames and not chunk.finished):
            return RequestError(
                request_id,
                RequestErrorKind.INVALID_INPUT,
                f"the first chunk has {total} frames, its reference alone {chunk.ref_frames}. "
                "Send all reference frames and then at least one new one.",
            )
        if total == chunk.ref_frames:
            return None
        reference = codes[:, : chunk.ref_frames] if chunk.ref_frames else None
        request = LiveRequest(request_id, "xvec" if reference is None else "icl", chunk.ref_frames)
        return self._step(request, codes[:, chunk.ref_frames :], reference, chunk.finished)

    def _problem_with(self, chunk: ChunkRequest) -> str | None:
        codes, q = chunk.codes, self._quantizers
        if not isinstance(codes, Tensor) or codes.layout is not torch.strided or codes.is_nested:
            return f"codes must be a dense tensor of integers [{q}, F], got {type(codes).__name__}. Try torch.as_tensor(codes)."
        if codes.dtype not in _INTEGERS:
            return f"codes must be integers (int64, int32, int16 or uint8), got {codes.dtype}. Codes are codebook indices."
        if codes.dim() != 2 or codes.shape[0] != q:
            hint = " These look like [F, 16]: try codes.T." if codes.dim() == 2 and codes.shape[1] == q else ""
            return f"codes must be [{q}, F] ({q} quantisers), got {list(codes.shape)}.{hint}"
        if chunk.ref_frames < 0:
            return f"ref_frames must be 0 or more, got {chunk.ref_frames}."
        if codes.shape[1] == 0 and not chunk.finished:
            return "the chunk is empty. Send at least one frame, or finished=True to end the request."
        return None

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

    def begin(self, request: LiveRequest) -> int:
        """Keep a new request; returns its slot."""
        request.slot = self._free.pop()
        self.live[request.request_id] = request
        return request.slot

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
