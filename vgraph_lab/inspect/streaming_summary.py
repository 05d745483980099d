"""A streaming session in a few figures and one verdict: what a notebook hands to whoever runs it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vgraph_lab.errors import InputError
from vgraph_lab.graphs.manager import ManagerState
from vgraph_lab.graphs.report import CaptureReport
from vgraph_lab.graphs.table import mib
from vgraph_lab.runner import GPUGenerationModelRunner

from .audio import dbfs_text
from .notebook_summary import NotebookSummary
from .stream_parity import StreamComparison

__all__ = ["STREAMING_MIME", "StreamingSummary", "summarise_streaming"]

STREAMING_MIME = "application/vnd.vgraph-lab.streaming-summary+json"
"""Displaying a :class:`StreamingSummary` puts its figures into the notebook under this type, for programs to read."""


@dataclass(frozen=True)
class StreamingSummary(NotebookSummary):
    """Plain figures, all of them JSON.

    Attributes:
        device: where the graphs were captured.
        graphs_requested: Descriptors that were asked for.
        graphs_captured: graphs that were made.
        capture_s: seconds of the whole capture.
        static_buffer_bytes: static buffers of all graphs.
        pool_bytes: reserved by the pool after the capture.
        state_bytes: the request state, allocated once.
        hits: calls served by a graph, by Target.
        fallbacks: calls that ran eager, by Target and reason.
        errors: calls that failed during copy-in, replay or materialisation.
        streams: requests that were streamed through graphs and through eager.
        equal_streams: of these, how many are as equal as they must be.
        chunks: their chunks, by how they were served (``exact hit``, ``padded hit``, ``fallback``).
        equal_chunks: of these, how many are as equal as they must be.
        largest_difference: largest absolute difference from eager, amplitude relative to full scale; None if not finite.
        checks: further claims, and whether they hold.
        pool_bytes_after_shutdown: reserved by the pool once the runner was shut down; None if it was not.
    """

    MIME: ClassVar[str] = STREAMING_MIME
    KIND: ClassVar[str] = "streaming"

    device: str
    graphs_requested: int
    graphs_captured: int
    capture_s: float
    static_buffer_bytes: int
    pool_bytes: int
    state_bytes: int
    hits: dict[str, int]
    fallbacks: dict[str, dict[str, int]]
    errors: int
    streams: int
    equal_streams: int
    chunks: dict[str, int]
    equal_chunks: int
    largest_difference: float | None
    checks: dict[str, bool]
    pool_bytes_after_shutdown: int | None

    @property
    def passed(self) -> bool:
        """Whether all graphs exist, every stream equals eager, every claim holds, and the pool was released."""
        captured = self.graphs_captured == self.graphs_requested > 0
        equal = self.streams == self.equal_streams > 0
        return captured and equal and self.errors == 0 and all(self.checks.values()) and self.pool_bytes_after_shutdown == 0

    def verdict(self) -> str:
        """One line without timings or bytes, the same on every machine where all is well."""
        released = {None: "pool not released yet", 0: "pool released"}.get(self.pool_bytes_after_shutdown, "pool NOT released")
        exact = f"{self._chunks('exact hit')} and {self._chunks('fallback')} bit for bit"
        how = f"{exact}, {self._chunks('padded hit')} within tolerance" if self.streams == self.equal_streams else "see the table"
        checks = "".join(f"; {claim}" if holds else f"; NOT {claim}" for claim, holds in self.checks.items())
        return (
            f"{'PASS' if self.passed else 'FAIL'}: {self.graphs_captured}/{self.graphs_requested} graphs captured; "
            f"{self.equal_streams}/{self.streams} streams and {self.equal_chunks}/{sum(self.chunks.values())} chunks equal eager "
            f"({how}){checks}; {released}"
        )

    def _chunks(self, outcome: str) -> str:
        count = self.chunks.get(outcome, 0)
        return f"{count} {outcome}" + ("" if count == 1 else "s")

    def figures(self) -> dict[str, str]:
        """The figures in words, by what they are about."""
        left = "not shut down" if self.pool_bytes_after_shutdown is None else f"pool {mib(self.pool_bytes_after_shutdown)} MiB"
        largest = self.largest_difference
        level = "not finite" if largest is None else "none: all identical, bit for bit" if largest == 0 else dbfs_text(largest)
        return {
            "graphs": f"{self.graphs_captured} of {self.graphs_requested} captured on {self.device} in {self.capture_s:.1f} s",
            "memory": (
                f"{mib(self.static_buffer_bytes)} MiB static buffers + {mib(self.pool_bytes)} MiB pool; "
                f"{mib(self.state_bytes)} MiB request state"
            ),
            **{target.rpartition(".")[2]: self._coverage(target) for target in sorted({*self.hits, *self.fallbacks})},
            "largest difference": level,
            "after shutdown": left,
        }

    def _coverage(self, target: str) -> str:
        hits, reasons = self.hits.get(target, 0), self.fallbacks.get(target, {})
        calls = hits + sum(reasons.values())
        told = ", ".join(f"{reason} {count}" for reason, count in reasons.items())
        return f"{hits} of {calls} calls in graphs" + (f" (eager: {told})" if told else "")


def summarise_streaming(
    report: CaptureReport,
    runner: GPUGenerationModelRunner,
    comparisons: Sequence[StreamComparison],
    *,
    state_bytes: int,
    checks: Mapping[str, bool],
) -> StreamingSummary:
    """The figures of one runner's life. Call it after ``runner.shutdown()``.

    Args:
        report: of its capture.
        runner: the runner; its statistics outlive its shutdown.
        comparisons: streams through it against eager.
        state_bytes: of its model.
        checks: further claims, in words, and whether they hold.

    Raises:
        InputError: the runner never had a Manager.
    """
    stats, manager = runner.stats(), runner.manager
    if manager is None:
        raise InputError("this runner has no Manager, so there is nothing to sum up. Load a model that supports graphs.")
    largest = max((c.difference.max_abs for c in comparisons), default=0.0)
    outcomes = Counter(str(outcome) for c in comparisons for outcome in c.table["outcome"])
    called = sorted({kind.target_id for kind in stats.counts})
    reasons = {target: {str(reason): calls for reason, calls in stats.reasons(target).items()} for target in called}
    return StreamingSummary(
        device=report.device,
        graphs_requested=report.requested,
        graphs_captured=report.captured,
        capture_s=report.seconds,
        static_buffer_bytes=report.static_buffer_bytes,
        pool_bytes=report.pool_reserved_bytes,
        state_bytes=state_bytes,
        hits={target: stats.hits(target) for target in called},
        fallbacks={target: found for target, found in reasons.items() if found},
        errors=stats.replay_errors(),
        streams=len(comparisons),
        equal_streams=sum(c.passed for c in comparisons),
        chunks=dict(outcomes),
        equal_chunks=sum(int((c.table["agreement"] != "DIFFERS").sum()) for c in comparisons),
        largest_difference=largest if math.isfinite(largest) else None,
        checks={claim: bool(holds) for claim, holds in checks.items()},
        pool_bytes_after_shutdown=manager.pool.reserved_bytes if manager.state is ManagerState.CLEARED else None,
    )
