"""The Manager's graphs: one pool, the entries in it, the Descriptors that were rejected, and the memory budget."""

from __future__ import annotations

import logging
from typing import Any

from vgraph_lab.config import VocoderGraphSettings
from vgraph_lab.errors import FallbackReason, OutOfBudgetError, VGraphLabError

from .backends.base import GraphBackend
from .capture import capture_entry
from .descriptor import Descriptor
from .entry import GraphEntry, Rejection
from .structure import nbytes
from .target import Target

__all__ = ["GraphStore"]

logger = logging.getLogger(__name__)


class GraphStore:
    """Entries and rejections by Target, in one pool, under one budget.

    A rejected Descriptor is remembered with its reason; it is never tried again.
    """

    def __init__(self, backend: GraphBackend, settings: VocoderGraphSettings) -> None:
        self.backend, self.settings = backend, settings
        self.pool = backend.create_pool()
        self.entries: dict[str, dict[Descriptor, GraphEntry]] = {}
        self.rejections: dict[str, dict[Descriptor, Rejection]] = {}
        self._captures = 0
        self._audited: set[str] = set()  # Targets whose work has passed the audit

    def add_target(self, target_id: str) -> None:
        """Make room for one Target's graphs."""
        self.entries[target_id], self.rejections[target_id] = {}, {}

    def in_capture_order(self) -> list[GraphEntry]:
        """All entries, first captured first."""
        return sorted((entry for of_target in self.entries.values() for entry in of_target.values()), key=lambda entry: entry.cost.order)

    @property
    def static_buffer_bytes(self) -> int:
        """Static buffers of all entries."""
        return sum(entry.cost.static_buffer_bytes for of_target in self.entries.values() for entry in of_target.values())

    @property
    def charged_bytes(self) -> int:
        """What counts against ``max_memory_bytes``: static buffers plus everything that the pool holds."""
        return self.static_buffer_bytes + self.pool.reserved_bytes

    def attempt(self, target: Target[Any], descriptor: Descriptor, *, lazy: bool) -> GraphEntry | Rejection:
        """Capture within the budget and keep the entry; or keep nothing, remember why, and return that.

        In strict mode a failure at start-up is raised instead.
        """
        try:
            return self._capture(target, descriptor, lazy=lazy)
        except OutOfBudgetError as error:
            if self.settings.strict and not lazy:
                raise
            return self.reject(target, descriptor, FallbackReason.OVER_BUDGET, str(error))
        except Exception as error:
            if self.settings.strict and not lazy:
                raise
            return self.reject(target, descriptor, FallbackReason.FAILED_DESCRIPTOR, self.describe(error))

    def reject(self, target: Target[Any], descriptor: Descriptor, reason: FallbackReason, detail: str) -> Rejection:
        """Remember that a Descriptor gets no graph."""
        rejection = Rejection(reason, detail)
        self.rejections[target.target_id][descriptor] = rejection
        if reason not in (FallbackReason.DISABLED, FallbackReason.DECLINED):  # those are choices, not findings
            logger.warning("%s %s has no graph (%s): %s", target.target_id, descriptor, reason, detail)
        return rejection

    def describe(self, error: Exception) -> str:
        """One failure in words, with the memory that was free when it happened."""
        name = "" if isinstance(error, VGraphLabError) else f"{type(error).__name__}: "
        return f"{name}{error} [{self.backend.memory().free_bytes / 2**20:,.0f} MiB free]"

    def release(self, target_id: str) -> None:
        """Reset all graphs of one Target and let go of their memory."""
        with self.pool.exclusive():
            for entry in self.entries[target_id].values():
                entry.release()
            self.entries[target_id].clear()

    def _capture(self, target: Target[Any], descriptor: Descriptor, *, lazy: bool) -> GraphEntry:
        with self.pool.exclusive():  # a capture takes pool memory, and on the CPU backend it runs there
            buffers = target.routine.allocate_buffers(descriptor)
            static_bytes = nbytes(dict(buffers))
            self._check_budget(static_bytes, descriptor)
            entry = capture_entry(
                self.backend,
                self.pool,
                target,
                descriptor,
                buffers,
                num_warmups=self.settings.num_warmups,
                audit=self.settings.debug or target.target_id not in self._audited,
                order=self._captures,
                lazy=lazy,
            )
            self._audited.add(target.target_id)  # the same code runs for its other shapes
            try:
                self._check_budget(static_bytes, descriptor)
            except OutOfBudgetError:
                entry.release()
                self.backend.release_cached_memory()
                raise
            self._captures += 1
            self.entries[target.target_id][descriptor] = entry
            return entry

    def _check_budget(self, static_bytes: int, descriptor: Descriptor) -> None:
        budget, needed = self.settings.max_memory_bytes, self.charged_bytes + static_bytes
        if budget is not None and needed > budget:
            raise OutOfBudgetError(
                f"{descriptor} brings static buffers and pool to {needed:,} bytes, max_memory_bytes is {budget:,}. "
                "Raise the limit or capture fewer or smaller shapes."
            )
