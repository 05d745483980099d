"""Tables of :mod:`vgraph_lab.inspect` for reading: chosen columns, units below names, every row shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from vgraph_lab.errors import InputError, did_you_mean
from vgraph_lab.graphs.table import PERCENT, cell_text

from .html import Html, escape, styled

__all__ = ["show_table"]

_UNITS = {"_mib": "MiB", "_kib": "KiB", "_dbfs": "dBFS", "_db": "dB", "_s": "s", "_ms": "ms", "_utc": "UTC", **dict.fromkeys(PERCENT, "%")}


def show_table(table: pd.DataFrame, columns: Sequence[str] | None = None, *, meanings: Mapping[str, str] | None = None) -> Html:
    """Show columns of a table as they should be read.

    Args:
        table: any table; units are recognised by the end of a column's name.
        columns: which ones and in which order; all by default.
        meanings: column → sentence, shown when the pointer rests on the column's name.

    Raises:
        InputError: a column that the table has not got.
    """
    shown = list(table.columns) if columns is None else list(columns)
    for name in shown:
        if name not in table:
            raise InputError(f"no column {name!r}.{did_you_mean(name, table.columns)} The table has: {', '.join(table.columns)}.")
    numeric = {name: pd.api.types.is_numeric_dtype(table[name]) and not pd.api.types.is_bool_dtype(table[name]) for name in shown}
    has_units = any(_unit(name) for name in shown)
    head = "".join(_header(name, numeric[name], (meanings or {}).get(name, ""), has_units) for name in shown)
    cells = {name: [cell_text(name, value) for value in table[name]] for name in shown}
    rows = "".join(
        "<tr>" + "".join(f"<td{_class(numeric[name])}>{escape(cells[name][i])}</td>" for name in shown) + "</tr>" for i in range(len(table))
    )
    empty = f'<tr><td class="vgl-text" colspan="{len(shown)}">no rows</td></tr>'
    return styled(f'<table class="vgl-table"><thead><tr>{head}</tr></thead><tbody>{rows or empty}</tbody></table>')


def _class(is_numeric: bool) -> str:
    return "" if is_numeric else ' class="vgl-text"'


def _unit(name: str) -> str:
    """The end of a column's name that is its unit; empty if there is none."""
    return next((end for end in _UNITS if name.endswith(end)), "")


def _header(name: str, is_numeric: bool, meaning: str, has_units: bool) -> str:
    """The name, and below it the unit or an empty line, where any column of the table has a unit."""
    suffix = _unit(name)
    words = name.removesuffix("" if suffix in PERCENT else suffix).replace("_", " ")
    title = f' title="{escape(meaning)}"' if meaning else ""
    unit = f"<small>{_UNITS.get(suffix, '') or '&nbsp;'}</small>" if has_units else ""
    return f'<th scope="col"{_class(is_numeric)}{title}>{escape(words)}{unit}</th>'
