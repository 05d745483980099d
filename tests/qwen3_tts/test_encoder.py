"""The bundled encoder and the audio reader. Truth: codes that the encoder's training study computed, and closed forms."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file, save_file

from vgraph_lab import bundled
from vgraph_lab.errors import CheckpointError, InputError
from vgraph_lab.qwen3_tts.audio import read_audio, read_audio_start
from vgraph_lab.qwen3_tts.codes import read_codes
from vgraph_lab.qwen3_tts.encoder import LabEncoder, encode_audio_file, load_encoder, nearest_codes

FOLDER = bundled.checkpoint_folder()
FRAME = 1920


@pytest.fixture(scope="module")
def encoder() -> LabEncoder:
    return load_encoder(FOLDER)


def clip(utterance_id: str) -> bundled.Utterance:
    return next(u for u in bundled.utterances() if u.id == utterance_id)


def speech(seconds: float = 2.0) -> torch.Tensor:
    return read_audio(clip("00_hibari").recording)[: round(seconds * 24_000)]


# --------------------------------------------------------------------------------------------------------------- codes


@pytest.mark.parametrize("utterance_id", ["00_hibari", "07_hibari", "11_kokoro_jm_kumo", "19_asterisk_ru_vm-review-nonurgent"])
def test_codes_are_those_of_the_study(encoder: LabEncoder, utterance_id: str) -> None:
    """Equal, except where fp32 rounding decides between two code vectors that are equally near."""
    utterance = clip(utterance_id)
    expected = read_codes(utterance.codes_file)[utterance_id]
    wav = read_audio(utterance.recording)
    codes = encoder.encode(wav)[0]
    assert codes.shape == expected.shape
    assert (codes == expected).float().mean() > 0.99
    latents = encoder.network(torch.nn.functional.pad(wav, (0, -len(wav) % FRAME))[None])[0]
    first_level = 0
    for split in (encoder.quantizer.rvq_first, encoder.quantizer.rvq_rest):
        residual = split.input_proj(latents).T
        tables = [book.vectors() for book in split.codebooks]
        for frame, vector in enumerate(residual):
            for level, table in enumerate(tables, start=first_level):
                ours, theirs = (table[chosen[level, frame]] for chosen in (codes, expected))
                if (ours != theirs).any():
                    near, far = ((vector - row).square().sum() for row in (ours, theirs))
                    assert far - near < 1e-4 * near, f"level {level} of frame {frame} is no tie: {near} against {far}"
                    break  # from here on the residuals differ
                vector = vector - ours
        first_level += len(tables)


def test_nearest_codes_minimise_the_distance() -> None:
    vectors, table = torch.randn(200, 8, dtype=torch.float64), torch.randn(50, 8, dtype=torch.float64)
    np.testing.assert_array_equal(nearest_codes(vectors, table), torch.cdist(vectors, table).argmin(dim=1))


@pytest.mark.parametrize("samples", [1, 1919, 1920, 1921, 5000])
def test_the_end_is_padded_with_silence_to_whole_frames(encoder: LabEncoder, samples: int) -> None:
    wav = speech()[:samples]
    codes = encoder.encode(wav)
    assert codes.shape == (1, 16, math.ceil(samples / FRAME))
    assert codes.dtype == torch.int64
    torch.testing.assert_close(codes, encoder.encode(torch.cat((wav, torch.zeros(-samples % FRAME)))), rtol=0, atol=0)


def test_rows_of_a_batch_are_independent(encoder: LabEncoder) -> None:
    rows = torch.stack((speech(), 0.1 * torch.randn(48_000), torch.zeros(48_000)))
    together = encoder.network(rows)
    for row, latents in zip(rows, together, strict=True):
        torch.testing.assert_close(encoder.network(row[None])[0], latents, rtol=1e-4, atol=1e-4)
    assert encoder.encode(rows).shape == (3, 16, 25)


def test_the_look_ahead_is_360_samples(encoder: LabEncoder) -> None:
    frames = 10
    wav = torch.stack([speech()] * 2)
    wav[1, frames * FRAME + 360 :] = torch.randn_like(wav[1, frames * FRAME + 360 :])
    one, other = encoder.network(wav)
    torch.testing.assert_close(one[:, :frames], other[:, :frames], rtol=1e-4, atol=1e-4)
    wav[1, frames * FRAME + 300 :] = torch.randn_like(wav[1, frames * FRAME + 300 :])  # 60 samples inside the last window
    one, other = encoder.network(wav)
    assert (one[:, frames - 1] - other[:, frames - 1]).abs().max() > 1e-3


def test_latents_have_a_fixed_scale(encoder: LabEncoder) -> None:
    latents = encoder.network(speech()[None])
    torch.testing.assert_close(latents.mean(dim=1), torch.zeros(1, 25), rtol=0, atol=1e-5)
    torch.testing.assert_close(latents.var(dim=1, unbiased=False), torch.ones(1, 25), rtol=1e-3, atol=0)


def test_silence_and_full_scale_noise_are_encoded(encoder: LabEncoder) -> None:
    for wav in (torch.zeros(9600), torch.rand(9600) * 2 - 1):
        codes = encoder.encode(wav)
        assert codes.shape == (1, 16, 5)
        assert 0 <= int(codes.min()) <= int(codes.max()) < 512


def test_numpy_and_double_precision_are_taken(encoder: LabEncoder) -> None:
    expected = encoder.encode(speech())
    torch.testing.assert_close(encoder.encode(speech().numpy()), expected)
    torch.testing.assert_close(encoder.encode(speech().double(), sample_rate=24_000), expected)


def test_numpy_views_of_any_stride_and_byte_order_are_taken(encoder: LabEncoder) -> None:
    wav = speech()
    expected = encoder.encode(wav.flip(0))
    backwards = wav.numpy()[::-1]
    torch.testing.assert_close(encoder.encode(backwards), expected)
    torch.testing.assert_close(encoder.encode(backwards.astype(">f4")), expected)
    torch.testing.assert_close(encoder.encode(np.zeros(1, np.float32)[::-1]), encoder.encode(torch.zeros(1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_networks_give_mostly_the_same_first_codes(dtype: torch.dtype) -> None:
    half, full = load_encoder(FOLDER, dtype=dtype), load_encoder(FOLDER)
    assert half.network.input_projection.weight.dtype == dtype
    assert (half.encode(speech())[:, 0] == full.encode(speech())[:, 0]).float().mean() > 0.7


@pytest.mark.parametrize(
    ("wav", "message"),
    [
        (torch.full((4000,), float("nan")), "NaN or infinity .4000 of 4000"),
        (torch.tensor([0.0, float("inf")]), "NaN or infinity"),
        (torch.zeros(0), "no samples"),
        (torch.zeros(0, 5), "no rows"),
        (torch.zeros(1, 2, 4000), "Mix channels to mono"),
        (torch.zeros(3, 1, 4000), r"It is mono: try wav\[:, 0\]\."),
        (torch.zeros(3, 4000, 1), r"It is mono: try wav\[\.\.\., 0\]\."),
        (torch.tensor(0.5), r"\[samples\]"),
        (torch.zeros(4000, device="meta"), "got a meta one"),
        (torch.zeros(4000).to_sparse(), r"got a torch\.sparse_coo one"),
        (torch.nested.nested_tensor([torch.zeros(40), torch.zeros(50)], layout=torch.jagged), "got a nested one"),
        (np.zeros(4000, np.int16), "got int16. Divide int16 PCM"),
        (np.array("speech"), "must be floats"),
        ([[0.0, 0.0], [0.0]], "list that is no rectangular array"),
        (torch.zeros(4000, dtype=torch.int16), "Divide int16 PCM"),
        (20_000 * torch.ones(4000), "reaches 20000; full scale"),
    ],
)
def test_what_is_not_a_waveform_fails(encoder: LabEncoder, wav: torch.Tensor | np.ndarray[Any, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        encoder.encode(wav)


def test_another_sample_rate_fails(encoder: LabEncoder) -> None:
    with pytest.raises(InputError, match="16000 Hz, the encoder takes 24000 Hz"):
        encoder.encode(speech(), sample_rate=16_000)


# ------------------------------------------------------------------------------------------------------------- loading


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled checkpoint as links, so that a test can replace one file."""
    for file in ("config.json", "model.safetensors", "encoder_config.json", "encoder.safetensors"):
        (tmp_path / file).symlink_to(FOLDER / file)
    return tmp_path


