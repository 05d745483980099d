"""Where the device's memory is, in one sum that adds up; and how well the memory profile had foretold the capture."""

from __future__ import annotations

from typing import Any

import pandas as pd

from vgraph_lab.errors import InputError
from vgraph_lab.graphs.table import MIB

from .recording import Recording, Source, figures_of, memory_before, read_memory
from .records import CaptureFigures, MemoryReading

__all__ = ["ESTIMATE_COLUMNS", "LEDGER_COLUMNS", "LEDGER_PARTS", "estimate_table", "ledger_table"]


LEDGER_PARTS = ("weights", "state", "static buffers", "pool", "other", "free")
"""What the total is made of, in this order. Static buffers and pool are the graphs."""

LEDGER_COLUMNS = {
    "part": "weights, state, static buffers, pool, other, free; and total, which is their sum",
    "before_mib": "when the capture began; missing if there was none",
    "now_mib": "now, or when the recording was made",
    "change_mib": "now minus before",
    "meaning": "what the part is on this device",
}
"""The columns of :func:`ledger_table`, in order, with their meaning. Units are in the names."""

ESTIMATE_COLUMNS = {
    "target": "id of the Target; empty in the last row, the total",
    "descriptor": "shape of the graph; total in the last row",
    "estimated_mib": "static buffers and growth of the pool in the memory profile; missing if it was not captured there",
    "measured_mib": "likewise in the capture",
    "error_mib": "estimated minus measured",
    "error_share": "that over measured; missing where nothing was measured",
}
"""The columns of :func:`estimate_table`, in order, with their meaning. Units are in the names."""

_MEANINGS = {
    "weights": "parameters and buffers of the model",
    "state": "request state, allocated once",
    "static buffers": "graphs: their static inputs, outside the pool",
    "pool": "graphs: all segments of their pool ({live} MiB of it in live tensors)",
    "other": "what is left by definition: driver's context, libraries, cached memory, other programs",
    "free": "as the driver says",
    "total": "the device's memory",
}
_ON_CPU = {
    "pool": "graphs: all segments of their pool ({live} MiB of it in live tensors); pages never touched are still free",
    "other": "what is left by definition: this machine's other programs, and this one's own memory",
    "free": "available, as the machine says; it changes with everything that runs",
    "total": "the machine's memory, since this is the cpu backend",
}


def ledger_table(source: Source, *, before: MemoryReading | None = None) -> pd.DataFrame:
    """Weights + state + static buffers + pool + other + free = total, before the capture and now.

    It adds up exactly, because *other* is what is left. *Other* may be negative on the CPU, where the machine counts pages
    that nobody has touched as available, although they are allocated.

    Args:
        source: a runner, a Manager, or a recording of one.
        before: what :func:`~vgraph_lab.inspect.recording.read_memory` returned earlier; by default, what
            :func:`~vgraph_lab.inspect.recording.memory_before` tells of the moment when the capture began.

    Returns:
        One row per part and one for the total, with the columns of :data:`LEDGER_COLUMNS`.

    Raises:
        InputError: ``source`` is something else; or ``before`` is of another device.
    """
    now = read_memory(source)
    is_cpu = (source.device if isinstance(source, Recording) else str(source.backend.device)) == "cpu"
    if before is None:
        before = memory_before(source)
    if before is not None and before.total_bytes != now.total_bytes:
        raise InputError(
            f"the reading before is of a device with {before.total_bytes:,} bytes, this one has {now.total_bytes:,}: "
            "take both readings of one runner."
        )
    meanings = _MEANINGS | (_ON_CPU if is_cpu else {})
    earlier, later = None if before is None else _parts(before), _parts(now)
    rows = []
    for part in (*LEDGER_PARTS, "total"):
        row: dict[str, Any] = {"part": part, "now_mib": later[part] / MIB}
        row["meaning"] = meanings[part].format(live=f"{now.pool_live_bytes / MIB:,.2f}")
        if earlier is not None:
            row |= {"before_mib": earlier[part] / MIB, "change_mib": (later[part] - earlier[part]) / MIB}
        rows.append(row)
    table = pd.DataFrame(rows, columns=list(LEDGER_COLUMNS))
    return table.astype({name: "float64" if name.endswith("_mib") else "str" for name in LEDGER_COLUMNS})


def _parts(reading: MemoryReading) -> dict[str, int]:
    return {
        "weights": reading.weights_bytes,
        "state": reading.state_bytes,
        "static buffers": reading.static_buffer_bytes,
        "pool": reading.pool_bytes,
        "other": reading.other_bytes,
        "free": reading.free_bytes,
        "total": reading.total_bytes,
    }


def estimate_table(source: Source | CaptureFigures) -> pd.DataFrame:
    """The memory profile beside what the capture took: one row per graph in capture order, and the total.

    Shares of a single graph's error mean little: graphs of one pool share memory, so a graph may find its memory there
    already. The total is what counts.

    Args:
        source: a runner, a Manager, a recording of one, or ``CaptureFigures.of(report)``.

    Returns:
        The columns of :data:`ESTIMATE_COLUMNS`.

    Raises:
        InputError: there was no capture or no profile, or ``source`` is something else.
    """
    found = source if isinstance(source, CaptureFigures) else figures_of(source)
    if found is None:
        raise InputError("there was no capture yet, or the recording was made without its report. Call profile_memory(), then capture.")
    if not found.estimates:
        raise InputError("there is no estimate: call profile_memory() before the capture, which then keeps it in its report.")
    rows = [_estimate_row(e.target_id, str(e.descriptor), e.estimated_bytes, e.measured_bytes) for e in found.estimates]
    estimated, measured = (sum(getattr(e, name) or 0 for e in found.estimates) for name in ("estimated_bytes", "measured_bytes"))
    rows.append(_estimate_row("", "total", estimated, measured))
    table = pd.DataFrame(rows, columns=list(ESTIMATE_COLUMNS))
    return table.astype({name: "float64" if name.endswith(("_mib", "_share")) else "str" for name in ESTIMATE_COLUMNS})


def _estimate_row(target: str, descriptor: str, estimated: int | None, measured: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {"target": target, "descriptor": descriptor}
    if estimated is not None:
        row["estimated_mib"] = estimated / MIB
    if measured is not None:
        row["measured_mib"] = measured / MIB
    if estimated is not None and measured is not None:
        row["error_mib"] = (estimated - measured) / MIB
        row["error_share"] = (estimated - measured) / measured if measured else None
    return row
