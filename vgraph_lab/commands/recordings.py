"""``vgraph-lab capture``, ``coverage`` and ``inspect``: make a recording, and read one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
import typer
from rich.markup import escape

from vgraph_lab import bundled
from vgraph_lab.errors import InputError

from .shared import AsJson, Device, Dtype, Kind, as_json_text, console, records, rich_table, status

if TYPE_CHECKING:
    from vgraph_lab.inspect.recording import Recording
    from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
    from vgraph_lab.runner import GPUGenerationModelRunner

__all__ = ["capture", "coverage", "inspect"]

RecordingFile = Annotated[Path, typer.Argument(help="A recording that 'capture' or record(...).save(path) wrote.", show_default=False)]

_ENTRY_HEADINGS = {
    "number": "#",
    "target": "target",
    "descriptor": "descriptor",
    "charge_mib": "charge MiB",
    "pool_delta_mib": "pool + MiB",
    "capture_s": "capture s",
    "nodes": "nodes",
    "hits": "hits",
}
_ENTRY_NOTE = "charge: static buffers + growth of the pool; marginal in capture order, since graphs of one pool share memory"


def capture(
    config: Annotated[Path | None, typer.Option(help="Stage file or vllm-omni deploy file (YAML); the defaults without one.")] = None,
    checkpoint: Annotated[str, typer.Option(help="Checkpoint folder, or 'bundled'.")] = "bundled",
    device: Device = "auto",
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights; by default bfloat16 on a GPU and float32 on a CPU.")] = None,
    profile: Annotated[bool, typer.Option(help="Estimate the memory first, in a throwaway pool.")] = False,
    modules: Annotated[bool, typer.Option(help="Find out which module launched each node (cpu backend only).")] = False,
    requests: Annotated[int, typer.Option(min=0, help="Play so many utterances afterwards, for the coverage.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Of these, live at once.")] = 4,
    kind: Annotated[Kind, typer.Option(help="Streamed utterances with a reference, without, or both in turn.")] = Kind.mixed,
    output: Annotated[Path | None, typer.Option(help="Write a recording here.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a recording that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Capture the graphs of a configuration, print the report, write a recording. Exit code 1: something is missing."""
    from vgraph_lab.config import StageConfig
    from vgraph_lab.graphs.backends import checked_device
    from vgraph_lab.inspect.archive import check_free
    from vgraph_lab.inspect.recording import read_memory, record
    from vgraph_lab.qwen3_tts.checkpoint import load_decoder
    from vgraph_lab.qwen3_tts.code2wav import Qwen3TTSCode2Wav
    from vgraph_lab.runner import GPUGenerationModelRunner

    place = checked_device(device)
    if output:
        check_free(output, overwrite=overwrite)
    if modules and place.type != "cpu":
        raise InputError(f"--modules needs the cpu backend, this is {place}: one operation may launch several kernels there.")
    cfg = StageConfig.from_yaml(config) if config else StageConfig()
    folder = bundled.checkpoint_folder() if checkpoint == "bundled" else Path(checkpoint)
    kept_as = (dtype or (Dtype.float32 if place.type == "cpu" else Dtype.bfloat16)).torch
    with status() as tell, GPUGenerationModelRunner(cfg, place) as runner:
        decoder = load_decoder(folder, place, kept_as)
        runner.load_model(Qwen3TTSCode2Wav(decoder, cfg))
        if profile:
            runner.profile_memory(lambda step: tell(f"profiling {step}"))
        before = read_memory(runner)
        report = runner.capture_model(lambda step: tell(f"capturing {step}"))
        if requests:
            tell(f"playing {requests} utterances")
            _play(runner, decoder, folder, requests, concurrency, kind)
        recording = record(runner, report=report, before=before, modules=modules)
    if output:
        recording.save(output, overwrite=overwrite)
    if as_json:
        content: dict[str, Any] = {"output": str(output) if output else None, "calls": recording.stats.calls()}
        print(as_json_text(content | {"capture": _figures(recording), "entries": _entries(recording), "estimates": _estimates(recording)}))
    else:
        console.print(str(report), markup=False, highlight=False, soft_wrap=True)
        if requests:
            console.print(str(recording.stats), highlight=False)
        if output:
            console.print(f"recording: {escape(str(output))}", highlight=False)
    raise typer.Exit(1 if report.is_degraded else 0)


