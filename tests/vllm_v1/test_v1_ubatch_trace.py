"""Spans of micro-batches: what they say against a clock that the test turns, and overlap against counting ticks."""

from __future__ import annotations

import threading
from itertools import count, pairwise

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab.errors import LifecycleError
from vgraph_lab.vllm_v1 import (
    ForwardContext,
    UBatchSpan,
    UBatchTrace,
    dbo_span,
    dbo_yield,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
    make_ubatch_contexts,
    overlap_s,
    ubatch_trace,
)
from vgraph_lab.vllm_v1.ubatch_threads import UBatchThreads


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a second later."""
    ticks = count()
    monkeypatch.setattr(ubatch_trace, "perf_counter", lambda: float(next(ticks)))


def run(trace: UBatchTrace, *parts: object) -> None:
    contexts = make_ubatch_contexts(len(parts), None, None, [ForwardContext()] * len(parts), threading.Barrier(len(parts) + 1), trace=trace)
    trace.start()
    UBatchThreads(len(parts), torch.device("cpu")).run(contexts, parts, [""] * len(parts))  # type: ignore[arg-type]


def part() -> None:
    with dbo_span("attention"):
        dbo_yield()
    dbo_yield_and_switch_from_compute_to_comm()
    dbo_yield_and_switch_from_comm_to_compute()


@pytest.mark.usefixtures("clock")
def test_spans_say_who_did_what_where() -> None:
    trace = UBatchTrace()
    run(trace, part, part)
    spans = trace.spans()
    streams = [(span.ubatch, span.stream, span.name) for span in spans if span.stream != "host"]
    assert streams == [
        *((number, "compute", name) for number in (0, 1) for name in ("compute", "attention")),
        *((number, "compute", name) for number in (0, 1) for name in ("attention", "compute")),
        *((number, "comm", "comm") for number in (0, 1)),
        *((number, "compute", "compute") for number in (0, 1)),
    ]
    assert [span.ubatch for span in spans if span.stream == "host"] == [0, 1] * 4
    for stream in ("host", "compute"):  # of one stream, they follow each other
        own = [span for span in spans if span.stream == stream]
        assert all(first.end_s <= second.start_s for first, second in pairwise(own))
    for span in spans:
        assert 0 < span.start_s < span.end_s
        turns = [turn for turn in spans if turn.stream == "host" and turn.start_s <= span.start_s and span.end_s <= turn.end_s]
        assert span.stream == "host" or [turn.ubatch for turn in turns] == [span.ubatch]
    assert overlap_s(spans) == 0  # on the CPU, work is done when its call returns


def test_a_list_of_spans_makes_a_table() -> None:
    trace = UBatchTrace()
    run(trace, part, part)
    table = pd.DataFrame(trace.spans())
    assert list(table) == ["start_s", "end_s", "ubatch", "stream", "name"]
    assert len(table) == len(trace.spans())
    trace.clear()
    assert trace.spans() == []


def test_a_failed_step_leaves_no_span_open() -> None:
    def fail() -> None:
        with dbo_span("experts"):
            dbo_yield()
            raise ValueError("x")

    trace = UBatchTrace()
    with pytest.raises(ValueError, match="x"):
        run(trace, fail, part)
    assert {span.name for span in trace.spans()} >= {"experts", "attention", "turn"}
    run(trace, part, part)
    assert [span.name for span in trace.spans()].count("experts") == 2  # before and after the hand-over; the name is gone


def test_a_trace_is_read_between_steps() -> None:
    trace = UBatchTrace()
    trace.begin(1, "compute", None)
    with pytest.raises(LifecycleError, match="micro-batch 1 is still running"):
        trace.spans()
    trace.end(1)
    trace.end(1)
    assert {(span.ubatch, span.stream) for span in trace.spans()} == {(1, "compute"), (1, "host")}


def test_names_outside_of_micro_batches_are_nobodys() -> None:
    with dbo_span("attention"):
        pass


SPANS = st.builds(
    lambda start, length, ubatch, stream: UBatchSpan(float(start), float(start + length), ubatch, stream, ""),
    st.integers(0, 20),
    st.integers(0, 6),
    st.integers(0, 2),
    st.sampled_from(["compute", "comm", "host"]),
)


@given(st.lists(SPANS, max_size=8))
def test_overlap_counts_the_ticks_in_which_both_run(spans: list[UBatchSpan]) -> None:
    def running(stream: str, tick: int) -> set[int]:
        return {span.ubatch for span in spans if span.stream == stream and span.start_s <= tick < span.end_s}

    expected = sum(any(one != other for one in running("comm", tick) for other in running("compute", tick)) for tick in range(30))
    assert overlap_s(spans) == expected


class Event:
    """Stands for a CUDA event: its time is when the stream comes to it."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms = 0.0

    def record(self, stream: Stream) -> None:
        self.at_ms = stream.now_ms

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms


class Stream:
    """Stands for a CUDA stream that is as far as ``now_ms``."""

    def __init__(self) -> None:
        self.now_ms = 100.0


def test_on_a_gpu_the_device_tells_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, comm = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    trace = UBatchTrace("cuda:0")
    trace.start()
    trace.begin(0, "compute", compute)  # type: ignore[arg-type]
    compute.now_ms = 130
    trace.end(0)
    comm.now_ms = 130
    trace.begin(0, "comm", comm)  # type: ignore[arg-type]
    comm.now_ms = 170
    trace.end(0)
    trace.begin(1, "compute", compute)  # type: ignore[arg-type]
    compute.now_ms = 150
    trace.end(1)
    found = [span for span in trace.spans() if span.stream != "host"]
    assert [(span.ubatch, span.stream) for span in found] == [(0, "compute"), (1, "compute"), (0, "comm")]
    assert [time_s for span in found for time_s in (span.start_s, span.end_s)] == pytest.approx([0, 0.03, 0.03, 0.05, 0.03, 0.07])
    assert overlap_s(trace.spans()) == pytest.approx(0.02)
