"""Segments and the blocks that they are cut into. Sizes and thresholds are those of CUDA's caching allocator."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import UntypedStorage

from vgraph_lab.errors import CaptureError
from vgraph_lab.graphs.table import MIB

if TYPE_CHECKING:
    from .arena import Lease

__all__ = ["MIN_BLOCK_BYTES", "SMALL_LIMIT_BYTES", "Block", "BlockRef", "Segment", "segment_size"]

MIN_BLOCK_BYTES = 512  # every block is a multiple of this
SMALL_LIMIT_BYTES = 1 * MIB  # up to here an allocation comes from small segments
_SMALL_SEGMENT_BYTES = 2 * MIB
_LARGE_SEGMENT_BYTES = 20 * MIB  # of large allocations below `_OWN_SEGMENT_BYTES`
_OWN_SEGMENT_BYTES = 10 * MIB  # from here an allocation gets a segment of its own, rounded up
_SEGMENT_ROUNDING_BYTES = 2 * MIB


def segment_size(nbytes: int) -> int:
    """Bytes of the segment that is made for an allocation of ``nbytes``."""
    if nbytes <= SMALL_LIMIT_BYTES:
        return _SMALL_SEGMENT_BYTES
    if nbytes < _OWN_SEGMENT_BYTES:
        return _LARGE_SEGMENT_BYTES
    return -(-nbytes // _SEGMENT_ROUNDING_BYTES) * _SEGMENT_ROUNDING_BYTES


class BlockRef(weakref.ref[memoryview]):
    """Weak reference to the buffer under a block's storage; when that dies, the reference itself is queued for freeing."""

    __slots__ = ("block",)
    block: Block


class Block:
    """A stretch of a segment. Live exactly while it has a lease."""

    __slots__ = ("lease", "next", "offset", "previous", "ref", "segment", "size")

    def __init__(self, segment: Segment, offset: int, size: int) -> None:
        self.segment, self.offset, self.size = segment, offset, size
        self.previous: Block | None = None
        self.next: Block | None = None
        self.lease: Lease | None = None
        self.ref: BlockRef | None = None

    @property
    def free(self) -> bool:
        """Whether nothing lives here."""
        return self.lease is None

    def alias_storage(self, nbytes: int) -> UntypedStorage:
        """A storage over the first ``nbytes`` that does not own the block and cannot grow beyond them."""
        with torch.inference_mode(False):
            return torch.frombuffer(self.segment.memory[self.offset : self.offset + nbytes], dtype=torch.uint8).untyped_storage()

    def split(self, size: int) -> Block:
        """Shrink to ``size`` and return the rest as a block of its own."""
        rest = Block(self.segment, self.offset + size, self.size - size)
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def absorb_next(self) -> None:
        """Grow over the following block, which ceases to exist."""
        absorbed = self.next
        if absorbed is None:
            raise ValueError("the last block of a segment has nothing to absorb")
        self.size += absorbed.size
        self.next = absorbed.next
        if self.next is not None:
            self.next.previous = self


class Segment:
    """One mapping of anonymous memory.

    Attributes:
        number: order of making inside the pool.
        size: bytes.
        small: whether it serves allocations up to ``SMALL_LIMIT_BYTES``.
        address: of the first byte.
        memory: the bytes. Every slice keeps the mapping alive, also after the pool has given the segment back.
        first: the block at offset 0, head of the chain.
        leases: graphs that were captured into this segment.
        retired: whether it serves no allocation any more and only waits for what lives in it.
    """

    __slots__ = ("address", "first", "leases", "memory", "number", "retired", "size", "small")

    def __init__(self, number: int, size: int, small: bool) -> None:
        self.number, self.size, self.small = number, size, small
        self.memory = memoryview(_map(size))
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self.first = Block(self, 0, size)
        self.leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self.retired = False

    def blocks(self) -> Iterator[Block]:
        """The chain of blocks by address."""
        block: Block | None = self.first
        while block is not None:
            yield block
            block = block.next

    @property
    def unused(self) -> bool:
        """Whether no block lives here and no graph replays here."""
        return self.first.free and self.first.size == self.size and not self.leases


def _map(size: int) -> mmap.mmap:
    try:
        if hasattr(mmap, "MAP_ANONYMOUS"):
            return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return mmap.mmap(-1, size)  # Windows, where an anonymous mapping is private anyway
    except OSError as error:
        raise CaptureError(f"out of memory: the machine gives no segment of {size / MIB:.0f} MiB ({error})") from error
