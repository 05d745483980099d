"""Counters that a log repeats, made into one table.

A cumulative counter is repeated with ever larger values: its last report holds all of it. One that falls has begun anew,
since its process did; the last report before the fall counts as well. Reports by interval add up.

If a log does not say which process a line is from, several may have written it. A cumulative report then continues the
counter that it is nowhere below; if there is none, it belongs to another process.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd

from .records import CallShape, Report

__all__ = ["CALLS_COLUMNS", "IMPORTED_OUTCOMES", "REPORTS_COLUMNS", "Repetition", "ReportBook"]

Repetition = Literal["auto", "cumulative", "interval"]
"""How repeated reports are taken: as their format is known to write them, or as the caller knows better."""

IMPORTED_OUTCOMES = ("exact hit", "padded hit", "hit", "fallback", "error", "observed")
"""``hit``: whether it was padded is not told. ``observed``: the shape is told, what became of the call is not."""

CALLS_COLUMNS = {
    "process": "who counted, as far as the log says",
    "source": "format of the line. Several sources count the same traffic in several places: do not add them up",
    "target": "id of the Target, or of the place in the other project",
    "phase": "what the log calls the step",
    "unit": "what frames are counted in: codec frames, or tokens of a flat batch",
    "requested": "exact shape of the call as text",
    "batch_size": "rows requested; missing where the log does not say",
    "frames": "frames (or tokens) requested per row; missing where the log does not say",
    "state": "request state of the call; empty where the log does not say",
    "source_frames": "streaming: frames kept before the step; missing where the log does not say",
    "outcome": "exact hit, padded hit, hit, fallback, error or observed",
    "reason": "why it fell back: ours where the log's is one of them, otherwise the log's; empty for hits or where none is given",
    "captured": "shape of the graph that was used as text",
    "captured_batch_size": "rows of that graph",
    "captured_frames": "frames (or tokens) per row of that graph",
    "calls": "number of such calls",
    "padding_rows": "rows computed for nothing by all these calls; missing where they are not told",
    "padding_frames": "frames computed for nothing by all these calls; missing where a shape is",
    "wasted_share": "of the frames that hits computed, the share computed for nothing, 0 to 1",
}
"""The columns of ``ImportedLog.calls``, in order, with their meaning. Those of a coverage table mean the same."""

REPORTS_COLUMNS = {
    "process": "who counted, as far as the log says",
    "source": "format of the lines",
    "repetition": "cumulative (the last report of each run counts) or interval (all reports add up)",
    "reports": "how many there were",
    "runs": "counters that began at zero; more than one after a restart, or if several processes wrote without a name",
    "calls": "calls that are listed by shape",
    "unlisted": "requests (or calls, where the log counts these) in the totals beyond the listed shapes; missing without totals",
}
"""The columns of ``ImportedLog.reports``, in order, with their meaning."""

_WHOLE = ("batch_size", "frames", "captured_batch_size", "captured_frames", "source_frames", "padding_rows", "padding_frames")
_TEXT = ("process", "source", "target", "phase", "unit", "requested", "state", "reason", "captured")


@dataclass
class _Run:
    """One counter from zero on."""

    totals: dict[str, int] = field(default_factory=dict)
    counts: Counter[CallShape] = field(default_factory=Counter)

    def is_continued_by(self, report: Report) -> bool:
        if any(report.totals.get(name, 0) < value for name, value in self.totals.items()):
            return False
        known = self.counts if report.is_complete else self.counts.keys() & report.counts.keys()
        return all(report.counts.get(shape, 0) >= self.counts[shape] for shape in known)

    def take(self, report: Report) -> None:
        """A later state of the same counter. A shape that has left the list of the most frequent ones keeps its last count."""
        self.totals.update(report.totals)
        self.counts.update({shape: n - self.counts[shape] for shape, n in report.counts.items()})

    @property
    def unlisted(self) -> int | None:
        """What the totals count beyond the listed shapes; None without totals."""
        if "rows" in self.totals:
            return max(0, self.totals["rows"] - sum((shape.batch_size or 0) * n for shape, n in self.counts.items()))
        return max(0, self.totals["calls"] - self.counts.total()) if "calls" in self.totals else None

    def add(self, report: Report) -> None:
        for name, value in report.totals.items():
            self.totals[name] = self.totals.get(name, 0) + value
        self.counts.update(report.counts)


@dataclass
class _Series:
    """All reports of one process and source."""

    repetition: str
    reports: int = 0
    runs: list[_Run] = field(default_factory=list)

    def take(self, report: Report, *, is_one_process: bool) -> None:
        self.reports += 1
        if self.repetition == "interval":
            if not self.runs:
                self.runs.append(_Run())
            self.runs[0].add(report)
            return
        candidates = self.runs[-1:] if is_one_process else self.runs
        continued = [run for run in candidates if run.is_continued_by(report)]
        if not continued:
            continued = [_Run()]
            self.runs += continued
        max(continued, key=lambda run: (sum(run.totals.values()), run.counts.total())).take(report)


class ReportBook:
    """Collects reports; memory grows with processes and shapes, not with lines."""

    def __init__(self, repetition: Repetition) -> None:
        self._repetition, self._series = repetition, dict[tuple[str, str], _Series]()

    def take(self, process: str, report: Report) -> None:
        """One report more."""
        who = report.process or process
        repetition = report.repetition if self._repetition == "auto" else self._repetition
        series = self._series.setdefault((who, report.source), _Series(repetition))
        series.take(report, is_one_process=bool(who))

    def calls(self) -> pd.DataFrame:
        """All calls; see :data:`CALLS_COLUMNS`."""
        rows = []
        for (process, source), series in self._series.items():
            total: Counter[CallShape] = Counter()
            for run in series.runs:
                total.update(run.counts)
            rows += [_row(process, source, shape, n) for shape, n in total.items() if n]
        table = pd.DataFrame(rows, columns=list(CALLS_COLUMNS))
        table["outcome"] = pd.Categorical(table["outcome"], categories=list(IMPORTED_OUTCOMES), ordered=True)
        table = table.astype({**dict.fromkeys(_TEXT, "str"), **dict.fromkeys(_WHOLE, "Int64"), "calls": "int64", "wasted_share": "float64"})
        order = ["source", "process", "target", "phase", "frames", "batch_size", "outcome", "reason", "captured"]
        return table.sort_values(order, ignore_index=True)

    def reports(self) -> pd.DataFrame:
        """How repetition was resolved; see :data:`REPORTS_COLUMNS`."""
        rows = []
        for (process, source), series in sorted(self._series.items()):
            calls = sum(run.counts.total() for run in series.runs)
            missing = [run.unlisted for run in series.runs if run.unlisted is not None]
            unlisted = sum(missing) if missing else None
            rows.append((process, source, series.repetition, series.reports, len(series.runs), calls, unlisted))
        table = pd.DataFrame(rows, columns=list(REPORTS_COLUMNS))
        whole = dict.fromkeys(("reports", "runs", "calls"), "int64")
        return table.astype({**dict.fromkeys(("process", "source", "repetition"), "str"), **whole, "unlisted": "Int64"})


def _shape(batch_size: int | None, frames: int | None) -> str:
    if batch_size is None and frames is None:
        return ""
    return f"B{'?' if batch_size is None else batch_size}×T{'?' if frames is None else frames}"


def _row(process: str, source: str, shape: CallShape, calls: int) -> dict[str, Any]:
    row = {"process": process, "source": source, **shape._asdict(), "calls": calls}
    row["requested"] = _shape(shape.batch_size, shape.frames)
    row["captured"] = _shape(shape.captured_batch_size, shape.captured_frames)
    if "hit" not in shape.outcome:
        return row | {"padding_rows": 0, "padding_frames": 0, "wasted_share": 0.0}
    if shape.batch_size is None or shape.captured_batch_size is None:
        return row
    row["padding_rows"] = (shape.captured_batch_size - shape.batch_size) * calls
    if shape.frames is None or shape.captured_frames is None:
        return row
    computed = shape.captured_batch_size * shape.captured_frames
    padded = computed - shape.batch_size * shape.frames
    return row | {"padding_frames": padded * calls, "wasted_share": padded / computed}
