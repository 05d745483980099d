"""What the bench commands have in common: options, where and with which weights a bench runs, and what becomes of its record."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Group
from typer.core import TyperCommand

from vgraph_lab import bundled

from .shared import Dtype, console

if TYPE_CHECKING:
    from vgraph_lab.bench.record import MeasurementRecord
    from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder

__all__ = [
    "BenchCommand",
    "BenchDtype",
    "BenchOutput",
    "Checkpoint",
    "CodesOnDevice",
    "CudnnBenchmark",
    "Overwrite",
    "bench_decoder",
    "bench_device",
    "bench_dtype",
    "deliver",
    "told_once",
]

_WAIT_S = 20.0

# Switches have one name each, and long choices a short word for their kind: a second name, or a wide column of kinds, leaves a
# terminal of eighty columns too little room for the help.
Checkpoint = Annotated[
    str,
    typer.Option(
        help="Checkpoint folder, 'bundled', or 'published' (random weights at the published geometry). "
        "By default published on a GPU and bundled on a CPU."
    ),
]
BenchDtype = Annotated[
    Dtype | None,
    typer.Option(
        metavar="<dtype>",
        help="Of weights and activations: float32, bfloat16 or float16; by default bfloat16 on a GPU and float32 on a CPU.",
    ),
]
CodesOnDevice = Annotated[
    bool, typer.Option("--codes-on-device", help="Have codes on the device; else they are handed over from the host, as a connector does.")
]
CudnnBenchmark = Annotated[
    bool, typer.Option("--cudnn-benchmark", help="Let cuDNN time its convolutions once per shape and keep the fastest.")
]
BenchOutput = Annotated[Path | None, typer.Option(help="Write the record here, as JSON.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a record that is there.")]


def bench_device(device: str, output: Path | None, overwrite: bool, cudnn_benchmark: bool = False) -> torch.device:
    """Where and how a bench runs; a record that cannot be written is found out before the work is done.

    Raises:
        InputError: there is no such kind of device, or the record cannot be written.
        BackendError: the device is not there.
    """
    from vgraph_lab.bench.record import check_writable
    from vgraph_lab.graphs.backends import checked_device

    place = checked_device(device)
    if output:
        check_writable(output, overwrite=overwrite)
    torch.backends.cudnn.benchmark = cudnn_benchmark
    return place


def bench_dtype(dtype: Dtype | None, place: torch.device) -> torch.dtype:
    """The dtype that was asked for; by default bfloat16 on a GPU and float32 on a CPU."""
    return (dtype or (Dtype.float32 if place.type == "cpu" else Dtype.bfloat16)).torch


def bench_decoder(checkpoint: str, place: torch.device, dtype: Dtype | None) -> tuple[Code2WavDecoder, str, Path | None]:
    """The decoder, what its weights are, and its folder if it has one.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    from vgraph_lab.qwen3_tts.checkpoint import load_decoder, random_decoder
    from vgraph_lab.qwen3_tts.geometry import published_geometry

    kept_as = bench_dtype(dtype, place)
    checkpoint = checkpoint or ("bundled" if place.type == "cpu" else "published")
    if checkpoint == "published":
        return random_decoder(published_geometry(), place, kept_as), "random weights at the published geometry", None
    folder = bundled.checkpoint_folder() if checkpoint == "bundled" else Path(checkpoint)
    return load_decoder(folder, place, kept_as), "bundled checkpoint" if checkpoint == "bundled" else checkpoint, folder


def deliver(
    record: MeasurementRecord, as_table: Callable[[MeasurementRecord], Group], output: Path | None, overwrite: bool, as_json: bool
) -> None:
    """Write the record if it has a place, and print it: a table for people, or JSON."""
    if output:
        record.write(output, overwrite=overwrite)
    if as_json:
        print(record.to_json())
    else:
        console.print(as_table(record))


@contextmanager
def told_once(wait_s: float = _WAIT_S) -> Iterator[None]:
    """What is wrong with arguments is found by all ranks alike: rank 0 tells it, and the others wait until torchrun ends them for that.

    A rank that is still there after ``wait_s`` seconds has found what rank 0 has not, and tells it itself. torchrun prints a report
    of its own after the message, below a traceback of its own; the report repeats the message, by the file that torchrun names.
    """
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        if os.environ.get("RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(wait_s)
        elif report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            message = error.format_message() if isinstance(error, typer.BadParameter) else str(error)
            found = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}  # as torch's own ErrorHandler has it
            with suppress(OSError):  # the message itself is told below
                Path(report).write_text(json.dumps({"message": found}), encoding="utf-8")
        raise


class BenchCommand(TyperCommand):
    """A bench, which torchrun may start once for each rank: options that cannot be read are told of once."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the options."""
        with told_once():
            return super().make_context(*args, **kwargs)
