"""Coverage adds up, whatever the calls were. Truth: the snapshot's own totals and closed-form padding."""

from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab.errors import FallbackReason, InputError
from vgraph_lab.graphs import CallKind, Descriptor, StatsSnapshot
from vgraph_lab.inspect.coverage import (
    COVERAGE_COLUMNS,
    DRIFT_COLUMNS,
    SUMMARY_COLUMNS,
    UNCOVERED_COLUMNS,
    coverage_summary,
    coverage_table,
    drift,
    uncovered_shapes,
)
from vgraph_lab.qwen3_tts.stream_routines import SuffixDescriptor

A, B, C = Descriptor(1, 4), Descriptor(2, 4), Descriptor(2, 8)

descriptors = st.builds(Descriptor, st.integers(1, 4), st.integers(1, 20))


@st.composite
def kinds(draw: st.DrawFn) -> CallKind:
    target, key = draw(st.sampled_from(["t.one", "t.two"])), draw(descriptors)
    if draw(st.booleans()):
        return CallKind(target, key, reason=draw(st.sampled_from(FallbackReason)))
    captured = Descriptor(key.batch_size + draw(st.integers(0, 2)), key.frames + draw(st.integers(0, 5)))
    return CallKind(target, key, descriptor=captured, error=draw(st.sampled_from([None, "ReplayError"])))


@given(st.dictionaries(kinds(), st.integers(1, 50)))
def test_tables_add_up(counts):
    snapshot = StatsSnapshot(counts)
    table = coverage_table(snapshot)
    summary = coverage_summary(table)
    assert table["calls"].sum() == summary["calls"].sum() == snapshot.calls()
    assert len(table) == len(counts)
    for row in summary.itertuples():
        target = row.target
        assert (row.hits, row.fallbacks, row.errors) == (snapshot.hits(target), snapshot.fallbacks(target), snapshot.replay_errors(target))
        assert row.calls == row.hits + row.fallbacks + row.errors
        assert row.observed == 0
        assert row.hits == row.exact_hits + row.padded_hits
        assert row.hit_rate == pytest.approx(snapshot.hit_rate(target))
        hits = {kind: n for kind, n in counts.items() if kind.target_id == target and kind.reason is None and kind.error is None}
        assert row.hit_frames == sum(k.key.batch_size * k.key.frames * n for k, n in hits.items())
        assert row.padding_rows == sum((k.descriptor.batch_size - k.key.batch_size) * n for k, n in hits.items())
        assert row.hit_frames + row.padding_frames == sum(k.descriptor.batch_size * k.descriptor.frames * n for k, n in hits.items())


def test_outcomes_and_waste_of_known_calls():
    counts = {
        CallKind("t", A, descriptor=A): 3,
        CallKind("t", A, descriptor=C): 2,
        CallKind("t", Descriptor(3, 9), reason=FallbackReason.SHAPE_NOT_COVERED): 4,
        CallKind("t", B, descriptor=B, error="ReplayError"): 1,
    }
    table = coverage_table(StatsSnapshot(counts)).set_index(["requested", "captured"])
    assert table.loc[("B1×T4", "B1×T4"), "outcome"] == "exact hit"
    padded = table.loc[("B1×T4", "B2×T8")]
    assert (padded["outcome"], padded["padding_frames"], padded["wasted_share"]) == ("padded hit", 2 * (16 - 4), 12 / 16)
    assert padded["padding_rows"] == 2 * (2 - 1)
    missed = table.loc[("B3×T9", "")]
    assert (missed["outcome"], missed["reason"], missed["padding_frames"]) == ("fallback", "shape_not_covered", 0)
    assert pd.isna(missed["captured_frames"])
    assert (table.loc[("B2×T4", "B2×T4"), "outcome"], table.loc[("B2×T4", "B2×T4"), "reason"]) == ("error", "ReplayError")
    summary = coverage_summary(table.reset_index()).iloc[0]
    assert summary["wasted_share"] == pytest.approx(24 / (3 * 4 + 2 * 16))


def test_no_calls_give_empty_tables():
    table = coverage_table(StatsSnapshot({}))
    assert list(table.columns) == list(COVERAGE_COLUMNS)
    assert len(table) == 0
    assert list(coverage_summary(table).columns) == list(SUMMARY_COLUMNS)


def test_a_target_without_hits_has_no_waste():
    summary = coverage_summary(coverage_table(StatsSnapshot({CallKind("t", A, reason=FallbackReason.NO_GRAPH): 1})))
    assert summary["hit_rate"].tolist() == [0.0]
    assert summary["wasted_share"].isna().tolist() == [True]


