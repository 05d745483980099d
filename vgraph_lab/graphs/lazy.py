"""Lazy capture: a call that no graph serves may have one captured, one at a time for the whole Manager."""

from __future__ import annotations

from threading import Lock, get_ident
from types import TracebackType
from typing import Any

from vgraph_lab.errors import FallbackReason

from .descriptor import Descriptor
from .entry import GraphEntry, Rejection
from .generation import Generations
from .store import GraphStore
from .target import Target

__all__ = ["CaptureTurn", "LazyCapture"]


class CaptureTurn:
    """The right to capture for a Manager: one thread at a time has it, and knows that it has."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._thread: int | None = None

    def take(self, *, wait: bool) -> bool:
        """Take the turn; False if another thread has it and ``wait`` is False."""
        taken = self._lock.acquire(blocking=wait)
        if taken:
            self._thread = get_ident()
        return taken

    def give_back(self) -> None:
        """Let the next thread capture."""
        self._thread = None
        self._lock.release()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has the turn."""
        return self._thread == get_ident()

    def __enter__(self) -> None:
        self.take(wait=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.give_back()


class LazyCapture:
    """Answers a runtime key that no graph serves: with an entry, or with the reason why there is none.

    A key is not a Descriptor: the Routine may make one Descriptor for many keys, or none. What was declined is
    remembered by key, what was rejected by Descriptor.

    Args:
        store: where entries and rejections are kept.
        target: whose Routine makes Descriptors.
        max_extra_graphs: cap on lazily captured graphs of this Target; None means no cap.
        turn: a call that finds it taken by another thread runs eager (``not_ready``).
        generations: makes room where the cap or the memory limit is reached; None: such a Descriptor is rejected.
    """

    def __init__(
        self,
        store: GraphStore,
        target: Target[Any],
        max_extra_graphs: int | None,
        turn: CaptureTurn,
        generations: Generations | None = None,
    ) -> None:
        self._store, self._target, self._cap, self._turn, self._generations = store, target, max_extra_graphs, turn, generations
        self._entries, self._rejections = store.entries[target.target_id], store.rejections[target.target_id]
        self._declines, self._postponed = store.declines[target.target_id], store.postponed[target.target_id]
        self._descriptor_of: dict[Descriptor, Descriptor] = {}  # runtime key → the Descriptor that its Routine made

    def __call__(self, key: Descriptor) -> GraphEntry | FallbackReason:
        known = self._look_up(key)
        if known is not None:
            return known
        if self._turn.is_mine or not self._turn.take(wait=False):
            return FallbackReason.NOT_READY
        try:
            with self._store.pool.exclusive():
                if self._store.is_replaying:  # by this thread: a Routine calls a Target, whose capture would use the same memory
                    return FallbackReason.NOT_READY
            known = self._look_up(key)
            if known is not None:
                return known
            try:
                return self._capture(key)
            finally:
                self._target.routine.captures_are_over()
        finally:
            self._turn.give_back()

    def _look_up(self, key: Descriptor) -> GraphEntry | FallbackReason | None:
        if self._store.is_closed:
            return FallbackReason.NO_GRAPH
        if key in self._declines:
            return self._declines[key].reason
        descriptor = self._descriptor_of.get(key)
        if descriptor is None:
            return None
        if descriptor in self._rejections:
            return self._rejections[descriptor].reason
        postponed = self._postponed.get(descriptor)
        if postponed is not None and self._generations is not None and not self._generations.is_due:
            return postponed.reason  # without the turn: such calls may come often
        return self._entries.get(descriptor)

    def _capture(self, key: Descriptor) -> GraphEntry | FallbackReason:
        try:
            descriptor = self._target.routine.make_descriptor(key)
        except Exception as error:  # noqa: BLE001 - a Routine may raise anything; it is kept as the reason
            detail = f"make_descriptor raised {self._store.describe(error)}"
            return self._store.decline(self._target, key, FallbackReason.FAILED_DESCRIPTOR, detail).reason
        if descriptor is None:
            return self._store.decline(self._target, key, FallbackReason.DECLINED, "the Routine makes no Descriptor for this shape").reason
        self._descriptor_of[key] = descriptor
        known = self._look_up(key)
        if known is not None:
            return known
        result: GraphEntry | Rejection
        if descriptor in self._postponed:
            result = self._postponed[descriptor]
        elif self._cap is not None and sum(entry.lazy for entry in self._entries.values()) >= self._cap:
            result = Rejection(FallbackReason.CAPACITY, f"max_extra_graphs is {self._cap}")
        else:
            result = self._store.try_capture(self._target, descriptor, lazy=True)
        if isinstance(result, Rejection):
            result = self._make_room(descriptor, result)
        return result.reason if isinstance(result, Rejection) else result

    def _make_room(self, descriptor: Descriptor, limit: Rejection) -> GraphEntry | Rejection:
        """Answer a Descriptor that was not captured: in a new generation, if that can help and the present one has paid off."""
        generations = self._generations
        is_limit = limit.reason in (FallbackReason.CAPACITY, FallbackReason.OVER_BUDGET)
        if not is_limit or generations is None or not generations.can_make_room:
            return self._store.reject(self._target, descriptor, limit.reason, limit.detail)
        if not generations.is_due:
            self._postponed[descriptor] = limit
            return limit
        generations.retire(f"{self._target.target_id} {descriptor} ({limit.reason}: {limit.detail})")
        result = self._store.attempt(self._target, descriptor, lazy=True)
        if self._store.is_over_limit:  # CUDA keeps a rejected capture's segments as long as any graph of the pool lives
            generations.retire(f"what the rejected capture of {self._target.target_id} {descriptor} left in the pool")
        return result
