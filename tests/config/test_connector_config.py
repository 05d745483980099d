"""Chunk delivery: which first chunks are possible, what is clamped with a warning, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab.config import ConnectorConfig, StageConfig
from vgraph_lab.errors import ConfigError, InputError


def from_dict(**connector: Any) -> ConnectorConfig:
    return StageConfig.from_dict({"connector": connector}).connector


def test_the_defaults_are_the_published_ones() -> None:
    connector = ConnectorConfig()
    assert (connector.codec_chunk_frames, connector.initial_codec_chunk_frames, connector.codec_left_context_frames) == (25, 1, 72)
    assert connector.ramp == ()
    assert connector.first_chunk_choices == (1,)
    assert connector.first_chunk_frames(1.0) == 1


@pytest.mark.parametrize(
    ("chunk", "choices"),
    [(1, (1,)), (2, (2,)), (3, (2,)), (4, (2,)), (5, (2, 4)), (16, (2, 4, 8)), (17, (2, 4, 8, 16)), (25, (2, 4, 8, 16))],
)
def test_without_an_initial_size_the_first_chunk_is_a_power_of_two_below_the_chunk(chunk: int, choices: tuple[int, ...]) -> None:
    for initial in (None, 0):
        assert ConnectorConfig(codec_chunk_frames=chunk, initial_codec_chunk_frames=initial).first_chunk_choices == choices


@pytest.mark.parametrize(("load", "frames"), [(0.0, 2), (0.16, 2), (0.17, 4), (0.49, 4), (0.51, 8), (0.83, 8), (0.84, 16), (1.0, 16)])
def test_the_load_picks_among_the_choices(load: float, frames: int) -> None:
    assert ConnectorConfig(initial_codec_chunk_frames=None).first_chunk_frames(load) == frames


@pytest.mark.parametrize("load", [-0.1, 1.1, float("nan")])
def test_a_load_outside_of_0_to_1_is_refused(load: float) -> None:
    with pytest.raises(InputError, match="load must be from 0 to 1"):
        ConnectorConfig().first_chunk_frames(load)


@given(
    chunk=st.integers(1, 400), initial=st.none() | st.integers(0, 400), ramp=st.lists(st.integers(1, 40), max_size=5), load=st.floats(0, 1)
)
def test_choices_are_ascending_and_the_load_reaches_both_ends(chunk: int, initial: int | None, ramp: list[int], load: float) -> None:
    connector = ConnectorConfig(
        codec_chunk_frames=chunk, initial_codec_chunk_frames=min(initial, chunk) if initial else initial, codec_chunk_ramp=tuple(ramp)
    )
    choices = connector.first_chunk_choices
    assert list(choices) == sorted(set(choices))
    assert min(choices) >= 1
    assert (connector.first_chunk_frames(0), connector.first_chunk_frames(1)) == (choices[0], choices[-1])
    assert connector.first_chunk_frames(load) in choices
    if not ramp and not initial and chunk > 2:
        assert choices == tuple(2**n for n in range(1, 10) if 2**n < chunk)


def test_a_ramp_takes_the_place_of_the_initial_chunk() -> None:
    connector = from_dict(initial_codec_chunk_frames=1, codec_chunk_ramp=[4, 4, 8])
    assert connector.ramp == (4, 4, 8)
    assert connector.first_chunk_choices == (4,)


def test_an_empty_ramp_is_none() -> None:
    assert from_dict(codec_chunk_ramp=[]).codec_chunk_ramp is None


def test_an_initial_chunk_longer_than_a_chunk_is_cut_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"^connector\.initial_codec_chunk_frames: 99 is more than .* gets 10 frames"):
        connector = from_dict(codec_chunk_frames=10, initial_codec_chunk_frames=99)
    assert connector.first_chunk_choices == (10,)


def test_the_same_in_python_warns_too() -> None:
    with pytest.warns(UserWarning, match=r"initial_codec_chunk_frames: 26 is more"):
        assert ConnectorConfig(initial_codec_chunk_frames=26).initial_codec_chunk_frames == 25


@pytest.mark.parametrize("ramp", [[0, 4], [4, -1, 8]])
def test_a_ramp_that_is_not_positive_is_switched_off_with_a_warning(ramp: list[int]) -> None:
    with pytest.warns(UserWarning, match=r"^connector\.codec_chunk_ramp: .* is switched off.*not positive"):
        connector = from_dict(codec_chunk_ramp=ramp)
    assert connector.ramp == ()
    assert connector.first_chunk_choices == (1,)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("codec_chunk_frames", 0),
        ("codec_chunk_frames", None),
        ("codec_chunk_frames", "25"),
        ("codec_chunk_frames", 25.0),
        ("codec_chunk_frames", True),
        ("initial_codec_chunk_frames", -1),
        ("codec_left_context_frames", -1),
        ("codec_left_context_frames", None),
        ("codec_chunk_ramp", 4),
        ("codec_chunk_ramp", "4,8"),
        ("codec_chunk_ramp", [4, "8"]),
        ("codec_chunk_ramp", [True, 8]),
        ("codec_chunk_ramp", [4.0]),
    ],
)
def test_wrong_types_and_ranges_are_refused_with_their_path(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^connector\.{key}.*: (Input should|must) be .*\(got "):
        from_dict(**{key: value})


def test_several_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"codec_chunk_frames: .*; connector\.codec_left_context_frames: "):
        from_dict(codec_chunk_frames=0, codec_left_context_frames=-1)