def test_totals_of_a_log_that_tells_less():
    """``hit`` may be padded or not, ``observed`` is a shape only, and shapes may be missing."""
    table = pd.DataFrame(
        {
            "target": ["t", "t", "t", "u"],
            "outcome": pd.Categorical(["hit", "fallback", "observed", "observed"]),
            "reason": ["", "no_graph", "", ""],
            "batch_size": pd.array([2, pd.NA, 1, 1], dtype="Int64"),
            "frames": pd.array([pd.NA, pd.NA, 5, 5], dtype="Int64"),
            "padding_rows": pd.array([3, 0, 0, 0], dtype="Int64"),
            "padding_frames": pd.array([pd.NA, 0, 0, 0], dtype="Int64"),
            "calls": [6, 2, 10, 1],
        }
    )
    one, two = coverage_summary(table).to_dict("records")
    assert (one["calls"], one["hits"], one["exact_hits"], one["fallbacks"], one["observed"]) == (18, 6, 0, 2, 10)
    assert (one["hit_rate"], one["hit_frames"], one["padding_rows"]) == (0.75, 0, 3)
    assert (two["calls"], two["observed"]) == (1, 1)
    assert pd.isna([one["wasted_share"], two["hit_rate"]]).all()


def test_streamed_calls_tell_mode_and_kept_frames():
    key = SuffixDescriptor(1, 26, "icl", 1)
    row = coverage_table(StatsSnapshot({CallKind("t", key, descriptor=key): 1})).iloc[0]
    assert (row["state"], row["source_frames"], row["frames"], row["outcome"]) == ("icl", 1, 26, "exact hit")


@given(st.dictionaries(kinds(), st.integers(1, 50)))
def test_uncovered_shapes_are_the_fallbacks(counts):
    snapshot = StatsSnapshot(counts)
    table = uncovered_shapes(snapshot)
    assert list(table.columns) == list(UNCOVERED_COLUMNS)
    assert table["calls"].sum() == snapshot.fallbacks()
    assert table["calls"].is_monotonic_decreasing
    for row in table.itertuples():
        assert counts[CallKind(row.target, Descriptor(row.batch_size, row.frames), reason=FallbackReason(row.reason))] == row.calls
        assert row.eager_frames == row.batch_size * row.frames * row.calls
        assert row.calls_share == row.calls / snapshot.calls(row.target)


# --------------------------------------------------------------------------------------------------------------- drift

histograms = st.dictionaries(st.tuples(st.sampled_from(["t.one", "t.two"]), descriptors), st.integers(1, 100), min_size=1, max_size=6)


@given(histograms, histograms, histograms)
def test_drift_is_a_distance(one, two, three):
    there = drift(one, two).distance
    assert there == pytest.approx(drift(two, one).distance)
    assert there <= drift(one, three).distance + drift(three, two).distance + 1e-9
    assert drift(one, {shape: 3 * weight for shape, weight in one.items()}).distance == pytest.approx(0)
    assert (there < 1e-12) == (drift(one, two).moved().empty or there == 0)


@given(histograms, histograms)
def test_drift_is_the_most_that_any_set_of_shapes_gains(observed, planned):
    """Total variation is the largest difference of probability over all events."""
    shares = [{s: w / sum(h.values()) for s, w in h.items()} for h in (observed, planned)]
    gains = [shares[0].get(s, 0) - shares[1].get(s, 0) for s in {*observed, *planned}]
    found = drift(observed, planned)
    assert found.distance == pytest.approx(sum(gain for gain in gains if gain > 0))
    assert list(found.table.columns) == list(DRIFT_COLUMNS)
    assert found.table["change"].sum() == pytest.approx(0)
    assert found.table["change"].abs().is_monotonic_decreasing
    assert found.table[["planned_share", "observed_share"]].sum().tolist() == pytest.approx([1, 1])


def test_drift_of_known_histograms():
    step = SuffixDescriptor(1, 26, "icl", 1)
    calls = {
        CallKind("t", A, descriptor=A): 1,
        CallKind("t", A, reason=FallbackReason.NOT_READY): 1,
        CallKind("t", step, descriptor=step): 2,
    }
    planned = pd.DataFrame({"target": ["t", "t"], "state": ["", "icl 1"], "batch_size": [1, 1], "frames": [4, 26], "calls": [1, 3]})
    found = drift(StatsSnapshot(calls), planned)
    assert found.distance == 0.25
    assert str(found) == "drift 25.0% of calls; t B1×T4 25.0% → 50.0%; t B1×T26 (icl 1) 75.0% → 50.0%"
    assert drift(coverage_table(StatsSnapshot(calls)), StatsSnapshot(calls)).distance == 0
    assert drift({("t", A): 1}, {("t", B): 1}).distance == 1
    assert len(drift({("t", A): 1}, {("t", A): 5}).moved()) == 0


@pytest.mark.parametrize(
    ("histogram", "message"),
    [
        ({}, "no calls"),
        (StatsSnapshot({}), "no calls"),
        ({("t", A): 0}, "no calls"),
        ({("t", A): -1}, "counts -1"),
        ({("t", A): float("inf")}, "counts inf"),
        ({("t", A): float("nan")}, "counts nan"),
        (pd.DataFrame({"target": ["t"]}), "lacks the columns batch_size, frames, calls"),
        (7, "got int"),
    ],
)
def test_what_is_no_histogram_is_refused(histogram, message):
    for pair in ((histogram, {("t", A): 1}), ({("t", A): 1}, histogram)):
        with pytest.raises(InputError, match=message):
            drift(*pair)
