"""A recording holds what the live tables hold. Truth: the tables of the runner that was recorded."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from contracts.toy import WIDTH
from hypothesis import given
from hypothesis import strategies as st
from inspect_streaming import chunks_of, tiny_codes, tiny_runner

import vgraph_lab as vg
from vgraph_lab.errors import FallbackReason, InputError
from vgraph_lab.graphs import CaptureReport, Descriptor
from vgraph_lab.graphs.backends.base import GraphNode
from vgraph_lab.graphs.entry import CaptureCost, Rejection
from vgraph_lab.inspect import (
    Recording,
    coverage_table,
    entries_table,
    estimate_table,
    ledger_table,
    read_memory,
    record,
    uncovered_shapes,
)
from vgraph_lab.inspect.archive import FORMAT_VERSION
from vgraph_lab.inspect.records import CountedCalls, GraphRecord, MemoryReading, RecordedDescriptor
from vgraph_lab.qwen3_tts.stream_routines import SuffixDescriptor

SMALL, LARGE = Descriptor(1, 4), Descriptor(2, 8)
MEMORY = MemoryReading(1000, 400, 100, 50, 10, 90, 20)


@dataclass(frozen=True, slots=True)
class OwnDescriptor(Descriptor):
    """A shape key of somebody else's Routine."""

    heads: int = 1
    place: tuple[int, ...] = ()


@pytest.fixture(scope="module")
def streaming(tiny_folder: Path) -> Iterator[tuple[vg.GPUGenerationModelRunner, CaptureReport, MemoryReading]]:
    """A runner with one suffix graph left out, after one request."""
    runner = tiny_runner(tiny_folder, graphs={"targets": {"qwen3_tts.icl_prefix": {"enabled": False}}})
    before = read_memory(runner)
    report = runner.capture_model()
    for chunk in [*chunks_of(runner, "x", tiny_codes(20)), *chunks_of(runner, "i", tiny_codes(9, 1), tiny_codes(9, 2))]:
        runner.execute_model([chunk])
    yield runner, report, before
    runner.shutdown()


@pytest.fixture
def recording() -> Recording:
    """A small one, made by hand."""
    return by_hand()


def by_hand() -> Recording:
    cost = CaptureCost(0, 64, 8, 0, 512, None, 0.1, 0.2, 0.0, {"kernel": 2})
    nodes = (GraphNode(0, "kernel", "aten.add.Tensor"), GraphNode(1, "memcpy", "aten.clone.default", (0,)))
    graphs = (
        GraphRecord("t.one", SMALL, cost, last_use_unix_s=5.5, nodes=nodes, modules=("M.a", "")),
        GraphRecord("t.one", SuffixDescriptor(1, 26, "icl", 1), rejection=Rejection(FallbackReason.OVER_BUDGET, 'no "room"'), is_lazy=True),
    )
    calls = (
        CountedCalls("t.one", SMALL, SMALL, None, None, 3),
        CountedCalls("t.one", LARGE, None, FallbackReason.SHAPE_NOT_COVERED, None, 2),
        CountedCalls("t.one", SMALL, SMALL, None, "ReplayError", 1),
    )
    return Recording("2026-01-01T00:00:00+00:00", "cpu", {"torch": "2"}, "Toy", None, {}, "ready", ("t.one",), graphs, calls, MEMORY)


def test_a_file_gives_the_tables_of_the_live_runner(streaming, tmp_path):
    runner, report, before = streaming
    saved = record(runner, report=report, before=before)
    loaded = Recording.load(saved.save(tmp_path / "deep" / "one.vgl"))
    assert loaded == saved
    assert loaded.stats == runner.stats()
    assert {graph.rejection.reason for graph in loaded.graphs if graph.rejection} == {FallbackReason.DISABLED}
    for source in (runner.manager, saved, loaded):
        for table in (entries_table, coverage_table, uncovered_shapes):
            pd.testing.assert_frame_equal(table(source), table(runner))
    pd.testing.assert_frame_equal(ledger_table(loaded), ledger_table(saved))
    assert loaded.model == "Qwen3TTSCode2Wav"
    assert vg.StageConfig.from_dict(loaded.stage).to_dict() == runner.cfg.to_dict()
    assert [graph.nodes for graph in loaded.graphs if graph.cost] == [tuple(e.graph.nodes()) for e in runner.manager.entries()]
    assert record(runner, nodes=False).graphs[1].nodes == ()
    assert record(loaded) is loaded
    assert (loaded.capture.captured, loaded.capture.headline) == (report.captured, report.headline())
    with pytest.raises(InputError, match="profile_memory"):
        estimate_table(loaded)


