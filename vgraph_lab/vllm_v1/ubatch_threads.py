"""The threads that run micro-batches: made once, so that none has to find its way to the device inside of a capture."""

from __future__ import annotations

import contextvars
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any

import torch

from vgraph_lab.errors import LifecycleError, UBatchError
from vgraph_lab.graphs.backends.threads import thread_conditions

from .ubatching import UBatchContext

__all__ = ["UBatchThreads"]

_READY_S = 120.0  # for a thread to make its CUDA context
_LINGER_S = 1.0  # for threads whose step has failed, to get to their next hand-over


class UBatchThreads:
    """One thread per micro-batch. Steps come one after the other, also from several callers.

    A thread's first work on a GPU makes its CUDA context and its cuBLAS handle, which no capture could hold; :meth:`prepare` does so
    before. A fork of the process gets new threads.

    Args:
        count: of micro-batches.
        device: where they compute.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._lock = threading.RLock()
        self._workers: list[_Worker] = []
        self._process = os.getpid()
        self._unfinished: list[_Part] = []  # of a step that was given up
        weakref.finalize(self, _dismiss, self._workers)

    def prepare(self) -> None:
        """Start the threads and let each find its way to the device, unless they have.

        Raises:
            UBatchError: the device does not answer.
            Exception: whatever the device says.
        """
        with self._lock:
            if self._process != os.getpid():  # threads stay behind
                self._workers.clear()
                self._unfinished.clear()
                self._process = os.getpid()
            if self._workers:
                return
            workers = [_Worker(number, self._device) for number in range(self._count)]
            for worker in workers:
                worker.start()
            late = [worker.name for worker in workers if not worker.is_ready.wait(_READY_S)]
            if late:
                _dismiss(workers)
                raise UBatchError(None, f"{' and '.join(late)} did not get to {self._device} within {_READY_S:g} s.")
            failed = next((worker.error for worker in workers if worker.error is not None), None)
            if failed is not None:
                _dismiss(workers)
                raise failed
            self._workers += workers

    def run(self, contexts: Sequence[UBatchContext], calls: Sequence[Callable[[], Any]], names: Sequence[str]) -> list[Any]:
        """Run one call per micro-batch, in turns, under the calling thread's conditions and within the capture that it is in.

        Args:
            contexts: of the step.
            calls: of the micro-batches.
            names: of the micro-batches, for errors.

        Returns:
            What each call returned.

        Raises:
            LifecycleError: a thread is still busy with a step that was given up.
            UBatchError: a micro-batch kept its turn for too long.
            Exception: what the first micro-batch to fail has raised, with its name in a note. All others have ended.
        """
        with self._lock:
            self.prepare()
            self._check_idle()
            turns, conditions = contexts[0].turns, thread_conditions()
            parts = [_Part(context, call, conditions) for context, call in zip(contexts, calls, strict=True)]
            for worker, part in zip(self._workers, parts, strict=True):
                worker.work.put((contextvars.copy_context(), part))
            interruption: BaseException | None = None
            try:
                turns.start()
                for part in parts:
                    turns.wait(part.done)
            except UBatchError:
                pass  # it says what `turns.failure` is
            except BaseException as stop:  # noqa: BLE001 - of the caller, by a signal; raised below, once the others have ended
                turns.fail(None, stop)
                interruption = stop
            if turns.failure is None:
                return [part.output for part in parts]
            self._unfinished = [part for part in parts if not part.done.wait(_LINGER_S)]
            for part in parts:
                part.output = None  # the error may live on
            ubatch, error = turns.failure if interruption is None else (None, interruption)
            if ubatch is not None and not isinstance(error, UBatchError):
                error.add_note(f"raised in {names[ubatch]}; the other micro-batches have ended with it")
            try:
                raise error
            finally:
                del error, interruption  # else this frame and the error would keep each other
                turns.failure = (
                    ubatch,
                    UBatchError(ubatch, f"the step was given up: {names[ubatch] if ubatch is not None else 'its caller'}"),
                )

    def shutdown(self) -> None:
        """End the threads. Safe to call twice; the next step starts new ones."""
        with self._lock:
            _dismiss(self._workers)
            self._workers.clear()

    def _check_idle(self) -> None:
        self._unfinished = [part for part in self._unfinished if not part.done.is_set()]
        if self._unfinished:
            busy = " and ".join(f"micro-batch {part.context.id}" for part in self._unfinished)
            raise LifecycleError(
                f"{busy} of an earlier step, which was given up, is still running: another step would share its memory. "
                "Wait until it ends, or start the process anew."
            )


class _Part:
    """One micro-batch's part of a step."""

    def __init__(self, context: UBatchContext, call: Callable[[], Any], conditions: Callable[[], AbstractContextManager[None]]) -> None:
        self.context, self.done, self.output = context, threading.Event(), None
        self._call: Callable[[], Any] | None = call
        self._conditions = conditions

    def __call__(self) -> None:
        try:
            with self._conditions(), self.context:
                assert self._call is not None
                self.output = self._call()
        except BaseException as error:  # noqa: BLE001 - the caller of the step raises it
            self.context.turns.fail(self.context.id, error)
        finally:
            self._call = None
            self.done.set()


class _Worker(threading.Thread):
    def __init__(self, number: int, device: torch.device) -> None:
        super().__init__(name=f"ubatch-{number}", daemon=True)
        self.work: SimpleQueue[tuple[contextvars.Context, _Part] | None] = SimpleQueue()
        self.is_ready, self.error = threading.Event(), None
        self._device = device

    error: BaseException | None

    def run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
                torch.cuda.current_blas_handle()
        except BaseException as error:  # noqa: BLE001 - prepare() raises it
            self.error = error
            return
        finally:
            self.is_ready.set()
        while (item := self.work.get()) is not None:
            context, part = item
            context.run(part)
            del item, context, part  # nothing of a step outlives it here


def _dismiss(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.work.put(None)
