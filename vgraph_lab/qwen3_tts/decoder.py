"""The Code2Wav decoder of Qwen3-TTS's 12 Hz tokenizer: the eager truth that every graph is compared with.

    codes [B, 16, T] ─quantizer→ [B, 512, T] ─pre_conv→ [B, 1024, T] ─pre_transformer→ [B, 1024, T]
          ─upsample ×2 ×2→ [B, 1024, 4 T] ─decoder ×8 ×5 ×4 ×3→ waveform [B, 1, 1920 T]

Every step is causal. The steps are separate methods because streaming enters and leaves between them. Module names are
the published checkpoint's, so its tensors load without renaming. Source of the architecture: the published
``Qwen3TTSTokenizerV2Decoder`` (QwenLM/Qwen3-TTS).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .geometry import DecoderGeometry
from .inputs import validate_codes
from .layers import CausalConv1d, CausalConvTranspose1d, ConvNeXtBlock, DecoderBlock, SnakeBeta
from .quantizer import SplitResidualVectorQuantizer
from .transformer import PreTransformer

__all__ = ["Code2WavDecoder"]


class Code2WavDecoder(nn.Module):
    """codes [B, num_quantizers, T] → waveform [B, 1, T * samples_per_frame] in [-1, 1].

    Calling the module validates its input; :meth:`decode` is the same mathematics without the checks, for callers that
    have validated already (a graph capture must not look at data).
    """

    def __init__(self, geometry: DecoderGeometry, *, sample_rate: int = 24000) -> None:
        super().__init__()
        g = geometry
        self.geometry, self.sample_rate = geometry, sample_rate
        self.revision = 0  # of the weights: how often refresh_tables was called; torch counts no writes in inference mode
        self.quantizer = SplitResidualVectorQuantizer(g)
        self.pre_conv = CausalConv1d(g.codebook_dim, g.latent_dim, 3)
        self.pre_transformer = PreTransformer(g)
        self.upsample = nn.Sequential(
            *(
                nn.Sequential(CausalConvTranspose1d(g.latent_dim, g.latent_dim, ratio, ratio), ConvNeXtBlock(g.latent_dim))
                for ratio in g.upsampling_ratios
            )
        )
        widths = [g.decoder_dim // 2**i for i in range(len(g.upsample_rates) + 1)]
        self.decoder = nn.Sequential(
            CausalConv1d(g.latent_dim, widths[0], 7),
            *(DecoderBlock(widths[i], widths[i + 1], rate) for i, rate in enumerate(g.upsample_rates)),
            SnakeBeta(widths[-1]),
            CausalConv1d(widths[-1], 1, 7),
        )

    @property
    def samples_per_frame(self) -> int:
        """Waveform samples per codec frame."""
        return self.geometry.samples_per_frame

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.pre_conv.conv.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights and of all activations."""
        return self.pre_conv.conv.weight.dtype

    def refresh_tables(self) -> None:
        """Rebuild what is derived from the weights: codebook tables and rotary angles. Call after changing any weights.

        The tables keep their memory, so captured graphs see the change. A form that holds weights of its own takes them over again.
        """
        self.revision += 1
        self.quantizer.refresh_tables()
        self.pre_transformer.refresh_rotary_table()

    # The steps, in order. Features are [B, channels, frames].

    def quantize(self, codes: Tensor) -> Tensor:
        """codes [B, num_quantizers, T] int64 → quantised features [B, codebook_dim, T]."""
        return self.quantizer.decode(codes)

    def contextualize(self, quantized: Tensor) -> Tensor:
        """Quantised features [B, codebook_dim, T] → hidden features [B, latent_dim, T] (whole sequence, no cache)."""
        hidden: Tensor = self.pre_transformer(self.pre_conv(quantized).transpose(1, 2))[0]
        return hidden.transpose(1, 2)

    def render(self, hidden: Tensor) -> Tensor:
        """Hidden features [B, latent_dim, T] → waveform [B, 1, T * samples_per_frame], clamped to [-1, 1]."""
        waveform: Tensor = self.decoder(self.upsample(hidden))
        return waveform.clamp(-1, 1)

    def decode(self, codes: Tensor) -> Tensor:
        """All steps: codes [B, num_quantizers, T] int64 on the weights' device → waveform [B, 1, T * samples_per_frame]."""
        return self.render(self.contextualize(self.quantize(codes)))

    def forward(self, codes: Tensor) -> Tensor:
        """Validate ``codes`` and decode them without recording gradients.

        Args:
            codes: integers [B, num_quantizers, T], 1 ≤ T ≤ ``max_position_embeddings``, on any device.

        Raises:
            InputError: wrong type, shape, length or (for host tensors) values.
        """
        validate_codes(codes, self.geometry)
        with torch.no_grad():
            return self.decode(codes.to(device=self.device, dtype=torch.int64))
