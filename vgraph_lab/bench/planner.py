"""Bench of the capture planner: a million calls summarised and planned, in seconds and in bytes of Python's and NumPy's making."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch

from vgraph_lab.config import ConnectorConfig
from vgraph_lab.errors import InputError
from vgraph_lab.graphs import CallKind, StatsSnapshot
from vgraph_lab.inspect.planner import Plan, StatelessGrid, StreamingGrid, cost_table, plan_captures, traffic_of, traffic_table
from vgraph_lab.inspect.planner.shapes import STATELESS_TARGET_ID, Shape, descriptor_of, kept_frames
from vgraph_lab.inspect.planner.spaces import Space

from .record import MeasurementRecord, describe_machine
from .runners import Progress

__all__ = ["bench_planner"]

_WINDOW = 72
_Calls = Mapping[str, Any]


@dataclass(frozen=True)
class _Case:
    """What is planned: how calls are drawn, how they are summarised, and among which sizes."""

    name: str
    draw: Callable[[int, np.random.Generator], Any]
    summarise: Callable[[Any], pd.DataFrame]
    space: Space


def bench_planner(*, calls: int = 1_000_000, repeats: int = 3, seed: int = 0, progress: Progress = lambda _: None) -> MeasurementRecord:
    """Draw calls, sum them up and plan for them; seconds are medians, bytes the peak of another run, the drawn calls included.

    Three cases: stateless calls of 1 to 8 rows and any length, one per row of a table; streamed calls of up to 64 rows over the
    whole schedule, likewise; and the same as a runner's statistics.

    Args:
        calls: calls of each case, at least 1.
        repeats: timed runs of each, at least 1.
        seed: of the calls.
        progress: told each case.

    Raises:
        InputError: a number below 1.
    """
    if calls < 1 or repeats < 1:
        raise InputError(f"calls and repeats must be at least 1, got {calls} and {repeats}.")
    costs = _costs()
    rows = []
    for case in _cases():
        progress(f"planning for {calls:,} calls: {case.name}")
        rows.append({"case": case.name, "calls": calls, **_measured(case, calls, repeats, seed, costs)})
    settings = {"calls": calls, "repeats": repeats, "seed": seed, "costs": "affine in rows × frames, made up"}
    return MeasurementRecord("planner", settings, rows, describe_machine(torch.device("cpu")))


def _cases() -> tuple[_Case, ...]:
    grid = StreamingGrid(ConnectorConfig(), _WINDOW)
    return (
        _Case("stateless calls", _stateless, traffic_table, StatelessGrid()),
        _Case("streamed calls", lambda count, rng: _streamed(grid, count, rng), traffic_table, grid),
        _Case(
            "streamed statistics",
            lambda count, rng: _snapshot(_streamed(grid, count, rng)),
            lambda s: traffic_of(s, grid.transitions),
            grid,
        ),
    )


def _measured(case: _Case, calls: int, repeats: int, seed: int, costs: pd.DataFrame) -> dict[str, Any]:
    drawn = case.draw(calls, np.random.default_rng(seed))
    summaries, plans = [], []
    for _ in range(repeats):
        begin = perf_counter()
        traffic = case.summarise(drawn)
        middle = perf_counter()
        plan = plan_captures(traffic, costs, case.space)
        summaries.append(middle - begin)
        plans.append(perf_counter() - middle)
    del drawn
    tracemalloc.start()
    try:
        plan_captures(case.summarise(case.draw(calls, np.random.default_rng(seed))), costs, case.space)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    totals = [one + other for one, other in zip(summaries, plans, strict=True)]
    return {
        "summarise_s": float(np.median(summaries)),
        "plan_s": float(np.median(plans)),
        "total_s": float(np.median(totals)),
        "peak_bytes": peak,
        **_described(plan),
    }


def _described(plan: Plan) -> dict[str, Any]:
    best = plan.recommend()
    return {
        "traffic_rows": len(plan.demand.traffic),
        "front_points": len(plan.front),
        "graphs_recommended": int(best.figures["graphs"]),
        "coverage_recommended": float(best.figures["coverage"]),
    }


def _stateless(count: int, rng: np.random.Generator) -> _Calls:
    """Whole windows in about a fifth of the calls, remainders of any length in the others."""
    frames = np.minimum(rng.integers(1, 400, count), 325)
    return {"target": [STATELESS_TARGET_ID] * count, "batch_size": rng.integers(1, 9, count), "frames": frames}


def _streamed(grid: StreamingGrid, count: int, rng: np.random.Generator) -> _Calls:
    """Every cell of the schedule alike; one call in twenty is a last chunk of any length."""
    cells = [(target, state, frames) for target in grid.target_ids for state, frames in grid.cells(target)]
    drawn = rng.integers(0, len(cells), count)
    frames = np.array([cell[2] for cell in cells])[drawn]
    kept = np.array([kept_frames(target, state) for target, state, _ in cells])[drawn]
    is_last = rng.random(count) < 0.05
    frames = np.where(is_last, rng.integers(kept + 1, frames + 1), frames)
    targets, states = (np.array([cell[place] for cell in cells], dtype=object) for place in (0, 1))
    return {
        "target": targets[drawn],
        "state": states[drawn],
        "batch_size": np.minimum(rng.geometric(0.15, count), 64),
        "frames": frames,
        "may_pad_frames": is_last,
    }


def _snapshot(calls: _Calls) -> StatsSnapshot:
    """The same calls as a runner counts them: a hit of the exact shape each."""
    counts: dict[CallKind, int] = {}
    for target, state, rows, frames, _, number in traffic_table(calls).itertuples(index=False, name=None):
        key = descriptor_of(Shape(target, state, rows, frames))
        assert key is not None
        kind = CallKind(target, key, descriptor=key)
        counts[kind] = counts.get(kind, 0) + number
    return StatsSnapshot(counts)


def _costs() -> pd.DataFrame:
    """Two shapes of each Target; the planner models all others."""
    rows: list[dict[str, Any]] = []
    for target in (*StatelessGrid().target_ids, *StreamingGrid(ConnectorConfig(), _WINDOW).target_ids):
        state = "icl 72" if target.endswith("suffix") else ""
        for batch, frames in ((1, 97), (16, 325)):
            work = batch * frames
            figures = {"charge_bytes": 2**20 + 300_000 * work, "shared_bytes": 290_000 * work, "capture_s": 0.02 + work * 1e-6}
            rows.append(
                {**Shape(target, state, batch, frames)._asdict(), **figures, "replay_ms": 2 + 0.07 * work, "eager_ms": 13 + 0.07 * work}
            )
    return cost_table(pd.DataFrame(rows))
