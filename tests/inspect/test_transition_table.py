"""The transition table. Truth: states counted by hand, calls counted by the Manager."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inspect_streaming import STATES, chunks_of, tiny_codes, tiny_runner

import vgraph_lab as vg
from vgraph_lab.errors import InputError, LifecycleError
from vgraph_lab.inspect.request_life import play_request
from vgraph_lab.inspect.transitions import TRANSITION_COLUMNS, transition_table

PLAYED = count()


@pytest.fixture(scope="module")
def captured(tiny_folder: Path) -> Iterator[vg.GPUGenerationModelRunner]:
    with tiny_runner(tiny_folder, graphs={"capture_batch_sizes": [1, 2]}) as runner:
        runner.capture_model()
        yield runner


def test_rows_are_the_schedule_before_anything_is_captured(tiny_folder):
    table = transition_table(tiny_runner(tiny_folder))
    assert list(table) == list(TRANSITION_COLUMNS)
    assert list(zip(table["mode"], table["kept_frames"], table["new_frames"], strict=True)) == [
        (mode, kept, new) for mode in ("xvec", "icl") for kept, new in STATES
    ]
    assert table["after_frames"].tolist() == [2, 7, 12, 17, 21] * 2
    assert table["is_rolling"].tolist() == [False, False, False, False, True] * 2
    assert table["is_scheduled"].all()
    assert (table["captured_batch_sizes"] == ()).all()
    assert table[["hits", "misses", "errors"]].to_numpy().sum() == 0
    first, rest = table["kept_frames"] == 0, table["kept_frames"] > 0
    assert table[first]["target"].tolist() == ["qwen3_tts.xvec_prefix", "qwen3_tts.icl_prefix"]
    assert set(table[rest]["target"]) == {"qwen3_tts.suffix"}


def test_graphs_and_hits_stand_at_their_transition(captured):
    table = transition_table(captured)
    assert table["captured_batch_sizes"].tolist() == [(1, 2)] * len(table)
    assert sum(map(len, table["captured_batch_sizes"])) == len(captured.manager.entries())
    play_request(captured, chunks_of(captured, "long", tiny_codes(2 + 5 * 5 + 3)))  # six full chunks and a padded one
    after = transition_table(captured)
    gained = (after["hits"] - table["hits"]).tolist()
    assert gained == [1, 1, 1, 1, 3, 0, 0, 0, 0, 0]
    assert after["misses"].sum() == 0


def test_switched_off_graphs_miss_everywhere(tiny_folder):
    with tiny_runner(tiny_folder, enforce_eager=True) as runner:
        runner.capture_model()
        play_request(runner, chunks_of(runner, "a", tiny_codes(2 + 5 + 3)))  # the last one is short
        table = transition_table(runner)
    assert (table["captured_batch_sizes"] == ()).all()
    assert table["misses"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert table["is_scheduled"].all()


def test_one_target_switched_off(tiny_folder):
    with tiny_runner(tiny_folder, graphs={"targets": {"qwen3_tts.suffix": {"enabled": False}}}) as runner:
        runner.capture_model()
        table = transition_table(runner)
    assert [bool(sizes) for sizes in table["captured_batch_sizes"]] == [True, False, False, False, False] * 2


def test_steps_off_the_schedule_have_rows_of_their_own(tiny_folder):
    """A middle chunk of 3 frames, and what follows from it; captured lazily as far as allowed."""
    lazy = {"qwen3_tts.suffix": {"enable_lazy_capture": True, "max_extra_graphs": 1}}
    codes = tiny_codes(10)
    with tiny_runner(tiny_folder, graphs={"targets": lazy}, connector={"codec_chunk_frames": 14}) as runner:
        runner.capture_model()
        play_request(runner, [vg.ChunkRequest("odd", piece, finished=piece is codes) for piece in codes.split([2, 3, 5], dim=1)])
        table = transition_table(runner)
    others = table[~table["is_scheduled"]]
    assert others[["mode", "kept_frames", "new_frames"]].to_numpy().tolist() == [["xvec", 2, 3], ["xvec", 5, 5]]
    assert others["captured_batch_sizes"].tolist() == [(1,), ()]
    assert others["hits"].tolist() == [1, 0]  # the call that captured was served by its graph
    assert others["misses"].tolist() == [0, 1]


def test_a_short_middle_chunk_is_no_miss_of_the_schedule(captured):
    before = transition_table(captured).query("is_scheduled")
    play_request(captured, [vg.ChunkRequest("short middle", piece) for piece in tiny_codes(6, 1).split([2, 4], dim=1)])
    captured.abort("short middle")
    after = transition_table(captured)
    assert after.query("is_scheduled")["misses"].sum() == before["misses"].sum()
    assert after.query("not is_scheduled")[["kept_frames", "new_frames", "misses"]].to_numpy().tolist() == [[2, 4, 1]]


def test_long_references_are_told_apart(tiny_folder):
    with tiny_runner(tiny_folder, enforce_eager=True) as runner:
        runner.capture_model()
        first = vg.ChunkRequest("far", tiny_codes(20 + 2), ref_frames=20)
        play_request(runner, [first, vg.ChunkRequest("far", tiny_codes(5, 2), finished=True)])
        others = transition_table(runner).query("not is_scheduled")
    assert others["mode"].tolist() == ["icl, long reference"] * 2
    assert others["target"].tolist() == ["qwen3_tts.icl_prefix", "qwen3_tts.suffix"]
    assert others["misses"].tolist() == [1, 1]


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=5), min_size=1, max_size=3),
    reference=st.sampled_from([0, 1, 7, 16, 18]),
    ends=st.booleans(),
)
def test_every_call_is_in_exactly_one_row(captured, sizes, reference, ends):
    played = next(PLAYED)
    for turn in range(max(map(len, sizes))):
        batch = []
        for number, own in enumerate(sizes):
            if turn < len(own):
                ref = reference if turn == 0 and number == 0 else 0
                last = ends and turn == len(own) - 1
                batch.append(vg.ChunkRequest(f"{played}/{number}", tiny_codes(ref + own[turn], turn), ref_frames=ref, finished=last))
        captured.execute_model(batch)
    captured.abort(list(captured.model.live_requests))
    table, stats = transition_table(captured), captured.stats()
    assert not table.duplicated(["mode", "kept_frames", "new_frames"]).any()
    assert (table["hits"].sum(), table["misses"].sum(), table["errors"].sum()) == (stats.hits(), stats.fallbacks(), stats.replay_errors())
    assert (table["hits"] == 0)[table["captured_batch_sizes"] == ()].all()


def test_other_models_and_other_times_fail(tiny_folder):
    with pytest.raises(InputError, match="does not stream here"):
        transition_table(tiny_runner(tiny_folder, async_chunk=False))
    runner = tiny_runner(tiny_folder)
    runner.shutdown()
    with pytest.raises(LifecycleError, match="no model is loaded"):
        transition_table(runner)
