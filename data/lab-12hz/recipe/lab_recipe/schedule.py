"""What changes while training. Rates and weights follow training seconds, so a slower machine trains the same curve."""

from __future__ import annotations

import math

from .config import RecipeConfig

__all__ = ["adversarial_share", "average_decay", "rate_share"]


def rate_share(config: RecipeConfig, progress: float, step: int) -> float:
    """Share of the learning rate: a cosine over ``progress`` (0 … 1 of all seconds), under a linear warm-up of steps."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return (config.final_rate_share + (1 - config.final_rate_share) * cosine) * min(1.0, (step + 1) / config.warm_up_steps)


def adversarial_share(config: RecipeConfig, progress: float) -> float:
    """Share of the adversarial and feature losses: 0 before ``adversarial_from``, then a ramp to 1."""
    return min(1.0, max(0.0, (progress - config.adversarial_from) / config.adversarial_ramp))


def average_decay(config: RecipeConfig, step: int) -> float:
    """Decay of the averaged weights: short at first, so that the random start is forgotten."""
    return min(config.average_decay, (1 + step) / (10 + step))
