"""Does the traffic hit the graphs: calls by Target, exact shape, outcome and reason, what padding wastes, and what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

from vgraph_lab.errors import InputError
from vgraph_lab.graphs.descriptor import Descriptor
from vgraph_lab.graphs.stats import CallKind, StatsSnapshot

from .entries import source_frames
from .recording import Source, stats_of

__all__ = [
    "COVERAGE_COLUMNS",
    "DRIFT_COLUMNS",
    "OUTCOMES",
    "SUMMARY_COLUMNS",
    "UNCOVERED_COLUMNS",
    "Drift",
    "Histogram",
    "coverage_summary",
    "coverage_table",
    "drift",
    "outcome_of",
    "uncovered_shapes",
]

OUTCOMES = ("exact hit", "padded hit", "fallback", "error")
"""What becomes of a call. Every call is exactly one of these."""

_SHAPE_COLUMNS = {
    "target": "id of the Target",
    "requested": "exact shape of the call (its runtime key)",
    "batch_size": "rows requested",
    "frames": "codec frames requested per row",
    "state": "request state of the call (streaming: the mode); empty if there is only one",
    "source_frames": "streaming: new frames kept before the step, of all its frames; missing elsewhere",
}

COVERAGE_COLUMNS = {
    **_SHAPE_COLUMNS,
    "outcome": "exact hit, padded hit, fallback (ran eager) or error (failed during copy-in, replay or materialisation)",
    "reason": "why it fell back, or the exception of an error; empty for hits",
    "captured": "Descriptor of the graph that was used; empty for fallbacks",
    "captured_batch_size": "rows of that graph",
    "captured_frames": "codec frames per row of that graph",
    "calls": "number of such calls",
    "padding_rows": "rows computed for nothing by all these calls: captured minus requested rows (hits only)",
    "padding_frames": "frames computed for nothing by all these calls: captured minus requested rows x frames (hits only)",
    "wasted_share": "of the frames that hits computed, the share computed for nothing, 0 to 1",
}
"""The columns of :func:`coverage_table`, in order, with their meaning."""

SUMMARY_COLUMNS = {
    "target": "id of the Target",
    "calls": "all counted calls: hits + fallbacks + errors + observed",
    "hits": "calls served by a graph: exact and padded hits, and those of a log that does not tell them apart",
    "exact_hits": "hits whose shape was captured",
    "padded_hits": "hits served by a larger graph",
    "fallbacks": "valid calls that ran eager",
    "errors": "calls that failed during copy-in, replay or materialisation",
    "observed": "calls of which a log tells the shape and not what became of them; 0 for a runner's own statistics",
    "hit_rate": "hits / (hits + fallbacks + errors), 0 to 1; missing if all calls are observed only",
    "hit_frames": "rows x frames that all hits asked for",
    "padding_rows": "rows that all hits computed for nothing",
    "padding_frames": "rows x frames that all hits computed for nothing",
    "wasted_share": "padded / (requested + padded) frames, 0 to 1; missing without hits",
}
"""The columns of :func:`coverage_summary`, in order, with their meaning."""

UNCOVERED_COLUMNS = {
    **_SHAPE_COLUMNS,
    "reason": "why such calls ran eager",
    "calls": "number of such calls",
    "calls_share": "of all calls of the Target, 0 to 1",
    "eager_frames": "rows x frames that these calls computed eagerly",
}
"""The columns of :func:`uncovered_shapes`, in order, with their meaning."""

DRIFT_COLUMNS = {
    "target": "id of the Target",
    "state": "request state; of a streaming step the mode and the frames kept before it, such as icl 72",
    "batch_size": "rows requested",
    "frames": "codec frames requested per row",
    "planned_share": "of the planned calls, 0 to 1",
    "observed_share": "of the observed calls, 0 to 1",
    "change": "observed minus planned share; over all shapes these add up to 0, and their absolute values to twice the distance",
}
"""The columns of :attr:`Drift.table`, in order, with their meaning."""

Histogram: TypeAlias = Source | StatsSnapshot | pd.DataFrame | Mapping[tuple[str, Descriptor], float]
"""Calls by shape: what a source has counted; a table with the columns ``target``, ``batch_size``, ``frames``, ``calls`` and
perhaps ``state``, such as a traffic or a coverage table; or calls (or other weights) by Target id and exact shape."""

_DTYPES = {
    **dict.fromkeys(("target", "requested", "state", "reason", "captured"), "str"),
    **dict.fromkeys(("batch_size", "frames", "calls", "padding_rows", "padding_frames", "eager_frames"), "int64"),
    **dict.fromkeys(("source_frames", "captured_batch_size", "captured_frames"), "Int64"),
    **dict.fromkeys(("wasted_share", "calls_share", "planned_share", "observed_share", "change"), "float64"),
}


def coverage_table(source: Source | StatsSnapshot) -> pd.DataFrame:
    """One row per Target, exact shape, outcome, reason and graph, sorted by these.

    Args:
        source: a runner, a Manager, a recording, or a snapshot of statistics.

    Returns:
        The columns of :data:`COVERAGE_COLUMNS`; ``calls`` adds up to all counted calls.

    Raises:
        InputError: ``source`` is something else.
    """
    rows = [_row(kind, calls) for kind, calls in stats_of(source).counts.items()]
    table = pd.DataFrame(rows, columns=list(COVERAGE_COLUMNS))
    table["outcome"] = pd.Categorical(table["outcome"], categories=list(OUTCOMES), ordered=True)
    order = ["target", "frames", "batch_size", "requested", "outcome", "reason", "captured"]
    return _typed(table).sort_values(order, ignore_index=True)


def coverage_summary(table: pd.DataFrame) -> pd.DataFrame:
    """Totals of a :func:`coverage_table`, one row per Target that was called.

    Args:
        table: of :func:`coverage_table`, or the calls of one source of an imported log
            (:meth:`~vgraph_lab.workload.importers.imported.ImportedLog.of_source`). Frames and padding that a log does not tell
            are left out of the sums.

    Returns:
        The columns of :data:`SUMMARY_COLUMNS`; in every row calls = hits + fallbacks + errors + observed.
    """
    rows = [_totals(str(target), of_target) for target, of_target in table.groupby("target", sort=True)]
    summary = pd.DataFrame(rows, columns=list(SUMMARY_COLUMNS))
    counts = [name for name in SUMMARY_COLUMNS if name not in ("target", "hit_rate", "wasted_share")]
    return summary.astype({**dict.fromkeys(counts, "int64"), "hit_rate": "float64", "wasted_share": "float64"})


def uncovered_shapes(source: Source | StatsSnapshot) -> pd.DataFrame:
    """The shapes that ran eager, most frequent first: what to capture, if it is worth its memory.

    A shape that fell back for several reasons has a row for each. Calls that failed in a graph are not among them.

    Args:
        source: as for :func:`coverage_table`.

    Returns:
        The columns of :data:`UNCOVERED_COLUMNS`; ``calls`` adds up to all fallbacks.
    """
    stats = stats_of(source)
    rows = [
        {
            **_shape(kind.target_id, kind.key),
            "reason": str(kind.reason),
            "calls": calls,
            "calls_share": calls / stats.calls(kind.target_id),
            "eager_frames": kind.key.batch_size * kind.key.frames * calls,
        }
        for kind, calls in stats.counts.items()
        if kind.reason is not None
    ]
    table = _typed(pd.DataFrame(rows, columns=list(UNCOVERED_COLUMNS)))
    by = ["calls", "target", "frames", "batch_size", "requested", "reason"]
    return table.sort_values(by, ascending=[name != "calls" for name in by], ignore_index=True)


# --------------------------------------------------------------------------------------------------------------- drift


@dataclass(frozen=True)
class Drift:
    """How far observed traffic is from the planned one.

    Attributes:
        distance: total variation, half the sum of the absolute differences of shares: 0 if shares agree, 1 if no shape occurs
            in both. It is the smallest share of the observed calls that would have to be other shapes to agree with the plan,
            so a hit rate that was predicted for the plan is off by at most this.
        table: one row per shape, those that moved most first, with the columns of :data:`DRIFT_COLUMNS`.
    """

    distance: float
    table: pd.DataFrame

    def moved(self, count: int = 5) -> pd.DataFrame:
        """The ``count`` shapes whose shares differ most; those that agree are left out."""
        return self.table[self.table["change"] != 0].head(count)

    def __str__(self) -> str:
        words = f"drift {self.distance:.1%} of calls"
        for row in self.moved(3).to_dict("records"):
            state = f" ({row['state']})" if row["state"] else ""
            shape = f"{row['target']} B{row['batch_size']}×T{row['frames']}{state}"
            words += f"; {shape} {row['planned_share']:.1%} → {row['observed_share']:.1%}"
        return words


def drift(observed: Histogram, planned: Histogram) -> Drift:
    """Compare the shapes of two histograms of calls, whatever became of the calls.

    Args:
        observed: what came.
        planned: what was expected.

    Raises:
        InputError: a histogram without calls, with negative or infinite weights, or something that is none.
    """
    shares = {"planned": _shares("planned", planned), "observed": _shares("observed", observed)}
    rows = []
    for shape in dict.fromkeys([*shares["planned"], *shares["observed"]]):
        before, after = (shares[name].get(shape, 0.0) for name in ("planned", "observed"))
        rows.append((*shape, before, after, after - before))
    table = _typed(pd.DataFrame(rows, columns=list(DRIFT_COLUMNS)))
    moved = table["change"].abs()
    order = table.assign(moved=moved).sort_values(
        ["moved", "target", "state", "frames", "batch_size"], ascending=[False, True, True, True, True], ignore_index=True
    )
    return Drift(min(1.0, float(moved.sum()) / 2), order.drop(columns="moved"))


_Shape: TypeAlias = tuple[str, str, int, int]  # Target, state, rows, frames


def _shares(name: str, histogram: Histogram) -> dict[_Shape, float]:
    weights: Counter[_Shape] = Counter()
    for shape, weight in _weights(name, histogram):
        if not 0 <= weight < float("inf"):
            raise InputError(f"the {name} histogram counts {weight} calls of {shape}. Give finite numbers from 0.")
        weights[shape] += weight  # type: ignore[assignment]  # a Counter of floats is one, too
    total = float(sum(weights.values()))
    if not total:
        raise InputError(f"the {name} histogram has no calls, so there is nothing to compare.")
    return {shape: weight / total for shape, weight in weights.items()}


def _weights(name: str, histogram: Histogram) -> Iterator[tuple[_Shape, float]]:
    if isinstance(histogram, pd.DataFrame):
        missing = [column for column in ("target", "batch_size", "frames", "calls") if column not in histogram]
        if missing:
            raise InputError(
                f"the {name} histogram lacks the columns {', '.join(missing)}; it has {', '.join(map(str, histogram.columns))}."
            )
        for row in histogram.to_dict("records"):
            state = _state(str(row.get("state", "")), row.get("source_frames"))
            yield (str(row["target"]), state, int(row["batch_size"]), int(row["frames"])), float(row["calls"])
    elif isinstance(histogram, Mapping):
        for (target_id, key), weight in histogram.items():
            yield (target_id, _state(key.state, source_frames(key)), key.batch_size, key.frames), float(weight)
    else:
        for kind, calls in stats_of(histogram).counts.items():
            yield (kind.target_id, _state(kind.key.state, source_frames(kind.key)), kind.key.batch_size, kind.key.frames), float(calls)


def _state(state: str, source: Any) -> str:
    return state if source is None or pd.isna(source) else f"{state} {source}"


# ---------------------------------------------------------------------------------------------------------------- rows


def outcome_of(kind: CallKind) -> str:
    """The one of :data:`OUTCOMES` that a counted call is."""
    if kind.error is not None:
        return "error"
    if kind.reason is not None:
        return "fallback"
    return "exact hit" if kind.descriptor == kind.key else "padded hit"


def _typed(table: pd.DataFrame) -> pd.DataFrame:
    return table.astype({name: dtype for name, dtype in _DTYPES.items() if name in table})


def _shape(target_id: str, key: Descriptor) -> dict[str, Any]:
    return {
        "target": target_id,
        "requested": str(key),
        "batch_size": key.batch_size,
        "frames": key.frames,
        "state": key.state,
        "source_frames": source_frames(key),
    }


def _row(kind: CallKind, calls: int) -> dict[str, Any]:
    outcome, key, captured = outcome_of(kind), kind.key, kind.descriptor
    row = {
        **_shape(kind.target_id, key),
        "outcome": outcome,
        "reason": str(kind.error or kind.reason or ""),
        "captured": str(captured or ""),
        "calls": calls,
        "padding_rows": 0,
        "padding_frames": 0,
        "wasted_share": 0.0,
    }
    if captured is not None:
        row |= {"captured_batch_size": captured.batch_size, "captured_frames": captured.frames}
    if captured is not None and outcome == "padded hit":
        computed = captured.batch_size * captured.frames
        padded = computed - key.batch_size * key.frames
        rows = captured.batch_size - key.batch_size
        row |= {"padding_rows": rows * calls, "padding_frames": padded * calls, "wasted_share": padded / computed}
    return row


def _totals(target: str, table: pd.DataFrame) -> dict[str, Any]:
    by_outcome = table.groupby("outcome", observed=False)["calls"].sum()
    exact, padded_hits, fallbacks, errors, unsorted, observed = (int(by_outcome.get(name, 0)) for name in (*OUTCOMES, "hit", "observed"))
    served = table[table["outcome"].isin(["exact hit", "padded hit", "hit"])]
    requested = int((served["batch_size"] * served["frames"] * served["calls"]).sum())
    padded = int(served["padding_frames"].sum())
    hits, calls = exact + padded_hits + unsorted, int(table["calls"].sum())
    return {
        "target": target,
        "calls": calls,
        "hits": hits,
        "exact_hits": exact,
        "padded_hits": padded_hits,
        "fallbacks": fallbacks,
        "errors": errors,
        "observed": observed,
        "hit_rate": hits / (calls - observed) if calls > observed else None,
        "hit_frames": requested,
        "padding_rows": int(served["padding_rows"].sum()),
        "padding_frames": padded,
        "wasted_share": padded / (requested + padded) if requested + padded else None,
    }
