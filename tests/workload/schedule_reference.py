"""The connector as a machine that is fed frame by frame: an independent truth for schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Connector:
    """Collects frames and hands over a chunk when the running total reaches the next threshold."""

    opening: Sequence[int]
    steady: int
    thresholds: Iterator[int] = field(init=False)
    collected: list[int] = field(default_factory=list)
    total: int = 0

    def __post_init__(self) -> None:
        self.thresholds = self._thresholds()
        self.next_threshold = next(self.thresholds)

    def _thresholds(self) -> Iterator[int]:
        total = 0
        for size in self.opening:
            total += size
            yield total
        while True:
            total += self.steady
            yield total

    def push(self, frame: int) -> list[int] | None:
        """A frame arrives; a chunk if it completes one."""
        self.collected.append(frame)
        self.total += 1
        return self._take() if self.total == self.next_threshold else None

    def _take(self) -> list[int]:
        self.next_threshold = next(self.thresholds)
        chunk, self.collected = self.collected, []
        return chunk


def play(frames: int, opening: Sequence[int], steady: int, delay: int) -> list[tuple[list[int], int, bool]]:
    """(frames, time, is the last) of each chunk. Time ticks once per frame; the end is known ``delay`` ticks after the last one."""
    connector = Connector(opening, steady)
    handed_over: list[tuple[list[int], int, bool]] = []
    for tick in range(1, frames + delay + 1):
        chunk = connector.push(tick - 1) if tick <= frames else None
        if chunk is not None and not (tick == frames and delay == 0):
            handed_over.append((chunk, tick, False))
        if tick == frames + delay:
            handed_over.append((connector.collected if chunk is None or delay else chunk, tick, True))
    return handed_over
