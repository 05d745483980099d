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

from .backends.base import GraphBackend, GraphPool, count_nodes, new_addresses, reserved_bytes
from .compiled import refuse_own_cudagraphs
from .descriptor import Descriptor
from .entry import CaptureCost, GraphEntry
from .routine import Buffers
from .structure import nbytes, signature, tensors
from .target import Target

__all__ = ["capture_entry", "is_capture_underway", "owned_tensors"]


_thread = threading.local()


def is_capture_underway() -> bool:
    """Whether the calling thread is warming up or capturing: whatever it calls belongs into that graph."""
    return bool(getattr(_thread, "is_underway", False))


@contextmanager
def _underway() -> Iterator[None]:
    before, _thread.is_underway = is_capture_underway(), True
    try:
        yield
    finally:
        _thread.is_underway = before


def owned_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters and buffers that a graph may read in place."""
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


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

    segments_before, free_before = pool.segments(), backend.memory().free_bytes
    with _underway(), _stopwatch() as warmup:
        expected = ""
        for run in range(num_warmups):
            routine.prepare_for_capture(descriptor, buffers)
            is_audited = audit and run == num_warmups - 1
            found = signature(backend.warm_up(forward, static_inputs=static_inputs, owned=owned, audit=is_audited))
            _check_same_output(expected, found, f"warm-up {run} and {run + 1}")
            expected = found
        backend.synchronize()
    with _stopwatch() as collection:
        # Garbage that holds device memory must not be freed inside the capture. A whole collection walks every object of the
        # process; after the first one, what came since is young.
        gc.collect() if order == 0 or lazy else gc.collect(1)
    with _underway(), _no_collection(), _stopwatch() as capture:
        routine.prepare_for_capture(descriptor, buffers)
        graph, output = backend.capture(forward, pool, static_inputs=static_inputs, owned=owned)
    try:
        _check_same_output(expected, signature(output), "the last warm-up and the capture")
        segments = pool.segments()
        cost = CaptureCost(
            order=order,
            static_buffer_bytes=static_buffer_bytes,
            output_bytes=nbytes(output),
            pool_reserved_before_bytes=reserved_bytes(segments_before),
            pool_reserved_after_bytes=reserved_bytes(segments),
            device_delta_bytes=None if backend.device.type == "cpu" else free_before - backend.memory().free_bytes,
            warmup_s=warmup[0],
            capture_s=capture[0],
            gc_s=collection[0],
            node_counts=count_nodes(graph.nodes()),
            segment_addresses=new_addresses(segments_before, segments),
        )
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


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from running on its own."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_same_output(expected: str, found: str, between: str) -> None:
    if expected and expected != found:
        raise CaptureError(
            f"forward_for_capture changed its output between {between}: first {expected}, then {found}. "
            "A graph's output has one structure, one set of shapes and dtypes."
        )


@contextmanager
def _stopwatch() -> Iterator[list[float]]:
    """A one-element list that holds the seconds of the block once it is over."""
    seconds, start = [0.0], perf_counter()
    try:
        yield seconds
    finally:
        seconds[0] = perf_counter() - start
