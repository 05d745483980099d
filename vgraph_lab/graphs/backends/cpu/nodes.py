"""Dependencies between recorded operations, from the memory that they read and write."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from torch import Tensor

from vgraph_lab.graphs.backends.base import GraphNode

from .geometry import byte_range
from .record import Record

__all__ = ["graph_nodes"]

Range = tuple[int, int]


def graph_nodes(records: Sequence[Record]) -> tuple[GraphNode, ...]:
    """One node per record.

    A node depends on the last writer of what it reads, and on the last readers, or else the last writer, of what it
    writes. Memory is compared by address ranges; the gaps of a strided tensor count as its own.
    """
    writes = [_ranges(record.writes) + _generator_state(record) for record in records]
    # Cells between the edges of all writes: a write always covers whole cells, so a cell has one last writer.
    edges = sorted({edge for ranges in writes for bounds in ranges for edge in bounds})
    writer: dict[int, int] = {}
    readers: dict[int, set[int]] = {}
    nodes = []
    for index, (record, ranges) in enumerate(zip(records, writes, strict=True)):
        written = _cells(ranges, edges)
        read = _cells(_ranges(record.reads), edges) - written  # what is also written waits for the same nodes and more
        needed = {writer[cell] for cell in read & writer.keys()}
        for cell in written:
            if cell in readers:
                needed |= readers.pop(cell)
            elif cell in writer:
                needed.add(writer[cell])
            writer[cell] = index
        for cell in read:
            readers.setdefault(cell, set()).add(index)
        nodes.append(GraphNode(index, record.kind, record.name, tuple(sorted(needed))))
    return tuple(nodes)


def _ranges(tensors: Iterable[Tensor]) -> list[Range]:
    return [byte_range(tensor) for tensor in tensors if tensor.numel()]


def _generator_state(record: Record) -> list[Range]:
    """A draw changes the generator: a resource of its own, at an address that no tensor has."""
    return [] if record.generator is None else [(id(record.generator), id(record.generator) + 1)]


def _cells(ranges: list[Range], edges: list[int]) -> set[int]:
    """Indices of the cells that the ranges touch. Cell ``i`` lies between edges ``i`` and ``i + 1``."""
    cells: set[int] = set()
    for first, end in ranges:
        begin = bisect_right(edges, first) - 1  # the cell that `first` lies in; -1 before the first edge
        cells.update(range(max(begin, 0), min(bisect_left(edges, end), len(edges) - 1)))
    return cells
