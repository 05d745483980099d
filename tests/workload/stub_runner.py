"""A runner that decodes nothing: it counts, checks the order of chunks and returns recognisable samples."""

from __future__ import annotations

from collections.abc import Sequence

from vgraph_lab.errors import RequestError, RequestErrorKind
from vgraph_lab.requests import ChunkRequest, ChunkResult

SAMPLES_PER_FRAME = 4


class StubRunner:
    """Every new frame becomes four samples of its first code.

    Args:
        refuses: (request, chunk number) that is answered with an error.
        breaks_at: number of the call that raises.
        forgets: a request that the answers leave out.
    """

    def __init__(self, *, refuses: tuple[str, int] | None = None, breaks_at: int | None = None, forgets: str = "") -> None:
        self.refuses, self.breaks_at, self.forgets = refuses, breaks_at, forgets
        self.calls: list[list[ChunkRequest]] = []
        self.live: dict[str, int] = {}  # request → chunks so far
        self.ended: set[str] = set()
        self.most_live = 0
        self.aborted: list[str] = []

    def execute_model(self, requests: Sequence[ChunkRequest], /) -> dict[str, ChunkResult]:
        if self.breaks_at == len(self.calls):
            raise RuntimeError("the device is gone")
        self.calls.append(list(requests))
        results: dict[str, ChunkResult] = {}
        for request in requests:
            name = request.request_id
            assert name not in results, "two chunks of one request in a step"
            assert name not in self.ended, "a chunk after the last one"
            chunk = self.live.get(name, 0)
            assert chunk == 0 or request.ref_frames == 0
            self.live[name] = chunk + 1
            self.most_live = max(self.most_live, len(self.live))
            new = request.codes[0, request.ref_frames :]
            if (name, chunk) == self.refuses:
                results[name] = RequestError(name, RequestErrorKind.INVALID_INPUT, "refused")
            else:
                results[name] = new.float().repeat_interleave(SAMPLES_PER_FRAME)
            if request.finished or (name, chunk) == self.refuses:
                del self.live[name]
                self.ended.add(name)
        results.pop(self.forgets, None)
        return results

    def abort(self, request_ids: Sequence[str], /) -> None:
        self.aborted += request_ids
