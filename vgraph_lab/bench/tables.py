"""Bench records as tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table

from .record import MeasurementRecord

__all__ = ["stateless_table"]


def stateless_table(record: MeasurementRecord) -> Group:
    """Median milliseconds of each shape, and below them what the captures took."""
    on_gpu = "cuda" in record.machine
    title = f"{record.machine['card']}, {record.settings['dtype']}, {record.settings['weights']}"
    table = Table(title=title, title_justify="left", caption="median ms", caption_justify="left")
    host_headings = ("host eager", "host handle", "handle adds") if on_gpu else ()
    for heading in ("B", "T", "eager", "replay", "handle", "eager ÷ handle", *host_headings):
        table.add_column(heading, justify="right")
    for row in record.rows:
        figures = [f"{row[f'{name}_wall_ms']:.3f}" for name in ("eager", "replay", "handle")]
        host = [f"{row['eager_host_ms']:.3f}", f"{row['handle_host_ms']:.3f}", f"{row['handle_overhead_host_us']:.0f} µs"] if on_gpu else []
        table.add_row(str(row["batch_size"]), str(row["frames"]), *figures, f"{row['speedup_handle']:.2f}", *host)
    if on_gpu:
        table.caption = "median ms; host: until the call returns; handle adds: host time over copy + replay, in bursts"
    return Group(table, *(_captures(words, record.settings[key]) for words, key in _CAPTURES if record.settings[key]))


_CAPTURES = (("through the Manager", "capture"), ("by hand", "capture_by_hand"))


def _captures(words: str, figures: dict[str, Any]) -> str:
    pool = figures["pool_reserved_bytes"] / 2**20
    return (
        f"{figures['graphs']} graphs {words}: {figures['capture_seconds']:.2f} s capturing, "
        f"{figures['seconds']:.2f} s with warm-ups, {pool:,.0f} MiB of pool"
    )
