"""What a graph pool consists of: its segments, what lives in them, and what is kept for the next replay."""

from __future__ import annotations

from typing import Any

import pandas as pd

from vgraph_lab.graphs.table import MIB

from .recording import Source, segments_of
from .records import SegmentRecord

__all__ = ["SEGMENT_COLUMNS", "segments_table"]


SEGMENT_COLUMNS = {
    "segment": "number of the segment, from 1, in the order of the captures that took them",
    "segment_mib": "size of the whole segment: what the pool got from the system in one piece",
    "made_by": "Target and Descriptor whose capture took the segment; empty if that graph was rejected or is gone",
    "offset_mib": "where in the segment the block begins",
    "block_mib": "size of the block: one allocation, rounded up, or a gap between allocations",
    "is_live": "whether a tensor lives there now; what does not is memory that replays use and overwrite in turn",
    "held_by": "Target and Descriptor whose captured output lives there; empty for gaps, and for what is no output (a workspace, say)",
}
"""The columns of :func:`segments_table`, in order, with their meaning. Units are in the names."""


def segments_table(source: Source) -> pd.DataFrame:
    """One row per block of each segment of the graph pool, as of now.

    ``block_mib`` adds up to what the pool reserves, and of live blocks to its live bytes.

    Args:
        source: a runner, a Manager, or a recording of one.

    Returns:
        The columns of :data:`SEGMENT_COLUMNS`; no rows where there is no pool or nothing in it.

    Raises:
        InputError: ``source`` is something else.
    """
    rows = [row for number, segment in enumerate(segments_of(source), start=1) for row in _rows(number, segment)]
    types = {"segment": "int64", "made_by": "str", "held_by": "str", "is_live": "bool"}
    sizes = dict.fromkeys(("segment_mib", "offset_mib", "block_mib"), "float64")
    return pd.DataFrame(rows, columns=list(SEGMENT_COLUMNS)).astype({**types, **sizes})


def _rows(number: int, segment: SegmentRecord) -> list[dict[str, Any]]:
    rows, offset = [], 0
    for block in segment.blocks:
        rows.append(
            {
                "segment": number,
                "segment_mib": segment.size_bytes / MIB,
                "made_by": segment.made_by,
                "offset_mib": offset / MIB,
                "block_mib": block.size_bytes / MIB,
                "is_live": block.is_live,
                "held_by": block.held_by,
            }
        )
        offset += block.size_bytes
    return rows
