"""Memory of CPU graphs: blocks cut from segments by the rules of CUDA's caching allocator.

A tensor of the arena owns its block through its *storage*: the block is freed exactly when the storage dies, that is
with the last view. Kernel workspaces and temporaries are not in the arena, so its bytes are no forecast of a GPU's.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vgraph_lab.errors import CaptureError
from vgraph_lab.graphs.backends.base import PoolBlock, PoolSegment

from .segment import MIN_BLOCK_BYTES, SMALL_LIMIT_BYTES, Block, BlockRef, Segment, segment_size

__all__ = ["ArenaPool", "Lease"]


class ArenaPool:
    """Memory shared by CPU graphs (a :class:`~vgraph_lab.graphs.backends.base.GraphPool`).

    Segments stay while a graph was captured into them or a block of them is live, and are given back after that.
    A storage may die in any thread and at any point, even inside this class's own methods (garbage collection); its
    finalizer therefore only appends to a queue, and the next call that holds the lock frees the block.
    """

    def __init__(self) -> None:
        self._exclusive = threading.RLock()  # one capture or replay at a time
        self._lock = threading.RLock()  # the fields below
        self._segments: list[Segment] = []
        self._made_segments = 0
        self._free: dict[bool, list[Block]] = {True: [], False: []}  # by `Segment.small`, ordered by `_fit`
        self._live_bytes = 0
        self._dead: deque[BlockRef] = deque()
        self._open: Lease | None = None

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments that the pool holds."""
        with self._lock:
            self._settle()
            return sum(segment.size for segment in self._segments)

    @property
    def live_bytes(self) -> int:
        """Bytes of the blocks that live tensors occupy."""
        with self._lock:
            self._settle()
            return self._live_bytes

    def segments(self) -> tuple[PoolSegment, ...]:
        """Every segment with its blocks, in the order of their making."""
        with self._lock:
            self._settle()
            return tuple(
                PoolSegment(
                    segment.address, segment.size, tuple(PoolBlock(block.offset, block.size, not block.free) for block in segment.blocks())
                )
                for segment in self._segments
            )

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the pool for one capture or replay; other threads wait. Re-entrant on one thread."""
        with self._exclusive:
            yield

    def renew(self) -> None:
        """Later captures get new segments; those of now go with the last graph or block in them."""
        with self._lock:
            self._settle()
            for segment in self._segments:
                segment.retired = True
            self._free = {True: [], False: []}

    def lease(self) -> Lease:
        """Begin the allocations of one capture. The caller holds :meth:`exclusive` until it closes the lease."""
        with self._lock:
            if self._open is not None:
                raise CaptureError("this pool is already being captured into; finish that capture first")
            self._settle()
            self._open = Lease(self)
            return self._open

    def _allocate(self, nbytes: int, lease: Lease) -> tuple[Block, Tensor]:
        size = -(-max(nbytes, 1) // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        small = size <= SMALL_LIMIT_BYTES
        with self._lock:
            self._free_dead_blocks()
            free = self._free[small]
            best = bisect_left(free, (size, -1, -1), key=_fit)
            block = free.pop(best) if best < len(free) else self._grow(size, small)
            rest = block.size - size
            if rest >= MIN_BLOCK_BYTES if small else rest > SMALL_LIMIT_BYTES:
                insort(free, block.split(size), key=_fit)
            block.lease = lease
            block.segment.leases.add(lease)
            self._live_bytes += block.size
            return block, self._tensor(block, nbytes)

    def _tensor(self, block: Block, nbytes: int) -> Tensor:
        buffer = block.segment.memory[block.offset : block.offset + nbytes]
        block.ref = BlockRef(buffer, self._dead.append)
        block.ref.block = block
        with torch.inference_mode(False):
            return torch.frombuffer(buffer, dtype=torch.uint8)

    def _grow(self, size: int, small: bool) -> Block:
        segment = Segment(self._made_segments, segment_size(size), small)
        self._made_segments += 1
        self._segments.append(segment)
        return segment.first

    def _settle(self) -> None:
        """Free dead blocks; outside of captures, also give back the segments that nothing uses any more."""
        self._free_dead_blocks()
        if self._open is not None:
            return
        for segment in [segment for segment in self._segments if segment.unused]:
            self._withdraw(segment.first)
            self._segments.remove(segment)

    def _free_dead_blocks(self) -> None:
        """Free the blocks of dead storages. During a capture only its own: its layout does not depend on other threads' timing."""
        postponed = []
        while self._dead:
            ref = self._dead.popleft()
            block = ref.block
            if block.ref is not ref:
                continue  # freed before its storage died, by a roll-back
            if self._open is not None and block.lease is not self._open:
                postponed.append(ref)
            else:
                self._release(block)
        self._dead.extend(postponed)

    def _release(self, block: Block) -> None:
        self._live_bytes -= block.size
        block.lease = block.ref = None
        if block.next is not None and block.next.free:
            self._withdraw(block.next)
            block.absorb_next()
        if block.previous is not None and block.previous.free:
            self._withdraw(block.previous)
            block = block.previous
            block.absorb_next()
        if not block.segment.retired:
            insort(self._free[block.segment.small], block, key=_fit)

    def _withdraw(self, block: Block) -> None:
        """Take a free block off the free list."""
        if block.segment.retired:
            return
        free = self._free[block.segment.small]
        del free[bisect_left(free, _fit(block), key=_fit)]


class Lease:
    """The allocations of one capture, and the claim of its graph on the segments that they lie in.

    Until :meth:`close` or :meth:`roll_back`, the capture reuses what was free when it began and what itself has freed.
    """

    def __init__(self, pool: ArenaPool) -> None:
        self._pool = pool

    def allocate(self, nbytes: int) -> tuple[Block, Tensor]:
        """A block and its owning tensor: uint8 of shape ``[nbytes]``, whose storage keeps the block.

        Raises:
            CaptureError: the machine gives no memory for another segment.
        """
        return self._pool._allocate(nbytes, self)

    def close(self) -> None:
        """The capture succeeded: its segments stay for the graph that keeps this lease."""
        with self._pool._lock:
            self._pool._open = None

    def roll_back(self) -> None:
        """The capture failed: free everything that it allocated, whatever still refers to it."""
        pool = self._pool
        with pool._lock:
            pool._free_dead_blocks()
            for block in [block for segment in pool._segments for block in segment.blocks() if block.lease is self]:
                pool._release(block)
            self._end()

    def release(self) -> None:
        """The graph is gone: its segments go with the last live block. Safe to call twice."""
        with self._pool._lock:
            self._end()

    def _end(self) -> None:
        pool = self._pool
        if pool._open is self:
            pool._open = None
        for segment in pool._segments:
            segment.leases.discard(self)
        pool._settle()


def _fit(block: Block) -> tuple[int, int, int]:
    """Order of the free list: best fit first, then the oldest segment, then the lowest address."""
    return block.size, block.segment.number, block.offset
