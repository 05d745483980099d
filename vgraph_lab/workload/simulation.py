"""Long runs without decoding: what calls a service's traffic would make, counted by the keys that a runner counts by.

The service is that of :mod:`vgraph_lab.workload.service` on its virtual clock, step for step. A cost function stands for the
runner, so nothing is computed but time and shapes: a million chunks take seconds and no memory to speak of.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import pandas as pd

from vgraph_lab.config import StageConfig
from vgraph_lab.errors import InputError
from vgraph_lab.graphs.descriptor import Descriptor
from vgraph_lab.graphs.stats import CallKind, StatsSnapshot
from vgraph_lab.qwen3_tts.stream_routines import SuffixDescriptor

from .arrivals import AllAtOnce, Arrivals
from .lengths import RequestShape
from .routing import WINDOW_FRAMES, Group, RoutedChunk, RoutingRules, TrafficCall
from .schedules import chunk_plan

__all__ = ["TRAFFIC_COLUMNS", "StepCost", "TrafficResult", "linear_cost", "simulate_traffic"]

StepCost = Callable[[int, int], float]
"""Seconds that a step takes: (chunks, their frames with references) → seconds."""

TRAFFIC_COLUMNS = {
    "target": "id of the Target",
    "requested": "exact shape of the call (its runtime key)",
    "batch_size": "rows requested",
    "frames": "codec frames requested per row",
    "state": "request state that the call needs; empty if there is only one",
    "source_frames": "suffix frames before the step; missing for first chunks and whole utterances",
    "is_last": "whether no row is continued, so that a graph with more frames may serve the call",
    "calls": "number of such calls",
}
"""The columns of :meth:`TrafficResult.histogram`, in order, with their meaning."""

_DTYPES = {
    **dict.fromkeys(("target", "requested", "state"), "str"),
    **dict.fromkeys(("batch_size", "frames", "calls"), "int64"),
    "source_frames": "Int64",
    "is_last": "bool",
}


def linear_cost(per_step_s: float, per_frame_s: float) -> StepCost:
    """A step takes so long, and so much longer per frame."""
    return lambda chunks, frames: per_step_s + per_frame_s * frames


@dataclass(frozen=True)
class TrafficResult:
    """What a simulated service asked of its Targets.

    Attributes:
        rules: the routing that was simulated.
        calls: number of calls of each kind.
        requests: requests played.
        chunks: chunks executed, with those that only ended a request.
        steps: executions.
        frames: new frames of all requests.
        duration_s: from the first arrival to the end of the last step.
        busy_s: time in which something was executed.
        intervals: (end in seconds, calls in it), if intervals were asked for; together they are all calls.
    """

    rules: RoutingRules
    calls: Mapping[TrafficCall, int]
    requests: int
    chunks: int
    steps: int
    frames: int
    duration_s: float
    busy_s: float
    intervals: tuple[tuple[float, Mapping[TrafficCall, int]], ...] = ()

    def histogram(self) -> pd.DataFrame:
        """One row per Target, exact shape and whether it ends its requests, sorted by these; see :data:`TRAFFIC_COLUMNS`."""
        rows = []
        for (target_id, key, is_last), n in self.calls.items():
            source = key.source if isinstance(key, SuffixDescriptor) else None
            rows.append((target_id, str(key), key.batch_size, key.frames, key.state, source, is_last, n))
        table = pd.DataFrame(rows, columns=list(TRAFFIC_COLUMNS)).astype(_DTYPES)
        return table.sort_values(["target", "frames", "batch_size", "requested", "is_last"], ignore_index=True)

    def snapshot(self, captured: Mapping[str, Collection[Descriptor]] | None = None) -> StatsSnapshot:
        """The statistics that a runner would have counted.

        Args:
            captured: graphs by Target id; those that the configuration declares by default. Lazy capture is left out of account.
        """
        return StatsSnapshot(self.rules.outcomes(self.calls, self.rules.declared() if captured is None else captured))

    def samples(self, captured: Mapping[str, Collection[Descriptor]] | None = None) -> list[tuple[float, StatsSnapshot]]:
        """The statistics that a runner would have counted by the end of each interval, from nothing at 0 s.

        Args:
            captured: as for :meth:`snapshot`.

        Raises:
            InputError: the simulation was not asked for intervals.
        """
        if not self.intervals:
            raise InputError("there are no intervals. Pass interval_s to simulate_traffic().")
        graphs = self.rules.declared() if captured is None else captured
        counts: Counter[CallKind] = Counter()
        found = [(0.0, StatsSnapshot({}))]
        for end_s, calls in self.intervals:
            counts.update(self.rules.outcomes(calls, graphs))
            found.append((end_s, StatsSnapshot(dict(counts))))
        return found

    def __str__(self) -> str:
        n = sum(self.calls.values())
        share = self.busy_s / self.duration_s if self.duration_s else 0.0
        return (
            f"{self.requests:,} requests, {self.chunks:,} chunks in {self.steps:,} steps, {n:,} Target calls of {len(self.calls)} kinds "
            f"in {self.duration_s:,.1f} simulated seconds, {share:.0%} of them busy"
        )


def simulate_traffic(
    shapes: Iterable[RequestShape],
    cfg: StageConfig,
    *,
    cost: StepCost,
    arrivals: Arrivals | None = None,
    concurrency: int | None = None,
    talker_frames_per_s: float = 50.0,
    end_delay_frames: int = 0,
    window_frames: int = WINDOW_FRAMES,
    interval_s: float | None = None,
    seed: int = 0,
) -> TrafficResult:
    """Play requests through a service that decodes nothing.

    Args:
        shapes: the requests in the order in which they come, e.g. :func:`~vgraph_lab.workload.lengths.draw_shapes`. Read as needed.
        cfg: the stage: connector, capture sizes, ``max_num_seqs`` (chunks in one step, and requests with state, at most).
        cost: seconds of a step.
        arrivals: when they come; by default all are there at once.
        concurrency: requests that are live at once, at most; by default ``cfg.max_num_seqs``.
        talker_frames_per_s: pace at which each live request's frames arrive.
        end_delay_frames: see :func:`~vgraph_lab.workload.schedules.chunk_plan`.
        window_frames: the decoder's sliding window.
        interval_s: count calls by intervals of so many seconds, too, each step in the one in which it begins.
        seed: of the arrivals.

    Raises:
        ConfigError: the configuration is not one of Qwen3-TTS.
        InputError: no request, an argument out of range, a cost that is no time, or a trace that ends before the requests.
    """
    limit = cfg.max_num_seqs if concurrency is None else concurrency
    if not 1 <= limit <= cfg.max_num_seqs:
        raise InputError(
            f"concurrency must be from 1 to max_num_seqs, {cfg.max_num_seqs}, got {limit}: a runner refuses requests beyond it. "
            "Raise max_num_seqs."
        )
    if not (math.isfinite(talker_frames_per_s) and talker_frames_per_s > 0):
        raise InputError(f"talker_frames_per_s must be a finite number above 0, got {talker_frames_per_s}.")
    if interval_s is not None and not (math.isfinite(interval_s) and interval_s > 0):
        raise InputError(f"interval_s must be a finite number above 0, or None, got {interval_s}.")
    rules = RoutingRules(cfg, window_frames)
    waiting = _Waiting(iter(shapes), (arrivals or AllAtOnce()).times(seed))
    if waiting.at == math.inf:
        raise InputError("there is no request to play.")
    return _Service(rules, waiting, limit, talker_frames_per_s, end_delay_frames, cost, interval_s).run()


class _Waiting:
    """The next request that has not begun, and when it comes."""

    def __init__(self, shapes: Iterator[RequestShape], moments: Iterator[float]) -> None:
        self._shapes, self._moments = shapes, moments
        self.taken = -1
        self.at, self.shape = 0.0, RequestShape(1)
        self.advance()

    def advance(self) -> None:
        shape = next(self._shapes, None)
        self.taken += 1
        if shape is None:
            self.at = math.inf
            return
        moment = next(self._moments, None)
        if moment is None:
            raise InputError(f"the arrivals end after {self.taken} requests, but there are more. Give more times or fewer requests.")
        self.at, self.shape = moment, RequestShape(*shape)


_Chunk = tuple[int, int, int, float, bool]  # number of its group (-1: nothing to decode), frames, with reference, complete after s, last
_Live = tuple[float, int, float, int, _Chunk, tuple[_Chunk, ...]]  # chunk there at, order, began, index, chunk, all chunks


class _Service:
    """The loop of the simulated service. Everything in it is a plain number or tuple: it runs a million times."""

    def __init__(
        self,
        rules: RoutingRules,
        waiting: _Waiting,
        concurrency: int,
        frames_per_s: float,
        end_delay_frames: int,
        cost: StepCost,
        interval_s: float | None,
    ) -> None:
        self._rules, self._waiting, self._cost, self._interval_s = rules, waiting, cost, interval_s
        self._frames_per_s, self._end_delay_frames = frames_per_s, end_delay_frames
        self._largest_step, self._context = rules.cfg.max_num_seqs, rules.cfg.connector.codec_left_context_frames
        self._free_since = [0.0] * concurrency
        self._pending: list[_Live] = []  # a heap: the chunk that has waited longest is first
        self._live = self._begun = self._frames = 0
        self._plans: dict[tuple[int, int, int], tuple[_Chunk, ...]] = {}
        self._groups: dict[Group, int] = {}
        self._counts: Counter[tuple[int, int, int, bool]] = Counter()  # by group number, rows, frames, last
        self._windows: Counter[TrafficCall] = Counter()
        self._intervals: list[tuple[float, Mapping[TrafficCall, int]]] = []

    def run(self) -> TrafficResult:
        now = busy = 0.0
        steps = chunks = 0
        pending, pop, push = self._pending, heapq.heappop, heapq.heappush
        count = self._count if self._rules.cfg.async_chunk else self._count_windows
        interval_end = self._interval_s or math.inf
        while (event := min(self._next_beginning(), pending[0][0] if pending else math.inf)) != math.inf:
            now = max(now, event)
            self._admit(now)
            batch: list[_Live] = []
            while pending and pending[0][0] <= now and len(batch) < self._largest_step:
                batch.append(pop(pending))
            if not batch:
                continue
            if now >= interval_end:
                interval_end = self._end_intervals(interval_end, now)
            seconds = self._cost(len(batch), sum([live[4][2] for live in batch]))
            if not 0 <= seconds < math.inf:
                raise InputError(f"the cost of a step must be a finite time in seconds, got {seconds}.")
            count([live[4] for live in batch])
            now, busy, steps, chunks = now + seconds, busy + seconds, steps + 1, chunks + len(batch)
            self._admit(now)  # before slots are freed: what came during the step found the others live
            for _, order, began, index, chunk, routed in batch:
                if chunk[4]:
                    self._live -= 1
                    push(self._free_since, now)
                else:
                    following = routed[index + 1]
                    push(pending, (began + following[3], order, began, index + 1, following, routed))
        if self._interval_s is not None:
            self._end_intervals(interval_end, interval_end)
        calls = Counter(self._counted())
        for _, part in self._intervals:
            calls.update(part)
        return TrafficResult(self._rules, dict(calls), self._begun, chunks, steps, self._frames, now, busy, tuple(self._intervals))

    def _counted(self) -> Counter[TrafficCall]:
        """The calls since the last interval ended."""
        calls = Counter(self._windows)
        groups = list(self._groups)
        for (group, rows, frames, is_last), n in self._counts.items():
            calls[self._rules.call(groups[group], rows, frames, is_last)] += n
        return calls

    def _end_intervals(self, end: float, now: float) -> float:
        """Close the interval that ends at ``end`` and empty ones up to ``now``; returns the end of the next one."""
        self._intervals.append((end, self._counted()))
        self._counts.clear()
        self._windows.clear()
        assert self._interval_s is not None
        skipped = int((now - end) / self._interval_s)
        self._intervals += [(end + (number + 1) * self._interval_s, {}) for number in range(skipped)]
        return end + (skipped + 1) * self._interval_s

    def _next_beginning(self) -> float:
        return max(self._waiting.at, self._free_since[0]) if self._free_since else math.inf

    def _admit(self, now: float) -> None:
        while (began := self._next_beginning()) <= now:
            shape = self._waiting.shape
            self._waiting.advance()
            heapq.heappop(self._free_since)
            self._live += 1
            routed = self._routed(shape, min(1.0, self._live / self._largest_step))
            heapq.heappush(self._pending, (began + routed[0][3], self._begun, began, 0, routed[0], routed))
            self._begun += 1
            self._frames += shape.frames

    def _routed(self, shape: RequestShape, load: float) -> tuple[_Chunk, ...]:
        frames, ref_frames = shape
        key = (frames, min(ref_frames, self._context), self._rules.cfg.connector.first_chunk_frames(load))
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = tuple(self._numbered(chunk) for chunk in self._plan(frames, ref_frames, load))
        return found

    def _plan(self, frames: int, ref_frames: int, load: float) -> tuple[RoutedChunk, ...]:
        if ref_frames < 0:
            raise InputError(f"a reference cannot have {ref_frames} frames. Accepted: 0 (none) or more.")
        plan = chunk_plan(frames, self._rules.cfg.connector, load=load, end_delay_frames=self._end_delay_frames)
        if self._rules.cfg.async_chunk:
            return self._rules.route(plan, ref_frames)
        return (RoutedChunk(None, frames, min(ref_frames, self._context), frames + self._end_delay_frames, True),)

    def _numbered(self, chunk: RoutedChunk) -> _Chunk:
        group = -1 if chunk.group is None else self._groups.setdefault(chunk.group, len(self._groups))
        with_reference = chunk.frames + chunk.ref_frames
        return (group, chunk.frames, with_reference, chunk.available_after_frames / self._frames_per_s, chunk.is_last)

    def _count(self, chunks: list[_Chunk]) -> None:
        counts = self._counts
        if len(chunks) == 1:
            group, frames, _, _, is_last = chunks[0]
            if group >= 0:
                counts[group, 1, frames, is_last] += 1
            return
        groups: dict[int, list[_Chunk]] = {}
        for chunk in chunks:
            if chunk[0] >= 0:
                groups.setdefault(chunk[0], []).append(chunk)
        names = list(self._groups)
        for group, members in groups.items():
            most = 1 if names[group].long_reference else self._rules.largest_batch
            for start in range(0, len(members), most):
                part = members[start : start + most]
                counts[group, len(part), max([chunk[1] for chunk in part]), all(chunk[4] for chunk in part)] += 1

    def _count_windows(self, chunks: list[_Chunk]) -> None:
        self._windows.update(self._rules.windows([chunk[2] for chunk in chunks]))
