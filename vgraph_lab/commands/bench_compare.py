"""``vgraph-lab bench compare``: every form of streamed decoding, and peers, side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from .bench_shared import (
    BenchDtype,
    BenchOutput,
    Checkpoint,
    CodesOnDevice,
    CudnnBenchmark,
    Overwrite,
    bench_decoder,
    bench_device,
    deliver,
)
from .shared import AsJson, Device, names, numbers, status

__all__ = ["compare"]


def compare(
    checkpoint: Checkpoint = "",
    device: Device = "auto",
    dtype: BenchDtype = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Comma-separated streams decoded together; by default 1,4,16 (on a CPU: 1).")
    ] = None,
    contenders: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated names, or all. Ours: published-eager, published-graphs, incremental-eager, incremental-graphs, "
            "incremental-fast, incremental-compiled; peers: qwen-tts and what installed packages add. By default all but compiled."
        ),
    ] = None,
    chunk_frames: Annotated[int, typer.Option(min=1, help="Frames of a full chunk.")] = 25,
    repeats: Annotated[int | None, typer.Option(min=1, help="Timed calls of each kind, at most; by default 50 (on a CPU: 10).")] = None,
    codes_on_device: CodesOnDevice = False,
    cudnn_benchmark: CudnnBenchmark = False,
    output: BenchOutput = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Forms of streamed decoding and public peers: time, floors, distance from fp32, and where the time goes."""
    from vgraph_lab.bench.compare import bench_compare
    from vgraph_lab.bench.compare_table import compare_table

    place = bench_device(device, output, overwrite, cudnn_benchmark)
    is_cpu = place.type == "cpu"
    sizes = numbers(batch_sizes, "--batch-sizes", default="1" if is_cpu else "1,4,16")
    with status() as progress:
        decoder, weights, _ = bench_decoder(checkpoint, place, dtype)
        record = bench_compare(
            decoder,
            batch_sizes=sizes,
            contenders=None if contenders is None else names(contenders),
            chunk_frames=chunk_frames,
            repeats=repeats or (10 if is_cpu else 50),
            codes_on_host=not codes_on_device,
            settings={"weights": weights},
            progress=progress,
        )
    deliver(record, compare_table, output, overwrite, as_json)
