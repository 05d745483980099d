"""Logs and dumps of production servers as tables of calls and captures."""

from .counts import CALLS_COLUMNS, IMPORTED_OUTCOMES, REPORTS_COLUMNS
from .imported import CAPTURES_COLUMNS, ImportedLog, LineCounts, MalformedLine
from .reading import read_log

__all__ = [
    "CALLS_COLUMNS",
    "CAPTURES_COLUMNS",
    "IMPORTED_OUTCOMES",
    "REPORTS_COLUMNS",
    "ImportedLog",
    "LineCounts",
    "MalformedLine",
    "read_log",
]
