"""A private pool of PyTorch's caching allocator, shared by the graphs of one Manager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from threading import RLock
from types import TracebackType
from typing import Any

import torch
from torch.cuda import _POOL_HANDLE

from vgraph_lab.graphs.backends.base import PoolBlock, PoolSegment

__all__ = ["CudaPool", "StreamOrderedLock", "allocator_segments"]


def allocator_segments(handles: Iterable[_POOL_HANDLE]) -> dict[_POOL_HANDLE, list[dict[str, Any]]]:
    """The caching allocator's segments of private pools, as ``torch.cuda.memory_snapshot`` describes them, by address.

    They are chosen from the snapshot of everything. Asked for one pool, and even without an argument,
    ``torch.cuda.memory_snapshot`` passes a tuple on, and torch 2.11 gives away a reference to each of its items that it does
    not own (https://github.com/pytorch/pytorch/pull/196366). From pool number 257 on these are ordinary objects, on Python
    3.11 all are, and the process dies once one is freed that is still in use. Passing None takes no reference.

    Args:
        handles: of ``torch.cuda.graph_pool_handle``.

    Returns:
        For each handle, in the order given, its segments; none if it holds nothing.
    """
    found: dict[_POOL_HANDLE, list[dict[str, Any]]] = {handle: [] for handle in handles}
    for segment in torch._C._cuda_memorySnapshot(None)["segments"]:
        owner = segment["segment_pool_id"]
        if owner in found:
            found[owner].append(segment)
    return found


class CudaPool:
    """Memory that captures allocate from and that their graphs keep.

    The allocator destroys a pool once the last graph in it is reset, and refuses a capture into a pool that is being
    destroyed. So the handle is renewed whenever the number of graphs returns to zero.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._handles: list[_POOL_HANDLE] = []  # the last one is current; earlier ones may still hold segments
        self._graphs: Counter[_POOL_HANDLE] = Counter()  # by handle
        self._is_usable = False  # whether the current handle can take captures
        self._exclusive = StreamOrderedLock(device)

    def acquire(self) -> _POOL_HANDLE:
        """The handle to capture with. Each call is matched by one :meth:`release` or :meth:`abandon`."""
        if not self._is_usable or not self._graphs[self._handles[-1]]:
            self._handles.append(torch.cuda.graph_pool_handle())
            self._is_usable = True
        self._graphs[self._handles[-1]] += 1
        return self._handles[-1]

    def release(self, handle: _POOL_HANDLE) -> None:
        """One graph of that handle is gone."""
        self._graphs[handle] -= 1

    def abandon(self, handle: _POOL_HANDLE) -> None:
        """A capture was invalidated: its handle cannot take another one, later captures get a new handle."""
        self.release(handle)
        self._is_usable = False

    def renew(self) -> None:
        """Later captures get a new handle; the memory of the old one goes with the last graph and tensor in it."""
        self._is_usable = False

    def segments(self) -> tuple[PoolSegment, ...]:
        """Every segment with its blocks, in the allocator's order."""
        return tuple(
            PoolSegment(segment["address"], segment["total_size"], tuple(_blocks(segment["blocks"]))) for segment in self._snapshot()
        )

    def _snapshot(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for handle, segments in allocator_segments(list(self._handles)).items():
            if not segments and handle != self._handles[-1]:
                self._handles.remove(handle)
            found += segments
        return found

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments that the pool holds on the device."""
        return sum(segment["total_size"] for segment in self._snapshot())

    @property
    def live_bytes(self) -> int:
        """Bytes of the blocks that live tensors occupy."""
        return sum(segment["allocated_size"] for segment in self._snapshot())

    def exclusive(self) -> StreamOrderedLock:
        """Hold the pool for one replay; see :meth:`~vgraph_lab.graphs.backends.base.GraphPool.exclusive`."""
        return self._exclusive


def _blocks(blocks: list[dict[str, Any]]) -> Iterator[PoolBlock]:
    offset = 0
    for block in blocks:
        yield PoolBlock(offset, block["size"], block["state"] != "inactive")
        offset += block["size"]


class StreamOrderedLock:
    """A re-entrant lock that also orders streams: work of the next holder starts after work of the last one.

    Without the event, a second host thread could overwrite static buffers while the first one's replay is still
    running on its own stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = RLock()
        self._depth = 0
        self._stream: torch.cuda.Stream | None = None  # the last holder's
        self._event: torch.cuda.Event | None = None  # after its work

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        try:
            if self._depth == 1:
                self._wait_for_last_holder()
        except BaseException:  # no __exit__ follows
            self._depth -= 1
            self._lock.release()
            raise

    def _wait_for_last_holder(self) -> None:
        # Comparing raw handles costs a tenth of a microsecond, making a Stream object four.
        if self._stream is None or torch._C._cuda_getCurrentRawStream(self._device.index) != self._stream.cuda_stream:
            stream = torch.cuda.current_stream(self._device)
            if self._event is not None:
                stream.wait_event(self._event)
            self._stream = stream

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            if self._depth == 1 and self._stream is not None:
                if self._event is None:
                    with torch.cuda.device(self._device):
                        self._event = torch.cuda.Event()
                self._event.record(self._stream)
        finally:
            self._depth -= 1
            self._lock.release()
