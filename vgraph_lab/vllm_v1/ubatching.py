"""Micro-batches take turns: threads that hand over to each other, with a compute and a communication stream.

Counterpart of ``vllm.v1.worker.ubatching`` (0.25.1). Each micro-batch runs the same model in a thread of its own. Only one thread
has the turn; where the model is about to communicate, it gives the turn to the next one, whose computation the device then does
beside that communication::

    thread 0   attention ─ yield,       send ─ yield,            experts ─ …
    thread 1               attention ─ yield,        send ─ yield,         experts ─ …

    compute    attention 0 │ attention 1 │ experts 0 │ experts 1 │ …
    comm                   │ send 0      │ send 1    │ …

The order is always that of the ring 0, 1, …, 0: no thread is ever ahead of one with a smaller number by a turn, on any rank. So
exchanges pair up across ranks, and a request that is cut finds the keys of its first part in the cache.

Threads hand over through CPU events. Where there is a GPU, each micro-batch also has two CUDA events, one per stream, so that its
communication starts after its own computation, and the other way round. **Memory**: what was made on one stream and is used on the
other has to live until the switch back; the allocator would give it to the next micro-batch otherwise.

Nobody waits forever. If a micro-batch fails, all others end at their next hand-over; if one neither yields nor ends, whoever waits
for it says so after ``timeout_s``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch

from vgraph_lab.errors import InputError, LifecycleError

from .forward_context import ForwardContext, override_forward_context
from .ubatch_trace import UBatchTrace
from .ubatch_turns import UBatchTurns

__all__ = [
    "UBatchContext",
    "dbo_current_ubatch_id",
    "dbo_enabled",
    "dbo_get_previous_event",
    "dbo_maybe_run_recv_hook",
    "dbo_num_ubatches",
    "dbo_register_recv_hook",
    "dbo_span",
    "dbo_switch_to_comm",
    "dbo_switch_to_comm_sync",
    "dbo_switch_to_compute",
    "dbo_switch_to_compute_sync",
    "dbo_yield",
    "dbo_yield_and_switch_from_comm_to_compute",
    "dbo_yield_and_switch_from_compute_to_comm",
    "make_ubatch_contexts",
]

StreamName = Literal["compute", "comm"]
Result = TypeVar("Result")


class UBatchContext:
    """One micro-batch of one step; enter it in the thread that runs it. Entering waits for the first turn.

    Attributes and methods have vLLM's names. There, the next micro-batch's event is fixed (``cpu_signal_event``); here, those that have
    ended are passed over, so that one may yield more often than another.

    Args:
        id: number of the micro-batch.
        comm_stream: for communication, shared by all; None without a GPU.
        compute_stream: for computation, shared by all; None without a GPU.
        forward_context: that the model finds in this thread.
        turns: of the step.
        trace: takes the spans.
    """

    def __init__(
        self,
        id: int,
        comm_stream: torch.cuda.Stream | None,
        compute_stream: torch.cuda.Stream | None,
        forward_context: ForwardContext,
        turns: UBatchTurns,
        trace: UBatchTrace | None = None,
    ) -> None:
        self.id, self.forward_context, self.turns, self.trace = id, forward_context, turns, trace
        self.compute_stream, self.comm_stream = compute_stream, comm_stream
        self.cpu_wait_event = threading.Event()
        self.gpu_compute_done_event = None if compute_stream is None else torch.cuda.Event()
        self.gpu_comm_done_event = None if comm_stream is None else torch.cuda.Event()
        self.stream_name: StreamName = "compute"
        self.thread: int | None = None
        self.is_live = True
        self.recv_hooks: list[Callable[[], object]] = []
        self._has_communicated = False
        self._original_stream: torch.cuda.Stream | None = None
        self._in_forward: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> UBatchContext:
        if _current() is not None:
            raise LifecycleError("this thread runs a micro-batch already; each one has a thread of its own.")
        self.thread = threading.get_ident()
        self.turns.meet(self)
        self._await_turn()
        try:
            self._begin()
        except BaseException as error:
            self.turns.fail(self.id, error)
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.turns.check(self)
                self.maybe_run_recv_hook()
        except BaseException as late:
            error = late
            raise
        finally:
            if error is not None:
                self.turns.fail(self.id, error)
            try:
                self._leave()
            finally:
                self.is_live = False
                self.turns.pass_on(self)

    def yield_(self) -> None:
        """Let the others have a turn, and go on afterwards on the same stream."""
        self._hand_over()
        self._go_to(self.stream_name)

    def yield_and_switch_from_compute_to_comm(self) -> None:
        """Let the others have a turn, then go on with communication, which starts after this micro-batch's computation."""
        self._need("compute")
        self._signal_compute_done()
        self._hand_over()
        self._go_to("comm", after=self.gpu_compute_done_event)

    def yield_and_switch_from_comm_to_compute(self) -> None:
        """Let the others have a turn, then go on with computation, which starts after this micro-batch's communication."""
        self._need("comm")
        self._signal_comm_done()
        self._hand_over()
        self._go_to("compute", after=self.gpu_comm_done_event)

    def switch_to_comm(self) -> None:
        """Go on with communication at once; the device orders nothing."""
        self._go_to("comm")

    def switch_to_compute(self) -> None:
        """Go on with computation at once; the device orders nothing."""
        self._go_to("compute")

    def switch_to_comm_sync(self) -> None:
        """Go on with communication at once, which starts after all computation so far."""
        self._signal_compute_done()
        self._go_to("comm", after=self.gpu_compute_done_event)

    def switch_to_compute_sync(self) -> None:
        """Go on with computation at once, which starts after all communication so far."""
        self._signal_comm_done()
        self._go_to("compute", after=self.gpu_comm_done_event)

    def register_recv_hook(self, recv_hook: Callable[[], object]) -> None:
        """Leave the rest of this micro-batch's reception to the next one that runs, which does it when it can spare the time.

        Each hook runs once: where the other one calls :meth:`maybe_run_recv_hook`, or at its end. In a step that fails, it does not.
        """
        contexts = self.turns.contexts
        ring = (contexts[(self.id + step) % len(contexts)] for step in range(1, len(contexts)))
        next((each for each in ring if each.is_live), self).recv_hooks.append(recv_hook)

    def maybe_run_recv_hook(self) -> None:
        """Run what others have left here, in order."""
        while self.recv_hooks:
            self.recv_hooks.pop(0)()

    def _hand_over(self) -> None:
        self.turns.check(self)
        if self.trace is not None:
            self.trace.end(self.id)
        if self.turns.pass_on(self):
            self._await_turn()

    def _await_turn(self) -> None:
        # The forward context needs no restoring: each thread has its own, even one that the model has set in between.
        self.turns.wait(self.cpu_wait_event, self)
        self.cpu_wait_event.clear()

    def _go_to(self, name: StreamName, *, after: torch.cuda.Event | None = None) -> None:
        stream = self.compute_stream if name == "compute" else self.comm_stream
        if stream is not None:
            torch.cuda.set_stream(stream)
            if after is not None:
                stream.wait_event(after)
        self.stream_name = name
        self._has_communicated |= name == "comm"
        if self.trace is not None:
            self.trace.begin(self.id, name, stream)

    def _signal_compute_done(self) -> None:
        if self.gpu_compute_done_event is not None:
            self.gpu_compute_done_event.record(self.compute_stream)

    def _signal_comm_done(self) -> None:
        if self.gpu_comm_done_event is not None:
            self.gpu_comm_done_event.record(self.comm_stream)

    def _need(self, name: StreamName) -> None:
        if self.stream_name != name:
            raise LifecycleError(
                f"micro-batch {self.id} is on the {self.stream_name} stream and would switch from {name}. Switch back first."
            )

    def _begin(self) -> None:
        _thread.context = self
        self._in_forward = override_forward_context(self.forward_context)
        self._in_forward.__enter__()
        if self.compute_stream is not None:
            self._original_stream = torch.cuda.current_stream(self.compute_stream.device)
        self._go_to("compute")

    def _leave(self) -> None:
        """End on the compute stream, with communication joined to it: a capture must leave no stream open."""
        _thread.context = None
        with ExitStack() as steps:  # the last one first, each whatever becomes of the others
            if self._original_stream is not None:
                steps.callback(torch.cuda.set_stream, self._original_stream)
            if self.compute_stream is not None and self.gpu_comm_done_event is not None and self._has_communicated:
                steps.callback(self.compute_stream.wait_event, self.gpu_comm_done_event)
                steps.callback(self._signal_comm_done)
            steps.push(self._in_forward.__exit__)
            if self.trace is not None:
                steps.callback(self.trace.end, self.id)


