"""How far a condition may be from its reference, by the precision in which it was computed, and why.

These are limits for listening: every measure of a whole utterance has one, and all must be kept. Whether a graph equals
eager in the same precision is asked more strictly by :func:`~vgraph_lab.inspect.audio.tolerance_for`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vgraph_lab.errors import InputError
from vgraph_lab.inspect.audio import dbfs

__all__ = ["ListeningLimits", "limits_for"]


@dataclass(frozen=True, slots=True)
class ListeningLimits:
    """Limits of one comparison. Each is included.

    Attributes:
        name: of what was computed so, for the verdict.
        max_dbfs: largest absolute difference, dB relative to full scale.
        snr_db: least signal-to-noise ratio.
        si_sdr_db: least scale-invariant signal-to-distortion ratio.
        log_spectral_distance_db: largest one.
        mel_distance_db: largest one.
        stoi: least intelligibility.
        clicks: most seams that click.
        why: where the figures come from.
    """

    name: str
    max_dbfs: float
    snr_db: float
    si_sdr_db: float
    log_spectral_distance_db: float
    mel_distance_db: float
    stoi: float
    clicks: int
    why: str

    def broken_by(self, measures: Mapping[str, float]) -> list[str]:
        """The limits that these measures break, in words. A measure that is NaN breaks none: it could not be taken."""
        return [self.in_words(name, measures[name]) for name in _UNITS if not self._holds(name, measures[name])]

    def kept_by(self, measures: Mapping[str, float]) -> list[str]:
        """The limits that these measures keep, in words."""
        return [self.in_words(n, measures[n]) for n in _UNITS if self._holds(n, measures[n]) and not math.isnan(measures[n])]

    def _holds(self, name: str, value: float) -> bool:
        limit = getattr(self, name)
        return math.isnan(value) or (value >= limit if name in _LEAST else value <= limit)

    def in_words(self, name: str, value: float) -> str:
        """One measure beside its limit: ``peak −121.3 dBFS (−100.0 allowed)``."""
        title, unit, digits = _UNITS[name]
        shown, limit = (f"{v:.{digits}f}".replace("-", "−").replace("inf", "∞") for v in (value, getattr(self, name)))
        return f"{title} {shown}{unit} ({limit} {'needed' if name in _LEAST else 'allowed'})"


_LEAST = ("snr_db", "si_sdr_db", "stoi")
_UNITS = {
    "max_dbfs": ("peak", " dBFS", 1),
    "snr_db": ("SNR", " dB", 1),
    "si_sdr_db": ("SI-SDR", " dB", 1),
    "log_spectral_distance_db": ("log-spectral", " dB", 2),
    "mel_distance_db": ("mel", " dB", 2),
    "stoi": ("STOI", "", 4),
    "clicks": ("clicks", "", 0),
}

_MEASURED = (
    "at least twice the largest distance, and 6 dB below the least ratio, that decoding 12 bundled clips in {} "
    "gave against float32 on a CPU: peak {}, SNR {} dB, log-spectral {} dB, mel {} dB; no seam of theirs clicked"
)
_LIMITS = {
    torch.float32: ListeningLimits(
        *("float32", dbfs(1e-5), 80.0, 80.0, 0.1, 0.02, 0.9999, 0),
        "float32 sums in another order (other kernels, padding, another device); 8.2e-7 was measured. Differences at random within "
        "±1e-5 give an SNR of 80.4, a log-spectral distance of 0.055 and a mel distance of 0.009 dB in the bundled clips. They lie below "
        "half a step of 16 bits (−96.3 dBFS): rounded to 16 bits, 16 % of the samples change, by one step at most",
    ),
    torch.float16: ListeningLimits(
        *("float16", dbfs(5e-3), 46.0, 46.0, 0.6, 0.09, 0.999, 0),
        "11 significant bits: " + _MEASURED.format("float16", "−53.2 dBFS", "52.7", "0.30", "0.04"),
    ),
    torch.bfloat16: ListeningLimits(
        *("bfloat16", dbfs(7e-2), 26.0, 26.0, 4.5, 0.75, 0.995, 0),
        "8 significant bits: " + _MEASURED.format("bfloat16", "−29.3 dBFS", "32.1", "2.23", "0.37"),
    ),
}


def limits_for(dtype: torch.dtype) -> ListeningLimits:
    """What a condition that was computed in ``dtype`` may differ by from a reference in float32 or in the same dtype.

    Raises:
        InputError: no limits are stated for this dtype.
    """
    if dtype not in _LIMITS:
        stated = ", ".join(limits.name for limits in _LIMITS.values())
        raise InputError(f"no limits are stated for {dtype}. Stated: {stated}. Pass ListeningLimits of your own.")
    return _LIMITS[dtype]
