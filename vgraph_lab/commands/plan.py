"""``vgraph-lab plan`` and ``import``: which sizes to capture, and what a production server's log says."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pandas as pd
import typer
from rich.markup import escape

from vgraph_lab import bundled
from vgraph_lab.errors import InputError

from .recordings import RecordingFile
from .shared import AsJson, Device, Dtype, as_json_text, console, records, rich_table, status

if TYPE_CHECKING:
    from vgraph_lab.config import StageConfig
    from vgraph_lab.inspect.planner import Plan, PlanPoint, StatelessGrid, StreamingGrid
    from vgraph_lab.inspect.recording import Recording

__all__ = ["import_log", "plan"]

_MIB = 2**20
_TIMES_UNKNOWN = (
    "A recording has no times of calls: what graphs save and what padding costs is not known, so the most calls in the least memory are "
    "recommended. For time saved, give --checkpoint (measures here) or --costs (measured elsewhere)."
)


def plan(
    recording: RecordingFile,
    budget_mib: Annotated[float | None, typer.Option(min=0, help="Static buffers and pool at most, in MiB.")] = None,
    min_coverage: Annotated[float | None, typer.Option(min=0, max=1, help="Share of the calls that must be in graphs.")] = None,
    max_capture_s: Annotated[float | None, typer.Option(min=0, help="Seconds of all captures at most.")] = None,
    costs: Annotated[Path | None, typer.Option(help="Costs by shape as CSV: the columns of cost_table, measured elsewhere.")] = None,
    checkpoint: Annotated[str, typer.Option(help="Measure costs here, with this checkpoint folder or 'bundled'.")] = "",
    device: Device = "auto",
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights; by default bfloat16 on a GPU and float32 on a CPU.")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="The decoder's sliding window; by default the recording's.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the recommended configuration here, as YAML.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a file that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Which sizes to capture for a recording's traffic. Exit code 1: it is better off without graphs."""
    from vgraph_lab.inspect.planner import plan_captures, traffic_of
    from vgraph_lab.inspect.planner.export import as_yaml
    from vgraph_lab.inspect.recording import Recording

    found = Recording.load(recording)
    cfg, space = _space(found, recording, window)
    traffic = traffic_of(found.stats, getattr(space, "transitions", None))
    known, has_times = _costs(found, cfg, costs, checkpoint, device, dtype)
    try:
        plans = plan_captures(traffic, known, space)
        current = plans.evaluate(_present(found))
    except InputError as error:
        hint = "" if has_times else " Here, --checkpoint measures and --costs reads a table."
        raise InputError(f"{recording}: {error}{hint}") from None
    limits = {"max_capture_s": max_capture_s, "min_coverage": min_coverage}
    budget_bytes = None if budget_mib is None else int(budget_mib * _MIB)
    best = plans.recommend(budget_bytes=budget_bytes, objective="saved" if has_times else "calls", **limits)
    if output:
        as_yaml(plans.stage(best), _words(best, has_times), output, overwrite=overwrite)
    if as_json:
        content = {"recording": str(recording), "calls": found.stats.calls(), "output": str(output) if output else None}
        content |= {"times_known": has_times, "notes": list(plans.notes), "front": _rows(plans.front, has_times)}
        for name, point in (("current", current), ("recommended", best)):
            content[name] = _rows(pd.DataFrame([point.figures]), has_times)[0]
        print(as_json_text(content | {"stage": plans.stage(best), "explanation": _explained(plans, best, has_times)}))
    else:
        _tell(plans, best, current, has_times)
        if output:
            console.print(f"configuration: {escape(str(output))}", highlight=False)
    raise typer.Exit(0 if best.figures["graphs"] else 1)


def _space(found: Recording, name: Path, window: int | None) -> tuple[StageConfig, StreamingGrid | StatelessGrid]:
    """The stage of a recording, and what it could say instead."""
    from vgraph_lab.config import StageConfig
    from vgraph_lab.inspect.planner import StatelessGrid, StreamingGrid
    from vgraph_lab.qwen3_tts.settings import Qwen3TTSGraphKeys
    from vgraph_lab.qwen3_tts.stream_routines import SuffixDescriptor

    if found.stage is None:
        raise InputError(f"{name} was made of a bare Manager and has no stage to plan for. Record a runner: record(runner).save(path).")
    cfg = StageConfig.from_dict(dict(found.stage))
    if not cfg.async_chunk:
        keys = cfg.extension(Qwen3TTSGraphKeys)
        return cfg, StatelessGrid(keys.decode_chunk_frames, keys.decode_left_context_frames)
    kept = [graph.descriptor.source for graph in found.graphs if isinstance(graph.descriptor, SuffixDescriptor)]
    if window is None and not kept:
        raise InputError(f"{name} lists no graph of a suffix, from which the decoder's sliding window shows. Say it with --window.")
    return cfg, StreamingGrid(cfg.connector, window or max(kept))  # the schedule ends in the rolling step, which keeps a whole window


