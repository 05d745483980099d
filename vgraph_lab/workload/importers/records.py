"""What a format reads from a line: counted calls, reports of counters, captured graphs; and the reasons of other projects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from vgraph_lab.errors import FallbackReason

__all__ = ["REASONS", "CallShape", "CaptureRecord", "LogFormat", "MalformedError", "Report", "Sink"]

REASONS: Mapping[str, FallbackReason] = {
    "no_graph": FallbackReason.NO_GRAPH,
    "shape": FallbackReason.SHAPE_NOT_COVERED,
    "capture": FallbackReason.NESTED_CAPTURE,
    "disabled": FallbackReason.DISABLED,
    "ineligible": FallbackReason.DECLINED,
    "key_miss": FallbackReason.SHAPE_NOT_COVERED,
    "above_capture_cap": FallbackReason.SHAPE_NOT_COVERED,
    **{reason.value: reason for reason in FallbackReason},
}
"""Reasons as they stand in logs → ours. Others are kept as they are."""


class MalformedError(ValueError):
    """A line is of a known kind, but its content cannot be used. Counted and shown, never fatal."""


class CallShape(NamedTuple):
    """What is counted: a shape, what became of it, and the graph that served it. None: the log does not say."""

    target: str
    outcome: str
    batch_size: int | None = None
    frames: int | None = None
    phase: str = ""
    unit: str = "frames"
    reason: str = ""
    captured_batch_size: int | None = None
    captured_frames: int | None = None
    state: str = ""
    source_frames: int | None = None


class CaptureRecord(NamedTuple):
    """One captured graph, or (``kind`` = ``total``) all of a process."""

    process: str
    source: str
    target: str
    kind: str
    batch_size: int | None = None
    frames: int | None = None
    unit: str = "frames"
    seconds: float | None = None
    mib: float | None = None


@dataclass(frozen=True)
class Report:
    """Counters as one line (or table) gives them.

    Attributes:
        source: the format.
        repetition: ``cumulative`` (since the process began) or ``interval`` (since the report before).
        counts: calls by shape.
        totals: counters that stand beside them, by name. ``rows`` or ``calls`` is what the listed shapes should add up to.
        is_complete: whether ``counts`` lists everything; otherwise only the most frequent.
        process: who counts, if the report itself says so.
    """

    source: str
    repetition: Literal["cumulative", "interval"]
    counts: Mapping[CallShape, int]
    totals: Mapping[str, int] = field(default_factory=dict)
    is_complete: bool = True
    process: str = ""


class Sink(Protocol):
    """Where formats put what they read."""

    def report(self, process: str, report: Report) -> None:
        """Counters of a process."""

    def capture(self, record: CaptureRecord) -> None:
        """A captured graph."""

    def recant(self, line: int, text: str, why: str) -> None:
        """A line that was taken turns out to be of no use."""


class LogFormat(Protocol):
    """One kind of line. ``read`` returns whether it took the line, and raises :class:`MalformedError` for one it cannot use."""

    def read(self, line: int, process: str, message: str, sink: Sink) -> bool:
        """Take a line, or leave it to the next format."""

    def finish(self, sink: Sink) -> None:
        """The log is over."""
