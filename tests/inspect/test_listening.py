"""Listening by number: tables, seams and verdicts. Truth: differences, clicks and sines put in by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inspect_streaming import chunks_of, tiny_codes, tiny_runner

import vgraph_lab as vg
from vgraph_lab import bundled
from vgraph_lab.errors import InputError
from vgraph_lab.inspect.listening.audio_set import AudioSet
from vgraph_lab.inspect.listening.limits import limits_for
from vgraph_lab.inspect.listening.seams import SEAM_COLUMNS, click_table, seam_table
from vgraph_lab.inspect.listening.table import LISTENING_COLUMNS, WORD_COLUMNS, audio_set_of, listening_table
from vgraph_lab.inspect.request_life import play_request
from vgraph_lab.inspect.speech_metrics import log_spectral_distance_db, si_sdr_db, stoi_or_reason
from vgraph_lab.inspect.stream_parity import compare_streams

RATE = 24_000
Array = np.ndarray[Any, np.dtype[np.float32]]


def sine(seconds: float = 1.0, amplitude: float = 0.5, hz: float = 440.0) -> Array:
    return (amplitude * np.sin(2 * np.pi * hz * np.arange(round(seconds * RATE)) / RATE)).astype(np.float32)


def noise(samples: int = RATE, level: float = 0.1, seed: int = 0) -> Array:
    return (level * np.random.default_rng(seed).standard_normal(samples)).astype(np.float32)


def speechlike(seconds: float = 2.0) -> Array:
    """Noise modulated at 4 Hz, as syllables are."""
    n = round(seconds * RATE)
    return noise(n) * (1 + np.sin(2 * np.pi * 4 * np.arange(n) / RATE)).astype(np.float32)


def row(reference: Array, candidate: Array, seams: Sequence[int] = (), **options: Any) -> pd.Series:
    audio = AudioSet.from_waveforms({"eager": {"s": reference}, "graph": {"s": candidate}}, RATE, seams={"s": seams})
    table = listening_table(audio, **options)
    assert len(table) == 1
    return table.iloc[0]


# ------------------------------------------------------------------------------------------------------------- the measures


def test_a_known_difference_of_60_db_below_full_scale() -> None:
    found = row(sine(), sine() + np.float32(1e-3))
    assert found["max_dbfs"] == pytest.approx(-60, abs=1e-3)
    assert found["rms_dbfs"] == pytest.approx(-60, abs=1e-3)
    # the sine's level is that of its amplitude, less 3.01 dB
    assert found["snr_db"] == pytest.approx(60 - 6.0206 - 3.0103, abs=1e-2)
    assert found["first_differing_sample"] == 0


@pytest.mark.parametrize("wanted_db", [10.0, 40.0, 80.0])
def test_the_ratio_of_two_sines(wanted_db: float) -> None:
    """A second sine, orthogonal to the first over whole periods, is all of the error, for SNR and SI-SDR alike."""
    found = row(sine(hz=400), sine(hz=400) + sine(hz=700) * np.float32(10 ** (-wanted_db / 20)))
    assert found["snr_db"] == pytest.approx(wanted_db, abs=0.05)
    assert found["si_sdr_db"] == pytest.approx(wanted_db, abs=0.05)


@pytest.mark.parametrize("gain", [0.5, 2.0, 0.001])
def test_a_gain_is_no_distortion_but_a_difference(gain: float) -> None:
    found = row(speechlike(), speechlike() * np.float32(gain))
    assert found["si_sdr_db"] > 120  # what float32 leaves of it
    assert found["snr_db"] == pytest.approx(-20 * math.log10(abs(1 - gain)), abs=1e-3)
    assert found["stoi"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("gain", [0.5, 0.25])
def test_the_log_spectral_distance_of_scaled_noise_is_the_gain(gain: float) -> None:
    a = torch.from_numpy(noise(level=0.3))
    # Only bins at the floor and the silent edges are nearer than the gain says.
    assert log_spectral_distance_db(a, gain * a) == pytest.approx(-20 * math.log10(gain), rel=2e-3)
    assert log_spectral_distance_db(a, a) == 0


def test_the_log_spectral_distance_from_silence_ends_at_the_floor() -> None:
    full = torch.from_numpy(sine(amplitude=1.0, hz=46.875 * 20 * 0.5))  # the middle of a bin
    distance = log_spectral_distance_db(full, torch.zeros_like(full))
    assert 0 < distance <= 100
    quiet = full * 1e-7
    assert log_spectral_distance_db(quiet, torch.zeros_like(full)) == 0


def test_quiet_speech_has_the_same_si_sdr() -> None:
    a, b = torch.from_numpy(speechlike()), torch.from_numpy(speechlike() + noise(2 * RATE, 1e-3, seed=1))
    loud, _ = si_sdr_db(a, b)
    quiet, _ = si_sdr_db(a * 1e-6, b * 1e-6)
    assert quiet == pytest.approx(loud, abs=1e-3)


# ---------------------------------------------------------------------------------------------------------------- the table


def test_columns_and_dtypes() -> None:
    audio = AudioSet.from_waveforms({c: {"x": sine(), "y": sine()} for c in ("a", "b", "c")}, RATE)
    table = listening_table(audio)
    assert list(table) == list(LISTENING_COLUMNS)
    assert list(zip(table["sample"], table["condition"], strict=True)) == [("x", "b"), ("x", "c"), ("y", "b"), ("y", "c")]
    assert table["reference"].unique().tolist() == ["a"]
    assert str(table["passed"].dtype) == "boolean"


def test_identical_waveforms() -> None:
    found = row(speechlike(), speechlike(), seams=[RATE])
    assert (found["max_dbfs"], found["rms_dbfs"], found["snr_db"], found["si_sdr_db"]) == (-math.inf, -math.inf, math.inf, math.inf)
    assert (found["log_spectral_distance_db"], found["mel_distance_db"], found["clicks"], found["seams"]) == (0, 0, 0, 1)
    assert found["stoi"] == pytest.approx(1)
    assert pd.isna(found["first_differing_sample"])
    assert (found["passed"], found["verdict"], found["note"]) == (True, "identical, bit for bit", "")


def test_silence_is_defined() -> None:
    both = row(np.zeros(RATE, np.float32), np.zeros(RATE, np.float32), seams=[100])
    assert (both["snr_db"], both["clicks"], both["passed"]) == (math.inf, 0, True)
    assert math.isnan(both["si_sdr_db"])
    assert math.isnan(both["stoi"])
    assert both["note"] == "SI-SDR: both are silence; STOI: the reference is silence"
    whisper = row(np.zeros(RATE, np.float32), noise(level=1e-7))
    assert whisper["snr_db"] == -math.inf
    assert whisper["passed"], whisper["verdict"]  # nobody hears it, and silence has no ratio to anything
    assert "SNR" not in whisper["verdict"]
    loud = row(np.zeros(RATE, np.float32), noise(level=1e-2))
    assert not loud["passed"]
    silenced = row(speechlike(), np.zeros(2 * RATE, np.float32))
    assert (silenced["snr_db"], silenced["note"]) == (pytest.approx(0), "SI-SDR: one is silence")
    assert not silenced["passed"]


def test_one_sample_is_defined() -> None:
    found = row(np.ones(1, np.float32), np.full(1, 0.5, np.float32))
    assert (found["max_dbfs"], found["snr_db"]) == (pytest.approx(-6.02, abs=0.01), pytest.approx(6.02, abs=0.01))
    assert math.isnan(found["stoi"])
    assert math.isnan(found["click_db"])
    assert found["note"] == "STOI: 0.00 s are shorter than 0.4 s"
    assert np.isfinite([found["log_spectral_distance_db"], found["mel_distance_db"]]).all()


def test_ten_minutes_are_defined() -> None:
    rate = 8_000  # for the sake of time
    long = np.zeros(600 * rate, np.float32)
    long[rate : 7 * rate] = speechlike()
    waveforms = {"eager": {"s": long}, "graph": {"s": long + np.float32(1e-7)}}
    audio = AudioSet.from_waveforms(waveforms, rate, seams={"s": range(16_000, len(long), 16_000)})
    found = listening_table(audio).iloc[0]
    assert (audio.duration_s("s"), found["seams"], found["clicks"]) == (600, 299, 0)
    assert found["stoi"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(("samples", "words"), [(30_000, "6000 samples longer"), (20_000, "4000 samples shorter")])
def test_other_lengths_are_compared_where_both_are(samples: int, words: str) -> None:
    whole = speechlike()
    found = row(whole[:24_000], whole[:samples], seams=[10_000, 19_999])
    common = min(24_000, samples)
    assert (found["length_samples"], found["reference_length_samples"]) == (samples, 24_000)
    assert (found["max_dbfs"], found["first_differing_sample"]) == (-math.inf, common)
    assert found["note"] == f"{words} than the reference: the first {common} are compared"
    assert found["passed"] is np.False_ or not found["passed"]
    assert f"{samples} samples instead of 24000" in found["verdict"]


def test_seams_beyond_the_shorter_one_are_left_out() -> None:
    whole = speechlike()
    found = row(whole, whole[:20_000], seams=[10_000, 30_000])
    assert (found["seams"], found["clicks"]) == (1, 0)


@given(st.integers(1, 3_000), st.integers(1, 3_000), st.floats(0, 1), st.booleans())
@settings(max_examples=25)
def test_any_two_waveforms_have_a_row(one: int, other: int, level: float, has_seam: bool) -> None:
    longest = max(one, other)
    seams = [longest // 2] if has_seam and longest >= 2 else []
    found = row(noise(one, level), noise(other, level, seed=1), seams=seams)
    assert isinstance(found["verdict"], str)
    assert found["verdict"]


def test_sets_that_cannot_be_compared_fail() -> None:
    alone = AudioSet.from_waveforms({"eager": {"s": sine()}}, RATE)
    low = AudioSet.from_waveforms({"a": {"s": sine()}, "b": {"s": sine()}}, 7_999)
    for measure in (listening_table, seam_table):
        with pytest.raises(InputError, match="nothing to compare 'eager' with"):
            measure(alone)
        with pytest.raises(InputError, match="7999 Hz; measures of speech need 8000 Hz"):
            measure(low)


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 48_000])
def test_other_rates_are_measured(rate: int) -> None:
    audio = AudioSet.from_waveforms({"a": {"s": speechlike()}, "b": {"s": speechlike() * 0.5}}, rate, seams={"s": [9_000]})
    found = listening_table(audio).iloc[0]
    assert np.isfinite([found["mel_distance_db"], found["log_spectral_distance_db"], found["stoi"], found["click_db"]]).all()


# --------------------------------------------------------------------------------------------------------------- the verdict


def test_the_verdict_names_the_limits_that_are_kept() -> None:
    found = row(speechlike(), speechlike() + noise(2 * RATE, 1e-7, seed=1))
    assert found["passed"]
    assert found["verdict"].startswith("within the limits of float32: peak −12")
    assert "(−100.0 allowed)" in found["verdict"]
    assert "STOI 1.0000 (0.9999 needed)" in found["verdict"]


def test_the_verdict_names_the_limits_that_are_broken() -> None:
    found = row(speechlike(), speechlike() + noise(2 * RATE, 1e-4, seed=1))
    assert not found["passed"]
    assert found["verdict"].startswith("outside the limits of float32: peak −6")
    assert "clicks" not in found["verdict"]  # those are kept


def test_a_click_alone_breaks_the_limits() -> None:
    spoiled = sine()
    spoiled[12_000:] += np.float32(5e-3) * np.exp(-np.arange(12_000) / 60).astype(np.float32)
    found = row(
        sine(), spoiled, seams=[6_000, 12_000], limits=replace(limits_for(torch.bfloat16), log_spectral_distance_db=99.0, stoi=-1.0)
    )
    assert (found["clicks"], found["passed"]) == (1, False)
    assert found["verdict"] == "outside the limits of bfloat16: clicks 1 (0 allowed)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_limits_are_stated_with_reasons(dtype: torch.dtype) -> None:
    limits = limits_for(dtype)
    assert limits.name in str(dtype)
    assert len(limits.why) > 40
    with pytest.raises(InputError, match=r"no limits are stated for torch.float64. Stated: float32, float16, bfloat16"):
        limits_for(torch.float64)


def test_what_the_limits_of_float32_say_of_16_bits_is_true() -> None:
    rng = np.random.default_rng(0)
    wav = 0.3 * rng.standard_normal(200_000)
    moved = wav + rng.uniform(-1e-5, 1e-5, len(wav))
    steps = np.abs(np.rint(moved * 2**15) - np.rint(wav * 2**15))
    why = limits_for(torch.float32).why
    assert steps.max() == 1
    assert steps.mean() == pytest.approx(0.164, abs=0.004)  # 5e-6, the mean, over the step of 2**-15
    assert "16 % of the samples change, by one step at most" in why
    assert f"half a step of 16 bits (−{-20 * math.log10(2**-16):.1f} dBFS)" in why


def test_coarser_numbers_have_wider_limits() -> None:
    fine, half, brain = (limits_for(d) for d in (torch.float32, torch.float16, torch.bfloat16))
    assert fine.max_dbfs < half.max_dbfs < brain.max_dbfs
    assert fine.snr_db > half.snr_db > brain.snr_db
    assert fine.stoi > half.stoi > brain.stoi


def test_rounding_to_half_precision_keeps_its_limits() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        rounded = torch.from_numpy(speechlike()).to(dtype).float().numpy()
        assert row(speechlike(), rounded, limits=limits_for(dtype))["passed"]
        assert not row(speechlike(), rounded)["passed"]


def test_the_bundled_decoder_in_bfloat16_keeps_its_limits() -> None:
    clips = bundled.utterances()[:2]
    waveforms: dict[str, dict[str, torch.Tensor]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        decoder = vg.load_decoder(bundled.checkpoint_folder(), "cpu", dtype)
        waveforms[str(dtype)] = {clip.id: decoder(vg.read_codes(clip.codes_file)[clip.id][None]) for clip in clips}
    audio = AudioSet.from_waveforms(waveforms, RATE, seams={clip.id: range(48_000, 90_000, 1_920) for clip in clips})
    assert listening_table(audio, limits=limits_for(torch.bfloat16))["passed"].all()
    assert not listening_table(audio)["passed"].any()
    assert not seam_table(audio)["is_click"].any()


def test_conditions_without_limits_are_not_judged() -> None:
    audio = AudioSet.from_waveforms({c: {"s": speechlike() * g} for c, g in (("a", 1.0), ("b", 0.9), ("c", 0.8), ("d", 1.0))}, RATE)
    table = listening_table(audio, limits={"b": limits_for(torch.float32), "c": None})
    assert table["passed"].isna().tolist() == [False, True, False]
    assert table["verdict"].tolist()[1:] == ["not judged: no limits were given for this condition", "identical, bit for bit"]
    with pytest.raises(InputError, match="limits are given for 'e', 'a'; compared are 'b', 'c', 'd'"):
        listening_table(audio, limits={"e": None, "a": None})


# -------------------------------------------------------------------------------------------------------------------- words


class Listener:
    """Hears the words that it is told to hear, one list per level of the waveform."""

    def __init__(self, heard: dict[float, str]) -> None:
        self.heard, self.calls = heard, 0

    def transcribe(self, wav: torch.Tensor, sample_rate: int) -> str:
        assert sample_rate == RATE
        self.calls += 1
        return self.heard[round(float(wav[0]), 3)]

    def words(self, text: str) -> Sequence[str]:
        return text.lower().split()


def test_word_errors_of_a_recogniser() -> None:
    waveforms = {c: {"s": np.full(RATE, level, np.float32)} for c, level in (("a", 0.1), ("b", 0.2), ("c", 0.3))}
    audio = AudioSet.from_waveforms(waveforms, RATE)
    listener = Listener({0.1: "one two three", 0.2: "One two three", 0.3: "one three four"})
    table = listening_table(audio, recogniser=listener)
    assert list(table) == [*LISTENING_COLUMNS, *WORD_COLUMNS]
    assert table["word_errors"].tolist() == [0, 2]
    assert table["word_error_rate"].tolist() == [0, pytest.approx(2 / 3)]
    assert table["heard"].tolist() == ["One two three", "one three four"]
    assert listener.calls == 3  # the reference once
    told = listening_table(audio, recogniser=listener, texts={"s": "one two"})
    assert told["words"].tolist() == [2, 2]
    assert math.isnan(listening_table(audio, recogniser=listener, texts={"s": ""})["word_error_rate"][0])
    with pytest.raises(InputError, match="texts lack 's'"):
        listening_table(audio, recogniser=listener, texts={})
    with pytest.raises(InputError, match="of use with a recogniser only"):
        listening_table(audio, texts={"s": "one two"})


def test_why_intelligibility_is_missing() -> None:
    a = torch.from_numpy(noise(48_000))
    assert stoi_or_reason(a, a, sample_rate=RATE)[1] == ""
    assert stoi_or_reason(a[:9_000], a[:9_000], sample_rate=RATE)[1] == "STOI: 0.38 s are shorter than 0.4 s"
    burst = torch.zeros(48_000)
    burst[:4_800] = a[:4_800]
    assert stoi_or_reason(burst, burst, sample_rate=RATE)[1] == "STOI: less than 0.4 s of it is speech"


# -------------------------------------------------------------------------------------------------------------------- seams


def clicked(wav: Array, position: int, height: float) -> Array:
    """A step that decays within 5 ms, as a state that was carried over wrongly gives."""
    spoiled = wav.copy()
    spoiled[position : position + 120] += (height * np.exp(-np.arange(120) / 40)).astype(np.float32)
    return spoiled


def test_columns_of_the_seams() -> None:
    audio = AudioSet.from_waveforms({c: {"x": sine(), "y": sine()} for c in "abc"}, RATE, seams={"x": [500, 12_000]})
    table = seam_table(audio)
    assert list(table) == list(SEAM_COLUMNS)
    assert list(zip(table["condition"], table["seam"], strict=True)) == [("b", 1), ("b", 2), ("c", 1), ("c", 2)]
    assert table["position_s"].tolist() == [500 / RATE, 0.5] * 2
    assert not table["is_click"].any()
    bare = seam_table(AudioSet.from_waveforms({c: {"x": sine()} for c in "ab"}, RATE))
    assert list(bare) == list(SEAM_COLUMNS)
    assert bare.dtypes.tolist() == table.dtypes.tolist()
    assert len(bare) == 0


@pytest.mark.parametrize("height", [0.5, 0.05, 0.005, -0.05])
def test_a_click_in_a_clean_sine_is_found_where_it_is(height: float) -> None:
    table = click_table(sine(), clicked(sine(), 12_000, height), [6_000, 12_000, 18_000], RATE)
    assert table["is_click"].tolist() == [False, True, False]
    assert table["click_db"][1] > 12
    assert table["verdict"][1].startswith("click: treble")
    assert table["max_dbfs"].tolist() == [-math.inf, pytest.approx(20 * math.log10(abs(height)), abs=0.01), -math.inf]


@pytest.mark.parametrize("offset", [-20, -1, 0, 1, 20])
def test_a_click_up_to_a_millisecond_beside_the_seam_belongs_to_it(offset: int) -> None:
    assert click_table(sine(), clicked(sine(), 12_000 + offset, 0.05), [12_000], RATE)["is_click"].all()


def test_a_click_elsewhere_is_no_click_of_the_seam() -> None:
    assert not click_table(sine(), clicked(sine(), 12_200, 0.05), [12_000], RATE)["is_click"].any()


def test_a_clean_sine_does_not_click() -> None:
    seams = range(500, RATE, 997)
    table = click_table(sine(), sine(hz=441), list(seams), RATE)  # another sine, and as smooth
    assert not table["is_click"].any()
    assert table["verdict"].str.startswith("no click: treble ").all()
    assert table["click_db"].max() < 1


def test_the_treble_of_a_sine_is_its_level() -> None:
    """Above the filter's edge a sine keeps its level, 3 dB below its amplitude; below, 60 dB are gone."""
    high = click_table(sine(hz=8_000), sine(hz=8_000), [12_000], RATE)
    assert high["treble_dbfs"][0] == pytest.approx(-9.03, abs=0.1)
    assert high["neighbour_treble_dbfs"][0] == pytest.approx(-9.03, abs=0.1)
    assert click_table(sine(), sine(), [12_000], RATE)["treble_dbfs"][0] < -65