def _costs(
    found: Recording, cfg: StageConfig, file: Path | None, checkpoint: str, device: str, dtype: Dtype | None
) -> tuple[pd.DataFrame, bool]:
    """Costs from a file, measured here, or those of the recording's own graphs; and whether times of calls are among them."""
    from vgraph_lab.inspect.entries import entries_table
    from vgraph_lab.inspect.planner import cost_table, costs_of_entries

    if file and checkpoint:
        raise InputError("--costs and --checkpoint are two sources of the same figures. Give one of them.")
    if file:
        try:
            table = pd.read_csv(file, keep_default_na=False, na_values=[""], dtype={"target": "str", "state": "str", "source": "str"})
        except (OSError, ValueError) as error:  # no file, no text, no columns, rows of unequal length
            raise InputError(f"{file} cannot be read as a CSV file with a header: {error}") from error
        return cost_table(table.fillna({"state": ""}) if "state" in table else table), True
    if checkpoint:
        return _measured(cfg, checkpoint, device, dtype), True
    entries = entries_table(found)
    # A graph that fitted into what the pool held has intermediates of at most that much: taken as what they are, a budget is kept.
    most = costs_of_entries(entries.assign(pool_delta_mib=np.inf))
    is_known = costs_of_entries(entries)["charge_bytes"].notna()
    return most.assign(replay_ms=0.0, eager_ms=0.0, source=most["source"].where(is_known, "modelled")), False


def _measured(cfg: StageConfig, checkpoint: str, device: str, dtype: Dtype | None) -> pd.DataFrame:
    """The largest and the smallest shape of each Target, measured on this machine."""
    from vgraph_lab.graphs.backends import checked_device, create_backend
    from vgraph_lab.inspect.planner import measure_costs
    from vgraph_lab.qwen3_tts.checkpoint import load_decoder
    from vgraph_lab.qwen3_tts.code2wav import Qwen3TTSCode2Wav

    place = checked_device(device)
    kept_as = (dtype or (Dtype.float32 if place.type == "cpu" else Dtype.bfloat16)).torch
    with status() as tell:
        decoder = load_decoder(bundled.checkpoint_folder() if checkpoint == "bundled" else Path(checkpoint), place, kept_as)
        targets = Qwen3TTSCode2Wav(decoder, cfg).get_vocoder_cudagraph_targets()
        ends = {target.target_id: tuple(dict.fromkeys((target.descriptors[0], target.descriptors[-1]))) for target in targets}
        return measure_costs(create_backend(place), targets, ends, progress=tell)


def _present(found: Recording) -> Any:
    """The graphs of a recording as a choice."""
    from vgraph_lab.inspect.planner import Choice
    from vgraph_lab.inspect.planner.shapes import STATELESS_TARGET_ID, shape_of

    graphs = tuple(shape_of(graph.target_id, graph.descriptor) for graph in found.graphs if graph.cost)
    rows = tuple(sorted({graph.batch_size for graph in graphs}))
    frames = tuple(sorted({graph.frames for graph in graphs if graph.target == STATELESS_TARGET_ID}))
    return Choice(tuple(dict.fromkeys(graph.target for graph in graphs)), rows, frames, graphs)


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
            "charge_mib": table["charge_bytes"].to_numpy() / _MIB,
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
    return f"{'; '.join(sizes)}: {f['graphs']} graphs, {share}, {f['charge_bytes'] / _MIB:,.1f} MiB, {f['capture_s']:.2f} s to capture"


# ----------------------------------------------------------------------------------------------------------- logs


def import_log(
    log: Annotated[Path, typer.Argument(help="A log, or a dump of counters (JSON, CSV, JSONL); .gz too.", show_default=False)],
    repetition: Annotated[str, typer.Option(help="How repeated counters are taken: auto, cumulative or interval.")] = "auto",
    check_targets: Annotated[bool, typer.Option(help="Refuse calls of Targets that Qwen3-TTS does not have here.")] = False,
    as_json: AsJson = False,
) -> None:
    """What an importer makes of a log: calls, captures, and what was not understood. Exit code 1: lines were malformed."""
    from vgraph_lab.qwen3_tts.settings import TARGET_IDS
    from vgraph_lab.workload.importers import read_log

    found = read_log(log, repetition=repetition)  # type: ignore[arg-type]  # it checks the word itself
    if check_targets:
        found.check_targets(TARGET_IDS)
    if as_json:
        tables = {"calls": found.calls, "captures": found.captures, "reports": found.reports}
        content: dict[str, Any] = {"log": found.name, "lines": asdict(found.lines), "malformed": [asdict(line) for line in found.malformed]}
        print(as_json_text(content | {"notes": list(found.notes)} | {name: records(rows) for name, rows in tables.items()}))
    else:
        console.print(str(found), highlight=False, markup=False, soft_wrap=True)
        if len(found.calls):
            headings = {"source": "source", "target": "target", "requested": "requested", "outcome": "outcome", "reason": "reason"}
            console.print(rich_table(found.calls, headings | {"calls": "calls"}, title="calls"))
        if len(found.captures):
            headings = {"source": "source", "kind": "kind", "batch_size": "rows", "frames": "frames", "seconds": "seconds", "mib": "MiB"}
            console.print(rich_table(found.captures, headings, title="captures"))
    raise typer.Exit(1 if found.lines.malformed else 0)
