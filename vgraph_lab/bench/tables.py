"""Bench records as tables for people."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from vgraph_lab.graphs.table import MIB

from .record import MeasurementRecord

__all__ = ["planner_table", "service_table", "stateless_table", "streaming_table", "v1_table"]


def stateless_table(record: MeasurementRecord) -> Group:
    """Median milliseconds of each shape, and below them what the captures took."""
    on_gpu = "cuda" in record.machine
    table = Table(title=_title(record), title_justify="left", caption="median ms", caption_justify="left")
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


def streaming_table(record: MeasurementRecord) -> Group:
    """Median milliseconds of each kind of chunk, eager and through graphs; below them capture, state and coverage."""
    on_gpu = "cuda" in record.machine
    phases = [phase for phase in ("first", "growing", "steady", "tail") if any(f"speedup_{phase}" in row for row in record.rows)]
    columns = {phase: f"{phase}_wall_ms" for phase in phases}
    window = record.settings["window_frames"]
    caption = f"median ms; growing: fewer than {window} frames kept; steady: {window} frames kept; ÷: eager over graphs"
    if on_gpu:
        columns |= {f"host {phase}": f"{phase}_host_ms" for phase in phases if phase in ("first", "steady")}
        caption += "; host: until the call returns; burst: host time per steady call without waiting"
    table = Table(title=_title(record), title_justify="left", caption=caption, caption_justify="left", box=SIMPLE_HEAD)
    table.pad_edge, table.collapse_padding = False, True  # a terminal has 80 columns
    for heading in ("mode", "B", "", *columns, *(("burst",) if on_gpu else ())):
        table.add_column(heading, justify="right" if heading not in ("mode", "") else "left")
    for row in record.rows:
        for variant, name in (("eager", [row["mode"], str(row["batch_size"])]), ("graphs", ["", ""])):
            burst = row.get(f"{variant}_steady_burst_host_us")
            cells = [_figure(row.get(f"{variant}_{key}"), ".2f") for key in columns.values()]
            table.add_row(*name, variant, *cells, *([_figure(burst and burst / 1e3, ".2f")] if on_gpu else ()))
        table.add_row("", "", "÷", *(_figure(row.get(f"speedup_{phase}"), ".2f") for phase in phases), end_section=True, style="bold")
    capture, state = record.settings["capture"], record.settings["request_state_bytes"] / MIB
    hits, fallbacks = (sum(row[key] for row in record.rows) for key in ("graph_hits", "graph_fallbacks"))
    difference = max(value for row in record.rows for key, value in row.items() if key.startswith("largest_difference"))
    return Group(
        table,
        f"{_captures('through the Manager', capture)}, {capture['static_buffer_bytes'] / MIB:,.1f} MiB of static buffers",
        f"{state:,.1f} MiB of request state; largest difference from eager {difference:.2g}",
        _coverage(hits, fallbacks),
        *_form(record.settings),
    )


def service_table(record: MeasurementRecord) -> Group:
    """The figures that a service is judged by, eager against graphs, with the change in percent."""
    s = record.settings
    table = Table(title=_title(record), title_justify="left", caption_justify="left")
    runs = "one run" if s["repeats"] == 1 else f"medians of {s['repeats']} runs"
    table.caption = f"{runs}; virtual time, {s['talker_frames_per_s']:g} frames/s from the talker of each request"
    table.add_column(f"{s['requests']} requests, {s['concurrency']} at once")
    for heading in ("eager", "graphs", "change %"):
        table.add_column(heading, justify="right")
    absent = []
    for row in record.rows:
        cells = [_figure(row[name], ",.4g") for name in ("eager", "graphs")]
        table.add_row(row["metric"].replace("_", " "), *cells, _figure(row["change_percent"], "+.1f"))
        if row["absent_because"]:
            absent.append(escape(f"no {row['metric'].replace('_', ' ')}: {row['absent_because']}"))
    coverage = _coverage(s["graph_hits"], s["graph_fallbacks"])
    return Group(table, _captures("through the Manager", s["capture"]), coverage, *_form(s), *absent)


def planner_table(record: MeasurementRecord) -> Group:
    """Seconds and bytes of each case, and what was planned."""
    s = record.settings
    title = f"{s['calls']:,} calls, {escape(record.machine['card'])}"
    table = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.caption = f"medians of {s['repeats']} runs; peak: bytes of Python and NumPy, the drawn calls included"
    for heading in ("case", "sum up s", "plan s", "peak MiB", "shapes", "front", "graphs", "covered %"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in record.rows:
        figures = [f"{row['summarise_s']:.3f}", f"{row['plan_s']:.3f}", f"{row['peak_bytes'] / MIB:,.1f}"]
        counts = [f"{row[name]:,}" for name in ("traffic_rows", "front_points", "graphs_recommended")]
        table.add_row(row["case"], *figures, *counts, f"{100 * row['coverage_recommended']:.1f}")
    return Group(table)


def v1_table(record: MeasurementRecord) -> Group:
    """Median milliseconds of a decode step in each mode, and below them what the captures took."""
    on_gpu = "cuda" in record.machine
    table = Table(
        title=_title(record), title_justify="left", caption_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    table.caption = "median ms of a decode step through execute_model; ÷: eager over this; nodes: PIECEWISE / FULL" + (
        "; host: in a burst, µs a step" if on_gpu else ""
    )
    modes = ("eager", "piecewise", "full")
    hosts = [f"host {mode}" for mode in modes] if on_gpu else []
    for heading in ("B", *modes, "÷ piecewise", "÷ full", *hosts, "nodes"):
        table.add_column(heading, justify="right")
    for row in record.rows:
        times = [f"{row[f'{mode}_wall_ms']:.2f}" for mode in modes]
        gains = [f"{row[f'speedup_{mode}']:.2f}" for mode in modes[1:]]
        host = [f"{row[f'{mode}_burst_host_us']:.0f}" for mode in modes] if on_gpu else []
        nodes = " / ".join(str(sum(row[f"{mode}_nodes"].values())) for mode in modes[1:])
        table.add_row(str(row["batch_size"]), *times, *gains, *host, nodes)
    lines = [
        f"{mode}: {figures['graphs']} graphs in {figures['seconds']:.2f} s, {figures['pool_reserved_bytes'] / MIB:,.0f} MiB of pool"
        for mode, figures in record.settings["captures"].items()
        if figures["graphs"]
    ]
    return Group(table, *lines)


def _title(record: MeasurementRecord) -> str:
    return escape(f"{record.machine['card']}, {record.settings['dtype']}, {record.settings['weights']}")


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _coverage(hits: int, fallbacks: int) -> str:
    return f"{hits} Target calls replayed a graph, {fallbacks} ran eager"


def _form(s: dict[str, Any]) -> list[str]:
    """A line on the form of incremental decoding. Records of the published design have none, and older ones do not tell."""
    form, asked = s.get("form"), s.get("form_asked")
    if form is None:
        return []
    return [
        escape(f"graphs in the {form} form" if form == asked else f"graphs in the {form} form, not in the {asked} one: {s['form_reason']}")
    ]


def _captures(words: str, figures: dict[str, Any]) -> str:
    pool = figures["pool_reserved_bytes"] / MIB
    return (
        f"{figures['graphs']} graphs {words}: {figures['capture_seconds']:.2f} s capturing, "
        f"{figures['seconds']:.2f} s with warm-ups, {pool:,.0f} MiB of pool"
    )
