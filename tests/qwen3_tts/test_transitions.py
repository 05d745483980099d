"""Every reachable state has one transition, and every transition is reached."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab.config import ConnectorConfig
from vgraph_lab.errors import ConfigError
from vgraph_lab.qwen3_tts.transitions import Transition, TransitionTable

connectors = st.builds(
    ConnectorConfig,
    codec_chunk_frames=st.integers(1, 80),
    initial_codec_chunk_frames=st.one_of(st.none(), st.integers(0, 80)),
    codec_chunk_ramp=st.one_of(st.none(), st.lists(st.integers(1, 40), max_size=6).map(tuple)),
)
pytestmark = pytest.mark.filterwarnings("ignore:connector")  # initial chunks above the steady one are clamped with a warning


def table_of(initial: int, chunk: int, window: int, ramp: tuple[int, ...] = ()) -> TransitionTable:
    return TransitionTable((initial,), chunk, window, ramp)


def test_the_documented_schedule() -> None:
    table = table_of(1, 25, 72)
    assert [(t.source, t.target) for t in table.transitions] == [(0, 1), (1, 26), (26, 51), (51, 76), (72, 97)]
    assert [t.is_rolling for t in table.transitions] == [False] * 4 + [True]
    assert table.after(76) is table.after(97) is table.after(1000) is table.transitions[-1]


def test_a_ramp_takes_the_place_of_the_initial_chunk() -> None:
    """The states of the golden ramp stream."""
    table = table_of(1, 6, 16, ramp=(2, 3, 4, 6))
    assert [t.target for t in table.transitions] == [2, 5, 9, 15, 21, 22]


def test_a_first_chunk_that_depends_on_load() -> None:
    """Powers of two from 2 to the largest below the chunk; each has states of its own until the window rolls."""
    table = TransitionTable.from_connector(ConnectorConfig(codec_chunk_frames=25, initial_codec_chunk_frames=None), 72)
    assert [t.target for t in table.starts] == [2, 4, 8, 16]
    assert [(t.source, t.target) for t in table.steps if t.source % 25 == 4] == [(4, 29), (29, 54), (54, 79)]
    assert table.after(0, 3) == table.starts[1], "a last chunk of three frames is padded to the next start"
    assert table.after(0, 17) is None
    assert len(table.transitions) == 4 * 4 + 1


def test_a_state_of_another_schedule_has_no_transition() -> None:
    table = table_of(1, 25, 72)
    assert table.after(2) is None
    assert table.after(50) is None


@given(connector=connectors, window=st.integers(3, 90), load=st.floats(0, 1), steps=st.integers(1, 60))
def test_a_request_always_finds_its_transition(connector: ConnectorConfig, window: int, load: float, steps: int) -> None:
    """Played chunk by chunk from the start, no state is missing, and sizes are the connector's."""
    table = TransitionTable.from_connector(connector, window)
    sizes = [connector.first_chunk_frames(load), *connector.ramp[1:]]
    state = 0
    for step in range(steps):
        size = sizes[step] if step < len(sizes) else connector.codec_chunk_frames
        transition = table.after(state, size)
        assert transition is not None
        assert transition.is_rolling == (state >= window)
        assert size <= table.largest_chunk
        if not transition.is_rolling:
            assert transition.new_frames == size
        state = min(state, window) + size


@given(connector=connectors, window=st.integers(3, 90))
def test_every_transition_is_taken_by_some_request(connector: ConnectorConfig, window: int) -> None:
    """A transition that nobody takes would be captured for nothing."""
    table, met = TransitionTable.from_connector(connector, window), set()
    for first in connector.first_chunk_choices:
        state = 0
        while True:
            transition = table.after(state, first)
            assert transition is not None
            if transition in met and transition.source:
                break
            met.add(transition)
            state = transition.target
    assert met == set(table.transitions)


@given(connector=connectors, window=st.integers(3, 90))
def test_sources_name_steps(connector: ConnectorConfig, window: int) -> None:
    table = TransitionTable.from_connector(connector, window)
    assert len({t.source for t in table.steps}) == len(table.steps)
    assert len({t.target for t in table.starts}) == len(table.starts)


def test_the_largest_chunk() -> None:
    assert table_of(1, 5, 8).largest_chunk == 5
    assert table_of(9, 5, 8).largest_chunk == 9
    assert table_of(1, 5, 8, ramp=(9, 12)).largest_chunk == 12, "the second entry comes when the window rolls already"


def test_a_target_does_not_name_a_transition() -> None:
    """15 + 7 and 16 + 6 lead to the same place, from states of different kinds."""
    last, rolling = table_of(1, 6, 16, ramp=(15, 7)).transitions[-2:]
    assert (last.target, rolling.target) == (22, 22)
    assert last.source != rolling.source


def test_print() -> None:
    assert str(table_of(1, 5, 8)).splitlines() == [
        "kept  new  after",
        "   0    1      1",
        "   1    5      6",
        "   6    5     11",
        "   8    5     13  rolling, repeats",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"initial_frames": (0,)}, "initial_frames must be at least 1 frame, got 0"),
        ({"initial_frames": ()}, "initial_frames must hold at least one size"),
        ({"chunk_frames": -1}, "chunk_frames must be at least 1"),
        ({"window": 2}, "window must be at least 3"),
        ({"ramp": (2, 0)}, "ramp must be at least 1 frame, got 2, 0"),
    ],
)
def test_sizes_that_make_no_schedule(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransitionTable(**{"initial_frames": (1,), "chunk_frames": 5, "window": 8, **fields})


def test_new_frames() -> None:
    assert Transition(26, 51).new_frames == 25
