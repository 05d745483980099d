"""Whose memory each piece of a graph pool is: which capture took the segment, and whose output lives in the block."""

from __future__ import annotations

from bisect import bisect_right
from typing import TypeAlias

from vgraph_lab.graphs.manager import VocoderCUDAGraphManager
from vgraph_lab.graphs.structure import tensors
from vgraph_lab.vllm_v1 import WrapperGraphs

from .records import BlockRecord, SegmentRecord

__all__ = ["Graphs", "pool_layout"]

Graphs: TypeAlias = VocoderCUDAGraphManager | WrapperGraphs
"""A Manager, or the graphs of vLLM's own path, which read like one."""


def pool_layout(manager: Graphs) -> tuple[SegmentRecord, ...]:
    """The segments of a Manager's pool, in the order of the captures that took them; those of captures that are gone come last."""
    makers: dict[int, str] = {}
    outputs: dict[int, str] = {}  # by address
    for entry in sorted(manager.entries(), key=lambda entry: entry.cost.order):
        name = f"{entry.target_id} {entry.descriptor}"
        makers.update(dict.fromkeys(entry.cost.segment_addresses, name))
        outputs.update((tensor.untyped_storage().data_ptr(), name) for tensor in tensors(entry.output))
    addresses = sorted(outputs)
    place = {address: number for number, address in enumerate(makers)}
    found = []
    for segment in sorted(manager.pool.segments(), key=lambda segment: place.get(segment.address, len(place))):
        blocks = []
        for block in segment.blocks:
            begin = segment.address + block.offset_bytes
            inside = addresses[bisect_right(addresses, begin - 1) : bisect_right(addresses, begin + block.size_bytes - 1)]
            blocks.append(BlockRecord(block.size_bytes, block.is_live, outputs[inside[0]] if inside and block.is_live else ""))
        found.append(SegmentRecord(segment.size_bytes, makers.get(segment.address, ""), tuple(blocks)))
    return tuple(found)
