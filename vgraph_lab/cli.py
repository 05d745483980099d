"""The command line. Every command prints a table for people, or JSON with ``--json``; exit codes: 0 good, 1 bad, 2 bad input."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import __version__, bundled
from .commands.audio import encode
from .commands.bench import bench_app
from .commands.logs import import_log
from .commands.plan import plan
from .commands.recordings import capture, coverage, inspect
from .commands.shared import AsJson, Device, console
from .errors import VGraphLabError

__all__ = ["app", "main"]

app = typer.Typer(name="vgraph-lab", no_args_is_help=True, help="Capture, inspect and hear runner-owned CUDA graphs of TTS vocoders.")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")]


@app.callback()
def root(show_version: Version = False) -> None:
    """Capture, inspect and hear runner-owned CUDA graphs of TTS vocoders."""


@app.command()
def doctor(device: Device = "auto", as_json: AsJson = False) -> None:
    """Say which graph backend this machine gets and why, and try it."""
    from .doctor import diagnose

    checks = diagnose(device)
    failed = [check for check in checks if check.is_ok is False]
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        table = Table("", "check", "finding", box=None)
        for check in checks:
            mark = {True: "[green]ok[/]", False: "[red]FAILED[/]", None: ""}[check.is_ok]
            table.add_row(mark, check.name, escape(check.finding))
        console.print(table)
    raise typer.Exit(1 if failed else 0)


@app.command()
def tour(
    output: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("build/tour.html"),
    as_json: AsJson = False,
) -> None:
    """Run the first two notebooks on the bundled data and write a self-contained report."""
    from .tour import run_tour

    result = run_tour(output)
    print(result.to_json() if as_json else result)
    raise typer.Exit(0 if result.passed else 1)


@app.command()
def voice(
    checkpoint: Annotated[Path | None, typer.Argument(help="Checkpoint folder; the bundled one by default.")] = None,
    wer: Annotated[bool, typer.Option(help="Word error rate by an offline recogniser (extra 'voice').")] = False,
    levels: Annotated[int | None, typer.Option(help="Decode with the first N codebooks only.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure how well a checkpoint speaks: mel distance, STOI, level, and word error rate."""
    from tqdm import tqdm

    from .inspect.voice import run_voice

    with tqdm(total=1, desc="clips", disable=None) as bar:

        def progress(done: int, total: int, clip: str) -> None:
            bar.total, bar.n = total, done
            bar.set_postfix_str(clip)

        report = run_voice(checkpoint or bundled.checkpoint_folder(), wer=wer, levels=levels, device=device, progress=progress)
    if as_json:
        print(report.to_json())
    else:
        console.print(report)


app.command()(capture)
app.command()(coverage)
app.command("inspect")(inspect)
app.command()(plan)
app.command("import")(import_log)
app.command()(encode)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Run the command line; an expected error is one clear message and exit code 2."""
    try:
        app()
    except KeyboardInterrupt:
        Console(stderr=True).print("aborted")
        raise SystemExit(130) from None
    except VGraphLabError as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
