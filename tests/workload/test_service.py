"""The simulated service: its accounting, its order, its clock, and its figures against values worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from workload.stub_runner import SAMPLES_PER_FRAME, StubRunner

from vgraph_lab.config import ConnectorConfig
from vgraph_lab.errors import InputError, LifecycleError
from vgraph_lab.requests import ChunkRequest
from vgraph_lab.workload import ServiceRequest, ServiceResult, simulate_service

CONNECTOR = ConnectorConfig(codec_chunk_frames=5, initial_codec_chunk_frames=2, codec_left_context_frames=3)


def requests(*frames: int) -> list[ServiceRequest]:
    """Requests r0, r1, … of so many frames; frame k of request n has the code 100 n + k. Every other one has a reference."""
    return [
        ServiceRequest(
            f"r{n}", torch.arange(100 * n, 100 * n + count).expand(2, count), torch.full((2, 4), 999) if n % 2 else None, utterance=f"u{n}"
        )
        for n, count in enumerate(frames)
    ]


def cost(chunks: Sequence[ChunkRequest]) -> float:
    """1/4 s per step and 1/64 s per frame: exact in binary."""
    return 0.25 + sum(chunk.codes.shape[1] for chunk in chunks) / 64


def play(runner: StubRunner, traffic: Sequence[ServiceRequest], **settings: Any) -> ServiceResult:
    settings = {"concurrency": 2, "talker_frames_per_s": 8.0, "cost": cost, "sample_rate": 32, "progress": False, **settings}
    return simulate_service(runner, traffic, CONNECTOR, **settings)


services = st.fixed_dictionaries(
    {
        "concurrency": st.integers(1, 6),
        "max_num_seqs": st.none() | st.integers(1, 4),
        "talker_frames_per_s": st.sampled_from([1.0, 8.0, 64.0]),
        "request_rate_per_s": st.none() | st.sampled_from([0.5, 4.0]),
        "end_delay_frames": st.integers(0, 2),
        "seed": st.integers(0, 3),
    }
)


@given(frames=st.lists(st.integers(1, 23), min_size=1, max_size=10), settings=services)
def test_every_frame_is_served_once_in_order_and_not_before_it_is_there(frames: list[int], settings: dict[str, Any]) -> None:
    runner, traffic = StubRunner(), requests(*frames)
    result = play(runner, traffic, keep_audio=True, **settings)
    chunks = result.chunks
    assert chunks.groupby("request", sort=False)["frames"].sum().to_dict() == {r.id: r.frames for r in traffic}
    for request in traffic:
        own = chunks[chunks["request"] == request.id]
        assert own["chunk"].tolist() == list(range(len(own)))
        assert own["is_last"].tolist() == [False] * (len(own) - 1) + [True]
        assert (own["started_s"].to_numpy()[1:] >= own["finished_s"].to_numpy()[:-1]).all()
        assert result.audio[request.id].tolist() == [code for code in request.codes[0].tolist() for _ in range(SAMPLES_PER_FRAME)]
    assert (chunks["started_s"] >= chunks["available_s"]).all()
    assert not runner.live
    assert runner.ended == {r.id for r in traffic}
    assert result.requests["success"].all()


@given(frames=st.lists(st.integers(1, 23), min_size=1, max_size=10), settings=services)
def test_concurrency_is_a_limit_and_no_slot_stays_empty(frames: list[int], settings: dict[str, Any]) -> None:
    runner, limit = StubRunner(), settings["concurrency"]
    result = play(runner, requests(*frames), **settings)
    began = result.requests["began_s"].to_numpy()
    ended = result.chunks[result.chunks["is_last"]].set_index("request")["finished_s"].loc[result.requests.index].to_numpy()
    for moment in began:
        assert ((began <= moment) & (ended > moment)).sum() <= limit
    assert runner.most_live <= limit
    assert (began[1:] >= began[:-1]).all(), "requests begin in the order in which they come"
    if settings["request_rate_per_s"] is None:
        for number, moment in enumerate(began):
            assert moment == (0 if number < limit else sorted(ended[:number])[number - limit]), "the next one begins when a slot is free"


@given(frames=st.lists(st.integers(1, 23), min_size=1, max_size=10), settings=services)
def test_a_step_takes_what_is_there_and_begins_as_soon_as_it_can(frames: list[int], settings: dict[str, Any]) -> None:
    chunks = play(StubRunner(), requests(*frames), **settings).chunks
    largest = settings["max_num_seqs"] or settings["concurrency"]
    # A chunk can run once it is there and the one before it has run.
    previous_end = chunks.groupby("request")["finished_s"].shift(fill_value=0.0)
    can_run = chunks["available_s"].clip(lower=previous_end)
    engine_free = 0.0
    for step, own in chunks.groupby("step"):
        start, end = own["started_s"].iloc[0], own["finished_s"].iloc[0]
        assert len(own) == own["batch_size"].iloc[0] <= largest
        assert own["request"].is_unique
        pending = chunks["step"] >= step
        assert start == max(engine_free, can_run[pending].min())
        could_have_run = set(chunks.index[pending & (can_run <= start)])
        assert set(own.index) <= could_have_run
        left_out = could_have_run - set(own.index)
        assert not left_out or len(own) == largest
        assert not left_out or chunks["available_s"][list(left_out)].min() >= own["available_s"].max(), "the oldest come first"
        engine_free = end


def test_the_same_seed_gives_the_same_service() -> None:
    def table(seed: int) -> pd.DataFrame:
        return play(StubRunner(), requests(7, 12, 3, 20), request_rate_per_s=2.0, seed=seed).chunks

    pd.testing.assert_frame_equal(table(1), table(1))
    assert not table(1)["available_s"].equals(table(2)["available_s"])


def test_a_service_worked_out_by_hand() -> None:
    """One slot, two requests of 4 and 2 frames at 8 frames/s; a step takes 1/4 s and 1/64 s per frame, reference included.

    r0: chunk of 2 at 0.25 s, runs to 0.53125; rest of 2 at 0.5 s, runs from 0.53125 to 0.8125.
    r1: begins at 0.8125; its only chunk (2 new frames behind 3 of reference) at 1.0625, runs to 1.390625.
    """
    result = play(StubRunner(), requests(4, 2), concurrency=1)
    assert result.chunks["available_s"].tolist() == [0.25, 0.5, 1.0625]
    assert result.chunks["started_s"].tolist() == [0.25, 0.53125, 1.0625]
    assert result.chunks["finished_s"].tolist() == [0.53125, 0.8125, 1.390625]
    assert result.chunks["ref_frames"].tolist() == [0, 0, 3]
    table = result.requests
    assert table["began_s"].tolist() == [0, 0.8125]
    assert table["ttfp_s"].tolist() == [0.53125, 0.578125]
    assert table["e2e_s"].tolist() == [0.8125, 0.578125]
    assert table["audio_s"].tolist() == [0.5, 0.25]
    assert table["rtf"].tolist() == [1.625, 2.3125]
    assert table["utterance"].tolist() == ["u0", "u1"]

    summary = result.summary()
    assert (summary.requests, summary.successes, summary.steps, summary.mean_batch_size) == (2, 2, 3, 1)
    assert summary.duration_s == 1.390625
    assert summary.requests_per_s == pytest.approx(2 / 1.390625)
    assert summary.audio_s_per_s == pytest.approx(0.75 / 1.390625)
    assert summary.mean_e2e_s == pytest.approx((0.8125 + 0.578125) / 2)
    assert summary.p99_e2e_s == pytest.approx(0.578125 + 0.99 * (0.8125 - 0.578125))
    assert summary.mean_rtf == pytest.approx((1.625 + 2.3125) / 2)
    assert summary.mean_ttfp_s == pytest.approx((0.53125 + 0.578125) / 2)
    assert summary.busy_share == pytest.approx((0.28125 + 0.28125 + 0.328125) / 1.390625)
    assert "mean_rtf          1.969" in str(summary).splitlines()


def test_listeners_who_run_out_of_audio() -> None:
    """2 + 5 + 5 frames give 1/4 + 5/8 + 5/8 s of audio; chunks are there at 1, 4 and 6.5 s, so playback stalls twice.

    First audio at 1 s lasts until 1.25; the second comes at 4 (2.75 late) and lasts until 4.625; the third is 1.875 late.
    """
    durations = iter([0.75, 3.0, 2.5])  # from 0.25, from 1.0, from 4.0
    result = play(StubRunner(), requests(12), cost=lambda _: next(durations))
    assert result.chunks["finished_s"].tolist() == [1.0, 4.0, 6.5]
    assert result.chunks["stalled_s"].tolist() == [0, 2.75, 1.875]
    assert result.requests["underruns"].tolist() == [2]
    assert result.requests["stalled_s"].tolist() == [4.625]
    assert result.summary().underruns == 2
    assert play(StubRunner(), requests(12), cost=lambda _: 0.0, talker_frames_per_s=64.0).summary().underruns == 0


def test_a_refused_request_ends_and_the_next_one_takes_its_slot() -> None:
    runner = StubRunner(refuses=("r0", 1))
    result = play(runner, requests(30, 6, 6), concurrency=1, keep_audio=True)
    failed = result.requests.loc["r0"]
    assert (failed["success"], failed["chunks"]) == (False, 2)
    assert failed["error"] == "request 'r0': refused"
    assert result.audio["r0"].tolist() == [0.0] * 4 + [1.0] * 4, "what it had got is kept"
    assert result.requests["began_s"].loc["r1"] == result.chunks["finished_s"].iloc[1]
    assert result.requests["success"].tolist() == [False, True, True]
    summary = result.summary()
    assert (summary.requests, summary.successes) == (3, 2)
    assert summary.mean_e2e_s == pytest.approx(result.requests["e2e_s"].iloc[1:].mean()), "latencies are those of successes"
    assert not runner.aborted, "a runner has forgotten what it refused"


def test_figures_without_a_success_are_missing() -> None:
    summary = play(StubRunner(refuses=("r0", 0)), requests(4)).summary()
    assert summary.successes == summary.requests_per_s == 0
    assert summary.mean_e2e_s is summary.p99_e2e_s is summary.mean_rtf is summary.mean_ttfp_s is None
    assert "mean_rtf          none" in str(summary).splitlines()


def test_an_error_of_the_runner_leaves_no_live_request_behind() -> None:
    runner = StubRunner(breaks_at=2)
    with pytest.raises(RuntimeError, match="the device is gone"):
        play(runner, requests(30, 30, 30), id_prefix="x-")
    assert sorted(runner.aborted) == ["x-r0", "x-r1"]


def test_a_runner_that_is_not_ready_says_so_first() -> None:
    class NotReady(StubRunner):
        def abort(self, request_ids: Sequence[str], /) -> None:
            raise LifecycleError("only a ready runner has requests")

    with pytest.raises(RuntimeError, match="the device is gone") as caught:
        play(NotReady(breaks_at=0), requests(4))
    assert caught.value.__notes__ == ["The live requests could not be aborted: only a ready runner has requests"]


def test_the_first_chunk_follows_the_load() -> None:
    """With chunks of 17 the choices are 2, 4, 8 and 16; the nth request of four finds n quarters of the capacity in use."""
    by_load = ConnectorConfig(codec_chunk_frames=17, initial_codec_chunk_frames=None, codec_left_context_frames=3)
    result = simulate_service(StubRunner(), requests(20, 20, 20, 20), by_load, concurrency=4, cost=cost, progress=False)
    first = result.chunks[result.chunks["chunk"] == 0].set_index("request")["frames"]
    choices = by_load.first_chunk_choices
    assert [first[f"r{n}"] for n in range(4)] == [choices[round((n + 1) / 4 * (len(choices) - 1))] for n in range(4)]


def test_a_request_that_begins_during_a_step_finds_the_others_live() -> None:
    """r0's only chunk runs for 10 s; r1 comes meanwhile, when both of two places are taken."""
    by_load = ConnectorConfig(codec_chunk_frames=17, initial_codec_chunk_frames=None)
    settings: dict[str, Any] = {"request_rate_per_s": 1.0, "cost": lambda _: 10.0, "progress": False}
    result = simulate_service(StubRunner(), requests(2, 20), by_load, concurrency=2, **settings)
    assert 0.25 < result.requests["began_s"].loc["r1"] < result.chunks["finished_s"].iloc[0]
    assert result.chunks["frames"].tolist() == [2, 16, 4]


