"""The CPU graph backend: a tape of aten calls on fixed memory, with the semantics of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from vgraph_lab.errors import CaptureError
from vgraph_lab.graphs.backends.audit import CaptureAudit, Origins, run_checked
from vgraph_lab.graphs.backends.base import BackendName, DeviceMemory, GraphPool
from vgraph_lab.graphs.backends.rules import capture_conditions, garbage_collection_paused

from .arena import ArenaPool
from .graph import CpuGraph
from .host_memory import host_memory
from .session import capture_session, is_capturing
from .side_effects import SideEffects
from .tape import Tape

__all__ = ["CpuGraphBackend"]


class CpuGraphBackend:
    """Graphs without a GPU (a :class:`~vgraph_lab.graphs.backends.base.GraphBackend`).

    A capture runs the function once and records its aten calls; a replay runs the calls again on the same memory,
    without the function's Python, and is no promise of speed. The calls run the same kernels as eagerly, so convolutional
    and transformer layers give the same bits; kernels whose bits depend on how they are called do not (LAPACK's singular
    values, eigenvalues and condition numbers differ in the last digits).
    """

    name: BackendName = "cpu"
    device = torch.device("cpu")

    def create_pool(self) -> ArenaPool:
        """A fresh, empty pool."""
        return ArenaPool()

    def warm_up(self, function: Callable[[], Any], *, static_inputs: Iterable[Tensor], owned: Iterable[Tensor], audit: bool) -> Any:
        """Run ``function`` eagerly under the conditions of a capture and return what it returns.

        Raises:
            CaptureRefusedError: with ``audit``, a call or the output breaks a capture rule.
        """
        with capture_conditions():
            if not audit:
                return function()
            return run_checked(function, CaptureAudit(static_inputs, owned))

    def capture(
        self, function: Callable[[], Any], pool: GraphPool, *, static_inputs: Iterable[Tensor], owned: Iterable[Tensor]
    ) -> tuple[CpuGraph, Any]:
        """Capture ``function`` once into ``pool`` and return the graph and the function's (static) output.

        The function runs during the capture; what that changes in static inputs, buffers and the random generator is put
        back. Automatic garbage collection pauses meanwhile, so that the pool's layout depends on the function alone.

        Raises:
            CaptureRefusedError: an operation cannot live in a graph.
            CaptureError: another capture is under way, or memory ran out.
            Exception: whatever ``function`` itself raised.
        """
        if not isinstance(pool, ArenaPool):
            raise CaptureError(
                f"the cpu backend captures into its own pools, not into a {type(pool).__name__}; use the one that create_pool() returned"
            )
        with capture_session(), pool.exclusive():
            return _capture(function, pool, Origins(static_inputs, owned))

    def is_capturing(self) -> bool:
        """Whether the calling thread is capturing."""
        return is_capturing()

    def memory(self) -> DeviceMemory:
        """Free and total memory of the machine."""
        return host_memory()

    def synchronize(self) -> None:
        """Nothing to wait for: CPU work is done when its call returns."""

    def release_cached_memory(self) -> None:
        """Nothing is cached: pools give unused segments back at once."""


def _capture(function: Callable[[], Any], pool: ArenaPool, origins: Origins) -> tuple[CpuGraph, Any]:
    lease = pool.lease()
    effects = SideEffects(origins.seats)
    tape = Tape(lease, origins, effects)
    try:
        try:
            with garbage_collection_paused(), capture_conditions():
                output = run_checked(function, tape)
        finally:
            effects.undo()
    except BaseException as error:
        # The traceback may live on in a notebook, so nothing may depend on it dying.
        tape.records.clear()
        lease.roll_back()
        if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
            raise CaptureError(f"out of memory while capturing: {error}") from error
        raise
    lease.close()
    return CpuGraph(tape.records, pool, lease), output
