"""An exported plan, loaded back, does to the traffic what was predicted: through the real Routines, and with real graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from inspect_streaming import tiny_codes, tiny_runner

import vgraph_lab as vg
from vgraph_lab.config import ConnectorConfig, StageConfig
from vgraph_lab.errors import FallbackReason
from vgraph_lab.graphs import StatsSnapshot
from vgraph_lab.graphs.target import Target
from vgraph_lab.inspect.coverage import coverage_table
from vgraph_lab.inspect.planner import (
    FreeForm,
    Plan,
    PlanPoint,
    StatelessGrid,
    StreamingGrid,
    plan_captures,
    replay_traffic,
    space_of,
    traffic_of,
    traffic_table,
)
from vgraph_lab.inspect.planner.shapes import Shape
from vgraph_lab.inspect.planner.spaces import Space
from vgraph_lab.qwen3_tts.code2wav import Qwen3TTSCode2Wav
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.stateless import StatelessRoutine
from vgraph_lab.qwen3_tts.stream_routines import IclPrefixRoutine, SuffixRoutine, XvecPrefixRoutine
from vgraph_lab.workload import chunk_schedule

STATELESS, ICL, XVEC, SUFFIX = "qwen3_tts.stateless", "qwen3_tts.icl_prefix", "qwen3_tts.xvec_prefix", "qwen3_tts.suffix"
W = 16


def made_up_costs() -> pd.DataFrame:
    """Two shapes of each Target; all others follow from the affine model."""
    rows = []
    for target, state in ((STATELESS, ""), (ICL, ""), (XVEC, ""), (SUFFIX, "icl 16")):
        for batch, frames in ((1, 17), (4, 40)):
            work = batch * frames
            figures = {"charge_bytes": 5000 + 900 * work, "shared_bytes": 1000 + 700 * work, "capture_s": 0.1 + work / 1e4}
            rows.append(
                {**Shape(target, state, batch, frames)._asdict(), **figures, "replay_ms": 0.2 + work / 90, "eager_ms": 2 + work / 99}
            )
    return pd.DataFrame(rows)


def compare(plan: Plan, point: PlanPoint, replayed: StatsSnapshot) -> None:
    """Call by call, and in total."""
    predicted = plan.predict(point)
    told = predicted.groupby(["target", "batch_size", "frames", "captured"])["calls"].sum().to_dict()
    table = coverage_table(replayed)
    found = table.groupby(["target", "batch_size", "frames", "captured"])["calls"].sum().to_dict()
    assert told == found
    assert replayed.hits() == point.figures["calls"]
    assert replayed.calls() == predicted["calls"].sum()
    if isinstance(plan.space, StatelessGrid):
        assert table["padding_frames"].sum() == point.figures["padding_frames"]


def check_export(decoder: Code2WavDecoder, traffic: pd.DataFrame, space: Space, rows: int = 12) -> None:
    plan = plan_captures(traffic, made_up_costs(), space)
    for row in {0, len(plan.choices) - 1, *range(0, len(plan.choices), max(1, len(plan.choices) // rows))}:
        point = plan.point(row)
        cfg = StageConfig.from_dict(yaml.safe_load(yaml.safe_dump(plan.stage(point))))
        model = Qwen3TTSCode2Wav(decoder, cfg)
        compare(plan, point, replay_traffic(traffic, model.get_vocoder_cudagraph_targets(), cfg.graph_settings))


connectors = st.one_of(
    st.builds(ConnectorConfig, codec_chunk_frames=st.integers(4, 9), initial_codec_chunk_frames=st.integers(1, 3)),
    st.builds(ConnectorConfig, codec_chunk_frames=st.integers(5, 9), initial_codec_chunk_frames=st.none()),
    st.builds(ConnectorConfig, codec_chunk_frames=st.integers(4, 9), codec_chunk_ramp=st.just((2, 3, 4))),
)


@st.composite
def streamed(draw: st.DrawFn) -> tuple[ConnectorConfig, pd.DataFrame]:
    connector = draw(connectors)
    cells = [(t, *cell) for t in (ICL, XVEC, SUFFIX) for cell in StreamingGrid(connector, W).cells(t)]
    cells += [(SUFFIX, "icl 3", 9), (SUFFIX, "icl, long reference 16", 20), (ICL, "long reference", 2)]
    rows = []
    for target, state, frames in draw(st.lists(st.sampled_from(cells), min_size=1, max_size=8)):
        kept = int(state.split()[-1]) if target == SUFFIX else 0
        shape = (draw(st.integers(1, 5)), draw(st.integers(kept + 1, frames + 1)))
        rows.append((target, state, *shape, draw(st.booleans()), draw(st.integers(1, 9))))
    columns = ["target", "state", "batch_size", "frames", "may_pad_frames", "calls"]
    return connector, traffic_table(pd.DataFrame(rows, columns=columns))


@settings(max_examples=15)
@given(case=streamed())
def test_streaming_export_does_what_was_predicted(tiny_decoder: Code2WavDecoder, case: tuple[ConnectorConfig, pd.DataFrame]) -> None:
    connector, traffic = case
    check_export(tiny_decoder, traffic, StreamingGrid(connector, W))


@settings(max_examples=15)
@given(calls=st.dictionaries(st.tuples(st.integers(1, 4), st.integers(1, 160)), st.integers(1, 9), min_size=1, max_size=9))
def test_stateless_export_does_what_was_predicted(tiny_decoder: Code2WavDecoder, calls: dict[tuple[int, int], int]) -> None:
    traffic = traffic_table(
        {
            "target": [STATELESS] * len(calls),
            "batch_size": [b for b, _ in calls],
            "frames": [f for _, f in calls],
            "calls": list(calls.values()),
        }
    )
    check_export(tiny_decoder, traffic, StatelessGrid(chunk_frames=20, left_context_frames=4))


@settings(max_examples=15)
@given(case=streamed())
def test_free_graphs_do_what_was_predicted(tiny_decoder: Code2WavDecoder, case: tuple[ConnectorConfig, pd.DataFrame]) -> None:
    connector, traffic = case
    plan = plan_captures(traffic, made_up_costs(), FreeForm())
    path = Qwen3TTSCode2Wav(tiny_decoder, StageConfig(connector=connector)).streaming
    assert path is not None
    for row in {0, len(plan.choices) // 2, len(plan.choices) - 1}:
        point = plan.point(row)
        graphs: dict[str, Any] = {ICL: (), XVEC: (), SUFFIX: (), **point.descriptors()}
        targets: list[Target[Any]] = [
            Target(ICL, IclPrefixRoutine(tiny_decoder, path.table, graphs[ICL]), graphs[ICL]),
            Target(XVEC, XvecPrefixRoutine(tiny_decoder, path.table, graphs[XVEC]), graphs[XVEC]),
            Target(SUFFIX, SuffixRoutine(tiny_decoder, path.table, path.transitions, graphs[SUFFIX]), graphs[SUFFIX]),
        ]
        compare(plan, point, replay_traffic(traffic, targets))


def test_free_stateless_graphs_do_what_was_predicted(tiny_decoder: Code2WavDecoder) -> None:
    traffic = traffic_table({"target": [STATELESS] * 4, "batch_size": [1, 2, 3, 3], "frames": [40, 7, 30, 5], "calls": [4, 3, 2, 1]})
    plan = plan_captures(traffic, made_up_costs(), FreeForm())
    for row in range(len(plan.choices)):
        point = plan.point(row)
        graphs = point.descriptors().get(STATELESS, ())
        compare(plan, point, replay_traffic(traffic, [Target(STATELESS, StatelessRoutine(tiny_decoder, graphs), graphs)]))


def test_reasons_of_a_replay(tiny_decoder: Code2WavDecoder) -> None:
    cfg = StageConfig.from_dict({"vocoder_cudagraph": {"capture_batch_sizes": [1], "targets": {XVEC: {"enabled": False}}}})
    traffic = traffic_table(
        {
            "target": [XVEC, SUFFIX, SUFFIX],
            "state": ["", "icl 16", "icl 3"],
            "batch_size": [1, 2, 1],
            "frames": [1, 41, 9],
            "calls": [1, 2, 4],
        }
    )
    model = Qwen3TTSCode2Wav(tiny_decoder, cfg)
    replayed = replay_traffic(traffic, model.get_vocoder_cudagraph_targets(), cfg.graph_settings)
    assert replayed.reasons() == {
        FallbackReason.STATE_NOT_COVERED: 4,
        FallbackReason.SHAPE_NOT_COVERED: 2,
        FallbackReason.DISABLED: 1,
    }


def play(runner: vg.GPUGenerationModelRunner) -> StatsSnapshot:
    """Three requests at a time, with and without a reference, one of them with a reference that is too long."""
    runner.capture_model()
    with runner:
        long = tiny_codes(W + 4, 9) if runner.cfg.connector.codec_left_context_frames > W else tiny_codes(W, 9)
        queues = [
            [c.request for c in chunk_schedule(f"r{n}", tiny_codes(frames, n), runner.cfg.connector, reference=reference)]
            for n, (frames, reference) in enumerate([(31, tiny_codes(9, 7)), (24, None), (18, None), (26, long), (2, tiny_codes(5, 8))])
        ]
        while any(queues):
            runner.execute_model([queue.pop(0) for queue in queues if queue])
        return runner.stats()


def test_recorded_streams_planned_exported_and_captured(tiny_folder: Path) -> None:
    """The whole way with real graphs: record eagerly, plan for everything, load the plan, capture, play again."""
    recorded = tiny_runner(
        tiny_folder, enforce_eager=True, max_num_seqs=8, graphs={"decode_batch_max_size": 4}, connector={"codec_left_context_frames": W + 4}
    )
    recorded_model = recorded.model
    assert isinstance(recorded_model, Qwen3TTSCode2Wav)
    assert recorded_model.streaming
    traffic = traffic_of(play(recorded), recorded_model.streaming.transitions)
    space = space_of(recorded_model)
    assert space == StreamingGrid(recorded.cfg.connector, W)
    plan = plan_captures(traffic, made_up_costs(), space)
    best = plan.recommend(objective="calls")
    stage = plan.stage(best)
    stage["vocoder_cudagraph"]["num_warmups"] = 1
    again = tiny_runner(tiny_folder, max_num_seqs=8, graphs=stage["vocoder_cudagraph"], connector=stage["connector"])
    played = play(again)
    compare(plan, best, played)
    assert 0 < best.figures["coverage"] < 1, "the long reference stays eager"


def test_recorded_utterances_planned_exported_and_captured(tiny_decoder: Code2WavDecoder) -> None:
    def play_whole(cfg: StageConfig) -> StatsSnapshot:
        with vg.GPUGenerationModelRunner(cfg, device="cpu") as runner:
            runner.load_model(Qwen3TTSCode2Wav(tiny_decoder, cfg))
            runner.capture_model()
            for batch in ([(5, 0), (9, 1)], [(27, 2)], [(3, 3)]):
                codes = [torch.randint(0, 32, (16, frames), generator=torch.Generator().manual_seed(seed)) for frames, seed in batch]
                runner.execute_model(
                    [vg.ChunkRequest(f"{frames}-{seed}", c, finished=True) for c, (frames, seed) in zip(codes, batch, strict=True)]
                )
            return runner.stats()

    keys = {"decode_chunk_frames": 8, "decode_left_context_frames": 2, "num_warmups": 1}
    traffic = traffic_of(play_whole(StageConfig.from_dict({"async_chunk": False, "enforce_eager": True, "vocoder_cudagraph": keys})))
    model = Qwen3TTSCode2Wav(tiny_decoder, StageConfig.from_dict({"async_chunk": False, "vocoder_cudagraph": keys}))
    assert space_of(model) == StatelessGrid(8, 2)
    plan = plan_captures(traffic, made_up_costs(), StatelessGrid(8, 2))
    best = plan.recommend(objective="calls")
    compare(plan, best, play_whole(StageConfig.from_dict(plan.stage(best))))
    with pytest.raises(AssertionError):
        compare(plan, best, play_whole(StageConfig.from_dict(plan.stage(plan.point(0)))))
