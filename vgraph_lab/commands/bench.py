"""``vgraph-lab bench``: measurements."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .bench_compare import compare
from .bench_shared import (
    BenchCommand,
    BenchDtype,
    BenchOutput,
    Checkpoint,
    CodesOnDevice,
    CudnnBenchmark,
    Overwrite,
    bench_decoder,
    bench_device,
    bench_dtype,
    deliver,
)
from .bench_ubatch import ubatch
from .shared import AsJson, Device, Kind, names, numbers, status

if TYPE_CHECKING:
    from vgraph_lab.config import ConnectorConfig

__all__ = ["bench_app"]

ChunkFrames = Annotated[int, typer.Option(min=1, help="Frames of every chunk after the first.")]
InitialFrames = Annotated[int, typer.Option(min=0, help="Frames of the first chunk; 0: by load.")]
ContextFrames = Annotated[int, typer.Option(min=0, help="Most frames of a reference.")]


class Algorithm(StrEnum):
    """How streamed chunks are decoded; see the setting ``streaming_algorithm``."""

    published = "published"
    incremental = "incremental"


class StepForm(StrEnum):
    """What the graphs of incremental decoding are made of; see the setting ``targets.qwen3_tts.incremental.form``."""

    plain = "plain"
    fast = "fast"
    compiled = "compiled"


AlgorithmOption = Annotated[
    Algorithm,
    typer.Option(metavar="<algorithm>", help="published: decode context again for every chunk; incremental: each chunk by itself."),
]
FormOption = Annotated[
    StepForm | None,
    typer.Option(
        metavar="<form>",
        help="Of the graphs' step, with --algorithm incremental: plain, fast or compiled. A form that cannot run here is replaced by "
        "the plain one, and the record says why.",
    ),
]


def stateless(
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint folder; random weights at the published geometry by default.")] = None,
    device: Device = "auto",
    dtype: BenchDtype = None,
    batch_sizes: Annotated[str | None, typer.Option(help="Comma-separated rows per call; by default 1,4,16 (on a CPU: 1).")] = None,
    frames: Annotated[str | None, typer.Option(help="Comma-separated frames per row; by default 1,25,97,150,325 (on a CPU: 1,10).")] = None,
    repeats: Annotated[int, typer.Option(min=2, help="Timed runs per variant, at most.")] = 50,
    cudnn_benchmark: CudnnBenchmark = False,
    output: BenchOutput = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Eager, raw replay and Handle call of one window, at each batch size and frame count."""
    from vgraph_lab.bench.stateless import bench_stateless
    from vgraph_lab.bench.tables import stateless_table

    place = bench_device(device, output, overwrite, cudnn_benchmark)
    is_cpu = place.type == "cpu"
    sizes = numbers(batch_sizes, "--batch-sizes", default="1" if is_cpu else "1,4,16")
    lengths = numbers(frames, "--frames", default="1,10" if is_cpu else "1,25,97,150,325")
    with status() as progress:
        decoder, weights, _ = bench_decoder(str(checkpoint) if checkpoint else "published", place, dtype)
        record = bench_stateless(
            decoder, batch_sizes=sizes, frames=lengths, repeats=repeats, settings={"weights": weights}, progress=progress
        )
    deliver(record, stateless_table, output, overwrite, as_json)