def test_what_the_reference_does_as_well_is_no_click() -> None:
    plosive = clicked(sine(), 12_000, 0.3)
    assert not click_table(plosive, plosive + noise(level=1e-5), [12_000], RATE)["is_click"].any()


def test_what_equally_loud_treble_covers_is_no_click() -> None:
    loud = noise(level=0.2)
    assert not click_table(loud, clicked(loud, 12_000, 0.05), [12_000], RATE)["is_click"].any()


@pytest.mark.parametrize("ms", [-24, -12, -2, 2, 12, 24])
def test_treble_within_24_ms_is_beside_the_seam(ms: int) -> None:
    """2 ms of a sine at full scale, 3.01 dB below it in RMS, among 24 such windows."""
    beside = np.zeros(RATE, np.float32)
    burst = slice(12_000 + 24 * (ms - 1), 12_000 + 24 * (ms + 1))
    beside[burst] = sine(amplitude=1.0, hz=8_000)[burst]
    table = click_table(np.zeros(RATE, np.float32), beside, [12_000], RATE)
    assert table["neighbour_treble_dbfs"][0] == pytest.approx(-3.01 - 10 * math.log10(24), abs=0.3)


@pytest.mark.parametrize("ms", [-28, 28])
def test_treble_farther_off_is_not(ms: int) -> None:
    beside = np.zeros(RATE, np.float32)
    burst = slice(12_000 + 24 * (ms - 1), 12_000 + 24 * (ms + 1))
    beside[burst] = sine(amplitude=1.0, hz=8_000)[burst]
    table = click_table(np.zeros(RATE, np.float32), beside, [12_000], RATE)
    assert table["neighbour_treble_dbfs"][0] < -100


