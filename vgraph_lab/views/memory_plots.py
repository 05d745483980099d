"""Charts of what graphs cost: per graph, as growth of the pool, against the estimate, and as part of the device's memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from .style import COLOURS, INK

__all__ = ["estimate_against_measured", "memory_by_entry", "memory_ledger", "pool_growth"]

_MEMORY = (
    ("charge_mib", "charge", "charge: static buffers + growth of the pool", None),
    ("pool_delta_mib", "pool", "growth of the pool", "//"),
    ("device_delta_mib", "device", "device delta (other processes move it, too)", ".."),
)
_LEDGER: dict[str, dict[str, Any]] = {
    "weights": {"facecolor": COLOURS["exact hit"], "edgecolor": "none"},
    "state": {"facecolor": COLOURS["padded hit"], "edgecolor": "none"},
    "static buffers": {"facecolor": COLOURS["difference"], "edgecolor": "none", "hatch": ".."},
    "pool": {"facecolor": COLOURS["pool"], "edgecolor": "none", "hatch": "//"},
    "other": {"facecolor": INK, "alpha": 0.4, "edgecolor": "none"},
    "free": {"fill": False, "edgecolor": INK, "linestyle": (0, (2, 2)), "linewidth": 0.9},
}
_OWN_PARTS = ("weights", "state", "static buffers", "pool")
_MOST_UPRIGHT_BARS = 6  # beyond that their names would collide, and they lie


def memory_by_entry(entries: pd.DataFrame, *, ax: Axes) -> Axes:
    """What each graph cost when it was captured: charge, pool growth and device delta side by side, in capture order.

    Up to six stand upright; more of them lie below each other, and want about 0.45 inches of height each.

    Args:
        entries: of :func:`~vgraph_lab.inspect.entries.entries_table`. Descriptors without a graph keep their place and
            show their reason.
        ax: where to draw.
    """
    lies = len(entries) > _MOST_UPRIGHT_BARS
    places = np.arange(len(entries))
    captured = entries[entries["reason"] == ""]
    shown = [series for series in _MEMORY if captured.empty or captured[series[0]].notna().any()]  # the CPU has no device delta
    width = 0.8 / len(shown)
    for number, (column, colour, label, hatch) in enumerate(shown):
        sizes = entries[column].to_numpy(dtype=float)
        at, drawn = places + (number - (len(shown) - 1) / 2) * width, np.nan_to_num(sizes)
        look: dict[str, Any] = {"label": label, "color": COLOURS[colour], "hatch": hatch, "edgecolor": "none"}
        bars = ax.barh(at, drawn, width * 0.92, **look) if lies else ax.bar(at, drawn, width * 0.92, **look)
        ax.bar_label(bars, ["" if math.isnan(size) else _mib(size) for size in sizes], padding=2, fontsize=7 if lies else 8, color=INK)
    for place, reason in zip(places, entries["reason"], strict=True):
        if reason and lies:
            ax.annotate(f"no graph: {reason}", (0, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
        elif reason:
            ax.annotate(f"no graph:\n{reason}", (place, 0), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8.5)
    several = entries["target"].nunique() > 1
    gap = "  " if lies else "\n"
    targets = [target.rpartition(".")[2] + gap if several else "" for target in entries["target"]]
    labels = [f"{place + 1}. {target}{shape}" for place, target, shape in zip(places, targets, entries["descriptor"], strict=True)]
    order = "in capture order: graphs of one pool share memory, so each bar is what its graph added"
    if lies:
        ax.set_yticks(places, labels, fontsize=8)
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
        ax.margins(x=0.12, y=0.01)
        ax.grid(axis="x")
        ax.set_xlabel(f"MiB, {order}")
    else:
        ax.set_xticks(places, labels)
        ax.margins(y=0.18)
        ax.grid(axis="y")
        ax.set_ylabel("MiB")
        ax.set_xlabel(order)
    ax.set_title("Memory per graph")
    if len(entries):
        ax.legend(loc="lower right" if lies else "upper right")
    return ax


def pool_growth(entries: pd.DataFrame, *, ax: Axes) -> Axes:
    """How the pool grew with each capture, for many graphs: one line per graph, in capture order from the top.

    Args:
        entries: of :func:`~vgraph_lab.inspect.entries.entries_table`. Descriptors without a graph show their reason.
        ax: where to draw.
    """
    places = np.arange(len(entries))
    before, after = (entries[name].to_numpy(dtype=float) for name in ("pool_before_mib", "pool_after_mib"))
    shared = np.nan_to_num(before)
    ax.barh(places, shared, 0.62, color=INK, alpha=0.22, label="held by the pool before")
    ax.barh(places, np.nan_to_num(after - before), 0.62, left=shared, color=COLOURS["pool"], label="added by this graph")
    most = float(np.nanmax(after, initial=0.0))
    for place, reason, end, added in zip(places, entries["reason"], np.nan_to_num(after), after - before, strict=True):
        words = f"no graph: {reason}" if reason else f"+{_mib(added)}" if added else ""
        ax.annotate(words, (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    names = [f"{target.rpartition('.')[2]}  {shape}" for target, shape in zip(entries["target"], entries["descriptor"], strict=True)]
    ax.set_yticks(places, names, fontsize=8)
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.set_xlim(0, (most or 1) * 1.12)
    ax.grid(axis="x")
    ax.set_xlabel("MiB held by the pool, in capture order: later graphs fit into what earlier ones brought")
    ax.set_title("Memory per graph")
    if len(entries):
        ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.2)
    return ax


def _mib(value: float) -> str:
    if value != 0 and abs(value) < 0.01:
        return "< 0.01" if value > 0 else "> −0.01"
    digits = f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.2f}".rstrip("0").rstrip(".")
    return digits.replace("-", "−")


def estimate_against_measured(estimates: pd.DataFrame, *, ax: Axes) -> Axes:
    """The memory profile beside the capture: one line per graph in capture order, and the totals in the title.

    Args:
        estimates: of :func:`~vgraph_lab.inspect.ledger.estimate_table`.
        ax: where to draw; each graph wants about 0.25 inches of height.
    """
    graphs, total = estimates[estimates["target"] != ""], estimates[estimates["target"] == ""]
    places = np.arange(len(graphs))
    estimated, measured = (graphs[name].to_numpy(dtype=float) for name in ("estimated_mib", "measured_mib"))
    ax.hlines(places, np.fmin(estimated, measured), np.fmax(estimated, measured), color=INK, linewidth=1.2, zorder=1)
    ax.plot(estimated, places, "o", markersize=9, markerfacecolor="none", markeredgecolor=COLOURS["eager"], markeredgewidth=1.6)
    ax.plot(measured, places, "D", markersize=4.5, color=COLOURS["graph"], zorder=3)
    for place, low, high in zip(places, estimated, measured, strict=True):
        end = np.nanmax([low, high])
        if math.isnan(low) or math.isnan(high):
            words = "not estimated" if math.isnan(low) else "not captured"
        else:
            words = "" if abs(low - high) < 0.01 else f"{'+' if low > high else ''}{_mib(low - high)}"
        ax.annotate(words, (end, place), xytext=(8, 0), textcoords="offset points", va="center", fontsize=8)
    names = [f"{target.rpartition('.')[2]}  {shape}" for target, shape in zip(graphs["target"], graphs["descriptor"], strict=True)]
    ax.set_yticks(places, names, fontsize=8)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(graphs) - 0.4, -0.6)
    ax.set_xlim(0, max(np.nanmax([*estimated, *measured, 0.0]) * 1.15, 0.01))
    ax.grid(axis="x")
    ax.set_xlabel("MiB that a graph added, in capture order; the number beside it is how much too high the estimate was")
    totals = [_total(*row) for row in total[["estimated_mib", "measured_mib"]].itertuples(index=False)]
    ax.set_title(totals[0] if totals else "Estimated and measured")
    handles = [
        Line2D(
            [], [], linestyle="", marker="o", markersize=9, markerfacecolor="none", markeredgecolor=COLOURS["eager"], markeredgewidth=1.6
        ),
        Line2D([], [], linestyle="", marker="D", markersize=4.5, color=COLOURS["graph"]),
    ]
    ax.legend(handles, ["estimated", "measured"], loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.2)
    return ax


def _total(estimated: float, measured: float) -> str:
    error = f" ({(estimated - measured) / measured:+.1%})".replace("-", "−") if measured else ""
    return f"Estimated {_mib(estimated)} MiB, measured {_mib(measured)} MiB{error}"


def memory_ledger(ledger: pd.DataFrame, *, ax: Axes) -> Axes:
    """The device's memory as one stacked bar, before the capture and now; and the model's and graphs' own part, magnified.

    Args:
        ledger: of :func:`~vgraph_lab.inspect.ledger.ledger_table`.
        ax: where to draw.
    """
    before, now = (
        {str(part): float(size) for part, size in zip(ledger["part"], ledger[name], strict=True)} for name in ("before_mib", "now_mib")
    )
    has_before, total = not math.isnan(before["total"]), now["total"]
    unit, scale = ("GiB", 1024.0) if total >= 10 * 1024 else ("MiB", 1.0)
    rows: list[tuple[str, dict[str, float], float, Iterable[str]]] = [("now", now, 1.0, _LEDGER)]
    if has_before:
        rows.insert(0, ("before capture", before, 1.0, _LEDGER))
    own = sum(now[part] for part in _OWN_PARTS)
    if 0 < own < 0.3 * total:
        factor = _round_down(0.8 * total / own)
        rows.append((f"now, model and\ngraphs × {factor:,.0f}", now, factor, _OWN_PARTS))
    for place, (_, sizes, factor, parts) in enumerate(rows):
        left = 0.0
        for part in parts:
            width = sizes[part] * factor / scale
            if width > 0:
                ax.add_patch(Rectangle((left, place - 0.3), width, 0.6, label=part, **_LEDGER[part]))
            left += width
    ax.set_yticks(range(len(rows)), [name for name, *_ in rows])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(0, total / scale * 1.01)
    ax.grid(axis="x")
    ax.set_xlabel(f"{unit} of the device's memory" + (" (the magnified row is not to this scale)" if len(rows) > 1 + has_before else ""))
    ax.set_title("Where the memory is")
    labels = [_part(part, before[part], now[part]) for part in _LEDGER]
    handles = [Patch(**look) for look in _LEDGER.values()]
    ax.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.44, -0.3), ncols=3, columnspacing=1.6, handlelength=1.6, fontsize=8.5)
    return ax


def _part(name: str, before: float, now: float) -> str:
    """A part with its size; with the one before, too, if they differ in print."""
    if math.isnan(before) or _mib(before) == _mib(now):
        return f"{name}: {_mib(now)} MiB"
    return f"{name}: {_mib(before)} → {_mib(now)} MiB"


def _round_down(value: float) -> float:
    """The last of … 1, 2, 5, 10 … that is not above a value from 1."""
    decade = 10.0 ** math.floor(math.log10(value))
    return next(step * decade for step in (5, 2, 1) if step * decade <= value)
