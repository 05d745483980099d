"""Records of :mod:`~.compare` as tables for charts and notebooks, and reading them back from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from vgraph_lab.errors import InputError
from vgraph_lab.graphs.table import MIB
from vgraph_lab.inspect.kernel_times import REST
from vgraph_lab.inspect.work_kinds import WORK_KINDS

from .record import MeasurementRecord

__all__ = [
    "COST_COLUMNS",
    "KIND_COLUMNS",
    "PART_COLUMNS",
    "TIME_COLUMNS",
    "costs_frame",
    "kinds_frame",
    "parts_frame",
    "read_compare",
    "recorded_compare",
    "times_frame",
]

TIME_COLUMNS = {
    "contender": "who decoded",
    "batch_size": "streams decoded together",
    "steady_ms": "median time of a full chunk of each stream",
    "p10_ms": "10th percentile",
    "p90_ms": "90th percentile",
    "speedup": "how many times faster than published-eager",
    "floor_ms": "the least that layer-by-layer execution can take",
    "floor_share": "of the measured time, 0 to 1",
    "first_ms": "median time of the first frame of new streams",
    "snr_db": "against the whole utterance in fp32; empty if nothing differs",
}
"""The columns of :func:`times_frame`, in order, with their meaning."""

KIND_COLUMNS = {
    "contender": "who decoded",
    "work": "kind of work, told by the kernels' names",
    "total_ms": "time of such kernels in one steady call, in a trace",
    "time_share": "of the time of all kernels of the call, 0 to 1",
}
"""The columns of :func:`kinds_frame`, in order, with their meaning."""

PART_COLUMNS = {
    "contender": "who decoded, eager",
    "part": "part of the decoder; state and codebooks: what runs outside of all others",
    "total_ms": "its time in one steady call, in a trace",
    "floor_ms": "the least that layer-by-layer execution can take",
}
"""The columns of :func:`parts_frame`, in order, with their meaning."""

COST_COLUMNS = {
    "contender": "who decoded",
    "graphs": "graphs captured; empty for peers",
    "start_s": "seconds until it was ready: weights prepared, tuned, compiled, warmed up, captured",
    "pool_mib": "memory of the graphs' pool",
    "state_mib": "memory that one request keeps between chunks",
}
"""The columns of :func:`costs_frame`, in order, with their meaning."""

_OUTSIDE = "state and codebooks"


def read_compare(path: Path) -> MeasurementRecord:
    """A record that ``vgraph-lab bench compare --output`` has written.

    Raises:
        InputError: there is no such file, or it holds something else.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        record = MeasurementRecord(**plain)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} is no record of a bench ({error}). Expected what 'vgraph-lab bench compare --output' writes.") from error
    if record.bench != "compare":
        raise InputError(f"{path} is a record of 'vgraph-lab bench {record.bench}'. Expected one of 'vgraph-lab bench compare'.")
    return record


def recorded_compare(name: str = "compare_h200.json") -> MeasurementRecord | None:
    """A record of this project's own, from ``data/measurements`` of its source tree; None where that is not at hand."""
    path = Path(__file__).parents[2] / "data" / "measurements" / name
    return read_compare(path) if path.is_file() else None


def times_frame(record: MeasurementRecord) -> pd.DataFrame:
    """One row per contender and batch size, with the columns of :data:`TIME_COLUMNS`."""
    rows = [
        {
            "contender": row["contender"],
            "batch_size": row["batch_size"],
            "steady_ms": row["steady_wall_ms"],
            "p10_ms": row["steady_wall_p10_ms"],
            "p90_ms": row["steady_wall_p90_ms"],
            "speedup": row["speedup_steady"],
            "floor_ms": row["floor_ms"],
            "floor_share": row["floor_share"],
            "first_ms": row["first_wall_ms"],
            "snr_db": row["snr_db"],
        }
        for row in record.rows
    ]
    table = pd.DataFrame(rows, columns=list(TIME_COLUMNS))
    return table.astype({name: "float64" for name in TIME_COLUMNS if name not in ("contender", "batch_size")})


def kinds_frame(record: MeasurementRecord, batch_size: int) -> pd.DataFrame:
    """Time by kind of work of all contenders, with the columns of :data:`KIND_COLUMNS`. Those without a trace have no rows.

    Raises:
        InputError: nothing was measured at this batch size.
    """
    rows: list[dict[str, Any]] = []
    for row in _at(record, batch_size):
        found = row["kernel_ms_by_kind"]
        total = sum(found.values())
        rows += [
            {"contender": row["contender"], "work": kind, "total_ms": found[kind], "time_share": found[kind] / total}
            for kind in WORK_KINDS
            if kind in found
        ]
    return pd.DataFrame(rows, columns=list(KIND_COLUMNS)).astype({"total_ms": "float64", "time_share": "float64"})


def parts_frame(record: MeasurementRecord, batch_size: int) -> pd.DataFrame:
    """Time by part of the decoder of our own eager contenders, with the columns of :data:`PART_COLUMNS`.

    Raises:
        InputError: nothing was measured at this batch size.
    """
    floors = {part["part"]: part["floor_ms"] for part in record.settings["floors"][str(batch_size)]} if _at(record, batch_size) else {}
    rows = [
        {
            "contender": row["contender"],
            "part": _OUTSIDE if part == REST else part,
            "total_ms": total_ms,
            "floor_ms": floors["quantizer" if part == REST else part],
        }
        for row in _at(record, batch_size)
        for part, total_ms in row.get("part_ms", {}).items()
    ]
    return pd.DataFrame(rows, columns=list(PART_COLUMNS)).astype({"total_ms": "float64", "floor_ms": "float64"})


def costs_frame(record: MeasurementRecord) -> pd.DataFrame:
    """What each contender takes before and beside its work, with the columns of :data:`COST_COLUMNS`."""
    rows = [
        {
            "contender": name,
            "graphs": facts.get("graphs"),
            "start_s": facts.get("ready_seconds"),
            "pool_mib": _mib(facts.get("pool_reserved_bytes")),
            "state_mib": _mib(facts["state_bytes_per_request"]),
        }
        for name, facts in record.settings["contenders"].items()
    ]
    types = {"graphs": "Int64", "start_s": "float64", "pool_mib": "float64", "state_mib": "float64"}
    return pd.DataFrame(rows, columns=list(COST_COLUMNS)).astype(types)


def _mib(count: int | None) -> float | None:
    return None if count is None else count / MIB


def _at(record: MeasurementRecord, batch_size: int) -> list[dict[str, Any]]:
    rows = [row for row in record.rows if row["batch_size"] == batch_size]
    if not rows:
        raise InputError(f"nothing was measured with {batch_size} streams. Measured: {sorted({row['batch_size'] for row in record.rows})}.")
    return rows
