"""The states that a streamed request passes through, derived once from how chunks are delivered.

A state is the number of suffix frames kept. With an initial chunk of 1, chunks of 25 and a window W of 72::

    start ──1──▶ 1 ──25──▶ 26 ──25──▶ 51 ──25──▶ 76 ──25──▶ 97 ⟲ 25
                                               rolling from here on: W + chunk

From W frames on only the last W are kept, so all later steps are one transition, from W to W + chunk. Routing and
Descriptor construction read the same table; a state outside it stays eager (``state_not_covered``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vgraph_lab.errors import ConfigError

__all__ = ["Transition", "TransitionTable"]


@dataclass(frozen=True, slots=True)
class Transition:
    """One step of a streamed request.

    Attributes:
        source: suffix frames before it; 0 is the start, and W stands for every state from W on. It names the transition.
        target: suffix frames after it. Not a name: a ramp can jump to where the rolling transition leads.
        is_rolling: whether the window rolls, i.e. W frames are kept before it.
    """

    source: int
    target: int
    is_rolling: bool = False

    @property
    def new_frames(self) -> int:
        """Frames that the step decodes; a shorter chunk is padded to as many."""
        return self.target - self.source


@dataclass(frozen=True)
class TransitionTable:
    """All transitions of one delivery schedule.

    Args:
        initial_frames: frames of the first chunk; a ramp's first entry takes its place.
        chunk_frames: frames of every steady chunk.
        window: W, the decoder's sliding window.
        ramp: frames of the first chunks, before the steady ones; empty for none.

    Raises:
        ConfigError: a size is not positive, or the first chunk is longer than the window can keep.
    """

    initial_frames: int
    chunk_frames: int
    window: int
    ramp: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("initial_frames", self.initial_frames), ("chunk_frames", self.chunk_frames)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")
        if self.window < 3:
            raise ConfigError(f"window must be at least 3 (two frames of convolution context and one more), got {self.window}.")
        if any(frames < 1 for frames in self.ramp):
            raise ConfigError(f"ramp must hold positive numbers of frames, got {list(self.ramp)}.")

    @cached_property
    def transitions(self) -> tuple[Transition, ...]:
        """In the order in which a request meets them; the rolling one is last and repeats."""
        sizes: Sequence[int] = self.ramp or (self.initial_frames,)
        found, state = [], 0
        for frames in sizes:
            if state >= self.window:
                break
            found.append(Transition(state, state + frames))
            state += frames
        while state < self.window:
            found.append(Transition(state, state + self.chunk_frames))
            state += self.chunk_frames
        found.append(Transition(self.window, self.window + self.chunk_frames, is_rolling=True))
        return tuple(found)

    @cached_property
    def _by_source(self) -> dict[int, Transition]:
        return {transition.source: transition for transition in self.transitions}

    def after(self, suffix_frames: int) -> Transition | None:
        """The transition that a request in this state takes next, or None if the state is not of this schedule."""
        return self._by_source.get(min(suffix_frames, self.window))

    def __str__(self) -> str:
        lines = ["kept  new  after"]
        for t in self.transitions:
            lines.append(f"{t.source:4d} {t.new_frames:4d} {t.target:6d}" + ("  rolling, repeats" if t.is_rolling else ""))
        return "\n".join(lines)
