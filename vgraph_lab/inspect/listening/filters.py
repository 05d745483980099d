"""Linear-phase filters, designed by SciPy's Kaiser windows and applied by torchaudio; and the low anchor of a MUSHRA test."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from vgraph_lab.errors import InputError

from .audio_set import AudioSet

__all__ = ["ANCHOR", "anchor_of", "kernel", "with_anchor"]

ANCHOR = "low anchor"
_PASS_HZ, _STOP_HZ, _ATTENUATION_DB = 3_500, 4_000, 60.0  # BS.1534-3 asks for −25 dB at 4 kHz and −50 dB at 4.5 kHz


@lru_cache(maxsize=16)
def kernel(kind: Literal["lowpass", "highpass"], cutoff_hz: float, width_hz: float, sample_rate: int) -> Tensor:
    """Impulse response float64 [taps], of odd length and symmetric, so that it delays nothing when it is centred.

    Args:
        kind: what passes.
        cutoff_hz: where half of the amplitude passes.
        width_hz: from pass to stop, centred on the cutoff; 60 dB are stopped.
        sample_rate: in Hz.
    """
    from scipy.signal import firwin, kaiserord  # only where it is needed: the import takes a while

    taps, beta = kaiserord(_ATTENUATION_DB, width_hz / (sample_rate / 2))
    return torch.from_numpy(firwin(taps | 1, cutoff_hz, window=("kaiser", beta), pass_zero=kind, fs=sample_rate))


def anchor_of(wav: Tensor, sample_rate: int) -> Tensor:
    """A waveform [samples] without what is above 3.5 kHz, as the low anchor of ITU-R BS.1534-3; float32, equally long.

    Raises:
        InputError: the sample rate is 8 kHz or less, so that there is nothing to take away.
    """
    if sample_rate <= 2 * _STOP_HZ:
        raise InputError(f"at {sample_rate} Hz nothing is above {_PASS_HZ} Hz to take away; an anchor needs more than {2 * _STOP_HZ} Hz.")
    from torchaudio.functional import fftconvolve

    response = kernel("lowpass", (_PASS_HZ + _STOP_HZ) / 2, _STOP_HZ - _PASS_HZ, sample_rate)
    whole: Tensor = fftconvolve(wav.double(), response)
    start = len(response) // 2
    return whole[start : start + len(wav)].float()


def with_anchor(audio: AudioSet, *, name: str = ANCHOR) -> AudioSet:
    """The set with one more condition: the reference's low anchor (:func:`anchor_of`).

    Raises:
        InputError: a condition has this name already, or the sample rate is 8 kHz or less.
    """
    if name in audio.conditions:
        raise InputError(f"there is a condition {name!r} already. Give the anchor another name.")
    waveforms = {condition: {sample: audio.waveform(condition, sample) for sample in audio.samples} for condition in audio.conditions}
    reference = waveforms[audio.conditions[0]]
    anchor = {sample: anchor_of(torch.tensor(wav), audio.sample_rate).numpy() for sample, wav in reference.items()}
    seams = {sample: audio.seams(sample) for sample in audio.samples}
    details = {sample: audio.detail(sample) for sample in audio.samples}
    return AudioSet.from_waveforms(waveforms | {name: anchor}, audio.sample_rate, seams=seams, details=details)
