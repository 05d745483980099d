"""Any set of graphs, whether or not a configuration can say it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import pandas as pd

from vgraph_lab.qwen3_tts.settings import TARGET_IDS
from vgraph_lab.qwen3_tts.stateless import STATELESS_TARGET_ID

from .demand import Demand
from .search import AUDIO, CALLS, CHOICE, COMPUTED, REQUESTED, SAVED, Choices, Ints, extended, finished, merged, pruned, start
from .shapes import Shape, descriptor_of, kept_frames
from .spaces import MOST_BATCH_SIZES, Choice, batch_candidates, checked_sizes, frame_candidates, note

__all__ = ["FreeForm"]


@dataclass(frozen=True)
class FreeForm:
    """Any set of graphs, each with its own rows and frames: what a Routine could serve, whether or not a configuration says it.

    Nothing beats its choices in calls, audio, bytes and capture seconds. Time saved is told, not searched for: a graph's replays
    depend on which smaller graphs take calls from it, in two dimensions at once.

    Attributes:
        batch_sizes: row counts to choose from; see :class:`~.grids.StatelessGrid`.
        frame_sizes: frame counts to choose from for stateless calls; see there. For streamed calls, frames
            that occur where they cannot be padded, and the most that occur.
    """

    batch_sizes: tuple[int, ...] | None = None
    frame_sizes: tuple[int, ...] | None = None

    @property
    def target_ids(self) -> tuple[str, ...]:
        """All Targets."""
        return TARGET_IDS

    def candidates(self, traffic: pd.DataFrame) -> dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]]:
        """Row and frame counts that are tried, by Target and state; states that no graph can serve are left out."""
        found = {}
        for (target, state), own in _by_state(traffic):
            if target == STATELESS_TARGET_ID:
                occurring = set(own["frames"].tolist())
                frames: Iterable[int] = frame_candidates(occurring, max(occurring)) if self.frame_sizes is None else self.frame_sizes
            else:  # last chunks of fewer frames are served by what serves the others
                frames = {*own.loc[~own["may_pad_frames"], "frames"].tolist(), int(own["frames"].max())}
            batch = batch_candidates(self.batch_sizes, own, MOST_BATCH_SIZES)
            found[target, state] = batch, checked_sizes("frame_sizes", frames)
        return found

    def shapes(self, traffic: pd.DataFrame) -> list[Shape]:
        """Every combination that is tried."""
        return [
            Shape(target, state, rows, size)
            for (target, state), (batch, frames) in self.candidates(traffic).items()
            for rows in batch
            for size in frames
        ]

    def notes(self, traffic: pd.DataFrame) -> tuple[str, ...]:
        """What the search left out."""
        candidates = self.candidates(traffic)
        notes: list[str] = []
        for group, own in _by_state(traffic):
            batch, frames = candidates[group]
            name = " ".join(group).strip()
            notes += note(f"{name}: batch sizes", batch, own["batch_size"])
            notes += note(f"{name}: frame sizes", frames, own["frames"])
        return tuple(notes)

    def search(self, demand: Demand) -> tuple[Ints, list[Choice]]:
        """Each Target and state on its own, then all together."""
        choices, listed = Choices(), self.shapes(demand.traffic)
        number = {shape: place for place, shape in enumerate(listed)}
        families = [
            self._of_state(demand, group, batch, frames, number, choices)
            for group, (batch, frames) in self.candidates(demand.traffic).items()
        ]
        labels = start()
        for family in sorted(families, key=len):
            labels = merged(labels, family, choices)
        labels = finished(labels)
        found = []
        for row in labels:
            graphs = tuple(listed[place] for place in choices.items(int(row[CHOICE])))
            served = demand.serve(graphs)
            row[SAVED], row[COMPUTED], row[REQUESTED] = -served.saved_ns, served.computed_frames, served.requested_frames
            found.append(Choice(tuple(dict.fromkeys(graph.target for graph in graphs)), (), (), graphs))
        return labels, found

    def _of_state(
        self,
        demand: Demand,
        group: tuple[str, str],
        batch: tuple[int, ...],
        frames: tuple[int, ...],
        number: dict[Shape, int],
        choices: Choices,
    ) -> Ints:
        """From the most frames to the fewest, at most one graph of each; the state is how many rows any of them has so far.

        A call whose frames may be padded is served if any graph with as many frames or more has rows enough; another one only by
        a graph with its frames. Both are counted at the smallest candidate that is large enough.
        """
        rows = demand.groups[group]
        place = np.searchsorted(frames, demand.frames[rows])
        exact = np.zeros((len(frames), len(batch) + 1, 5), dtype=np.int64)  # served by a graph of these frames and so many rows
        padded = np.zeros_like(exact)  # served by the largest so far
        for at, size in enumerate(frames):
            here, may_pad = place == at, demand.may_pad[rows]
            for table, mine in ((exact, here & ~may_pad & (demand.frames[rows] == size)), (padded, here & may_pad)):
                for level, most in enumerate(batch, start=1):
                    within = rows[mine & (demand.rows[rows] <= most)]
                    table[at, level, [CALLS, AUDIO]] = -demand.calls[within].sum(), -demand.audio_frames[within].sum()
        shapes = [[Shape(*group, most, size) for most in batch] for size in frames]
        costs = np.stack([[demand.book.figure(name, row) for name in ("own", "capture_us", "shared")] for row in shapes]).swapaxes(1, 2)
        levels: dict[int, Ints] = {0: start()}
        for at in reversed(range(len(frames))):
            incoming: dict[int, list[Ints]] = {}
            for level, labels in levels.items():
                incoming.setdefault(level, []).append(extended(labels, padded[at, level]))
                for chosen, shape in enumerate(shapes[at], start=1):
                    after, cost = max(level, chosen), costs[at, chosen - 1]
                    incoming.setdefault(after, []).append(extended(labels, padded[at, after] + exact[at, chosen], cost, number[shape]))
            levels = {level: choices.add(pruned(np.concatenate(labels))) for level, labels in incoming.items()}
        return choices.add(pruned(np.concatenate(list(levels.values()))))


def _by_state(traffic: pd.DataFrame) -> Iterator[tuple[tuple[str, str], pd.DataFrame]]:
    """The traffic by Target and state, without states that no graph can serve."""
    for key, own in traffic.groupby(["target", "state"], sort=True):
        target, state = (str(part) for part in cast(tuple[object, object], key))
        if descriptor_of(Shape(target, state, 1, kept_frames(target, state) + 1)) is not None:
            yield (target, state), own
