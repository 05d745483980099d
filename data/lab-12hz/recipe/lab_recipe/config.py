"""Every number of the recipe, with the values that the bundled checkpoint was trained with."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from vgraph_lab.qwen3_tts.encoder_network import EncoderGeometry
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry

__all__ = ["LAB_GEOMETRY", "RecipeConfig"]

SAMPLE_RATE = 24_000

LAB_GEOMETRY: dict[str, Any] = {
    "codebook_size": 512,
    "codebook_dim": 128,
    "latent_dim": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 3,
    "decoder_dim": 384,
}
"""What differs from the published geometry: 4.4 M parameters instead of 114 M, at the same rates and names."""


class RecipeConfig(BaseModel):
    """Settings of one training. A resumed training must have the settings it began with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    decoder: DecoderGeometry = Field(default_factory=lambda: DecoderGeometry.model_validate(LAB_GEOMETRY))
    encoder: EncoderGeometry = Field(default_factory=EncoderGeometry)
    seed: NonNegativeInt = 0
    total_seconds: PositiveFloat = Field(default=1385.0, description="training time over all calls; every schedule runs on it")

    # crops
    batch_size: PositiveInt = 96
    crop_frames: PositiveInt = Field(default=75, description="6 s, just longer than the attention window of 72 frames")
    window_frames: PositiveInt = Field(default=16, description="rendered and compared")
    context_frames: NonNegativeInt = Field(
        default=12, description="rendered before the window and dropped; 12 reach as far back as the decoder"
    )
    stream_start_share: float = Field(default=0.25, ge=0, le=1, description="windows at the very start, where there is no context")
    real_share: float = Field(default=0.16, ge=0, lt=1, description="crops of real speech")
    lowest_gain_db: float = -10.0
    highest_gain_db: float = 4.0

    # optimisers
    generator_rate: PositiveFloat = Field(default=6e-4, description="learning rate of encoder and decoder")
    discriminator_rate: PositiveFloat = 3e-4
    betas: tuple[float, float] = (0.8, 0.99)
    weight_decay: NonNegativeFloat = Field(default=0.01, description="of matrices and kernels; vectors have none")
    warm_up_steps: PositiveInt = 300
    final_rate_share: NonNegativeFloat = Field(default=0.02, description="of the learning rate, at the end of its cosine")
    generator_clip: PositiveFloat = 20.0
    discriminator_clip: PositiveFloat = 10.0
    average_decay: float = Field(default=0.999, ge=0, lt=1, description="of the averaged weights, which are exported")

    # quantizer
    quantize_from_step: NonNegativeInt = Field(default=500, description="before it, latents pass unquantised")
    kmeans_batches: PositiveInt = 12
    kmeans_iterations: PositiveInt = 12
    codebook_decay: float = Field(default=0.99, ge=0, lt=1)
    restart_every_steps: PositiveInt = 20
    restart_below: NonNegativeFloat = Field(default=0.05, description="of the mean usage: below it a code counts as dead")
    quantizer_dropout: float = Field(default=0.15, ge=0, le=1, description="share of crops decoded with their first levels only")
    commitment_weight: NonNegativeFloat = Field(
        default=0.5, description="as trained; the likely cause of low-rank latents (README): try 0.05"
    )

    # losses
    mel_weight: NonNegativeFloat = 15.0
    linear_weight: NonNegativeFloat = 5.0
    adversarial_from: NonNegativeFloat = Field(default=0.37, description="progress at which the discriminator starts")
    adversarial_ramp: PositiveFloat = Field(default=0.03, description="progress over which its losses reach full weight")
    adversarial_weight: NonNegativeFloat = 1.0
    feature_weight: NonNegativeFloat = 4.0
    discriminator_batch: PositiveInt = 64
    discriminator_channels: PositiveInt = 32
    discriminator_windows: tuple[PositiveInt, ...] = (2048, 1024, 512)

    @model_validator(mode="after")
    def _check(self) -> RecipeConfig:
        if self.encoder.latent_dim != self.decoder.codebook_dim:
            raise ValueError(f"encoder.latent_dim ({self.encoder.latent_dim}) must be decoder.codebook_dim ({self.decoder.codebook_dim})")
        if self.encoder.samples_per_frame != self.decoder.samples_per_frame:
            raise ValueError(
                f"encoder and decoder frames differ: {self.encoder.samples_per_frame} and {self.decoder.samples_per_frame} samples"
            )
        if self.window_frames + self.context_frames > self.crop_frames:
            raise ValueError(f"window_frames + context_frames must fit into crop_frames ({self.crop_frames})")
        return self

    @property
    def crop_samples(self) -> int:
        """Samples of one crop."""
        return self.crop_frames * self.decoder.samples_per_frame
