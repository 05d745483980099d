"""An honest difference between two waveforms, and whether it is as small as it must be.

Levels are in dBFS: 20 log10 of an amplitude relative to full scale, ±1. Nothing is normalised, aligned or cut: two
waveforms of different lengths differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vgraph_lab.errors import InputError

__all__ = [
    "EXACT",
    "Tolerance",
    "Verdict",
    "Waveform",
    "WaveformDifference",
    "dbfs",
    "dbfs_text",
    "tolerance_for",
    "verdict",
    "waveform_difference",
]

Waveform: TypeAlias = "Tensor | np.ndarray[Any, np.dtype[np.floating[Any]]]"

_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def dbfs(amplitude: float) -> float:
    """An amplitude ≥ 0 in dB relative to full scale; −inf for silence."""
    return 20 * math.log10(amplitude) if amplitude > 0 else -math.inf


def dbfs_text(amplitude: float) -> str:
    """An amplitude for reading: ``−128.8 dBFS``, ``−∞ dBFS``."""
    return f"{dbfs(amplitude):.1f} dBFS".replace("-", "−").replace("inf", "∞")


@dataclass(frozen=True, slots=True)
class WaveformDifference:
    """How a candidate differs from its reference. Figures are over the samples that both have.

    Attributes:
        reference_samples: length of the reference.
        candidate_samples: length of the candidate.
        max_abs: largest absolute difference; inf where a sample is NaN or infinite.
        rms: root mean square of the difference; likewise.
        snr_db: energy of the reference over energy of the difference; inf if there is no difference.
        first_differing_sample: index on the time axis, or None if all samples are equal bit for bit.
        nonfinite_samples: samples of either waveform that are NaN or infinite.
    """

    reference_samples: int
    candidate_samples: int
    max_abs: float
    rms: float
    snr_db: float
    first_differing_sample: int | None
    nonfinite_samples: int

    @property
    def max_dbfs(self) -> float:
        """Largest absolute difference in dBFS; −inf for identical waveforms."""
        return dbfs(self.max_abs)

    @property
    def rms_dbfs(self) -> float:
        """RMS of the difference in dBFS; −inf for identical waveforms."""
        return dbfs(self.rms)

    @property
    def has_equal_length(self) -> bool:
        """Whether both waveforms have the same number of samples."""
        return self.reference_samples == self.candidate_samples

    @property
    def is_identical(self) -> bool:
        """Whether both waveforms are equal bit for bit."""
        return self.first_differing_sample is None


def waveform_difference(reference: Waveform, candidate: Waveform) -> WaveformDifference:
    """Compare two waveforms [..., samples] of one dtype; all axes but the last must agree.

    Raises:
        InputError: not floating point, different dtypes, different leading axes, or no samples.
    """
    a, b = _checked("reference", reference), _checked("candidate", candidate)
    if a.dtype != b.dtype or a.shape[:-1] != b.shape[:-1]:
        raise InputError(
            f"reference is {a.dtype} {list(a.shape)} and candidate {b.dtype} {list(b.shape)}: "
            "dtype and all axes but the last must agree, so that every sample has its counterpart."
        )
    samples = min(a.shape[-1], b.shape[-1])
    first = _first_differing(a[..., :samples], b[..., :samples])
    if first is None and a.shape[-1] != b.shape[-1]:
        first = samples
    nonfinite = sum(int((~torch.isfinite(waveform)).sum()) for waveform in (a, b))
    x, error = a[..., :samples].double(), (a[..., :samples].double() - b[..., :samples].double()).abs()
    if nonfinite:
        max_abs, rms, snr_db = math.inf, math.inf, -math.inf
    else:
        max_abs, rms = float(error.max()), float(error.square().mean().sqrt())
        snr_db = _ratio_db(float(x.square().mean()), rms**2)
    return WaveformDifference(a.shape[-1], b.shape[-1], max_abs, rms, snr_db, first, nonfinite)


def _checked(name: str, waveform: Waveform) -> Tensor:
    if not isinstance(waveform, Tensor):  # torch takes neither strides below 0 nor, without a warning, what is read-only
        waveform = torch.from_numpy(np.require(waveform, requirements=["C", "W"]))
    tensor = waveform.detach()
    if tensor.dtype not in _BITS:
        raise InputError(f"{name} is {tensor.dtype}; a waveform is floating point with full scale ±1.")
    if tensor.dim() == 0 or tensor.numel() == 0:
        raise InputError(f"{name} has no samples (shape {list(tensor.shape)}).")
    return tensor.cpu().contiguous()


def _first_differing(a: Tensor, b: Tensor) -> int | None:
    bits = _BITS[a.dtype]
    differs = (a.contiguous().view(bits) != b.contiguous().view(bits)).reshape(-1, a.shape[-1]).any(dim=0)
    return int(differs.int().argmax()) if bool(differs.any()) else None


def _ratio_db(signal: float, error: float) -> float:
    if error == 0:
        return math.inf
    return 10 * math.log10(signal / error) if signal > 0 else -math.inf


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest absolute difference that is accepted, and why it is not zero.

    Attributes:
        max_abs: amplitude relative to full scale; 0 demands equality bit for bit.
        why: where the figure comes from.
    """

    max_abs: float
    why: str


