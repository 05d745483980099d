"""Which widths a chunk is decoded in: captured ones where few of them make it up, else one eager call of its own width.

Cutting a chunk loses nothing, since incremental steps are exact; it only costs calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

__all__ = ["SPARE_CALLS", "ChunkWidths"]

SPARE_CALLS = 2
"""Calls that a chunk may take beyond those that its length makes unavoidable; with more, one eager call is the better one."""


class ChunkWidths:
    """Widths of the captured steps.

    Args:
        captured: frames of the steps that have graphs; empty without graphs.
        most_eager_frames: the most frames of one eager call, which bounds its memory.
    """

    def __init__(self, captured: Iterable[int], *, most_eager_frames: int) -> None:
        self.captured = tuple(sorted(set(captured)))
        self.most_eager_frames = most_eager_frames
        self.covering = lru_cache(maxsize=4096)(self._covering)

    def pieces(self, frames: int, *, is_last: bool) -> tuple[int, ...]:
        """Widths of the steps that decode ``frames`` ≥ 1 frames one after the other.

        Their sum is ``frames``, or more if the request ends with them: then the last step may be padded on the right.
        """
        return self.covering(frames, is_last) or self.eager(frames)

    def eager(self, frames: int) -> tuple[int, ...]:
        """The same without graphs."""
        whole, rest = divmod(frames, self.most_eager_frames)
        return (self.most_eager_frames,) * whole + ((rest,) if rest else ())

    def _covering(self, frames: int, is_last: bool) -> tuple[int, ...]:
        """Captured widths, largest first; none if there are no graphs or it would take too many of them."""
        if not self.captured:
            return ()
        largest = self.captured[-1]
        if is_last:
            before = (frames - 1) // largest
            left = frames - before * largest
            return (largest,) * before + (next(width for width in self.captured if width >= left),)
        # Fewer than `largest` of the smaller widths are ever of use: among so many, some add up to a multiple of it.
        before = max(0, frames // largest - largest)
        rest = self._fewest(frames - before * largest)
        found = (largest,) * before + rest
        return found if rest and len(found) <= -(-frames // largest) + SPARE_CALLS else ()

    def _fewest(self, frames: int) -> tuple[int, ...]:
        """The fewest captured widths whose sum is ``frames``, largest first; none if no sum is."""
        last: dict[int, int] = {}  # by sum: the width that was added last
        count = {0: 0}
        for total in range(1, frames + 1):
            options = [(count[total - width] + 1, width) for width in self.captured if total - width in count]
            if options:
                count[total], last[total] = min(options)
        found: list[int] = []
        while frames in last:
            found.append(last[frames])
            frames -= last[frames]
        return () if frames else tuple(sorted(found, reverse=True))
