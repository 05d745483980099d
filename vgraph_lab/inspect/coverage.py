"""Does the traffic hit the graphs: calls by Target, exact shape, outcome and reason, and what padding wastes."""

from __future__ import annotations

from typing import Any

import pandas as pd

from vgraph_lab.graphs.stats import CallKind, StatsSnapshot

__all__ = ["COVERAGE_COLUMNS", "OUTCOMES", "SUMMARY_COLUMNS", "coverage_summary", "coverage_table"]

OUTCOMES = ("exact hit", "padded hit", "fallback", "error")
"""What becomes of a call. Every call is exactly one of these."""

COVERAGE_COLUMNS = {
    "target": "id of the Target",
    "requested": "exact shape of the call (its runtime key)",
    "batch_size": "rows requested",
    "frames": "codec frames requested per row",
    "outcome": "exact hit, padded hit, fallback (ran eager) or error (failed during copy-in, replay or materialisation)",
    "reason": "why it fell back, or the exception of an error; empty for hits",
    "captured": "Descriptor of the graph that was used; empty for fallbacks",
    "captured_batch_size": "rows of that graph",
    "captured_frames": "codec frames per row of that graph",
    "calls": "number of such calls",
    "padding_frames": "frames computed for nothing by all these calls: captured minus requested rows x frames (hits only)",
    "wasted_share": "of the frames that hits computed, the share computed for nothing, 0 to 1",
}
"""The columns of :func:`coverage_table`, in order, with their meaning."""

SUMMARY_COLUMNS = {
    "target": "id of the Target",
    "calls": "all counted calls: hits + fallbacks + errors",
    "hits": "calls served by a graph: exact + padded hits",
    "exact_hits": "hits whose shape was captured",
    "padded_hits": "hits served by a larger graph",
    "fallbacks": "valid calls that ran eager",
    "errors": "calls that failed during copy-in, replay or materialisation",
    "hit_rate": "hits / calls, 0 to 1",
    "hit_frames": "rows x frames that all hits asked for",
    "padding_frames": "rows x frames that all hits computed for nothing",
    "wasted_share": "padded / (requested + padded) frames, 0 to 1; missing without hits",
}
"""The columns of :func:`coverage_summary`, in order, with their meaning."""


_DTYPES = {
    **dict.fromkeys(("target", "requested", "reason", "captured"), "str"),
    **dict.fromkeys(("batch_size", "frames", "calls", "padding_frames"), "int64"),
    **dict.fromkeys(("captured_batch_size", "captured_frames"), "Int64"),
    "wasted_share": "float64",
}


def coverage_table(snapshot: StatsSnapshot) -> pd.DataFrame:
    """One row per Target, exact shape, outcome, reason and graph, sorted by these.

    Returns:
        The columns of :data:`COVERAGE_COLUMNS`; ``calls`` adds up to ``snapshot.calls()``.
    """
    rows = [_row(kind, calls) for kind, calls in snapshot.counts.items()]
    table = pd.DataFrame(rows, columns=list(COVERAGE_COLUMNS))
    table["outcome"] = pd.Categorical(table["outcome"], categories=list(OUTCOMES), ordered=True)
    table = table.astype(_DTYPES)
    return table.sort_values(["target", "frames", "batch_size", "requested", "outcome", "reason", "captured"], ignore_index=True)


def coverage_summary(table: pd.DataFrame) -> pd.DataFrame:
    """Totals of a :func:`coverage_table`, one row per Target that was called.

    Returns:
        The columns of :data:`SUMMARY_COLUMNS`; in every row calls = hits + fallbacks + errors.
    """
    rows = [_totals(str(target), of_target) for target, of_target in table.groupby("target", sort=True)]
    summary = pd.DataFrame(rows, columns=list(SUMMARY_COLUMNS))
    counts = [name for name in SUMMARY_COLUMNS if name not in ("target", "hit_rate", "wasted_share")]
    return summary.astype({**dict.fromkeys(counts, "int64"), "hit_rate": "float64", "wasted_share": "float64"})


def outcome_of(kind: CallKind) -> str:
    """The one of :data:`OUTCOMES` that a counted call is."""
    if kind.error is not None:
        return "error"
    if kind.reason is not None:
        return "fallback"
    return "exact hit" if kind.descriptor == kind.key else "padded hit"


def _row(kind: CallKind, calls: int) -> dict[str, Any]:
    outcome, key, captured = outcome_of(kind), kind.key, kind.descriptor
    row = {
        "target": kind.target_id,
        "requested": str(key),
        "batch_size": key.batch_size,
        "frames": key.frames,
        "outcome": outcome,
        "reason": str(kind.error or kind.reason or ""),
        "captured": str(captured or ""),
        "calls": calls,
        "padding_frames": 0,
        "wasted_share": 0.0,
    }
    if captured is not None:
        row |= {"captured_batch_size": captured.batch_size, "captured_frames": captured.frames}
    if captured is not None and outcome == "padded hit":
        computed = captured.batch_size * captured.frames
        padded = computed - key.batch_size * key.frames
        row |= {"padding_frames": padded * calls, "wasted_share": padded / computed}
    return row


def _totals(target: str, table: pd.DataFrame) -> dict[str, Any]:
    by_outcome = table.groupby("outcome", observed=False)["calls"].sum()
    exact, padded_hits, fallbacks, errors = (int(by_outcome[outcome]) for outcome in OUTCOMES)
    served = table[table["outcome"].isin(["exact hit", "padded hit"])]
    requested = int((served["batch_size"] * served["frames"] * served["calls"]).sum())
    padded = int(served["padding_frames"].sum())
    hits, calls = exact + padded_hits, int(table["calls"].sum())
    return {
        "target": target,
        "calls": calls,
        "hits": hits,
        "exact_hits": exact,
        "padded_hits": padded_hits,
        "fallbacks": fallbacks,
        "errors": errors,
        "hit_rate": hits / calls,
        "hit_frames": requested,
        "padding_frames": padded,
        "wasted_share": padded / (requested + padded) if hits else None,
    }
