"""A simulated service: requests whose codes arrive at a talker's pace, played through a runner as an engine would.

At most ``concurrency`` requests are live; when one ends, the next begins. The engine works step by step: all chunks
that are there when a step begins run together, one per request and the oldest first. What comes during a step waits
for the next one::

    arrivals   a b    c d e        f
    steps      [a b ────][c d e ──────] [f ──]

Time is ``virtual`` by default: frames arrive on a simulated clock, and a step takes what running it took (until its
samples are on the host), so a run lasts as long as the computing alone. With a cost function in place of the
stopwatch, the same arguments give the same table. The ``real`` clock waits for each frame, as a live service does.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter, sleep
from typing import Literal, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from vgraph_lab.config import ConnectorConfig
from vgraph_lab.errors import InputError, RequestError, VGraphLabError
from vgraph_lab.requests import ChunkRequest, ChunkResult

from .arrivals import AllAtOnce, Arrivals, PoissonArrivals
from .records import ChunkRecord, ServiceResult
from .schedules import ScheduledChunk, chunk_schedule
from .traffic import ServiceRequest

__all__ = ["ChunkRunner", "Cost", "simulate_service"]

Cost = Callable[[Sequence[ChunkRequest]], float]
"""Seconds that a step with these chunks takes."""


class ChunkRunner(Protocol):
    """What a service needs of a runner."""

    def execute_model(self, requests: Sequence[ChunkRequest], /) -> Mapping[str, ChunkResult]:
        """Samples of each request's chunk, or why there are none."""

    def abort(self, request_ids: Sequence[str], /) -> object:
        """Forget live requests."""


