"""How figures print: reports as text and as HTML, and the cells of any table by the unit in its column's name."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from datetime import datetime
from numbers import Integral, Real

import pandas as pd

__all__ = ["MIB", "PERCENT", "as_html", "as_text", "cell_text", "mib"]

MIB = 2**20
"""Bytes of a MiB, the unit of every figure of memory that people read."""

PERCENT = ("_share", "hit_rate", "error_rate")
"""Ends of the names of columns that hold shares, 0 to 1, and show percent."""


def mib(count: int) -> str:
    """Bytes as MiB with two decimals, without the unit."""
    return f"{count / MIB:,.2f}"


def as_text(headline: str, rows: Sequence[Sequence[str]], *notes: str) -> str:
    """Aligned columns; the first row is the header."""
    cells = [[" ".join(cell.split()) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([headline, "", *lines, *notes])


def as_html(headline: str, rows: Sequence[Sequence[str]], *notes: str) -> str:
    """The same for a notebook; everything is escaped."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    header, *body = rows
    table = f"<thead>{line(header, 'th')}</thead><tbody>{''.join(line(row, 'td') for row in body)}</tbody>"
    return f"<p><b>{html.escape(headline)}</b></p><table>{table}</table>" + "".join(f"<p>{html.escape(note)}</p>" for note in notes)


def cell_text(name: str, value: object) -> str:
    """A value of the column ``name`` as people read it: what is missing is a dash, shares are percent, digits follow the unit."""
    if value is None or value is pd.NA or value is pd.NaT or (isinstance(value, Real) and math.isnan(value)):
        return "–"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "–"
    if pd.api.types.is_bool(value):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, Integral):
        return f"{value:,}".replace("-", "−")
    return _number(name, float(value)) if isinstance(value, Real) else str(value)


def _number(name: str, value: float) -> str:
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if name.endswith(PERCENT):
        return f"{100 * value:.1f}"
    digits = 0 if name.endswith("_bytes") else 3 if name.endswith("_s") else 1 if name.endswith(("_db", "_dbfs")) else 2
    return f"{value:,.{digits}f}".replace("-", "−")