def test_measured_time_and_the_real_clock() -> None:
    for clock in ("virtual", "real"):
        runner = StubRunner()
        result = play(runner, requests(7, 12), cost=None, clock=clock, talker_frames_per_s=1000.0)
        assert (result.chunks["finished_s"] > result.chunks["started_s"]).all()
        assert (result.chunks["started_s"] >= result.chunks["available_s"]).all()
        assert result.requests["success"].all()
        assert not result.audio


def test_progress_can_be_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    play(StubRunner(), requests(7))
    assert capsys.readouterr().err == ""
    play(StubRunner(), requests(7), progress=True)
    assert "7/7" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"concurrency": 0}, "concurrency and max_num_seqs must be at least 1, got 0 and None"),
        ({"max_num_seqs": 0}, "got 2 and 0"),
        ({"talker_frames_per_s": 0.0}, "talker_frames_per_s must be a finite number above 0, got 0.0"),
        ({"request_rate_per_s": float("inf")}, "request_rate_per_s must be a finite number above 0, got inf"),
        ({"clock": "wall"}, "clock is 'wall'; accepted are 'virtual' and 'real'"),
        ({"clock": "real"}, "cannot be given a cost"),
    ],
)
def test_settings_that_make_no_service(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        play(StubRunner(), requests(4), **settings)


def test_requests_that_make_no_service() -> None:
    with pytest.raises(InputError, match="there is no request to play"):
        play(StubRunner(), [])
    with pytest.raises(InputError, match="request ids must be unique, but r0 came more than once"):
        play(StubRunner(), [*requests(4), *requests(4)])
    with pytest.raises(InputError, match="the runner returned nothing for r1"):
        play(StubRunner(forgets="r1"), requests(4, 4))
