"""Whatever happens in whatever order, each request gets the whole utterance's samples, and nothing is left over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from contracts.incremental import path_of, running, stage, whole
from contracts.streaming import Stream
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vgraph_lab.errors import RequestError
from vgraph_lab.requests import ChunkRequest
from vgraph_lab.runner import GPUGenerationModelRunner

TARGET = "qwen3_tts.incremental"
SLOTS = 4
plans = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 4, 6, 8]), st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(0, 5)),
    min_size=6,
    max_size=12,
)
some = st.sets(st.integers(0, SLOTS - 1), min_size=1)
events = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["step", "step beside a bad one", "failing step"]), some),
        st.tuples(st.just("abort"), st.sets(st.integers(0, SLOTS - 1), min_size=1, max_size=1)),
    ),
    min_size=5,
    max_size=25,
)


@pytest.fixture(scope="module", params=["eager", "graphs", "generations"])
def runner(request: pytest.FixtureRequest) -> Iterator[GPUGenerationModelRunner]:
    more: dict[str, dict[str, Any]] = {
        "eager": {"enforce_eager": True},
        "graphs": {},
        "generations": {"eviction": "generation", "targets": {TARGET: {"enable_lazy_capture": True, "max_extra_graphs": 1}}},
    }
    with running("cpu", stage([2], max_num_seqs=SLOTS, **more[request.param]), dtype=torch.float64) as ready:
        yield ready


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(plans=plans, events=events)
def test_interleavings(
    runner: GPUGenerationModelRunner,
    monkeypatch: pytest.MonkeyPatch,
    plans: list[tuple[int, list[int], int]],
    events: list[tuple[str, set[int]]],
) -> None:
    path = path_of(runner)
    runner.model.reset()
    waiting = [Stream(f"r{i}", reference, sizes, seed=seed) for i, (reference, sizes, seed) in enumerate(plans)]
    places: list[tuple[Stream, int] | None] = [None] * SLOTS
    for number, (what, which) in enumerate(events):
        for place in range(SLOTS):
            if places[place] is None and waiting:
                places[place] = (waiting.pop(), 0)
        moving = [(place, *held) for place in sorted(which) if (held := places[place]) is not None]
        if what == "abort":
            for place, stream, i in moving:
                assert runner.abort([stream.name]) == ([stream.name] if i else [])
                places[place] = None
            continue
        batch = [stream.chunk(i) for _, stream, i in moving]
        found: dict[str, Any] = {}
        if what == "failing step" and batch:
            with monkeypatch.context() as patch, suppress(ZeroDivisionError):
                patch.setattr(path, "_target", _Failing(path._target, after=number % 3))
                found = runner.execute_model(batch)
            found = found or runner.execute_model(batch)  # as though nothing had been
        else:
            bad = [ChunkRequest(f"bad {number}", torch.full((16, 1), 32))] if what == "step beside a bad one" else []
            found = runner.execute_model([*bad, *batch])
            assert all(isinstance(found.pop(chunk.request_id), RequestError) for chunk in bad)
        for place, stream, i in moving:
            samples, per_frame = found[stream.name], path.decoder.samples_per_frame
            assert isinstance(samples, Tensor), samples
            start = sum(stream.sizes[:i]) * per_frame
            expected = whole(path.decoder, stream)[start : start + stream.sizes[i] * per_frame]
            assert torch.allclose(samples, expected, atol=1e-6), (stream.reference, stream.sizes, i)
            places[place] = (stream, i + 1) if i + 1 < len(stream.sizes) else None
    live = {held[0].name for held in places if held is not None and held[1]}
    assert set(runner.model.live_requests) == live  # type: ignore[attr-defined]
    runner.abort(live)
    assert sorted(path.book._free) == list(range(SLOTS)), "every slot came back"


class _Failing:
    """A Target whose calls fail after so many, once they have done their work: rows have moved on then."""

    def __init__(self, target: Any, *, after: int) -> None:
        self._target, self._calls_left = target, after

    def __call__(self, *args: Any) -> Any:
        output = self._target(*args)
        self._calls_left -= 1
        if self._calls_left < 0:
            raise ZeroDivisionError
        return output
