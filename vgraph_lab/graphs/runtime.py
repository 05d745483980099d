"""What happens when a bound Target is called: validate, resolve, then replay a graph or run eager with a reason."""

from __future__ import annotations

import os
from typing import Any

from vgraph_lab.errors import FallbackReason, ForkedProcessError

from .borrow import BorrowLedger
from .capture import is_capture_underway
from .descriptor import Descriptor
from .entry import GraphEntry
from .lazy import LazyCapture
from .routine import Resolution
from .stats import Recorder
from .store import GraphStore
from .structure import clone
from .target import Target

__all__ = ["GraphRuntime"]


class GraphRuntime:
    """The callable behind one Handle.

    Fallback to eager happens for coverage misses only, and before anything is written. From the first write into a
    static buffer on, an error is recorded and propagates.

    ``constant_reason`` makes every call eager with that reason (a Target that is switched off).

    The pool is held from copy-in to materialisation, not only the entry: graphs of one pool share memory, so another
    graph's replay may overwrite this one's intermediates and, if it was captured earlier, this one's output.
    """

    def __init__(
        self,
        store: GraphStore,
        target: Target[Any],
        recorder: Recorder,
        *,
        constant_reason: FallbackReason | None = None,
        lazy_capture: LazyCapture | None = None,
        borrows: BorrowLedger | None = None,
    ) -> None:
        self._store, self._backend, self._pool, self._recorder = store, store.backend, store.pool, recorder
        self._entries, self._rejections = store.entries[target.target_id], store.rejections[target.target_id]
        self._routine, self._target = target.routine, target
        self._constant_reason, self._lazy_capture, self._borrows = constant_reason, lazy_capture, borrows
        self._process = os.getpid()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._routine.validate_runtime_inputs(*args, **kwargs)
        resolution = self._routine.resolve(*args, **kwargs)
        if is_capture_underway() or self._backend.is_capturing():
            found: GraphEntry | FallbackReason = FallbackReason.NESTED_CAPTURE
        else:
            if self._constant_reason is None and os.getpid() != self._process:
                raise ForkedProcessError(
                    f"{self._target.target_id} was captured in process {self._process} and called in its fork {os.getpid()}. "
                    "Graphs do not survive a fork: load and capture in the child, or start it with the spawn method."
                )
            found = self._select(resolution)
        if isinstance(found, GraphEntry):
            with self._pool.exclusive():
                if found.is_released:
                    # Another thread has cleared the Manager, or retired this graph, between selection and replay.
                    found = FallbackReason.NO_GRAPH if self._store.is_closed else FallbackReason.NOT_READY
                elif self._store.is_replaying:
                    found = FallbackReason.NOT_READY  # a Routine calls a Target: its graph would overwrite this one's memory
                else:
                    return self._replay(found, resolution.key, args, kwargs)
        self._recorder.record_fallback(resolution.key, found)
        return self._routine.eager_call(*args, **kwargs)

    def _select(self, resolution: Resolution) -> GraphEntry | FallbackReason:
        if self._constant_reason is not None:
            return self._constant_reason
        renewals = self._store.renewals
        for candidate in resolution.candidates:
            entry = self._entries.get(candidate)
            if entry is not None:
                return entry
        if resolution.candidates and (renewals % 2 or self._store.renewals != renewals):  # captured anew now, or during the search
            return FallbackReason.NOT_READY
        if self._lazy_capture is not None:
            return self._lazy_capture(resolution.key)
        if not resolution.candidates:
            return resolution.miss_reason
        rejection = self._rejections.get(resolution.candidates[0])
        return rejection.reason if rejection else FallbackReason.NO_GRAPH

    def _replay(self, entry: GraphEntry, key: Descriptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._borrows is not None:
            self._borrows.recall()
        descriptor = entry.descriptor
        self._store.is_replaying = True
        try:
            self._routine.copy_runtime_inputs(descriptor, entry.buffers, *args, **kwargs)
            entry.graph.replay()
            output = self._routine.output_after_replay(descriptor, entry.buffers, entry.output, *args, **kwargs)
            entry.check_structure(output)
            if self._target.clone_output:
                output = clone(output)
            elif self._borrows is not None:
                output = self._borrows.lend(output, f"{self._target.target_id} {descriptor}")
        except BaseException as error:
            self._recorder.record_replay_error(key, descriptor, error)
            raise
        finally:
            self._store.is_replaying = False
        self._store.calls_served += 1
        entry.touch()
        self._recorder.record_graph_hit(key, descriptor)
        return output
