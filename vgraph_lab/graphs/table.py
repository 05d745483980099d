"""How reports of captures print: a headline, a table, notes; as text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

__all__ = ["as_html", "as_text", "mib"]


def mib(count: int) -> str:
    """Bytes as MiB with two decimals, without the unit."""
    return f"{count / 2**20:,.2f}"


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
