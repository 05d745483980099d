"""What is trained: the encoder, our own decoder class, and the path of one crop through both."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.encoder_network import EncoderNetwork
from vgraph_lab.qwen3_tts.quantizer import Codebook

from .config import SAMPLE_RATE, RecipeConfig
from .quantizer import Quantized, pass_unquantized, quantize

__all__ = ["Codec", "Rendered"]

_BRANCH_SCALE = 0.2  # residual branches start small but alive
_OUTPUT_GAIN = 0.03  # of the last convolution: the first waveforms are quiet


class Rendered(NamedTuple):
    """One window of each crop, decoded and original [B, window samples], and what the quantizer did (``None`` before it starts)."""

    decoded: Tensor
    original: Tensor
    quantized: Quantized | None


class Codec(nn.Module):
    """Encoder and decoder with the recipe's initialisation."""

    def __init__(self, config: RecipeConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = EncoderNetwork(config.encoder)
        self.decoder = Code2WavDecoder(config.decoder, sample_rate=SAMPLE_RATE)
        _initialise(self.decoder)

    def render(self, crops: Tensor, *, quantized: bool, update: bool, restart_dead: bool = False) -> Rendered:
        """Encode whole crops, decode one random window of each.

        The transformer sees the whole crop; only the waveform, which costs most, is limited to the window. A share of
        the windows is at the start of the crop, so that the start of a stream is learned too.
        """
        latents = self.encoder(crops)
        result = quantize(self.decoder.quantizer, latents, self.config, update=update, restart_dead=restart_dead) if quantized else None
        features = pass_unquantized(self.decoder.quantizer, latents) if result is None else result.features
        decoded, first_frame = self._render_windows(self.decoder.contextualize(features))
        samples_per_frame = self.decoder.samples_per_frame
        samples = first_frame[:, None] * samples_per_frame + torch.arange(decoded.shape[1], device=crops.device)
        return Rendered(decoded, crops.gather(1, samples), result)

    def _render_windows(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden features [B, latent_dim, T] → waveforms [B, window samples] and the first frame of each [B]."""
        c, (batch, channels, frames) = self.config, hidden.shape
        rendered = c.window_frames + c.context_frames
        start = torch.randint(frames - rendered + 1, (batch,), device=hidden.device)
        at_start = torch.arange(batch, device=hidden.device) < round(c.stream_start_share * batch)
        start = start.masked_fill(at_start, 0)
        columns = start[:, None] + torch.arange(rendered, device=hidden.device)
        wav = self.decoder.render(hidden.gather(2, columns[:, None].expand(-1, channels, -1)))[:, 0]
        # at a stream's start the frames before the window do not exist: the window comes first, and the rest is dropped
        skipped = torch.where(at_start, 0, c.context_frames)
        window = c.window_frames * self.decoder.samples_per_frame
        samples = (skipped * self.decoder.samples_per_frame)[:, None] + torch.arange(window, device=hidden.device)
        return wav.gather(1, samples), start + skipped


@torch.no_grad()
def _initialise(decoder: Code2WavDecoder) -> None:
    """Variance-preserving kernels, zero biases; the published initialisers assume a pretrained start."""
    for module in decoder.modules():
        if isinstance(module, nn.ConvTranspose1d):
            fan_in = module.in_channels * module.kernel_size[0] / module.stride[0]
        elif isinstance(module, nn.Conv1d):
            fan_in = module.in_channels // module.groups * module.kernel_size[0]
        elif isinstance(module, nn.Linear):
            fan_in = module.in_features
        elif isinstance(module, Codebook):
            module.embedding_sum.zero_()  # k-means fills it
            continue
        else:
            continue
        deviation = fan_in**-0.5
        nn.init.trunc_normal_(module.weight, std=deviation, a=-3 * deviation, b=3 * deviation)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    for name, parameter in decoder.named_parameters():
        if name.endswith(("layer_scale.scale", "gamma")):
            parameter.fill_(_BRANCH_SCALE)
        elif name.endswith("conv2.conv.weight"):  # the last convolution of each residual unit
            parameter.mul_(0.4)
        elif name.startswith("quantizer.") and "input_proj" in name:
            nn.init.orthogonal_(parameter.view(parameter.shape[0], -1))
        elif name == f"decoder.{len(decoder.decoder) - 1}.conv.weight":
            parameter.mul_(_OUTPUT_GAIN)
