"""Counting calls: one write-only Recorder per Target, one StatsSink behind all of them.

Every valid call is counted exactly once, so that hits + fallbacks + replay errors = calls. The sink may be read at any
time from any thread; a snapshot is a consistent copy.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from vgraph_lab.errors import FallbackReason

from .descriptor import Descriptor

__all__ = ["CallKind", "Recorder", "StatsSink", "StatsSnapshot"]


class CallKind(NamedTuple):
    """What is counted: a Target, the call's exact shape, and what became of it.

    ``descriptor`` is the graph that served the call (or failed to); ``reason`` is a fallback's; ``error`` names the
    exception of a replay error. Exactly one of the three outcomes is set.
    """

    target_id: str
    key: Descriptor
    descriptor: Descriptor | None = None
    reason: FallbackReason | None = None
    error: str | None = None


class Recorder(Protocol):
    """Write-only access to the statistics of one Target."""

    def record_graph_hit(self, key: Descriptor, descriptor: Descriptor) -> None:
        """A call was served by the graph of ``descriptor``."""

    def record_fallback(self, key: Descriptor, reason: FallbackReason) -> None:
        """A valid call ran eager."""

    def record_replay_error(self, key: Descriptor, descriptor: Descriptor, error: BaseException) -> None:
        """A call failed after the first write into a static buffer."""


@dataclass(frozen=True)
class StatsSnapshot:
    """A consistent copy of all counters.

    Attributes:
        counts: calls by kind.
        retirements: how often all graphs were retired together and captured anew.
        retirement_s: seconds that took.
    """

    counts: Mapping[CallKind, int]
    retirements: int = 0
    retirement_s: float = 0.0

    def _total(self, target_id: str | None, outcome: str) -> int:
        return sum(n for kind, n in self.counts.items() if target_id in (None, kind.target_id) and _outcome(kind) == outcome)

    def hits(self, target_id: str | None = None) -> int:
        """Calls served by a graph."""
        return self._total(target_id, "hit")

    def fallbacks(self, target_id: str | None = None) -> int:
        """Valid calls that ran eager."""
        return self._total(target_id, "fallback")

    def replay_errors(self, target_id: str | None = None) -> int:
        """Calls that failed during copy-in, replay or materialisation."""
        return self._total(target_id, "replay_error")

    def calls(self, target_id: str | None = None) -> int:
        """All counted calls: hits + fallbacks + replay errors."""
        return self.hits(target_id) + self.fallbacks(target_id) + self.replay_errors(target_id)

    def hit_rate(self, target_id: str | None = None) -> float | None:
        """Share of calls served by a graph, or None without calls."""
        calls = self.calls(target_id)
        return self.hits(target_id) / calls if calls else None

    def reasons(self, target_id: str | None = None) -> dict[FallbackReason, int]:
        """Fallbacks by reason, most frequent first."""
        counter: Counter[FallbackReason] = Counter()
        for kind, n in self.counts.items():
            if kind.reason is not None and target_id in (None, kind.target_id):
                counter[kind.reason] += n
        return dict(counter.most_common())

    def graph_hits(self, target_id: str, descriptor: Descriptor) -> int:
        """Calls served by one graph."""
        return sum(
            n for kind, n in self.counts.items() if _outcome(kind) == "hit" and (kind.target_id, kind.descriptor) == (target_id, descriptor)
        )

    def __str__(self) -> str:
        rate = self.hit_rate()
        reasons = ", ".join(f"{reason} {n}" for reason, n in self.reasons().items())
        return (
            f"{_counted(self.calls(), 'call')}: {_counted(self.hits(), 'hit')}"
            + (f" ({rate:.1%})" if rate is not None else "")
            + f", {_counted(self.fallbacks(), 'fallback')}"
            + (f" ({reasons})" if reasons else "")
            + f", {_counted(self.replay_errors(), 'replay error')}"
            + (f"; {_counted(self.retirements, 'generation')} retired in {self.retirement_s:.2f} s" if self.retirements else "")
        )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _outcome(kind: CallKind) -> str:
    if kind.error is not None:
        return "replay_error"
    return "hit" if kind.reason is None else "fallback"


class StatsSink:
    """The Manager-owned store behind all Recorders."""

    def __init__(self) -> None:
        self._counts: Counter[CallKind] = Counter()
        self._lock = threading.Lock()

    def recorder(self, target_id: str) -> Recorder:
        """A write-only Recorder for one Target."""
        return _SinkRecorder(self, target_id)

    def add(self, kind: CallKind) -> None:
        """Count one call."""
        with self._lock:
            self._counts[kind] += 1

    def snapshot(self) -> StatsSnapshot:
        """All counters, as of now."""
        with self._lock:
            return StatsSnapshot(dict(self._counts))


class _SinkRecorder:
    __slots__ = ("_sink", "_target_id")

    def __init__(self, sink: StatsSink, target_id: str) -> None:
        self._sink, self._target_id = sink, target_id

    def record_graph_hit(self, key: Descriptor, descriptor: Descriptor) -> None:
        self._sink.add(CallKind(self._target_id, key, descriptor=descriptor))

    def record_fallback(self, key: Descriptor, reason: FallbackReason) -> None:
        self._sink.add(CallKind(self._target_id, key, reason=reason))

    def record_replay_error(self, key: Descriptor, descriptor: Descriptor, error: BaseException) -> None:
        self._sink.add(CallKind(self._target_id, key, descriptor=descriptor, error=type(error).__name__))
