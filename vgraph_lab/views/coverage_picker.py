"""The coverage map alive: calls by rows and frames, to point at, to choose from, and to read back in Python."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import pandas as pd
import traitlets

from vgraph_lab.errors import InputError
from vgraph_lab.inspect.listening.checks import is_whole

from .coverage_plots import coverage_map
from .outcomes import categories, colour_of, in_order
from .refusal import refusing
from .style import chart

__all__ = ["Cell", "CoverageMap"]

_STATIC = Path(__file__).parent / "static"
_NEEDED = ("batch_size", "frames", "outcome", "reason", "captured", "captured_batch_size", "captured_frames", "calls", "padding_frames")
_MOST_NAMED_GRAPHS = 4

Cell = tuple[int, int]
"""Rows and codec frames of a call."""


class _Pairs(traitlets.Tuple):
    """A tuple that takes arrays, too: ``table[["batch_size", "frames"]].to_numpy()``."""

    def validate(self, obj: Any, value: Any) -> Any:
        return super().validate(obj, tuple(value) if isinstance(value, np.ndarray) and value.ndim else value)


class CoverageMap(anywidget.AnyWidget):
    """Calls by rows and frames, as :func:`~vgraph_lab.views.plots.coverage_map` draws them, with cells that can be chosen.

    ::

        picker = CoverageMap(coverage_table(runner), entries_table(runner))
        picker                                  # click cells, or move with the arrow keys and press Space
        picker.selection                        # ((1, 56), (2, 56)): rows and frames of each chosen cell
        picker.selected()                       # the rows of the coverage table behind them
        picker.selection = [(4, 325)]           # Python can choose, too; observe(…, "selection") tells of clicks

    Each cell is divided among what became of its calls, and the stronger it is, the more there were. Colours and patterns tell
    outcomes apart; shapes that have a graph are outlined. Targets are added up; pass the rows of one to look at one.

    A static page shows the chart instead. A widget lives as long as the kernel, or until ``close()``; it holds the table only.

    Args:
        coverage: of :func:`~vgraph_lab.inspect.coverage.coverage_table`; may be empty.
        entries: of :func:`~vgraph_lab.inspect.entries.entries_table`: outline every graph; otherwise those that were used.

    Attributes:
        selection: rows and frames of the chosen cells, ascending, each once.
        grid: what the browser draws; changed by :meth:`update` only.

    Raises:
        InputError: no table, or a column is missing; or a cell was chosen that the map has not got. The selection stays as it was.
    """

    _esm = _STATIC / "coverage_picker.js"
    _css = _STATIC / "coverage_picker.css"

    grid = traitlets.Dict(read_only=True).tag(sync=True)
    selection = _Pairs().tag(sync=True)

    def __init__(self, coverage: pd.DataFrame, entries: pd.DataFrame | None = None) -> None:
        found = _grid(coverage, entries)
        self._coverage, self._entries, self._cells = coverage, entries, _cells_of(found)
        super().__init__()
        self.set_trait("grid", found)

    @property
    def coverage(self) -> pd.DataFrame:
        """The table that is shown."""
        return self._coverage

    def selected(self) -> pd.DataFrame:
        """The rows of the coverage table behind the chosen cells; its columns and no rows if none is chosen.

        A cell that has a graph and no calls has no rows.
        """
        chosen = set(self.selection)
        pairs = zip(self._coverage["batch_size"], self._coverage["frames"], strict=True)
        return self._coverage[[pair in chosen for pair in pairs]].reset_index(drop=True)

    def update(self, coverage: pd.DataFrame, entries: pd.DataFrame | None = None) -> None:
        """Show other tables in place. Chosen cells that are still there stay chosen.

        Raises:
            InputError: no table, or a column is missing; the map stays as it was.
        """
        found = _grid(coverage, entries)
        cells = _cells_of(found)
        with self.hold_sync():
            self.selection = tuple(cell for cell in self.selection if cell in cells)
            self._coverage, self._entries, self._cells = coverage, entries, cells
            self.set_trait("grid", found)

    @traitlets.validate("selection")
    @refusing
    def _checked(self, proposal: traitlets.Bunch) -> tuple[Cell, ...]:
        cells = set()
        for given in proposal["value"]:
            is_pair = isinstance(given, list | tuple | np.ndarray) and np.ndim(given) == 1 and len(given) == 2
            if not (is_pair and all(is_whole(size) for size in given)):
                raise InputError(f"{given!r} is no cell. A cell is a pair of whole numbers, rows and frames, such as (1, 56).")
            cell = (int(given[0]), int(given[1]))
            if cell not in self._cells:
                raise InputError(f"{cell} is no cell of this map: nobody asked for that shape, and no graph has it. {self._near(cell)}")
            cells.add(cell)
        return tuple(sorted(cells))

    def _near(self, cell: Cell) -> str:
        if not self._cells:
            return "The map is empty."
        near = sorted(self._cells, key=lambda other: (abs(math.log(other[0]) - math.log(max(1, cell[0]))), abs(other[1] - cell[1])))
        return f"Near it are {', '.join(map(str, near[:3]))}."

    def _static_html(self) -> str:
        rows = len(self.grid["rows"])
        size_in = (8.6, min(7.5, max(2.4, 1.5 + 0.3 * rows)))
        return chart(coverage_map, self._coverage, self._entries, size_in=size_in)._repr_html_()

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The live widget where there is one, and the chart for static pages."""
        data, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        return {**data, "text/html": self._static_html(), "text/plain": repr(self)}, metadata

    def __repr__(self) -> str:
        rows, frames, calls = len(self.grid.get("rows", ())), len(self.grid.get("columns", ())), self.grid.get("calls", 0)
        return f"CoverageMap({rows} × {frames} shapes, {calls:,} calls, {len(self.selection)} cells chosen)"


