"""Who ran when: the spans of micro-batches on streams and threads, for a timeline.

A span ends whenever its micro-batch hands over, changes the stream, or changes what it says it does; so spans of one stream do not
overlap, and what overlaps lies on two streams::

    host      0 ▇▇▇ 1 ▇▇▇ 0 ▇▇▇ 1 ▇▇▇        whose turn it was
    compute   0 ▇▇▇▇▇▇1 ▇▇▇▇▇▇0 ▇▇▇▇▇
    comm             0 ▇▇▇▇▇▇▇1 ▇▇▇▇▇▇▇▇

Host spans are read from ``perf_counter``. Spans of streams are read from CUDA events where there is a GPU: one is recorded on the stream
where a span begins and one where it ends. While the device has work queued, that is when it did the work. Where it waits for the host, a
stream reaches the first event before the work is launched and the second as soon as the host records it: the span then includes the
host's time. So spans say what overlaps only in a step whose host is ahead of the device. On the CPU the work is done when its call
returns, so they are read from ``perf_counter``, too, and nothing overlaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

from vgraph_lab.errors import LifecycleError

__all__ = ["UBatchSpan", "UBatchTrace", "overlap_s"]

_Mark = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class UBatchSpan:
    """A stretch of time in which one micro-batch had one thing to do on one stream. A list of them makes a DataFrame.

    Attributes:
        start_s: since the trace began.
        end_s: since the trace began.
        ubatch: number of the micro-batch.
        stream: ``compute``, ``comm``, or ``host`` for the turns of threads.
        name: what was done, as :meth:`UBatchTrace.named` was told; by default the stream, ``turn`` on the host.
    """

    start_s: float
    end_s: float
    ubatch: int
    stream: str
    name: str


class UBatchTrace:
    """Collects spans. A :class:`~vgraph_lab.vllm_v1.UBatchWrapper` fills it in steps that run eagerly; captures and replays leave
    nothing here, since a graph has no threads.

    Args:
        device: of the streams.

    Attributes:
        is_on: set it to False, and steps leave nothing here and take no time for it.
    """

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self.device, self.is_on = torch.device(device), True
        self.clear()

    def clear(self) -> None:
        """Forget all spans; time begins again with the next step."""
        self._origin_s: float | None = None
        self._origin: torch.cuda.Event | None = None
        self._names: dict[int, list[str]] = {}
        self._open: dict[int, tuple[_Mark, str, torch.cuda.Stream | None]] = {}
        self._turns: dict[int, float] = {}
        self._done: list[tuple[_Mark, _Mark, int, str, str]] = []

    def start(self) -> None:
        """Let time begin, unless it has: before a step, in the thread and on the stream that called for it."""
        if self._origin_s is not None:
            return
        if self.device.type == "cuda":
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record(torch.cuda.current_stream(self.device))
            self._origin.synchronize()  # so that both clocks begin together
        self._origin_s = perf_counter()

    def begin(self, ubatch: int, stream_name: str, stream: torch.cuda.Stream | None) -> None:
        """A micro-batch that has the turn goes on, on that stream; what it did before has ended."""
        if self._origin_s is None:
            self.start()
        self._close(ubatch)
        self._turns.setdefault(ubatch, perf_counter())
        self._open[ubatch] = self._mark(stream), stream_name, stream

    def end(self, ubatch: int) -> None:
        """A micro-batch stops: it hands over, or is done."""
        self._close(ubatch)
        since_s = self._turns.pop(ubatch, None)
        if since_s is not None:
            self._done.append((since_s, perf_counter(), ubatch, "host", "turn"))

    @contextmanager
    def named(self, ubatch: int, name: str) -> Iterator[None]:
        """Call what a micro-batch does in the block by that name, on whichever stream and in as many turns as it takes."""
        self._cut(ubatch)
        self._names.setdefault(ubatch, []).append(name)
        try:
            yield
        finally:
            self._cut(ubatch)
            self._names[ubatch].pop()

    def spans(self) -> list[UBatchSpan]:
        """All spans so far, by their beginning. On a GPU it waits for the last of them.

        Raises:
            LifecycleError: a step is under way.
        """
        if self._open:
            running = ", ".join(map(str, sorted(self._open)))
            raise LifecycleError(f"micro-batch {running} is still running; read the trace when its step is over.")
        if self._origin is not None:
            torch.cuda.synchronize(self.device)
        found = [UBatchSpan(self._seconds(a), self._seconds(b), ubatch, stream, name) for a, b, ubatch, stream, name in self._done]
        return sorted(found, key=lambda span: (span.start_s, span.end_s))

    def _cut(self, ubatch: int) -> None:
        """End the open span and go on with another one on the same stream."""
        if ubatch in self._open:
            _, stream_name, stream = self._open[ubatch]
            self.begin(ubatch, stream_name, stream)

    def _close(self, ubatch: int) -> None:
        if ubatch in self._open:
            mark, stream_name, stream = self._open.pop(ubatch)
            names = self._names.get(ubatch)
            self._done.append((mark, self._mark(stream), ubatch, stream_name, names[-1] if names else stream_name))

    def _mark(self, stream: torch.cuda.Stream | None) -> _Mark:
        if stream is None:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def _seconds(self, mark: _Mark) -> float:
        assert self._origin_s is not None  # there is no span without it
        if isinstance(mark, float):
            return mark - self._origin_s
        assert self._origin is not None  # events are those of a GPU
        return float(self._origin.elapsed_time(mark)) / 1000


def overlap_s(spans: Iterable[UBatchSpan]) -> float:
    """Seconds in which the communication of one micro-batch ran beside the computation of another one.

    Args:
        spans: of one trace or a part of it; of a step whose host was ahead of the device, or the host's gaps count, too.
    """
    edges: list[tuple[float, int, str, int]] = []
    for span in spans:
        if span.stream in ("compute", "comm"):
            edges += [(span.start_s, 1, span.stream, span.ubatch), (span.end_s, -1, span.stream, span.ubatch)]
    running: dict[str, dict[int, int]] = {"compute": {}, "comm": {}}
    total, last = 0.0, 0.0
    for time_s, step, stream, ubatch in sorted(edges):
        computing, sending = ({u for u, count in running[kind].items() if count} for kind in ("compute", "comm"))
        if any(one != other for one in sending for other in computing):
            total += time_s - last
        running[stream][ubatch] = running[stream].get(ubatch, 0) + step
        last = time_s
    return total
