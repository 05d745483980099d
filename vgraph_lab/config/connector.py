"""How codes reach the decoder: in chunks, with or without a ramp, with so much of the reference."""

from __future__ import annotations

import warnings
from typing import Annotated

from pydantic import BeforeValidator, NonNegativeInt, PositiveInt, ValidationInfo, field_validator

from vgraph_lab.errors import InputError

from .validation import Settings, as_tuple, joined

__all__ = ["ConnectorConfig"]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _path(info: ValidationInfo, key: str) -> str:
    return joined((info.context or {}).get("root", "connector"), key)


def _usable_ramp(value: object, info: ValidationInfo) -> object:
    """A ramp with entries below 1 is no ramp, with a warning; so is an empty one, without."""
    ramp = as_tuple(value)
    if not isinstance(ramp, tuple) or not all(_is_whole(frames) for frames in ramp):
        return ramp  # the type check that follows tells
    bad = [frames for frames in ramp if frames < 1]
    if bad:
        path = _path(info, "codec_chunk_ramp")
        warnings.warn(f"{path}: {list(ramp)} is switched off, since {bad} are not positive numbers of frames.", stacklevel=2)
    return None if bad or not ramp else ramp


class ConnectorConfig(Settings):
    """Chunk delivery: frames arrive one by one and are handed on in chunks.

    Attributes:
        codec_chunk_frames: frames of every chunk after the first ones.
        initial_codec_chunk_frames: frames of the first chunk. None or 0: it depends on the load when a request begins. More than
            a chunk is cut to a chunk, with a warning.
        codec_left_context_frames: frames of a reference that are handed on; a longer reference keeps its last ones.
        codec_chunk_ramp: frames of the first chunks in their order, in place of the initial chunk; steady chunks follow. A ramp
            with an entry below 1 is switched off, with a warning.
    """

    codec_chunk_frames: PositiveInt = 25
    initial_codec_chunk_frames: NonNegativeInt | None = 1
    codec_left_context_frames: NonNegativeInt = 72
    codec_chunk_ramp: Annotated[tuple[PositiveInt, ...] | None, BeforeValidator(_usable_ramp)] = None

    @field_validator("initial_codec_chunk_frames")
    @classmethod
    def _no_longer_than_a_chunk(cls, initial: int | None, info: ValidationInfo) -> int | None:
        chunk = info.data.get("codec_chunk_frames")
        if initial is None or chunk is None or initial <= chunk:
            return initial
        path = _path(info, "initial_codec_chunk_frames")
        warnings.warn(f"{path}: {initial} is more than codec_chunk_frames; the first chunk gets {chunk} frames.", stacklevel=2)
        return int(chunk)

    @property
    def ramp(self) -> tuple[int, ...]:
        """Frames of the first chunks; empty for none."""
        return self.codec_chunk_ramp or ()

    @property
    def first_chunk_choices(self) -> tuple[int, ...]:
        """How many frames a first chunk can have, ascending: one size, or powers of two from 2 to the largest below a chunk."""
        if self.ramp:
            return self.ramp[:1]
        if self.initial_codec_chunk_frames:
            return (self.initial_codec_chunk_frames,)
        powers = tuple(2**n for n in range(1, (self.codec_chunk_frames - 1).bit_length()))
        return powers or (self.codec_chunk_frames,)

    def first_chunk_frames(self, load: float = 0.0) -> int:
        """Frames of the first chunk of a request that begins at this load; fixed for the request from then on.

        Args:
            load: live requests over the most that may be live, from 0 to 1.

        Raises:
            InputError: the load is outside of that.
        """
        if not 0.0 <= load <= 1.0:
            raise InputError(f"load must be from 0 to 1 (live requests / max_num_seqs), got {load}.")
        choices = self.first_chunk_choices
        return choices[round(load * (len(choices) - 1))]
