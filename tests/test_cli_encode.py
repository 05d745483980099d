"""``vgraph-lab encode``: what it writes and says, and what it refuses. Truth: the encoder itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import typer
from typer.testing import CliRunner

from vgraph_lab import bundled
from vgraph_lab.commands.audio import encode
from vgraph_lab.errors import CheckpointError, InputError
from vgraph_lab.qwen3_tts.codes import read_codes
from vgraph_lab.qwen3_tts.encoder import encode_audio_file

app = typer.Typer()
app.command()(encode)
runner = CliRunner()


@pytest.fixture
def recordings(tmp_path: Path) -> list[Path]:
    wav = soundfile.read(bundled.utterances()[0].recording)[0][:24_000]
    soundfile.write(tmp_path / "mine.wav", wav, 24_000)
    soundfile.write(tmp_path / "yours.flac", np.stack((wav, wav), axis=1), 48_000)
    return [tmp_path / "mine.wav", tmp_path / "yours.flac"]


def test_recordings_become_a_file_of_codes(recordings: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "new" / "codes.safetensors"
    result = runner.invoke(app, [*map(str, recordings), "-o", str(output)])
    assert result.exit_code == 0, result.output
    codes = read_codes(output)
    assert list(codes) == ["mine", "yours"]
    assert (codes.codebook_size, codes.frame_rate_hz) == (512, 12.5)  # of the bundled checkpoint
    for name, path in zip(codes, recordings, strict=True):
        assert torch.equal(codes[name], encode_audio_file(path).codes)
    assert "mine" in result.stdout
    assert "note" not in result.stdout


def test_what_is_cut_is_said(recordings: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "codes.safetensors"
    arguments = [str(recordings[0]), "-o", str(output), "--max-seconds", "0.4"]
    assert "the first 0.4 s of 1.0 s" in " ".join(runner.invoke(app, arguments).stdout.split())
    said = json.loads(runner.invoke(app, [*arguments, "--overwrite", "--json"]).stdout)
    assert said["utterances"] == [{"utterance": "mine", "frames": 5, "source_s": 1.0, "encoded_s": 0.4, "cut_s": pytest.approx(0.6)}]
    assert said["notes"] == ["mine.wav: the first 0.4 s of 1.0 s were encoded. Raise --max-seconds for more."]


def test_nothing_is_written_where_something_is_wrong(recordings: list[Path], tmp_path: Path) -> None:
    good, output = str(recordings[0]), tmp_path / "codes.safetensors"
    (tmp_path / "text.wav").write_text("not audio")
    (tmp_path / "other").mkdir()
    soundfile.write(tmp_path / "other" / "mine.wav", np.zeros(9), 24_000)
    for arguments, message in (
        ([good, str(tmp_path / "text.wav"), "-o", str(output)], "cannot be read as audio"),
        ([good, str(tmp_path / "other" / "mine.wav"), "-o", str(output)], "several are called mine"),
        ([good, "-o", str(tmp_path / "codes.npz")], r"name it codes\.safetensors"),
        ([good, "-o", str(output), "--max-seconds", "0"], "a finite number above 0"),
        ([good, "-o", str(tmp_path / "text.wav" / "codes.safetensors")], "cannot be written"),
    ):
        result = runner.invoke(app, arguments)
        with pytest.raises(InputError, match=message):
            raise result.exception or AssertionError(result.output)
        assert not output.exists()
    result = runner.invoke(app, [good, "-o", str(output), "--checkpoint", str(tmp_path)])
    assert isinstance(result.exception, CheckpointError)


def test_a_file_that_is_there_is_spared(recordings: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "codes.safetensors"
    output.write_text("mine")
    result = runner.invoke(app, [str(recordings[0]), "-o", str(output)])
    with pytest.raises(InputError, match="is there already"):
        raise result.exception or AssertionError(result.output)
    assert output.read_text() == "mine"
    assert runner.invoke(app, [str(recordings[0]), "-o", str(output), "--overwrite"]).exit_code == 0
    assert list(read_codes(output)) == ["mine"]