def _cells_of(grid: dict[str, Any]) -> set[Cell]:
    """Cells that have calls or a graph."""
    return {(grid["rows"][cell["row"]], grid["columns"][cell["column"]]) for cell in grid["cells"]}


def _grid(coverage: pd.DataFrame, entries: pd.DataFrame | None) -> dict[str, Any]:
    """What the browser draws, as JSON has it."""
    for name, table, needed in (("coverage", coverage, _NEEDED), ("entries", entries, ("batch_size", "frames", "reason"))):
        if not (isinstance(table, pd.DataFrame) or (table is None and name == "entries")):
            raise InputError(f"the {name} table is {type(table).__name__}. Pass what vgraph_lab.inspect.{name}_table gives, or rows of it.")
        missing = [column for column in needed if table is not None and column not in table]
        if missing:
            raise InputError(
                f"the {name} table lacks {', '.join(missing)}. Pass what vgraph_lab.inspect.{name}_table gives, or rows of it."
            )
    placed = coverage.dropna(subset=["batch_size", "frames"])
    used = placed[["captured_batch_size", "captured_frames"]].dropna()
    graphs = used if entries is None else entries.loc[entries["reason"] == "", ["batch_size", "frames"]]
    captured = {(int(rows), int(frames)) for rows, frames in graphs.itertuples(index=False, name=None)}
    fates: dict[Cell, Counter[str]] = {cell: Counter() for cell in captured}
    served_by: dict[tuple[Cell, str], Counter[str]] = {}
    padding: Counter[Cell] = Counter()
    for row in placed.assign(category=categories(placed)).to_dict("records"):
        cell, name, calls = (int(row["batch_size"]), int(row["frames"])), str(row["category"]), int(row["calls"])
        fates.setdefault(cell, Counter())[name] += calls
        padding[cell] += 0 if pd.isna(row["padding_frames"]) else int(row["padding_frames"])
        if row["captured"]:
            served_by.setdefault((cell, name), Counter())[str(row["captured"])] += calls
    names = in_order({name for fate in fates.values() for name in fate})
    rows, columns = ({size: place for place, size in enumerate(sorted({cell[axis] for cell in fates}))} for axis in (0, 1))
    most = max((fate.total() for fate in fates.values()), default=0)
    return {
        "rows": list(rows),
        "columns": list(columns),
        "calls": sum(fate.total() for fate in fates.values()),
        "unplaced_calls": int(coverage["calls"].sum()) - int(placed["calls"].sum()),
        "categories": [{"name": name, "colour": colour_of(name), "pattern": _pattern(name)} for name in names],
        "graph_label": "a graph that served" if entries is None else "a graph",
        "cells": [
            {
                "row": rows[cell[0]],
                "column": columns[cell[1]],
                "calls": fate.total(),
                "strength": 0.3 + 0.7 * math.log1p(fate.total()) / math.log1p(most) if fate.total() else 0.0,
                "parts": [
                    {"category": names.index(name), "calls": fate[name], "graphs": _most_used(served_by.get((cell, name)))}
                    for name in in_order(fate)
                ],
                "has_graph": cell in captured,
                "padding_frames": padding[cell],
            }
            for cell, fate in sorted(fates.items())
        ],
    }


def _pattern(category: str) -> str:
    """What tells outcomes apart without colour: a class of the style sheet."""
    outcome = category.partition(":")[0]
    return {"padded hit": "hatch", "fallback": "dots", "error": "cross"}.get(outcome, "plain")


def _most_used(graphs: Counter[str] | None) -> list[str]:
    return [name for name, _ in (graphs or Counter()).most_common(_MOST_NAMED_GRAPHS)]
