"""Generations: all graphs of a Manager retire together, then start-up's are captured anew.

Single graphs are not evicted. They share one pool, whose memory comes back only when the last of them is gone, so the
eviction of one frees nothing; and whatever the libraries keep between calls may lie in the memory of the one that goes.

A generation may be retired once it has served at least as many calls as it has graphs. Renewing costs about one capture
per graph, so the captures of a Manager's whole life stay within the calls that graphs have served, however the shapes
alternate: thrashing costs a bounded share of the work that it disturbs. Until then a Descriptor beyond the limit is
postponed, and its calls run eager with the limit's reason.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from vgraph_lab.errors import FallbackReason

from .borrow import BorrowLedger
from .entry import GraphEntry
from .store import GraphStore
from .target import Target

__all__ = ["Generations", "Retirement"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retirement:
    """What the end of one generation took.

    Attributes:
        generation: which one was retired, from 1.
        why: the Descriptor that had no room, and the limit that it met.
        calls_served: by its graphs.
        graphs: how many it had.
        recaptured: how many of start-up's were captured again.
        lost: how many of them could not be; the Manager's rejections say why.
        seconds: of resetting and capturing again.
    """

    generation: int
    why: str
    calls_served: int
    graphs: int
    recaptured: int
    lost: int
    seconds: float

    def __str__(self) -> str:
        lost = f", {self.lost} lost" if self.lost else ""
        return (
            f"generation {self.generation} retired for {self.why}: {self.graphs} graphs reset after {self.calls_served} calls, "
            f"{self.recaptured} of start-up captured anew{lost} in {self.seconds:.2f} s"
        )


class Generations:
    """Retires the graphs of one Manager. Callers of :meth:`retire` have the capture turn.

    Args:
        store: whose graphs.
        targets: all Targets of the Manager, by id.
        borrows: what debug mode has lent; a retirement takes it back.
    """

    def __init__(self, store: GraphStore, targets: Mapping[str, Target[Any]], borrows: BorrowLedger | None) -> None:
        self._store, self._targets, self._borrows = store, targets, borrows
        self.retirements: list[Retirement] = []

    @property
    def can_make_room(self) -> bool:
        """Whether a fresh generation would be smaller than this one: it begins without lazily captured graphs."""
        return any(entry.lazy for entry in self._store.in_capture_order())

    @property
    def is_due(self) -> bool:
        """Whether the present generation has served at least as many calls as it has graphs."""
        return self._store.calls_served >= sum(map(len, self._store.entries.values()))

    def retire(self, why: str) -> None:
        """Reset every graph, empty the pool, and capture anew what start-up had captured.

        A graph that cannot be captured again is rejected for good, like any other; the rest go on. Handles stay bound.
        """
        start, store = perf_counter(), self._store
        retired, calls = store.in_capture_order(), store.calls_served
        owed = [(self._targets[entry.target_id], entry.descriptor) for entry in retired if not entry.lazy]
        recaptured = 0
        store.renewals += 1
        try:
            with store.pool.exclusive():
                if self._borrows is not None:
                    self._borrows.recall()
                for error in store.retire():
                    logger.warning("a retired graph could not be reset: %s", error)
            for target, descriptor in owed:
                recaptured += isinstance(store.attempt(target, descriptor, lazy=False), GraphEntry)
        except BaseException as error:
            for target, descriptor in owed:
                if descriptor not in store.entries[target.target_id] and descriptor not in store.rejections[target.target_id]:
                    detail = f"its capture in a new generation was interrupted by {type(error).__name__}"
                    store.reject(target, descriptor, FallbackReason.FAILED_DESCRIPTOR, detail)
            raise
        finally:
            lost, seconds = len(owed) - recaptured, perf_counter() - start
            self.retirements.append(Retirement(len(self.retirements) + 1, why, calls, len(retired), recaptured, lost, seconds))
            store.renewals += 1
            logger.info("%s", self.retirements[-1])
