"""The network of the bundled encoder: 24 kHz speech to latents at the codec's frame rate, before quantisation.

    wav [B, 1920 F] ─log spectra, hop 240→ [B, 722, 8 F] ─stem, three times (stride 2, block)→ [B, 240, F]
        ─transformer, window 72→ latents [B, latent_dim, F], normalised per frame

This is the project's own design, not the published encoder: two fixed log-magnitude spectra (windows of 480 and 960
samples) take the place of strided waveform convolutions, which makes it small enough to ship (2.9 M parameters).
Everything after the spectra is causal, so the look-ahead is half of the longer window less half a hop: 360 samples.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from vgraph_lab.errors import CheckpointError

from .config_files import read_config
from .geometry import Count, Frames, Rate, Width
from .transformer import sliding_window_mask

__all__ = ["ENCODER_CONFIG_NAME", "EncoderGeometry", "EncoderNetwork"]

ENCODER_CONFIG_NAME = "encoder_config.json"
_FORMAT, _VERSION = "vgraph_lab.encoder", 1
_ROPE_THETA = 10_000.0
_MAGNITUDE_FLOOR = 1e-4  # 80 dB below a full-scale sine
_RESIDUAL_SCALE = 0.2  # branches start small but alive


class EncoderGeometry(BaseModel):
    """Sizes of the encoder (``encoder_config.json``). Defaults are those of the bundled checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: str = _FORMAT
    version: PositiveInt = _VERSION
    sample_rate: Rate = Field(default=24_000, description="of the input [Hz]")
    hop: Width = Field(default=240, description="between two spectra [samples]")
    windows: tuple[Width, ...] = Field(default=(480, 960), max_length=16, description="of the spectra [samples]")
    width: Width = 240
    strides: tuple[Count, ...] = Field(default=(2, 2, 2), max_length=16)
    num_layers: Count = 2
    num_heads: Count = 6
    intermediate_size: Width = 448
    sliding_window: Frames = Field(default=72, description="keys that one query sees, itself included [frames]")
    latent_dim: Width = Field(default=128, description="the decoder's codebook_dim")

    @model_validator(mode="after")
    def _check(self) -> EncoderGeometry:
        if (self.format, self.version) != (_FORMAT, _VERSION):
            raise ValueError(f"format is {self.format!r} version {self.version}; this reader knows {_FORMAT!r} version {_VERSION}")
        if self.width % (2 * self.num_heads):
            raise ValueError(f"width ({self.width}) must be a multiple of 2 * num_heads ({2 * self.num_heads})")
        if not self.windows or any(window < self.hop or (window - self.hop) % 2 for window in self.windows):
            raise ValueError(f"each of windows {self.windows} must exceed hop ({self.hop}) by an even number of samples")
        return self

    @property
    def samples_per_frame(self) -> int:
        """Waveform samples that become one codec frame."""
        return self.hop * math.prod(self.strides)

    @classmethod
    def from_folder(cls, folder: Path) -> EncoderGeometry:
        """Read ``folder/encoder_config.json``.

        Raises:
            CheckpointError: the file is missing, is not JSON, or describes no encoder that can be built.
        """
        path = folder / ENCODER_CONFIG_NAME
        if not path.is_file():
            raise CheckpointError(
                f"{folder} has no {ENCODER_CONFIG_NAME}, so it has no encoder that this package can load (published encoders are "
                "another design). The bundled checkpoint has one: vgraph_lab.bundled.checkpoint_folder()."
            )
        return read_config(path, cls, "an encoder")


