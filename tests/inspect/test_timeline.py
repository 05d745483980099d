"""Calls per interval. Truth: counters written by hand, a Manager's own calls, and sums."""

from __future__ import annotations

import pytest
import torch
from contracts.toy import WIDTH
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab.errors import FallbackReason, InputError
from vgraph_lab.graphs import CallKind, Descriptor, StatsSnapshot
from vgraph_lab.inspect import Timeline, timeline_table
from vgraph_lab.inspect.timeline import TIMELINE_COLUMNS

KEY, LARGER = Descriptor(1, 4), Descriptor(2, 4)
EXACT, PADDED = CallKind("toy", KEY, descriptor=KEY), CallKind("toy", KEY, descriptor=LARGER)
MISS, ERROR = CallKind("toy", KEY, reason=FallbackReason.CAPACITY), CallKind("toy", KEY, descriptor=KEY, error="OSError")


def test_differences_of_readings_by_outcome_and_reason():
    table = timeline_table(
        [
            (0.0, StatsSnapshot({EXACT: 5})),  # counted before: left out
            (2.0, StatsSnapshot({EXACT: 6, PADDED: 1, MISS: 3})),
            (2.5, StatsSnapshot({EXACT: 6, PADDED: 1, MISS: 3})),  # nothing happened
            (7.0, StatsSnapshot({EXACT: 6, PADDED: 1, MISS: 5, ERROR: 1})),
        ]
    )
    assert list(table.columns) == list(TIMELINE_COLUMNS)
    assert list(table.itertuples(index=False, name=None)) == [
        (0.0, 2.0, "toy", "exact hit", "", 1),
        (0.0, 2.0, "toy", "fallback", "capacity", 3),
        (0.0, 2.0, "toy", "padded hit", "", 1),
        (2.5, 7.0, "toy", "error", "OSError", 1),
        (2.5, 7.0, "toy", "fallback", "capacity", 2),
    ]


@given(st.lists(st.dictionaries(st.sampled_from([EXACT, PADDED, MISS, ERROR]), st.integers(0, 9)), min_size=1, max_size=6))
def test_intervals_add_up_to_what_was_counted(parts):
    samples, counts = [(0.0, StatsSnapshot({}))], dict.fromkeys([EXACT, PADDED, MISS, ERROR], 0)
    for number, part in enumerate(parts, start=1):
        counts = {kind: n + part.get(kind, 0) for kind, n in counts.items()}
        samples.append((float(number), StatsSnapshot(dict(counts))))
    table = timeline_table(samples)
    assert table["calls"].sum() == sum(counts.values())
    assert (table["calls"] > 0).all()


def test_a_live_manager_is_read_between_its_calls(make_manager):
    manager, target = make_manager(KEY)
    manager.capture()
    moments = iter([100.0, 101.0, 103.0])
    target(torch.ones(1, 4, WIDTH))
    timeline = Timeline(manager, clock=lambda: next(moments))
    target(torch.ones(1, 4, WIDTH))
    timeline.sample()
    target(torch.ones(1, 9, WIDTH))
    target(torch.ones(1, 9, WIDTH))
    timeline.sample()
    found = timeline.table()[["start_s", "end_s", "outcome", "reason", "calls"]]
    assert list(found.itertuples(index=False, name=None)) == [
        (0.0, 1.0, "exact hit", "", 1),
        (1.0, 3.0, "fallback", "shape_not_covered", 2),
    ]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([(1.0, StatsSnapshot({})), (0.5, StatsSnapshot({}))], r"order of time, but 0.5 s follows 1.0 s"),
        ([(0.0, StatsSnapshot({EXACT: 2})), (1.0, StatsSnapshot({EXACT: 1}))], "calls were lost between 0.0 and 1.0 s"),
        ([(0.0, StatsSnapshot({EXACT: 2})), (1.0, StatsSnapshot({}))], "different runners"),
    ],
)
def test_readings_that_cannot_be(samples, message):
    with pytest.raises(InputError, match=message):
        timeline_table(samples)


def test_no_readings_make_no_rows():
    assert list(timeline_table([]).columns) == list(TIMELINE_COLUMNS)
    assert len(timeline_table([(0.0, StatsSnapshot({EXACT: 1}))])) == 0
