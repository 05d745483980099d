"""``vgraph-lab bench``: measurements."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Group

from vgraph_lab import bundled

from .bench_ubatch import ubatch
from .shared import AsJson, Device, Dtype, Kind, console, numbers, status

if TYPE_CHECKING:
    from vgraph_lab.bench.record import MeasurementRecord
    from vgraph_lab.config import ConnectorConfig
    from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder

__all__ = ["bench_app"]

bench_app = typer.Typer(no_args_is_help=True, help="Measure: medians, spread and ratios of interleaved runs.")
bench_app.command()(ubatch)

ChunkFrames = Annotated[int, typer.Option(min=1, help="Frames of every chunk after the first.")]
InitialFrames = Annotated[int, typer.Option(min=0, help="Frames of the first chunk; 0: by load.")]
ContextFrames = Annotated[int, typer.Option(min=0, help="Most frames of a reference.")]
CudnnBenchmark = Annotated[bool, typer.Option(help="Let cuDNN time its convolutions once per shape and keep the fastest.")]

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
Overwrite = Annotated[bool, typer.Option(help="Replace a record that is there.")]


class Algorithm(StrEnum):
    """How streamed chunks are decoded; see the setting ``streaming_algorithm``."""

    published = "published"
    incremental = "incremental"


@bench_app.command()
def stateless(
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint folder; random weights at the published geometry by default.")] = None,
    device: Device = "auto",
    dtype: BenchDtype = None,
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated rows per call; by default 1,4,16 (on a CPU: 1).")] = "",
    frames: Annotated[str, typer.Option(help="Comma-separated frames per row; by default 1,25,97,150,325 (on a CPU: 1,10).")] = "",
    repeats: Annotated[int, typer.Option(min=2, help="Timed runs per variant, at most.")] = 50,
    cudnn_benchmark: CudnnBenchmark = False,
    output: BenchOutput = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Eager, raw replay and Handle call of one window, at each batch size and frame count."""
    from vgraph_lab.bench.stateless import bench_stateless
    from vgraph_lab.bench.tables import stateless_table

    place = _bench_device(device, output, overwrite, cudnn_benchmark)
    is_cpu = place.type == "cpu"
    sizes = numbers(batch_sizes or ("1" if is_cpu else "1,4,16"), "--batch-sizes")
    lengths = numbers(frames or ("1,10" if is_cpu else "1,25,97,150,325"), "--frames")
    with status() as progress:
        decoder, weights, _ = _bench_decoder(str(checkpoint) if checkpoint else "published", place, dtype)
        record = bench_stateless(
            decoder, batch_sizes=sizes, frames=lengths, repeats=repeats, settings={"weights": weights}, progress=progress
        )
    _deliver(record, stateless_table, output, overwrite, as_json)


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
    algorithm: Annotated[Algorithm, typer.Option(help="Decode context again for every chunk, as published, or each chunk by itself.")] = (
        Algorithm.published
    ),
    modes: Annotated[str, typer.Option(help="Comma-separated: icl (with a reference), xvec (without).")] = "icl,xvec",
    repeats: Annotated[int | None, typer.Option(min=1, help="How often each case is played, at most; by default 20 (on a CPU: 2).")] = None,
    codes_on_host: Annotated[bool, typer.Option(help="Hand codes over from the host, or have them on the device.")] = True,
    cudnn_benchmark: CudnnBenchmark = False,
    output: BenchOutput = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Requests played chunk by chunk, eager and through graphs: first, growing, steady and last chunks."""
    from vgraph_lab.bench.streaming import bench_streaming
    from vgraph_lab.bench.tables import streaming_table

    place = _bench_device(device, output, overwrite, cudnn_benchmark)
    is_cpu = place.type == "cpu"
    sizes = numbers(batch_sizes or ("1" if is_cpu else "1,4,16"), "--batch-sizes")
    connector = _connector(chunk_frames, initial_frames, context_frames)
    with status() as progress:
        decoder, weights, _ = _bench_decoder(checkpoint, place, dtype)
        record = bench_streaming(
            decoder,
            batch_sizes=sizes,
            frames=frames or (130 if is_cpu else 380),
            connector=connector,
            modes=modes.split(","),
            repeats=repeats or (2 if is_cpu else 20),
            codes_on_host=codes_on_host,
            algorithm=algorithm.value,
            settings={"weights": weights},
            progress=progress,
        )
    _deliver(record, streaming_table, output, overwrite, as_json)


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
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """A simulated service, eager against graphs: throughput, latency, time to first audio, word errors."""
    from vgraph_lab.bench.service import bench_service, find_recogniser, speech_for
    from vgraph_lab.bench.tables import service_table

    place = _bench_device(device, output, overwrite, cudnn_benchmark)
    is_cpu = place.type == "cpu"
    connector = _connector(chunk_frames, initial_frames, context_frames)
    with status() as progress:
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
    _deliver(record, service_table, output, overwrite, as_json)


@bench_app.command()
def v1(
    device: Device = "auto",
    dtype: BenchDtype = None,
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated requests decoded together; by default 1,8,64 (on a CPU: 1,4).")] = "",
    experts: Annotated[int, typer.Option(min=0, help="Experts of each layer; 0 for an MLP.")] = 0,
    repeats: Annotated[int, typer.Option(min=2, help="Timed steps of each mode, at most.")] = 50,
    output: BenchOutput = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Decode steps on vLLM's own path: eager, PIECEWISE and FULL, with host time and node counts."""
    from vgraph_lab.bench.tables import v1_table
    from vgraph_lab.bench.v1 import bench_v1
    from vgraph_lab.vllm_v1 import WorkloadConfig

    place = _bench_device(device, output, overwrite, cudnn_benchmark=False)
    is_cpu = place.type == "cpu"
    sizes = numbers(batch_sizes or ("1,4" if is_cpu else "1,8,64"), "--batch-sizes")
    model = WorkloadConfig(hidden_size=128, max_model_len=256, num_experts=experts) if is_cpu else WorkloadConfig.gpu(num_experts=experts)
    kept_as = (dtype or (Dtype.float32 if is_cpu else Dtype.bfloat16)).torch
    with status() as progress:
        record = bench_v1(model, place, dtype=kept_as, batch_sizes=sizes, repeats=repeats, progress=progress)
    _deliver(record, v1_table, output, overwrite, as_json)


