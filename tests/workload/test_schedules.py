"""Schedules against a connector that is fed frame by frame."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from workload.schedule_reference import play

from vgraph_lab.config import ConnectorConfig
from vgraph_lab.errors import InputError
from vgraph_lab.workload import chunk_schedule, chunk_sizes

QUANTIZERS = 2


def numbered(frames: int, first: int = 0) -> Tensor:
    """Codes that say which frame they are."""
    return torch.arange(first, first + frames).expand(QUANTIZERS, frames)


def connector(chunk: int = 25, initial: int | None = 1, *, context: int = 72, ramp: tuple[int, ...] | None = None) -> ConnectorConfig:
    return ConnectorConfig(
        codec_chunk_frames=chunk, initial_codec_chunk_frames=initial, codec_left_context_frames=context, codec_chunk_ramp=ramp
    )


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[ConnectorConfig, tuple[int, ...]]:
    """A connector, and the sizes with which it opens."""
    chunk = draw(st.integers(1, 12))
    ramp = draw(st.none() | st.lists(st.integers(1, chunk), min_size=1, max_size=5).map(tuple))
    initial = draw(st.integers(1, chunk))
    context = draw(st.integers(1, 10))
    return connector(chunk, initial, context=context, ramp=ramp), ramp or (initial,)


@given(delivery=deliveries(), frames=st.integers(1, 80), ref_frames=st.integers(0, 20), delay=st.integers(0, 3))
def test_as_a_connector_fed_frame_by_frame(
    delivery: tuple[ConnectorConfig, tuple[int, ...]], frames: int, ref_frames: int, delay: int
) -> None:
    config, opening = delivery
    reference = numbered(ref_frames, first=1000)
    schedule = chunk_schedule("r", numbered(frames), config, reference=reference, end_delay_frames=delay)
    expected = play(frames, opening, config.codec_chunk_frames, delay)
    kept = min(ref_frames, config.codec_left_context_frames)
    for index, (chunk, (new, tick, is_last)) in enumerate(zip(schedule, expected, strict=True)):
        leading = list(range(1000 + ref_frames - kept, 1000 + ref_frames)) if index == 0 else []
        assert chunk.request.codes.tolist() == [leading + new] * QUANTIZERS
        assert chunk.request.ref_frames == len(leading)
        assert (chunk.new_frames, chunk.available_after_frames, chunk.request.finished) == (len(new), tick, is_last)
        assert chunk.request.request_id == "r"


@pytest.mark.parametrize(
    ("frames", "delay", "sizes", "ticks"),
    [
        (60, 0, [1, 25, 25, 9], [1, 26, 51, 60]),
        (60, 1, [1, 25, 25, 9], [1, 26, 51, 61]),
        (51, 0, [1, 25, 25], [1, 26, 51]),
        (51, 1, [1, 25, 25, 0], [1, 26, 51, 52]),
        (1, 0, [1], [1]),
        (1, 2, [1, 0], [1, 3]),
    ],
)
def test_the_end_of_an_utterance(frames: int, delay: int, sizes: list[int], ticks: list[int]) -> None:
    """Worked out by hand; an end on a chunk's boundary finishes that chunk or follows it as an empty one."""
    schedule = chunk_schedule("r", numbered(frames), connector(), end_delay_frames=delay)
    assert [chunk.new_frames for chunk in schedule] == sizes
    assert [chunk.available_after_frames for chunk in schedule] == ticks
    assert [chunk.request.finished for chunk in schedule] == [False] * (len(sizes) - 1) + [True]


def test_an_utterance_that_ends_before_the_first_chunk_is_full() -> None:
    (only,) = chunk_schedule("r", numbered(3), connector(initial=5), reference=numbered(4))
    assert (only.new_frames, only.request.ref_frames, only.request.codes.shape[1]) == (3, 4, 7)
    assert only.request.finished


def test_the_first_chunk_depends_on_load() -> None:
    """Powers of two below 25 are 2, 4, 8 and 16."""
    by_load = [chunk_sizes(60, connector(initial=None), load=load)[0] for load in (0, 0.3, 0.7, 1)]
    assert by_load == [2, 4, 8, 16]
    assert chunk_sizes(60, connector(initial=1), load=1)[0] == 1, "a fixed size does not"


def test_a_ramp_takes_the_place_of_the_first_chunk() -> None:
    assert chunk_sizes(40, connector(10, 1, ramp=(2, 4, 8))) == [2, 4, 8, 10, 10, 6]
    assert chunk_sizes(5, connector(10, 1, ramp=(2, 4, 8))) == [2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"codes": numbered(0)}, "an utterance of 0 frames has no chunks"),
        ({"codes": numbered(3)[None]}, r"codes must be \[num_quantizers, frames\], got \[1, 2, 3\].*codes\[0\]"),
        ({"reference": torch.zeros(3, 4)}, r"reference must be \[2, frames\] like the codes, got \[3, 4\]"),
        ({"end_delay_frames": -1}, "end_delay_frames is -1"),
        ({"load": 1.5}, "load must be from 0 to 1"),
    ],
)
def test_what_makes_no_schedule(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        chunk_schedule(**{"request_id": "r", "codes": numbered(3), "connector": connector(), **arguments})  # type: ignore[arg-type]
