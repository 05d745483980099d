"""One capture in a few figures and one verdict: what a notebook hands to whoever runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from vgraph_lab.graphs.manager import ManagerState, VocoderCUDAGraphManager
from vgraph_lab.graphs.report import CaptureReport
from vgraph_lab.graphs.table import mib

from .audio import dbfs_text
from .coverage import coverage_summary, coverage_table
from .notebook_summary import NotebookSummary
from .parity import Comparison, median_speedup

__all__ = ["SUMMARY_MIME", "CaptureSummary", "summarise"]

SUMMARY_MIME = "application/vnd.vgraph-lab.summary+json"
"""Displaying a :class:`CaptureSummary` puts its figures into the notebook under this type, for programs to read."""


@dataclass(frozen=True)
class CaptureSummary(NotebookSummary):
    """Plain figures, all of them JSON.

    Attributes:
        device: where the graphs were captured; its type names the backend.
        graphs_requested: Descriptors that were asked for.
        graphs_captured: graphs that were made.
        capture_s: seconds of the whole capture.
        static_buffer_bytes: static buffers of all graphs.
        pool_bytes: reserved by the pool after the capture.
        exact_hits: calls whose shape was captured.
        padded_hits: calls served by a larger graph.
        fallbacks: calls that ran eager, by reason.
        errors: calls that failed during copy-in, replay or materialisation.
        wasted_share: of the frames that hits computed, the share computed for nothing; None without hits.
        median_speedup: median over hits of eager seconds / graph seconds; None without hits.
        compared: waveforms that were compared with eager.
        equal: of these, how many are as equal as they must be.
        largest_difference: largest absolute difference from eager, amplitude relative to full scale; None if it is not
            finite.
        largest_difference_in: name of that input; None if all are identical.
        pool_bytes_after_clear: reserved by the pool once the Manager was cleared; None if it was not.
    """

    MIME: ClassVar[str] = SUMMARY_MIME
    KIND: ClassVar[str] = "capture"

    device: str
    graphs_requested: int
    graphs_captured: int
    capture_s: float
    static_buffer_bytes: int
    pool_bytes: int
    exact_hits: int
    padded_hits: int
    fallbacks: dict[str, int]
    errors: int
    wasted_share: float | None
    median_speedup: float | None
    compared: int
    equal: int
    largest_difference: float | None
    largest_difference_in: str | None
    pool_bytes_after_clear: int | None

    @property
    def hits(self) -> int:
        """Calls served by a graph."""
        return self.exact_hits + self.padded_hits

    @property
    def calls(self) -> int:
        """All counted calls."""
        return self.hits + sum(self.fallbacks.values()) + self.errors

    @property
    def passed(self) -> bool:
        """Whether all graphs exist, something was compared and all of it is equal, and the pool was released."""
        captured = self.graphs_captured == self.graphs_requested > 0
        return captured and self.compared == self.equal > 0 and self.errors == 0 and self.pool_bytes_after_clear == 0

    def verdict(self) -> str:
        """One line without timings or bytes, the same on every machine."""
        released = {None: "pool not released yet", 0: "pool released"}.get(self.pool_bytes_after_clear, "pool NOT released")
        exact = f"{_count(self.exact_hits, 'exact hit')} and {_count(sum(self.fallbacks.values()), 'fallback')} bit for bit"
        padded = f"{_count(self.padded_hits, 'padded hit')} within tolerance"
        how = f" ({exact}, {padded})" if self.compared == self.equal else ""
        return (
            f"{'PASS' if self.passed else 'FAIL'}: {self.graphs_captured}/{self.graphs_requested} graphs captured; "
            f"{self.equal}/{self.compared} utterances equal eager{how}; {released}"
        )

    def figures(self) -> dict[str, str]:
        """The figures in words, by what they are about."""
        reasons = ", ".join(f"{reason} {calls}" for reason, calls in self.fallbacks.items())
        fallbacks = _count(sum(self.fallbacks.values()), "fallback") + (f" ({reasons})" if reasons else "")
        hit_rate = f"{self.hits / self.calls:.1%}" if self.calls else "no calls"
        left = "not cleared" if self.pool_bytes_after_clear is None else f"pool {mib(self.pool_bytes_after_clear)} MiB"
        return {
            "graphs": f"{self.graphs_captured} of {self.graphs_requested} captured on {self.device} in {self.capture_s:.1f} s",
            "memory": f"{mib(self.static_buffer_bytes)} MiB static buffers + {mib(self.pool_bytes)} MiB pool",
            "calls": f"{self.calls}: {_count(self.hits, 'hit')}, {fallbacks}, {_count(self.errors, 'error')}",
            "hit rate": f"{hit_rate} ({self.exact_hits} exact, {self.padded_hits} padded)",
            "padding": "no hits" if self.wasted_share is None else f"{self.wasted_share:.1%} of the frames that graphs computed",
            "speed": self._speed(),
            "largest difference": self._largest(),
            "after clean-up": left,
        }

    def _speed(self) -> str:
        if self.median_speedup is None:
            return "no hits"
        note = "; the cpu backend promises no speed" if self.device == "cpu" else ""
        return f"{self.median_speedup:.2f} × as fast as eager (median over hits{note})"

    def _largest(self) -> str:
        if self.largest_difference_in is None:
            return "none: all identical, bit for bit"
        level = "not finite" if self.largest_difference is None else dbfs_text(self.largest_difference)
        return f"{level}, in {self.largest_difference_in}"


def summarise(report: CaptureReport, manager: VocoderCUDAGraphManager, comparisons: Sequence[Comparison]) -> CaptureSummary:
    """The figures of one capture, its Manager's statistics and a comparison with eager. Call it after ``manager.clear()``."""
    totals = coverage_summary(coverage_table(manager.stats()))
    padded, requested = int(totals["padding_frames"].sum()), int(totals["hit_frames"].sum())
    worst = max(comparisons, key=lambda c: c.difference.max_abs, default=None)
    largest = worst.difference.max_abs if worst else 0.0
    return CaptureSummary(
        device=report.device,
        graphs_requested=report.requested,
        graphs_captured=report.captured,
        capture_s=report.seconds,
        static_buffer_bytes=report.static_buffer_bytes,
        pool_bytes=report.pool_reserved_bytes,
        exact_hits=int(totals["exact_hits"].sum()),
        padded_hits=int(totals["padded_hits"].sum()),
        fallbacks={str(reason): calls for reason, calls in manager.stats().reasons().items()},
        errors=int(totals["errors"].sum()),
        wasted_share=padded / (padded + requested) if requested else None,
        median_speedup=median_speedup(comparisons),
        compared=len(comparisons),
        equal=sum(c.verdict.passed for c in comparisons),
        largest_difference=largest if math.isfinite(largest) else None,
        largest_difference_in=worst.name if worst and largest > 0 else None,
        pool_bytes_after_clear=manager.pool.reserved_bytes if manager.state is ManagerState.CLEARED else None,
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
