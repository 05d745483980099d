"""``vgraph-lab plan``: which sizes to capture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
import typer
from rich.markup import escape

from vgraph_lab.errors import InputError
from vgraph_lab.graphs.table import MIB

from .plan_input import CostSource, read_plan_input
from .shared import AsJson, Device, Dtype, as_json_text, console, records, rich_table

if TYPE_CHECKING:
    from vgraph_lab.inspect.planner import Plan, PlanPoint

__all__ = ["plan"]

_TIMES_UNKNOWN = (
    "A recording has no times of calls: what graphs save and what padding costs is not known, so the most calls in the least memory are "
    "recommended. MiB are upper bounds: what a set would take without the graphs that it shares memory with is not in a recording. For "
    "time saved and for memory, give --checkpoint (measures here) or --costs (measured elsewhere)."
)


TrafficFile = Annotated[
    Path, typer.Argument(help="A recording, or with --config a log or a table of calls (CSV, JSONL).", show_default=False)
]


def plan(
    traffic: TrafficFile,
    config: Annotated[Path | None, typer.Option(help="Stage file (YAML) of the service that wrote a log.")] = None,
    budget_mib: Annotated[float | None, typer.Option(min=0, help="Static buffers and pool at most, in MiB.")] = None,
    min_coverage: Annotated[float | None, typer.Option(min=0, max=1, help="Share of the calls that must be in graphs.")] = None,
    max_capture_s: Annotated[float | None, typer.Option(min=0, help="Seconds of all captures at most.")] = None,
    costs: Annotated[Path | None, typer.Option(help="Costs by shape as CSV: the columns of cost_table, measured elsewhere.")] = None,
    checkpoint: Annotated[str, typer.Option(help="Measure costs here, with this checkpoint folder or 'bundled'.")] = "",
    device: Device = "auto",
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights; by default bfloat16 on a GPU and float32 on a CPU.")] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="The decoder's sliding window; by default the recording's or the checkpoint's.")
    ] = None,
    kind: Annotated[
        str, typer.Option(help="Mode of suffix steps where a log names none: icl or xvec; by default that of its first chunks.")
    ] = "",
    output: Annotated[Path | None, typer.Option(help="Write the recommended configuration here, as YAML.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a file that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Which sizes to capture for the traffic of a recording or a log. Exit code 1: it is better off without graphs."""
    from vgraph_lab.inspect.planner import plan_captures
    from vgraph_lab.inspect.planner.export import as_yaml

    if kind not in ("", "icl", "xvec"):
        raise typer.BadParameter(f"--kind must be icl or xvec, got {kind!r}.")
    found = read_plan_input(traffic, config=config, window=window, kind=kind, costs=CostSource(costs, checkpoint, device, dtype))
    has_times = found.has_times
    try:
        plans = plan_captures(found.traffic, found.costs, found.space)
        current = plans.evaluate(found.current)
    except InputError as error:
        hint = "" if has_times else " Here, --checkpoint measures and --costs reads a table."
        raise InputError(f"{traffic}: {error}{hint}") from None
    limits = {"max_capture_s": max_capture_s, "min_coverage": min_coverage}
    budget_bytes = None if budget_mib is None or math.isinf(budget_mib) else int(budget_mib * MIB)
    best = plans.recommend(budget_bytes=budget_bytes, objective="saved" if has_times else "calls", **limits)
    stage = {**plans.stage(best), **found.kept}
    if output:
        as_yaml(stage, _words(best, has_times), output, overwrite=overwrite)
    if as_json:
        content = {"traffic": str(traffic), "calls": int(found.traffic["calls"].sum()), "output": str(output) if output else None}
        content |= {"times_known": has_times, "notes": [*found.notes, *plans.notes], "front": _rows(plans.front, has_times)}
        for name, point in (("current", current), ("recommended", best)):
            content[name] = _rows(pd.DataFrame([point.figures]), has_times)[0]
        print(as_json_text(content | {"stage": stage, "explanation": _explained(plans, best, has_times)}))
    else:
        _tell(plans, best, current, has_times)
        for note in found.notes:
            console.print(f"traffic: {note}", highlight=False, markup=False, soft_wrap=True)
        if output:
            console.print(f"configuration: {escape(str(output))}", highlight=False)
    raise typer.Exit(0 if best.figures["graphs"] else 1)


def _rows(table: pd.DataFrame, has_times: bool) -> list[dict[str, Any]]:
    """Rows as JSON has them; what is not known is null."""
    return records(table if has_times else table.assign(saved_s=None, saved_share=None))


def _explained(plans: Plan, best: PlanPoint, has_times: bool) -> list[str]:
    """The explanation without its headline, which the figures repeat."""
    return [*plans.explain(best).splitlines()[1:], *(() if has_times else (_TIMES_UNKNOWN,))]


def _tell(plans: Plan, best: PlanPoint, current: PlanPoint, has_times: bool) -> None:
    front = plans.front
    worth = front["saved_s" if has_times else "calls"]
    rises = (worth > worth.cummax().shift(fill_value=0)) & (front["graphs"] > 0)
    points = [plans.point(int(row)) for row in front.index[rises]]
    rows = [dict(point.figures, which="") for point in points if point.choice != best.choice]
    rows += [dict(point.figures, which=name) for point, name in ((best, "recommended"), (current, "current"))]
    table = pd.DataFrame(rows).sort_values("charge_bytes", kind="stable")
    is_stateless = bool(table["frame_sizes"].map(len).any())
    shown = pd.DataFrame(
        {
            "batch_sizes": [", ".join(map(str, sizes)) or "none" for sizes in table["batch_sizes"]],
            "frame_sizes": [", ".join(map(str, sizes)) or "none" for sizes in table["frame_sizes"]],
            "targets": [", ".join(target.removeprefix("qwen3_tts.") for target in targets) or "none" for targets in table["targets"]],
            "graphs": table["graphs"].to_numpy(),
            "calls_share": table["coverage"].to_numpy(),
            "charge_mib": table["charge_bytes"].to_numpy() / MIB,
            "capture_s": table["capture_s"].to_numpy(),
            "saved_share": table["saved_share"].to_numpy(),
            "which": table["which"].to_numpy(),
        }
    )
    headings = {"batch_sizes": "rows"} | ({"frame_sizes": "frames"} if is_stateless else {"targets": "Targets"})
    headings |= {"graphs": "graphs", "calls_share": "calls %", "charge_mib": "MiB", "capture_s": "capture s"}
    headings |= {"saved_share": "saved %"} if has_times else {}
    title = f"what more memory brings; all {len(front)} sets that no other one beats with --json"
    console.print(rich_table(shown, headings | {"which": ""}, title=title))
    for name, point in (("recommended", best), ("current", current)):
        console.print(f"{name}: {_words(point, has_times)}", highlight=False, markup=False, soft_wrap=True)
    for line in _explained(plans, best, has_times):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _words(point: PlanPoint, has_times: bool) -> str:
    """A point in a line, without time saved if that is not known."""
    f = point.figures
    if has_times or not f["graphs"]:
        return str(point)
    sizes = [f"{name.replace('_', ' ')} {', '.join(map(str, f[name]))}" for name in ("batch_sizes", "frame_sizes") if f[name]]
    share = f"{f['coverage']:.1%} of calls and {f['audio_coverage']:.1%} of audio"
    return f"{'; '.join(sizes)}: {f['graphs']} graphs, {share}, {f['charge_bytes'] / MIB:,.1f} MiB, {f['capture_s']:.2f} s to capture"
