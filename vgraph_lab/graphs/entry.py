"""A captured graph with all that belongs to it, and the record of what it cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vgraph_lab.errors import FallbackReason, ReplayError

from .backends.base import CapturedGraph
from .descriptor import Descriptor
from .routine import Buffers
from .structure import is_like, signature

__all__ = ["CaptureCost", "GraphEntry", "Rejection"]


@dataclass(frozen=True, slots=True)
class CaptureCost:
    """What one capture took. Graphs of one pool share memory, so pool figures are marginal in capture order.

    Attributes:
        order: position among the captures of one generation, from 0.
        static_buffer_bytes: the static input buffers, outside the pool.
        output_bytes: the captured output, inside the pool.
        pool_reserved_before_bytes: reserved by the pool before this capture.
        pool_reserved_after_bytes: and after it.
        device_delta_bytes: how much less memory the device had free afterwards (other processes move it, too); None
            on the CPU, whose free memory is the whole machine's and says nothing about one graph.
        warmup_s: seconds of the eager runs.
        capture_s: seconds of the capture and the instantiation.
        gc_s: seconds of the garbage collection before it.
        node_counts: graph nodes by kind; empty where nodes cannot be listed.
        segment_addresses: of the segments that the pool took for it.
    """

    order: int
    static_buffer_bytes: int
    output_bytes: int
    pool_reserved_before_bytes: int
    pool_reserved_after_bytes: int
    device_delta_bytes: int | None
    warmup_s: float
    capture_s: float
    gc_s: float
    node_counts: Mapping[str, int]
    segment_addresses: tuple[int, ...] = ()

    @property
    def pool_delta_bytes(self) -> int:
        """By how much the pool grew for this graph."""
        return self.pool_reserved_after_bytes - self.pool_reserved_before_bytes

    @property
    def charge_bytes(self) -> int:
        """What the Manager counts against ``max_memory_bytes``: static buffers plus growth of the pool."""
        return self.static_buffer_bytes + self.pool_delta_bytes

    @property
    def total_s(self) -> float:
        """All seconds of this capture."""
        return self.warmup_s + self.capture_s + self.gc_s


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a Descriptor has no graph. It is remembered, and no later call tries again."""

    reason: FallbackReason
    detail: str


class GraphEntry:
    """One captured graph with its Descriptor, static buffers, captured output and cost record."""

    def __init__(
        self,
        target_id: str,
        descriptor: Descriptor,
        buffers: Buffers,
        graph: CapturedGraph,
        output: Any,
        cost: CaptureCost,
        *,
        owned: Sequence[Tensor],
        lazy: bool,
    ) -> None:
        self.target_id, self.descriptor, self.cost, self.lazy = target_id, descriptor, cost, lazy
        self.buffers, self.graph, self.output = buffers, graph, output
        self._owned = owned  # the graph reads their addresses, so they must not be freed before it
        self.last_use_unix_s: float | None = None
        self.is_released = False

    def check_structure(self, output: Any) -> None:
        """Refuse a materialised output whose nesting or dtypes are not those of the captured one.

        Raises:
            ReplayError: the Routine's ``output_after_replay`` changed the structure.
        """
        if not is_like(output, self.output):
            found, captured = signature(output, shapes=False), signature(self.output, shapes=False)
            raise ReplayError(
                f"output_after_replay of {self.target_id} returned {found}, the captured output is {captured}. "
                "Cut tensors as you like, but keep the structure and the dtypes."
            )

    def touch(self) -> None:
        """Note that the graph served a call just now."""
        self.last_use_unix_s = time.time()

    def release(self) -> None:
        """Reset the graph and let go of its memory. Safe to call twice; callers hold the pool."""
        self.is_released = True
        self.output, self.buffers, self._owned = None, {}, ()
        self.graph.reset()

    def __repr__(self) -> str:
        return f"GraphEntry({self.target_id}, {self.descriptor}, {'released' if self.is_released else f'{self.cost.charge_bytes:,} bytes'})"