def streaming(
    checkpoint: Checkpoint = "",
    device: Device = "auto",
    dtype: BenchDtype = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Comma-separated requests played together; by default 1,4,16 (on a CPU: 1).")
    ] = None,
    frames: Annotated[int | None, typer.Option(min=1, help="New frames of each request; by default 380 (on a CPU: 130).")] = None,
    chunk_frames: ChunkFrames = 25,
    initial_frames: InitialFrames = 1,
    context_frames: ContextFrames = 72,
    algorithm: AlgorithmOption = Algorithm.published,
    form: FormOption = None,
    modes: Annotated[str, typer.Option(help="Comma-separated: icl (with a reference), xvec (without).")] = "icl,xvec",
    repeats: Annotated[int | None, typer.Option(min=1, help="How often each case is played, at most; by default 20 (on a CPU: 2).")] = None,
    codes_on_device: CodesOnDevice = False,
    cudnn_benchmark: CudnnBenchmark = False,
    output: BenchOutput = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Requests played chunk by chunk, eager and through graphs: first, growing, steady and last chunks."""
    from vgraph_lab.bench.streaming import bench_streaming
    from vgraph_lab.bench.tables import streaming_table

    place = bench_device(device, output, overwrite, cudnn_benchmark)
    is_cpu = place.type == "cpu"
    sizes = numbers(batch_sizes, "--batch-sizes", default="1" if is_cpu else "1,4,16")
    connector = _connector(chunk_frames, initial_frames, context_frames)
    with status() as progress:
        decoder, weights, _ = bench_decoder(checkpoint, place, dtype)
        record = bench_streaming(
            decoder,
            batch_sizes=sizes,
            frames=frames or (130 if is_cpu else 380),
            connector=connector,
            modes=names(modes),
            repeats=repeats or (2 if is_cpu else 20),
            codes_on_host=not codes_on_device,
            algorithm=algorithm.value,
            form=form and form.value,
            settings={"weights": weights},
            progress=progress,
        )
    deliver(record, streaming_table, output, overwrite, as_json)


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
    algorithm: AlgorithmOption = Algorithm.published,
    form: FormOption = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Runs of each side; by default 5 (on a CPU: 1).")] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of utterances and references.")] = 0,
    cudnn_benchmark: CudnnBenchmark = False,
    no_wer: Annotated[
        bool,
        typer.Option(
            "--no-wer",
            help="Leave word errors uncounted; else they are counted if the checkpoint speaks and the extra 'voice' is installed.",
        ),
    ] = False,
    output: BenchOutput = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """A simulated service, eager against graphs: throughput, latency, time to first audio, word errors."""
    from vgraph_lab.bench.service import bench_service, find_recogniser, speech_for
    from vgraph_lab.bench.tables import service_table

    place = bench_device(device, output, overwrite, cudnn_benchmark)
    is_cpu = place.type == "cpu"
    connector = _connector(chunk_frames, initial_frames, context_frames)
    with status() as progress:
        decoder, weights, folder = bench_decoder(checkpoint, place, dtype)
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
            algorithm=algorithm.value,
            form=form and form.value,
            recogniser="not asked for" if no_wer else find_recogniser(speech),
            settings={"weights": weights},
            progress=progress,
        )
    deliver(record, service_table, output, overwrite, as_json)


def v1(
    device: Device = "auto",
    dtype: BenchDtype = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Comma-separated requests decoded together; by default 1,8,64 (on a CPU: 1,4).")
    ] = None,
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

    place = bench_device(device, output, overwrite)
    is_cpu = place.type == "cpu"
    sizes = numbers(batch_sizes, "--batch-sizes", default="1,4" if is_cpu else "1,8,64")
    model = WorkloadConfig(hidden_size=128, max_model_len=256, num_experts=experts) if is_cpu else WorkloadConfig.gpu(num_experts=experts)
    with status() as progress:
        record = bench_v1(model, place, dtype=bench_dtype(dtype, place), batch_sizes=sizes, repeats=repeats, progress=progress)
    deliver(record, v1_table, output, overwrite, as_json)


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
    deliver(record, planner_table, output, overwrite, as_json)


def _connector(chunk_frames: int, initial_frames: int, context_frames: int) -> ConnectorConfig:
    from vgraph_lab.config import ConnectorConfig

    return ConnectorConfig(
        codec_chunk_frames=chunk_frames, initial_codec_chunk_frames=initial_frames or None, codec_left_context_frames=context_frames
    )


bench_app = typer.Typer(no_args_is_help=True, help="Measure: medians, spread and ratios of interleaved runs.")
for command in (stateless, streaming, service, compare, v1, ubatch, planner):
    bench_app.command(cls=BenchCommand)(command)
