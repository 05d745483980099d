"""Arrivals against their closed forms, lengths against what they were given."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from workload.stub_runner import StubRunner

from vgraph_lab import bundled
from vgraph_lab.errors import InputError
from vgraph_lab.workload import (
    AllAtOnce,
    Arrivals,
    BurstyArrivals,
    LengthDistribution,
    PoissonArrivals,
    RampArrivals,
    RequestShape,
    TraceArrivals,
    draw_requests,
    draw_shapes,
    shapes_of,
    simulate_service,
)


def moments(arrivals: Arrivals, count: int, seed: int = 0) -> np.ndarray:
    return np.array(list(islice(arrivals.times(seed), count)))


@given(
    arrivals=st.sampled_from(
        [AllAtOnce(), PoissonArrivals(3.0), BurstyArrivals(5.0, 4.0, 0.01), RampArrivals(0.0, 8.0, 20.0), RampArrivals(9.0, 1.0, 5.0)]
    ),
    seed=st.integers(0, 5),
)
def test_moments_ascend_from_zero_and_follow_the_seed(arrivals: Arrivals, seed: int) -> None:
    found = moments(arrivals, 50, seed)
    assert found[0] == 0
    assert (np.diff(found) >= 0).all()
    np.testing.assert_array_equal(found, moments(arrivals, 50, seed))
    if not isinstance(arrivals, AllAtOnce):
        assert not np.array_equal(found, moments(arrivals, 50, seed + 1))


def test_poisson_gaps() -> None:
    """Mean and standard deviation of exponential gaps are 1/rate; e⁻¹ of them are longer than that."""
    gaps = np.diff(moments(PoissonArrivals(4.0), 40_001))
    assert gaps.mean() == pytest.approx(0.25, rel=0.02)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)
    assert (gaps > 0.25).mean() == pytest.approx(math.exp(-1), abs=0.01)


def test_bursts_have_their_size_and_the_rate_is_kept() -> None:
    arrivals = BurstyArrivals(4.0, burst_size=5.0, gap_s=0.001)
    found = moments(arrivals, 60_001)
    assert found[-1] == pytest.approx(60_000 / 4.0, rel=0.03)
    between = ~np.isclose(np.diff(found), 0.001, rtol=1e-4)
    assert 60_000 / between.sum() == pytest.approx(5.0, rel=0.03)
    one_by_one = np.diff(moments(BurstyArrivals(4.0, burst_size=1.0), 20_001))
    assert one_by_one.std() == pytest.approx(0.25, rel=0.04), "bursts of one are Poisson"
    assert np.diff(found).std() > 2 * one_by_one.std()


def test_a_ramp_expects_the_area_under_its_rate() -> None:
    """From 0 to 10 per second in 100 s: 500 come by then, a quarter of them in the first half; 10 per second later."""
    arrivals = RampArrivals(0.0, 10.0, 100.0)
    runs = [moments(arrivals, 2000, seed) for seed in range(40)]
    assert np.mean([(run <= 100).sum() for run in runs]) == pytest.approx(500, rel=0.02)
    assert np.mean([(run <= 50).sum() for run in runs]) == pytest.approx(125, rel=0.04)
    assert np.mean([((run > 100) & (run <= 150)).sum() for run in runs]) == pytest.approx(500, rel=0.02)
    flat = moments(RampArrivals(4.0, 4.0, 7.0), 20_001)
    assert flat[-1] == pytest.approx(5000, rel=0.03)


def test_a_trace_starts_at_its_first_moment_and_ends() -> None:
    trace = TraceArrivals([100.5, 101.0, 101.0, 104.0])
    assert list(trace.times(0)) == [0, 0.5, 0.5, 3.5]
    requests = draw_requests(2, kind="xvec", codes={"a": draw_requests(1)[0].codes[:, :4]})
    settings: dict[str, Any] = {"concurrency": 2, "cost": lambda _: 0.0, "progress": False}
    from vgraph_lab.config import ConnectorConfig

    played = simulate_service(StubRunner(), requests, ConnectorConfig(), arrivals=TraceArrivals([7.0, 7.5]), **settings)
    assert played.requests["began_s"].tolist() == [0, 0.5]
    with pytest.raises(InputError, match="the arrivals end after 1 of 2 requests"):
        simulate_service(StubRunner(), requests, ConnectorConfig(), arrivals=TraceArrivals([7.0]), **settings)
    with pytest.raises(InputError, match="either request_rate_per_s or arrivals"):
        simulate_service(StubRunner(), requests, ConnectorConfig(), arrivals=AllAtOnce(), request_rate_per_s=1.0, **settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PoissonArrivals(0.0), "rate_per_s must be a finite number above 0, got 0.0"),
        (lambda: BurstyArrivals(1.0, burst_size=0.5), "burst_size must be at least 1"),
        (lambda: BurstyArrivals(1.0, gap_s=-1.0), "gap_s must be a finite number from 0"),
        (lambda: BurstyArrivals(10.0, burst_size=10.0, gap_s=0.2), "leave no pause at 10 requests/s"),
        (lambda: RampArrivals(-1.0, 1.0, 1.0), "from_rate_per_s must be a finite number from 0"),
        (lambda: RampArrivals(1.0, 0.0, 1.0), "to_rate_per_s must be a finite number above 0"),
        (lambda: TraceArrivals([]), "one or more finite moments"),
        (lambda: TraceArrivals([1.0, math.inf]), "one or more finite moments"),
        (lambda: TraceArrivals([2.0, 1.0]), "must ascend"),
    ],
)
def test_what_makes_no_arrivals(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_lengths_are_those_of_the_bundled_utterances() -> None:
    lengths = LengthDistribution.bundled()
    clips = bundled.utterances()
    assert len(lengths.frames) == len(clips)
    for frames, clip in zip(lengths.frames, clips, strict=True):
        assert abs(frames - clip.duration_s * 12.5) <= 1
    assert lengths.mean == pytest.approx(np.mean(lengths.frames))


def test_lengths_of_a_csv(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("name,duration_s,weight\na,0.08,1\nb,0.081,3\nc,4.0,0\n")
    lengths = LengthDistribution.from_csv(file)
    assert (lengths.frames, lengths.weights, lengths.mean) == ((1, 2, 50), (1, 3, 0), 1.75)
    file.write_text("\ufeffframes\n12\n40\n", encoding="utf-8")
    assert LengthDistribution.from_csv(file) == LengthDistribution((12, 40), (1, 1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("frame\n3\n", r"either a column frames or a column duration_s, got frame\. Did you mean 'frames'"),
        ("frames,duration_s\n3,1\n", "either a column frames or"),
        ("", "got none"),
        ("frames\n3.5\n", r"line 2: frames is 3\.5; expected a number above 0"),
        ("frames\n3\n0\n", "line 3: frames is 0"),
        ("frames\nmany\n", "line 2"),
        ("frames,weight\n3,\n", "line 2"),
        ("duration_s\ninf\n", "line 2"),
        ("frames\n", "one or more whole numbers of frames from 1, got none"),
        ("frames,weight\n3,-1\n", "weights must be 1 finite numbers from 0"),
    ],
)
def test_a_csv_that_holds_no_lengths(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text(content)
    with pytest.raises(InputError, match=message):
        LengthDistribution.from_csv(file)


def test_a_csv_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read as a CSV file"):
        LengthDistribution.from_csv(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"frames\n\xff\xfe\n")
    with pytest.raises(InputError, match="cannot be read as a CSV file"):
        LengthDistribution.from_csv(tmp_path / "binary.csv")


def test_drawn_shapes_have_their_shares() -> None:
    lengths = LengthDistribution((10, 20), (3.0, 1.0))
    drawn = list(draw_shapes(8000, lengths=lengths, references=LengthDistribution((72,)), icl_share=0.25, seed=4))
    assert drawn == list(draw_shapes(8000, lengths=lengths, references=LengthDistribution((72,)), icl_share=0.25, seed=4))
    shares = Counter(drawn)
    assert shares[RequestShape(10, 72)] / 8000 == pytest.approx(3 / 16, abs=0.02)
    assert shares[RequestShape(20, 0)] / 8000 == pytest.approx(3 / 16, abs=0.02)
    assert len(drawn) == 8000
    assert {shape.ref_frames for shape in draw_shapes(50, icl_share=0)} == {0}
    assert 0 not in {shape.ref_frames for shape in draw_shapes(50, icl_share=1)}


def test_shapes_of_requests_with_codes() -> None:
    requests = draw_requests(4, seed=1)
    assert shapes_of(requests) == [(r.frames, 0 if r.reference is None else r.reference.shape[1]) for r in requests]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "0 requests cannot be drawn"),
        ({"count": 1, "icl_share": 1.5}, "icl_share must be from 0 to 1, got 1.5"),
    ],
)
def test_shapes_that_cannot_be_drawn(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        draw_shapes(**arguments)
