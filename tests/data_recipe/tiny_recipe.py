"""A training small enough for tests: tiny networks, hums instead of speech, and a clock of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lab_recipe.config import RecipeConfig
from lab_recipe.crops import SpeechCrops
from lab_recipe.trainer import Trainer

TINY: dict[str, Any] = {
    "decoder": {
        "codebook_size": 16,
        "codebook_dim": 16,
        "latent_dim": 16,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "decoder_dim": 32,
        "max_position_embeddings": 100,
    },
    "encoder": {"width": 24, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "latent_dim": 16},
    "batch_size": 4,
    "crop_frames": 6,
    "window_frames": 2,
    "context_frames": 2,
    "quantize_from_step": 1,
    "kmeans_batches": 2,
    "kmeans_iterations": 2,
    "adversarial_from": 0.2,
    "discriminator_batch": 3,
    "discriminator_channels": 4,
    "total_seconds": 10.0,
}


class Clock:
    """Each step takes a second: the discriminator joins at step 2 of 10."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def speech(seconds: float, seed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    time = np.arange(round(seconds * 24_000)) / 24_000
    hum = sum(np.sin(2 * np.pi * 110 * k * time + k) / k for k in range(1, 12)) * (1 + np.sin(2 * np.pi * 4 * time))
    return 0.05 * (hum + np.random.default_rng(seed).normal(size=len(time)))


def int16(seconds: float, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.round(speech(seconds, seed) * 32767).astype(np.int16))


def trainer(device: str = "cpu", **changes: object) -> tuple[Trainer, Clock]:
    config, clock, where = RecipeConfig.model_validate({**TINY, **changes}), Clock(), torch.device(device)
    crops = SpeechCrops(int16(4), int16(2, seed=1), config, where, held_out_seconds=1.5)
    return Trainer(config, crops, where, clock=clock), clock


def run(training: Trainer, clock: Clock, steps: int) -> list[dict[str, float]]:
    figures = []
    for _ in range(steps):
        figures.append(training.train_step())
        clock.now += 1
    return figures
