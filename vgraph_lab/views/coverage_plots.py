"""Charts of what became of calls: by outcome, by Target, by frames, and by shape."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from .outcomes import categories, colour_of, hatch_of, in_order
from .style import INK

__all__ = ["calls_by_frames", "calls_by_outcome", "calls_by_target", "coverage_map", "hits_over_time"]

_MOST_NUMBERED_COLUMNS = 16
_LEAST_SLICE = 0.1  # of a cell, so that a single fallback among many hits is seen


def calls_by_outcome(coverage: pd.DataFrame, *, ax: Axes) -> Axes:
    """One bar per outcome and reason: how many calls, and their share of all.

    Args:
        coverage: of :func:`~vgraph_lab.inspect.coverage.coverage_table`.
        ax: where to draw.
    """
    totals = coverage["calls"].groupby(categories(coverage)).sum()
    totals = totals.reindex(in_order(totals.index))
    bars = ax.barh(range(len(totals)), totals, 0.62, color=[colour_of(name) for name in totals.index])
    for bar, name in zip(bars, totals.index, strict=True):
        bar.set_hatch(hatch_of(name))
        bar.set_edgecolor("none")
    everything = max(1, int(totals.sum()))
    ax.bar_label(bars, [f"{calls} of {everything} ({calls / everything:.0%})" for calls in totals], padding=4, fontsize=9, color=INK)
    ax.set_yticks(range(len(totals)), [name.replace("fallback: ", "fallback:\n") for name in totals.index])
    ax.invert_yaxis()
    ax.set_xlim(0, max(1, totals.max() if len(totals) else 1) * 1.25)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(axis="x")
    ax.set_xlabel("calls")
    ax.set_title("What became of the calls")
    return ax


def calls_by_target(coverage: pd.DataFrame, *, ax: Axes) -> Axes:
    """One bar per Target, made of its outcomes: hits, and fallbacks by reason.

    Args:
        coverage: of :func:`~vgraph_lab.inspect.coverage.coverage_table`.
        ax: where to draw.
    """
    calls = coverage.assign(category=categories(coverage)).pivot_table("calls", "target", "category", aggfunc="sum", fill_value=0)
    places, left = np.arange(len(calls)), np.zeros(len(calls))
    most = calls.sum(axis=1).max() if len(calls) else 0  # a number that is wider than its piece would be cut
    for name in in_order(calls.columns):
        widths = calls[name].to_numpy()
        bars = ax.barh(places, widths, 0.58, left=left, label=name, color=colour_of(name), hatch=hatch_of(name), edgecolor="none")
        inside = [f"{width}" if width > 0.014 * len(f"{width}") * most else "" for width in widths]
        ax.bar_label(bars, inside, label_type="center", fontsize=8.5, color="#ffffff", weight="bold")
        left += widths
    hits = sum((calls[name] for name in calls.columns if "hit" in name), start=pd.Series(0, index=calls.index))
    for place, total, hit in zip(places, left, hits, strict=True):
        words = f"{hit} of {total:.0f} in graphs"
        ax.annotate(words, (total, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5)
    ax.set_yticks(places, calls.index)
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.set_xlim(0, max(1.0, float(left.max(initial=0))) * 1.25)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(axis="x")
    ax.set_xlabel("calls")
    ax.set_title("Coverage per Target")
    if len(calls):
        ax.legend(loc="upper center", bbox_to_anchor=(0.4, -0.32), ncols=4, columnspacing=1.2, handlelength=1.3, fontsize=8.5)
    return ax


def calls_by_frames(coverage: pd.DataFrame, *, ax: Axes) -> Axes:
    """Calls by the frames that they asked for, coloured by outcome; dashed lines are the captured sizes that served.

    Args:
        coverage: of :func:`~vgraph_lab.inspect.coverage.coverage_table`. Rows of a batch and Targets are added up.
        ax: where to draw.
    """
    calls = coverage.assign(category=categories(coverage)).pivot_table("calls", "frames", "category", aggfunc="sum", fill_value=0)
    bottom = np.zeros(len(calls))
    for name in in_order(calls.columns):
        ax.bar(calls.index, calls[name], 0.8, bottom=bottom, label=name, color=colour_of(name), hatch=hatch_of(name), edgecolor="none")
        bottom += calls[name].to_numpy()
    for number, frames in enumerate(sorted(coverage["captured_frames"].dropna().unique())):
        ax.axvline(frames, color=INK, linestyle="--", linewidth=1, label="" if number else "captured size")
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(axis="y")
    ax.set_ylabel("calls")
    ax.set_xlabel("codec frames asked for")
    ax.set_title("Which sizes were asked for")
    if len(calls):
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def coverage_map(coverage: pd.DataFrame, entries: pd.DataFrame | None = None, *, ax: Axes) -> Axes:
    """Calls by rows and frames: each cell is divided among what became of its calls, and the stronger it is, the more there were.

    A slice is never narrower than a tenth of its cell, so that a single fallback among many hits is seen. Targets are added
    up; pass the rows of one to look at one. Calls of which a log does not tell the shape are counted in the title.

    Args:
        coverage: of :func:`~vgraph_lab.inspect.coverage.coverage_table`.
        entries: of :func:`~vgraph_lab.inspect.entries.entries_table`: outline every graph; otherwise those that were used.
        ax: where to draw.
    """
    unknown = int(coverage.loc[coverage[["batch_size", "frames"]].isna().any(axis=1), "calls"].sum())
    coverage = coverage.dropna(subset=["batch_size", "frames"])
    if entries is None:
        graphs = coverage[["captured_batch_size", "captured_frames"]].dropna()
    else:
        graphs = entries.loc[entries["reason"] == "", ["batch_size", "frames"]]
    captured = {(int(rows), int(frames)) for rows, frames in graphs.itertuples(index=False)}
    batches, columns = (
        sorted({*coverage[name], *(shape[axis] for shape in captured)}) for axis, name in enumerate(("batch_size", "frames"))
    )
    x, y = {frames: i for i, frames in enumerate(columns)}, {rows: i for i, rows in enumerate(batches)}
    cells: dict[tuple[int, int], Counter[str]] = {}
    for rows, frames, name, count in zip(coverage["batch_size"], coverage["frames"], categories(coverage), coverage["calls"], strict=True):
        cells.setdefault((rows, frames), Counter())[name] += count
    most = max((of_cell.total() for of_cell in cells.values()), default=1)
    for (rows, frames), of_cell in sorted(cells.items()):
        left, count = x[frames] - 0.46, of_cell.total()
        names = in_order(of_cell)
        for name, width in zip(names, _slices([of_cell[name] for name in names]), strict=True):
            strength = 0.3 + 0.7 * math.log1p(count) / math.log1p(most)
            look: dict[str, Any] = {"facecolor": colour_of(name), "alpha": strength, "hatch": hatch_of(name), "edgecolor": "none"}
            ax.add_patch(Rectangle((left, y[rows] - 0.43), 0.92 * width, 0.86, **look))
            left += 0.92 * width
        if len(columns) <= _MOST_NUMBERED_COLUMNS:
            ax.annotate(_short_count(count), (x[frames], y[rows]), ha="center", va="center", fontsize=8.5, weight="bold", color=INK)
    for rows, frames in sorted(captured):
        ax.add_patch(Rectangle((x[frames] - 0.48, y[rows] - 0.46), 0.96, 0.92, fill=False, edgecolor=INK, linewidth=1.6))
    every = -(-len(columns) // _MOST_NUMBERED_COLUMNS) or 1
    ax.set_xticks(range(0, len(columns), every), [str(frames) for frames in columns[::every]])
    ax.set_yticks(range(len(batches)), [str(rows) for rows in batches])
    ax.set_xlim(-0.6, max(len(columns), 1) - 0.4)
    ax.set_ylim(-0.6, max(len(batches), 1) - 0.4)
    ax.tick_params(length=0)
    ax.set_xlabel("codec frames asked for, each size that occurred")
    ax.set_ylabel("rows asked for")
    ax.set_title("Calls by shape" + (f" ({unknown:,} more without a shape)" if unknown else ""))
    found = in_order({name for of_cell in cells.values() for name in of_cell})
    handles = [Patch(facecolor=colour_of(name), hatch=hatch_of(name), edgecolor="none", label=name) for name in found]
    if captured:
        which = "a graph that served" if entries is None else "a graph"
        handles.append(Patch(fill=False, edgecolor=INK, linewidth=1.6, label=which))
    if handles:
        ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def hits_over_time(timeline: pd.DataFrame, *, ax: Axes) -> Axes:
    """Calls per second over time, interval by interval, divided among what became of them; the title says how many hit.

    Args:
        timeline: of :func:`~vgraph_lab.inspect.timeline.timeline_table`. Targets are added up; pass the rows of one to look at one.
        ax: where to draw.
    """
    rows = timeline.assign(category=categories(timeline))
    rows = rows[rows["end_s"] > rows["start_s"]]  # two readings at one moment have no rate
    scale, unit = (60.0, "min") if len(rows) and rows["end_s"].max() > 300 else (1.0, "s")
    calls = rows.pivot_table("calls", ["start_s", "end_s"], "category", aggfunc="sum", fill_value=0)
    begins, ends = (calls.index.get_level_values(name).to_numpy(dtype=float) for name in ("start_s", "end_s"))
    bottom = np.zeros(len(calls))
    for name in in_order(calls.columns):
        rate = calls[name].to_numpy() / (ends - begins)
        look: dict[str, Any] = {"color": colour_of(name), "hatch": hatch_of(name), "edgecolor": "none", "linewidth": 0}
        ax.bar(begins / scale, rate, (ends - begins) / scale, bottom=bottom, align="edge", label=name, **look)
        bottom += rate
    total = int(timeline["calls"].sum())
    hits = int(timeline.loc[timeline["outcome"].astype(str).str.endswith("hit"), "calls"].sum())
    ax.margins(x=0)
    ax.grid(axis="y")
    ax.set_xlabel(f"time ({unit})")
    ax.set_ylabel("calls per second")
    ax.set_title(f"Hits and fallbacks over time: {hits:,} of {total:,} calls in graphs ({hits / total:.0%})" if total else "No calls")
    if len(calls):
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def _slices(counts: list[int]) -> list[float]:
    """Shares of a cell, none below the least width that is seen."""
    shares = [max(count / sum(counts), min(_LEAST_SLICE, 1 / len(counts))) for count in counts]
    return [share / sum(shares) for share in shares]


def _short_count(count: int) -> str:
    """At most four characters: 999, 1.2k, 12k, 3.4M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if count >= size:
            value = count / size
            return f"{value:.1f}{letter}" if value < 9.95 else f"{value:.0f}{letter}"
    return str(count)
