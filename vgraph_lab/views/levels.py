"""Gains for listening and looking: one for eager and graph, an honest one of its own for the difference."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from vgraph_lab.errors import InputError
from vgraph_lab.inspect.audio import dbfs, dbfs_text

__all__ = [
    "Difference",
    "Samples",
    "difference_between",
    "difference_gain_db",
    "difference_label",
    "difference_track",
    "gain_text",
    "mono",
    "peak",
    "shared_gain",
]

Samples: TypeAlias = "np.ndarray[Any, np.dtype[np.floating[Any]]]"

_STEP_DB, _TARGET_DBFS = 10, -6.0


def mono(name: str, samples: Any) -> Samples:
    """A waveform as a vector: [samples], or with leading axes of length 1.

    Raises:
        InputError: several channels, no samples, not floating point, or NaN or infinity inside.
    """
    array = np.asarray(samples)
    if not np.issubdtype(array.dtype, np.floating):
        raise InputError(f"{name} is {array.dtype}; a waveform is floating point with full scale ±1. Divide integers by their full scale.")
    if array.size == 0:
        raise InputError(f"{name} has no samples (shape {list(array.shape)}).")
    if array.ndim == 0 or math.prod(array.shape[:-1]) != 1:
        raise InputError(f"{name} has the shape {list(array.shape)}; one channel of one item is needed, [samples] or [1, 1, samples].")
    bad = int((~np.isfinite(array)).sum())
    if bad:
        raise InputError(f"{name} has {bad} samples that are NaN or infinite; they cannot be played. Find them with waveform_difference().")
    return array.reshape(-1)


def difference_track(eager: Any, graph: Any) -> tuple[Samples, Samples, Samples]:
    """Both waveforms as vectors, and graph − eager in double precision.

    Raises:
        InputError: see :func:`mono`; or the lengths differ.
    """
    reference, candidate = mono("eager", eager), mono("graph", graph)
    if len(reference) != len(candidate):
        raise InputError(
            f"eager has {len(reference)} samples and graph {len(candidate)}: waveforms of different lengths have no difference track. "
            "waveform_difference() says where they part."
        )
    return reference, candidate, candidate.astype(np.float64) - reference.astype(np.float64)


def peak(samples: Samples) -> float:
    """Largest absolute sample."""
    return float(np.abs(samples).max())


def shared_gain(waveforms: Iterable[Samples]) -> float:
    """The one factor with which all of them are played: 1, or less if a sample exceeds full scale. Never more than 1."""
    return 1 / max(1.0, *map(peak, waveforms))


def difference_gain_db(level: float) -> int:
    """By how many dB a difference with this peak is amplified so that it is heard, a multiple of 10.

    The amplified peak is −16 to −6 dBFS. Differences above −16 dBFS are played as they are, differences beyond full
    scale attenuated; silence stays silent.
    """
    if level <= 0:
        return 0
    if level > 1:
        return -math.ceil(dbfs(level) / _STEP_DB) * _STEP_DB
    return max(0, math.floor((_TARGET_DBFS - dbfs(level)) / _STEP_DB) * _STEP_DB)


def difference_label(level: float) -> str:
    """What a difference with this peak is, and how it is played: its true level first, then the gain."""
    if level == 0:
        return "silent: identical"
    gain_db = difference_gain_db(level)
    how = f"+{gain_db} dB amplified" if gain_db > 0 else f"−{-gain_db} dB attenuated" if gain_db else "as it is"
    return f"peak {dbfs_text(level)}, {how}"


def gain_text(gain: float) -> str:
    """A shared gain for reading."""
    return "0 dB" if gain == 1 else f"{20 * math.log10(gain):.1f} dB because a sample exceeds full scale".replace("-", "−")


@dataclass(frozen=True, slots=True)
class Difference:
    """How a condition differs from the reference, and how that is played.

    Attributes:
        samples: condition − reference in double precision, [samples]; None if their lengths differ.
        level: its true peak.
        gain_db: gain with which it is played, see :func:`difference_gain_db`.
        label: true level and gain in words, or why there is no track.
    """

    samples: Samples | None
    level: float
    gain_db: int
    label: str

    @property
    def is_silent(self) -> bool:
        """Whether there is nothing to hear: the two are identical, or have no difference track."""
        return self.samples is None or not self.samples.any()

    @property
    def played(self) -> Samples:
        """The samples as they are played, within ±1; empty if there are none."""
        return np.zeros(0) if self.samples is None else self.samples * 10 ** (self.gain_db / 20)


def difference_between(reference: Any, candidate: Any) -> Difference:
    """The difference track of two waveforms, or the reason why there is none.

    Raises:
        InputError: see :func:`mono`.
    """
    lengths = [len(mono("reference", reference)), len(mono("condition", candidate))]
    if lengths[0] != lengths[1]:
        how = f"{abs(lengths[1] - lengths[0]):,} samples {'longer' if lengths[1] > lengths[0] else 'shorter'} than the reference"
        return Difference(None, 0.0, 0, f"none, {how}")
    _, _, samples = difference_track(reference, candidate)
    level = peak(samples)
    return Difference(samples, level, difference_gain_db(level), difference_label(level))
