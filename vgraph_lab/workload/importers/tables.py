"""Plain tables of calls or captures: CSV with a header, or one JSON object per line.

Calls need ``batch_size`` and ``frames`` (whole numbers from 1); ``calls`` is 1 where it is missing, ``outcome`` is ``observed``.
``target``, ``reason``, ``phase``, ``unit``, ``state``, ``source_frames``, ``captured_batch_size``, ``captured_frames`` and
``process`` are read where they are there, so a coverage table that was saved comes back. Captures have ``seconds`` or ``mib`` in
place of ``calls``. Other columns are left alone. Every row adds up with the others.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from typing import Any

from .counts import IMPORTED_OUTCOMES
from .records import REASONS, CallShape, CaptureRecord, MalformedError, Report, Sink

__all__ = ["TABLE", "TableFormat"]

TABLE = "table"
_SIZES = {"batch_size", "frames"}
_SEPARATORS = (",", ";", "\t")


class TableFormat:
    """Rows of one table; the first line of a CSV file says what is in them."""

    def __init__(self) -> None:
        self._columns: list[str] | None = None
        self._separator = ","
        self._has_begun = False

    @property
    def is_open(self) -> bool:
        """Whether the next line may be a header or a row."""
        return self._columns is not None or not self._has_begun

    def read(self, line: int, process: str, message: str, sink: Sink) -> bool:
        """Take a header, then all rows; or a JSON object that has both sizes."""
        is_first, self._has_begun = not self._has_begun, self._has_begun or bool(message)
        if self._columns is not None:
            return self._read_row(message, process, sink)
        if is_first and self._read_header(message):
            return True
        if message.startswith("{") and '"batch_size"' in message and '"frames"' in message and '"graph_contract"' not in message:
            return self._read_object(message, process, sink)
        return False

    def finish(self, sink: Sink) -> None:
        """Nothing is open."""

    def _read_header(self, message: str) -> bool:
        for separator in _SEPARATORS:
            columns = [name.strip().strip('"') for name in message.lstrip("\ufeff").split(separator)]
            if set(columns) >= _SIZES:
                self._columns, self._separator = columns, separator
                return True
        return False

    def _read_row(self, message: str, process: str, sink: Sink) -> bool:
        if not message:
            return False
        assert self._columns is not None
        cells = next(csv.reader([message], delimiter=self._separator), [])
        if len(cells) != len(self._columns):
            raise MalformedError(f"{len(cells)} cells in a table of {len(self._columns)} columns")
        _take({name: cell.strip() for name, cell in zip(self._columns, cells, strict=True)}, process, sink)
        return True

    def _read_object(self, message: str, process: str, sink: Sink) -> bool:
        try:
            value = json.loads(message)
        except (ValueError, RecursionError) as error:
            raise MalformedError("the JSON object is cut or damaged") from error
        if not isinstance(value, Mapping) or not value.keys() >= _SIZES:
            return False
        _take(value, process, sink)
        return True


def _take(row: Mapping[str, Any], process: str, sink: Sink) -> None:
    def text(name: str, default: str = "") -> str:
        value = row.get(name)
        return default if value is None or value == "" else str(value)

    who = text("process", process)
    rows, frames = _whole(row, "batch_size"), _whole(row, "frames")
    if rows is None or frames is None:
        raise MalformedError("batch_size and frames must be whole numbers from 1, but one is empty")
    if "calls" not in row and ("seconds" in row or "mib" in row):
        seconds, mib = _number(row, "seconds"), _number(row, "mib")
        sink.capture(CaptureRecord(who, TABLE, text("target"), "graph", rows, frames, text("unit", "frames"), seconds, mib))
        return
    outcome = text("outcome", "observed")
    if outcome not in IMPORTED_OUTCOMES:
        raise MalformedError(f"outcome is {outcome!r}; accepted are {', '.join(IMPORTED_OUTCOMES)}")
    reason = text("reason")
    shape = CallShape(
        text("target"),
        outcome,
        rows,
        frames,
        text("phase"),
        text("unit", "frames"),
        str(REASONS.get(reason, reason)),
        _whole(row, "captured_batch_size"),
        _whole(row, "captured_frames"),
        text("state"),
        _whole(row, "source_frames"),
    )
    calls = _whole(row, "calls", least=0) if "calls" in row else 1
    sink.report(who, Report(TABLE, "interval", {shape: 0 if calls is None else calls}))


def _whole(row: Mapping[str, Any], name: str, *, least: int = 1) -> int | None:
    number = _number(row, name)
    if number is None:
        return None
    if number != int(number) or number < least:
        raise MalformedError(f"{name} must be a whole number from {least}, got {row[name]!r}")
    return int(number)


def _number(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    if value is None or value == "":
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise MalformedError(f"{name} must be a number, got {value!r}")
    return number
