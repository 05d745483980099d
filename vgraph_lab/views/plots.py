"""Charts of the tables in :mod:`vgraph_lab.inspect`. Each takes data and an Axes, draws, and returns the Axes.

Use :func:`vgraph_lab.views.style.chart` to show one, or an Axes of your own inside :func:`vgraph_lab.views.style.look`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from .coverage_plots import calls_by_frames, calls_by_outcome, calls_by_target, coverage_map, hits_over_time
from .memory_plots import estimate_against_measured, memory_by_entry, memory_ledger, pool_growth
from .planner_plots import pareto_front
from .pool_plots import pool_segments
from .style import COLOURS, INK
from .v1_plots import dispatch_map, graph_steps, ubatch_slices, ubatch_timeline

__all__ = [
    "calls_by_frames",
    "calls_by_outcome",
    "calls_by_target",
    "coverage_map",
    "dispatch_map",
    "estimate_against_measured",
    "frames_by_chunk",
    "graph_steps",
    "hits_over_time",
    "memory_by_entry",
    "memory_ledger",
    "pareto_front",
    "pool_growth",
    "pool_segments",
    "ubatch_slices",
    "ubatch_timeline",
]


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
