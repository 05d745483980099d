"""The decoder's geometry, read from a published ``speech_tokenizer/config.json``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vgraph_lab.errors import CheckpointError

from .config_files import read_config

__all__ = ["CONFIG_NAME", "Count", "DecoderGeometry", "Frames", "Rate", "TokenizerConfig", "Width", "published_geometry"]

CONFIG_NAME = "config.json"

# Far above any codec, and low enough that a damaged config is named as such instead of filling the memory.
Width = Annotated[int, Field(gt=0, le=65_536)]  # channels, or entries of a codebook
Count = Annotated[int, Field(gt=0, le=1_024)]  # layers, heads, codebooks, or a factor of upsampling
Frames = Annotated[int, Field(gt=0, le=1_000_000)]
Rate = Annotated[int, Field(gt=0, le=1_000_000)]  # samples per second, or per frame


class DecoderGeometry(BaseModel):
    """Sizes of one Code2Wav decoder (``decoder_config``). Defaults are those of the published 12 Hz checkpoint.

    Keys that the decoder's mathematics does not use (dropout, initialisers) are ignored, as the published loaders do.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    codebook_size: Width = 2048
    codebook_dim: Width = Field(default=512, description="width of the quantised features [channels]")
    num_quantizers: Count = 16
    num_semantic_quantizers: Count = 1
    latent_dim: Width = 1024
    hidden_size: Width = 512
    intermediate_size: Width = 1024
    num_hidden_layers: Count = 8
    num_attention_heads: Count = 16
    num_key_value_heads: Count = 16
    head_dim: Width = 64
    attention_bias: bool = False
    sliding_window: Frames = Field(default=72, description="W: keys that one query sees, itself included [frames]")
    max_position_embeddings: Frames = Field(default=8000, description="longest sequence of one forward [frames]")
    rope_theta: float = Field(default=10000.0, ge=1, le=1e12)
    rms_norm_eps: float = Field(default=1e-5, gt=0, le=1)
    layer_scale_initial_scale: float = Field(default=0.01, gt=0, le=1_000)
    upsampling_ratios: tuple[Count, ...] = Field(default=(2, 2), max_length=16)
    upsample_rates: tuple[Count, ...] = Field(default=(8, 5, 4, 3), max_length=16)
    decoder_dim: Width = 1536

    @model_validator(mode="before")
    @classmethod
    def _read_nested_rope(cls, data: Any) -> Any:
        """Newer configs nest the rotary base as ``rope_parameters: {rope_theta: …}``."""
        if isinstance(data, dict) and "rope_theta" not in data:
            nested = data.get("rope_parameters") or data.get("rope_scaling") or {}
            if isinstance(nested, dict) and "rope_theta" in nested:
                return {**data, "rope_theta": nested["rope_theta"]}
        return data

    @model_validator(mode="after")
    def _check_divisibility(self) -> DecoderGeometry:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.num_semantic_quantizers >= self.num_quantizers:
            raise ValueError(f"num_quantizers ({self.num_quantizers}) must exceed num_semantic_quantizers ({self.num_semantic_quantizers})")
        if self.codebook_dim % 2 or self.head_dim % 2:
            raise ValueError(f"codebook_dim ({self.codebook_dim}) and head_dim ({self.head_dim}) must be even")
        if self.decoder_dim % 2 ** len(self.upsample_rates):
            raise ValueError(
                f"decoder_dim ({self.decoder_dim}) must be divisible by 2 ** {len(self.upsample_rates)} (one halving per upsample rate)"
            )
        return self

    @property
    def samples_per_frame(self) -> int:
        """Waveform samples that one codec frame becomes (1,920 for the published rates)."""
        return math.prod(self.upsampling_ratios) * math.prod(self.upsample_rates)


class TokenizerConfig(BaseModel):
    """The part of ``speech_tokenizer/config.json`` that decoding needs."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_type: str = "qwen3_tts_tokenizer_12hz"
    output_sample_rate: Rate = 24000
    decode_upsample_rate: Rate = 1920
    decoder_config: DecoderGeometry

    @model_validator(mode="after")
    def _check_upsampling(self) -> TokenizerConfig:
        if self.decode_upsample_rate != self.decoder_config.samples_per_frame:
            raise ValueError(
                f"decode_upsample_rate is {self.decode_upsample_rate}, but upsampling_ratios {self.decoder_config.upsampling_ratios} "
                f"times upsample_rates {self.decoder_config.upsample_rates} give {self.decoder_config.samples_per_frame}"
            )
        return self

    @property
    def frame_rate_hz(self) -> float:
        """Codec frames per second (12.5 for the published checkpoint)."""
        return self.output_sample_rate / self.decode_upsample_rate

    @classmethod
    def from_folder(cls, folder: Path) -> TokenizerConfig:
        """Read ``folder/config.json``.

        Raises:
            CheckpointError: the file is missing, is not JSON, or describes no decoder that can be built.
        """
        path = folder / CONFIG_NAME
        if not path.is_file():
            raise CheckpointError(
                f"{folder} has no {CONFIG_NAME}. Expected a published speech_tokenizer folder: {CONFIG_NAME} beside *.safetensors."
            )
        return read_config(path, cls, "a 12 Hz decoder")


def published_geometry() -> DecoderGeometry:
    """The geometry of the published Qwen3-TTS 12 Hz tokenizer decoder (114 M parameters)."""
    return DecoderGeometry()
