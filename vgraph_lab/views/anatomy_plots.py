"""Charts of where the time of a chunk goes: by contender, by kind of work, by part of the decoder, and two graphs side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from .style import COLOURS, INK

__all__ = ["nodes_side_by_side", "steady_times", "time_by_kind", "time_by_part"]

_KINDS = {
    "convolution": "#2878c8",
    "matrix product": "#7a66d9",
    "own kernels": "#1d9a7f",
    "softmax/attention": "#a44cc4",
    "elementwise": "#d9730f",
    "copy": "#b27a00",
    "layout conversion": "#c2273d",
    "other": "#7d8590",
}
_SIDES = (COLOURS["eager"], COLOURS["graph"])
_BATCHES = ("#2878c8", "#d9730f", "#1d9a7f", "#7a66d9", "#d1416a")


def steady_times(times: pd.DataFrame, *, ax: Axes) -> Axes:
    """Milliseconds of a steady chunk, a line per contender and a mark per batch size, with p10 to p90; ticks are the floors.

    Args:
        times: of :func:`~vgraph_lab.bench.compare_frames.times_frame`.
        ax: where to draw; each contender wants about 0.4 inches of height.
    """
    contenders = list(dict.fromkeys(times["contender"]))
    place = {name: number for number, name in enumerate(contenders)}
    sizes = sorted(int(size) for size in times["batch_size"].unique())
    for number, size in enumerate(sizes):
        colour, rows = _BATCHES[number % len(_BATCHES)], times[times["batch_size"] == size]
        y = [place[name] for name in rows["contender"]]
        spread = np.clip(np.array([rows["steady_ms"] - rows["p10_ms"], rows["p90_ms"] - rows["steady_ms"]]), 0, None)
        ax.errorbar(rows["steady_ms"], y, xerr=spread, fmt="o", color=colour, markersize=6.5, elinewidth=1.6, gid=f"B={size}")
        ax.axvline(float(rows["floor_ms"].iloc[0]), color=colour, linewidth=1.4, linestyle=(0, (4, 2)), gid="floor")
        for at, ms in zip(y, rows["steady_ms"], strict=True):
            offset, side = ((0, -6), "top") if number % 2 else ((0, 6), "bottom")  # marks of neighbouring sizes may touch
            ax.annotate(_ms(ms), (ms, at), xytext=offset, textcoords="offset points", ha="center", va=side, fontsize=8, color=INK)
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_locator(LogLocator(10, subs="auto"))
    ax.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    ax.grid(axis="x")
    _lines(ax, contenders, room=0.65)
    ax.set_xlabel("ms of a steady chunk of every stream, logarithmic")
    ax.set_title("How long a chunk takes, and the least it can take")
    handles: list[Artist] = [
        Line2D([], [], color=_BATCHES[n % len(_BATCHES)], marker="o", linestyle="", label=_streams(size)) for n, size in enumerate(sizes)
    ]
    handles.append(Line2D([], [], color=INK, linewidth=1.4, linestyle=(0, (4, 2)), label="floor"))
    _legend(ax, handles)
    return ax


def time_by_kind(kinds: pd.DataFrame, *, ax: Axes) -> Axes:
    """What the time of a steady call goes into, a bar per contender.

    Args:
        kinds: of :func:`~vgraph_lab.bench.compare_frames.kinds_frame`.
        ax: where to draw; each contender wants about 0.4 inches of height.
    """
    contenders = list(dict.fromkeys(kinds["contender"]))
    ends = np.zeros(len(contenders))
    longest = float(kinds.groupby("contender")["total_ms"].sum().max()) if len(kinds) else 1.0
    shown = [kind for kind in _KINDS if (kinds["work"] == kind).any()]
    for kind in shown:
        rows = kinds[kinds["work"] == kind].set_index("contender")["total_ms"]
        widths = np.array([float(rows.get(name, 0.0)) for name in contenders])
        ax.barh(range(len(contenders)), widths, left=ends, height=0.62, color=_KINDS[kind], edgecolor="none", gid=kind)
        for at, (left, width) in enumerate(zip(ends, widths, strict=True)):
            if width > 0.06 * longest:
                ax.text(left + width / 2, at, _ms(width), ha="center", va="center", fontsize=8, color="#ffffff", weight="bold")
        ends = ends + widths
    for at, end in enumerate(ends):
        ax.annotate(_ms(end), (end, at), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
    ax.set_xlim(0, 1.08 * longest)
    ax.grid(axis="x")
    _lines(ax, contenders, room=0.5)
    ax.set_xlabel("ms of one call's kernels, in a trace")
    ax.set_title("What the time goes into")
    _legend(ax, [Patch(facecolor=_KINDS[kind], edgecolor="none", label=kind) for kind in shown])
    return ax


def time_by_part(parts: pd.DataFrame, *, ax: Axes) -> Axes:
    """Time by part of the decoder, a bar per eager contender, and the floor of each part as a tick.

    Args:
        parts: of :func:`~vgraph_lab.bench.compare_frames.parts_frame`.
        ax: where to draw; each part wants about 0.35 inches of height.
    """
    names, contenders = list(dict.fromkeys(parts["part"])), list(dict.fromkeys(parts["contender"]))
    height = 0.76 / max(1, len(contenders))
    for number, contender in enumerate(contenders):
        rows = parts[parts["contender"] == contender].set_index("part")["total_ms"]
        at = np.arange(len(names)) - 0.38 + height * (number + 0.5)
        ax.barh(at, [float(rows[name]) for name in names], height=0.9 * height, color=_SIDES[number % 2], edgecolor="none", gid=contender)
    floors = parts.drop_duplicates("part")["floor_ms"].to_numpy()
    places = np.arange(len(names))
    ax.vlines(floors, places - 0.42, places + 0.42, color=INK, linewidth=2.2, gid="floor")
    ax.grid(axis="x")
    _lines(ax, names, room=0.55)
    ax.set_xlim(left=0)
    ax.set_xlabel("ms of one eager call, in a trace")
    ax.set_title("Which part of the decoder takes it")
    handles: list[Artist] = [Patch(facecolor=_SIDES[n % 2], edgecolor="none", label=contender) for n, contender in enumerate(contenders)]
    _legend(ax, [*handles, Line2D([], [], color=INK, marker="|", linestyle="", markersize=11, markeredgewidth=2.2, label="floor")])
    return ax


def nodes_side_by_side(kinds: pd.DataFrame, *, ax: Axes) -> Axes:
    """Nodes of two graphs by kind of work.

    Args:
        kinds: of :attr:`~vgraph_lab.inspect.anatomy_diff.AnatomyDiff.kinds`.
        ax: where to draw; each kind wants about 0.4 inches of height.
    """
    names = list(kinds["work"])
    for number, side in enumerate(("a", "b")):
        counts = kinds[f"nodes_{side}"].to_numpy()
        at = np.arange(len(names)) + (number - 0.5) * 0.38
        ax.barh(at, counts, height=0.34, color=_SIDES[number], edgecolor="none", label=f"{side}: {counts.sum():,} nodes", gid=side)
        for place, count in zip(at, counts, strict=True):
            ax.annotate(f"{count:,}", (count, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
    ax.margins(x=0.08)
    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(axis="x")
    _lines(ax, names, room=0.6)
    ax.set_xlabel("nodes")
    ax.set_title("What two graphs consist of")
    _legend(ax, ax.get_legend_handles_labels()[0])
    return ax


def _lines(ax: Axes, names: list[str], *, room: float) -> None:
    """One line per name, the first on top."""
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(max(len(names), 1) - 1 + room, -room)


def _legend(ax: Axes, handles: Sequence[Artist]) -> None:
    figure = ax.get_figure(root=True)
    height = float(figure.get_figheight()) if figure is not None else 3.0
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.42, -0.6 / height), ncols=4, columnspacing=1.4, handlelength=1.2)


def _streams(count: int) -> str:
    return "1 stream" if count == 1 else f"{count} streams"


def _ms(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