@bench_app.command()
def planner(
    calls: Annotated[int, typer.Option(min=1, help="Calls to plan for.")] = 1_000_000,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each case.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the calls.")] = 0,
    output: BenchOutput = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Sum up a million calls and plan captures for them: seconds, and bytes at the peak. Runs on the processor."""
    from vgraph_lab.bench.planner import bench_planner
    from vgraph_lab.bench.record import check_writable
    from vgraph_lab.bench.tables import planner_table

    if output:
        check_writable(output, overwrite=overwrite)
    with status() as progress:
        record = bench_planner(calls=calls, repeats=repeats, seed=seed, progress=progress)
    _deliver(record, planner_table, output, overwrite, as_json)


def _bench_device(device: str, output: Path | None, overwrite: bool, cudnn_benchmark: bool) -> torch.device:
    """Where and how a bench runs; a record that cannot be written is found out before the work is done."""
    from vgraph_lab.bench.record import check_writable
    from vgraph_lab.graphs.backends import checked_device

    place = checked_device(device)
    if output:
        check_writable(output, overwrite=overwrite)
    torch.backends.cudnn.benchmark = cudnn_benchmark
    return place


def _bench_decoder(checkpoint: str, place: torch.device, dtype: Dtype | None) -> tuple[Code2WavDecoder, str, Path | None]:
    """The decoder, what its weights are, and its folder if it has one."""
    from vgraph_lab.qwen3_tts.checkpoint import load_decoder, random_decoder
    from vgraph_lab.qwen3_tts.geometry import published_geometry

    is_cpu = place.type == "cpu"
    kept_as = (dtype or (Dtype.float32 if is_cpu else Dtype.bfloat16)).torch
    checkpoint = checkpoint or ("bundled" if is_cpu else "published")
    if checkpoint == "published":
        return random_decoder(published_geometry(), place, kept_as), "random weights at the published geometry", None
    folder = bundled.checkpoint_folder() if checkpoint == "bundled" else Path(checkpoint)
    return load_decoder(folder, place, kept_as), "bundled checkpoint" if checkpoint == "bundled" else checkpoint, folder


def _connector(chunk_frames: int, initial_frames: int, context_frames: int) -> ConnectorConfig:
    from vgraph_lab.config import ConnectorConfig

    return ConnectorConfig(
        codec_chunk_frames=chunk_frames, initial_codec_chunk_frames=initial_frames or None, codec_left_context_frames=context_frames
    )


def _deliver(
    record: MeasurementRecord, as_table: Callable[[MeasurementRecord], Group], output: Path | None, overwrite: bool, as_json: bool
) -> None:
    if output:
        record.write(output, overwrite=overwrite)
    if as_json:
        print(record.to_json())
    else:
        console.print(as_table(record))


from . import bench_compare  # noqa: E402, F401 - registers its command, which takes the options above