class LogSpectra(nn.Module):
    """wav [B, hop * N] → [B, bins, N]: log magnitudes of several window lengths, centred on the same samples."""

    def __init__(self, windows: tuple[int, ...], hop: int) -> None:
        super().__init__()
        self.windows, self.hop = windows, hop
        self.bins = sum(window // 2 + 1 for window in windows)
        for window in windows:
            self.register_buffer(f"hann_{window}", torch.hann_window(window), persistent=False)

    def forward(self, wav: Tensor) -> Tensor:
        spectra = []
        for window in self.windows:
            pad = (window - self.hop) // 2
            hann = getattr(self, f"hann_{window}").float()
            complex_bins = torch.stft(F.pad(wav.float(), (pad, pad)), window, self.hop, window, hann, center=False, return_complex=True)
            magnitude = complex_bins.abs() / (window / 2)  # 1 for a full-scale sine
            spectra.append(torch.log10(magnitude + _MAGNITUDE_FLOOR) + 3)
        return torch.cat(spectra, dim=1)


class CausalBlock(nn.Module):
    """Depthwise causal convolution, LayerNorm and a pointwise MLP, scaled and added to the input [B, channels, N]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(width, width, 7, groups=width)
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 2 * width)
        self.contract = nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.full((width,), _RESIDUAL_SCALE))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(F.pad(x, (6, 0))).transpose(1, 2))
        out: Tensor = x + (self.scale * self.contract(F.gelu(self.expand(y)))).transpose(1, 2)
        return out


class EncoderLayer(nn.Module):
    """Rotary attention over a sliding window and SwiGLU, both pre-normed and scaled. [B, F, width] → the same."""

    def __init__(self, g: EncoderGeometry) -> None:
        super().__init__()
        self.num_heads = g.num_heads
        self.attention_norm = nn.RMSNorm(g.width, eps=1e-5)
        self.qkv_projection = nn.Linear(g.width, 3 * g.width, bias=False)
        self.attention_output = nn.Linear(g.width, g.width, bias=False)
        self.attention_scale = nn.Parameter(torch.full((g.width,), _RESIDUAL_SCALE))
        self.mlp_norm = nn.RMSNorm(g.width, eps=1e-5)
        self.gate_up_projection = nn.Linear(g.width, 2 * g.intermediate_size, bias=False)
        self.down_projection = nn.Linear(g.intermediate_size, g.width, bias=False)
        self.mlp_scale = nn.Parameter(torch.full((g.width,), _RESIDUAL_SCALE))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        heads = self.qkv_projection(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # [B, heads, F, head_dim] each
        attended = F.scaled_dot_product_attention(_rotate(query, cos, sin), _rotate(key, cos, sin), value, attn_mask=mask)
        x = x + self.attention_scale * self.attention_output(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up_projection(self.mlp_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.mlp_scale * self.down_projection(F.silu(gate) * up)
        return out


class EncoderNetwork(nn.Module):
    """wav [B, samples_per_frame * F] → latents [B, latent_dim, F] in fp32, each frame with mean 0 and variance 1."""

    def __init__(self, geometry: EncoderGeometry) -> None:
        super().__init__()
        g = self.geometry = geometry
        self.spectra = LogSpectra(g.windows, g.hop)
        self.input_projection = nn.Linear(self.spectra.bins, g.width)
        self.stem = nn.Sequential(CausalBlock(g.width), CausalBlock(g.width))
        self.downsample = nn.ModuleList(nn.Conv1d(g.width, g.width, 2 * stride, stride=stride) for stride in g.strides)
        self.blocks = nn.ModuleList(CausalBlock(g.width) for _ in g.strides[1:])  # one between two strides
        self.layers = nn.ModuleList(EncoderLayer(g) for _ in range(g.num_layers))
        self.output_norm = nn.RMSNorm(g.width, eps=1e-5)
        self.output_projection = nn.Linear(g.width, g.latent_dim)

    def forward(self, wav: Tensor) -> Tensor:
        spectra = self.spectra(wav).transpose(1, 2).to(self.input_projection.weight.dtype)
        x = self.stem(self.input_projection(spectra).transpose(1, 2))
        for index, (convolution, stride) in enumerate(zip(self.downsample, self.geometry.strides, strict=True)):
            x = convolution(F.pad(x, (stride, 0)))
            if index < len(self.blocks):
                x = self.blocks[index](x)
        x = x.transpose(1, 2)
        cos, sin = self._rotary(x)
        positions = torch.arange(x.shape[1], device=x.device)
        mask = sliding_window_mask(positions, positions, self.geometry.sliding_window)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        latents = self.output_projection(self.output_norm(x)).float()
        return F.layer_norm(latents, latents.shape[-1:]).transpose(1, 2)

    def _rotary(self, x: Tensor) -> tuple[Tensor, Tensor]:
        head_dim = self.geometry.width // self.geometry.num_heads
        inverse_frequency = 1.0 / _ROPE_THETA ** (torch.arange(0, head_dim, 2, device=x.device).float() / head_dim)
        angles = torch.arange(x.shape[1], device=x.device).float()[:, None] * inverse_frequency
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
