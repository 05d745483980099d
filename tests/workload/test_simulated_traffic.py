"""Traffic that is only counted, against the statistics of a runner that serves it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vgraph_lab as vg
from vgraph_lab.config import StageConfig, TargetSettings, VocoderGraphSettings
from vgraph_lab.errors import ConfigError, InputError
from vgraph_lab.inspect import coverage_table, timeline_table
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.requests import ChunkRequest
from vgraph_lab.workload import (
    BurstyArrivals,
    LengthDistribution,
    PoissonArrivals,
    RequestShape,
    RoutingRules,
    ServiceRequest,
    draw_shapes,
    linear_cost,
    shapes_of,
    simulate_service,
    simulate_traffic,
)
from vgraph_lab.workload.routing import Group

FRAMES_PER_S = 8.0


def stage(connector: dict[str, Any] | None = None, *, sizes: Sequence[int] = (1, 2), **fields: Any) -> StageConfig:
    content = {"connector": connector or {}, "max_num_seqs": 4, "vocoder_cudagraph": {"capture_batch_sizes": list(sizes)}, **fields}
    return StageConfig.from_dict(content)


def some_requests(decoder: Code2WavDecoder, lengths: Sequence[tuple[int, int]], seed: int = 0) -> list[ServiceRequest]:
    draw = torch.Generator().manual_seed(seed)
    rows, codes = decoder.geometry.num_quantizers, decoder.geometry.codebook_size

    def random(frames: int) -> torch.Tensor:
        return torch.randint(codes, (rows, frames), generator=draw)

    return [ServiceRequest(f"r{i}", random(frames), random(ref) if ref else None) for i, (frames, ref) in enumerate(lengths)]


SHORT = {"codec_chunk_frames": 6, "codec_left_context_frames": 16}
CASES: dict[str, dict[str, Any]] = {
    "fixed first chunk": {"connector": SHORT},
    "by load": {"connector": {**SHORT, "initial_codec_chunk_frames": None}},
    "ramp": {"connector": {**SHORT, "codec_chunk_ramp": [2, 3, 4]}},
    "end comes later": {"connector": {**SHORT, "codec_chunk_frames": 4}, "end_delay_frames": 1},
    "long references": {"connector": {**SHORT, "codec_left_context_frames": 40}},
    "no reference is kept": {"connector": {**SHORT, "codec_left_context_frames": 0}},
    "one row": {"connector": SHORT, "sizes": (1,)},
    "three rows": {"connector": SHORT, "sizes": (2, 3)},
}
ONE_TARGET_OFF = {"capture_batch_sizes": [1, 2], "targets": {"qwen3_tts.suffix": {"enabled": False}}}


def played_and_simulated(decoder: Code2WavDecoder, lengths: Sequence[tuple[int, int]], delay: int, cfg: StageConfig) -> Any:
    """What a runner on the CPU and the simulation count for the same requests, arrivals and costs."""
    requests, arrivals = some_requests(decoder, lengths), BurstyArrivals(2.0, burst_size=3.0)
    common: dict[str, Any] = {"arrivals": arrivals, "concurrency": 3, "talker_frames_per_s": FRAMES_PER_S, "end_delay_frames": delay}

    def cost(chunks: Sequence[ChunkRequest]) -> float:
        return 0.125 + 0.03125 * sum(chunk.codes.shape[1] for chunk in chunks)

    with vg.GPUGenerationModelRunner(cfg, device="cpu") as runner:
        runner.load_model(vg.Qwen3TTSCode2Wav(decoder, cfg))
        runner.capture_model()
        played = simulate_service(runner, requests, cfg.connector, max_num_seqs=4, cost=cost, seed=3, progress=False, **common)
        counted = runner.stats()
    assert played.requests["success"].all()
    window = decoder.geometry.sliding_window
    simulated = simulate_traffic(shapes_of(requests), cfg, cost=linear_cost(0.125, 0.03125), window_frames=window, seed=3, **common)
    return played, counted, simulated


@pytest.mark.parametrize("case", CASES)
def test_the_keys_are_those_of_a_real_runner(case: str, tiny_decoder: Code2WavDecoder) -> None:
    settings = dict(CASES[case])
    delay, window = settings.pop("end_delay_frames", 0), tiny_decoder.geometry.sliding_window
    lengths = [(13, 0), (7, 5), (1, 0), (26, window + 9), (19, window), (6, 1), (12, 30)]
    played, counted, simulated = played_and_simulated(tiny_decoder, lengths, delay, stage(**settings, enforce_eager=True))
    assert simulated.snapshot().counts == counted.counts
    assert (simulated.chunks, simulated.steps) == (len(played.chunks), played.chunks["step"].nunique())
    assert simulated.duration_s == played.chunks["finished_s"].max()
    assert simulated.frames == sum(frames for frames, _ in lengths)
    assert coverage_table(simulated.snapshot())["calls"].sum() == simulated.histogram()["calls"].sum() == counted.calls()


@pytest.mark.parametrize("graphs", [{"capture_batch_sizes": [1, 2]}, ONE_TARGET_OFF], ids=["all Targets", "one Target off"])
def test_outcomes_and_graphs_are_those_of_a_real_runner(graphs: dict[str, Any], tiny_decoder: Code2WavDecoder) -> None:
    """Captured graphs of 1 and 2 rows, a long reference and short last chunks: hits, padded hits and both kinds of misses."""
    connector = {"codec_chunk_frames": 10, "codec_left_context_frames": 20, "initial_codec_chunk_frames": 2}
    cfg = StageConfig.from_dict({"connector": connector, "max_num_seqs": 4, "vocoder_cudagraph": {"num_warmups": 1, **graphs}})
    lengths = [(13, 0), (13, 0), (7, 5), (1, 0), (24, 20), (9, 16)]
    _, counted, simulated = played_and_simulated(tiny_decoder, lengths, 0, cfg)
    assert simulated.snapshot().counts == counted.counts
    assert counted.hits()
    assert counted.fallbacks()


@given(data=st.data())
def test_outcomes_are_those_that_the_routines_resolve(data: st.DataObject, tiny_decoder: Code2WavDecoder) -> None:
    """Any rows, frames and state, against the Routines themselves."""
    window = tiny_decoder.geometry.sliding_window
    cfg = stage({"codec_chunk_frames": 6, "initial_codec_chunk_frames": None}, sizes=(2, 3))
    rules = RoutingRules(cfg, window)
    targets = {t.target_id: t for t in _targets(tiny_decoder, cfg)}
    rows, frames, is_last = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7)), data.draw(st.booleans())
    group = Group(data.draw(st.sampled_from(["icl", "xvec"])), data.draw(st.integers(0, window)), frames, 0)
    codes = torch.zeros(rows, tiny_decoder.geometry.num_quantizers, frames, dtype=torch.int64)
    call = rules.call(group, rows, frames, is_last)
    if group.kept:
        resolution = targets[call.target_id].routine.resolve(codes, torch.arange(rows), group.mode, group.kept, is_last)
    elif group.mode == "xvec":
        resolution = targets[call.target_id].routine.resolve(codes, is_last)
    else:
        reference = codes[..., :1].expand(-1, -1, window)
        resolution = targets[call.target_id].routine.resolve(codes, reference, torch.zeros(rows), is_last)
    kind = rules.outcome(call, rules.declared()[call.target_id])
    assert call.key == resolution.key
    assert kind.descriptor == (resolution.candidates[0] if resolution.candidates else None)
    assert resolution.candidates or kind.reason == resolution.miss_reason


@lru_cache(maxsize=1)
def _model(decoder: Code2WavDecoder) -> Any:
    cfg = stage({"codec_chunk_frames": 6, "initial_codec_chunk_frames": None}, sizes=(2, 3))
    return vg.Qwen3TTSCode2Wav(decoder, cfg)


def _targets(decoder: Code2WavDecoder, cfg: StageConfig) -> Any:
    assert _model(decoder).cfg == cfg
    return _model(decoder).get_vocoder_cudagraph_targets()


def test_whole_utterances_are_counted_as_a_real_runner_counts_them(tiny_decoder: Code2WavDecoder) -> None:
    """The shortest is complete first and runs alone, for so long that all others run together after it."""
    keys = {"capture_batch_sizes": [1, 2], "enforce_eager": True, "decode_chunk_frames": 10, "decode_left_context_frames": 3}
    cfg = StageConfig.from_dict({"async_chunk": False, "max_num_seqs": 8, "vocoder_cudagraph": keys})
    requests = some_requests(tiny_decoder, [(23, 0), (4, 2), (31, 5), (9, 0)])
    with vg.GPUGenerationModelRunner(cfg, device="cpu") as runner:
        runner.load_model(vg.Qwen3TTSCode2Wav(tiny_decoder, cfg))
        runner.capture_model()
        for together in ([requests[1]], [requests[0], requests[2], requests[3]]):
            chunks = [
                ChunkRequest(r.id, r.codes if r.reference is None else torch.cat((r.reference, r.codes), 1), finished=True)
                for r in together
            ]
            runner.execute_model(chunks)
        counted = runner.stats()
    simulated = simulate_traffic(shapes_of(requests), cfg, cost=lambda chunks, frames: 100.0, talker_frames_per_s=FRAMES_PER_S)
    assert simulated.snapshot().counts == counted.counts
    assert simulated.steps == 2


def test_what_the_model_declares(tiny_decoder: Code2WavDecoder) -> None:
    window = tiny_decoder.geometry.sliding_window
    for settings in CASES.values():
        cfg = stage(**{name: value for name, value in settings.items() if name != "end_delay_frames"})
        rules = RoutingRules(cfg, window)
        targets = vg.Qwen3TTSCode2Wav(tiny_decoder, cfg).get_vocoder_cudagraph_targets()
        expected = {t.target_id: set(t.descriptors) if rules.is_enabled(t.target_id) else set() for t in targets}
        assert {target_id: set(found) for target_id, found in rules.declared().items()} == expected


@given(
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 90)), min_size=1, max_size=12),
    concurrency=st.integers(1, 6),
    rate=st.sampled_from([0.2, 3.0]),
    per_frame=st.sampled_from([0.0, 0.01]),
)
def test_nothing_is_lost_and_no_call_is_too_large(lengths: list[tuple[int, int]], concurrency: int, rate: float, per_frame: float) -> None:
    cfg = stage({"codec_chunk_frames": 9, "initial_codec_chunk_frames": None}, sizes=(1, 3), max_num_seqs=6)
    result = simulate_traffic(
        [RequestShape(*length) for length in lengths],
        cfg,
        cost=linear_cost(0.05, per_frame),
        arrivals=PoissonArrivals(rate),
        concurrency=concurrency,
    )
    rows: Counter[str] = Counter()
    for call, n in result.calls.items():
        assert call.key.batch_size <= 3
        rows[call.target_id] += call.key.batch_size * n
    assert rows["qwen3_tts.icl_prefix"] == sum(ref > 0 for _, ref in lengths)
    assert rows["qwen3_tts.xvec_prefix"] == sum(ref == 0 for _, ref in lengths)
    assert sum(rows.values()) == result.chunks, "without a delayed end every chunk is decoded"
    assert result.requests == len(lengths)
    assert result.busy_s <= result.duration_s + 1e-9
    assert result.snapshot().fallbacks() == 0, "the declared graphs cover the connector's own chunks"


def test_the_same_seed_gives_the_same_traffic() -> None:
    def run(seed: int) -> Any:
        shapes = draw_shapes(200, lengths=LengthDistribution((20, 45, 70)), icl_share=0.3, seed=seed)
        return simulate_traffic(shapes, stage(), cost=linear_cost(0.02, 0.0), arrivals=PoissonArrivals(2.0), seed=seed)

    assert run(1).calls == run(1).calls
    assert run(1).calls != run(2).calls


def test_an_unknown_state_and_a_missing_graph_have_their_reasons() -> None:
    """With a reference longer than W nothing is covered; without the graph of two rows the one of four serves, or none."""
    long = simulate_traffic([RequestShape(30, 90)], stage({"codec_left_context_frames": 90}), cost=linear_cost(1, 0))
    assert set(map(str, long.snapshot().reasons())) == {"state_not_covered"}
    together = simulate_traffic([RequestShape(1)] * 2, stage(), cost=linear_cost(0.1, 0))
    (call,) = together.calls
    assert (str(call.key), call.is_last) == ("B2×T1", True)
    xvec = "qwen3_tts.xvec_prefix"
    assert set(map(str, together.snapshot({}).reasons())) == {"shape_not_covered"}
    larger = vg.graphs.Descriptor(4, 3)
    assert together.snapshot({xvec: [larger]}).graph_hits(xvec, larger) == 1, "the last chunk may be padded"


def test_requests_are_read_as_they_are_needed_and_memory_does_not_grow() -> None:
    """The source is asked for at most one more request than have begun; what remains is counted by kind."""
    asked = 0

    def source() -> Any:
        nonlocal asked
        for _ in range(3000):
            asked += 1
            yield RequestShape(26)

    begun: list[int] = []

    def cost(chunks: int, frames: int) -> float:
        begun.append(asked)
        return 0.01

    result = simulate_traffic(source(), stage(), cost=cost, concurrency=2)
    assert begun[0] <= 4
    assert result.requests == asked == 3000
    assert len(result.calls) < 20
    assert "3,000 requests" in str(result)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"concurrency": 5}, "concurrency must be from 1 to max_num_seqs, 4, got 5"),
        ({"concurrency": 0}, "got 0"),
        ({"talker_frames_per_s": float("nan")}, "talker_frames_per_s must be a finite number above 0, got nan"),
        ({"shapes": []}, "there is no request to play"),
        ({"cost": lambda chunks, frames: float("nan")}, "the cost of a step must be a finite time in seconds, got nan"),
        ({"cost": lambda chunks, frames: -1.0}, "got -1.0"),
        ({"shapes": [RequestShape(0)]}, "an utterance of 0 frames has no chunks"),
        ({"shapes": [RequestShape(3, -1)]}, "a reference cannot have -1 frames"),
        ({"end_delay_frames": -1}, "end_delay_frames is -1"),
    ],
)
def test_what_cannot_be_simulated(settings: dict[str, Any], message: str) -> None:
    arguments = {"shapes": [RequestShape(3)], "cfg": stage(), "cost": linear_cost(1, 0), **settings}
    with pytest.raises(InputError, match=message):
        simulate_traffic(arguments.pop("shapes"), arguments.pop("cfg"), **arguments)


def test_a_configuration_of_another_model() -> None:
    graphs = VocoderGraphSettings(targets={"other.target": TargetSettings()})
    with pytest.raises(ConfigError, match=r"other\.target: no such Target"):
        simulate_traffic([RequestShape(3)], StageConfig(vocoder_cudagraph=graphs), cost=linear_cost(1, 0))


@given(st.floats(0.2, 40.0), st.integers(0, 5))
def test_intervals_divide_the_calls_and_change_nothing_else(interval_s: float, seed: int) -> None:
    common: dict[str, Any] = {"cost": linear_cost(0.125, 0.03125), "arrivals": PoissonArrivals(0.4), "seed": seed}
    shapes, cfg = list(draw_shapes(40, seed=seed)), stage(SHORT)
    whole, divided = simulate_traffic(shapes, cfg, **common), simulate_traffic(shapes, cfg, interval_s=interval_s, **common)
    assert divided.calls == whole.calls
    assert (divided.duration_s, divided.steps) == (whole.duration_s, whole.steps)
    ends = [end for end, _ in divided.intervals]
    assert ends == pytest.approx([interval_s * (number + 1) for number in range(len(ends))])
    assert ends[-1] - interval_s <= divided.duration_s
    samples = divided.samples()
    assert samples[0][0] == samples[0][1].calls() == 0
    assert samples[-1][1].counts == whole.snapshot().counts
    assert samples[-1][1].counts != {}
    assert timeline_table(samples)["calls"].sum() == sum(whole.calls.values())


def test_a_step_counts_in_the_interval_in_which_it_begins() -> None:
    """One frame per chunk at 10 frames/s, and steps that take no time: chunk k is executed at (k + 1) / 10 s."""
    cfg = stage({"codec_chunk_frames": 1, "initial_codec_chunk_frames": 1, "codec_left_context_frames": 0}, max_num_seqs=1)
    found = simulate_traffic([RequestShape(10)], cfg, cost=linear_cost(0, 0), talker_frames_per_s=10.0, interval_s=0.45)
    assert [sum(calls.values()) for _, calls in found.intervals] == [4, 4, 2]
    assert [round(end, 9) for end, _ in found.intervals] == [0.45, 0.9, 1.35]


@pytest.mark.parametrize("interval_s", [0.0, -1.0, float("inf"), float("nan")])
def test_intervals_are_finite_times(interval_s: float) -> None:
    with pytest.raises(InputError, match="interval_s must be a finite number above 0"):
        simulate_traffic([RequestShape(3)], stage(), cost=linear_cost(0, 0), interval_s=interval_s)
    with pytest.raises(InputError, match="Pass interval_s"):
        simulate_traffic([RequestShape(3)], stage(), cost=linear_cost(0, 0)).samples()
