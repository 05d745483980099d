"""Numbers that say how close decoded speech is to the original: spectrum, intelligibility, level, words.

Waveforms are mono float32 tensors [samples] with full scale ±1, reference and decoded equally long.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from vgraph_lab.errors import InputError

__all__ = [
    "level_dbfs",
    "log_mel_distance",
    "log_spectral_distance_db",
    "mel_filters",
    "si_sdr_db",
    "stoi",
    "stoi_or_reason",
    "word_errors",
]

_SCALES = ((2048, 128), (1024, 96), (512, 64))  # FFT size [samples], mel bands
_LOWEST_HZ = 30.0
_LOG_FLOOR = 1e-4  # 80 dB below full scale
_SPECTRUM_SAMPLES, _QUIETEST_DB = 1024, -100.0
_SHORTEST_STOI_S = 0.4  # 30 frames of 12.8 ms at 10 kHz, and a little


def level_dbfs(wav: Tensor) -> float:
    """Root-mean-square level in dB relative to full scale; -180 for silence."""
    return 20 * math.log10(float(wav.detach().double().square().mean().sqrt()) + 1e-9)


@lru_cache(maxsize=16)
def mel_filters(fft_size: int, num_bands: int, sample_rate: int) -> Tensor:
    """Triangular filters [num_bands, fft_size // 2 + 1], equally spaced in mel from 30 Hz to half the rate.

    Each sums to 1, so that a filter gives the mean magnitude of its band. A band narrower than a bin is all zero.
    """
    frequencies = torch.linspace(0, sample_rate / 2, fft_size // 2 + 1)
    edges_mel = np.linspace(_mel(_LOWEST_HZ), _mel(sample_rate / 2), num_bands + 2)
    edges = torch.tensor(700 * (10 ** (edges_mel / 2595) - 1), dtype=torch.float32)
    low, centre, high = (part[:, None] for part in (edges[:-2], edges[1:-1], edges[2:]))
    triangles = torch.minimum((frequencies - low) / (centre - low), (high - frequencies) / (high - centre)).clamp(min=0)
    return triangles / triangles.sum(dim=1, keepdim=True).clamp(min=1e-6)


def _mel(frequency_hz: float) -> float:
    return 2595 * math.log10(1 + frequency_hz / 700)


def log_mel_distance(reference: Tensor, decoded: Tensor, *, sample_rate: int = 24_000) -> float:
    """Mean absolute difference of log10 mel magnitudes, averaged over three resolutions (2048, 1024 and 512 samples).

    0.1 is a mean difference of 2 dB.

    Raises:
        InputError: the waveforms differ in shape or are not [samples].
    """
    _check_pair(reference, decoded)
    distances = [
        (_log_mel(reference, size, bands, sample_rate) - _log_mel(decoded, size, bands, sample_rate)).abs().mean()
        for size, bands in _SCALES
    ]
    return float(torch.stack(distances).mean())


def _log_mel(wav: Tensor, fft_size: int, num_bands: int, sample_rate: int) -> Tensor:
    window = torch.hann_window(fft_size)
    spectrum = torch.stft(wav.float(), fft_size, fft_size // 4, fft_size, window, pad_mode="constant", return_complex=True)
    return torch.log10(mel_filters(fft_size, num_bands, sample_rate) @ (spectrum.abs() / (fft_size / 4)) + _LOG_FLOOR)


def log_spectral_distance_db(reference: Tensor, decoded: Tensor) -> float:
    """Distance of power spectra in dB: root mean square over the bins of a frame, averaged over the frames.

    Hann windows of 1024 samples every 256 (``torchaudio.transforms.Spectrogram``, power); both are silence beyond their
    ends. Levels below −100 dBFS per bin count as −100 dBFS, so that what nobody hears weighs nothing; silence equals silence.

    Raises:
        InputError: the waveforms differ in shape or are not [samples].
    """
    _check_pair(reference, decoded)
    a, b = _spectrum_db(reference), _spectrum_db(decoded)
    return float((a - b).square().mean(dim=0).sqrt().mean())


def _spectrum_db(wav: Tensor) -> Tensor:
    from torchaudio.transforms import Spectrogram  # only where it is needed: the import takes a while

    spectrum = Spectrogram(_SPECTRUM_SAMPLES, hop_length=_SPECTRUM_SAMPLES // 4, power=2.0, pad_mode="constant")(wav.float())
    full_scale = (_SPECTRUM_SAMPLES / 4) ** 2  # of a sine: its amplitude over two, times the sum of the window
    return 10 * torch.log10((spectrum / full_scale).clamp(min=10 ** (_QUIETEST_DB / 10)))


def si_sdr_db(reference: Tensor, decoded: Tensor) -> tuple[float, str]:
    """Scale-invariant signal-to-distortion ratio in dB (Le Roux et al. 2019; torchmetrics), and why it is missing, if so.

    inf for waveforms that are equal up to nothing at all; NaN if either is silence, which has no scale.

    Raises:
        InputError: the waveforms differ in shape or are not [samples].
    """
    _check_pair(reference, decoded)
    if not bool(reference.any()) or not bool(decoded.any()):
        which = "both are" if not bool(reference.any()) and not bool(decoded.any()) else "one is"
        return math.nan, f"SI-SDR: {which} silence"
    if torch.equal(reference, decoded):
        return math.inf, ""
    from torchmetrics.functional.audio import scale_invariant_signal_distortion_ratio  # the import takes seconds

    # torchmetrics adds an epsilon to every energy, which must not weigh on quiet speech
    scale = float(reference.abs().max())
    return float(scale_invariant_signal_distortion_ratio(decoded.double() / scale, reference.double() / scale)), ""


def stoi(reference: Tensor, decoded: Tensor, *, sample_rate: int = 24_000) -> float:
    """Short-time objective intelligibility (Taal et al. 2011), up to 1; NaN if less than 0.4 s of it is speech.

    Raises:
        InputError: the waveforms differ in shape or are not [samples].
    """
    return stoi_or_reason(reference, decoded, sample_rate=sample_rate)[0]


def stoi_or_reason(reference: Tensor, decoded: Tensor, *, sample_rate: int = 24_000) -> tuple[float, str]:
    """:func:`stoi`, and why it is NaN; empty if it is not.

    Raises:
        InputError: the waveforms differ in shape or are not [samples].
    """
    _check_pair(reference, decoded)
    if len(reference) < _SHORTEST_STOI_S * sample_rate:
        return math.nan, f"STOI: {len(reference) / sample_rate:.2f} s are shorter than {_SHORTEST_STOI_S} s"
    if not bool(reference.any()):
        return math.nan, "STOI: the reference is silence"
    import pystoi  # only where it is needed: the import takes a while

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Not enough STFT frames", category=RuntimeWarning)
        try:
            return float(pystoi.stoi(reference.numpy(), decoded.numpy(), sample_rate)), ""
        except RuntimeWarning:
            return math.nan, f"STOI: less than {_SHORTEST_STOI_S} s of it is speech"


def word_errors(reference: Sequence[str], heard: Sequence[str]) -> int:
    """Least number of words to substitute, insert or delete to turn ``reference`` into ``heard``.

    Divided by ``len(reference)`` it is the word error rate; sum both over clips before dividing.
    """
    previous = list(range(len(heard) + 1))
    for row, word in enumerate(reference, start=1):
        current = [row]
        for column, other in enumerate(heard, start=1):
            current.append(min(previous[column] + 1, current[-1] + 1, previous[column - 1] + (word != other)))
        previous = current
    return previous[-1]


def _check_pair(reference: Tensor, decoded: Tensor) -> None:
    if reference.dim() != 1 or reference.shape != decoded.shape or not reference.numel():
        shapes = f"{list(reference.shape)} and {list(decoded.shape)}"
        raise InputError(f"expected two waveforms [samples] of equal length, got {shapes}. Cut both to the shorter one.")
