"""What a planner can choose from, in general: a space knows which graphs each of its choices captures, and searches them.

Sizes that occur in the traffic are candidates; where too
many occur for an exact search, a default set of them is, and :attr:`~Space.notes` says so. All searches are exact among their
candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import pandas as pd

from vgraph_lab.errors import ConfigError

from .demand import Demand
from .search import ADDED, FINISHED, Ints, pruned
from .shapes import Shape

__all__ = [
    "MOST_BATCH_SIZES",
    "MOST_SHARED_BATCH_SIZES",
    "Choice",
    "Space",
    "batch_candidates",
    "checked_sizes",
    "frame_candidates",
    "gains_of",
    "note",
    "one_front",
]

Owner = TypeVar("Owner")
MOST_BATCH_SIZES, MOST_SHARED_BATCH_SIZES = 8, 16
"""How many batch sizes are tried by default, if frame counts are chosen with them, and if they are the only choice."""
_MOST_FRAME_SIZES, _FRAME_STEP = 12, 25


class Choice(NamedTuple):
    """One choice of a space.

    Attributes:
        targets: the Targets that are captured; none for no graphs at all.
        batch_sizes: row counts, for each of which every shape is captured; empty in the free form.
        frame_sizes: frame counts of the stateless Target, those included that it always captures; empty elsewhere.
        graphs: the graphs.
    """

    targets: tuple[str, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    frame_sizes: tuple[int, ...] = ()
    graphs: tuple[Shape, ...] = ()


class Space(Protocol):
    """What a planner needs of a space."""

    @property
    def target_ids(self) -> tuple[str, ...]:
        """The Targets that it plans for."""

    def shapes(self, traffic: pd.DataFrame) -> list[Shape]:
        """Every shape that it may capture for this traffic; each must have a cost."""

    def search(self, demand: Demand) -> tuple[Ints, list[Choice]]:
        """Labels that nothing beats (see :mod:`.search`), and the choice behind each."""

    def notes(self, traffic: pd.DataFrame) -> tuple[str, ...]:
        """What the search left out, in words; empty if it tried all sizes that occur."""


def checked_sizes(name: str, sizes: Iterable[int]) -> tuple[int, ...]:
    """Sizes, each once and ascending.

    Raises:
        ConfigError: none, or something else than whole numbers from 1.
    """
    found = tuple(sizes)
    bad = [size for size in found if not isinstance(size, int) or isinstance(size, bool) or size < 1]
    if bad or not found:
        raise ConfigError(f"{name} must be one or more whole numbers from 1, got {list(found)}.")
    return tuple(sorted(set(found)))


def batch_candidates(given: Sequence[int] | None, traffic: pd.DataFrame, most: int) -> tuple[int, ...]:
    """Sizes to try: those given, or all that occur, or powers of two and the largest."""
    if given is not None:
        return checked_sizes("batch_sizes", given)
    occurring = sorted(traffic["batch_size"].unique().tolist())
    if len(occurring) <= most:
        return tuple(occurring)
    powers = [2**k for k in range(occurring[-1].bit_length())]
    return tuple(sorted({*powers, occurring[-1]}))


def note(axis: str, tried: Sequence[int], occurring: Iterable[int]) -> tuple[str, ...]:
    """Which sizes were tried and how many that occur were not; nothing if all were."""
    left_out = {int(size) for size in occurring} - set(tried)
    if not left_out:
        return ()
    return (
        f"{axis} tried: {', '.join(map(str, tried))}. Sizes that occur and were not tried: {len(left_out)}; such calls use the next "
        "larger graph. To try others, name them.",
    )


def frame_candidates(occurring: set[int], longest: int) -> set[int]:
    """Sizes to try: all that occur, or those rounded up, none above ``longest`` unless it occurs."""
    if len(occurring) <= _MOST_FRAME_SIZES:
        return set(occurring)
    rounded = {-(-size // _FRAME_STEP) * _FRAME_STEP for size in occurring}
    return {min(size, longest) if max(occurring) <= longest else size for size in rounded}


def gains_of(served: Ints, replay: Ints, work: Ints) -> Ints:
    """Gains of labels from :attr:`Demand.figures` of what is served [i, j, cell, 4] and a graph's ns and frames [j, cell]."""
    calls = served[..., 0]
    saved = served[..., 2].sum(axis=2) - (calls * replay).sum(axis=2)
    computed = (calls * work).sum(axis=2)
    return np.stack([-calls.sum(axis=2), -served[..., 1].sum(axis=2), -saved, computed, served[..., 3].sum(axis=2)], axis=2)


def one_front(found: list[tuple[Ints, Owner]]) -> tuple[Ints, list[Owner]]:
    """One front of several families of labels, and whose each label is."""
    families = []
    for number, (labels, _) in enumerate(found):
        families.append(labels.copy())
        families[-1][:, ADDED] = number
    labels = pruned(np.concatenate(families), FINISHED)
    return labels, [found[int(number)][1] for number in labels[:, ADDED]]