def make_ubatch_contexts(
    num_micro_batches: int,
    compute_stream: torch.cuda.Stream | None,
    comm_stream: torch.cuda.Stream | None,
    forward_contexts: Sequence[ForwardContext],
    ready_barrier: threading.Barrier,
    *,
    timeout_s: float = 120.0,
    trace: UBatchTrace | None = None,
) -> list[UBatchContext]:
    """The contexts of one step, in a ring. Its caller gives the first turn by ``contexts[0].turns.start()``.

    Args:
        num_micro_batches: two or more.
        compute_stream: see :class:`UBatchContext`.
        comm_stream: see :class:`UBatchContext`.
        forward_contexts: one per micro-batch.
        ready_barrier: for the micro-batches and the caller: ``threading.Barrier(num_micro_batches + 1)``.
        timeout_s: how long one may keep its turn while others wait.
        trace: takes the spans.

    Raises:
        InputError: numbers do not fit together.
    """
    if num_micro_batches < 2 or len(forward_contexts) != num_micro_batches or ready_barrier.parties != num_micro_batches + 1:
        raise InputError(
            f"{num_micro_batches} micro-batches with {len(forward_contexts)} forward contexts and a barrier for {ready_barrier.parties}: "
            "there are two or more, each has a forward context, and the barrier is for them and their caller."
        )
    if (compute_stream is None) != (comm_stream is None):
        raise InputError("micro-batches have a compute stream and a communication stream, or, without a GPU, neither.")
    turns = UBatchTurns(ready_barrier, timeout_s)
    turns.contexts += [
        UBatchContext(number, comm_stream, compute_stream, context, turns, trace) for number, context in enumerate(forward_contexts)
    ]
    return turns.contexts


