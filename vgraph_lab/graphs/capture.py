"""Capturing one Descriptor: buffers, warm-ups, capture, and the record of what each step took."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from vgraph_lab.errors import CaptureError

from .backends.base import CapturedGraph, GraphBackend, GraphPool, count_nodes, new_addresses, reserved_bytes
from .backends.rules import garbage_collection_paused
from .compiled import refuse_own_cudagraphs
from .descriptor import Descriptor
from .entry import CaptureCost, GraphEntry
from .routine import Buffers
from .structure import nbytes, signature, tensors
from .target import Target

__all__ = ["CaptureMeter", "capture_entry", "capture_underway", "is_capture_underway", "owned_tensors"]


_thread = threading.local()


def is_capture_underway() -> bool:
    """Whether the calling thread is warming up or capturing: whatever it calls belongs into that graph."""
    return bool(getattr(_thread, "is_underway", False))


@contextmanager
def capture_underway() -> Iterator[None]:
    """A warm-up or a capture by the calling thread: inside, wrapped callables and bound Targets are plain calls."""
    before, _thread.is_underway = is_capture_underway(), True
    try:
        yield
    finally:
        _thread.is_underway = before


def owned_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters and buffers that a graph may read in place."""
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


class CaptureMeter:
    """What one capture takes: memory before and after it, and the seconds of its steps. Make it first, then take the steps.

    Args:
        backend: where it captures.
        pool: what it captures into.
    """

    def __init__(self, backend: GraphBackend, pool: GraphPool) -> None:
        self._backend, self._pool = backend, pool
        self._segments, self._free_bytes = pool.segments(), backend.memory().free_bytes
        self._seconds: dict[str, float] = {}

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Around the eager runs; waits for them at the end."""
        with capture_underway(), self._timed("warmup"):
            yield
            self._backend.synchronize()

    def collect_garbage(self, *, everything: bool) -> None:
        """Garbage that holds device memory must not be freed inside the capture.

        A whole collection walks every object of the process; after the first one, what came since is young.
        """
        with self._timed("gc"):
            gc.collect() if everything else gc.collect(1)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Around the capture."""
        with capture_underway(), garbage_collection_paused(), self._timed("capture"):
            yield

    def cost(self, graph: CapturedGraph, output: Any, *, order: int, static_buffer_bytes: int) -> CaptureCost:
        """The record; arguments that it does not say itself are those of :class:`~vgraph_lab.graphs.CaptureCost`.

        Args:
            graph: what was captured.
            output: its static output.
            order: see there.
            static_buffer_bytes: see there.
        """
        segments = self._pool.segments()
        return CaptureCost(
            order=order,
            static_buffer_bytes=static_buffer_bytes,
            output_bytes=nbytes(output),
            pool_reserved_before_bytes=reserved_bytes(self._segments),
            pool_reserved_after_bytes=reserved_bytes(segments),
            device_delta_bytes=None if self._backend.device.type == "cpu" else self._free_bytes - self._backend.memory().free_bytes,
            warmup_s=self._seconds["warmup"],
            capture_s=self._seconds["capture"],
            gc_s=self._seconds["gc"],
            node_counts=count_nodes(graph.nodes()),
            segment_addresses=new_addresses(self._segments, segments),
        )

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self._seconds[step] = perf_counter() - start


def capture_entry(
    backend: GraphBackend,
    pool: GraphPool,
    target: Target[Any],
    descriptor: Descriptor,
    buffers: Buffers,
    *,
    static_buffer_bytes: int,
    num_warmups: int,
    audit: bool,
    order: int,
    lazy: bool = False,
) -> GraphEntry:
    """Warm up and capture one Descriptor of one Target into ``pool``.

    Args:
        backend: where to capture.
        pool: memory to capture into.
        target: whose Routine does the work.
        descriptor: the shape.
        buffers: the Routine's static buffers for it.
        static_buffer_bytes: what they take, without what other entries hold already; for the record.
        num_warmups: eager runs before the capture.
        audit: check the last of them against the capture rules; it costs the run several times over.
        order: position among the Manager's captures, for the record.
        lazy: whether a call asked for this capture.

    Raises:
        CaptureError: the work cannot be captured; the pool's live bytes are as they were.
        Exception: whatever the Routine itself raised, likewise.
    """
    routine = target.routine
    refuse_own_cudagraphs(routine)
    static_inputs = tuple(tensors(dict(buffers)))
    owned = owned_tensors(routine.captured_modules())

    def forward() -> Any:
        return routine.forward_for_capture(descriptor, buffers)

    meter = CaptureMeter(backend, pool)
    with meter.warm_up():
        expected = ""
        for run in range(num_warmups):
            routine.prepare_for_capture(descriptor, buffers)
            is_audited = audit and run == num_warmups - 1
            found = signature(backend.warm_up(forward, static_inputs=static_inputs, owned=owned, audit=is_audited))
            _check_same_output(expected, found, f"warm-up {run} and {run + 1}")
            expected = found
    meter.collect_garbage(everything=order == 0 or lazy)
    with meter.capture():
        routine.prepare_for_capture(descriptor, buffers)
        graph, output = backend.capture(forward, pool, static_inputs=static_inputs, owned=owned)
    try:
        _check_same_output(expected, signature(output), "the last warm-up and the capture")
        cost = meter.cost(graph, output, order=order, static_buffer_bytes=static_buffer_bytes)
        if not sum(cost.node_counts.values()):
            raise CaptureError(
                f"the graph of {descriptor} is empty: forward_for_capture launched nothing on {backend.device}. "
                "Check that its tensors are on that device."
            )
    except BaseException:
        del output
        graph.reset()
        raise
    return GraphEntry(target.target_id, descriptor, buffers, graph, output, cost, owned=owned, lazy=lazy)


def _check_same_output(expected: str, found: str, between: str) -> None:
    if expected and expected != found:
        raise CaptureError(
            f"forward_for_capture changed its output between {between}: first {expected}, then {found}. "
            "A graph's output has one structure, one set of shapes and dtypes."
        )
