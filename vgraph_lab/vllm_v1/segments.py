"""One segment of a breakable graph under capture: what a backend's ``capture`` does around a function, in two halves."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage

from vgraph_lab.errors import BackendError, CaptureError
from vgraph_lab.graphs.backends.audit import Origins
from vgraph_lab.graphs.backends.base import CapturedGraph, GraphBackend, GraphPool
from vgraph_lab.graphs.backends.call import user_line
from vgraph_lab.graphs.backends.cpu import ArenaPool, CpuGraph, CpuGraphBackend
from vgraph_lab.graphs.backends.cpu.arena import Lease
from vgraph_lab.graphs.backends.cpu.session import capture_session
from vgraph_lab.graphs.backends.cpu.side_effects import SideEffects
from vgraph_lab.graphs.backends.cpu.tape import Tape
from vgraph_lab.graphs.backends.cuda import CudaGraphBackend
from vgraph_lab.graphs.backends.cuda.backend import CUDA_ERRORS, clear_workspaces, driver_refusal, end_capture
from vgraph_lab.graphs.backends.cuda.graph import CudaCapturedGraph
from vgraph_lab.graphs.backends.cuda.pool import CudaPool
from vgraph_lab.graphs.backends.host_guard import host_access_refused
from vgraph_lab.graphs.backends.rules import no_refusal_swallowed

__all__ = ["CpuSegment", "CudaSegment", "Segment", "pool_memory", "refusal_of", "segment_maker", "segment_session"]


class Segment(Protocol):
    """A segment between its beginning and its end."""

    def end(self, output: Any) -> CapturedGraph:
        """End it; ``output`` is that of the whole pass, or None."""

    def abort(self) -> None:
        """Leave it: the pass has failed inside it."""

    def roll_back(self) -> None:
        """Free everything that it made, whatever still refers to it; after its end or its abort."""


class CpuSegment:
    """A tape that records until :meth:`end`.

    Args:
        pool: memory.
        origins: the tensors that the function may use.
        places: where the aliases of arena tensors go. Segments of one session share it, so that a later one does not keep the
            memory of what an earlier one has made.
    """

    def __init__(self, pool: ArenaPool, origins: Origins, places: dict[int, UntypedStorage]) -> None:
        self._pool, self._origins = pool, origins
        self._lease: Lease = pool.lease()
        self._effects = SideEffects(origins.seats)
        self._tape = Tape(self._lease, origins, self._effects, places)
        self._tape.__enter__()  # type: ignore[no-untyped-call]  # torch's

    def end(self, output: Any) -> CpuGraph:
        """See :class:`Segment`."""
        try:
            self._tape.check_end(output, user_line())
        finally:
            self._tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
            self._effects.undo()
        self._lease.close()
        return CpuGraph(self._tape.records, self._pool, self._lease)

    def roll_back(self) -> None:
        """See :class:`Segment`."""
        self._tape.records.clear()
        self._lease.roll_back()

    def abort(self) -> None:
        """See :class:`Segment`."""
        self._tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's
        self._effects.undo()
        self.roll_back()


class CudaSegment:
    """A capture on the backend's stream that lasts until :meth:`end`; see ``CudaGraphBackend`` on workspaces."""

    def __init__(self, backend: CudaGraphBackend, pool: CudaPool) -> None:
        self._backend, self._pool, self._handle = backend, pool, pool.acquire()
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        clear_workspaces()  # of the break before it: the graph must not refer to memory outside of its pool
        try:
            self._graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
        except BaseException:
            self.abort()
            raise

    def end(self, output: Any) -> CudaCapturedGraph:
        """See :class:`Segment`."""
        try:
            end_capture(self._graph)
        except BaseException:
            self.abort()
            raise
        clear_workspaces()  # else the break after it would run in the pool
        captured = CudaCapturedGraph(self._graph, self._pool, self._handle)
        try:
            self._graph.instantiate()
        except BaseException:
            captured.reset()
            raise
        return captured

    def roll_back(self) -> None:
        """Nothing: its memory goes with its graph, whose reset is the session's."""

    def abort(self) -> None:
        """See :class:`Segment`."""
        self._backend.unwind(self._graph, self._pool, self._handle)


def segment_maker(backend: GraphBackend, pool: GraphPool) -> Callable[[Origins], Segment]:
    """What begins a segment, inside of :func:`segment_session`.

    Raises:
        BackendError: the backend cannot end a capture and go on with another one inside one pass, or the pool is not its own.
    """
    if isinstance(backend, CpuGraphBackend) and isinstance(pool, ArenaPool):
        places: dict[int, UntypedStorage] = {}
        return lambda origins: CpuSegment(pool, origins, places)
    if isinstance(backend, CudaGraphBackend) and isinstance(pool, CudaPool):
        return lambda _: CudaSegment(backend, pool)
    raise BackendError(
        f"breakable graphs are captured on the cpu and cuda backends, each into its own pools, not by a {type(backend).__name__} into a "
        f"{type(pool).__name__}. Use CUDAGraphWrapper there."
    )


@contextmanager
def segment_session(backend: GraphBackend) -> Iterator[None]:
    """What holds for all segments and the breaks between them."""
    if not isinstance(backend, CudaGraphBackend):
        with capture_session(), no_refusal_swallowed(), host_access_refused():
            yield
        return
    refusal: CaptureError | None = None
    with torch.cuda.device(backend.device):
        torch.cuda.synchronize()
        caller = torch.cuda.current_stream()
        with torch.cuda.stream(backend.stream):
            try:
                yield
            except CUDA_ERRORS as error:
                refusal = refusal_of(error)
        caller.wait_stream(backend.stream)
    if refusal is not None:
        raise refusal from None


def refusal_of(error: BaseException) -> CaptureError | None:
    """What is raised instead of an error of the driver, which loses its frames: they keep the failed pass's tensors alive.

    None for other errors, which are raised as they are.
    """
    if not isinstance(error, CUDA_ERRORS):
        return None
    refusal = CaptureError(driver_refusal(error))
    traceback.clear_frames(error.__traceback__)
    return refusal


def pool_memory(pool: GraphPool, origins: Origins) -> Callable[[Tensor], bool]:
    """Whether a tensor lies in the pool, so that a captured operation made it; as of now."""
    segments = [(segment.address, segment.address + segment.size_bytes) for segment in pool.segments()]

    def lies_there(tensor: Tensor) -> bool:
        if tensor.device.type == "cpu" or origins.of(tensor) is not None:
            return origins.of(tensor) == "made"
        address = tensor.untyped_storage().data_ptr()
        return any(begin <= address < end for begin, end in segments)

    return lies_there
