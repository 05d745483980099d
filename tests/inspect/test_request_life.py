"""A request's life. Truth: chunks counted by hand, sizes in closed form from the tiny checkpoint's geometry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from inspect_streaming import WINDOW, chunks_of, tiny_codes, tiny_runner

import vgraph_lab as vg
from vgraph_lab.errors import FallbackReason, InputError, LifecycleError, RequestErrorKind
from vgraph_lab.graphs import CallKind, Descriptor, StatsSnapshot
from vgraph_lab.inspect.request_life import LIFE_COLUMNS, STATE_COLUMNS, play_request, state_table
from vgraph_lab.inspect.stream_calls import calls_between

HIT = CallKind("t", Descriptor(1, 4), descriptor=Descriptor(1, 4))
MISS = CallKind("t", Descriptor(1, 4), reason=FallbackReason.NO_GRAPH)


@pytest.fixture(scope="module")
def runner(tiny_folder: Path) -> Iterator[vg.GPUGenerationModelRunner]:
    with tiny_runner(tiny_folder) as runner:
        runner.capture_model()
        yield runner


def suffix_bytes(runner: vg.GPUGenerationModelRunner, frames: int) -> int:
    """Kept quantised frames and conv outputs, float32."""
    g = runner.model.decoder.geometry  # type: ignore[attr-defined]
    return 4 * (g.codebook_dim * min(frames, WINDOW) + g.latent_dim * min(frames, WINDOW - 2))


def prefix_bytes(runner: vg.GPUGenerationModelRunner) -> int:
    """Keys and values, two quantised frames, 12 hidden ones, and one count."""
    g = runner.model.decoder.geometry  # type: ignore[attr-defined]
    keys_values = g.num_hidden_layers * 2 * g.num_key_value_heads * WINDOW * g.head_dim
    return 4 * (keys_values + 2 * g.codebook_dim + 12 * g.latent_dim) + 8


def test_life_of_an_xvector_request(runner):
    life = play_request(runner, chunks_of(runner, "x", tiny_codes(25)))
    table = life.table
    assert list(table) == list(LIFE_COLUMNS)
    assert table["new_frames"].tolist() == [2, 5, 5, 5, 5, 3]
    assert table["kept_before_frames"].tolist() == [0, 2, 7, 12, 16, 16]
    assert table["kept_after_frames"].tolist()[:-1] == [2, 7, 12, 16, 16]
    assert table["kept_after_frames"].isna().tolist() == [False] * 5 + [True]
    assert table["target"].tolist() == ["qwen3_tts.xvec_prefix"] + ["qwen3_tts.suffix"] * 5
    assert table["outcome"].tolist() == ["exact hit"] * 5 + ["padded hit"]
    assert table["captured"].tolist()[0] == "B1×T2"
    assert table["captured"].tolist()[1:] == [
        f"B1·xvec {source}→{target}" for source, target in [(2, 7), (7, 12), (12, 17), (16, 21), (16, 21)]
    ]
    assert table["requested"].tolist()[-1] == "B1·xvec 16→19"
    assert table["padding_frames"].tolist() == [0] * 5 + [2]
    assert table["samples"].tolist() == [1920 * frames for frames in (2, 5, 5, 5, 5, 3)]
    assert table["state_kib"].tolist()[:-1] == [suffix_bytes(runner, frames) / 1024 for frames in (2, 7, 12, 17, 21)]
    assert life.samples.shape == (25 * 1920,)
    assert life.error is None
    assert life.is_all_hits
    assert life.route() == "6 chunks: 5 exact hits, 1 padded hit"


def test_samples_are_those_of_the_runner(runner):
    codes = tiny_codes(12)
    life = play_request(runner, chunks_of(runner, "mine", codes))
    again = [runner.execute_model([chunk])["theirs"] for chunk in chunks_of(runner, "theirs", codes)]
    assert torch.equal(torch.from_numpy(life.samples), torch.cat(again))
    assert [len(piece) for piece in life.pieces] == life.table["samples"].tolist()


def test_life_of_an_icl_request_counts_its_reference_once(runner):
    life = play_request(runner, chunks_of(runner, "i", tiny_codes(7), reference=tiny_codes(9, 1))[:1])
    assert life.table["ref_frames"].tolist() == [9]
    assert life.table["new_frames"].tolist() == [2]
    assert life.table["target"].tolist() == ["qwen3_tts.icl_prefix"]
    assert life.table["state_kib"].tolist() == [(prefix_bytes(runner) + suffix_bytes(runner, 2)) / 1024]
    runner.abort("i")


def test_a_fallback_says_why(runner):
    chunks = [vg.ChunkRequest("odd", piece) for piece in tiny_codes(10).split([2, 3, 5], dim=1)]
    life = play_request(runner, chunks)
    assert life.table["outcome"].tolist() == ["exact hit", "fallback", "fallback"]
    assert life.table["why"].tolist() == ["", "shape_not_covered", "state_not_covered"]
    assert life.table["captured"].tolist()[1:] == ["", ""]
    assert not life.is_all_hits
    assert life.route() == "3 chunks: 1 exact hit, 1 fallback: shape_not_covered, 1 fallback: state_not_covered"
    runner.abort("odd")


def test_an_empty_end_and_refusals_are_rows_too(runner):
    good = chunks_of(runner, "ended", tiny_codes(2))[0].codes
    life = play_request(
        runner, [vg.ChunkRequest("ended", good), vg.ChunkRequest("ended", good[:, :0], finished=True), vg.ChunkRequest("ended", good)]
    )
    assert life.table["outcome"].tolist() == ["exact hit", "ended", "refused"]
    assert life.table["why"].tolist() == ["", "", "finished"]
    assert life.table["target"].tolist()[1:] == ["", ""]
    assert life.table["samples"].tolist() == [2 * 1920, 0, 0]
    assert "its last chunk came before" in life.table["message"].iloc[-1]
    assert life.error is not None
    assert life.error.kind is RequestErrorKind.FINISHED
    assert not life.is_all_hits


def test_a_refused_request_has_no_samples(runner):
    life = play_request(runner, [vg.ChunkRequest("bad", tiny_codes(2)[:15])])
    assert life.table["outcome"].tolist() == ["refused"]
    assert life.table["state_kib"].isna().all()
    assert len(life.samples) == 0


@pytest.mark.parametrize("ids", [[], ["a", "b"]])
def test_chunks_of_no_or_several_requests_fail(runner, ids):
    with pytest.raises(InputError, match=r"chunks of one request are needed, got (none|a, b)"):
        play_request(runner, [vg.ChunkRequest(name, tiny_codes(2)) for name in ids])


def test_a_runner_that_is_not_ready_fails(tiny_folder):
    with pytest.raises(LifecycleError, match="execute_model needs a runner that is ready"):
        play_request(tiny_runner(tiny_folder), [vg.ChunkRequest("a", tiny_codes(2))])


def test_state_adds_up_to_what_the_life_says(runner):
    life = play_request(runner, chunks_of(runner, "s", tiny_codes(12), reference=tiny_codes(16, 1))[:2])
    table = state_table(runner, "s")
    assert list(table) == list(STATE_COLUMNS)
    assert table["part"].tolist() == ["prefix"] * 4 + ["suffix"] * 2
    assert table["size_kib"].sum() == pytest.approx(life.table["state_kib"].iloc[-1])
    assert table.set_index("field").loc["quantized", "shape"].endswith("× 7")
    assert (table["purpose"] != "").all()
    runner.abort("s")
    with pytest.raises(InputError, match="no live request 's'"):
        state_table(runner, "s")


def test_an_xvector_request_keeps_no_prefix(runner):
    play_request(runner, chunks_of(runner, "p", tiny_codes(12))[:1])
    assert state_table(runner, "p")["part"].tolist() == ["suffix", "suffix"]
    runner.abort("p")


def test_calls_between_snapshots():
    before, after = StatsSnapshot({HIT: 2, MISS: 1}), StatsSnapshot({HIT: 5, MISS: 1})
    assert calls_between(before, after) == {HIT: 3}
    assert calls_between(StatsSnapshot({}), before) == {HIT: 2, MISS: 1}
    assert calls_between(before, before) == {}


def test_calls_between_snapshots_in_the_wrong_order_fail():
    with pytest.raises(InputError, match="counts fewer calls than the first"):
        calls_between(StatsSnapshot({HIT: 5}), StatsSnapshot({HIT: 4, MISS: 9}))


def test_a_reference_counts_once_however_often_it_is_declared(runner):
    codes = tiny_codes(9 + 2 + 5)
    chunks = [
        vg.ChunkRequest("repeats", codes[:, :11], ref_frames=9),
        vg.ChunkRequest("repeats", codes[:, 11:], ref_frames=9),
        vg.ChunkRequest("repeats", codes[:, :0], ref_frames=9, finished=True),
    ]
    assert play_request(runner, chunks).table["new_frames"].tolist() == [2, 5, 0]


def test_a_chunk_without_codes_is_refused_like_any_other(runner):
    life = play_request(runner, [vg.ChunkRequest("list", [[1]])])  # type: ignore[arg-type]
    assert life.error is not None
    assert life.error.kind is RequestErrorKind.INVALID_INPUT
    assert life.table["new_frames"].tolist() == [0]
