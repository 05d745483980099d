"""``vgraph-lab bench compare``: every form of streamed decoding, and peers, side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from .bench import BenchDtype, BenchOutput, Checkpoint, CudnnBenchmark, Overwrite, _bench_decoder, _bench_device, _deliver, bench_app
from .shared import AsJson, Device, numbers, status

__all__ = ["compare"]


@bench_app.command()
def compare(
    checkpoint: Checkpoint = "",
    device: Device = "auto",
    dtype: BenchDtype = None,
    batch_sizes: Annotated[str, typer.Option(help="Comma-separated streams decoded together; by default 1,4,16 (on a CPU: 1).")] = "",
    contenders: Annotated[
        str,
        typer.Option(
            help="Comma-separated names, or all. Ours: published-eager, published-graphs, incremental-eager, incremental-graphs, "
            "incremental-fast, incremental-compiled; peers: qwen-tts and what installed packages add. By default all but compiled."
        ),
    ] = "",
    chunk_frames: Annotated[int, typer.Option(min=1, help="Frames of a full chunk.")] = 25,
    repeats: Annotated[int | None, typer.Option(min=1, help="Timed calls of each kind, at most; by default 50 (on a CPU: 10).")] = None,
    codes_on_host: Annotated[bool, typer.Option(help="Hand codes over from the host, or have them on the device.")] = True,
    cudnn_benchmark: CudnnBenchmark = False,
    output: BenchOutput = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Forms of streamed decoding and public peers: time, floors, distance from fp32, and where the time goes."""
    from vgraph_lab.bench.compare import bench_compare
    from vgraph_lab.bench.compare_table import compare_table

    place = _bench_device(device, output, overwrite, cudnn_benchmark)
    is_cpu = place.type == "cpu"
    sizes = numbers(batch_sizes or ("1" if is_cpu else "1,4,16"), "--batch-sizes")
    with status() as progress:
        decoder, weights, _ = _bench_decoder(checkpoint, place, dtype)
        record = bench_compare(
            decoder,
            batch_sizes=sizes,
            contenders=[name.strip() for name in contenders.split(",")] if contenders else None,
            chunk_frames=chunk_frames,
            repeats=repeats or (10 if is_cpu else 50),
            codes_on_host=codes_on_host,
            settings={"weights": weights},
            progress=progress,
        )
    _deliver(record, compare_table, output, overwrite, as_json)