# ---------------------------------------------------------------------------- what a model calls; nothing, outside of micro-batches

_thread = threading.local()


def _current() -> UBatchContext | None:
    context: UBatchContext | None = getattr(_thread, "context", None)
    return context


def dbo_enabled() -> bool:
    """Whether this thread runs a micro-batch. (vLLM asks whether any thread does.)"""
    return _current() is not None


def dbo_current_ubatch_id() -> int:
    """The micro-batch that this thread runs; 0 for a whole batch."""
    context = _current()
    return 0 if context is None else context.id


def dbo_num_ubatches() -> int:
    """How many micro-batches this thread's step has; 1 for a whole batch."""
    context = _current()
    return 1 if context is None else len(context.turns.contexts)


def _dbo(method: Callable[[UBatchContext], None]) -> Callable[[], None]:
    def call() -> None:
        context = _current()
        if context is not None:
            method(context)

    call.__doc__ = f"{method.__doc__}\n\n    Nothing, outside of micro-batches."
    call.__name__ = call.__qualname__ = f"dbo_{method.__name__.rstrip('_')}"
    return call


dbo_yield = _dbo(UBatchContext.yield_)
dbo_yield_and_switch_from_compute_to_comm = _dbo(UBatchContext.yield_and_switch_from_compute_to_comm)
dbo_yield_and_switch_from_comm_to_compute = _dbo(UBatchContext.yield_and_switch_from_comm_to_compute)
dbo_switch_to_comm = _dbo(UBatchContext.switch_to_comm)
dbo_switch_to_compute = _dbo(UBatchContext.switch_to_compute)
dbo_switch_to_comm_sync = _dbo(UBatchContext.switch_to_comm_sync)
dbo_switch_to_compute_sync = _dbo(UBatchContext.switch_to_compute_sync)
dbo_maybe_run_recv_hook = _dbo(UBatchContext.maybe_run_recv_hook)


def dbo_register_recv_hook(recv_hook: Callable[[], object]) -> None:
    """See :meth:`UBatchContext.register_recv_hook`; outside of micro-batches, the hook runs at once."""
    context = _current()
    if context is None:
        recv_hook()
    else:
        context.register_recv_hook(recv_hook)


def dbo_get_previous_event(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result | None:
    """What ``function`` returns on this micro-batch's compute stream: an event after its computation so far. None for a whole batch."""
    context = _current()
    if context is None:
        return None
    with torch.cuda.stream(context.compute_stream):
        return function(*args, **kwargs)


@contextmanager
def dbo_span(name: str) -> Iterator[None]:
    """Call what this micro-batch does in the block by that name in its trace, if there is one."""
    context = _current()
    with nullcontext() if context is None or context.trace is None else context.trace.named(context.id, name):
        yield
