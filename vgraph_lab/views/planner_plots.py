"""The chart of a plan: what each set of capture sizes covers, and what it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.ticker import MaxNLocator

from vgraph_lab.graphs.table import MIB
from vgraph_lab.inspect.planner import PlanPoint

from .style import COLOURS, INK

__all__ = ["pareto_front"]

_SAVINGS = LinearSegmentedColormap.from_list("vgraph_lab.savings", [INK, COLOURS["graph"]])  # as light at one end as at the other


def pareto_front(front: pd.DataFrame, proposed: PlanPoint | None = None, current: PlanPoint | None = None, *, ax: Axes) -> Axes:
    """Calls in graphs against memory: one dot per set of capture sizes that nothing beats, and the best coverage for each MiB.

    The stronger a dot's colour, the more time its graphs save; the scale beside the chart says how much. Without differences in
    time saved, there is no scale. Dots below the line are there because they save more time, or are captured sooner.

    Args:
        front: ``front`` of a :class:`~vgraph_lab.inspect.planner.Plan`.
        proposed: what :meth:`~vgraph_lab.inspect.planner.Plan.recommend` returned.
        current: the present settings, as :meth:`~vgraph_lab.inspect.planner.Plan.evaluate` told their worth; they may be beaten.
        ax: where to draw.
    """
    table = front.sort_values(["charge_bytes", "coverage"], kind="stable")
    mib, covered = table["charge_bytes"].to_numpy() / MIB, 100 * table["coverage"].to_numpy()
    marked: list[tuple[Mapping[str, Any], str, dict[str, Any]]] = [
        (point.figures, name, look)
        for point, name, look in (
            (current, "current", {"marker": "s", "edgecolors": COLOURS["eager"]}),
            (proposed, "proposed", {"marker": "o", "edgecolors": COLOURS["padded hit"]}),
        )
        if point is not None
    ]
    right = max([1e-3, *mib, *(f["charge_bytes"] / MIB for f, _, _ in marked)])
    best = np.maximum.accumulate(covered) if len(covered) else covered
    steps = (np.append(mib, 1.04 * right), np.append(best, best[-1:])) if len(mib) else (mib, best)
    ax.plot(*steps, drawstyle="steps-post", color=INK, linewidth=1, label="best for the memory")
    _dots(table, mib, covered, ax)
    for figures, name, look in marked:
        place = (figures["charge_bytes"] / MIB, 100 * figures["coverage"])
        ax.scatter(*place, s=130, facecolors="none", linewidths=2.2, zorder=4, label=f"{name}: {_sizes(figures)}", **look)
    ax.set_xlim(-0.03 * right, 1.04 * right)
    ax.set_ylim(-4, 104)
    ax.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    ax.grid(axis="both")
    ax.set_xlabel("static buffers and pool (MiB)")
    ax.set_ylabel("calls in graphs (%)")
    ax.set_title("What coverage costs")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, columnspacing=1.4, handlelength=1.4, fontsize=8.5)
    return ax


def _dots(table: pd.DataFrame, mib: np.ndarray[Any, Any], covered: np.ndarray[Any, Any], ax: Axes) -> None:
    saved = 100 * table["saved_share"].to_numpy(dtype="float64")
    if not np.ptp(saved if len(saved) else [0.0]) > 0:  # missing figures differ from none
        ax.scatter(mib, covered, s=34, color=COLOURS["graph"], zorder=3)
        return
    dots = ax.scatter(mib, covered, s=34, c=saved, cmap=_SAVINGS, norm=Normalize(saved.min(), saved.max()), zorder=3)
    bar = ax.figure.colorbar(dots, ax=ax, aspect=14, pad=0.02, label="time saved against eager (%)")
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)
    bar.locator = MaxNLocator(5)
    bar.update_ticks()


def _sizes(figures: Mapping[str, Any]) -> str:
    """What a set of sizes captures, in a few words."""
    graphs, rows = f"{figures['graphs']} graph{'' if figures['graphs'] == 1 else 's'}", figures["batch_sizes"]
    if not 1 <= len(rows) <= 6:
        return graphs if figures["graphs"] else "no graphs"
    return f"batch size{'' if len(rows) == 1 else 's'} {', '.join(map(str, rows))} ({graphs})"
