"""The adversary: small convolutional networks that look at complex spectra of several window lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

__all__ = ["Discriminator", "Judgement", "adversarial_loss", "discriminator_loss", "feature_loss"]

_COMPRESSION = 0.4  # exponent on magnitudes; phases are kept
_LAYERS = (((3, 9), 2, 1), ((3, 9), 2, 1), ((3, 9), 2, 2), ((3, 9), 2, 4), ((3, 3), 1, 1))  # kernel, stride, dilation in time


class Judgement(NamedTuple):
    """What one spectral network says of a batch.

    Attributes:
        scores: patches [B, 1, time, bins]; near 1 where they look real, near 0 where decoded.
        features: outputs of the hidden layers.
    """

    scores: Tensor
    features: list[Tensor]


class _SpectralNetwork(nn.Module):
    def __init__(self, window: int, channels: int) -> None:
        super().__init__()
        self.size = window
        self.register_buffer("window", torch.hann_window(window), persistent=False)
        self.layers = nn.ModuleList()
        incoming = 2  # real and imaginary part
        for kernel, stride, dilation in _LAYERS:
            padding = ((kernel[0] - 1) // 2 * dilation, (kernel[1] - 1) // 2)
            self.layers.append(
                weight_norm(nn.Conv2d(incoming, channels, kernel, stride=(1, stride), dilation=(dilation, 1), padding=padding))
            )
            incoming = channels
        self.output = weight_norm(nn.Conv2d(channels, 1, (3, 3), padding=1))

    def forward(self, wav: Tensor) -> Judgement:
        window: Tensor = self.window  # type: ignore[assignment]  # a buffer
        spectrum = torch.stft(wav, self.size, self.size // 4, self.size, window, pad_mode="constant", return_complex=True) / (self.size / 4)
        power = spectrum.real.square() + spectrum.imag.square() + 1e-8
        compressed = torch.stack((spectrum.real, spectrum.imag), dim=1) * power.pow((_COMPRESSION - 1) / 2)[:, None]
        x = compressed.transpose(2, 3)  # [B, 2, time, bins]
        features = []
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.1)
            features.append(x)
        return Judgement(self.output(x), features)


class Discriminator(nn.Module):
    """wav [B, samples] → one :class:`Judgement` per window length."""

    def __init__(self, windows: tuple[int, ...], channels: int) -> None:
        super().__init__()
        self.networks = nn.ModuleList(_SpectralNetwork(window, channels) for window in windows)

    def forward(self, wav: Tensor) -> list[Judgement]:
        return [network(wav) for network in self.networks]


def discriminator_loss(real: list[Judgement], decoded: list[Judgement]) -> Tensor:
    """Least squares: real patches towards 1, decoded ones towards 0."""
    return torch.stack([(1 - r.scores).square().mean() + d.scores.square().mean() for r, d in zip(real, decoded, strict=True)]).mean()


def adversarial_loss(decoded: list[Judgement]) -> Tensor:
    """Least squares: decoded patches towards 1."""
    return torch.stack([(1 - judgement.scores).square().mean() for judgement in decoded]).mean()


def feature_loss(real: list[Judgement], decoded: list[Judgement]) -> Tensor:
    """Mean absolute difference of the hidden layers, each relative to the mean magnitude of the real one."""
    terms = []
    for theirs, ours in zip(real, decoded, strict=True):
        for target, feature in zip(theirs.features, ours.features, strict=True):
            target = target.detach()
            terms.append((feature - target).abs().mean() / target.abs().mean().clamp(min=1e-3))
    return torch.stack(terms).mean()
