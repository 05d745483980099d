"""``vgraph-lab import``: what a production server's log says."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .shared import AsJson, as_json_text, console, records, rich_table

__all__ = ["import_log"]


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