def simulate_service(
    runner: ChunkRunner,
    requests: Sequence[ServiceRequest],
    connector: ConnectorConfig,
    *,
    concurrency: int,
    talker_frames_per_s: float = 50.0,
    max_num_seqs: int | None = None,
    request_rate_per_s: float | None = None,
    arrivals: Arrivals | None = None,
    end_delay_frames: int = 0,
    clock: Literal["virtual", "real"] = "virtual",
    cost: Cost | None = None,
    sample_rate: int = 24_000,
    keep_audio: bool = False,
    id_prefix: str = "",
    seed: int = 0,
    progress: bool = True,
) -> ServiceResult:
    """Play requests through a runner and record every chunk.

    Args:
        runner: executes the chunks. A request that it refuses ends there, and its slot is free again.
        requests: in the order in which they come.
        connector: how chunks are delivered. Where it leaves the first chunk to the load, that is the number of requests
            that are live when the request begins, itself included, over ``max_num_seqs``.
        concurrency: requests that are live at once, at most.
        talker_frames_per_s: pace at which each live request's frames arrive. The default is about what a 1.7 B talker
            reaches for one request on an H100: 3.98 times real time (faster-qwen3-tts), at 12.5 frames per second of speech.
        max_num_seqs: chunks in one step, at most; by default ``concurrency``.
        request_rate_per_s: requests come at random (Poisson) at this mean rate; by default all are there at once. They
            wait while ``concurrency`` requests are live, and their times count from when they begin.
        arrivals: when they come, in place of ``request_rate_per_s``; see :mod:`vgraph_lab.workload.arrivals`.
        end_delay_frames: see :func:`~vgraph_lab.workload.schedules.chunk_schedule`.
        clock: ``virtual`` or ``real``.
        cost: what a step takes on the virtual clock; by default it is measured.
        sample_rate: of the runner's samples, in Hz.
        keep_audio: keep each request's samples in the result.
        id_prefix: put before the ids that the runner sees; a runner takes an id only once in its life.
        seed: of the random arrivals.
        progress: show a bar of frames on stderr.

    Raises:
        InputError: an argument is out of range, two requests have the same id, or the runner left a request out.
    """
    _check_traffic(requests, concurrency, max_num_seqs)
    _check_time(talker_frames_per_s, request_rate_per_s, clock, cost)
    if arrivals is not None and request_rate_per_s is not None:
        raise InputError("give either request_rate_per_s or arrivals: both say when requests come.")
    if arrivals is None:
        arrivals = AllAtOnce() if request_rate_per_s is None else PoissonArrivals(request_rate_per_s)

    largest_step = max_num_seqs or concurrency

    def begin(request: ServiceRequest, live_requests: int) -> tuple[ScheduledChunk, ...]:
        return chunk_schedule(
            id_prefix + request.id,
            request.codes,
            connector,
            reference=request.reference,
            load=min(1.0, live_requests / largest_step),
            end_delay_frames=end_delay_frames,
        )

    moments = list(islice(arrivals.times(seed), len(requests)))
    if len(moments) < len(requests):
        raise InputError(f"the arrivals end after {len(moments)} of {len(requests)} requests. Give more times or fewer requests.")
    queue = _Queue(zip(moments, requests, strict=True), begin, concurrency, talker_frames_per_s)
    time = _RealClock() if clock == "real" else _VirtualClock()
    records: list[ChunkRecord] = []
    audio: dict[str, list[Tensor]] = {request.id: [] for request in requests}
    step = 0
    try:
        with tqdm(total=sum(request.frames for request in requests), unit="frame", desc="service", disable=not progress) as bar:
            while (next_event := queue.next_event()) is not None:
                time.wait_until(next_event)
                queue.admit(time.now)
                batch = queue.ready(time.now)[:largest_step]
                if not batch:
                    continue
                chunks = [live.chunk.request for live in batch]
                started = time.now
                results, seconds = _execute(runner, chunks)
                time.spend(seconds if cost is None else cost(chunks))
                finished = time.now
                queue.admit(finished)  # before slots are freed: what came during the step found the others live
                for live in batch:
                    result = results[live.chunk.request.request_id]
                    records.append(_record(live, step, len(batch), started, finished, result))
                    if keep_audio and isinstance(result, Tensor):
                        audio[live.request.id].append(result)
                    bar.update(live.chunk.new_frames)
                    queue.advance(live, finished, has_failed=isinstance(result, RequestError))
                step += 1
    except BaseException as error:  # an interruption, too: leave nothing behind in the runner
        try:
            runner.abort([live.chunk.request.request_id for live in queue.live])
        except VGraphLabError as refusal:
            error.add_note(f"The live requests could not be aborted: {refusal}")
        raise
    kept = {name: torch.cat(pieces) if pieces else torch.empty(0) for name, pieces in audio.items()} if keep_audio else {}
    return ServiceResult.of(requests, records, queue.began_s, sample_rate=sample_rate, audio=kept)


def _execute(runner: ChunkRunner, chunks: Sequence[ChunkRequest]) -> tuple[dict[str, ChunkResult], float]:
    """Run one step; results on the host, and the seconds until they were there."""
    start = perf_counter()
    results = dict(runner.execute_model(chunks))
    missing = [chunk.request_id for chunk in chunks if chunk.request_id not in results]
    if missing:
        raise InputError(f"the runner returned nothing for {', '.join(missing)}; expected samples or a RequestError for each request.")
    on_device = {name: result for name, result in results.items() if isinstance(result, Tensor) and result.device.type != "cpu"}
    if on_device:  # one copy for the whole step; it waits for the device
        lengths = [len(samples) for samples in on_device.values()]
        results |= dict(zip(on_device, torch.cat(list(on_device.values())).cpu().split(lengths), strict=True))
    return results, perf_counter() - start


def _record(live: _Live, step: int, batch_size: int, started: float, finished: float, result: ChunkResult) -> ChunkRecord:
    return ChunkRecord(
        request=live.request.id,
        chunk=live.index,
        frames=live.chunk.new_frames,
        ref_frames=live.chunk.request.ref_frames,
        is_last=live.chunk.request.finished,
        available_s=live.available_s,
        started_s=started,
        finished_s=finished,
        step=step,
        batch_size=batch_size,
        samples=0 if isinstance(result, RequestError) else len(result),
        error=str(result) if isinstance(result, RequestError) else "",
    )


