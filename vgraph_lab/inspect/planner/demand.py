"""Traffic and costs together, in whole numbers; and what a given set of graphs makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd

from .costs import CostBook
from .search import Ints
from .shapes import Shape
from .traffic import new_frames

__all__ = ["Demand", "Served"]


class Served(NamedTuple):
    """What a set of graphs makes of the traffic.

    Attributes:
        graph: for each row of the traffic, the place of the graph that serves it; -1 for none: int64 [rows].
        calls: calls served.
        audio_frames: frames that these decode (rows × new frames).
        saved_ns: their eager time minus their replay time.
        requested_frames: rows × frames that they ask for.
        computed_frames: rows × frames that the graphs compute for them.
        charge_bytes: static buffers and pool.
        capture_us: microseconds of all captures.
    """

    graph: Ints
    calls: int
    audio_frames: int
    saved_ns: int
    requested_frames: int
    computed_frames: int
    charge_bytes: int
    capture_us: int


@dataclass(frozen=True)
class Demand:
    """Checked traffic with the cost of every shape that matters.

    Attributes:
        traffic: see :data:`~.traffic.TRAFFIC_COLUMNS`.
        book: costs; has every shape of the traffic, and every shape that may be captured.
    """

    traffic: pd.DataFrame
    book: CostBook

    @cached_property
    def shapes(self) -> list[Shape]:
        """What each row of the traffic asks for."""
        return [Shape(*row) for row in self.traffic[["target", "state", "batch_size", "frames"]].itertuples(index=False, name=None)]

    @cached_property
    def groups(self) -> dict[tuple[str, str], Ints]:
        """Rows of the traffic by Target and state."""
        number = self.traffic.groupby(["target", "state"], sort=False).ngroup().to_numpy()
        firsts = self.traffic.drop_duplicates(["target", "state"])[["target", "state"]].itertuples(index=False, name=None)
        return {group: np.flatnonzero(number == place) for place, group in enumerate(firsts)}

    @cached_property
    def calls(self) -> Ints:
        """Calls of each row: int64 [rows]."""
        return self.traffic["calls"].to_numpy(dtype=np.int64)

    @cached_property
    def rows(self) -> Ints:
        """Batch size of each row: int64 [rows]."""
        return self.traffic["batch_size"].to_numpy(dtype=np.int64)

    @cached_property
    def frames(self) -> Ints:
        """Frames of each row: int64 [rows]."""
        return self.traffic["frames"].to_numpy(dtype=np.int64)

    @cached_property
    def may_pad(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether a graph with more frames may serve it: bool [rows]."""
        return self.traffic["may_pad_frames"].to_numpy(dtype=bool)

    @cached_property
    def audio_frames(self) -> Ints:
        """Frames that all calls of each row decode, rows × new frames: int64 [rows]."""
        return self.calls * self.rows * new_frames(self.traffic)

    @cached_property
    def eager_ns(self) -> Ints:
        """What all calls of each row take without graphs: int64 [rows]."""
        return self.calls * self.book.figure("eager_ns", self.shapes)

    @cached_property
    def figures(self) -> Ints:
        """Calls, audio frames, eager ns and requested frames of each row: int64 [rows, 4]."""
        return np.stack([self.calls, self.audio_frames, self.eager_ns, self.calls * self.rows * self.frames], axis=1)

    def serve(self, graphs: Iterable[Shape]) -> Served:
        """Who serves what, by the rule of the Routines: of the graphs that fit, the one with the least work."""
        listed = list(graphs)
        chosen = np.full(len(self.calls), -1, dtype=np.int64)
        by_group: dict[tuple[str, str], list[int]] = {}
        for place in sorted(range(len(listed)), key=lambda k: (listed[k].batch_size * listed[k].frames, listed[k].frames)):
            by_group.setdefault((listed[place].target, listed[place].state), []).append(place)
        for group, places in by_group.items():
            rows = self.groups.get(group)
            if rows is not None:
                chosen[rows] = self._first_fitting(rows, [listed[k] for k in places], np.array(places))
        return self._served(chosen, listed)

    def _first_fitting(self, rows: Ints, graphs: Sequence[Shape], places: Ints) -> Ints:
        batch, frames = (np.array([getattr(g, name) for g in graphs]) for name in ("batch_size", "frames"))
        wanted = self.frames[rows][:, None]
        fits = (batch >= self.rows[rows][:, None]) & np.where(self.may_pad[rows][:, None], frames >= wanted, frames == wanted)
        return np.where(fits.any(axis=1), places[fits.argmax(axis=1)], -1)

    def _served(self, chosen: Ints, graphs: Sequence[Shape]) -> Served:
        hit = chosen >= 0
        calls, served = self.calls[hit], chosen[hit]
        replay = self.book.figure("replay_ns", graphs) if graphs else np.zeros(0, dtype=np.int64)
        work = np.array([g.batch_size * g.frames for g in graphs], dtype=np.int64)
        shared = self.book.figure("shared", graphs) if graphs else np.zeros(1, dtype=np.int64)
        return Served(
            graph=chosen,
            calls=int(calls.sum()),
            audio_frames=int(self.audio_frames[hit].sum()),
            saved_ns=int(self.eager_ns[hit].sum() - (calls * replay[served]).sum()),
            requested_frames=int((calls * self.rows[hit] * self.frames[hit]).sum()),
            computed_frames=int((calls * work[served]).sum()),
            charge_bytes=int(self.book.figure("own", graphs).sum()) + int(shared.max()) if graphs else 0,
            capture_us=int(self.book.figure("capture_us", graphs).sum()) if graphs else 0,
        )