def _play(runner: GPUGenerationModelRunner, decoder: Code2WavDecoder, folder: Path, count: int, concurrency: int, kind: Kind) -> None:
    """Utterances of the checkpoint, or random codes as long, as a service would get them."""
    from vgraph_lab.bench.service import speech_for
    from vgraph_lab.requests import ChunkRequest
    from vgraph_lab.workload import draw_requests, simulate_service

    speech = speech_for(decoder, folder)
    traffic = draw_requests(count, kind=kind.value, codes=speech.codes, speakers=speech.speakers)
    if runner.cfg.async_chunk:
        live = min(concurrency, runner.cfg.max_num_seqs)
        simulate_service(runner, traffic, runner.cfg.connector, concurrency=live, sample_rate=decoder.sample_rate, progress=False)
        return
    for first in range(0, count, concurrency):
        runner.execute_model([ChunkRequest(r.id, r.codes, finished=True) for r in traffic[first : first + concurrency]])


def coverage(
    recording: RecordingFile,
    against: Annotated[Path | None, typer.Option(help="Another recording: how far the shapes have drifted from its.")] = None,
    min_hit_rate: Annotated[float, typer.Option(min=0, max=1, help="Exit with 1 if fewer calls were served by graphs.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Whether the calls of a recording hit its graphs: by Target, then what was not covered."""
    from vgraph_lab.inspect.coverage import coverage_summary, coverage_table, drift, uncovered_shapes
    from vgraph_lab.inspect.recording import Recording

    found = Recording.load(recording)
    hit_rate = found.stats.hit_rate()
    if hit_rate is None:
        raise InputError(f"{recording} counts no calls. Record after traffic: vgraph-lab capture --requests N, or record(runner).")
    table, uncovered = coverage_table(found), uncovered_shapes(found)
    summary = coverage_summary(table)
    moved = drift(found, Recording.load(against)) if against else None
    if as_json:
        tables = {"summary": summary, "coverage": table, "uncovered": uncovered}
        content: dict[str, Any] = {"recording": str(recording), "calls": found.stats.calls(), "hit_rate": hit_rate}
        content |= {name: records(rows) for name, rows in tables.items()}
        content["drift"] = {"distance": moved.distance, "shapes": records(moved.table)} if moved else None
        print(as_json_text(content))
    else:
        console.print(str(found.stats), highlight=False)
        headings = {"target": "target", "calls": "calls", "hits": "hits", "padded_hits": "padded", "fallbacks": "fallbacks"}
        headings |= {"errors": "errors", "hit_rate": "hit %", "wasted_share": "wasted %"}
        console.print(rich_table(summary, headings, title="coverage by Target"))
        if len(uncovered):
            headings = {"target": "target", "requested": "requested", "reason": "reason", "calls": "calls", "calls_share": "% of Target"}
            console.print(rich_table(uncovered, headings, title="not covered"))
        if moved:
            console.print(str(moved), highlight=False)
    raise typer.Exit(1 if hit_rate < min_hit_rate else 0)


def inspect(
    recording: RecordingFile,
    entry: Annotated[str, typer.Option(help="Take one graph apart: its number in the table, or 'target descriptor'.")] = "",
    dot: Annotated[bool, typer.Option("--dot", help="Print that graph in Graphviz's language.")] = False,
    collapse: Annotated[bool, typer.Option(help="With --dot: runs of nodes as one box.")] = True,
    as_json: AsJson = False,
) -> None:
    """What a recording's graphs cost and where the memory was; or the nodes of one graph."""
    from vgraph_lab.inspect.ledger import ledger_table
    from vgraph_lab.inspect.recording import Recording

    found = Recording.load(recording)
    if entry or dot:
        _inspect_entry(found, entry, dot, collapse, as_json)
        return
    ledger, estimates = ledger_table(found), _estimates(found)
    if as_json:
        content: dict[str, Any] = {"recording": str(recording), "made_utc": found.made_utc, "device": found.device}
        content["machine"] = dict(found.machine)
        content |= {"capture": _figures(found), "entries": _entries(found), "ledger": records(ledger), "estimates": estimates}
        print(as_json_text(content))
        return
    console.print(f"{found}\n{found.machine['card']}, torch {found.machine['torch']}", markup=False, highlight=False)
    console.print(rich_table(_numbered(found), _ENTRY_HEADINGS, title="graphs"))
    console.print(_ENTRY_NOTE, highlight=False)
    _tell_rejections(found)
    headings = {"part": "memory", "before_mib": "before MiB", "now_mib": "now MiB", "change_mib": "change MiB"}
    console.print(rich_table(ledger, headings, title="memory"))
    if found.capture and estimates:
        console.print(found.capture.headline, markup=False, highlight=False)
    for note in found.capture.notes if found.capture else ():
        console.print(note, markup=False, highlight=False)


def _inspect_entry(found: Recording, entry: str, dot: bool, collapse: bool, as_json: bool) -> None:
    from vgraph_lab.inspect.anatomy import anatomy

    if not entry:
        raise InputError("--dot prints one graph: say which with --entry, by its number in the table or as 'target descriptor'.")
    graph = anatomy(found.graph(entry))
    modules = None if graph.modules is None else graph.by_module
    if dot and not as_json:
        print(graph.dot(collapse=collapse), end="")
    elif as_json:
        content = {"entry": graph.title, "nodes": len(graph.nodes), "kinds": graph.counts, "kernels": records(graph.kernels)}
        content |= {"modules": None if modules is None else records(modules), "dot": graph.dot(collapse=collapse) if dot else None}
        print(as_json_text(content))
    else:
        console.print(str(graph), highlight=False)
        headings = {"nodes": "nodes", "nodes_share": "%", "kind": "kind", "name": "name"}
        console.print(rich_table(graph.kernels, headings, title="nodes by name"))
        if modules is not None:
            headings = {"nodes": "nodes", "nodes_share": "%", "module": "module"}
            console.print(rich_table(modules, headings, title="nodes by module, in the order of their first"))


def _numbered(found: Recording) -> pd.DataFrame:
    """The entries table with the numbers that ``--entry`` takes, and Targets by the last part of their names."""
    from vgraph_lab.inspect.entries import entries_table

    table = entries_table(found)
    table.insert(0, "number", range(1, len(table) + 1))
    return table.assign(target=table["target"].str.rpartition(".")[2])


def _entries(found: Recording) -> list[dict[str, Any]]:
    from vgraph_lab.inspect.entries import entries_table

    return records(entries_table(found))


def _estimates(found: Recording) -> list[dict[str, Any]] | None:
    """The profile beside the capture; None where there was no profile."""
    from vgraph_lab.inspect.ledger import estimate_table

    return records(estimate_table(found)) if found.capture and found.capture.estimates else None


def _figures(found: Recording) -> dict[str, Any] | None:
    """The capture's figures, without the estimates, which are a table of their own."""
    return {name: value for name, value in asdict(found.capture).items() if name != "estimates"} if found.capture else None


def _tell_rejections(found: Recording) -> None:
    """One line per reason: which rows, and the first of them in words."""
    rejected = [(number, graph.rejection) for number, graph in enumerate(found.graphs, start=1) if graph.rejection]
    for reason in dict.fromkeys(rejection.reason for _, rejection in rejected):
        rows = [(number, rejection) for number, rejection in rejected if rejection.reason is reason]
        which = ", ".join(str(number) for number, _ in rows)
        console.print(f"no graph, {reason}: {which}. The first: {rows[0][1].detail}", markup=False, highlight=False)
