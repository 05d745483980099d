"""The same samples under several conditions (eager, graph, streamed, original), for listening and for measuring.

On disk it is a folder as audiotools has it, ``<condition>/<sample>.wav``, so that recordings from elsewhere can be put
beside one's own::

    data/ab/eager/hello.wav      data/ab/eager/goodbye.wav
    data/ab/graph/hello.wav      data/ab/graph/goodbye.wav
    data/ab/audio_set.json       order, chunk seams and details; optional

Nothing is ever normalised or clipped.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vgraph_lab.errors import InputError

from .audio_folder import Listing, Samples, Subtype, check_complete, check_known, read_folder, write_folder
from .checks import is_name, is_text, is_whole

__all__ = ["AudioSet", "Samples", "Subtype"]

_LOUDEST = 128.0  # no float audio overshoots by 42 dB; integer PCM stored as floats does


class AudioSet:
    """Waveforms by condition and sample. Every condition has every sample; all are mono, at one rate. Immutable.

    Made by :meth:`from_waveforms` or :meth:`load`. Waveforms of one sample may differ in length between conditions.

    Attributes:
        sample_rate: in Hz.
        conditions: names; the first is the reference of every comparison.
        samples: names of what is heard.
    """

    def __init__(
        self,
        waveforms: Mapping[str, Mapping[str, Samples]],
        sample_rate: int,
        seams: Mapping[str, tuple[int, ...]],
        details: Mapping[str, str],
    ) -> None:
        """For this module; see :meth:`from_waveforms`, which checks."""
        self._waveforms, self._seams, self._details = waveforms, seams, details
        self._sample_rate, self._conditions = sample_rate, tuple(waveforms)
        self._samples = tuple(waveforms[self._conditions[0]])

    @property
    def sample_rate(self) -> int:
        """Sample rate in Hz."""
        return self._sample_rate

    @property
    def conditions(self) -> tuple[str, ...]:
        """Names of the conditions, the reference first."""
        return self._conditions

    @property
    def samples(self) -> tuple[str, ...]:
        """Names of the samples."""
        return self._samples

    def waveform(self, condition: str, sample: str) -> Samples:
        """Float32 [n] with full scale ±1, read-only, as it was given.

        Raises:
            InputError: no such condition or sample.
        """
        check_known("condition", condition, self._conditions)
        check_known("sample", sample, self._samples)
        return self._waveforms[condition][sample]

    def seams(self, sample: str) -> tuple[int, ...]:
        """Positions in samples at which a new chunk begins, ascending; empty if none are known.

        Raises:
            InputError: no such sample.
        """
        check_known("sample", sample, self._samples)
        return self._seams.get(sample, ())

    def detail(self, sample: str) -> str:
        """A line about the sample for people; empty if there is none.

        Raises:
            InputError: no such sample.
        """
        check_known("sample", sample, self._samples)
        return self._details.get(sample, "")

    def duration_s(self, sample: str) -> float:
        """Length of a sample in seconds, of its longest condition.

        Raises:
            InputError: no such sample.
        """
        return max(len(self.waveform(condition, sample)) for condition in self._conditions) / self._sample_rate

    def __repr__(self) -> str:
        seconds = sum(self.duration_s(sample) for sample in self._samples)
        return f"AudioSet({' | '.join(self._conditions)}: {len(self._samples)} samples, {seconds:.1f} s at {self._sample_rate} Hz)"

    # ----------------------------------------------------------------------------------------------------- making one

    @classmethod
    def from_waveforms(
        cls,
        waveforms: Mapping[str, Mapping[str, Tensor | np.ndarray[Any, Any]]],
        sample_rate: int,
        *,
        seams: Mapping[str, Sequence[int]] | None = None,
        details: Mapping[str, str] | None = None,
    ) -> AudioSet:
        """Check and copy waveforms.

        Args:
            waveforms: condition → sample → floats [n], [1, n] or [1, 1, n] with full scale ±1, on any device. They become
                float32, which is exact for all floats but float64. The first condition is the reference.
            sample_rate: of all of them, in Hz, below 2**31.
            seams: sample → positions at which a new chunk begins, ascending, between 0 and the end.
            details: sample → a line for people.

        Raises:
            InputError: no condition, no sample, a sample that a condition lacks, several channels, no floats, no values
                (sparse and meta tensors, ragged lists), NaN or infinity, integer PCM stored as floats, names or details that
                are no text, or seams or details that do not fit.
        """
        if not is_whole(sample_rate) or not 1 <= sample_rate < 2**31:
            raise InputError(f"sample_rate is {sample_rate!r}; a whole number of Hz from 1 to 2147483647 is needed, such as 24000.")
        if not isinstance(waveforms, Mapping) or not all(isinstance(group, Mapping) for group in waveforms.values()):
            raise InputError(f"waveforms are {reprlib.repr(waveforms)}; {_MAPPINGS}")
        if not waveforms:
            raise InputError(f"there is no condition; {_MAPPINGS}")
        samples = list(dict.fromkeys(name for group in waveforms.values() for name in group))
        check_complete({condition: list(group) for condition, group in waveforms.items()}, samples)
        for name in (*waveforms, *samples):
            if not is_name(name):
                raise InputError(f"conditions and samples have names that can be read, got {name!r}.")
        copies = {
            condition: {sample: _checked(f"{condition}/{sample}", group[sample]) for sample in samples}
            for condition, group in waveforms.items()
        }
        lengths = {sample: max(len(group[sample]) for group in copies.values()) for sample in samples}
        return cls(copies, int(sample_rate), _checked_seams(seams or {}, lengths), _checked_details(details or {}, samples))

    # -------------------------------------------------------------------------------------------------------- on disk

    def save(self, folder: str | Path, *, subtype: Subtype = "FLOAT", overwrite: bool = False) -> Path:
        """Write ``folder/<condition>/<sample>.wav`` and ``folder/audio_set.json``.

        All files are written aside and moved into place at the end. Recordings of other sets are never removed.

        Args:
            folder: made as needed.
            subtype: ``FLOAT`` gives back every bit; ``PCM_24`` is off by 2**-24 at most and refuses samples beyond ±1.
            overwrite: replace files of the same names.

        Returns:
            The folder.

        Raises:
            InputError: files that would be replaced, other recordings that would be read as part of this set, names that
                cannot be file names, samples that the subtype cannot hold, or a place that cannot be written.
        """
        root = Path(folder)
        seams = {sample: list(positions) for sample, positions in self._seams.items()}
        listing = Listing(list(self._conditions), list(self._samples), seams, dict(self._details))
        write_folder(root, self._waveforms, self._sample_rate, listing, subtype=subtype, overwrite=overwrite)
        return root

    @classmethod
    def load(cls, folder: str | Path, *, reference: str | None = None) -> AudioSet:
        """Read ``folder/<condition>/<sample>.wav``. Hidden files and files other than ``.wav`` are no part of it.

        Args:
            folder: with one subfolder per condition.
            reference: the condition that the others are compared with; by default the first that ``audio_set.json`` names,
                or without that file the first in alphabetical order.

        Raises:
            InputError: no such folder, nothing in it, files that are missing or are no audio, several channels, different
                rates, NaN or infinity, or a damaged or newer ``audio_set.json``.
        """
        waveforms, rate, listing = read_folder(Path(folder), reference)
        return cls.from_waveforms(waveforms, rate, seams=listing.seams, details=listing.details)


# ---------------------------------------------------------------------------------------------------------------- checks

_MAPPINGS = "two mappings are needed: {'eager': {'hello': waveform}, 'graph': {'hello': waveform}}."


def _checked(where: str, given: Any) -> Samples:
    if isinstance(given, Tensor) and not given.is_floating_point():
        raise InputError(f"{where} is {given.dtype}; {_FLOATS}")
    try:
        array = np.asarray(given.detach().float().cpu().numpy() if isinstance(given, Tensor) else given)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, sparse and meta tensors
        reason = str(error).splitlines()[0].rstrip(".")
        raise InputError(f"{where} has no values in a row ({reason}). Give a dense array or tensor of floats [samples].") from None
    if array.dtype.kind != "f":
        raise InputError(f"{where} is {array.dtype}; {_FLOATS}")
    if array.ndim == 0 or array.size == 0:
        raise InputError(f"{where} has no samples (shape {list(array.shape)}).")
    if math.prod(array.shape[:-1]) != 1:
        raise InputError(f"{where} has the shape {list(array.shape)}; one channel is needed, [samples]. {_mixdown(array.shape)}")
    bad = int((~np.isfinite(array)).sum())
    if bad:
        first = int(np.argmin(np.isfinite(array.reshape(-1))))
        raise InputError(f"{where} contains NaN or infinity: {bad} of {array.size} samples, the first at {first}. It cannot be played.")
    peak = float(np.abs(array).max())
    if peak > _LOUDEST:
        raise InputError(f"{where} reaches {peak:.0f}; full scale is ±1. Divide integer PCM by its full scale (32768 for int16).")
    copy: Samples = np.array(array.reshape(-1), dtype=np.float32)
    copy.setflags(write=False)
    return copy


_FLOATS = "a waveform is floating point with full scale ±1. Divide integer PCM by its full scale (32768 for int16)."


def _mixdown(shape: tuple[int, ...]) -> str:
    axis = len(shape) - 2 if shape[-2] <= shape[-1] else len(shape) - 1
    if len(shape) > 2 and math.prod(shape[:-2]) != 1:
        return "Give each row of a batch a name of its own."
    if shape[axis] == 1:
        return f"It is transposed: wav.squeeze({axis - len(shape)}) is one channel."
    return f"Mix {shape[axis]} channels down first: wav.mean({axis - len(shape)})."


def _checked_seams(seams: Mapping[str, Sequence[int]], lengths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    checked = {}
    for sample, positions in seams.items():
        check_known("sample", sample, list(lengths))
        try:
            array = np.asarray(positions)
        except ValueError:  # ragged
            array = np.zeros((0, 0))
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu") or (array[1:] <= array[:-1]).any():
            raise InputError(f"seams of {sample!r} are {str(positions)[:80]}; whole positions in ascending order are needed.")
        values = tuple(array.tolist())
        if values and not (values[0] > 0 and values[-1] < lengths[sample]):
            raise InputError(
                f"seams of {sample!r} run from {values[0]} to {values[-1]}; a seam is the first sample of a new chunk, "
                f"between 1 and {lengths[sample] - 1} here."
            )
        if values:
            checked[sample] = values
    return checked


def _checked_details(details: Mapping[str, str], samples: Sequence[str]) -> dict[str, str]:
    for sample, text in details.items():
        check_known("sample", sample, samples)
        if not is_text(text):
            raise InputError(f"the detail of {sample!r} is {reprlib.repr(text)}; it is a line of text.")
    return {sample: text for sample, text in details.items() if text}
