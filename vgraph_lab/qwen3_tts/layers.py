"""Causal building blocks of the waveform stage. Tensors are [B, channels, time] throughout.

A layer that looks back takes an optional ``past``. Without it the input begins the utterance and zeros stand before it; with
it the input goes on where an earlier call ended, and the outputs are those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "CausalConv1d",
    "CausalConvTranspose1d",
    "ConvNeXtBlock",
    "DecoderBlock",
    "LayerScale",
    "Past",
    "ResidualUnit",
    "SnakeBeta",
    "in_order",
    "rewritten",
]


class Past(Protocol):
    """What came before the input of each layer. Layers ask in the order in which they run."""

    def extend(self, x: Tensor, samples: int) -> Tensor:
        """``x`` [B, C, T] behind the ``samples`` inputs that the same layer had before: [B, C, samples + T]."""


def in_order(layers: Iterable[nn.Module], x: Tensor, past: Past | None = None) -> Tensor:
    """Run layers one after the other, sequences within them too; those that look back get ``past``."""
    for layer in layers:
        if isinstance(layer, nn.Sequential):
            x = in_order(layer, x, past)
        elif isinstance(layer, SnakeBeta):
            x = layer(x)
        else:
            x = layer(x, past)
    return x


class CausalConv1d(nn.Module):
    """Convolution that sees the past only: output [.., t] depends on input [.., ≤ t]; the length is kept.

    ``left_context`` is how many earlier samples one output sample reads.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, *, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel_size, dilation=dilation, groups=groups)
        self.left_context = (kernel_size - 1) * dilation

    def forward(self, x: Tensor, past: Past | None = None) -> Tensor:
        out: Tensor = self.conv(F.pad(x, (self.left_context, 0)) if past is None else past.extend(x, self.left_context))
        return out


class CausalConvTranspose1d(nn.Module):
    """Upsampling by ``stride``: T samples become T * stride. What the kernel rings beyond the last one is cut.

    An input rings on for ``overlap`` outputs after its own ``stride``, so outputs depend on ``left_context`` earlier inputs.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(in_channels, out_channels, kernel_size, stride=stride)
        self.stride, self.overlap = stride, kernel_size - stride
        self.left_context = -(-self.overlap // stride)

    def forward(self, x: Tensor, past: Past | None = None) -> Tensor:
        longer = x if past is None else past.extend(x, self.left_context)
        out: Tensor = self.conv(longer)
        earlier = (longer.shape[-1] - x.shape[-1]) * self.stride
        return out[..., earlier : out.shape[-1] - self.overlap].contiguous() if self.overlap else out


class SnakeBeta(nn.Module):
    """x + sin²(x·eᵅ) / (eᵝ + 1e-9), with α and β per channel (BigVGAN's SnakeBeta in log scale)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        frequency = self.alpha.exp()[:, None]
        magnitude = (self.beta.exp() + 1e-9).reciprocal()[:, None]
        return x + magnitude * torch.sin(x * frequency).square()


class LayerScale(nn.Module):
    """A learned factor per channel on a residual branch."""

    def __init__(self, channels: int, initial: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((channels,), initial))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scale * x
        return out


class ConvNeXtBlock(nn.Module):
    """Depthwise causal convolution, LayerNorm, and a pointwise MLP, scaled and added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = CausalConv1d(channels, channels, 7, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), 1e-6))

    def forward(self, x: Tensor, past: Past | None = None) -> Tensor:
        y = self.norm(self.dwconv(x, past).transpose(1, 2))
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
        out: Tensor = x + y.transpose(1, 2)
        return out


class ResidualUnit(nn.Module):
    """SnakeBeta, dilated convolution, SnakeBeta, pointwise convolution, added to the input."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1 = SnakeBeta(channels)
        self.conv1 = CausalConv1d(channels, channels, 7, dilation=dilation)
        self.act2 = SnakeBeta(channels)
        self.conv2 = CausalConv1d(channels, channels, 1)

    def forward(self, x: Tensor, past: Past | None = None) -> Tensor:
        out: Tensor = x + self.conv2(self.act2(self.conv1(self.act1(x), past)))
        return out


class DecoderBlock(nn.Module):
    """One upsampling stage of the waveform decoder: SnakeBeta, transposed convolution, three residual units."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            SnakeBeta(in_channels),
            CausalConvTranspose1d(in_channels, out_channels, 2 * stride, stride),
            *(ResidualUnit(out_channels, dilation) for dilation in (1, 3, 9)),
        )

    def forward(self, x: Tensor, past: Past | None = None) -> Tensor:
        return in_order(self.block, x, past)


def rewritten(old: Tensor, new: Tensor) -> Tensor:
    """``new`` in the memory of ``old`` where it fits there: captured graphs read a buffer's address."""
    if (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device):
        return old.copy_(new)
    return new
