"""The explorer on the tiny checkpoint: predictions against real captures, what bad entries do, what is left behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch

import vgraph_lab as vg
from vgraph_lab.config import ConnectorConfig, VocoderGraphSettings
from vgraph_lab.errors import ConfigError, FallbackReason, InputError, LifecycleError
from vgraph_lab.inspect import coverage_table
from vgraph_lab.inspect.planner import Choice, StatelessGrid, StreamingGrid, replay_traffic, traffic_table
from vgraph_lab.inspect.planner.forecast import Forecaster, traffic_from
from vgraph_lab.inspect.planner.outcome import OUTCOME_COLUMNS, compare_outcome, resolve_traffic
from vgraph_lab.inspect.planner.shapes import Shape
from vgraph_lab.qwen3_tts.stateless import stateless_target
from vgraph_lab.views import CaptureExplorer

STATELESS = "qwen3_tts.stateless"
CONNECTOR = ConnectorConfig(initial_codec_chunk_frames=1, codec_chunk_frames=25, codec_left_context_frames=16)


def stateless_traffic() -> pd.DataFrame:
    return traffic_table({"target": [STATELESS] * 4, "batch_size": [1, 1, 2, 4], "frames": [2, 3, 5, 8], "calls": [10, 20, 30, 2]})


def costs(**columns: list[float]) -> pd.DataFrame:
    """Affine in rows × frames, so that the model's answers can be told by hand: charge 100 + 10 w, capture 1 + w / 10."""
    shapes = {"target": [STATELESS] * 2, "batch_size": [1, 4], "frames": [2, 8]}
    figures = {"charge_bytes": [120, 420], "capture_s": [1.2, 4.2], "replay_ms": [2.0, 32.0], "eager_ms": [4.0, 34.0]}
    return pd.DataFrame({**shapes, **figures, **columns})


@pytest.fixture
def explorer(tiny_folder: Path) -> Iterator[CaptureExplorer]:
    made = CaptureExplorer(stateless_traffic(), checkpoint=tiny_folder, backend="cpu", frames=(3, 5), batch_sizes=(1, 2))
    yield made
    made.close()


def test_begins_with_what_covers_everything(tiny_folder):
    explorer = CaptureExplorer(stateless_traffic(), checkpoint=tiny_folder, backend="cpu")
    assert (explorer.frames.value, explorer.batch_sizes.value) == ("8", "4")
    assert explorer.prediction.figures["coverage"] == 1


def test_the_prediction_follows_the_fields(explorer):
    figures = explorer.prediction.figures
    assert figures["calls"] == 60  # by hand: all but the four rows
    assert figures["coverage"] == pytest.approx(60 / 62)
    assert figures["audio_coverage"] == pytest.approx((10 * 2 + 20 * 3 + 30 * 10) / (10 * 2 + 20 * 3 + 30 * 10 + 2 * 32))
    assert figures["wasted_share"] == pytest.approx(10 / 390)  # two frames in a graph of three, ten times
    explorer.frames.value = "5"
    explorer.batch_sizes.value = "2"
    assert explorer.prediction.figures["graphs"] == 1
    assert explorer.prediction.figures["wasted_share"] == pytest.approx((10 * 8 + 20 * 7) / (60 * 10))
    assert "Predicted for <strong>1 graph</strong>" in explorer._figures.value
    hits = explorer.prediction.coverage.query("outcome != 'fallback'")
    assert set(hits["captured"]) == {"B2×T5"}
    assert explorer.map.coverage.equals(explorer.prediction.coverage)


def test_what_is_not_known_is_not_zero(explorer):
    figures = explorer.prediction.figures
    assert [figures[name] for name in ("charge_bytes", "capture_s", "saved_s", "saved_share")] == [None] * 4
    assert (explorer.prediction.memory_source, explorer.prediction.times_source) == ("unknown", "unknown")
    assert "no shape has been measured yet" in explorer._figures.value


def test_figures_say_where_they_come_from():
    forecaster = Forecaster(stateless_traffic(), costs())
    space = StatelessGrid(chunk_frames=3, left_context_frames=5)  # always captures 150 and 8 frames
    modelled = forecaster.of(space.choice((1,), (2,)))
    assert (modelled.memory_source, modelled.times_source) == ("modelled", "modelled")
    assert modelled.figures["charge_bytes"] == sum(100 + 10 * frames for frames in (2, 8, 150))
    assert modelled.figures["capture_s"] == pytest.approx(sum(1 + frames / 10 for frames in (2, 8, 150)))
    measured = Forecaster(stateless_traffic().iloc[:1], costs()).of(_one(1, 2))
    assert (measured.memory_source, measured.times_source) == ("measured", "measured")
    assert measured.figures["saved_s"] == pytest.approx(10 * (4.0 - 2.0) / 1000)
    nan = float("nan")
    no_times = Forecaster(stateless_traffic(), costs(replay_ms=[nan, nan], eager_ms=[nan, nan])).of(_one(1, 2))
    assert (no_times.memory_source, no_times.times_source) == ("measured", "unknown")
    assert (no_times.figures["charge_bytes"], no_times.figures["saved_s"]) == (120, None)
    assert "replay_ms" in no_times.why_unknown or "eager_ms" in no_times.why_unknown


