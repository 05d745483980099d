"""Spectral losses: what the decoded waveform is compared with the original by."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vgraph_lab.inspect.speech_metrics import mel_filters

__all__ = ["SpectralLoss", "SpectralLosses"]

_SCALES = ((2048, 128), (1024, 96), (512, 64), (256, 32), (128, 16))  # FFT size [samples], mel bands
_LINEAR_SIZES = (2048, 1024, 512)
_MEL_FLOOR, _LINEAR_FLOOR = 1e-4, 3e-4


class SpectralLosses(NamedTuple):
    """Scalars: ``mel`` over five resolutions, ``linear`` over three."""

    mel: Tensor
    linear: Tensor


class SpectralLoss(nn.Module):
    """L1 between magnitudes of decoded and original waveforms [B, samples], log10 and linear, mel bands and single bins."""

    def __init__(self, sample_rate: int) -> None:
        super().__init__()
        for size, bands in _SCALES:
            self.register_buffer(f"window_{size}", torch.hann_window(size), persistent=False)
            self.register_buffer(f"filters_{size}", _filled_mel_filters(size, bands, sample_rate), persistent=False)

    def _magnitude(self, wav: Tensor, size: int) -> Tensor:
        window: Tensor = getattr(self, f"window_{size}")
        spectrum = torch.stft(wav, size, size // 4, size, window, pad_mode="constant", return_complex=True)
        return (spectrum.real.square() + spectrum.imag.square() + 1e-12).sqrt() / (size / 4)  # differentiable at 0, unlike abs

    def forward(self, decoded: Tensor, original: Tensor) -> SpectralLosses:
        mel, linear = [], []
        for size, _ in _SCALES:
            ours, theirs = self._magnitude(decoded, size), self._magnitude(original, size)
            if size in _LINEAR_SIZES:
                linear.append(_log_distance(ours, theirs, _LINEAR_FLOOR) + 4 * (ours - theirs).abs().mean())
            filters: Tensor = getattr(self, f"filters_{size}")
            ours, theirs = filters @ ours, filters @ theirs
            mel.append(_log_distance(ours, theirs, _MEL_FLOOR) + 2 * (ours - theirs).abs().mean())
        return SpectralLosses(torch.stack(mel).mean(), torch.stack(linear).mean())


def _log_distance(ours: Tensor, theirs: Tensor, floor: float) -> Tensor:
    return ((ours + floor).log10() - (theirs + floor).log10()).abs().mean()


def _filled_mel_filters(size: int, bands: int, sample_rate: int) -> Tensor:
    """Mel filters in which a band narrower than a bin takes the nearest bin, so that every band has something to say."""
    filters = mel_filters(size, bands, sample_rate).clone()
    top_mel = 2595 * torch.log10(torch.tensor(1 + sample_rate / 2 / 700))
    low_mel = 2595 * torch.log10(torch.tensor(1 + 30.0 / 700))
    centres_hz = 700 * (10 ** (torch.linspace(float(low_mel), float(top_mel), bands + 2)[1:-1] / 2595) - 1)
    nearest = (centres_hz / (sample_rate / 2) * (size // 2)).round().long()
    empty = (filters.sum(dim=1) == 0).nonzero()[:, 0]
    filters[empty, nearest[empty]] = 1.0
    return filters