def test_a_runner_s_report_and_reading_are_taken_unless_others_are_given(streaming):
    runner, report, before = streaming
    own = record(runner)
    assert own.capture == record(runner, report=report).capture
    assert own.capture.headline == report.headline()
    assert own.memory_before.free_bytes == runner.manager.memory_before.free_bytes
    assert (own.memory_before.weights_bytes, own.memory_before.state_bytes) == (before.weights_bytes, before.state_bytes)
    assert (own.memory_before.pool_bytes, own.memory_before.static_buffer_bytes, own.memory_before.pool_live_bytes) == (0, 0, 0)
    assert record(runner, before=replace(before, free_bytes=7)).memory_before.free_bytes == 7
    assert record(runner, report=replace(report, seconds=99.0)).capture.seconds == 99


def test_streaming_entries_tell_state_and_kept_frames(streaming):
    table = entries_table(streaming[0])
    suffix = table[table["target"] == "qwen3_tts.suffix"]
    assert set(zip(suffix["state"], suffix["source_frames"], suffix["frames"], strict=True)) == {
        (mode, kept, kept + 5) for mode in ("icl", "xvec") for kept in (2, 7, 12, 16)
    }
    assert table.loc[table["target"] != "qwen3_tts.suffix", "source_frames"].isna().all()
    rejected = table[table["status"] == "skipped"]
    assert rejected[["target", "reason"]].to_numpy().tolist() == [["qwen3_tts.icl_prefix", "disabled"]]


def test_after_shutdown_calls_and_rejections_are_left(tiny_folder):
    runner = tiny_runner(tiny_folder, enforce_eager=True)
    runner.capture_model()
    for chunk in chunks_of(runner, "x", tiny_codes(7)):
        runner.execute_model([chunk])
    runner.shutdown()
    left = record(runner)
    assert (left.model, left.stats.calls(), len(left.graphs)) == ("", 2, 10)
    assert all(graph.rejection for graph in left.graphs)
    assert left.capture.skipped == 10
    assert left.memory_before.total_bytes == left.memory.total_bytes


def test_a_model_without_graphs_has_an_empty_recording():
    class Plain:
        device = torch.device("cpu")

        def __call__(self, chunks: object) -> dict[str, Any]:
            return {}

        def abort(self, request_ids: object) -> list[str]:
            return []

    runner = vg.GPUGenerationModelRunner(vg.StageConfig(), device="cpu")
    runner.load_model(Plain())
    runner.capture_model()
    found = record(runner)
    assert (found.state, found.model, found.graphs, found.calls, found.memory.pool_bytes) == ("none", "Plain", (), (), 0)
    assert len(entries_table(runner)) == len(coverage_table(runner)) == 0
    assert (found.capture, found.memory_before) == (None, None)


shapes = st.one_of(
    st.builds(Descriptor, st.integers(1, 9), st.integers(1, 99), st.text(max_size=5)),
    st.builds(SuffixDescriptor, st.integers(1, 9), st.integers(1, 99), st.sampled_from(["icl", "xvec"]), st.integers(0, 72)),
)


@given(st.lists(st.tuples(st.text(min_size=1, max_size=9), shapes, st.sampled_from(FallbackReason), st.integers(1, 10**9)), max_size=6))
def test_any_calls_survive_the_file(tmp_path_factory, kinds):
    calls = tuple(CountedCalls(target, key, None, reason, None, count) for target, key, reason, count in kinds)
    saved = replace(by_hand(), calls=calls)
    loaded = Recording.load(saved.save(tmp_path_factory.mktemp("any") / "r.vgl"))
    assert loaded == saved
    assert loaded.stats == saved.stats
    assert loaded.stats.calls() == sum(count for *_, count in kinds)


def test_shapes_of_other_classes_keep_their_print(recording, tmp_path):
    own = OwnDescriptor(2, 8, "s", heads=4, place=(1, 2))
    calls = (CountedCalls("t.one", own, own, None, None, 2), CountedCalls("t.one", Descriptor(1, 8, "s"), own, None, None, 1))
    saved = replace(recording, calls=calls)
    loaded = Recording.load(saved.save(tmp_path / "r.vgl"))
    pd.testing.assert_frame_equal(coverage_table(loaded), coverage_table(saved))
    key = loaded.calls[0].key
    assert isinstance(key, RecordedDescriptor)
    assert (str(key), key.extra) == (str(own), (("heads", 4), ("place", "(1, 2)")))
    assert Recording.load(loaded.save(tmp_path / "again.vgl")) == loaded


# ---------------------------------------------------------------------------------------------------- writing


