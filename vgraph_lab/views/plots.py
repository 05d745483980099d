"""Charts of the tables in :mod:`vgraph_lab.inspect`. Each takes data and an Axes, draws, and returns the Axes.

Use :func:`vgraph_lab.views.style.chart` to show one, or an Axes of your own inside :func:`vgraph_lab.views.style.look`.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from vgraph_lab.errors import FallbackReason

from .levels import Samples, difference_gain_db, difference_label, difference_track, peak
from .style import COLOURS, INK, REASON_COLOURS

__all__ = ["calls_by_frames", "calls_by_outcome", "calls_by_target", "frames_by_chunk", "memory_by_entry", "pool_growth", "waveforms"]

_MEMORY = (
    ("charge_mib", "charge", "charge: static buffers + growth of the pool", None),
    ("pool_delta_mib", "pool", "growth of the pool", "//"),
    ("device_delta_mib", "device", "device delta (other processes move it, too)", ".."),
)
_ENVELOPE_BINS = 640


def memory_by_entry(entries: pd.DataFrame, *, ax: Axes) -> Axes:
    """What each graph cost when it was captured: charge, pool growth and device delta side by side, in capture order.

    Args:
        entries: of :func:`~vgraph_lab.inspect.entries.entries_table`. Descriptors without a graph keep their place and
            show their reason.
        ax: where to draw.
    """
    places = np.arange(len(entries))
    captured = entries[entries["reason"] == ""]
    shown = [series for series in _MEMORY if captured.empty or captured[series[0]].notna().any()]  # the CPU has no device delta
    width = 0.8 / len(shown)
    for number, (column, colour, label, hatch) in enumerate(shown):
        heights = entries[column].to_numpy(dtype=float)
        bars = ax.bar(
            places + (number - (len(shown) - 1) / 2) * width,
            np.nan_to_num(heights),
            width * 0.92,
            label=label,
            color=COLOURS[colour],
            hatch=hatch,
            edgecolor="none",
        )
        ax.bar_label(bars, ["" if math.isnan(h) else _mib(h) for h in heights], padding=2, fontsize=8, color=INK)
    for place, reason in zip(places, entries["reason"], strict=True):
        if reason:
            ax.annotate(f"no graph:\n{reason}", (place, 0), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=8.5)
    several = entries["target"].nunique() > 1
    names = entries["target"].str.cat(entries["descriptor"], sep="\n") if several else entries["descriptor"]
    ax.set_xticks(places, [f"{place + 1}. {name}" for place, name in zip(places, names, strict=True)])
    ax.margins(y=0.18)
    ax.grid(axis="y")
    ax.set_ylabel("MiB")
    ax.set_xlabel("in capture order: graphs of one pool share memory, so each bar is what its graph added")
    ax.set_title("Memory per graph")
    if len(entries):
        ax.legend(loc="upper right")
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


def calls_by_outcome(coverage: pd.DataFrame, *, ax: Axes) -> Axes:
    """One bar per outcome and reason: how many calls, and their share of all.

    Args:
        coverage: of :func:`~vgraph_lab.inspect.coverage.coverage_table`.
        ax: where to draw.
    """
    totals = coverage["calls"].groupby(_category(coverage)).sum()
    totals = totals.reindex(_in_order(totals.index))
    bars = ax.barh(range(len(totals)), totals, 0.62, color=[_colour(name) for name in totals.index])
    for bar, name in zip(bars, totals.index, strict=True):
        bar.set_hatch("//" if name == "padded hit" else None)
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
    calls = coverage.assign(category=_category(coverage)).pivot_table("calls", "target", "category", aggfunc="sum", fill_value=0)
    places, left = np.arange(len(calls)), np.zeros(len(calls))
    for name in _in_order(calls.columns):
        widths = calls[name].to_numpy()
        hatch = "//" if name == "padded hit" else None
        bars = ax.barh(places, widths, 0.58, left=left, label=name, color=_colour(name), hatch=hatch, edgecolor="none")
        inside = ["" if not width else f"{width}" for width in widths]
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


def frames_by_chunk(life: pd.DataFrame, *, ax: Axes) -> Axes:
    """What each chunk of a request runs over: the reference, the kept frames once more, its own frames, and padding.

    Args:
        life: ``table`` of a :class:`~vgraph_lab.inspect.request_life.RequestLife`; chunks without frames are left out.
        ax: where to draw.
    """
    rows = life[life["samples"] > 0]
    begins = (rows["new_frames"].cumsum() - rows["new_frames"]).to_numpy()
    new, kept = (rows[name].to_numpy() for name in ("new_frames", "kept_before_frames"))
    reference = np.full(len(rows), int(life["ref_frames"].max()) if len(life) else 0)
    padding = np.where(rows["ref_frames"] > 0, 0, rows["padding_frames"])
    places = np.arange(len(rows))
    parts = (
        ("reference, run once and remembered", -reference, reference, {"color": INK, "alpha": 0.28}),
        ("kept frames, run again", begins - kept, kept, {"color": COLOURS["graph"], "alpha": 0.38}),
        ("new frames, spoken", begins, new, {"color": COLOURS["graph"]}),
        ("padding up to the graph", begins + new, padding, {"fill": False, "edgecolor": INK, "linestyle": (0, (2, 2))}),
    )
    for label, left, width, look in parts:
        there = width > 0
        if there.any():
            ax.barh(places[there], width[there], 0.66, left=left[there], label=label, **look)
    ax.set_yticks(places, [f"chunk {number}" for number in rows["chunk"]])
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(axis="x")
    ax.set_xlabel("codec frames of the request; its first new frame is 0")
    ax.set_title("What each chunk runs over")
    if len(rows):
        ax.legend(loc="upper center", bbox_to_anchor=(0.47, -0.22), ncols=4, columnspacing=1.2, handlelength=1.3, fontsize=8.5)
    return ax


def calls_by_frames(coverage: pd.DataFrame, *, ax: Axes) -> Axes:
    """Calls by the frames that they asked for, coloured by outcome; dashed lines are the captured sizes that served.

    Args:
        coverage: of :func:`~vgraph_lab.inspect.coverage.coverage_table`. Rows of a batch and Targets are added up.
        ax: where to draw.
    """
    calls = coverage.assign(category=_category(coverage)).pivot_table("calls", "frames", "category", aggfunc="sum", fill_value=0)
    bottom = np.zeros(len(calls))
    for name in _in_order(calls.columns):
        hatch = "//" if name == "padded hit" else None
        ax.bar(calls.index, calls[name], 0.8, bottom=bottom, label=name, color=_colour(name), hatch=hatch, edgecolor="none")
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


def _category(coverage: pd.DataFrame) -> pd.Series[str]:
    """Outcome, with the reason of a fallback or the exception of an error."""
    outcome = coverage["outcome"].astype(str)
    return outcome.where(coverage["reason"] == "", outcome.str.cat(coverage["reason"], sep=": "))


def _in_order(categories: pd.Index[str]) -> list[str]:
    first = ("exact hit", "padded hit", "fallback", "error")
    return sorted(categories, key=lambda name: (first.index(name.partition(":")[0]), name))


def _colour(category: str) -> str:
    outcome, _, reason = category.partition(": ")
    return REASON_COLOURS[FallbackReason(reason)] if outcome == "fallback" else COLOURS[outcome]


def waveforms(eager: Samples, graph: Samples, sample_rate: int, *, ax: Axes, names: tuple[str, str] = ("eager", "graph")) -> Axes:
    """Eager, graph and their difference below each other, on one time axis.

    Eager and graph share one scale, which their labels state. The difference is drawn as it is played, amplified by the
    dB in its label, with full scale as the height of its lane.

    Args:
        eager: waveform [samples], full scale ±1.
        graph: likewise, as long as ``eager``.
        sample_rate: in Hz.
        ax: where to draw.
        names: what the first two are called.

    Raises:
        InputError: see :func:`~vgraph_lab.views.levels.difference_track`.
    """
    reference, candidate, difference = difference_track(eager, graph)
    level = peak(difference)
    scale = _round_up(max(peak(reference), peak(candidate)))
    how = difference_label(level).replace(", ", "\n")
    lanes = [
        ("eager", f"{names[0]}\n±{scale:g}", reference / scale),
        ("graph", f"{names[1]}\n±{scale:g}", candidate / scale),
        ("difference", f"difference\n{how}", difference * 10 ** (difference_gain_db(level) / 20)),
    ]
    for lane, (colour, _, samples) in enumerate(lanes):
        time_s, low, high = _envelope(samples, sample_rate)
        ax.fill_between(time_s, low - 2.2 * lane, high - 2.2 * lane, color=COLOURS[colour], linewidth=0.5)
    ax.set_yticks([-2.2 * lane for lane in range(len(lanes))], [label for _, label, _ in lanes])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlim(0, len(reference) / sample_rate)
    ax.set_ylim(-2.2 * (len(lanes) - 1) - 1.1, 1.1)
    ax.set_xlabel("time (s)")
    return ax


def _round_up(level: float) -> float:
    """The next of … 0.1, 0.2, 0.5, 1, 2, 5 …; 1 for silence."""
    if level == 0:
        return 1.0
    decade = 10.0 ** math.floor(math.log10(level))
    return next(step * decade for step in (1, 2, 5, 10) if step * decade >= level)


def _envelope(samples: Samples, sample_rate: int) -> tuple[Samples, Samples, Samples]:
    """Lowest and highest sample of each of at most ``_ENVELOPE_BINS`` equal pieces, at their middle times in s."""
    edges = np.linspace(0, len(samples), min(_ENVELOPE_BINS, len(samples)) + 1).astype(int)
    low, high = np.minimum.reduceat(samples, edges[:-1]), np.maximum.reduceat(samples, edges[:-1])
    return (edges[:-1] + edges[1:]) / 2 / sample_rate, low, high