def _one(rows: int, frames: int):
    from vgraph_lab.inspect.planner import Choice
    from vgraph_lab.inspect.planner.shapes import Shape

    return Choice((STATELESS,), (rows,), (frames,), (Shape(STATELESS, "", rows, frames),))


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("frames", "3, x", "Frames per graph: 'x' is not a whole number"),
        ("batch_sizes", "", "Batch sizes is empty. .*such as 1, 2, 4"),
        ("batch_sizes", "0", "'0' is not a whole number"),
        ("checkpoint", " ", "Checkpoint is empty"),
    ],
)
def test_bad_entries_give_a_message_and_change_nothing(explorer, field, text, message):
    prediction, good = explorer.prediction, getattr(explorer, field).value
    getattr(explorer, field).value = text
    assert explorer.prediction is prediction
    with pytest.raises(ConfigError, match=message):
        explorer.run()
    for act in (explorer.add_selected, explorer.measure):
        with pytest.raises((ConfigError, InputError)):
            act()
    assert (explorer.report, explorer.costs) == (None, None)
    explorer.button.click()  # shows the same and raises nothing
    assert 'role="alert"' in explorer._notice.value
    getattr(explorer, field).value = good
    assert (explorer.message, explorer._notice.value) == ("", "")


def test_set_sizes_refuses_and_keeps(explorer):
    with pytest.raises(ConfigError, match="'-1' is not a whole number"):
        explorer.set_sizes(frames=(-1,))
    with pytest.raises(ConfigError, match="given more than once"):
        explorer.set_sizes(batch_sizes=(2, 2))
    assert (explorer.frames.value, explorer.batch_sizes.value) == ("3, 5", "1, 2")
    assert explorer.set_sizes(frames=(8,), batch_sizes=(4,)).figures["coverage"] == 1


def test_chosen_cells_become_sizes(explorer):
    with pytest.raises(InputError, match="no cell is chosen"):
        explorer.add_selected()
    assert "no cell is chosen" in explorer.message
    explorer.map.selection = [(4, 8)]
    explorer._add.click()
    assert (explorer.frames.value, explorer.batch_sizes.value, explorer.message) == ("3, 5, 8", "1, 2, 4", "")
    assert explorer.prediction.figures["coverage"] == 1
    assert explorer.map.selection == ((4, 8),)


def test_prediction_and_outcome_agree(explorer):
    assert explorer.comparison().empty
    explorer.button.click()
    found = explorer.comparison()
    assert list(found) == list(OUTCOME_COLUMNS)
    by_figure = found.set_index("figure")
    exact = by_figure[by_figure["source"] == "rule"]
    assert exact.index.tolist() == ["graphs", "calls in graphs", "audio in graphs", "padding"]
    assert exact["difference"].abs().max() < 1e-10
    assert by_figure.loc["memory", "outcome"] == explorer.report.bytes / 2**20
    assert pd.isna(by_figure.loc["memory", "predicted"])
    assert "Prediction and outcome" in explorer._outcome.value
    for words in ("Frames per graph", "Predicted for", "<svg", "Prediction and outcome"):
        assert words in explorer._repr_mimebundle_()["text/html"]


def test_costs_are_measured_on_request(explorer):
    measured = explorer.measure(repeats=1)
    assert set(zip(measured["batch_size"], measured["frames"], strict=True)) == {(1, 2), (4, 8)}  # of fields and traffic together
    assert (explorer.prediction.memory_source, explorer.prediction.times_source) == ("modelled", "modelled")
    assert explorer.prediction.figures["charge_bytes"] > 0
    assert explorer._measure.disabled is False
    assert explorer.manager is None  # nothing is kept