EXACT = Tolerance(0.0, "the same operations on the same shapes give the same bits")
"""For a graph that was captured at exactly the shape of the call."""

_PADDED = {
    ("cpu", torch.float32): 1e-6,
    ("cpu", torch.bfloat16): 2e-2,
    ("cpu", torch.float16): 2e-3,
    ("cuda", torch.float32): 1e-5,
    ("cuda", torch.bfloat16): 2e-2,
    ("cuda", torch.float16): 2e-3,
}


def tolerance_for(dtype: torch.dtype, device: str | torch.device) -> Tolerance:
    """What a padded call may differ by from eager: libraries pick other kernels, so sums are rounded in another order.

    CUDA fp32 means fp32 without TF32; set ``torch.backends.cudnn.allow_tf32`` and
    ``torch.backends.cuda.matmul.allow_tf32`` to False before comparing. CUDA bf16 and fp16 are reproducible at all, eager
    included, only with ``torch.backends.cudnn.deterministic`` set to True.

    The figures are more than twice the largest difference measured with the bundled checkpoint at 49 to 69 frames: in
    fp32, bf16 and fp16 3.6e-7, 4.9e-3 and 5.6e-4 on a CPU, and 8.2e-7, 6.3e-3 and 4.9e-4 on an H200. Other weights may
    need other figures: a small decoder with random weights amplified rounding to 7.6e-5 in fp32 on a CPU.

    Raises:
        InputError: no figure is stated for this dtype and device.
    """
    key = (torch.device(device).type, dtype)
    if key not in _PADDED:
        stated = ", ".join(f"{d} on {kind}" for kind, d in _PADDED)
        raise InputError(f"no tolerance is stated for {dtype} on {key[0]}. Stated: {stated}. Pass a Tolerance of your own.")
    return Tolerance(_PADDED[key], f"rounding of {str(dtype).removeprefix('torch.')} on {key[0]} when another shape is computed")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a difference is as small as it must be, in words that stand alone."""

    passed: bool
    text: str

    def __str__(self) -> str:
        return self.text


def verdict(difference: WaveformDifference, tolerance: Tolerance) -> Verdict:
    """Judge a difference: identical, within the tolerance, or not equal."""
    d = difference
    if d.is_identical:
        return Verdict(True, "identical, bit for bit")
    if not d.has_equal_length:
        return Verdict(False, f"not equal: {d.candidate_samples} samples instead of {d.reference_samples}")
    if d.nonfinite_samples:
        return Verdict(False, f"not equal: {d.nonfinite_samples} samples are NaN or infinite")
    level, limit = dbfs_text(d.max_abs), dbfs_text(tolerance.max_abs)
    if tolerance.max_abs > 0 and d.max_abs <= tolerance.max_abs:
        return Verdict(True, f"within tolerance: peak {level}, {limit} allowed")
    allowed = f"{limit} allowed" if tolerance.max_abs > 0 else "equality bit for bit expected"
    return Verdict(False, f"not equal: peak {level} from sample {d.first_differing_sample}, {allowed}")
