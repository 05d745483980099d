"""Reading recordings: any file that libsndfile knows, as mono floats at the codec's rate."""

from __future__ import annotations

import math
from pathlib import Path

import soundfile
import torch
from torch import Tensor

from vgraph_lab.errors import InputError

__all__ = ["read_audio", "read_audio_start"]

_HIGHEST_RATE_HZ = 1_000_000


def read_audio(path: str | Path, *, sample_rate: int = 24_000, max_seconds: float | None = 120.0) -> Tensor:
    """A recording as mono float32 [samples] with full scale ±1.

    Channels are averaged; other rates are resampled (windowed sinc, ``torchaudio.functional.resample``).

    Args:
        path: WAV, FLAC, Ogg, MP3, AIFF, AU or another format of libsndfile.
        sample_rate: wanted rate in Hz, 1 to 1,000,000.
        max_seconds: longest recording accepted, so that a wrong file is noticed before it fills the memory; ``None``
            accepts any.

    Raises:
        InputError: a rate out of range, no such file, not audio, empty, longer than ``max_seconds``, or with NaN or infinity in it.
    """
    wav, _ = _read(Path(path), sample_rate, longest_s=max_seconds, read_s=None)
    return wav


def read_audio_start(path: str | Path, *, sample_rate: int = 24_000, seconds: float = 30.0) -> tuple[Tensor, float]:
    """The beginning of a recording of any length, as :func:`read_audio` gives it, and how long the whole one is in seconds.

    Args:
        path: as there.
        sample_rate: as there.
        seconds: how much to read at most, above 0; the rest stays unread.

    Raises:
        InputError: see :func:`read_audio`; or ``seconds`` is none.
    """
    if not seconds > 0 or not math.isfinite(seconds):
        raise InputError(f"seconds is {seconds!r}; a finite number above 0 is needed.")
    return _read(Path(path), sample_rate, longest_s=None, read_s=seconds)


def _read(path: Path, sample_rate: int, *, longest_s: float | None, read_s: float | None) -> tuple[Tensor, float]:
    if not 1 <= sample_rate <= _HIGHEST_RATE_HZ:
        raise InputError(f"sample_rate is {sample_rate}; accepted are 1 to {_HIGHEST_RATE_HZ} Hz. The codec's is 24000.")
    if not path.is_file():
        raise InputError(f"{path} is not a file.")
    try:
        info = soundfile.info(path)
        seconds = info.frames / info.samplerate
        if longest_s is not None and seconds > longest_s:
            raise InputError(f"{path} lasts {seconds:.1f} s; the limit is {longest_s:g} s. Cut it, or pass max_seconds=None.")
        frames = -1 if read_s is None else max(1, math.ceil(read_s * info.samplerate))
        samples, source_rate = soundfile.read(path, frames=frames, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise InputError(
            f"{path} cannot be read as audio ({error}). Accepted are the formats of libsndfile: WAV, FLAC, Ogg, MP3, AIFF, AU and others; "
            "convert the rest first."
        ) from error
    wav = torch.from_numpy(samples).mean(dim=1)
    if not wav.numel():
        raise InputError(f"{path} has no samples.")
    if not torch.isfinite(wav).all():
        raise InputError(f"{path} contains NaN or infinity ({int((~torch.isfinite(wav)).sum())} of {wav.numel()} samples).")
    if source_rate != sample_rate:
        from torchaudio.functional import resample  # only where it is needed: the import takes a while

        wav = resample(wav, source_rate, sample_rate)
    if read_s is not None:
        wav = wav[: max(1, round(read_s * sample_rate))]
    return wav.contiguous(), seconds