def replace(folder: Path, name: str, content: bytes) -> None:
    (folder / name).unlink()
    (folder / name).write_bytes(content)


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "encoder_config.json").read_text())
    replace(folder, "encoder_config.json", json.dumps({**config, **changes}).encode())


def test_folders_without_an_encoder_fail(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        load_encoder(folder / "nowhere")
    (folder / "encoder.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no encoder\.safetensors"):
        load_encoder(folder)
    (folder / "encoder_config.json").unlink()
    with pytest.raises(CheckpointError, match="no encoder that this package can load"):
        load_encoder(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2; this reader knows"),
        ({"format": "mimi"}, "'mimi'"),
        ({"latent_dim": 64}, "latent_dim against the decoder's codebook_dim is 64 and 128"),
        ({"hop": 120}, "samples per frame is 960 and 1920"),
        ({"sample_rate": 16_000}, "sample rate is 16000 and 24000"),
        ({"num_heads": 7}, "must be a multiple of 2 . num_heads"),
        ({"windows": [120]}, "must exceed hop"),
        ({"widht": 240}, "widht"),
        ({"width": 480}, r"blocks\.0\.contract\.bias is \[240\], the config says \[480\]"),
        ({"num_layers": 1}, r"unexpected layers\.1"),
        ({"num_layers": 3}, r"missing layers\.2"),
        *(({name: 10**12}, f"{name}: .*less than or equal to") for name in ("width", "num_layers", "num_heads", "sliding_window", "hop")),
        *(({name: 10**30}, f"{name}: .*less than or equal to") for name in ("intermediate_size", "latent_dim", "sample_rate")),
        ({"windows": [10**12]}, r"windows\.0: .*less than or equal to"),
        ({"strides": [10**12]}, r"strides\.0: .*less than or equal to"),
        # the largest that a config may say: compared with the file before any of it is allocated (some 50 GB)
        ({"width": 65_280}, r"blocks\.0\.contract\.bias is \[240\], the config says \[65280\]"),
    ],
)
def test_configurations_that_do_not_fit_fail(folder: Path, changes: dict[str, object], message: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_encoder(folder)


def test_damaged_files_fail(folder: Path) -> None:
    replace(folder, "encoder.safetensors", (FOLDER / "encoder.safetensors").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a readable safetensors"):
        load_encoder(folder)
    replace(folder, "encoder_config.json", b"{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        load_encoder(folder)
    replace(folder, "encoder_config.json", b"[" * 100_000)
    with pytest.raises(CheckpointError, match="nested too deeply to describe an encoder"):
        load_encoder(folder)


@pytest.mark.parametrize("file", ["encoder.safetensors", "model.safetensors"])
def test_weights_that_are_no_finite_floats_are_named(folder: Path, file: str) -> None:
    name = {"encoder.safetensors": "output_norm.weight", "model.safetensors": "decoder.quantizer.rvq_first.output_proj.weight"}[file]
    tensors = load_file(FOLDER / file)
    for damaged, message in (
        (torch.full_like(tensors[name], torch.nan), "contain NaN, infinity"),
        (tensors[name].to(torch.int8), "torch.int8"),
    ):
        (folder / file).unlink()
        save_file({**tensors, name: damaged}, folder / file)
        with pytest.raises(CheckpointError, match=message) as error:
            load_encoder(folder)
        assert name.removeprefix("decoder.quantizer.") in str(error.value)


def test_a_pickle_is_not_read(folder: Path) -> None:
    (folder / "encoder.safetensors").unlink()
    torch.save({"a": torch.zeros(1)}, folder / "encoder.safetensors")
    with pytest.raises(CheckpointError, match="renamed pickle"):
        load_encoder(folder)


def test_a_renamed_tensor_is_named_with_the_nearest(folder: Path) -> None:
    tensors = load_file(folder / "encoder.safetensors")
    tensors["output_norms.weight"] = tensors.pop("output_norm.weight")
    (folder / "encoder.safetensors").unlink()
    save_file(tensors, folder / "encoder.safetensors")
    with pytest.raises(CheckpointError, match=r"missing output_norm\.weight Did you mean 'output_norms\.weight'"):
        load_encoder(folder)


def test_an_integer_dtype_fails() -> None:
    with pytest.raises(CheckpointError, match="dtype must be one of"):
        load_encoder(FOLDER, dtype=torch.int8)


# ---------------------------------------------------------------------------------------------------------- read_audio


def tone(rate: int, seconds: float = 0.5, frequency: float = 440.0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 44_100, 48_000])
@pytest.mark.parametrize("suffix", ["wav", "flac"])
def test_recordings_are_resampled(tmp_path: Path, rate: int, suffix: str) -> None:
    soundfile.write(tmp_path / f"a.{suffix}", tone(rate), rate)
    wav = read_audio(tmp_path / f"a.{suffix}")
    assert (wav.dtype, wav.shape) == (torch.float32, (12_000,))
    expected = tone(24_000)
    np.testing.assert_allclose(wav[600:-600], expected[600:-600], atol=2e-3)  # the filter rings at the ends


def test_channels_are_averaged(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.stack((tone(24_000), np.zeros(12_000)), axis=1), 24_000, subtype="FLOAT")
    np.testing.assert_allclose(read_audio(tmp_path / "a.wav"), tone(24_000) / 2, atol=1e-6)


def test_long_recordings_fail_until_the_limit_is_lifted(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", tone(24_000, seconds=2.5), 24_000)
    with pytest.raises(InputError, match=r"lasts 2\.5 s; the limit is 2 s"):
        read_audio(tmp_path / "a.wav", max_seconds=2)
    assert read_audio(tmp_path / "a.wav", max_seconds=None).shape == (60_000,)


def test_files_that_are_not_recordings_fail(tmp_path: Path) -> None:
    (tmp_path / "text.wav").write_text("this is not audio")
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), 24_000)
    soundfile.write(tmp_path / "nan.wav", np.array([0.0, np.nan]), 24_000, subtype="FLOAT")
    for name, message in (
        ("text.wav", "cannot be read as audio"),
        ("empty.wav", "no samples"),
        ("nan.wav", "1 of 2"),
        ("none.wav", "is not a file"),
    ):
        with pytest.raises(InputError, match=message):
            read_audio(tmp_path / name)


@pytest.mark.parametrize("rate", [0, -1, 10**9])
def test_rates_that_no_recording_has_fail(tmp_path: Path, rate: int) -> None:
    soundfile.write(tmp_path / "a.wav", tone(8_000), 8_000)
    assert read_audio(tmp_path / "a.wav", sample_rate=4_000).shape == (2_000,)
    with pytest.raises(InputError, match=f"sample_rate is {rate}; accepted are 1 to 1000000 Hz"):
        read_audio(tmp_path / "a.wav", sample_rate=rate)


# --------------------------------------------------------------------------------------------------- one's own recordings


def test_the_start_of_a_recording(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", tone(48_000, seconds=2.5), 48_000, subtype="FLOAT")
    wav, seconds = read_audio_start(tmp_path / "a.wav", seconds=1.0)
    assert (wav.shape, seconds) == ((24_000,), 2.5)
    np.testing.assert_allclose(wav[600:-600], read_audio(tmp_path / "a.wav")[600:23_400], atol=1e-6)
    whole, seconds = read_audio_start(tmp_path / "a.wav", seconds=2.5)
    np.testing.assert_array_equal(whole, read_audio(tmp_path / "a.wav"))
    for limit in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InputError, match="a finite number above 0 is needed"):
            read_audio_start(tmp_path / "a.wav", seconds=limit)


def test_a_recording_becomes_codes(tmp_path: Path, encoder: LabEncoder) -> None:
    stereo = np.stack((tone(44_100, seconds=0.5), np.zeros(22_050)), axis=1)
    soundfile.write(tmp_path / "a.flac", stereo, 44_100)
    found = encode_audio_file(tmp_path / "a.flac", encoder=encoder)
    assert torch.equal(found.codes, encoder.encode(read_audio(tmp_path / "a.flac"))[0].cpu())
    assert (found.codes.shape, found.codes.dtype) == ((16, 7), torch.int64)
    assert (found.encoded_s, found.cut_s, found.note) == (0.5, 0.0, "")
    assert repr(found) == "EncodedAudio(a.flac: 0.50 s, codes [16, 7])"


def test_what_is_cut_off_is_said(tmp_path: Path, encoder: LabEncoder) -> None:
    soundfile.write(tmp_path / "a.wav", tone(24_000, seconds=1.5), 24_000)
    found = encode_audio_file(tmp_path / "a.wav", encoder=encoder, max_seconds=0.8)
    assert (found.codes.shape, found.encoded_s, found.source_s) == ((16, 10), 0.8, 1.5)
    assert found.cut_s == pytest.approx(0.7)
    assert found.note == "a.wav: the first 0.8 s of 1.5 s were encoded. Raise max_seconds for more."
    assert repr(found) == "EncodedAudio(a.wav: 0.80 s of 1.50 s, codes [16, 10])"


def test_ten_minutes_are_cut_without_being_read(tmp_path: Path, encoder: LabEncoder) -> None:
    with soundfile.SoundFile(tmp_path / "a.wav", "w", 24_000, 1, "PCM_16") as file:
        for _ in range(60):
            file.write(tone(24_000, seconds=10))
    wav, seconds = read_audio_start(tmp_path / "a.wav")
    assert (len(wav), seconds) == (30 * 24_000, 600)
    assert encode_audio_file(tmp_path / "a.wav", encoder=encoder, max_seconds=0.5).cut_s == pytest.approx(599.5)


@pytest.mark.parametrize("samples", [1, 48_000])
def test_silence_and_one_sample_become_codes(tmp_path: Path, encoder: LabEncoder, samples: int) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(samples), 24_000)
    found = encode_audio_file(tmp_path / "a.wav", encoder=encoder)
    assert found.codes.shape == (16, -(-samples // 1_920))
    assert found.codes.min() >= 0


@pytest.mark.parametrize("kind", ["text", "nan", "empty", "missing", "folder"])
def test_recordings_that_cannot_be_encoded_fail(tmp_path: Path, encoder: LabEncoder, kind: str) -> None:
    path = tmp_path / "a.wav"
    if kind == "text":
        path.write_text("this is not audio")
    elif kind == "folder":
        path.mkdir()
    elif kind != "missing":
        soundfile.write(path, np.array([0.0, np.nan])[: 2 * (kind == "nan")], 24_000, subtype="FLOAT")
    message = {"text": "cannot be read as audio", "nan": "NaN or infinity", "empty": "no samples"}.get(kind, "is not a file")
    with pytest.raises(InputError, match=message):
        encode_audio_file(path, encoder=encoder)
