"""One name for what a graph serves and what a call asks for: Target, state, rows, frames."""

from __future__ import annotations

import re
from typing import NamedTuple

from vgraph_lab.errors import InputError
from vgraph_lab.graphs.descriptor import Descriptor
from vgraph_lab.qwen3_tts.stateless import STATELESS_TARGET_ID
from vgraph_lab.qwen3_tts.stream_path import SUFFIX_TARGET_ID
from vgraph_lab.qwen3_tts.stream_routines import SuffixDescriptor

__all__ = ["STATELESS_TARGET_ID", "SUFFIX_TARGET_ID", "Shape", "descriptor_of", "kept_frames", "shape_of", "suffix_state"]

_SUFFIX_STATE = re.compile(r"(?P<mode>.+) (?P<kept>\d+)")


class Shape(NamedTuple):
    """What a graph serves, or what a call asks for. A graph never serves calls of another Target or state.

    Attributes:
        target: id of the Target.
        state: the request state; empty where there is only one. Of a suffix step it is the mode and the frames kept before it,
            such as ``icl 72``.
        batch_size: rows.
        frames: frames per row as the Descriptor counts them; of a suffix step, kept and new ones together.
    """

    target: str
    state: str
    batch_size: int
    frames: int

    def __str__(self) -> str:
        return f"{self.target} B{self.batch_size}×T{self.frames}" + (f" ({self.state})" if self.state else "")


def suffix_state(mode: str, kept: int) -> str:
    """The state of a suffix step."""
    return f"{mode} {kept}"


def shape_of(target_id: str, descriptor: Descriptor) -> Shape:
    """The name of a Descriptor or of a runtime key."""
    is_suffix = isinstance(descriptor, SuffixDescriptor)
    state = suffix_state(descriptor.state, descriptor.source) if is_suffix else descriptor.state  # type: ignore[attr-defined]  # suffix descriptors have it
    return Shape(target_id, state, descriptor.batch_size, descriptor.frames)


def descriptor_of(shape: Shape) -> Descriptor | None:
    """The Descriptor of a graph; None for a state that no graph can serve, such as a reference longer than the window.

    Raises:
        InputError: the state of a suffix step is not one.
    """
    if shape.target == SUFFIX_TARGET_ID:
        mode, kept = _suffix_parts(shape.state)
        return SuffixDescriptor(shape.batch_size, shape.frames, mode, kept) if mode in ("icl", "xvec") else None
    return None if shape.state else Descriptor(shape.batch_size, shape.frames)


def kept_frames(target_id: str, state: str) -> int:
    """Of the frames that a shape counts, those that were decoded before.

    Raises:
        InputError: the state of a suffix step is not one.
    """
    return _suffix_parts(state)[1] if target_id == SUFFIX_TARGET_ID else 0


def _suffix_parts(state: str) -> tuple[str, int]:
    found = _SUFFIX_STATE.fullmatch(state)
    if found is None:
        raise InputError(f"state {state!r} of {SUFFIX_TARGET_ID}: expected the mode and the frames kept, such as 'icl 72' or 'xvec 26'.")
    return found["mode"], int(found["kept"])