def test_nothing_is_written_over_unless_asked(recording, tmp_path):
    path = recording.save(tmp_path / "r.vgl")
    first = path.read_bytes()
    other = replace(recording, model="Other")
    with pytest.raises(InputError, match="nothing is written over"):
        other.save(path)
    assert path.read_bytes() == first
    other.save(path, overwrite=True)
    assert Recording.load(path).model == "Other"
    assert [p.name for p in tmp_path.iterdir()] == ["r.vgl"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_write_that_fails_leaves_what_was_there(recording, tmp_path, monkeypatch, overwrite):
    path = tmp_path / "r.vgl"
    if overwrite:
        recording.save(path)

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(InputError, match="No space left"):
        replace(recording, model="Other").save(path, overwrite=overwrite)
    assert [p.name for p in tmp_path.iterdir()] == (["r.vgl"] if overwrite else [])
    if overwrite:
        assert Recording.load(path) == recording


def test_a_place_that_takes_no_file_fails(recording, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        recording.save(tmp_path / "file" / "r.vgl")
    with pytest.raises(InputError, match="is a folder"):
        recording.save(tmp_path, overwrite=True)


# ---------------------------------------------------------------------------------------------------- reading


def archive(**members: bytes | str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name, text in members.items():
            made.writestr(f"{name}.json", text)
    return buffer.getvalue()


def head(version: Any = FORMAT_VERSION, name: str = "vgraph_lab recording") -> str:
    return json.dumps({"format": name, "version": version, "written_by": "vgraph-lab 9.9"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"text", "no recording, or damaged"),
        (archive(other="{}"), "no recording"),
        (archive(format=head()), "no recording"),
        (archive(format="{"), "is no JSON"),
        (archive(format=head(name="a song"), recording="{}"), "is no recording"),
        (archive(format=head("1"), recording="{}"), "is no recording"),
        (archive(format=head(FORMAT_VERSION + 1), recording="{}"), r"version 2, written by vgraph-lab 9\.9; .* Update vgraph-lab"),
        (archive(format=head(), recording="{"), "is damaged"),
        (archive(format=head(), recording="{}"), "is damaged: made_utc: Field required"),
    ],
)
def test_files_that_are_no_recordings_are_refused(tmp_path, content, message):
    path = tmp_path / "r.vgl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        Recording.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["calls"][0].update(calls=0), "calls.0.calls"),
        (lambda d: d["calls"][0].update(calls="3"), "calls.0.calls"),
        (lambda d: d["calls"][1].update(reason="mood"), "calls.1.reason"),
        (lambda d: d["calls"][0]["key"].update(batch_size=0), "calls.0.key"),
        (lambda d: d["calls"][0]["key"].update(batch_size=1.5), "calls.0.key"),
        (lambda d: d["calls"][0].update(key=[1, 2]), "a shape has named fields"),
        (lambda d: d["graphs"][1]["descriptor"].update({"class": "Other"}), "a known class"),
        (lambda d: d["graphs"][0].update(rejection={"reason": "declined", "detail": ""}), "a cost, a Descriptor"),
        (lambda d: d["graphs"][0].update(modules=["M"]), "2 nodes cannot have 1 modules"),
        (lambda d: d["graphs"][0]["nodes"]["nodes"][1].__setitem__(2, [1]), "earlier nodes only"),
        (lambda d: d["graphs"][0]["nodes"].update(names=[]), "rows of kind, name"),
    ],
)
def test_damaged_content_is_named(recording, tmp_path, change, message):
    path = recording.save(tmp_path / "r.vgl")
    with zipfile.ZipFile(path) as made:
        content = json.loads(made.read("recording.json"))
    change(content)
    path.write_bytes(archive(format=head(), recording=json.dumps(content)))
    with pytest.raises(InputError, match="is damaged") as refusal:
        Recording.load(path)
    assert message in str(refusal.value)


def test_a_file_that_is_cut_or_missing_is_refused(recording, tmp_path):
    path = recording.save(tmp_path / "r.vgl")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(InputError, match="damaged"):
        Recording.load(path)
    with pytest.raises(InputError, match="cannot be read"):
        Recording.load(tmp_path / "none.vgl")
    with pytest.raises(InputError, match="cannot be read"):
        Recording.load(tmp_path)


# ---------------------------------------------------------------------------------------------------- sources


@pytest.mark.parametrize("table", [entries_table, coverage_table, uncovered_shapes, ledger_table, record])
def test_tables_refuse_what_is_no_source(table):
    with pytest.raises(InputError, match=r"got list.*Recording\.load"):
        table([])


def test_graphs_are_found_by_number_and_name(recording):
    one, two = recording.graphs
    assert recording.graph(1) is recording.graph("1") is recording.graph("t.one B1×T4") is recording.graph("B1×T4") is one
    assert recording.graph("B1·icl 1→26") is two
    for which in (0, 3, "7", "B9×T9"):
        with pytest.raises(InputError, match="entr"):
            recording.graph(which)
    with pytest.raises(InputError, match="2 entries"):
        replace(recording, graphs=(one, replace(one, target_id="t.two"))).graph("B1×T4")


def test_a_recording_of_a_manager_is_a_copy(make_manager):
    manager, target = make_manager(SMALL, LARGE)
    manager.capture()
    target(torch.ones(1, 4, WIDTH))
    first = record(manager)
    target(torch.ones(1, 4, WIDTH))
    assert (first.stats.calls(), manager.stats().calls()) == (1, 2)
    assert (first.stage, first.model) == (None, "")
