"""How long utterances and references are, as numbers: for long runs in which nothing is decoded."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from vgraph_lab import bundled
from vgraph_lab.errors import InputError, did_you_mean
from vgraph_lab.qwen3_tts.codes import FRAME_RATE_HZ, read_codes

from .traffic import ServiceRequest

__all__ = ["LengthDistribution", "RequestShape", "draw_shapes", "shapes_of"]

_COLUMNS = ("frames", "duration_s", "weight")


class RequestShape(NamedTuple):
    """One request without its codes.

    Attributes:
        frames: frames of the utterance.
        ref_frames: frames of the reference as given, before the connector cuts it; 0 for an x-vector request.
    """

    frames: int
    ref_frames: int = 0


@dataclass(frozen=True)
class LengthDistribution:
    """Lengths in frames, each with a weight.

    Args:
        frames: whole numbers from 1.
        weights: as many finite numbers from 0, not all 0; all alike by default.

    Raises:
        InputError: no length, one below 1, or weights that are none.
    """

    frames: tuple[int, ...]
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        bad = [frames for frames in self.frames if type(frames) is not int or frames < 1]
        if not self.frames or bad:
            raise InputError(f"lengths must be one or more whole numbers of frames from 1, got {bad or 'none'}.")
        if self.weights:
            is_weight = all(math.isfinite(weight) and weight >= 0 for weight in self.weights)
            if len(self.weights) != len(self.frames) or not is_weight or not sum(self.weights):
                raise InputError(f"weights must be {len(self.frames)} finite numbers from 0 that are not all 0, got {self.weights}.")

    @classmethod
    def bundled(cls) -> LengthDistribution:
        """The bundled utterances, each as likely as the others."""
        return cls(_bundled_lengths())

    @classmethod
    def from_csv(cls, path: str | Path, *, frame_rate_hz: float = FRAME_RATE_HZ) -> LengthDistribution:
        """Lengths of a CSV file with a header: ``frames`` or ``duration_s``, and ``weight`` if they are not alike.

        Args:
            path: the file; other columns are left alone.
            frame_rate_hz: frames per second, for ``duration_s``. A duration counts as the frames that it begins.

        Raises:
            InputError: the file cannot be read, lacks the column, or a value is none; with its line.
        """
        try:
            with Path(path).open(encoding="utf-8-sig", newline="") as file:
                return cls._from_rows(csv.DictReader(file), str(path), frame_rate_hz)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise InputError(f"{path} cannot be read as a CSV file: {error}") from error

    @classmethod
    def _from_rows(cls, reader: csv.DictReader[str], name: str, frame_rate_hz: float) -> LengthDistribution:
        columns = list(reader.fieldnames or ())
        given = [column for column in _COLUMNS[:2] if column in columns]
        if len(given) != 1:
            near = "".join(did_you_mean(column, _COLUMNS) for column in columns[:3]) if not given else ""
            raise InputError(f"{name} must have either a column frames or a column duration_s, got {', '.join(columns) or 'none'}.{near}")
        frames: list[int] = []
        weights: list[float] = []
        for row in reader:
            try:
                value = float(row[given[0]])
                length = math.ceil(round(value * frame_rate_hz, 6)) if given[0] == "duration_s" else int(value)
                if length < 1 or (given[0] == "frames" and length != value):
                    raise ValueError(f"{given[0]} is {row[given[0]]}")
                frames.append(length)
                weights.append(float(row["weight"]) if "weight" in columns else 1.0)
            except (TypeError, ValueError, OverflowError) as error:
                raise InputError(f"{name}, line {reader.line_num}: {error}; expected a number above 0.") from error
        return cls(tuple(frames), tuple(weights))

    @property
    def mean(self) -> float:
        """Expected frames."""
        weights = self.weights or (1.0,) * len(self.frames)
        return sum(frames * weight for frames, weight in zip(self.frames, weights, strict=True)) / sum(weights)


def draw_shapes(
    count: int,
    *,
    lengths: LengthDistribution | None = None,
    references: LengthDistribution | None = None,
    icl_share: float = 0.5,
    seed: int = 0,
) -> Iterator[RequestShape]:
    """Requests drawn independently of each other, one at a time: a million of them take no memory.

    Args:
        count: how many.
        lengths: of utterances; the bundled ones by default.
        references: lengths of references; those of ``lengths`` by default.
        icl_share: probability that a request has a reference, 0 to 1.
        seed: the same arguments give the same requests.

    Raises:
        InputError: no request, or a share outside 0 to 1.
    """
    if count < 1:
        raise InputError(f"{count} requests cannot be drawn. Ask for one or more.")
    if not 0 <= icl_share <= 1:
        raise InputError(f"icl_share must be from 0 to 1, got {icl_share}.")
    of_speech = lengths or LengthDistribution.bundled()
    return _draw(count, of_speech, references or of_speech, icl_share, random.Random(seed))


def _draw(
    count: int, lengths: LengthDistribution, references: LengthDistribution, icl_share: float, draw: random.Random
) -> Iterator[RequestShape]:
    for start in range(0, count, 1024):
        now = min(1024, count - start)
        spoken = draw.choices(lengths.frames, lengths.weights or None, k=now)
        heard = draw.choices(references.frames, references.weights or None, k=now)
        for frames, ref_frames in zip(spoken, heard, strict=True):
            yield RequestShape(frames, ref_frames if draw.random() < icl_share else 0)


def shapes_of(requests: Iterable[ServiceRequest]) -> list[RequestShape]:
    """The shapes of requests that have codes, in their order."""
    return [RequestShape(r.frames, 0 if r.reference is None else int(r.reference.shape[-1])) for r in requests]


@lru_cache(maxsize=1)
def _bundled_lengths() -> tuple[int, ...]:
    clips: Sequence[bundled.Utterance] = bundled.utterances()
    files = {path: read_codes(path) for path in {clip.codes_file for clip in clips}}
    return tuple(int(files[clip.codes_file][clip.id].shape[-1]) for clip in clips)
