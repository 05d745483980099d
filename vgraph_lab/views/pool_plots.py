"""The graph pool as a map: which capture took which segment, and what lives in it between replays."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from .style import COLOURS, INK

__all__ = ["pool_segments"]

_INCHES_PER_LETTER = 0.072  # at the size of the labels
_LOOKS: dict[str, dict[str, Any]] = {
    "output": {"facecolor": COLOURS["pool"], "edgecolor": "none"},
    "other": {"facecolor": COLOURS["difference"], "edgecolor": "none", "hatch": ".."},
    "shared": {"facecolor": COLOURS["pool"], "alpha": 0.22, "edgecolor": "none"},
}
_LABELS = {"output": "captured outputs", "other": "live, no graph's output", "shared": "shared by replays in turn"}


def pool_segments(segments: pd.DataFrame, *, ax: Axes) -> Axes:
    """The pool's segments end to end, in the order of the captures that took them; below each, the graph that did.

    Full colour is a captured output, which stays from replay to replay. Pale is memory that replays use in turn: graphs of
    one pool share it. A graph whose name does not fit below its segments is counted below the end.

    Args:
        segments: of :func:`~vgraph_lab.inspect.segments.segments_table`.
        ax: where to draw.
    """
    seen = segments.drop_duplicates("segment")
    starts = dict(zip(seen["segment"], seen["segment_mib"].cumsum() - seen["segment_mib"], strict=True))
    total = float(seen["segment_mib"].sum())
    kinds = dict.fromkeys(_LOOKS, 0.0)
    columns = ["segment", "offset_mib", "block_mib", "is_live", "held_by"]
    for number, offset, size, is_live, held_by in segments[columns].itertuples(index=False):
        kind = "shared" if not is_live else "output" if held_by else "other"
        kinds[kind] += size
        ax.add_patch(Rectangle((starts[number] + offset, 0), size, 1, **_LOOKS[kind]))
    for number, size in seen[["segment", "segment_mib"]].itertuples(index=False):
        ax.add_patch(Rectangle((starts[number], 0), size, 1, fill=False, edgecolor=INK, linewidth=0.8, gid="segment"))
    _name_makers(seen, total, ax)
    ax.set_xlim(0, total or 1)
    ax.set_ylim(-0.85, 1.05)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("MiB reserved by the pool, segment after segment, in the order of the captures that took them")
    ax.set_title(f"The pool: {len(seen)} segments, {_mib(total)} MiB")
    shown = [kind for kind, size in kinds.items() if size]
    if shown:
        handles, names = [Patch(**_LOOKS[kind]) for kind in shown], [f"{_LABELS[kind]}: {_mib(kinds[kind])} MiB" for kind in shown]
        ax.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=3, columnspacing=1.6, fontsize=8.5)
    return ax


def _name_makers(seen: pd.DataFrame, total: float, ax: Axes) -> None:
    """A bracket below the segments of each graph, with its name where there is room."""
    figure = ax.get_figure(root=True)
    inches = (figure.get_figwidth() if figure is not None else 8.0) * 0.95 / (total or 1)
    begin, unnamed = 0.0, 0
    for made_by, run in groupby(zip(seen["made_by"], seen["segment_mib"], strict=True), key=lambda segment: str(segment[0])):
        width = sum(float(size) for _, size in run)
        target, _, descriptor = made_by.partition(" ")
        name = f"{target.rpartition('.')[2]}\n{descriptor}" if made_by else "graphs that\nare gone"
        ax.plot([begin + 0.002 * total, begin + width - 0.002 * total], [-0.12, -0.12], color=INK, linewidth=1.4, solid_capstyle="butt")
        if max(map(len, name.splitlines())) * _INCHES_PER_LETTER <= width * inches:
            ax.text(begin + width / 2, -0.22, name, ha="center", va="top", fontsize=8, color=INK)
        else:
            unnamed += 1
        begin += width
    if unnamed:
        ax.text(total, -0.84, f"{unnamed} more, too narrow to name", ha="right", va="bottom", fontsize=8, color=INK)


def _mib(size: float) -> str:
    return f"{size:,.0f}" if size >= 100 else f"{size:.2f}".rstrip("0").rstrip(".")
