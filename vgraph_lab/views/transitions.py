"""The picture of a transition table: kept frames are nodes, chunks are edges, graphs are coloured lines.

One lane per mode. A request enters on the left and goes one edge to the right with each chunk; where the first chunk may
have several sizes, each has a line of its own. All lines end in the window's node, whose loop is every later chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path

from .style import COLOURS, INK, Chart, chart

__all__ = ["transition_chart", "transition_graph"]

_MODES = {"xvec": "x-vector: no reference", "icl": "ICL: behind a reference"}
_COLOUR = {True: COLOURS["graph"], False: INK}  # whether there is a graph
_LINE: dict[bool, Any] = {True: "-", False: (0, (2.2, 1.4))}
_NODE = (0.4, 0.4)  # width in columns, height in lines
_BEND = 0.26  # of a column: an edge changes its line within that much
_LANE_TOP, _LANE_BOTTOM = 0.95, 0.72  # lines left free above and below a lane's own
_LINE_INCHES, _MOST_COLUMNS = 0.62, 8


def transition_chart(table: pd.DataFrame) -> Chart:
    """The picture at a size that suits the table.

    Args:
        table: of :func:`~vgraph_lab.inspect.transitions.transition_table`.
    """
    lanes = _lanes(table)
    lines = sum(lane.lines + _LANE_TOP + _LANE_BOTTOM for lane in lanes)
    drawn = chart(transition_graph, table, size_in=(8.6, 0.75 + _LINE_INCHES * max(1, lines)))
    return Chart(drawn.figure, ". ".join(["Transitions of a streamed request", *(lane.in_words() for lane in lanes)]))


def transition_graph(table: pd.DataFrame, *, ax: Axes) -> Axes:
    """States and transitions, with the graphs that exist and the calls that were counted.

    Solid orange edges have graphs, dashed grey ones run eager; the wider an edge, the more calls took it. What all edges
    have in common is said once, in the legend; an edge says what is different about it. Transitions that are off the
    schedule are told in words.

    Args:
        table: of :func:`~vgraph_lab.inspect.transitions.transition_table`.
        ax: where to draw. :func:`transition_chart` chooses a size that fits.
    """
    lanes = _lanes(table)
    scheduled = table[table["is_scheduled"]]
    columns = max((place[0] for lane in lanes for place in lane.places.values()), default=1)
    style = _Style.of(scheduled, columns)
    top = 0.0
    for lane in lanes:
        lane.draw(ax, top - _LANE_TOP, columns, style)
        top -= lane.lines + _LANE_TOP + _LANE_BOTTOM
    ax.set_xlim(-0.35, columns + 0.75)
    ax.set_ylim(top + 0.2, 0)
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_visible(False)
    _legend(ax, scheduled, style)
    ax.set_title("Transitions of a streamed request")
    ax.set_xlabel(_caption(table[~table["is_scheduled"]]), fontsize=8.5)
    return ax


@dataclass(frozen=True)
class _Style:
    """Sizes of one picture, and what all its edges have in common."""

    scale: float
    common: tuple[int, ...] | None  # batch sizes of all captured edges; None if they differ
    most_calls: int
    shows_calls: bool  # in words, beside the width; not where there are too many columns

    @classmethod
    def of(cls, scheduled: pd.DataFrame, columns: int) -> _Style:
        found = {sizes for sizes in scheduled["captured_batch_sizes"] if sizes}
        calls = scheduled["hits"] + scheduled["misses"] + scheduled["errors"]
        scale = min(1.0, _MOST_COLUMNS / max(1, columns)) ** 0.5
        return cls(scale, found.pop() if len(found) == 1 else None, int(calls.max()) if len(calls) else 0, columns <= _MOST_COLUMNS + 3)

    def width(self, calls: int) -> float:
        share = math.log1p(calls) / math.log1p(self.most_calls) if self.most_calls else 0.0
        return (1.4 + 2.6 * share) * self.scale


@dataclass(frozen=True)
class _Lane:
    """One mode: where its states are, as (column, line), and its transitions."""

    mode: str
    rows: list[Any]
    window: int
    places: dict[int, tuple[int, int]]

    @property
    def lines(self) -> int:
        return max((line for _, line in self.places.values()), default=0)

    def in_words(self) -> str:
        """For people who cannot see the picture."""
        steps = ", ".join(
            f"{row.kept_frames} to {row.after_frames}" + ("" if row.captured_batch_sizes else " (no graph)") for row in self.rows
        )
        return f"{_MODES[self.mode]}: {steps}"

    def draw(self, ax: Axes, top: float, columns: int, style: _Style) -> None:
        """Edges first, nodes on top of them; the start and the window in the middle of the lane's lines."""
        middle = top - self.lines / 2
        at = {state: (float(column), top - line) for state, (column, line) in self.places.items()}
        at[0], at[self.window] = (0.0, middle), (float(columns), middle)
        ax.annotate(_MODES[self.mode], (0, top), xytext=(-9, 22), textcoords="offset points", fontsize=9.5, weight="bold", va="bottom")
        for row in self.rows:
            target = at[min(row.after_frames, self.window)]
            if row.is_rolling:
                _loop(ax, target, row, style)
            else:
                # An edge runs on its own line: that of the state it leads to, unless that is the window's, which all share.
                line = target[1] if row.after_frames < self.window else top - self._line_of(row.kept_frames, row.new_frames)
                _edge(ax, at[row.kept_frames], target, line, row, style)
        for state, place in at.items():
            _node(ax, place, state, style, is_window=state == self.window)

    def _line_of(self, kept: int, new: int) -> int:
        if kept:
            return self.places[kept][1]
        firsts = sorted(row.new_frames for row in self.rows if row.kept_frames == 0)
        return firsts.index(new)


