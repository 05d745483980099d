"""Listening by number: every condition of an audio set against its reference, with a verdict that names its limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor

from vgraph_lab.errors import InputError
from vgraph_lab.inspect.audio import WaveformDifference, waveform_difference
from vgraph_lab.inspect.parity import Comparison
from vgraph_lab.inspect.speech_metrics import log_mel_distance, log_spectral_distance_db, si_sdr_db, stoi_or_reason, word_errors
from vgraph_lab.inspect.stream_parity import StreamComparison

from .audio_set import AudioSet
from .limits import ListeningLimits, limits_for
from .seams import check_comparable, click_table

if TYPE_CHECKING:
    from vgraph_lab.inspect.recogniser import Recogniser

__all__ = ["LISTENING_COLUMNS", "WORD_COLUMNS", "audio_set_of", "listening_table"]

LISTENING_COLUMNS = {
    "sample": "what is heard",
    "condition": "which is compared",
    "reference": "with which",
    "length_samples": "of the condition",
    "reference_length_samples": "of the reference; all measures are over what both have",
    "first_differing_sample": "position; missing if all samples are equal bit for bit",
    "max_dbfs": "largest absolute difference, dB relative to full scale; −inf for identical",
    "rms_dbfs": "RMS of the difference, likewise",
    "snr_db": "energy of the reference over energy of the difference; inf for identical, −inf if the reference is silence",
    "si_sdr_db": "scale-invariant signal-to-distortion ratio; inf for identical, NaN for silence",
    "log_spectral_distance_db": "RMS distance of power spectra (1024 samples), averaged over time",
    "mel_distance_db": "mean absolute distance of mel magnitudes at three resolutions",
    "stoi": "intelligibility, 1 is best; NaN for less than 0.4 s of speech",
    "seams": "chunk seams inside both",
    "clicks": "seams that click (see seam_table)",
    "click_db": "worst of them: treble above the reference and the neighbourhood; NaN without seams",
    "passed": "whether all limits are kept; missing where the condition is not judged",
    "verdict": "the same in words, with the limits",
    "note": "what was not measured, and why; other lengths",
}
"""The columns of :func:`listening_table`, in order, with their meaning."""

WORD_COLUMNS = {
    "words": "words of the text",
    "word_errors": "words substituted, inserted or deleted by what the recogniser hears",
    "word_error_rate": "errors over words; NaN for a text without words",
    "heard": "what the recogniser hears",
}
"""Further columns of :func:`listening_table` with a recogniser."""


def listening_table(
    audio: AudioSet,
    *,
    limits: ListeningLimits | Mapping[str, ListeningLimits | None] | None = None,
    recogniser: Recogniser | None = None,
    texts: Mapping[str, str] | None = None,
) -> pd.DataFrame:
    """Measure and judge every condition but the reference.

    Args:
        audio: at least two conditions, the reference first.
        limits: what is accepted; by default those of float32 for every condition. A mapping gives each condition limits of
            its own; conditions with None or without any are measured and not judged, as another voice would be.
        recogniser: counts word errors, for instance :class:`~vgraph_lab.inspect.recogniser.WhisperTiny`.
        texts: sample → what is said; by default what the recogniser hears in the reference.

    Returns:
        One row per sample and condition, with the columns of :data:`LISTENING_COLUMNS`, and of :data:`WORD_COLUMNS` if there
        is a recogniser.

    Raises:
        InputError: one condition only, a sample rate below 8 kHz, limits for a condition that is not there, or texts
            without a recogniser or without some sample.
    """
    check_comparable(audio)
    chosen = _limits_by_condition(audio, limits)
    words = _Words(audio, recogniser, texts) if recogniser else None
    if texts is not None and recogniser is None:
        raise InputError("texts are of use with a recogniser only. Pass recogniser=WhisperTiny() (extra 'voice').")
    rows = []
    for sample in audio.samples:
        for condition in audio.conditions[1:]:
            row = _measured(audio, condition, sample, chosen[condition])
            rows.append(row | (words.errors(condition, sample) if words else {}))
    columns = [*LISTENING_COLUMNS, *(WORD_COLUMNS if words else ())]
    return pd.DataFrame(rows, columns=columns).astype({"first_differing_sample": "Int64", "passed": "boolean"})


def _limits_by_condition(
    audio: AudioSet, limits: ListeningLimits | Mapping[str, ListeningLimits | None] | None
) -> dict[str, ListeningLimits | None]:
    judged = audio.conditions[1:]
    if limits is None or isinstance(limits, ListeningLimits):
        return dict.fromkeys(judged, limits or limits_for(torch.float32))
    unknown = [name for name in limits if name not in judged]
    if unknown:
        raise InputError(f"limits are given for {', '.join(map(repr, unknown))}; compared are {', '.join(map(repr, judged))}.")
    return {condition: limits.get(condition) for condition in judged}


def _measured(audio: AudioSet, condition: str, sample: str, limits: ListeningLimits | None) -> dict[str, object]:
    reference, candidate = audio.waveform(audio.conditions[0], sample), audio.waveform(condition, sample)
    difference = waveform_difference(reference, candidate)
    common = min(len(reference), len(candidate))
    a, b = torch.tensor(reference[:common]), torch.tensor(candidate[:common])
    clicks = click_table(reference, candidate, [p for p in audio.seams(sample) if p < common], audio.sample_rate)
    measures, notes = _measures(a, b, audio.sample_rate, difference)
    figures = measures | {"clicks": int(clicks["is_click"].sum())}
    passed, words = _verdict(difference, figures, limits, is_silent=not bool(a.any()))
    if len(reference) != len(candidate):
        more = len(candidate) - len(reference)
        notes.insert(0, f"{abs(more)} samples {'longer' if more > 0 else 'shorter'} than the reference: the first {common} are compared")
    return {
        "sample": sample,
        "condition": condition,
        "reference": audio.conditions[0],
        "length_samples": len(candidate),
        "reference_length_samples": len(reference),
        "first_differing_sample": difference.first_differing_sample,
        "rms_dbfs": difference.rms_dbfs,
        **figures,
        "seams": len(clicks),
        "click_db": float(clicks["click_db"].max()) if len(clicks) else math.nan,
        "passed": passed,
        "verdict": words,
        "note": "; ".join(notes),
    }


def _measures(a: Tensor, b: Tensor, sample_rate: int, difference: WaveformDifference) -> tuple[dict[str, float], list[str]]:
    si_sdr, no_si_sdr = si_sdr_db(a, b)
    intelligibility, no_stoi = stoi_or_reason(a, b, sample_rate=sample_rate)
    measures = {
        "max_dbfs": difference.max_dbfs,
        "snr_db": difference.snr_db,
        "si_sdr_db": si_sdr,
        "log_spectral_distance_db": log_spectral_distance_db(a, b),
        "mel_distance_db": 20 * log_mel_distance(a, b, sample_rate=sample_rate),
        "stoi": intelligibility,
    }
    return measures, [note for note in (no_si_sdr, no_stoi) if note]


def _verdict(
    difference: WaveformDifference, figures: Mapping[str, float], limits: ListeningLimits | None, *, is_silent: bool
) -> tuple[bool | None, str]:
    if difference.is_identical:
        return True, "identical, bit for bit"
    if limits is None:
        return None, "not judged: no limits were given for this condition"
    judged = dict(figures)
    if is_silent:
        judged["snr_db"] = math.nan  # silence is no signal, so that its ratio to anything says nothing
    broken = limits.broken_by(judged)
    if not difference.has_equal_length:
        broken.insert(0, f"{difference.candidate_samples} samples instead of {difference.reference_samples}")
    if broken:
        return False, f"outside the limits of {limits.name}: {'; '.join(broken)}"
    return True, f"within the limits of {limits.name}: {'; '.join(limits.kept_by(judged))}"


class _Words:
    """Word errors of an audio set. Transcripts of the reference are kept, since every condition is compared with them."""

    def __init__(self, audio: AudioSet, recogniser: Recogniser, texts: Mapping[str, str] | None) -> None:
        missing = [] if texts is None else [sample for sample in audio.samples if sample not in texts]
        if missing:
            raise InputError(f"texts lack {', '.join(map(repr, missing[:6]))}. Give one for each sample, or leave texts out.")
        self._audio, self._recogniser = audio, recogniser
        self._texts = {sample: self._hear(audio.conditions[0], sample) if texts is None else texts[sample] for sample in audio.samples}

    def _hear(self, condition: str, sample: str) -> str:
        return self._recogniser.transcribe(torch.tensor(self._audio.waveform(condition, sample)), self._audio.sample_rate)

    def errors(self, condition: str, sample: str) -> dict[str, object]:
        """The columns of :data:`WORD_COLUMNS`."""
        heard = self._hear(condition, sample)
        said = self._recogniser.words(self._texts[sample])
        errors = word_errors(said, self._recogniser.words(heard))
        rate = errors / len(said) if said else math.nan
        return {"words": len(said), "word_errors": errors, "word_error_rate": rate, "heard": heard}


def audio_set_of(
    comparisons: Sequence[Comparison | StreamComparison], sample_rate: int, *, details: Mapping[str, str] | None = None
) -> AudioSet:
    """Comparisons with eager as an audio set: the conditions ``eager`` and ``graph``, one sample per comparison.

    Chunk seams of streams are known; how a call was served, and the verdict, follow the details.

    Raises:
        InputError: no comparisons, two of one name, or waveforms of several rows.
    """
    names = [comparison.name for comparison in comparisons]
    if not names or len(set(names)) < len(names):
        raise InputError(f"comparisons are called {names}; at least one is needed, and no name twice.")
    waveforms = {"eager": {c.name: c.eager for c in comparisons}, "graph": {c.name: c.graph for c in comparisons}}
    facts, seams = {}, {}
    for comparison in comparisons:
        if isinstance(comparison, StreamComparison):
            facts[comparison.name] = f"{comparison.life.route()} · {comparison.text}"
            seams[comparison.name] = _seams_of([len(piece) for piece in comparison.life.pieces])
        else:
            facts[comparison.name] = f"{comparison.route} · {comparison.verdict}"
    given = details or {}
    lines = {name: " · ".join(filter(None, (given.get(name, ""), text))) for name, text in facts.items()}
    return AudioSet.from_waveforms(waveforms, sample_rate, seams=seams, details=lines)


def _seams_of(lengths: Sequence[int]) -> list[int]:
    ends = pd.Series([length for length in lengths if length], dtype="int64").cumsum().tolist()
    return ends[:-1]
