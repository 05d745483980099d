"""Every reachable state has one transition, and every transition is reached."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab.errors import ConfigError
from vgraph_lab.qwen3_tts.transitions import Transition, TransitionTable

schedules = st.builds(
    TransitionTable,
    initial_frames=st.integers(1, 80),
    chunk_frames=st.integers(1, 80),
    window=st.integers(3, 90),
    ramp=st.lists(st.integers(1, 40), max_size=6).map(tuple),
)


def test_the_documented_schedule() -> None:
    table = TransitionTable(1, 25, 72)
    assert [(t.source, t.target) for t in table.transitions] == [(0, 1), (1, 26), (26, 51), (51, 76), (72, 97)]
    assert [t.is_rolling for t in table.transitions] == [False] * 4 + [True]
    assert table.after(76) is table.after(97) is table.after(1000) is table.transitions[-1]


def test_a_ramp_takes_the_place_of_the_initial_chunk() -> None:
    """The states of the golden ramp stream."""
    table = TransitionTable(1, 6, 16, ramp=(2, 3, 4, 6))
    assert [t.target for t in table.transitions] == [2, 5, 9, 15, 21, 22]


def test_a_state_of_another_schedule_has_no_transition() -> None:
    table = TransitionTable(1, 25, 72)
    assert table.after(2) is None
    assert table.after(50) is None


@given(table=schedules, steps=st.integers(1, 60))
def test_a_request_always_finds_its_transition(table: TransitionTable, steps: int) -> None:
    """Played chunk by chunk from the start, no state is missing, and sizes are the schedule's."""
    sizes = list(table.ramp or (table.initial_frames,))
    state, met = 0, set()
    for step in range(steps):
        transition = table.after(state)
        assert transition is not None
        assert transition.is_rolling == (state >= table.window)
        if not transition.is_rolling:
            assert transition.new_frames == (sizes[step] if step < len(sizes) else table.chunk_frames)
        state, met = transition.target, met | {transition}
    assert met <= set(table.transitions)
    if steps > len(table.transitions):
        assert met == set(table.transitions), "a transition that nobody takes would be captured for nothing"


@given(table=schedules)
def test_sources_name_transitions(table: TransitionTable) -> None:
    assert len({t.source for t in table.transitions}) == len(table.transitions)
    targets = [t.target for t in table.transitions if not t.is_rolling]
    assert targets == sorted(set(targets))


def test_a_target_does_not_name_a_transition() -> None:
    """15 + 7 and 16 + 6 lead to the same place, from states of different kinds."""
    last, rolling = TransitionTable(1, 6, 16, ramp=(15, 7)).transitions[-2:]
    assert (last.target, rolling.target) == (22, 22)
    assert last.source != rolling.source


def test_print() -> None:
    assert str(TransitionTable(1, 5, 8)).splitlines() == [
        "kept  new  after",
        "   0    1      1",
        "   1    5      6",
        "   6    5     11",
        "   8    5     13  rolling, repeats",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"initial_frames": 0}, "initial_frames must be at least 1, got 0"),
        ({"chunk_frames": -1}, "chunk_frames must be at least 1"),
        ({"window": 2}, "window must be at least 3"),
        ({"ramp": (2, 0)}, r"ramp must hold positive numbers of frames, got \[2, 0\]"),
    ],
)
def test_sizes_that_make_no_schedule(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransitionTable(**{"initial_frames": 1, "chunk_frames": 5, "window": 8, **fields})  # type: ignore[arg-type]


def test_new_frames() -> None:
    assert Transition(26, 51).new_frames == 25
