"""Coverage adds up, whatever the calls were. Truth: the snapshot's own totals and closed-form padding."""

from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab.errors import FallbackReason
from vgraph_lab.graphs import CallKind, Descriptor, StatsSnapshot
from vgraph_lab.inspect.coverage import COVERAGE_COLUMNS, SUMMARY_COLUMNS, coverage_summary, coverage_table

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
        assert row.hits == row.exact_hits + row.padded_hits
        assert row.hit_rate == pytest.approx(snapshot.hit_rate(target))
        hits = {kind: n for kind, n in counts.items() if kind.target_id == target and kind.reason is None and kind.error is None}
        assert row.hit_frames == sum(k.key.batch_size * k.key.frames * n for k, n in hits.items())
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