def test_a_streaming_stage_takes_frames_from_its_chunks(tiny_folder, tiny_decoder):
    space = StreamingGrid(CONNECTOR, tiny_decoder.geometry.sliding_window)
    shapes = space.graphs(space.target_ids, (1, 2, 3))
    traffic = traffic_table({**dict(zip(("target", "state", "batch_size", "frames"), zip(*shapes, strict=True), strict=True))})
    explorer = CaptureExplorer(traffic, space=space, checkpoint=tiny_folder, backend="cpu", batch_sizes=(1,))
    assert explorer.prediction.figures["coverage"] == pytest.approx(1 / 3)
    assert "Frames per graph" not in explorer._repr_mimebundle_()["text/html"]
    with pytest.raises(ConfigError, match="takes its frames from its chunks"):
        explorer.set_sizes(frames=(5,))
    explorer.map.selection = [cell for cell in sorted(explorer.map._cells) if cell[0] == 3][:1]
    explorer.add_selected()
    assert explorer.batch_sizes.value == "1, 3"
    report = explorer.run()
    assert report.captured == explorer.prediction.figures["graphs"] == 2 * len(space.graphs(space.target_ids, (1,)))
    exact = explorer.comparison().query("source == 'rule'")
    assert exact["difference"].abs().max() < 1e-10
    stage = vg.StageConfig.from_dict(explorer.stage())
    replayed = replay_traffic(traffic, vg.Qwen3TTSCode2Wav(tiny_decoder, stage).get_vocoder_cudagraph_targets())
    assert coverage_table(replayed).equals(explorer.prediction.coverage)
    explorer.close()


def test_a_space_for_another_window_is_refused(tiny_folder):
    traffic = traffic_table({"target": ["qwen3_tts.xvec_prefix"], "batch_size": [1], "frames": [1]})
    explorer = CaptureExplorer(traffic, space=StreamingGrid(CONNECTOR, 72), checkpoint=tiny_folder, backend="cpu")
    with pytest.raises(ConfigError, match=r"window of 72 frames.*has 16"):
        explorer.run()
    assert explorer.manager is None


def test_what_is_no_traffic_is_refused(tiny_folder):
    with pytest.raises(InputError, match="no calls"):
        CaptureExplorer(stateless_traffic().iloc[:0], checkpoint=tiny_folder)
    with pytest.raises(ConfigError, match="not among the Targets"):
        CaptureExplorer(stateless_traffic(), space=StreamingGrid(CONNECTOR, 16), checkpoint=tiny_folder)
    with pytest.raises(InputError, match="traffic has no column"):
        CaptureExplorer(stateless_traffic().rename(columns={"frames": "frame"}), checkpoint=tiny_folder)
    coverage = coverage_table(replay_traffic(stateless_traffic(), [stateless_target(vg.load_decoder(tiny_folder), bucket_frames=(3,))]))
    with pytest.raises(InputError, match="lacks captured_frames"):
        traffic_from(coverage.drop(columns="captured_frames"))
    with pytest.raises(InputError, match="names the reason 'bored'"):
        traffic_from(coverage.assign(outcome="fallback", reason="bored"))
    with pytest.raises(ConfigError, match="sizes without a space"):
        CaptureExplorer(stateless_traffic(), checkpoint=tiny_folder).stage()


def test_any_count_of_the_same_calls_is_the_same_traffic(tiny_decoder):
    snapshot = replay_traffic(stateless_traffic(), [stateless_target(tiny_decoder, bucket_frames=(3, 5), batch_sizes=(1, 2))])
    for source in (snapshot, coverage_table(snapshot), stateless_traffic()):
        assert traffic_from(source).equals(stateless_traffic())


def test_graphs_that_do_not_exist_serve_nobody(tiny_decoder):
    """The budget leaves out the largest: its calls fall back for that reason, and only they."""
    target = stateless_target(tiny_decoder, bucket_frames=(3, 8), batch_sizes=(1, 4))
    forecast = Forecaster(stateless_traffic()).of(_one(4, 8))
    backend = vg.create_backend("cpu")
    with vg.VocoderCUDAGraphManager(backend, [target]) as unlimited:
        sizes = [outcome.cost.charge_bytes for outcome in unlimited.capture().outcomes]
    manager = vg.VocoderCUDAGraphManager(backend, [target], VocoderGraphSettings(max_memory_bytes=sizes[0] - 1))
    with pytest.raises(LifecycleError, match="no outcome to compare with"):
        compare_outcome(forecast, stateless_traffic(), manager)
    with manager:
        assert manager.capture().skipped >= 1
        found = resolve_traffic(stateless_traffic(), manager)
        assert found.reasons().get(FallbackReason.OVER_BUDGET, 0) >= 2
        assert found.calls() == 62
        existing = {entry.descriptor for entry in manager.entries()}
        assert {kind.descriptor for kind in found.counts if kind.descriptor} <= existing
        row = compare_outcome(forecast, stateless_traffic(), manager).set_index("figure").loc["calls in graphs"]
        assert row["difference"] == pytest.approx(100 * (found.hits() / 62 - 1))


