"""Training crops: random stretches of synthetic and real speech, all of it held on the device as int16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vgraph_lab.errors import InputError

from .config import SAMPLE_RATE, RecipeConfig

__all__ = ["SpeechCrops", "read_pcm", "write_pcm"]

_SLOWEST, _FASTEST = 0.85, 1.18  # replay of real speech, for more voices than were recorded


def write_pcm(path: Path, clips: list[np.ndarray[Any, Any]]) -> None:
    """Store clips (float, 24 kHz, full scale ±1) as one int16 array ``pcm`` and the ``ends`` of the clips in it."""
    if not clips:
        raise InputError(f"there is no clip to write to {path}.")
    pcm = np.concatenate([np.round(np.clip(clip, -1, 1) * 32767).astype(np.int16) for clip in clips])
    np.savez(path, pcm=pcm, ends=np.cumsum([len(clip) for clip in clips]))


def read_pcm(path: Path) -> Tensor:
    """The int16 samples of a file that :func:`write_pcm` wrote.

    Raises:
        InputError: not such a file.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            pcm = archive["pcm"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} is not a corpus of this recipe ({error}). Make one with: python -m lab_recipe corpus") from error
    if pcm.dtype != np.int16 or pcm.ndim != 1:
        raise InputError(f"{path}: pcm is {pcm.dtype} {list(pcm.shape)}, expected int16 [samples].")
    return torch.from_numpy(pcm)


class SpeechCrops:
    """Batches of crops [B, crop_samples], floats with full scale ±1. Draws from torch's global generator.

    Args:
        synthetic: int16 [samples].
        real: int16 [samples], or ``None`` to train on synthetic speech alone.
        config: sizes, shares and gains.
        device: where the speech is kept.
        held_out_seconds: kept from the end of the synthetic speech for :attr:`held_out`, never drawn.

    Raises:
        InputError: too little speech to cut crops from.
    """

    def __init__(
        self, synthetic: Tensor, real: Tensor | None, config: RecipeConfig, device: torch.device, *, held_out_seconds: float = 120.0
    ) -> None:
        held_out = round(held_out_seconds * SAMPLE_RATE)
        longest = round(config.crop_samples * _FASTEST) + 4
        for name, samples in (("synthetic", len(synthetic) - held_out), ("real", longest + 1 if real is None else len(real))):
            if samples <= longest:
                raise InputError(f"{name} speech has {samples} samples for training; a crop may need {longest}.")
        self.config, self.device = config, device
        self.synthetic = synthetic[: len(synthetic) - held_out].to(device)
        self.held_out = synthetic[len(synthetic) - held_out :].to(device)
        self.real = None if real is None else real.to(device)

    def draw(self) -> Tensor:
        """A batch [B, crop_samples] with random gains, none of it clipped."""
        c = self.config
        num_real = 0 if self.real is None else max(1, round(c.batch_size * c.real_share))
        crops = self._plain(self.synthetic, c.batch_size - num_real)
        if self.real is not None:
            crops = torch.cat((crops, self._replayed(self.real, num_real)))
        crops = crops[torch.randperm(len(crops), device=self.device)]
        gain_db = c.lowest_gain_db + (c.highest_gain_db - c.lowest_gain_db) * torch.rand(len(crops), 1, device=self.device)
        loudest = 0.98 / crops.abs().amax(dim=1, keepdim=True).clamp(min=1e-3)
        return crops * torch.minimum(10 ** (gain_db / 20), loudest)

    def _plain(self, pcm: Tensor, count: int) -> Tensor:
        start = torch.randint(len(pcm) - self.config.crop_samples, (count, 1), device=self.device)
        return pcm[start + torch.arange(self.config.crop_samples, device=self.device)].float() / 32768

    def _replayed(self, pcm: Tensor, count: int) -> Tensor:
        """Half of the crops at their own speed, half faster or slower, which moves pitch and formants alike."""
        speed = _SLOWEST + (_FASTEST - _SLOWEST) * torch.rand(count, 1, device=self.device)
        speed = torch.where(torch.rand(count, 1, device=self.device) < 0.5, torch.ones_like(speed), speed)
        position = speed * torch.arange(self.config.crop_samples, device=self.device)
        whole = position.floor().long()
        start = torch.randint(1, len(pcm) - round(self.config.crop_samples * _FASTEST) - 3, (count, 1), device=self.device)
        return _cubic(pcm, start + whole, position - whole) / 32768


def _cubic(pcm: Tensor, index: Tensor, fraction: Tensor) -> Tensor:
    """Catmull-Rom interpolation between ``pcm[index]`` and ``pcm[index + 1]``."""
    before, here, after, later = (pcm[index + offset].float() for offset in (-1, 0, 1, 2))
    slope, curve, bend = after - before, 2 * before - 5 * here + 4 * after - later, 3 * (here - after) + later - before
    return here + 0.5 * fraction * (slope + fraction * (curve + fraction * bend))
