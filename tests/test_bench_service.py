"""The service bench: its figures against its own runs, word errors worked out by hand, and what is said where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import pytest
import torch
from rich.console import Console
from torch import Tensor

from vgraph_lab import bundled
from vgraph_lab.bench import service
from vgraph_lab.bench.record import MeasurementRecord
from vgraph_lab.bench.service import Speech, bench_service, find_recogniser, speech_for
from vgraph_lab.bench.tables import service_table
from vgraph_lab.config import ConnectorConfig
from vgraph_lab.errors import InputError, MissingExtraError
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.workload import ServiceResult

CONNECTOR = ConnectorConfig(codec_chunk_frames=16, initial_codec_chunk_frames=1, codec_left_context_frames=16)
FIGURES = [
    "requests_per_s",
    "audio_s_per_s",
    "mean_e2e_ms",
    "p99_e2e_ms",
    "mean_rtf",
    "mean_ttfp_ms",
    "p99_ttfp_ms",
    "successes",
    "underruns",
    "mean_batch_size",
    "busy_percent",
    "word_error_rate_percent",
]


class Hears:
    """A recogniser that hears the same words in everything."""

    def __init__(self, heard: str) -> None:
        self.heard = heard
        self.lengths: list[int] = []

    def transcribe(self, wav: Tensor, sample_rate: int) -> str:
        assert sample_rate == 24_000
        self.lengths.append(len(wav))
        return self.heard

    def words(self, text: str) -> Sequence[str]:
        return text.lower().split()


def codes(decoder: Code2WavDecoder, *frames: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {f"u{n}": torch.randint(0, decoder.geometry.codebook_size, (16, length), generator=draw) for n, length in enumerate(frames)}


@pytest.fixture(scope="module")
def hears() -> Hears:
    return Hears("one two")


@pytest.fixture(scope="module")
def record(tiny_decoder: Code2WavDecoder, hears: Hears) -> MeasurementRecord:
    """Two utterances in English (three words and two) and one in another language."""
    speech = Speech(codes(tiny_decoder, 9, 13, 8), {}, {"u0": "One two three", "u2": "One TWO"})
    settings = {"weights": "tiny"}
    return bench_service(
        tiny_decoder, speech, requests=3, concurrency=2, repeats=3, connector=CONNECTOR, recogniser=hears, settings=settings
    )


def shown(record: MeasurementRecord) -> str:
    printed = StringIO()
    Console(width=160, file=printed).print(service_table(record))
    return printed.getvalue()


def test_one_row_per_figure(record: MeasurementRecord) -> None:
    assert [row["metric"] for row in record.rows] == FIGURES
    keys = {"metric", "eager", "graphs", "change_percent", "absent_because"}
    keys |= {f"{name}_{end}" for name in ("eager", "graphs") for end in ("low", "high")}
    assert all(set(row) == keys for row in record.rows)
    assert "NaN" not in record.to_json()


def test_figures_are_medians_of_the_runs(record: MeasurementRecord) -> None:
    rows = {row["metric"]: row for row in record.rows}
    for metric, key, factor in (("mean_ttfp_ms", "mean_ttfp_s", 1e3), ("requests_per_s", "requests_per_s", 1), ("mean_rtf", "mean_rtf", 1)):
        for variant in ("eager", "graphs"):
            values = [factor * run[key] for run in record.settings["runs"] if run["variant"] == variant]
            assert len(values) == 3
            row = rows[metric]
            assert row[variant] == pytest.approx(median(values))
            assert (row[f"{variant}_low"], row[f"{variant}_high"]) == (pytest.approx(min(values)), pytest.approx(max(values)))
        assert rows[metric]["change_percent"] == pytest.approx(100 * (rows[metric]["graphs"] / rows[metric]["eager"] - 1))
    assert rows["successes"]["eager"] == rows["successes"]["graphs"] == 3


def test_word_errors_of_english_requests(record: MeasurementRecord, hears: Hears) -> None:
    """ "one two" for "one two three" and for "one two": one error in five words."""
    row = record.rows[-1]
    assert (row["eager"], row["graphs"], row["change_percent"]) == (20.0, 20.0, 0.0)
    assert row["absent_because"] is None
    assert sorted(hears.lengths) == [8 * 1920, 8 * 1920, 9 * 1920, 9 * 1920], "each English request once per side"


def test_settings_say_what_was_measured(record: MeasurementRecord) -> None:
    s = record.settings
    assert (s["requests"], s["concurrency"], s["talker_frames_per_s"], s["frames"]) == (3, 2, 50.0, 30)
    assert s["capture_batch_sizes"] == [1, 2]
    assert (s["algorithm"], s["form"]) == ("published", None)
    assert s["graph_hits"] > 0
    assert s["graph_fallbacks"] == 0
    assert s["capture"]["graphs"] == 12


def test_the_incremental_algorithm_and_its_form(tiny_decoder: Code2WavDecoder) -> None:
    speech = Speech(codes(tiny_decoder, 9), {}, {})
    asked: dict[str, Any] = {"algorithm": "incremental", "form": "fast", "settings": {"weights": "tiny"}}
    found = bench_service(tiny_decoder, speech, requests=1, concurrency=1, repeats=1, connector=CONNECTOR, **asked)
    s = found.settings
    assert (s["algorithm"], s["form_asked"], s["form"]) == ("incremental", "fast", "plain")
    assert f"graphs in the plain form, not in the fast one: {s['form_reason']}" in " ".join(shown(found).split())
    assert s["graph_fallbacks"] == 0
    assert s["capture"]["graphs"] == 3


def test_the_table(record: MeasurementRecord) -> None:
    text = shown(record)
    for words in ("3 requests, 2 at once", "mean ttfp ms", "medians of 3 runs", "50 frames/s", "12 graphs through the Manager"):
        assert words in text
    *others, errors = record.rows
    absent = {**errors, "eager": None, "graphs": None, "change_percent": None, "absent_because": "try pip install -e '.[voice]'"}
    text = shown(replace(record, rows=[*others, absent], settings={**record.settings, "repeats": 1}))
    assert "no word error rate percent: try pip install -e '.[voice]'" in text, "brackets are not markup here"
    assert "one run;" in text


def test_word_errors_that_are_not_counted() -> None:
    served = pd.DataFrame({"utterance": ["u0"], "success": [True]}, index=["request-000"])
    results = dict.fromkeys(("eager", "graphs"), ServiceResult(pd.DataFrame(), served, {}))
    without_english = Speech({}, {}, {})
    for recogniser, why in (("not asked for", "not asked for"), (Hears(""), "no English request was served")):
        row = service._word_error_row(results, without_english, recogniser, 24_000)
        assert (row["eager"], row["graphs"], row["change_percent"], row["absent_because"]) == (None, None, None, why)


def test_speech_of_a_checkpoint_with_clips(tiny_decoder: Code2WavDecoder) -> None:
    speech = speech_for(tiny_decoder, bundled.checkpoint_folder())
    assert speech.texts["00_hibari"].startswith("The kettle")
    assert "17_asterisk_fr_vm-rec-busy" in speech.codes
    assert "17_asterisk_fr_vm-rec-busy" not in speech.texts


def test_decoders_that_do_not_speak_get_random_codes_of_real_length(tiny_decoder: Code2WavDecoder, tiny_folder: Path) -> None:
    real = speech_for(tiny_decoder, bundled.checkpoint_folder())
    for folder in (None, tiny_folder):
        speech = speech_for(tiny_decoder, folder)
        assert {name: given.shape for name, given in speech.codes.items()} == {name: given.shape for name, given in real.codes.items()}
        assert max(int(given.max()) for given in speech.codes.values()) == tiny_decoder.geometry.codebook_size - 1
        assert find_recogniser(speech) == "these weights come without clips that they speak"


def test_a_recogniser_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**_: int) -> None:
        raise MissingExtraError("faster_whisper", "voice", "Measuring word error rates")

    speech = Speech({}, {}, {"u0": "one"})
    monkeypatch.setattr(service, "WhisperTiny", missing)
    assert "pip install -e '.[voice]'" in str(find_recogniser(speech))
    monkeypatch.setattr(service, "WhisperTiny", lambda **_: Hears("one"))
    assert isinstance(find_recogniser(speech), Hears)


def test_what_cannot_be_served(tiny_decoder: Code2WavDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    speech = Speech(codes(tiny_decoder, 3), {}, {})
    with pytest.raises(InputError, match="form 'fast' is one of incremental decoding"):
        bench_service(tiny_decoder, speech, form="fast")
    monkeypatch.setattr(service, "runner_pair", lambda *_, **__: pytest.fail("graphs were captured first"))
    for settings, message in (
        ({"repeats": 0}, "repeats and concurrency must be at least 1, got 0 and 16"),
        ({"concurrency": 0}, "got 5 and 0"),
        ({"talker_frames_per_s": 0.0}, "talker_frames_per_s must be above 0, got 0.0"),
        ({"requests": 0}, "0 requests of 1 utterances"),
    ):
        with pytest.raises(InputError, match=message):
            bench_service(tiny_decoder, speech, **settings)
