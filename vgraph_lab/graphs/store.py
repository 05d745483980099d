"""The Manager's graphs: one pool, the entries in it, the Descriptors that were rejected, and the memory budget."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from vgraph_lab.config import VocoderGraphSettings
from vgraph_lab.errors import FallbackReason, OutOfBudgetError, VGraphLabError

from .backends.base import GraphBackend
from .buffers import StaticBuffers
from .capture import capture_entry
from .descriptor import Descriptor
from .entry import GraphEntry, Rejection
from .structure import nbytes
from .table import MIB
from .target import Target

__all__ = ["GraphStore"]

logger = logging.getLogger(__name__)


class GraphStore:
    """Entries and rejections by Target, in one pool, under one budget.

    A rejected Descriptor is remembered with its reason; it is never tried again. A postponed one waits for the present
    graphs to be retired.
    """

    def __init__(self, backend: GraphBackend, settings: VocoderGraphSettings) -> None:
        self.backend, self.settings = backend, settings
        self.pool = backend.create_pool()
        self.entries: dict[str, dict[Descriptor, GraphEntry]] = {}
        self.rejections: dict[str, dict[Descriptor, Rejection]] = {}
        self.declines: dict[str, dict[Descriptor, Rejection]] = {}  # by runtime key: no Descriptor was made for it
        self.postponed: dict[str, dict[Descriptor, Rejection]] = {}
        self.renewals = 0  # twice the number of retirements; odd while one is under way
        self.calls_served = 0  # by the present graphs; written by the holder of the pool only
        self.is_closed = False
        self.is_replaying = False  # read and written by the holder of the pool only
        self._captures = 0
        self._audited: set[str] = set()  # Targets whose work has passed the audit

    def add_target(self, target_id: str) -> None:
        """Make room for one Target's graphs."""
        self.entries[target_id], self.postponed[target_id] = {}, {}
        self.rejections[target_id], self.declines[target_id] = {}, {}

    def in_capture_order(self) -> list[GraphEntry]:
        """All entries, first captured first. Other threads may capture meanwhile."""
        found = [entry for of_target in self.entries.values() for entry in of_target.copy().values()]
        return sorted(found, key=lambda entry: entry.cost.order)

    @property
    def static_buffer_bytes(self) -> int:
        """Static buffers of all entries; what several share is counted once."""
        return nbytes([dict(entry.buffers) for entry in self.in_capture_order()])

    @property
    def charged_bytes(self) -> int:
        """What counts against ``max_memory_bytes``: static buffers plus everything that the pool holds."""
        return self.static_buffer_bytes + self.pool.reserved_bytes

    @property
    def is_over_limit(self) -> bool:
        """Whether the graphs hold more than ``max_memory_bytes``."""
        limit = self.settings.max_memory_bytes
        return limit is not None and self.charged_bytes > limit

    def attempt(self, target: Target[Any], descriptor: Descriptor, *, lazy: bool, strict: bool = False) -> GraphEntry | Rejection:
        """Capture within the budget and keep the entry; or keep nothing, remember why, and return that.

        With ``strict`` a failure is raised instead.
        """
        result = self.try_capture(target, descriptor, lazy=lazy, strict=strict)
        if isinstance(result, Rejection):
            return self.reject(target, descriptor, result.reason, result.detail)
        return result

    def try_capture(self, target: Target[Any], descriptor: Descriptor, *, lazy: bool, strict: bool = False) -> GraphEntry | Rejection:
        """Like :meth:`attempt`, but what comes of it is not remembered."""
        try:
            return self._capture(target, descriptor, lazy=lazy)
        except OutOfBudgetError as error:
            if strict:
                raise
            return Rejection(FallbackReason.OVER_BUDGET, str(error))
        except Exception as error:
            if strict:
                raise
            return Rejection(FallbackReason.FAILED_DESCRIPTOR, self.describe(error))

    def reject(self, target: Target[Any], descriptor: Descriptor, reason: FallbackReason, detail: str) -> Rejection:
        """Remember that a Descriptor gets no graph."""
        return self._remember(self.rejections, target, descriptor, reason, detail)

    def decline(self, target: Target[Any], key: Descriptor, reason: FallbackReason, detail: str) -> Rejection:
        """Remember that no Descriptor is made for a runtime key."""
        return self._remember(self.declines, target, key, reason, detail)

    @staticmethod
    def _remember(
        where: dict[str, dict[Descriptor, Rejection]], target: Target[Any], shape: Descriptor, reason: FallbackReason, detail: str
    ) -> Rejection:
        rejection = where[target.target_id][shape] = Rejection(reason, detail)
        if reason not in (FallbackReason.DISABLED, FallbackReason.DECLINED):  # those are choices, not findings
            logger.warning("%s %s has no graph (%s): %s", target.target_id, shape, reason, detail)
        return rejection

    def describe(self, error: Exception) -> str:
        """One failure in words, with the memory that was free when it happened."""
        name = "" if isinstance(error, VGraphLabError) else f"{type(error).__name__}: "
        return f"{name}{error} [{self.backend.memory().free_bytes / MIB:,.0f} MiB free]"

    def release(self, *target_ids: str) -> list[Exception]:
        """Reset all graphs of some Targets and let go of their memory; one that fails does not keep the others.

        Graphs of other Targets in the same pool stay valid: none uses memory that only a graph released here keeps (see
        :mod:`~vgraph_lab.graphs.backends.base`).

        Returns:
            What the resets raised.
        """
        errors: list[Exception] = []
        with self.pool.exclusive():
            steps: list[Callable[[], None]] = [self.backend.synchronize]  # a replay may still be running
            for target_id in target_ids:
                steps += [entry.release for entry in self.entries[target_id].values()]
                self.entries[target_id].clear()  # first, so that no other thread selects what is going
            for step in (*steps, self.backend.release_cached_memory):
                try:
                    step()
                except Exception as error:  # noqa: BLE001 - collected for the caller, so that the other graphs go, too
                    errors.append(error)
        return errors

    def retire(self) -> list[Exception]:
        """Release every graph and start over in fresh memory. Rejections stay, what was postponed may be asked for again.

        Returns:
            What the resets raised.
        """
        with self.pool.exclusive():
            errors = self.release(*self.entries)
            self.pool.renew()
            self._captures = self.calls_served = 0
            for of_target in self.postponed.values():
                of_target.clear()
        return errors

    def _capture(self, target: Target[Any], descriptor: Descriptor, *, lazy: bool) -> GraphEntry:
        # A capture takes pool memory, and on the CPU backend it runs there. Buffers and outputs made in inference mode could not
        # be written outside of it.
        with self.pool.exclusive(), torch.inference_mode(False):
            buffers = StaticBuffers(target.routine.allocate_buffers(descriptor))
            shared = [dict(entry.buffers) for entry in self.in_capture_order()]
            static_bytes = nbytes([*shared, dict(buffers)]) - nbytes(shared)
            self._check_budget(static_bytes, descriptor)
            entry = capture_entry(
                self.backend,
                self.pool,
                target,
                descriptor,
                buffers,
                static_buffer_bytes=static_bytes,
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