@dataclass(eq=False)
class _Live:
    """A request that has begun, and the chunk that comes next."""

    request: ServiceRequest
    schedule: tuple[ScheduledChunk, ...]
    began_s: float
    frames_per_s: float
    index: int = 0

    @property
    def chunk(self) -> ScheduledChunk:
        return self.schedule[self.index]

    @property
    def available_s(self) -> float:
        return self.began_s + self.chunk.available_after_frames / self.frames_per_s


class _Queue:
    """Who waits, who is live and whose chunk is there. It is told the time and never asks."""

    def __init__(
        self,
        arrivals: Iterable[tuple[float, ServiceRequest]],
        begin: Callable[[ServiceRequest, int], tuple[ScheduledChunk, ...]],
        concurrency: int,
        frames_per_s: float,
    ) -> None:
        self._waiting = deque(arrivals)
        self._free_since = [0.0] * concurrency  # a heap: since when each free slot is free
        self._begin, self._frames_per_s = begin, frames_per_s
        self.live: list[_Live] = []  # in the order in which they began
        self.began_s: dict[str, float] = {}

    def _next_beginning(self) -> float:
        return max(self._waiting[0][0], self._free_since[0]) if self._waiting and self._free_since else math.inf

    def next_event(self) -> float | None:
        """When the next request begins or the next chunk is complete; None if all is over."""
        earliest = min([self._next_beginning(), *(live.available_s for live in self.live)])
        return None if earliest == math.inf else earliest

    def admit(self, now: float) -> None:
        """Begin what could have begun by now."""
        while (began := self._next_beginning()) <= now:
            _, request = self._waiting.popleft()
            heapq.heappop(self._free_since)
            schedule = self._begin(request, len(self.live) + 1)
            self.live.append(_Live(request, schedule, began, self._frames_per_s))
            self.began_s[request.id] = began

    def ready(self, now: float) -> list[_Live]:
        """Requests whose next chunk is complete, the one that has waited longest first."""
        return sorted((live for live in self.live if live.available_s <= now), key=lambda live: live.available_s)

    def advance(self, live: _Live, now: float, *, has_failed: bool) -> None:
        """A chunk was executed: the next one comes, or the request is over and its slot free."""
        if has_failed or live.chunk.request.finished:
            self.live.remove(live)
            heapq.heappush(self._free_since, now)
        else:
            live.index += 1


class _VirtualClock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)

    def spend(self, seconds: float) -> None:
        self.now += seconds


class _RealClock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._origin = perf_counter()

    @property
    def now(self) -> float:
        return perf_counter() - self._origin

    def wait_until(self, moment: float) -> None:
        while (left := moment - self.now) > 0:
            sleep(left)

    def spend(self, seconds: float) -> None:
        """They have passed by themselves."""


def _check_traffic(requests: Sequence[ServiceRequest], concurrency: int, max_num_seqs: int | None) -> None:
    if not requests:
        raise InputError("there is no request to play.")
    ids = [request.id for request in requests]
    if len(set(ids)) < len(ids):
        repeated = sorted({name for name in ids if ids.count(name) > 1})
        raise InputError(f"request ids must be unique, but {', '.join(repeated)} came more than once.")
    if concurrency < 1 or (max_num_seqs is not None and max_num_seqs < 1):
        raise InputError(f"concurrency and max_num_seqs must be at least 1, got {concurrency} and {max_num_seqs}.")


def _check_time(frames_per_s: float, rate_per_s: float | None, clock: str, cost: Cost | None) -> None:
    for name, value in (("talker_frames_per_s", frames_per_s), ("request_rate_per_s", rate_per_s)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} must be a finite number above 0, got {value}.")
    if clock not in ("virtual", "real"):
        raise InputError(f"clock is {clock!r}; accepted are 'virtual' and 'real'.")
    if clock == "real" and cost is not None:
        raise InputError("the real clock measures what a step takes and cannot be given a cost. Try clock='virtual'.")
