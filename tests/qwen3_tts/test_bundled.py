"""The bundled checkpoint and its evaluation clips: what is shipped, and where it is found."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from vgraph_lab import bundled
from vgraph_lab.errors import CheckpointError
from vgraph_lab.qwen3_tts.codes import read_codes

LICENCES = {"Apache-2.0": 12, "CC-BY-3.0": 2, "CC-BY-SA-3.0": 6}

# SHA-256 over id and little-endian int16 codes of all clips, in the order of their ids, as the training study left them.
STUDY_CODES_SHA256 = "f7280bbdd5e73841c898a68b3eb3d8c85e47f2c73da280fedd1b8f07e56dfddb"
MODEL_SHA256 = "ab55ec96664aa9c1d8e35a6e99f94b219281bfbac7862aea88e82471744f34c8"


def test_the_clips_are_those_of_the_study() -> None:
    clips = bundled.utterances()
    assert len(clips) == 20
    digest = hashlib.sha256()
    for clip in clips:
        digest.update(clip.id.encode())
        digest.update(read_codes(clip.codes_file)[clip.id].numpy().astype("<i2").tobytes())
    assert digest.hexdigest() == STUDY_CODES_SHA256


def test_the_decoder_is_the_one_that_was_measured() -> None:
    assert hashlib.sha256((bundled.checkpoint_folder() / "model.safetensors").read_bytes()).hexdigest() == MODEL_SHA256


def test_manifests_codes_and_recordings_agree() -> None:
    for clip in bundled.utterances():
        info = soundfile.info(clip.recording)
        assert (info.samplerate, info.channels, info.format, info.subtype) == (24_000, 1, "FLAC", "PCM_16"), clip.id
        assert clip.duration_s == pytest.approx(info.frames / 24_000, abs=1e-3)
        codes = read_codes(clip.codes_file)
        assert (codes.codebook_size, codes.frame_rate_hz, codes.num_quantizers) == (512, 12.5, 16)
        assert codes[clip.id].shape == (16, -(-info.frames // 1920)), clip.id
        assert clip.text
        assert clip.language in {"en", "fr", "it", "ru"}
    for folder in {clip.codes_file for clip in bundled.utterances()}:
        assert set(read_codes(folder)) == {clip.id for clip in bundled.utterances() if clip.codes_file == folder}


@pytest.mark.parametrize(("licence", "count"), LICENCES.items())
def test_each_licence_has_a_folder_of_its_own_with_its_credits(licence: str, count: int) -> None:
    clips = bundled.utterances(licence=licence)
    assert len(clips) == count
    (folder,) = {clip.recording.parent for clip in clips}
    assert folder.name == licence.lower()
    text = (folder / "LICENCE.md").read_text(encoding="utf-8")
    assert licence in text
    for speaker in {clip.speaker.removesuffix(" (synthetic)") for clip in clips}:
        assert speaker in text
    assert {path.name for path in folder.iterdir()} == {"LICENCE.md", "manifest.json", "codes.safetensors"} | {
        clip.recording.name for clip in clips
    }


def test_the_notice_credits_everybody_whose_work_is_in_the_weights() -> None:
    notice = (bundled.checkpoint_folder() / "NOTICE").read_text(encoding="utf-8")
    for owed in (
        "hibari",
        "Maureese Williams",
        "Kokoro-82M",
        "hexgrad",
        "Princeton University",
        "Carlo Flora",
        "Maxim Topal",
        "ivrvoice.ru",
    ):
        assert owed in notice


def test_nothing_shipped_is_larger_than_12_mb() -> None:
    files = [path for path in bundled.checkpoint_folder().rglob("*") if path.is_file()]
    assert {"model.safetensors", "encoder.safetensors", "README.md"} <= {path.name for path in files}
    assert {path.name: path.stat().st_size for path in files if path.stat().st_size > 12_000_000} == {}


def test_clips_can_be_chosen_by_language() -> None:
    assert {clip.language for clip in bundled.utterances(language="en")} == {"en"}
    assert len(bundled.utterances(language="en")) == 17
    assert bundled.utterances(language="en", licence="CC-BY-3.0") == ()


def test_looking_up_the_data_does_not_load_torch() -> None:
    # The module is loaded by path: importing the package may load torch for other reasons.
    code = (
        "import sys, types, importlib.util as u\n"
        f"package = types.ModuleType('vgraph_lab'); package.__path__ = [{str(Path(bundled.__file__).parent)!r}]\n"
        "sys.modules['vgraph_lab'] = package\n"
        "import vgraph_lab.bundled as b\n"
        "assert len(b.utterances()) == 20\n"
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_the_data_of_a_wheel_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "vgraph_lab"
    monkeypatch.setattr(bundled, "_PACKAGE", package)
    with pytest.raises(CheckpointError, match=r"missing; looked in .*_data.* and .*data"):
        bundled.checkpoint_folder()
    for folder in (tmp_path / "site" / "data" / "lab-12hz", package / "_data" / "lab-12hz"):  # checkout, then wheel
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        assert bundled.checkpoint_folder() == folder


# ----------------------------------------------------------------------------------------------------- clips of one's own


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """A folder with one licence and two clips, copied from the bundled ones."""
    source = bundled.checkpoint_folder() / "utterances" / "cc-by-3.0"
    shutil.copytree(source, tmp_path / "utterances" / "mine")
    return tmp_path


def rewrite(folder: Path, change: object) -> None:
    (folder / "utterances" / "mine" / "manifest.json").write_text(json.dumps(change))


def manifest(folder: Path) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = json.loads((folder / "utterances" / "mine" / "manifest.json").read_text())
    return entries


def test_a_folder_of_ones_own_is_listed(clips: Path) -> None:
    assert [clip.speaker for clip in bundled.utterances(clips)] == ["Carlo Flora", "Maxim Topal / ivrvoice.ru"]
    assert all(np.isfinite(clip.duration_s) and clip.recording.is_relative_to(clips) for clip in bundled.utterances(clips))


def test_damaged_manifests_fail(clips: Path) -> None:
    good = manifest(clips)
    with pytest.raises(CheckpointError, match="holds no evaluation clips"):
        bundled.utterances(clips / "nowhere")
    (clips / "utterances" / "mine" / "manifest.json").write_text("[")
    with pytest.raises(CheckpointError, match="is not JSON"):
        bundled.utterances(clips)
    for content, message in (
        ({"a": 1}, "must be a list"),
        ([*good, 3], "entry 2: expected exactly the keys"),
        ([{**good[0], "lang": "it"}], "lang"),
        ([{key: value for key, value in good[0].items() if key != "text"}], "entry 0: expected exactly the keys"),
        ([{**good[0], "recording": "gone.flac"}], r"gone\.flac is missing"),
        ([good[0], good[0]], "more than one clip is called 18_asterisk"),
    ):
        rewrite(clips, content)
        with pytest.raises(CheckpointError, match=message):
            bundled.utterances(clips)