def test_what_nobody_hears_is_no_click() -> None:
    silence = np.zeros(RATE, np.float32)
    assert not click_table(silence, clicked(silence, 12_000, 1e-5), [12_000], RATE)["is_click"].any()
    assert click_table(silence, clicked(silence, 12_000, 1e-2), [12_000], RATE)["is_click"].all()
    assert click_table(silence, silence, [12_000], RATE)["click_db"].tolist() == [0.0]


def test_seams_near_the_ends_and_beyond() -> None:
    table = click_table(sine(), sine()[:20_000], [1, 19_999, 20_000, 23_999], RATE)
    assert table["is_click"].isna().tolist() == [False, False, True, True]
    assert table["click_db"].isna().tolist() == [False, False, True, True]
    assert table["verdict"].tolist()[2:] == ["beyond the end of one of the waveforms"] * 2


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 48_000])
def test_clicks_are_found_at_other_rates(rate: int) -> None:
    clean = (0.5 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)).astype(np.float32)
    table = click_table(clean, clicked(clean, rate // 2, 0.05), [rate // 4, rate // 2], rate)
    assert table["is_click"].tolist() == [False, True]


# --------------------------------------------------------------------------------------------------------------- comparisons


def test_a_streamed_comparison_becomes_a_set(tiny_folder: Path) -> None:
    with tiny_runner(tiny_folder, enforce_eager=True) as runner:
        runner.capture_model()
        life = play_request(runner, chunks_of(runner, "one", tiny_codes(25)))
    found = compare_streams(life, life, device="cpu")
    audio = audio_set_of([found], RATE, details={"one": "hello"})
    assert (audio.conditions, audio.samples) == (("eager", "graph"), ("one",))
    np.testing.assert_array_equal(audio.waveform("graph", "one"), life.samples)
    ends = np.cumsum([len(piece) for piece in life.pieces])
    assert audio.seams("one") == tuple(ends[:-1].tolist())
    assert audio.detail("one").startswith("hello · 6 chunks: ")
    assert len(seam_table(audio)) == 5
    assert json.loads(listening_table(audio).to_json(orient="records"))[0]["seams"] == 5
    for comparisons in ([], [found, found]):
        with pytest.raises(InputError, match="at least one is needed, and no name twice"):
            audio_set_of(comparisons, RATE)
