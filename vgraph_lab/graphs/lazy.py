"""Lazy capture: a call that no graph serves may have one captured, one at a time for the whole Manager."""

from __future__ import annotations

from threading import Lock
from typing import Any

from vgraph_lab.errors import FallbackReason

from .descriptor import Descriptor
from .entry import GraphEntry, Rejection
from .store import GraphStore
from .target import Target

__all__ = ["LazyCapture"]


class LazyCapture:
    """Answers a runtime key that no graph serves: with an entry, or with the reason why there is none.

    Args:
        store: where entries and rejections are kept.
        target: whose Routine makes Descriptors.
        max_extra_graphs: cap on lazily captured graphs of this Target; None means no cap.
        capturing: held by whoever captures for the Manager; a call that finds it taken runs eager (``not_ready``).
    """

    def __init__(self, store: GraphStore, target: Target[Any], max_extra_graphs: int | None, capturing: Lock) -> None:
        self._store, self._target, self._cap, self._capturing = store, target, max_extra_graphs, capturing
        self._entries, self._rejections = store.entries[target.target_id], store.rejections[target.target_id]
        self._descriptor_of: dict[Descriptor, Descriptor] = {}  # runtime key → the Descriptor its Routine made

    def __call__(self, key: Descriptor) -> GraphEntry | FallbackReason:
        known = self._look_up(key)
        if known is not None:
            return known
        if not self._capturing.acquire(blocking=False):
            return FallbackReason.NOT_READY
        try:
            answer = self._look_up(key) or self._capture(key)
        finally:
            self._capturing.release()
        return answer

    def _look_up(self, key: Descriptor) -> GraphEntry | FallbackReason | None:
        descriptor = self._descriptor_of.get(key, key)
        if descriptor in self._rejections:
            return self._rejections[descriptor].reason
        return self._entries.get(descriptor)

    def _capture(self, key: Descriptor) -> GraphEntry | FallbackReason:
        descriptor = self._target.routine.make_descriptor(key)
        if descriptor is None:
            return self._store.reject(self._target, key, FallbackReason.DECLINED, "the Routine makes no Descriptor for this shape").reason
        self._descriptor_of[key] = descriptor
        known = self._look_up(key)
        if known is not None:
            return known
        if self._cap is not None and sum(entry.lazy for entry in self._entries.values()) >= self._cap:
            return self._store.reject(self._target, descriptor, FallbackReason.CAPACITY, f"max_extra_graphs is {self._cap}").reason
        result = self._store.attempt(self._target, descriptor, lazy=True)
        return result.reason if isinstance(result, Rejection) else result
