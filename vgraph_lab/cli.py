"""The command line. Every command prints a table for people, or JSON with ``--json``; exit codes: 0 good, 1 bad, 2 bad input."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from . import __version__, bundled
from .errors import VGraphLabError

if TYPE_CHECKING:
    from .bench.record import MeasurementRecord
    from .config import ConnectorConfig
    from .qwen3_tts.decoder import Code2WavDecoder

__all__ = ["app", "main"]

app = typer.Typer(name="vgraph-lab", no_args_is_help=True, help="Capture, inspect and hear runner-owned CUDA graphs of TTS vocoders.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure: medians, spread and ratios of interleaved runs.")
app.add_typer(bench_app, name="bench")
console = Console()

ChunkFrames = Annotated[int, typer.Option(min=1, help="Frames of every chunk after the first.")]
InitialFrames = Annotated[int, typer.Option(min=0, help="Frames of the first chunk; 0: by load.")]
ContextFrames = Annotated[int, typer.Option(min=0, help="Most frames of a reference.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
CudnnBenchmark = Annotated[bool, typer.Option(help="Let cuDNN time its convolutions once per shape and keep the fastest.")]
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


class Kind(StrEnum):
    """Kinds of requests: with a reference, without, or both in turn."""

    icl = "icl"
    xvec = "xvec"
    mixed = "mixed"


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


Checkpoint = Annotated[
    str,
    typer.Option(
        help="Checkpoint folder, 'bundled', or 'published' (random weights at the published geometry). "
        "By default published on a GPU and bundled on a CPU."
    ),
]
BenchDtype = Annotated[
    Dtype | None, typer.Option(help="Dtype of weights and activations; by default bfloat16 on a GPU and float32 on a CPU.")
]
BenchOutput = Annotated[Path | None, typer.Option(help="Write the record here, e.g. into data/measurements/.")]


@bench_app.command()
def stateless(
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint folder; random weights at the published geometry by default.")] = None,
    device: Device = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Dtype of weights and activations.")] = Dtype.bfloat16,
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated rows per call; by default 1,4,16 (on a CPU: 1).")] = "",
    frames: Annotated[str, typer.Option(help="Comma-separated frames per row; by default 1,25,97,150,325 (on a CPU: 1,10).")] = "",
    repeats: Annotated[int, typer.Option(min=2, help="Timed runs per variant, at most.")] = 50,
    cudnn_benchmark: CudnnBenchmark = False,
    output: BenchOutput = None,
    as_json: AsJson = False,
) -> None:
    """Eager, raw replay and Handle call of one window, at each batch size and frame count."""
    from .bench.stateless import bench_stateless
    from .bench.tables import stateless_table

    place = _bench_device(device, output, cudnn_benchmark)
    is_cpu = place.type == "cpu"
    sizes = _numbers(batch_sizes or ("1" if is_cpu else "1,4,16"), "--batch-sizes")
    lengths = _numbers(frames or ("1,10" if is_cpu else "1,25,97,150,325"), "--frames")
    with _progress() as progress:
        decoder, weights, _ = _bench_decoder(str(checkpoint) if checkpoint else "published", place, dtype)
        record = bench_stateless(
            decoder, batch_sizes=sizes, frames=lengths, repeats=repeats, settings={"weights": weights}, progress=progress
        )
    _deliver(record, stateless_table, output, as_json)


@bench_app.command()
def streaming(
    checkpoint: Checkpoint = "",
    device: Device = "auto",
    dtype: BenchDtype = None,
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated requests played together; by default 1,4,16 (on a CPU: 1).")] = "",
    frames: Annotated[int | None, typer.Option(min=1, help="New frames of each request; by default 380 (on a CPU: 130).")] = None,
    chunk_frames: ChunkFrames = 25,
    initial_frames: InitialFrames = 1,
    context_frames: ContextFrames = 72,
    modes: Annotated[str, typer.Option(help="Comma-separated: icl (with a reference), xvec (without).")] = "icl,xvec",
    repeats: Annotated[int | None, typer.Option(min=1, help="How often each case is played, at most; by default 20 (on a CPU: 2).")] = None,
    codes_on_host: Annotated[bool, typer.Option(help="Hand codes over from the host, or have them on the device.")] = True,
    cudnn_benchmark: CudnnBenchmark = False,
    output: BenchOutput = None,
    as_json: AsJson = False,
) -> None:
    """Requests played chunk by chunk, eager and through graphs: first, growing, steady and last chunks."""
    from .bench.streaming import bench_streaming
    from .bench.tables import streaming_table

    place = _bench_device(device, output, cudnn_benchmark)
    is_cpu = place.type == "cpu"
    sizes = _numbers(batch_sizes or ("1" if is_cpu else "1,4,16"), "--batch-sizes")
    connector = _connector(chunk_frames, initial_frames, context_frames)
    with _progress() as progress:
        decoder, weights, _ = _bench_decoder(checkpoint, place, dtype)
        record = bench_streaming(
            decoder,
            batch_sizes=sizes,
            frames=frames or (130 if is_cpu else 380),
            connector=connector,
            modes=modes.split(","),
            repeats=repeats or (2 if is_cpu else 20),
            codes_on_host=codes_on_host,
            settings={"weights": weights},
            progress=progress,
        )
    _deliver(record, streaming_table, output, as_json)


@bench_app.command()
def service(
    checkpoint: Checkpoint = "",
    device: Device = "auto",
    dtype: BenchDtype = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests; by default 32 (on a CPU: 4).")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests that are live at once; by default 16 (on a CPU: 2).")] = None,
    talker_frames_per_s: Annotated[float, typer.Option(help="Pace of each request's codes; speech has 12.5 frames per second.")] = 50.0,
    kind: Annotated[Kind, typer.Option(help="Requests with a reference, without, or both in turn.")] = Kind.mixed,
    chunk_frames: ChunkFrames = 25,
    initial_frames: InitialFrames = 1,
    context_frames: ContextFrames = 72,
    repeats: Annotated[int | None, typer.Option(min=1, help="Runs of each side; by default 5 (on a CPU: 1).")] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of utterances and references.")] = 0,
    cudnn_benchmark: CudnnBenchmark = False,
    wer: Annotated[bool, typer.Option(help="Count word errors if the checkpoint speaks and the extra 'voice' is installed.")] = True,
    output: BenchOutput = None,
    as_json: AsJson = False,
) -> None:
    """A simulated service, eager against graphs: throughput, latency, time to first audio, word errors."""
    from .bench.service import bench_service, find_recogniser, speech_for
    from .bench.tables import service_table

    place = _bench_device(device, output, cudnn_benchmark)
    is_cpu = place.type == "cpu"
    connector = _connector(chunk_frames, initial_frames, context_frames)
    with _progress() as progress:
        decoder, weights, folder = _bench_decoder(checkpoint, place, dtype)
        speech = speech_for(decoder, folder)
        record = bench_service(
            decoder,
            speech,
            requests=requests or (4 if is_cpu else 32),
            concurrency=concurrency or (2 if is_cpu else 16),
            talker_frames_per_s=talker_frames_per_s,
            kind=kind.value,
            connector=connector,
            repeats=repeats or (1 if is_cpu else 5),
            seed=seed,
            recogniser=find_recogniser(speech) if wer else "not asked for",
            settings={"weights": weights},
            progress=progress,
        )
    _deliver(record, service_table, output, as_json)


def _bench_device(device: str, output: Path | None, cudnn_benchmark: bool) -> torch.device:
    """Where and how a bench runs; a record that cannot be written is found out before the work is done."""
    from .bench.record import check_writable
    from .graphs.backends import checked_device

    place = checked_device(device)
    if output:
        check_writable(output)
    torch.backends.cudnn.benchmark = cudnn_benchmark
    return place


def _bench_decoder(checkpoint: str, place: torch.device, dtype: Dtype | None) -> tuple[Code2WavDecoder, str, Path | None]:
    """The decoder, what its weights are, and its folder if it has one."""
    from .qwen3_tts.checkpoint import load_decoder, random_decoder
    from .qwen3_tts.geometry import published_geometry

    is_cpu = place.type == "cpu"
    kept_as = (dtype or (Dtype.float32 if is_cpu else Dtype.bfloat16)).torch
    checkpoint = checkpoint or ("bundled" if is_cpu else "published")
    if checkpoint == "published":
        return random_decoder(published_geometry(), place, kept_as), "random weights at the published geometry", None
    folder = bundled.checkpoint_folder() if checkpoint == "bundled" else Path(checkpoint)
    return load_decoder(folder, place, kept_as), "bundled checkpoint" if checkpoint == "bundled" else checkpoint, folder


def _connector(chunk_frames: int, initial_frames: int, context_frames: int) -> ConnectorConfig:
    from .config import ConnectorConfig

    return ConnectorConfig(
        codec_chunk_frames=chunk_frames, initial_codec_chunk_frames=initial_frames or None, codec_left_context_frames=context_frames
    )


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A status line on stderr; plain lines where that is no terminal."""
    messages = Console(stderr=True)
    with messages.status("loading") as status:

        def progress(message: str) -> None:
            status.update(message)
            if not messages.is_terminal:
                messages.print(message, highlight=False)

        yield progress


def _deliver(record: MeasurementRecord, as_table: Callable[[MeasurementRecord], Group], output: Path | None, as_json: bool) -> None:
    if output:
        record.write(output)
    if as_json:
        print(record.to_json())
    else:
        console.print(as_table(record))


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