def test_graphs_that_came_lazily_exist_too(tiny_decoder):
    """The same calls again: whatever was captured on the way serves them, and only that."""
    lazy = {"targets": {"qwen3_tts.stateless": {"enable_lazy_capture": True, "max_extra_graphs": 2}}}
    target = stateless_target(tiny_decoder, bucket_frames=(3,), batch_sizes=(1,))
    with vg.VocoderCUDAGraphManager(vg.create_backend("cpu"), [target], VocoderGraphSettings.from_dict(lazy)) as manager:
        manager.capture()
        for rows, frames in ((3, 5), (3, 20), (2, 2)):
            target(torch.zeros(rows, tiny_decoder.geometry.num_quantizers, frames, dtype=torch.int64))
        assert len(manager.entries()) == 3
        calls = traffic_table({"target": ["qwen3_tts.stateless"] * 4, "batch_size": [3, 3, 2, 1], "frames": [5, 20, 2, 3]})
        found = resolve_traffic(calls, manager)
        assert {str(kind.key): str(kind.descriptor) for kind in found.counts if kind.descriptor} == {
            "B3×T5": "B3×T5", "B3×T20": "B3×T20", "B1×T3": "B1×T3",
        }  # fmt: skip
        assert found.reasons() == {FallbackReason.SHAPE_NOT_COVERED: 1}


def test_a_policy_that_switches_off_is_part_of_the_prediction(tiny_folder, tiny_decoder):
    space = StreamingGrid(CONNECTOR, tiny_decoder.geometry.sliding_window)
    shapes = space.graphs(space.target_ids, (1,))
    traffic = traffic_table(dict(zip(("target", "state", "batch_size", "frames"), zip(*shapes, strict=True), strict=True)))
    off = VocoderGraphSettings.from_dict({"targets": {"qwen3_tts.suffix": {"enabled": False}}})
    explorer = CaptureExplorer(traffic, space=space, checkpoint=tiny_folder, backend="cpu", batch_sizes=(1,), policy=off)
    prefixes = [shape for shape in shapes if not shape.target.endswith("suffix")]
    assert explorer.prediction.figures["graphs"] == len(prefixes)
    assert explorer.prediction.figures["coverage"] == pytest.approx(len(prefixes) / len(shapes))
    none = CaptureExplorer(traffic, space=space, checkpoint=tiny_folder, batch_sizes=(1,), policy=VocoderGraphSettings(enforce_eager=True))
    assert (none.prediction.figures["graphs"], none.prediction.figures["coverage"]) == (0, 0)


def test_calls_that_would_be_split_are_told(tiny_folder):
    explorer = CaptureExplorer(stateless_traffic(), checkpoint=tiny_folder, backend="cpu", frames=(8,), batch_sizes=(1,))
    table = stateless_traffic()
    larger = int(table.loc[table["batch_size"] > 1, "calls"].sum())
    assert explorer.prediction.split_calls == larger > 0
    assert f"{larger} calls have more rows than any graph" in explorer._figures.value
    explorer.set_sizes(batch_sizes=(int(table["batch_size"].max()),))
    assert explorer.prediction.split_calls == 0
    assert "more rows than any graph" not in explorer._figures.value


def test_states_and_shapes_without_a_graph_are_told_apart():
    """By hand: one state has a graph of other frames, the other state has none, and one Target is not captured at all."""
    suffix = "qwen3_tts.suffix"
    calls = traffic_table(
        {
            "target": [suffix, suffix, "qwen3_tts.xvec_prefix"],
            "state": ["icl 2", "xvec 2", ""],
            "batch_size": [1, 1, 1],
            "frames": [9, 7, 2],
        }
    )
    forecast = Forecaster(calls).of(Choice(graphs=(Shape(suffix, "icl 2", 1, 7),)))
    reasons = dict(zip(forecast.coverage["target"] + " " + forecast.coverage["state"], forecast.coverage["reason"], strict=True))
    assert reasons == {
        f"{suffix} icl": "shape_not_covered",
        f"{suffix} xvec": "state_not_covered",
        "qwen3_tts.xvec_prefix ": "disabled",
    }


def test_a_dropped_explorer_lets_go_of_its_graphs(tiny_folder):
    explorer = CaptureExplorer(stateless_traffic(), checkpoint=tiny_folder, backend="cpu", frames=(3,), batch_sizes=(1,))
    explorer.run()
    pool, button, field, add = weakref.ref(explorer.manager.pool), explorer.button, explorer.frames, explorer._add
    del explorer
    gc.collect()
    assert pool() is None
    field.value = "7"  # nobody listens, and nothing breaks
    button.click()
    add.click()
    assert (button.description, add.description) == ("Run the cell again",) * 2
