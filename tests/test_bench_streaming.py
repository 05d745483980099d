"""The streaming bench: what its record holds, and that both sides did the same work."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from workload.stub_runner import StubRunner

from vgraph_lab.bench.record import MeasurementRecord
from vgraph_lab.bench.runners import RunnerPair
from vgraph_lab.bench.streaming import _burst_us, _Case, _measure, _phases, _samples, bench_streaming
from vgraph_lab.bench.tables import streaming_table
from vgraph_lab.config import ConnectorConfig, StageConfig
from vgraph_lab.errors import ConfigError, InputError, RequestError, RequestErrorKind
from vgraph_lab.qwen3_tts.code2wav import Qwen3TTSCode2Wav
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.runner import GPUGenerationModelRunner

CONNECTOR = ConnectorConfig(codec_chunk_frames=16, initial_codec_chunk_frames=1, codec_left_context_frames=16)
FORM = {"form_asked": "plain", "form": "plain", "form_reason": None, "form_error_ratio": None}
PHASES = ("first", "growing", "steady", "tail")


@pytest.fixture(scope="module")
def seen() -> list[str]:
    return []


@pytest.fixture(scope="module")
def record(tiny_decoder: Code2WavDecoder, seen: list[str]) -> MeasurementRecord:
    """Chunks of 1, 16 (17 frames are there, W is 16), 16 and 2."""
    return bench_streaming(
        tiny_decoder,
        batch_sizes=(2, 1),
        frames=35,
        connector=CONNECTOR,
        repeats=2,
        settings={"weights": "tiny"},
        progress=seen.append,
    )


def shown(record: MeasurementRecord, width: int = 200) -> str:
    printed = StringIO()
    Console(width=width, file=printed).print(streaming_table(record))
    return printed.getvalue()


def test_phases() -> None:
    assert _phases([1, 25, 25, 25, 25, 4], 25, 72) == ["first", "growing", "growing", "growing", "steady", "tail"]
    assert _phases([1, 25, 25, 25, 25], 25, 72)[-1] == "steady", "a last chunk that is full is none of its own kind"
    assert _phases([3], 25, 72) == ["first"]
    assert _phases([72, 25], 25, 72) == ["first", "steady"]


def test_one_row_per_mode_and_batch_size(record: MeasurementRecord, seen: list[str]) -> None:
    assert [(row["mode"], row["batch_size"]) for row in record.rows] == [("icl", 1), ("icl", 2), ("xvec", 1), ("xvec", 2)]
    assert seen[-4:] == [f"measuring {mode}, {size} at a time" for mode in ("icl", "xvec") for size in (1, 2)]
    assert seen[0].startswith("capturing 0/")


def test_rows_are_flat_and_name_their_units(record: MeasurementRecord) -> None:
    figures = [f"{kind}{tail}_ms" for kind in ("wall", "host") for tail in ("", "_p10", "_p90")]
    expected = {f"{variant}_{phase}_{figure}" for variant in ("eager", "graphs") for phase in PHASES for figure in figures}
    expected |= {f"{name}_{phase}" for name in ("speedup", "largest_difference") for phase in PHASES}
    expected |= {"mode", "batch_size", "chunks", "rounds", "graph_hits", "graph_fallbacks"}
    for row in record.rows:
        assert set(row) == expected, "on the CPU there are no bursts"
        assert (row["chunks"], row["rounds"]) == (4, 2)
        for phase in PHASES:
            assert row[f"speedup_{phase}"] == pytest.approx(row[f"eager_{phase}_wall_ms"] / row[f"graphs_{phase}_wall_ms"])


def test_graphs_served_every_call_and_said_the_same(record: MeasurementRecord) -> None:
    for row in record.rows:
        assert row["graph_fallbacks"] == 0
        assert row["graph_hits"] >= row["rounds"] * row["chunks"]
        assert {row[f"largest_difference_{phase}"] for phase in ("first", "growing", "steady")} == {0.0}, "the same kernels"
        assert row["largest_difference_tail"] < 1e-3, "padded, so other kernels may run; this decoder is random and loud"
    capture = record.settings["capture"]
    assert capture["graphs"] == 12, "a prefix and two transitions in two modes, at two batch sizes"
    assert capture["failed"] == 0
    assert capture["seconds"] > capture["capture_seconds"] > 0
    assert capture["static_buffer_bytes"] > 0
    assert capture["pool_reserved_bytes"] > 0
    assert record.settings["request_state_bytes"] > 0


def test_settings_say_what_was_measured(record: MeasurementRecord) -> None:
    expected = {"weights": "tiny", "dtype": "float32", "frames": 35, "window_frames": 16, "codes_on_host": True}
    assert expected.items() <= record.settings.items()
    assert dict.fromkeys(FORM).items() <= record.settings.items(), "the published design has no form"
    assert "form" not in shown(record)
    assert record.settings["connector"]["codec_chunk_frames"] == 16
    assert "NaN" not in record.to_json()


def test_the_table(record: MeasurementRecord) -> None:
    text = shown(record)
    for words in ("first", "growing", "steady", "tail", "icl", "xvec", "12 graphs through the Manager", "0 ran eager"):
        assert words in text
    assert "host first" not in text
    row = record.rows[0]
    lines = [line.split() for line in text.splitlines()]
    assert ["icl", "1", "eager", *(f"{row[f'eager_{phase}_wall_ms']:.2f}" for phase in PHASES)] in lines
    assert ["÷", *(f"{row[f'speedup_{phase}']:.2f}" for phase in PHASES)] in lines
    assert sum(line[:1] == ["÷"] for line in lines) == len(record.rows)


def test_the_table_of_a_gpu(record: MeasurementRecord) -> None:
    burst = "graphs_steady_burst_host_us"
    # Times of a slow CPU would not fit a terminal, and this is not one.
    fixed = [{key: 12.34 if key.endswith("_ms") and value else value for key, value in row.items()} for row in record.rows]
    rows = [{**row, burst: 123.0 if row["batch_size"] == 1 else None} for row in fixed]
    text = shown(replace(record, rows=rows, machine={**record.machine, "cuda": "13.0"}), width=80)
    assert "…" not in text, "it fits a terminal"
    headings = " ".join(text.splitlines()[1:3]).split()
    assert [headings.count(word) for word in ("host", "first", "steady", "growing", "burst")] == [2, 2, 2, 1, 1]
    (line,) = [line for line in text.splitlines() if "0.12" in line and "graphs" in line][:1]
    assert line.split()[-1] == "0.12"


def test_requests_too_short_for_a_steady_state(tiny_decoder: Code2WavDecoder, record: MeasurementRecord) -> None:
    """Both sides eager here: nothing is captured, and only the row is looked at."""
    cfg = StageConfig(connector=CONNECTOR, enforce_eager=True, max_num_seqs=1)
    with GPUGenerationModelRunner(cfg, "cpu") as one, GPUGenerationModelRunner(cfg, "cpu") as other:
        for runner in (one, other):
            runner.load_model(Qwen3TTSCode2Wav(tiny_decoder, cfg))
            report = runner.capture_model()
        case = _Case(tiny_decoder, CONNECTOR, "xvec", 1, 9, codes_on_host=False)
        row = _measure(case, RunnerPair({"eager": one, "graphs": other}, report, 0), repeats=3, seconds=0.0)
    assert row["rounds"] == 2, "two are always played"
    assert row["graph_hits"] == 0
    assert row["graph_fallbacks"] > 0
    assert "speedup_tail" in row
    assert "speedup_steady" not in row
    assert "growing" not in shown(replace(record, rows=[row])).splitlines()[2]
    beside_others = shown(replace(record, rows=[*record.rows, row]))
    assert "growing" in beside_others.splitlines()[2]
    assert "–" in beside_others


def test_bursts_leave_no_request_behind(tiny_decoder: Code2WavDecoder) -> None:
    runner: Any = StubRunner()
    burst = _burst_us(_Case(tiny_decoder, CONNECTOR, "icl", 2, 35, codes_on_host=True), runner)
    assert burst is not None
    assert burst > 0
    names = ["icl-2-burst-0", "icl-2-burst-1"]
    assert runner.aborted == names
    assert [[request.codes.shape[1] for request in call] for call in runner.calls[:3]] == [[17, 17], [16, 16], [16, 16]]
    assert all([request.request_id for request in call] == names and not any(r.finished for r in call) for call in runner.calls)
    assert _burst_us(_Case(tiny_decoder, CONNECTOR, "icl", 2, 9, codes_on_host=True), runner) is None


def test_what_cannot_be_measured(tiny_decoder: Code2WavDecoder) -> None:
    for modes in (["icl", "vec"], [], [""], ["icl", "icl"]):
        with pytest.raises(InputError, match="accepted are 'icl' and 'xvec', each once"):
            bench_streaming(tiny_decoder, modes=modes)
    with pytest.raises(InputError, match=r"form 'plain' is one of incremental decoding, and the algorithm is 'published'"):
        bench_streaming(tiny_decoder, form="plain")
    refused = RequestError("r", RequestErrorKind.INVALID_INPUT, "refused")
    with pytest.raises(RequestError, match="request 'r': refused"):
        _samples(refused)
    assert _samples(torch.ones(1)).tolist() == [1.0]


def test_the_incremental_algorithm(tiny_decoder: Code2WavDecoder) -> None:
    found = bench_streaming(
        tiny_decoder,
        batch_sizes=(2,),
        frames=35,
        connector=CONNECTOR,
        modes=("icl",),
        repeats=2,
        algorithm="incremental",
        settings={"weights": "tiny"},
    )
    (row,) = found.rows
    assert row["graph_fallbacks"] == 0
    assert found.settings["algorithm"] == "incremental"
    assert FORM.items() <= found.settings.items()
    assert "graphs in the plain form\n" in shown(found)
    assert found.settings["capture"]["graphs"] == 3  # 1 and 16 frames, and 1 behind a reference
    assert max(row[f"largest_difference_{phase}"] for phase in PHASES) < 1e-3
    with pytest.raises(ConfigError, match="Input should be 'published' or 'incremental'"):
        bench_streaming(tiny_decoder, batch_sizes=(1,), connector=CONNECTOR, algorithm="exact")
    with pytest.raises(ConfigError, match="Input should be 'plain', 'fast' or 'compiled'"):
        bench_streaming(tiny_decoder, batch_sizes=(1,), connector=CONNECTOR, algorithm="incremental", form="slow")


@pytest.mark.parametrize("form", ["fast", "compiled"])
def test_a_form_that_cannot_run_here_is_named_with_the_one_that_does(
    tiny_decoder: Code2WavDecoder, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked: dict[str, Any] = {"algorithm": "incremental", "form": form, "settings": {"weights": "tiny"}}
    found = bench_streaming(tiny_decoder, batch_sizes=(1,), frames=17, connector=CONNECTOR, modes=("xvec",), repeats=1, **asked)
    s = found.settings
    assert (s["form_asked"], s["form"], s["form_error_ratio"]) == (form, "plain", None)
    assert "Use a CUDA device" in s["form_reason"] or "needs a CUDA device" in s["form_reason"]
    assert f"graphs in the plain form, not in the {form} one: {s['form_reason']}" in " ".join(shown(found).split())


def test_a_form_in_use_is_named_without_a_reason(record: MeasurementRecord) -> None:
    named = {"form_asked": "fast", "form": "fast", "form_reason": None, "form_error_ratio": 1.25}
    assert "graphs in the fast form\n" in shown(replace(record, settings={**record.settings, **named}))
