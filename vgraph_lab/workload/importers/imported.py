"""What an imported log leaves behind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from vgraph_lab.errors import InputError, did_you_mean

from .counts import CALLS_COLUMNS
from .records import CaptureRecord

__all__ = ["CAPTURES_COLUMNS", "ImportedLog", "LineCounts", "MalformedLine", "captures_table"]

CAPTURES_COLUMNS = {
    "process": "who captured, as far as the log says",
    "source": "format of the line",
    "target": "id of the Target, or of the place in the other project",
    "kind": "graph, or total: all graphs of the process together",
    "batch_size": "rows of the graph; missing where the log does not say",
    "frames": "frames (or tokens) per row; missing where the log does not say",
    "unit": "what frames are counted in: codec frames, or tokens of a flat batch",
    "seconds": "how long the capture took; missing where the log does not say",
    "mib": "memory that it took in MiB (as the log measured it); missing where the log does not say",
}
"""The columns of ``ImportedLog.captures``, in order, with their meaning."""


@dataclass(frozen=True, slots=True)
class LineCounts:
    """How lines were taken; read = recognised + ignored + malformed."""

    read: int
    recognised: int
    ignored: int
    malformed: int

    def __str__(self) -> str:
        return f"{self.read:,} lines read: {self.recognised:,} recognised, {self.ignored:,} ignored, {self.malformed:,} malformed"


@dataclass(frozen=True, slots=True)
class MalformedLine:
    """A line of a known kind that could not be used.

    Attributes:
        line: its number, from 1.
        text: its beginning.
        why: what was wrong.
    """

    line: int
    text: str
    why: str

    def __str__(self) -> str:
        return f"line {self.line:,}: {self.why}: {self.text}"


@dataclass(frozen=True)
class ImportedLog:
    """A log as tables.

    Attributes:
        name: the file, or what else was read.
        calls: calls by process, source and shape; see :data:`CALLS_COLUMNS`.
        captures: captured graphs in the order of the log; see :data:`CAPTURES_COLUMNS`.
        reports: how repeated counters were resolved for each process; see :data:`REPORTS_COLUMNS`.
        lines: how many lines were of use.
        malformed: the first lines of known kinds that were of none.
        notes: what else a reader should know.
    """

    name: str
    calls: pd.DataFrame
    captures: pd.DataFrame
    reports: pd.DataFrame
    lines: LineCounts
    malformed: tuple[MalformedLine, ...]
    notes: tuple[str, ...] = ()

    def of_source(self, source: str) -> pd.DataFrame:
        """The calls of one source, processes added up; the same columns without ``process`` and ``source``.

        Raises:
            InputError: the log has no such source.
        """
        sources = sorted(set(self.calls["source"]))
        if source not in sources:
            raise InputError(
                f"{self.name} has no calls of source {source!r}.{did_you_mean(source, sources)} It has: {', '.join(sources) or 'none'}."
            )
        own = self.calls[self.calls["source"] == source].drop(columns=["process", "source"])
        sums = ["calls", "padding_rows", "padding_frames"]
        by = [name for name in own.columns if name not in sums]
        summed = own.groupby(by, dropna=False, observed=True, as_index=False, sort=False)[sums].sum(min_count=1)
        return summed.astype({"calls": "int64"})[[name for name in CALLS_COLUMNS if name in own.columns]]

    def check_targets(self, known: Iterable[str]) -> None:
        """Refuse calls of Targets that a model does not have.

        Raises:
            InputError: names every unknown Target id and the nearest known one.
        """
        accepted = sorted(known)
        unknown = sorted(set(self.calls["target"]) - set(accepted))
        if "" in unknown:
            raise InputError(f"{self.name} counts calls without a Target: a table needs the column 'target'. Known: {', '.join(accepted)}.")
        if unknown:
            named = ", ".join(f"{target!r}{did_you_mean(target, accepted)}" for target in unknown)
            raise InputError(f"{self.name} counts calls of unknown Targets: {named} Known: {', '.join(accepted)}.")

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.lines}"]
        for row in self.reports.to_dict("records"):
            rule = "the last report of each run counts" if row["repetition"] == "cumulative" else "reports add up"
            runs = f" in {row['runs']} runs" if row["runs"] != 1 else ""
            who, missing = row["process"] or "unnamed process", row["unlisted"]
            more = "" if missing is pd.NA or not missing else f"; {missing:,} more are not listed by shape"
            reports = f"{row['reports']} {row['repetition']} report{'s' if row['reports'] != 1 else ''}{runs}"
            lines.append(f"  {row['source']}, {who}: {reports}, {rule}: {row['calls']:,} calls{more}")
        if len(self.captures):
            graphs = int((self.captures["kind"] == "graph").sum())
            lines.append(f"  {graphs} captured graphs")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes), *(f"  malformed, {line}" for line in self.malformed)])


def captures_table(records: Iterable[CaptureRecord]) -> pd.DataFrame:
    """Captures in the order of the log; see :data:`CAPTURES_COLUMNS`."""
    table = pd.DataFrame([record._asdict() for record in records], columns=list(CAPTURES_COLUMNS))
    text = dict.fromkeys(("process", "source", "target", "kind", "unit"), "str")
    return table.astype({**text, "batch_size": "Int64", "frames": "Int64", "seconds": "float64", "mib": "float64"})
