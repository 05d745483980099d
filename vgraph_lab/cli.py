"""The command line. Every command prints a table for people, or JSON with ``--json``; exit codes: 0 good, 1 bad, 2 bad input."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import __version__, bundled
from .errors import VGraphLabError

__all__ = ["app", "main"]

app = typer.Typer(name="vgraph-lab", no_args_is_help=True, help="Capture, inspect and hear runner-owned CUDA graphs of TTS vocoders.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure: medians, spread and ratios of interleaved runs.")
app.add_typer(bench_app, name="bench")
console = Console()

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


class Dtype(StrEnum):
    """Dtypes of weights and activations."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype of this name."""
        return getattr(torch, self.value)  # type: ignore[no-any-return]  # torch's attributes by name are Any


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
    """Run the first notebook on the bundled data and write a self-contained report."""
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


@bench_app.command()
def stateless(
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint folder; random weights at the published geometry by default.")] = None,
    device: Device = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Dtype of weights and activations.")] = Dtype.bfloat16,
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated rows per call; by default 1,4,16 (on a CPU: 1).")] = "",
    frames: Annotated[str, typer.Option(help="Comma-separated frames per row; by default 1,25,97,150,325 (on a CPU: 1,10).")] = "",
    repeats: Annotated[int, typer.Option(min=2, help="Timed runs per variant, at most.")] = 50,
    output: Annotated[Path | None, typer.Option(help="Write the record here, e.g. into data/measurements/.")] = None,
    as_json: AsJson = False,
) -> None:
    """Eager, raw replay and Handle call of one window, at each batch size and frame count."""
    from .bench.stateless import bench_stateless
    from .bench.tables import stateless_table
    from .graphs.backends import checked_device
    from .qwen3_tts.checkpoint import load_decoder, random_decoder
    from .qwen3_tts.geometry import published_geometry
    from .tour import check_writable

    place = checked_device(device)
    if output:
        check_writable(output)
    is_cpu = place.type == "cpu"
    sizes = _numbers(batch_sizes or ("1" if is_cpu else "1,4,16"), "--batch-sizes")
    lengths = _numbers(frames or ("1,10" if is_cpu else "1,25,97,150,325"), "--frames")
    messages = Console(stderr=True)
    with messages.status("loading") as status:
        if checkpoint is None:
            decoder, described = random_decoder(published_geometry(), place, dtype.torch), "random weights at the published geometry"
        else:
            decoder, described = load_decoder(checkpoint, place, dtype.torch), str(checkpoint)

        def progress(message: str) -> None:
            status.update(message)
            if not messages.is_terminal:
                messages.print(message, highlight=False)

        record = bench_stateless(
            decoder, batch_sizes=sizes, frames=lengths, repeats=repeats, settings={"weights": described}, progress=progress
        )
    if output:
        record.write(output)
    if as_json:
        print(record.to_json())
    else:
        console.print(stateless_table(record))


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or len(set(numbers)) != len(numbers):
        raise typer.BadParameter(f"{option} must be distinct whole numbers from 1, separated by commas, got {text!r}.")
    return numbers


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