def _lanes(table: pd.DataFrame) -> list[_Lane]:
    """Each mode's states: columns count chunks since the start, lines tell first chunks apart."""
    lanes = []
    for mode in _MODES:
        rows: list[Any] = list(table[table["is_scheduled"] & (table["mode"] == mode)].itertuples(index=False))
        if not rows:
            continue
        window = next(row.kept_frames for row in rows if row.is_rolling)
        after = {row.kept_frames: row for row in rows if row.kept_frames}
        places: dict[int, tuple[int, int]] = {}
        for line, first in enumerate(sorted(row.after_frames for row in rows if row.kept_frames == 0)):
            state, column = first, 1
            while state < window:
                known_column, known_line = places.get(state, (0, line))
                places[state] = (max(column, known_column), known_line)
                state, column = after[state].after_frames, column + 1
            places[window] = (max(column, places.get(window, (0, 0))[0]), line)
        lanes.append(_Lane(mode, rows, window, places))
    return lanes


def _edge(ax: Axes, source: tuple[float, float], target: tuple[float, float], line: float, row: Any, style: _Style) -> None:
    """Out of one node to the right, along the edge's own line, into the next from the left."""
    (x0, y0), (x1, y1) = (source[0] + _NODE[0] / 2, source[1]), (target[0] - _NODE[0] / 2, target[1])
    vertices, codes = [(x0, y0)], [Path.MOVETO]

    def bend_to(x: float, y: float) -> None:
        from_x, from_y = vertices[-1]
        half = (from_x + x) / 2
        vertices.extend([(half, from_y), (half, y), (x, y)])
        codes.extend([Path.CURVE4] * 3)

    enter, leave = (x0 + _BEND if y0 != line else x0), (x1 - _BEND if y1 != line else x1)
    if y0 != line:
        bend_to(enter, line)
    vertices.append((leave, line))
    codes.append(Path.LINETO)
    if y1 != line:
        bend_to(x1, y1)
    _arrow(ax, Path(vertices, codes), row, style)
    _words(ax, ((enter + leave) / 2, line), row, style)


