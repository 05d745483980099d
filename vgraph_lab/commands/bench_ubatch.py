"""``vgraph-lab bench ubatch``: micro-batches on several ranks, started with torchrun."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated

import typer

from .bench_shared import BenchDtype, BenchOutput, Overwrite, bench_dtype, deliver, told_once
from .shared import AsJson, status

__all__ = ["ubatch"]


def ubatch(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; each rank takes the GPU of its number.")] = "auto",
    dtype: BenchDtype = None,
    ubatches: Annotated[int, typer.Option(min=2, help="Into how many micro-batches a batch is cut.")] = 2,
    comm_sms: Annotated[
        int, typer.Option(min=0, help="One more variant, with this many SMs kept for communication; 0: none. CUDA only.")
    ] = 20,
    hidden: Annotated[int | None, typer.Option(min=2, help="Width of the model; by default 4096 (on a CPU: 64).")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers; by default 6 (on a CPU: 2).")] = None,
    experts: Annotated[int | None, typer.Option(min=0, help="Experts of all ranks; by default 8 (on a CPU: 4). 0: an MLP.")] = None,
    intermediate: Annotated[int | None, typer.Option(min=1, help="Width of each expert; by default 512 (on a CPU: 48).")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts of a prefill, on each rank; by default 8 (on a CPU: 4).")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of each; by default 2048 (on a CPU: 16).")] = None,
    decode_requests: Annotated[
        int | None, typer.Option(min=1, help="Requests decoded together, on each rank; by default 128 (on a CPU: 4).")
    ] = None,
    repeats: Annotated[int | None, typer.Option(min=2, help="Timed steps of each variant; by default 20 (on a CPU: 10).")] = None,
    output: BenchOutput = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Experts on several ranks, whole and in micro-batches. Start it with torchrun --nproc-per-node 2 -m vgraph_lab.cli bench ubatch."""
    from vgraph_lab.bench.ranks import joined_ranks
    from vgraph_lab.bench.record import MeasurementRecord, check_writable
    from vgraph_lab.bench.ubatch import UBatchSizes, bench_ubatch, check_sizes
    from vgraph_lab.bench.ubatch_table import ubatch_table

    with ExitStack() as stack:
        with told_once():
            if output and os.environ.get("RANK", "0") == "0":  # the one that writes it
                check_writable(output, overwrite=overwrite)
            again = f"-m vgraph_lab.cli {shlex.join(sys.argv[1:])}"
            ranks = stack.enter_context(joined_ranks(device, comm_sms=comm_sms, again=again))
            is_cpu, is_first = ranks.device.type == "cpu", ranks.rank == 0
            repeats = repeats or (10 if is_cpu else 20)
            sizes = UBatchSizes.cpu() if is_cpu else UBatchSizes.gpu()
            changes = {"hidden_size": hidden, "num_layers": layers, "num_experts": experts, "intermediate_size": intermediate}
            model = sizes.model.model_copy(update={name: value for name, value in changes.items() if value is not None})
            counts = {"prompts": prompts, "prompt_tokens": prompt_tokens, "decode_requests": decode_requests}
            sizes = replace(sizes, model=model, **{name: value for name, value in counts.items() if value is not None})
            check_sizes(sizes, num_ubatches=ubatches, repeats=repeats, num_ranks=ranks.size)

        def keep(record: MeasurementRecord) -> None:
            if is_first and output:
                record.write(output, overwrite=True)  # whether it may was asked before the first case

        with status() as progress:
            record = bench_ubatch(
                ranks,
                sizes,
                dtype=bench_dtype(dtype, ranks.device),
                num_ubatches=ubatches,
                comm_sms=0 if is_cpu else comm_sms,
                repeats=repeats,
                progress=progress if is_first else lambda _: None,
                keep=keep,
            )
        if is_first:
            deliver(record, ubatch_table, None, overwrite, as_json)
