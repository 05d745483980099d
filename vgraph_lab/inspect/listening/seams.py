"""Where chunks meet: how a waveform differs from its reference there, and whether it clicks.

A click is a short burst of treble. Around a seam the treble (above 4 kHz) of 2 ms is compared

* with the same 2 ms of the reference: speech itself, a plosive for instance, may be just as sudden;
* with the mean energy of the 24 ms before and after: what stands in equally loud treble is not heard as a click.

The smaller of the two excesses is the click's level. From 6 dB on, four times the energy, it is called one. In the bundled
clips 1.2 % of all places exceed what is beside them by that much without any seam, so the reference is needed; and bf16,
whose rounding is the coarsest, exceeds both by 3.9 dB at most. Treble below −90 dBFS counts as −90 dBFS: at a full scale
of 90 dB SPL nobody hears it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from vgraph_lab.errors import InputError
from vgraph_lab.inspect.audio import dbfs, waveform_difference

from .audio_set import AudioSet, Samples
from .filters import kernel

__all__ = ["CLICK_THRESHOLD_DB", "SEAM_COLUMNS", "click_table", "seam_table"]

CLICK_THRESHOLD_DB = 6.0
"""Excess of treble from which a seam clicks."""

_HALF_S = 0.001  # the window is twice as long
_NEIGHBOURS = 12  # windows on each side
_CUTOFF_HZ, _WIDTH_HZ = 4_000.0, 2_000.0
_QUIETEST_DBFS = -90.0
_LOWEST_RATE_HZ = 8_000

SEAM_COLUMNS = {
    "sample": "what is heard",
    "condition": "which is compared with the reference",
    "seam": "number of the seam, from 1",
    "position_samples": "first sample of the new chunk",
    "position_s": "the same in seconds",
    "max_dbfs": "largest absolute difference within 1 ms of the seam, dB relative to full scale; −inf for identical",
    "rms_dbfs": "RMS of the difference there, likewise",
    "snr_db": "energy of the reference there over energy of the difference",
    "treble_dbfs": "RMS level above 4 kHz there",
    "reference_treble_dbfs": "the same in the reference",
    "neighbour_treble_dbfs": "the mean of the 24 ms before and after",
    "click_db": "by how much the treble exceeds both, at −90 dBFS or more each; NaN beyond the end of either waveform",
    "is_click": "whether that reaches 6 dB; missing where it is NaN",
    "verdict": "the same in words",
}
"""The columns of :func:`seam_table`, in order, with their meaning."""


def seam_table(audio: AudioSet) -> pd.DataFrame:
    """One row per sample, condition and seam, with the columns of :data:`SEAM_COLUMNS`. Empty if no seams are known.

    Raises:
        InputError: the set has one condition only, or a sample rate below 8 kHz.
    """
    check_comparable(audio)
    tables = [
        click_table(audio.waveform(audio.conditions[0], sample), audio.waveform(condition, sample), audio.seams(sample), audio.sample_rate)
        .assign(sample=sample, condition=condition)
        .reindex(columns=list(SEAM_COLUMNS))
        for sample in audio.samples
        for condition in audio.conditions[1:]
        if audio.seams(sample)
    ]
    if not tables:
        return pd.DataFrame({name: [] for name in SEAM_COLUMNS}).astype(_DTYPES)
    return pd.concat(tables, ignore_index=True).astype(_DTYPES)


_TEXTS, _COUNTS = ("sample", "condition", "verdict"), ("seam", "position_samples")
_DTYPES = {name: "str" if name in _TEXTS else "int64" if name in _COUNTS else "float64" for name in SEAM_COLUMNS} | {"is_click": "boolean"}


def check_comparable(audio: AudioSet) -> None:
    """Refuse a set that cannot be compared.

    Raises:
        InputError: it has one condition only, or a sample rate below 8 kHz.
    """
    if len(audio.conditions) < 2:
        raise InputError(f"there is nothing to compare {audio.conditions[0]!r} with: give at least two conditions, the reference first.")
    if audio.sample_rate < _LOWEST_RATE_HZ:
        raise InputError(f"the sample rate is {audio.sample_rate} Hz; measures of speech need {_LOWEST_RATE_HZ} Hz or more.")


def click_table(reference: Samples, candidate: Samples, seams: Sequence[int], sample_rate: int) -> pd.DataFrame:
    """The figures of one waveform's seams: the columns of :data:`SEAM_COLUMNS` but for ``sample`` and ``condition``.

    Args:
        reference: float32 [n].
        candidate: float32 [m].
        seams: positions in samples.
        sample_rate: in Hz, 8000 or more.
    """
    if not seams:
        return pd.DataFrame({name: [] for name in SEAM_COLUMNS if name not in ("sample", "condition")})
    half, common = round(_HALF_S * sample_rate), min(len(reference), len(candidate))
    treble, reference_treble = (_treble_dbfs(wav, seams, sample_rate) for wav in (candidate, reference))
    rows = []
    for number, position in enumerate(seams, start=1):
        row: dict[str, object] = {"seam": number, "position_samples": position, "position_s": position / sample_rate}
        if position >= common:
            row |= dict.fromkeys(_FIGURES, math.nan) | {"is_click": None, "verdict": "beyond the end of one of the waveforms"}
        else:
            window = slice(max(0, position - half), min(common, position + half))
            difference = waveform_difference(reference[window], candidate[window])
            here, there, beside = treble[number - 1, _NEIGHBOURS], reference_treble[number - 1, _NEIGHBOURS], _mean_dbfs(treble[number - 1])
            click_db = max(here, _QUIETEST_DBFS) - max(there, beside, _QUIETEST_DBFS)
            is_click = click_db >= CLICK_THRESHOLD_DB
            row |= {"max_dbfs": difference.max_dbfs, "rms_dbfs": difference.rms_dbfs, "snr_db": difference.snr_db}
            row |= {"treble_dbfs": here, "reference_treble_dbfs": there, "neighbour_treble_dbfs": beside, "click_db": click_db}
            row |= {"is_click": is_click, "verdict": _in_words(click_db, is_click)}
        rows.append(row)
    return pd.DataFrame(rows, columns=[name for name in SEAM_COLUMNS if name not in ("sample", "condition")])


_FIGURES = ("max_dbfs", "rms_dbfs", "snr_db", "treble_dbfs", "reference_treble_dbfs", "neighbour_treble_dbfs", "click_db")


def _in_words(click_db: float, is_click: bool) -> str:
    if is_click:
        return f"click: treble {click_db:.1f} dB above the reference and its neighbours, {CLICK_THRESHOLD_DB:g} dB make a click"
    return "no click: treble no louder than in the reference and beside" if click_db <= 0 else f"no click: treble {click_db:.1f} dB above"


def _mean_dbfs(levels: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return dbfs(math.sqrt(float(np.mean(10 ** (np.delete(levels, _NEIGHBOURS) / 10)))))


def _treble_dbfs(wav: Samples, seams: Sequence[int], sample_rate: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """RMS levels [seams, windows] of the treble; the window of the seam is in the middle. Silence lies beyond both ends."""
    from torchaudio.functional import fftconvolve  # only where it is needed: the import takes a while

    cutoff_hz = min(_CUTOFF_HZ, sample_rate / 4)
    response = kernel("highpass", cutoff_hz, min(_WIDTH_HZ, cutoff_hz), sample_rate)
    width = 2 * round(_HALF_S * sample_rate)
    reach = (2 * _NEIGHBOURS + 1) * width // 2 + len(response) // 2
    longest = max([len(wav), *(position + 1 for position in seams)])
    padded = torch.zeros(longest + 2 * reach, dtype=torch.float64)
    padded[reach : reach + len(wav)] = torch.from_numpy(wav.copy()).double()
    pieces = padded[torch.tensor(seams, dtype=torch.int64)[:, None] + torch.arange(2 * reach)]
    treble: Tensor = fftconvolve(pieces, response[None], mode="valid")[:, : (2 * _NEIGHBOURS + 1) * width]
    energy = treble.reshape(len(seams), 2 * _NEIGHBOURS + 1, width).square().mean(dim=-1)
    return np.vectorize(dbfs, otypes=[np.float64])(energy.sqrt().numpy())  # type: ignore[no-any-return]  # np.vectorize is untyped