def _loop(ax: Axes, at: tuple[float, float], row: Any, style: _Style) -> None:
    x, y = at[0] + _NODE[0] / 2, at[1]
    vertices = [(x, y + 0.09), (x + 0.42, y + 0.62), (x + 0.42, y - 0.62), (x, y - 0.09)]
    _arrow(ax, Path(vertices, [Path.MOVETO, *[Path.CURVE4] * 3]), row, style)
    _words(ax, (x + 0.34, y), row, style, beside=True)


def _arrow(ax: Axes, path: Path, row: Any, style: _Style) -> None:
    captured = bool(row.captured_batch_sizes)
    width = style.width(row.hits + row.misses + row.errors)
    ax.add_patch(
        FancyArrowPatch(
            path=path,
            arrowstyle=f"-|>,head_length={(3 + width) * style.scale},head_width={(1.4 + 0.55 * width) * style.scale}",
            mutation_scale=1,
            linewidth=width,
            linestyle=_LINE[captured],
            color=_COLOUR[captured],
            capstyle="butt",
            joinstyle="miter",
            zorder=2 if captured else 1,
        )
    )


def _words(ax: Axes, at: tuple[float, float], row: Any, style: _Style, *, beside: bool = False) -> None:
    """New frames above the edge; below it graphs, where they differ from the legend's, and calls."""
    size = 9 * style.scale
    new, rest = f"+{row.new_frames}", _facts(row, style)
    if beside:
        ax.annotate(
            new,
            at,
            xytext=(4, 2 if rest else 0),
            textcoords="offset points",
            fontsize=size,
            weight="bold",
            va="bottom" if rest else "center",
        )
        ax.annotate(rest, at, xytext=(4, -1), textcoords="offset points", fontsize=size * 0.9, va="top")
    else:
        ax.annotate(new, at, xytext=(0, 3.5), textcoords="offset points", fontsize=size, ha="center", va="bottom", weight="bold")
        ax.annotate(rest, at, xytext=(0, -4.5), textcoords="offset points", fontsize=size * 0.9, ha="center", va="top")


def _facts(row: Any, style: _Style) -> str:
    lines = []
    if row.captured_batch_sizes and style.common is None:
        lines.append(f"B {', '.join(map(str, row.captured_batch_sizes))}")
    if not style.shows_calls:
        return "".join(lines)
    if row.hits:
        lines.append(f"{row.hits} hit" + ("" if row.hits == 1 else "s"))
    lines += [f"{calls} {name}" for calls, name in ((row.misses, "eager"), (row.errors, "failed")) if calls]
    return "\n".join(lines)


def _node(ax: Axes, at: tuple[float, float], state: int, style: _Style, *, is_window: bool) -> None:
    width, height = _NODE[0], _NODE[1] * style.scale
    ax.add_patch(
        FancyBboxPatch(
            (at[0] - width / 2, at[1] - height / 2),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.11",
            mutation_aspect=1.9,
            facecolor="none",
            edgecolor=INK,
            linewidth=2.6 * style.scale if is_window else 1.1,
            zorder=3,
        )
    )
    ax.annotate(
        str(state) if state else "start", at, fontsize=(9.5 if state else 8) * style.scale, ha="center", va="center_baseline", zorder=4
    )


def _legend(ax: Axes, scheduled: pd.DataFrame, style: _Style) -> None:
    shown = {bool(sizes) for sizes in scheduled["captured_batch_sizes"]}
    sizes = "" if style.common is None else f" for batch sizes {', '.join(map(str, style.common))}"
    labels = {True: f"has graphs{sizes or '; B: their batch sizes'}", False: "no graph: runs eager"}
    handles = [
        Line2D([], [], color=_COLOUR[kind], linestyle=_LINE[kind], linewidth=2.2, label=labels[kind])
        for kind in (True, False)
        if kind in shown
    ]
    ax.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.2, handlelength=2.6)


def _caption(others: pd.DataFrame) -> str:
    caption = "in boxes: frames kept, up to the window (bold); on edges: new frames of a chunk, and calls once there are any"
    if others.empty:
        return caption
    calls = int((others["hits"] + others["misses"] + others["errors"]).sum())
    return f"{caption}\noff the schedule: {calls} calls, {int(others['misses'].sum())} of them eager"
