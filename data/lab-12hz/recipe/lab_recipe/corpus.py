"""Synthetic training speech: hibari-tts speaks the sentences, in one voice made into several.

A pitch factor r < 1 is lower and larger: the voice speaks 1 / r faster and is then stretched by resampling, so that pitch
and formants move together and the tempo stays. Needs hibari-tts, onnxruntime and scipy (README).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np

from .config import SAMPLE_RATE

__all__ = ["synthesise"]

Waveform = np.ndarray[Any, np.dtype[np.float32]]
Speaker = Callable[..., Waveform]

# The voice itself in three of ten utterances. Outside 0.78 … 1.10 a recogniser begins to mishear it.
_PITCH_FACTORS = (Fraction(1), Fraction(1), Fraction(1), *(Fraction(r, 100) for r in (78, 82, 86, 90, 94, 105, 110)))
_SLOWEST, _FASTEST = 0.92, 1.12
_QUIETEST_DB, _LOUDEST_DB = -26.0, -18.0
_PER_ROUND = 512

_speaker: Speaker | None = None  # one per process


def synthesise(sentences: Sequence[str], *, hours: float, processes: int, seed: int = 0) -> list[Waveform]:
    """Speak sentences in a random order until ``hours`` of speech are made or all are spoken.

    The result depends on ``seed`` alone, not on ``processes``.
    """
    order = [int(index) for index in np.random.default_rng(seed).permutation(len(sentences))]
    wanted, made, clips = hours * 3600 * SAMPLE_RATE, 0, []
    with ProcessPoolExecutor(processes, initializer=_start_speaker) as pool:
        for first in range(0, len(order), _PER_ROUND):
            batch = order[first : first + _PER_ROUND]
            for clip in pool.map(_speak, batch, [sentences[index] for index in batch], chunksize=8):
                clips.append(clip)
                made += len(clip)
                if made >= wanted:
                    return clips
    return clips


def _start_speaker() -> None:
    global _speaker
    from hibari import Hibari

    _speaker = Hibari(threads=1)


def _speak(index: int, text: str) -> Waveform:
    if _speaker is None:
        raise RuntimeError("the worker process has no speaker; it was not started by synthesise()")
    return speak(_speaker, index, text)


def speak(speaker: Speaker, index: int, text: str) -> Waveform:
    """One utterance at 24 kHz with a pitch, tempo and level that follow from its index."""
    from scipy.signal import resample_poly

    random = np.random.default_rng(index)
    pitch = _PITCH_FACTORS[random.integers(len(_PITCH_FACTORS))]
    tempo = random.uniform(_SLOWEST, _FASTEST)
    wav = speaker(text, speed=float(np.clip(tempo / float(pitch), 0.5, 2.0)), seed=index)
    if pitch != 1:
        wav = resample_poly(wav, pitch.denominator, pitch.numerator)
    level = 10 ** (random.uniform(_QUIETEST_DB, _LOUDEST_DB) / 20)
    scaled: Waveform = (wav * (level / (np.sqrt(np.mean(wav**2)) + 1e-9))).astype(np.float32)
    return scaled
