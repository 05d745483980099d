"""The states that a streamed request passes through, derived once from how chunks are delivered.

A state is the number of suffix frames kept. With an initial chunk of 1, chunks of 25 and a window W of 72::

    start ──1──▶ 1 ──25──▶ 26 ──25──▶ 51 ──25──▶ 76 ──25──▶ 97 ⟲ 25
                                               rolling from here on: W + chunk

From W frames on only the last W are kept, so all later steps are one transition, from W to W + chunk. Routing and
Descriptor construction read the same table; a state outside it stays eager (``state_not_covered``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from vgraph_lab.config import ConnectorConfig
from vgraph_lab.errors import ConfigError

__all__ = ["Transition", "TransitionTable"]


@dataclass(frozen=True, slots=True, order=True)
class Transition:
    """One step of a streamed request.

    Attributes:
        source: suffix frames before it; 0 is the start, and W stands for every state from W on.
        target: suffix frames after it. Alone it is no name: a ramp can jump to where the rolling transition leads.
        is_rolling: whether the window rolls, i.e. W frames are kept before it.
    """

    source: int
    target: int
    is_rolling: bool = False

    @property
    def new_frames(self) -> int:
        """Frames that the step decodes; a shorter last chunk is padded to as many."""
        return self.target - self.source


@dataclass(frozen=True)
class TransitionTable:
    """All transitions of one delivery schedule.

    Args:
        initial_frames: possible sizes of the first chunk (one, unless it depends on load); a ramp's first entry takes their place.
        chunk_frames: frames of every steady chunk.
        window: W, the decoder's sliding window.
        ramp: frames of the first chunks, before the steady ones; empty for none.

    Raises:
        ConfigError: a size is not positive, or the window is too short for the convolution context.
    """

    initial_frames: tuple[int, ...]
    chunk_frames: int
    window: int
    ramp: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, sizes in (("initial_frames", self.initial_frames), ("chunk_frames", (self.chunk_frames,)), ("ramp", self.ramp)):
            if any(frames < 1 for frames in sizes):
                raise ConfigError(f"{name} must be at least 1 frame, got {', '.join(map(str, sizes))}.")
        if not self.initial_frames:
            raise ConfigError("initial_frames must hold at least one size.")
        if self.window < 3:
            raise ConfigError(f"window must be at least 3 (two frames of convolution context and one more), got {self.window}.")

    @classmethod
    def from_connector(cls, connector: ConnectorConfig, window: int) -> TransitionTable:
        """The table of a resolved connector and a decoder's window."""
        return cls(connector.first_chunk_choices, connector.codec_chunk_frames, window, connector.ramp)

    @cached_property
    def transitions(self) -> tuple[Transition, ...]:
        """By source, then target; the rolling one is last and repeats."""
        found: set[Transition] = set()
        for first in self.ramp[:1] or self.initial_frames:
            state = 0
            for frames in (first, *self.ramp[1:]):
                if state < self.window:
                    found.add(Transition(state, state + frames))
                    state += frames
            while state < self.window:
                found.add(Transition(state, state + self.chunk_frames))
                state += self.chunk_frames
        return (*sorted(found), Transition(self.window, self.window + self.chunk_frames, is_rolling=True))

    @cached_property
    def starts(self) -> tuple[Transition, ...]:
        """First chunks, shortest first."""
        return tuple(t for t in self.transitions if t.source == 0)

    @cached_property
    def steps(self) -> tuple[Transition, ...]:
        """Everything after the first chunk."""
        return tuple(t for t in self.transitions if t.source > 0)

    @cached_property
    def largest_chunk(self) -> int:
        """The most new frames that any chunk of this schedule brings; a ramp may go on after the window has begun to roll."""
        return max(*(self.ramp or self.initial_frames), self.chunk_frames)

    @cached_property
    def _steps_by_source(self) -> dict[int, Transition]:
        return {step.source: step for step in self.steps}

    def after(self, suffix_frames: int, new_frames: int = 1) -> Transition | None:
        """The transition that a request in this state takes, or None if the schedule has none.

        Args:
            suffix_frames: frames so far; 0 before the first chunk.
            new_frames: size of the first chunk, which decides among several initial sizes; later steps do not depend on it.
        """
        if suffix_frames == 0:
            return next((start for start in self.starts if start.new_frames >= new_frames), None)
        return self._steps_by_source.get(min(suffix_frames, self.window))

    def __str__(self) -> str:
        lines = ["kept  new  after"]
        for t in self.transitions:
            lines.append(f"{t.source:4d} {t.new_frames:4d} {t.target:6d}" + ("  rolling, repeats" if t.is_rolling else ""))
        return "\n".join(lines)
