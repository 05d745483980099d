"""Whatever happens in whatever order, each request gets what it would get alone, and nothing is left over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from contracts.streaming import SMALL, Stream, codes, running, stage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vgraph_lab.errors import RequestError
from vgraph_lab.requests import ChunkRequest
from vgraph_lab.runner import GPUGenerationModelRunner

DELIVERY = {"codec_left_context_frames": 20, "codec_chunk_ramp": [1, 2]}
CHUNK, SLOTS = 3, 4

sizes = st.lists(st.integers(1, CHUNK), min_size=1, max_size=6)
streams = st.builds(lambda reference, sizes, seed: (reference, sizes, seed), st.sampled_from([0, 0, 1, 4, 6, 8]), sizes, st.integers(0, 5))
events = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.sets(st.integers(0, SLOTS - 1), min_size=1)),
        st.tuples(st.just("step beside a bad one"), st.sets(st.integers(0, SLOTS - 1), min_size=1)),
        st.tuples(st.just("failing step"), st.sets(st.integers(0, SLOTS - 1), min_size=1)),
        st.tuples(st.just("abort"), st.integers(0, SLOTS - 1)),
    ),
    min_size=5,
    max_size=25,
)


@pytest.fixture(scope="module", params=["eager", "graphs", "generations"])
def runner(request: pytest.FixtureRequest) -> Iterator[GPUGenerationModelRunner]:
    lazy = {"enable_lazy_capture": True, "max_extra_graphs": 1}
    more = {
        "eager": {"enforce_eager": True},
        "graphs": {},
        "generations": {"eviction": "generation", "targets": {"qwen3_tts.suffix": lazy}},
    }
    with running("cpu", stage([2], connector=DELIVERY, max_num_seqs=SLOTS, **more[request.param])) as ready:
        yield ready


@pytest.fixture(scope="module")
def alone() -> Iterator[GPUGenerationModelRunner]:
    """Every request by itself, eager, in slots that nobody else has."""
    with running("cpu", stage([1], connector=DELIVERY, max_num_seqs=SLOTS, enforce_eager=True)) as ready:
        yield ready


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(plans=st.lists(streams, min_size=6, max_size=12), events=events)
def test_interleavings(
    runner: GPUGenerationModelRunner,
    alone: GPUGenerationModelRunner,
    monkeypatch: pytest.MonkeyPatch,
    plans: list[tuple[int, list[int], int]],
    events: list[tuple[str, object]],
) -> None:
    runner.model.reset()
    waiting = [Stream(f"r{i}", reference, sizes, seed=seed) for i, (reference, sizes, seed) in enumerate(plans)]
    places: list[tuple[Stream, int] | None] = [None] * SLOTS
    expected: dict[str, list[Tensor]] = {}
    streaming = runner.model.streaming  # type: ignore[attr-defined]
    for number, (what, which) in enumerate(events):
        for place in range(SLOTS):
            if places[place] is None and waiting:
                places[place] = (waiting.pop(), 0)
        if what == "abort":
            held = places[which]  # type: ignore[call-overload]
            if held is not None:
                assert runner.abort([held[0].name]) == ([held[0].name] if held[1] else [])
                places[which] = None  # type: ignore[call-overload]
            continue
        moving = [(place, *held) for place in sorted(which) if (held := places[place]) is not None]  # type: ignore[call-overload]
        batch = [stream.chunk(i) for _, stream, i in moving]
        if what == "failing step" and batch:
            found = {}
            with monkeypatch.context() as patch, suppress(ZeroDivisionError):
                patch.setattr(streaming, "_call", _failing(streaming._call, after=number % 3))
                found = runner.execute_model(batch)
            found = found or runner.execute_model(batch)  # as though nothing had been
        else:
            bad = [ChunkRequest(f"bad {number}", torch.full((16, 1), 32))] if what == "step beside a bad one" else []
            found = runner.execute_model([*bad, *batch])
            assert all(isinstance(found.pop(chunk.request_id), RequestError) for chunk in bad)
        for place, stream, i in moving:
            if stream.name not in expected:
                alone.model.reset()
                expected[stream.name] = [alone.execute_model([stream.chunk(j)])[stream.name] for j in range(len(stream.sizes))]  # type: ignore[misc]
            samples = found[stream.name]
            assert isinstance(samples, Tensor), samples
            assert torch.allclose(samples, expected[stream.name][i], atol=1e-4), (stream.reference, stream.sizes, i)
            places[place] = (stream, i + 1) if i + 1 < len(stream.sizes) else None
    live = {held[0].name for held in places if held is not None and held[1]}
    assert set(runner.model.live_requests) == live  # type: ignore[attr-defined]
    runner.abort(live)
    assert sorted(streaming.book._free) == list(range(SLOTS)), "every slot came back"


def _failing(call, *, after: int):  # type: ignore[no-untyped-def]
    calls = [0]

    def maybe(*args):  # type: ignore[no-untyped-def]
        calls[0] += 1
        if calls[0] > after:
            raise ZeroDivisionError
        return call(*args)

    return maybe


def test_many_requests_leave_little_behind() -> None:
    """Ends are remembered up to a bound; slots and live requests are none."""
    with running("cpu", stage(enforce_eager=True, max_num_seqs=2)) as runner:
        book = runner.model.streaming.book  # type: ignore[attr-defined]
        one = codes(1, 1)
        runner.execute_model([ChunkRequest("first", one, finished=True)])
        for i in range(70_000):
            book.finish([f"r{i}"])
        assert len(book._ended) == 65_536
        assert (book.live, len(book._free)) == ({}, 2)
        assert isinstance(runner.execute_model([ChunkRequest("first", one)])["first"], Tensor), "forgotten, so it may begin again"
    assert SMALL.sliding_window == 6
