"""The record of micro-batches as a table for people."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from .record import MeasurementRecord
from .ubatch_measure import is_host_bound

__all__ = ["ubatch_table"]


def ubatch_table(record: MeasurementRecord) -> Group:
    """Median milliseconds of each variant, and below them what communication took and how much of it was hidden."""
    s, on_gpu = record.settings, "cuda" in record.machine
    title = escape(f"{s['ranks']} × {record.machine['card']}, {s['backend']}, {s['dtype']}, {s['model']['num_experts']} experts")
    table = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.caption = f"median ms of {s['repeats']} steps, the slowest rank's; ÷: the same without micro-batches over this"
    if on_gpu:
        table.caption += "; device: without the host's head start"
    for heading in ("case", "variant", "wall", "p10–p90", *(("device",) if on_gpu else ()), "host", "÷ whole", "hidden"):
        table.add_column(heading, justify="left" if heading in ("case", "variant") else "right")
    last = ""
    for row in record.rows:
        gain = row.get("device_whole_over_this" if on_gpu else "wall_whole_over_this")
        cells = [f"{row['wall_ms']:.2f}", f"{row['wall_p10_ms']:.2f}–{row['wall_p90_ms']:.2f}"]
        cells += [f"{row['device_ms']:.2f}"] if on_gpu else []
        cells += [f"{row['host_ms']:.2f}", "–" if gain is None else f"{gain:.2f}"]
        cells.append(f"{row['hidden_percent']:.0f} %" if row.get("comm_ms") and not is_host_bound(row) else "–")
        table.add_row(row["case"] if row["case"] != last else "", row["variant"].replace("_", " "), *cells)
        last = row["case"]
    lines = [f"exchanges of one prefill alone: {s['exchange_alone_ms']:.2f} ms"] if s["exchange_alone_ms"] else []
    for trace in (each for each in s["traces"] if each["comm_ms"]):
        told = f"{trace['overlap_ms']:.2f} of {trace['comm_ms']:.2f} ms of communication beside computation"
        lines.append(f"rank {trace['rank']}, {trace['case']}: {told} ({trace['hidden_percent']:.0f} %)")
    lines += [escape(f"no {name.replace('_', ' ')}: {why}") for name, why in s["absent"].items()]
    return Group(table, *lines)
