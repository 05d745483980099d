"""What a graph backend is: capture once, replay on the same memory, account for the memory.

Two implementations keep this contract, ``cuda`` (``torch.cuda.CUDAGraph``) and ``cpu`` (a tape of aten calls). Both
are held to one shared test suite, so everything above this module is free of backend questions.

Semantics that every backend keeps:

* a graph's memory has fixed addresses: inputs change only through static buffers, and the next replay overwrites the
  outputs of the last one;
* graphs of one pool share memory: they must not replay concurrently, which is what :meth:`GraphPool.exclusive` is for;
* an operation that synchronises with the host or whose output shape depends on data is refused during capture with
  :class:`~vgraph_lab.errors.CaptureRefusedError`, naming the operation and the user's line;
* random numbers come from the default generator of the device, and each replay draws new ones; another generator, or
  seeding inside the captured function, is refused;
* a tensor that is neither a static input nor owned by the model (parameter, buffer) nor made inside the captured
  function is refused: a graph would keep reading its address after the caller has let go of it;
* a failed capture leaves the pool's live bytes and all earlier graphs as they were;
* a graph uses memory of its pool, its static inputs and what the model owns, and nothing else. So resetting one graph
  never takes memory away from another one of the same pool, whose memory stays until its last graph is reset.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch

__all__ = [
    "BackendName",
    "CapturedGraph",
    "DeviceMemory",
    "GraphBackend",
    "GraphNode",
    "GraphPool",
    "NodeKind",
    "PoolBlock",
    "PoolSegment",
    "count_nodes",
    "new_addresses",
    "reserved_bytes",
]

BackendName = Literal["cuda", "cpu"]
NodeKind = Literal["kernel", "memcpy", "memset", "host", "event", "child", "empty", "other"]


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node of a captured graph, in an order that respects its dependencies.

    Attributes:
        index: position in the listing.
        kind: what the node does.
        name: kernel function name (CUDA) or aten overload (CPU); empty for kinds that have none.
        dependencies: indices of the nodes that must finish first.
    """

    index: int
    kind: NodeKind
    name: str = ""
    dependencies: tuple[int, ...] = ()


def count_nodes(nodes: Iterable[GraphNode]) -> dict[str, int]:
    """Number of nodes by kind, most frequent first."""
    return dict(Counter(node.kind for node in nodes).most_common())


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A reading of the device's memory, in bytes. ``free`` and ``total`` are the driver's (CPU: the machine's)."""

    free_bytes: int
    total_bytes: int
    allocated_bytes: int  # live tensors of this process's allocator; 0 where the allocator keeps no count
    reserved_bytes: int  # segments held by that allocator; 0 where it keeps no count


@dataclass(frozen=True, slots=True)
class PoolBlock:
    """A stretch of a segment: one allocation, or a gap between allocations.

    Attributes:
        offset_bytes: from the beginning of the segment.
        size_bytes: with what the allocator added to round the allocation up.
        is_live: whether a tensor, or a library's workspace, occupies it.
    """

    offset_bytes: int
    size_bytes: int
    is_live: bool


@dataclass(frozen=True, slots=True)
class PoolSegment:
    """What the pool got from the system in one piece.

    Attributes:
        address: of its first byte.
        size_bytes: of all of it.
        blocks: by offset; together they are the segment.
    """

    address: int
    size_bytes: int
    blocks: tuple[PoolBlock, ...]


def reserved_bytes(segments: Iterable[PoolSegment]) -> int:
    """Bytes of all segments."""
    return sum(segment.size_bytes for segment in segments)


def new_addresses(before: Iterable[PoolSegment], after: Iterable[PoolSegment]) -> tuple[int, ...]:
    """Addresses of the segments that a pool has taken between two readings."""
    known = {segment.address for segment in before}
    return tuple(segment.address for segment in after if segment.address not in known)


@runtime_checkable
class GraphPool(Protocol):
    """Memory shared by the graphs of one Manager."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments that the pool holds."""

    @property
    def live_bytes(self) -> int:
        """Bytes of the blocks that live tensors occupy (outputs of captured graphs, mostly)."""

    def segments(self) -> tuple[PoolSegment, ...]:
        """Every segment with its blocks, as of now."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold the pool for one replay: copy-in, replay and materialisation happen inside.

        Host threads wait for each other, and on CUDA the current stream waits for the last stream that used the pool.
        Re-entrant on one thread.
        """

    def renew(self) -> None:
        """Start over: later captures get fresh memory, none of which any earlier graph has seen.

        Callers reset the pool's graphs first. What still lives in the old memory (an output that somebody kept) keeps
        it until it dies, and counts as reserved until then.
        """


@runtime_checkable
class CapturedGraph(Protocol):
    """One captured graph. ``replay`` after ``reset`` raises :class:`~vgraph_lab.errors.ReplayError`."""

    def replay(self) -> None:
        """Run the recorded work on the recorded memory, on the current stream. Callers hold ``pool.exclusive()``."""

    def reset(self) -> None:
        """Release the recording and its memory. Safe to call twice."""

    def nodes(self) -> Sequence[GraphNode]:
        """The recorded nodes. Empty after ``reset``."""


class GraphBackend(Protocol):
    """Capture, memory queries and capture state on one device."""

    name: BackendName
    device: torch.device

    def create_pool(self) -> GraphPool:
        """A fresh, empty pool."""

    def warm_up(
        self, function: Callable[[], Any], *, static_inputs: Iterable[torch.Tensor], owned: Iterable[torch.Tensor], audit: bool
    ) -> Any:
        """Run ``function`` eagerly where and how a capture would run it (side stream, no grad, autocast cache off).

        With ``audit=True`` every operation is checked against the capture rules, so that most mistakes are reported
        with the user's line before a capture starts. Returns what ``function`` returns.
        """

    def capture(
        self, function: Callable[[], Any], pool: GraphPool, *, static_inputs: Iterable[torch.Tensor], owned: Iterable[torch.Tensor]
    ) -> tuple[CapturedGraph, Any]:
        """Capture ``function`` once into ``pool`` and return the graph and the function's (static) output.

        Args:
            function: takes nothing; reads static inputs and owned tensors only.
            static_inputs: the buffers through which inputs change between replays; the captured function may write
                to them.
            owned: parameters and buffers of the model, read in place by every replay.

        Raises:
            CaptureRefusedError: an operation cannot live in a graph.
            CaptureError: the capture failed for another reason (out of memory, nested capture).
        """

    def is_capturing(self) -> bool:
        """Whether the calling thread's current stream is being captured by anyone."""

    def memory(self) -> DeviceMemory:
        """Current memory reading of the device."""

    def synchronize(self) -> None:
        """Wait for all work on the device."""

    def release_cached_memory(self) -> None:
        """Give unused cached memory back to the system, where the backend caches any; scratch memory of libraries, too."""
