"""Turns of micro-batches: who runs, who waits for whom, and how a step ends that cannot go on."""

from __future__ import annotations

import sys
import threading
from time import monotonic
from typing import TYPE_CHECKING

from vgraph_lab.errors import UBatchError
from vgraph_lab.graphs.backends.call import user_line

if TYPE_CHECKING:
    from .ubatching import UBatchContext

__all__ = ["UBatchTurns"]


class UBatchTurns:
    """Whose turn it is in one step, and what ended the step early.

    Args:
        ready_barrier: of all micro-batches and the caller of the step, who pass it together before the first turn.
        timeout_s: how long one of them may keep its turn while others wait.
    """

    def __init__(self, ready_barrier: threading.Barrier, timeout_s: float) -> None:
        self.contexts: list[UBatchContext] = []
        self.timeout_s = timeout_s
        self.ready_barrier = ready_barrier
        self.failure: tuple[int | None, BaseException] | None = None
        self._holder: int | None = None
        self._since_s = monotonic()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Wait until all micro-batches are ready, and give the first one the turn; for the caller of the step.

        Raises:
            UBatchError: one failed before, or did not come.
        """
        self.meet()
        with self._lock:
            self._give(self.contexts[0])

    def meet(self, waiter: UBatchContext | None = None) -> None:
        """Pass the barrier.

        Raises:
            UBatchError: one failed before, or did not come.
        """
        try:
            self.ready_barrier.wait(self.timeout_s)
        except threading.BrokenBarrierError:
            absent = [each.id for each in self.contexts if each.thread is None]
            who = " and ".join(f"micro-batch {number}" for number in absent) or "the caller of the step"
            late = UBatchError(
                absent[0] if absent else None, f"{who} did not get ready within {self.timeout_s:g} s; all others wait for it."
            )
            self.fail(late.ubatch, late)
        self.check(waiter)

    def pass_on(self, giver: UBatchContext) -> bool:
        """Give the turn to the next micro-batch that still runs; False if there is no other one."""
        count = len(self.contexts)
        with self._lock:
            ring = (self.contexts[(giver.id + step) % count] for step in range(1, count))
            following = next((each for each in ring if each.is_live), None)
            if following is not None and self.failure is None:
                self._give(following)
            else:
                self._since_s = monotonic()
        return following is not None

    def wait(self, event: threading.Event, waiter: UBatchContext | None = None) -> None:
        """Wait for one's turn, or for whatever else ``event`` says. Each hand-over begins the time anew.

        Raises:
            UBatchError: the step has failed, or the holder of the turn keeps it for too long.
        """
        while not event.wait(max(self._since_s + self.timeout_s - monotonic(), 0.001)):
            with self._lock:
                is_late = monotonic() - self._since_s >= self.timeout_s and self.failure is None
            if is_late:
                self.fail(self._holder, UBatchError(self._holder, self._accusation(waiter)))
            self.check(waiter)
        self.check(waiter)

    def fail(self, ubatch: int | None, error: BaseException) -> None:
        """End the step, unless it has failed already: all who wait wake up and raise."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = ubatch, error
            for each in self.contexts:
                each.cpu_wait_event.set()
        self.ready_barrier.abort()

    def check(self, waiter: UBatchContext | None = None) -> None:
        """Raise what ended the step.

        Raises:
            UBatchError: something has; names the micro-batch.
        """
        if self.failure is None:
            return
        ubatch, error = self.failure
        if isinstance(error, UBatchError):
            raise UBatchError(ubatch, str(error)) from error
        who = "the caller of the step" if ubatch is None else f"micro-batch {ubatch}"
        me = "the step" if waiter is None else f"micro-batch {waiter.id}"
        raise UBatchError(ubatch, f"{who} failed with {type(error).__name__}: {error}; {me} ends with it.") from error

    def _give(self, context: UBatchContext) -> None:
        self._holder, self._since_s = context.id, monotonic()
        context.cpu_wait_event.set()

    def _accusation(self, waiter: UBatchContext | None) -> str:
        me = "the caller of the step" if waiter is None else f"micro-batch {waiter.id}"
        if self._holder is None:
            return f"{me} waits for the caller of the step, which has not given the first turn for {self.timeout_s:g} s."
        frame = sys._current_frames().get(self.contexts[self._holder].thread or -1)
        where = "" if frame is None else f"\n  it is at {user_line(frame=frame)}"
        who = f"micro-batch {self._holder}, which has had its turn for {self.timeout_s:g} s"
        return f"{me} waits for {who} and neither yields nor ends.{where}"
