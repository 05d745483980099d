"""The record of :mod:`~.compare` for people."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vgraph_lab.graphs.table import MIB

from .contenders import NOT_ASKED
from .record import MeasurementRecord

__all__ = ["compare_table"]

_SHORT = {
    "convolution": "conv",
    "matrix product": "matmul",
    "own kernels": "own",
    "softmax/attention": "attn",
    "elementwise": "elem",
    "copy": "copy",
    "layout conversion": "layout",
    "other": "other",
}
"""Kinds of work as headings."""


def compare_table(record: MeasurementRecord) -> Group:
    """Contenders at each batch size: times, share of the floor, distance from fp32; where the time goes; costs, and who is missing."""
    s = record.settings
    times = _times(record, on_gpu="cuda" in record.machine)
    return Group(times, _kinds(record), *_floors(s), "", *_costs(s), *_absent(s))


def _times(record: MeasurementRecord, *, on_gpu: bool) -> Table:
    s = record.settings
    title = escape(f"{record.machine['card']}, {s['dtype']}, {s['weights']}")
    hosts = [["host"], ["host"]] if on_gpu else [[], []]
    headings = ("B", "contender", "steady", "± %", "÷", "floor", *hosts[0], "handle", *hosts[1], "first", "SNR")
    table = _table(title, headings)
    table.caption = (
        f"median ms. steady: a chunk of {s['chunk_frames']} frames; handle: the same through the Target alone; first: one frame of new "
        "streams. ± %: half of p10 to p90. ÷: published-eager over this. floor: the least it can take, in % of steady. "
        "SNR: dB against the whole utterance in fp32."
    )
    table.caption += " host: µs of a call before it, in a burst." if on_gpu else ""
    for size, rows in groupby(record.rows, key=lambda row: row["batch_size"]):
        for number, row in enumerate(rows):
            table.add_row("" if number else str(size), row["contender"], *_cells(row, on_gpu))
        table.add_section()
    return table


def _cells(row: dict[str, Any], on_gpu: bool) -> list[str]:
    steady = row["steady_wall_ms"]
    hosts = [[_figure(row.get(f"{kind}_burst_host_us"), ",.0f")] if on_gpu else [] for kind in ("steady", "handle")]
    return [
        _ms(steady),
        f"{50 * (row['steady_wall_p90_ms'] - row['steady_wall_p10_ms']) / steady:.0f}",
        _figure(row["speedup_steady"], ".2f"),
        f"{100 * row['floor_share']:.1f}",
        *hosts[0],
        _ms(row.get("handle_wall_ms")),
        *hosts[1],
        _ms(row["first_wall_ms"]),
        "exact" if row["largest_difference"] == 0 else _figure(row["snr_db"], ".1f"),
    ]


def _kinds(record: MeasurementRecord) -> Table:
    """Where the time of a steady chunk goes at the largest batch size."""
    largest = max((row["batch_size"] for row in record.rows), default=0)
    rows = [row for row in record.rows if row["batch_size"] == largest]
    kinds = [kind for kind in _SHORT if any(row["kernel_ms_by_kind"].get(kind) for row in rows)]
    table = _table(f"where it goes at B={largest}, ms", ("contender", "nodes", *(_SHORT[kind] for kind in kinds), "lay. %"))
    table.caption = (
        "time of the device's kernels (on a CPU: of operations) by kind of work, in a trace. nodes: of the graphs of one call. "
        "lay. %: layout conversion, of all"
    )
    for row in rows:
        found, share = row["kernel_ms_by_kind"], row["conversion_share"]
        shown = [_ms(found.get(kind)) for kind in kinds]
        table.add_row(row["contender"], _figure(row.get("nodes"), ","), *shown, "–" if share is None else f"{100 * share:.1f}")
    return table


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=0)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "contender" else "right", no_wrap=heading == "contender")
    return table


def _ms(value: float | None) -> str:
    """Three digits, as few places as that takes."""
    return "–" if value is None else f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _floors(s: dict[str, Any]) -> list[Text]:
    ceilings = s["ceilings"]
    arithmetic = ceilings.get("arithmetic", s["dtype"])  # older records have products of the dtype only
    reached = f"{ceilings['flop_per_s'] / 1e12:,.2f} TFLOP/s in {arithmetic} and {ceilings['bytes_per_s'] / 1e9:,.0f} GB/s"
    lines = [f"this device reached {reached}"]
    if arithmetic == "tf32":
        lines.append("convolutions or matrix products may round factors to TF32 here (allow_tf32), so floors are those of TF32")
    for size, parts in s["floors"].items():
        total, moved = parts[-1], sum(parts[-1][f"{kind}_mb"] for kind in ("weight", "activation", "state"))
        lines.append(
            f"floor at B={size}: {total['floor_ms']:.3g} ms layer by layer ({_ms(total['gflop'])} GFLOP in "
            f"{total['arithmetic_ms']:.3g} ms, {moved:,.0f} MB in {total['bytes_ms']:.3g} ms)"
        )
    return [Text(line) for line in lines]


def _costs(s: dict[str, Any]) -> list[Text]:
    lines = []
    for name, facts in s["contenders"].items():
        state = facts["state_bytes_per_request"]
        parts = [f"{state / MIB:.3g} MiB of state a request"] if state is not None else []
        if facts.get("graphs"):
            ready = f"{facts['graphs']} graphs, ready in {facts['ready_seconds']:.1f} s"
            failed = f", {facts['failed']} failed" if facts["failed"] else ""
            parts.insert(0, f"{ready}{failed}, {facts['pool_reserved_bytes'] / MIB:,.0f} MiB of pool")
        if parts:
            lines.append(f"{name}: {', '.join(parts)}")
    return [Text(line) for line in lines]


def _absent(s: dict[str, Any]) -> list[Text]:
    unasked = [name for name, reason in s["not_run"].items() if reason == NOT_ASKED]
    lines = [f"not run: {name}, {reason}" for name, reason in s["not_run"].items() if name not in unasked]
    if unasked:
        lines.append(f"{NOT_ASKED}: {', '.join(unasked)}")
    if s["nodes_unknown"]:
        lines.append(f"nodes of graphs are not listed: {s['nodes_unknown']}")
    return [Text(line) for line in lines]


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
