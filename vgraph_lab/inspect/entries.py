"""What was captured, and what each graph costs: one row per graph and per Descriptor that got none."""

from __future__ import annotations

from typing import Any

import pandas as pd

from vgraph_lab.graphs.descriptor import Descriptor
from vgraph_lab.graphs.entry import CaptureCost
from vgraph_lab.graphs.report import CaptureOutcome
from vgraph_lab.graphs.stats import StatsSnapshot
from vgraph_lab.graphs.table import MIB

from .recording import Source, graphs_of, stats_of
from .records import GraphRecord

__all__ = ["ENTRY_COLUMNS", "entries_table"]


ENTRY_COLUMNS = {
    "order": "position among all captures of the Manager, from 0; missing where nothing was captured",
    "target": "id of the Target",
    "descriptor": "shape key of the graph, as printed everywhere",
    "batch_size": "rows",
    "frames": "codec frames per row",
    "state": "request state that the graph serves (streaming: the mode); empty if there is only one",
    "source_frames": "streaming: new frames kept before the step that it runs, of all its frames; missing elsewhere",
    "status": "captured, failed (its capture raised) or skipped (policy left it out)",
    "reason": "closed-set reason of a Descriptor without a graph, otherwise empty",
    "detail": "that reason in words",
    "is_lazy": "whether a call captured it, rather than start-up",
    "static_buffer_mib": "static input buffers, outside the pool",
    "output_mib": "captured output, inside the pool",
    "charge_mib": "what counts against max_memory_bytes: static buffers plus growth of the pool",
    "pool_before_mib": "reserved by the pool before this capture",
    "pool_after_mib": "reserved by the pool after it",
    "pool_delta_mib": "growth of the pool: marginal in capture order, because graphs of one pool share memory",
    "device_delta_mib": "how much less memory the device had free afterwards; other processes move it, too; missing on the CPU",
    "warmup_s": "seconds of the eager runs before the capture",
    "capture_s": "seconds of the capture and the instantiation",
    "gc_s": "seconds of the garbage collection before it",
    "nodes": "nodes of the graph",
    "kernel_nodes": "of these, kernels (CPU backend: aten calls)",
    "memcpy_nodes": "of these, copies",
    "memset_nodes": "of these, fills",
    "hits": "calls that this graph has served",
    "last_use_utc": "when it served the last one",
}
"""The columns of :func:`entries_table`, in order, with their meaning. Units are in the names."""

_DTYPES = {
    **dict.fromkeys(("target", "descriptor", "state", "status", "reason", "detail"), "str"),
    "order": "Int64",
    "source_frames": "Int64",
    "batch_size": "int64",
    "frames": "int64",
    "is_lazy": "bool",
    **dict.fromkeys(("nodes", "kernel_nodes", "memcpy_nodes", "memset_nodes"), "Int64"),
    "hits": "int64",
    **{name: "float64" for name in ENTRY_COLUMNS if name.endswith(("_mib", "_s"))},
    "last_use_utc": "datetime64[ns, UTC]",
}


def entries_table(source: Source) -> pd.DataFrame:
    """One row per GraphEntry and per rejected Descriptor, in the order in which they were tried.

    Start-up Descriptors come first, Target by Target and largest first; lazily captured ones follow in the order of
    their captures, lazily rejected ones in the order of their rejections. After ``clear`` only rejections are left.

    Args:
        source: a runner, a Manager, or a recording of one.

    Returns:
        The columns of :data:`ENTRY_COLUMNS`. Figures that a row has not got are missing, never zero.

    Raises:
        InputError: ``source`` is something else.
    """
    stats = stats_of(source)
    table = pd.DataFrame([_row(graph, stats) for graph in graphs_of(source)], columns=list(ENTRY_COLUMNS))
    table["last_use_utc"] = pd.to_datetime(table["last_use_utc"], unit="s", utc=True)
    return table.astype(_DTYPES)


def source_frames(shape: Descriptor) -> int | None:
    """New frames kept before a streaming step; None for shapes that have no such number."""
    found = getattr(shape, "source", None)
    return found if isinstance(found, int) else None


def _row(graph: GraphRecord, stats: StatsSnapshot) -> dict[str, Any]:
    target_id, descriptor, rejection = graph.target_id, graph.descriptor, graph.rejection
    return {
        "target": target_id,
        "descriptor": str(descriptor),
        "batch_size": descriptor.batch_size,
        "frames": descriptor.frames,
        "state": descriptor.state,
        "source_frames": source_frames(descriptor),
        "status": CaptureOutcome(target_id, descriptor, graph.cost, rejection).status,
        "reason": str(rejection.reason) if rejection else "",
        "detail": rejection.detail if rejection else "",
        "is_lazy": graph.is_lazy,
        **(_costs(graph.cost) if graph.cost else {}),
        "hits": stats.graph_hits(target_id, descriptor),
        "last_use_utc": graph.last_use_unix_s,
    }


def _costs(cost: CaptureCost) -> dict[str, Any]:
    return {
        "order": cost.order,
        "static_buffer_mib": cost.static_buffer_bytes / MIB,
        "output_mib": cost.output_bytes / MIB,
        "charge_mib": cost.charge_bytes / MIB,
        "pool_before_mib": cost.pool_reserved_before_bytes / MIB,
        "pool_after_mib": cost.pool_reserved_after_bytes / MIB,
        "pool_delta_mib": cost.pool_delta_bytes / MIB,
        "device_delta_mib": None if cost.device_delta_bytes is None else cost.device_delta_bytes / MIB,
        "warmup_s": cost.warmup_s,
        "capture_s": cost.capture_s,
        "gc_s": cost.gc_s,
        **_node_counts(cost),
    }


def _node_counts(cost: CaptureCost) -> dict[str, int]:
    if not cost.node_counts:  # nodes cannot be listed here, which is not the same as having none
        return {}
    counts = {f"{kind}_nodes": cost.node_counts.get(kind, 0) for kind in ("kernel", "memcpy", "memset")}
    return {"nodes": sum(cost.node_counts.values()), **counts}
