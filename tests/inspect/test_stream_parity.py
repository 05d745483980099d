"""Streams against eager and against whole decoding. Truth: differences put in by hand, and the eager decoder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inspect_streaming import chunks_of, tiny_codes, tiny_runner

import vgraph_lab as vg
from vgraph_lab.errors import InputError
from vgraph_lab.inspect.audio import Tolerance
from vgraph_lab.inspect.request_life import RequestLife, play_request
from vgraph_lab.inspect.stream_parity import STREAM_PARITY_COLUMNS, chunk_differences, compare_streams
from vgraph_lab.inspect.streaming_summary import STREAMING_MIME, StreamingSummary, summarise_streaming

ROUNDING = Tolerance(1e-3, "random weights amplify rounding")


@pytest.fixture(scope="module")
def runner(tiny_folder: Path) -> Iterator[vg.GPUGenerationModelRunner]:
    with tiny_runner(tiny_folder) as runner:
        runner.capture_model()
        yield runner


@pytest.fixture(scope="module")
def lives(tiny_folder: Path, runner: vg.GPUGenerationModelRunner) -> tuple[RequestLife, RequestLife]:
    """One request through eager and through graphs: 2, 5, 5, 5, 5 and, padded, 3 frames."""
    with tiny_runner(tiny_folder, enforce_eager=True) as eager:
        eager.capture_model()
        return tuple(play_request(r, chunks_of(r, "one", tiny_codes(25))) for r in (eager, runner))  # type: ignore[return-value]


def spoiled(life: RequestLife, chunk: int, by: float) -> RequestLife:
    pieces = [piece + np.float32(by) if number == chunk else piece for number, piece in enumerate(life.pieces)]
    return replace(life, pieces=tuple(pieces))


def test_graphs_equal_eager(lives):
    found = compare_streams(*lives, device="cpu", tolerance=ROUNDING)
    assert list(found.table) == [*STREAM_PARITY_COLUMNS, "allowed_dbfs", "agreement"]
    assert found.table["agreement"].tolist()[:5] == ["bit for bit"] * 5
    assert found.table["allowed_dbfs"].tolist() == [-np.inf] * 5 + [-60.0]
    assert found.passed
    assert found.text.startswith("5 chunks bit for bit") or found.text == "6 chunks bit for bit"
    assert found.name == "one"
    np.testing.assert_array_equal(found.graph, lives[1].samples)


@pytest.mark.parametrize(
    ("chunk", "by", "agreement"), [(1, 1e-4, "DIFFERS"), (5, 1e-4, "within tolerance"), (5, 0.1, "DIFFERS"), (2, float("nan"), "DIFFERS")]
)
def test_a_wrong_chunk_is_named(lives, chunk, by, agreement):
    found = compare_streams(lives[0], spoiled(lives[1], chunk, by), device="cpu", tolerance=ROUNDING)
    assert found.table["agreement"][chunk] == agreement
    assert found.passed is (agreement != "DIFFERS")
    assert (found.table["agreement"].drop([chunk, 5]) if chunk != 5 else found.table["agreement"][:5]).eq("bit for bit").all()


def test_differences_from_a_reference_are_by_chunk(lives):
    reference = lives[1].samples.copy()
    reference[3 * 1920] += 0.5  # in chunk 1, which has the frames 2 to 6
    table = chunk_differences(reference, lives[1])
    assert table["max_dbfs"].tolist() == [-np.inf, pytest.approx(-6.02, abs=0.01), *[-np.inf] * 4]
    assert table["samples"].tolist() == lives[1].table["samples"].tolist()


def test_a_stream_equals_whole_decoding_until_the_window_rolls(runner, lives):
    """And not from then on: with W = 16 the fifth chunk of 5 frames is the first that lacks what came before."""
    with torch.no_grad():
        whole = runner.model.decoder(tiny_codes(25)[None])[0, 0]
    table = chunk_differences(whole, lives[0])
    assert (table["max_dbfs"][:4] < -80).all()
    assert (table["max_dbfs"][4:] > -80).all()


@pytest.mark.parametrize("reference", [np.zeros(10, np.float32), np.zeros((1, 25 * 1920), np.float32), np.float32(0)])
def test_another_length_fails(lives, reference):
    with pytest.raises(InputError, match="Compare vectors of one length"):
        chunk_differences(reference, lives[1])


def test_a_request_without_samples_fails(runner):
    nothing = play_request(runner, [vg.ChunkRequest("nothing", tiny_codes(2)[:15])])
    with pytest.raises(InputError, match="at least one sample"):
        compare_streams(nothing, nothing, device="cpu")


# ---------------------------------------------------------------------------------------------------- summary


def test_summary_of_a_whole_life(tiny_folder, lives):
    runner = tiny_runner(tiny_folder)
    report = runner.capture_model()
    odd = play_request(runner, [vg.ChunkRequest("odd", piece) for piece in tiny_codes(5).split([2, 3], dim=1)])
    good = play_request(runner, chunks_of(runner, "one", tiny_codes(25)))
    state_bytes = runner.model.state_bytes
    comparisons = [compare_streams(lives[0], good, device="cpu", tolerance=ROUNDING)]
    early = summarise_streaming(report, runner, comparisons, state_bytes=state_bytes, checks={})
    assert not early.passed
    assert "pool not released yet" in early.verdict()
    runner.shutdown()
    found = summarise_streaming(report, runner, comparisons, state_bytes=state_bytes, checks={"all is well": True})
    assert odd.table["outcome"].tolist() == ["exact hit", "fallback"]
    assert found.verdict() == (
        "PASS: 10/10 graphs captured; 1/1 streams and 6/6 chunks equal eager "
        "(5 exact hits and 0 fallbacks bit for bit, 1 padded hit within tolerance); all is well; pool released"
    )
    assert found.hits == {"qwen3_tts.suffix": 5, "qwen3_tts.xvec_prefix": 2}
    assert found.fallbacks == {"qwen3_tts.suffix": {"shape_not_covered": 1}}
    assert found.figures()["suffix"] == "5 of 6 calls in graphs (eager: shape_not_covered 1)"
    assert StreamingSummary.from_json(json.loads(json.dumps(found.to_json()))) == found
    bundle = found._repr_mimebundle_()
    assert bundle[STREAMING_MIME] == found.to_json()
    assert "PASS" in bundle["text/html"]
    assert str(found).splitlines()[0] == found.verdict()


GOOD = StreamingSummary(
    "cpu", 2, 2, 1.0, 0, 0, 0, {"a.b": 1}, {}, 0, 1, 1, {"exact hit": 2}, 2, 0.0, {"it holds": True}, 0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"graphs_captured": 1}, "1/2 graphs captured"),
        ({"graphs_requested": 0, "graphs_captured": 0}, "0/0 graphs captured"),
        ({"equal_streams": 0, "equal_chunks": 1}, "0/1 streams and 1/2 chunks equal eager (see the table)"),
        ({"streams": 0, "equal_streams": 0}, "0/0 streams"),
        ({"errors": 1}, "FAIL"),
        ({"checks": {"it holds": False}}, "NOT it holds"),
        ({"pool_bytes_after_shutdown": 4}, "pool NOT released"),
        ({"pool_bytes_after_shutdown": None}, "pool not released yet"),
    ],
)
def test_whatever_is_wrong_fails_the_verdict(change: dict[str, Any], words: str) -> None:
    assert GOOD.passed
    assert GOOD.verdict().startswith("PASS: ")
    bad = replace(GOOD, **change)
    assert not bad.passed
    assert bad.verdict().startswith("FAIL: ")
    assert words in bad.verdict()


def test_largest_difference_in_words():
    assert GOOD.figures()["largest difference"] == "none: all identical, bit for bit"
    assert replace(GOOD, largest_difference=0.1).figures()["largest difference"] == "−20.0 dBFS"
    assert replace(GOOD, largest_difference=None).figures()["largest difference"] == "not finite"


def test_json_of_something_else_fails():
    data = GOOD.to_json()
    del data["streams"]
    with pytest.raises(InputError, match=r"missing \['streams'\], unknown \['x'\]"):
        StreamingSummary.from_json({**data, "x": 1})
    assert {field.name for field in fields(GOOD)} == set(GOOD.to_json())
