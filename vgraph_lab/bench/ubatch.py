"""Bench of micro-batches: a mixture of experts on several ranks, whole and in micro-batches, eager and with graphs.

Two cases. *Prefill*: long prompts, where the exchange of tokens is long enough to be worth hiding; FULL graphs cannot hold its attention,
which reads as many tokens as a request may have for each token of the batch. *Decode*: one token of many requests, where FULL graphs hold
everything, the exchange over NCCL and all micro-batches included. All ranks run the same, a step is as slow as its slowest rank, and
the variants of a case take turns.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

from vgraph_lab.errors import InputError
from vgraph_lab.vllm_v1 import UBatchSpan

from .ranks import Ranks
from .record import MeasurementRecord, describe_machine
from .runners import Progress
from .ubatch_measure import SPAN_COLUMNS, UBatchBench, UBatchSizes, Variant, is_host_bound

__all__ = [
    "COMMAND",
    "RECORD_COLUMNS",
    "UBatchSizes",
    "bench_ubatch",
    "check_sizes",
    "record_table",
    "recorded_spans",
    "recorded_ubatch",
    "where_recorded",
]

COMMAND = "torchrun --nproc-per-node 2 -m vgraph_lab.cli bench ubatch --output data/measurements/ubatch_h200x2.json"
"""How the record of two GPUs is made."""


def bench_ubatch(
    ranks: Ranks,
    sizes: UBatchSizes,
    *,
    dtype: torch.dtype = torch.float32,
    num_ubatches: int = 2,
    comm_sms: int = 0,
    repeats: int = 20,
    progress: Progress = lambda _: None,
    keep: Callable[[MeasurementRecord], object] = lambda _: None,
) -> MeasurementRecord:
    """Time steps through ``execute_model``. Every rank calls it, with the same arguments.

    Args:
        ranks: this one and the others.
        sizes: of the model and its batches.
        dtype: of weights and activations.
        num_ubatches: into how many parts batches are cut.
        comm_sms: SMs for communication in one more variant, where computation leaves them free; 0 for no such variant.
        repeats: timed steps of each variant.
        progress: told each stage, on every rank.
        keep: given the record after each case, so that a later one that ends the process takes nothing with it.

    Raises:
        InputError: sizes or repeats that are none, or batches that cannot be cut.
    """
    check_sizes(sizes, num_ubatches=num_ubatches, repeats=repeats, num_ranks=ranks.size)
    is_cuda, backend = ranks.device.type == "cuda", str(dist.get_backend(ranks.experts))
    has_share = bool(comm_sms) and ranks.experts_with_share is not None
    bench = UBatchBench(ranks, sizes, dtype, comm_sms=comm_sms, repeats=repeats, progress=progress)
    settings: dict[str, Any] = {
        "model": sizes.model.model_dump(exclude={"max_model_len"}),
        "dtype": str(dtype).removeprefix("torch."),
        "weights": "random weights",
        "ranks": ranks.size,
        "backend": backend,
        "num_ubatches": num_ubatches,
        "comm_sms": comm_sms if has_share else 0,
        "repeats": repeats,
        **_counts(sizes),
        "exchange_alone_ms": bench.exchange_alone_ms(),
        "absent": {},
        "traces": [],
    }
    machine = describe_machine(ranks.device)
    if is_cuda:
        machine["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    local = os.environ.get("LOCAL_WORLD_SIZE", str(ranks.size))
    settings["started_with"] = f"torchrun --nproc-per-node {local} -m vgraph_lab.cli {shlex.join(sys.argv[1:])}"
    record = MeasurementRecord("ubatch", settings, [], machine)
    whole, split = Variant("eager", "NONE"), Variant("eager_ubatch", "NONE", num_ubatches)
    share = [replace(split, name="eager_ubatch_sms", has_share=True)] if has_share else []
    cases = {"prefill": [whole, split, *share, Variant("piecewise", "PIECEWISE")], "decode": [whole, split]}
    if sizes.model.num_experts and backend != "nccl":
        cases["decode"].append(Variant("piecewise", "PIECEWISE"))
        settings["absent"]["decode full"] = f"a graph cannot hold the exchange over {backend}, where the host does that work"
    else:
        full = Variant("full", "FULL_DECODE_ONLY")
        cases["decode"] += [full, replace(full, name="full_ubatch", num_ubatches=num_ubatches, baseline="full")]
    for case, variants in cases.items():
        found = bench.measured(case, variants)
        record.rows.extend(found.rows)
        settings["absent"] |= found.absent
        if case == "prefill":
            settings["traces"] += found.traces
        keep(record)
    return record


def recorded_ubatch(path: Path | None = None) -> MeasurementRecord | None:
    """The record of this bench in a file; by default this project's own of two GPUs, from ``data/measurements`` of its source tree.

    Returns:
        None if there is no such file.

    Raises:
        InputError: the file holds something else.
    """
    path = Path(__file__).parents[2] / "data" / "measurements" / "ubatch_h200x2.json" if path is None else path
    if not path.is_file():
        return None
    try:
        record = MeasurementRecord(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise InputError(f"{path} is no record of a bench ({error}). Expected what 'vgraph-lab bench ubatch --output' writes.") from error
    if record.bench != "ubatch":
        raise InputError(f"{path} is a record of 'vgraph-lab bench {record.bench}'. Expected one of 'vgraph-lab bench ubatch'.")
    return record


def where_recorded(record: MeasurementRecord | None) -> str:
    """Where and when a record was made, in a line; without one, how to make it, if this machine can."""
    if record is not None:
        s = record.settings
        return f"recorded, not measured here: {s['ranks']} × {record.machine['card']}, {s['backend']}, {record.measured_at[:10]}"
    count = torch.cuda.device_count()
    if count > 1:
        return f"no recording is at hand. Measure on the {count} GPUs of this machine: {COMMAND}"
    return "no recording is at hand, and this machine has not got two GPUs to make one"


def recorded_spans(record: MeasurementRecord, *, rank: int = 0, layers: int | None = None) -> list[UBatchSpan]:
    """The spans of the prefill step that a record holds of one rank, for :func:`~vgraph_lab.inspect.v1_tables.ubatch_trace_table`.

    Args:
        record: of this bench.
        rank: whose.
        layers: how many of the first ones, two exchanges each; all of them by default.

    Raises:
        InputError: the record has no such trace.
    """
    held = {trace["rank"]: trace["spans"] for trace in record.settings.get("traces", [])}
    if rank not in held:
        raise InputError(f"the record has no trace of rank {rank}. It has: {', '.join(map(str, held)) or 'none'}.")
    columns = zip(*(held[rank][name] for name in SPAN_COLUMNS), strict=True)
    spans = [UBatchSpan(start / 1e6, end / 1e6, ubatch, stream, name) for start, end, ubatch, stream, name in columns]
    exchanges = [span.end_s for span in spans if span.name == "all-to-all"]
    wanted = None if layers is None else 2 * layers * record.settings["num_ubatches"]
    if wanted is None or wanted >= len(exchanges):
        return spans
    end_s = sorted(exchanges)[wanted - 1]
    return [replace(span, end_s=min(span.end_s, end_s)) for span in spans if span.start_s < end_s]


RECORD_COLUMNS = {
    "case": "prefill of long prompts, or decode of one token of many requests",
    "variant": "eager, piecewise or full graphs; _ubatch: in micro-batches; _sms: with SMs kept for communication",
    "wall_ms": "a step from an idle device until it is done, host time included; median of the slowest rank's",
    "device_ms": "the same on the device alone; missing on a CPU",
    "gain": "time of the same without micro-batches over this one's, on the device where there is one; missing for whole batches",
    "comm_ms": "time of the communication stream in one traced step of the first rank; missing for graphs and whole batches, and where the "
    "device waits for the host, since spans include that wait",
    "hidden_percent": "of it, beside computation of another micro-batch; missing likewise",
}
"""The columns of :func:`record_table`, in order, with their meaning."""


def record_table(record: MeasurementRecord) -> pd.DataFrame:
    """A record's rows with the columns of :data:`RECORD_COLUMNS`."""
    gains = [row.get("device_whole_over_this", row.get("wall_whole_over_this")) for row in record.rows]
    rows = [{name: row.get(name) for name in RECORD_COLUMNS} | {"gain": gain} for row, gain in zip(record.rows, gains, strict=True)]
    rows = [
        row | (dict.fromkeys(("comm_ms", "hidden_percent")) if is_host_bound(each) else {})
        for row, each in zip(rows, record.rows, strict=True)
    ]
    words = dict.fromkeys(("case", "variant"), "str")
    numbers = dict.fromkeys((name for name in RECORD_COLUMNS if name not in words), "float64")
    return pd.DataFrame(rows, columns=list(RECORD_COLUMNS)).astype({**words, **numbers})


def check_sizes(sizes: UBatchSizes, *, num_ubatches: int, repeats: int, num_ranks: int = 1) -> None:
    """Refuse what no rank could run, before any of them begins.

    Args:
        sizes: of the model and its batches.
        num_ubatches: into how many parts batches are cut.
        repeats: timed steps of each variant.
        num_ranks: among which experts are divided.

    Raises:
        InputError: sizes or repeats that are none, batches that cannot be cut, or experts that ranks cannot have equal parts of.
    """
    counts = _counts(sizes)
    if min(counts.values()) < 1 or repeats < 2:
        raise InputError(f"sizes and repeats: got {counts} and {repeats}; at least 1, and 2 repeats.")
    if num_ubatches < 2 or sizes.decode_requests < num_ubatches or sizes.prompts * sizes.prompt_tokens < num_ubatches:
        raise InputError(
            f"{num_ubatches} micro-batches of a step of {sizes.decode_requests} decoded requests or of {sizes.prompts} × "
            f"{sizes.prompt_tokens} prompt tokens: there must be two or more micro-batches, and at least one token for each."
        )
    if sizes.model.num_experts % num_ranks:
        raise InputError(f"{sizes.model.num_experts} experts cannot be divided among {num_ranks} ranks. Use a multiple of the ranks.")


def _counts(sizes: UBatchSizes) -> dict[str, int]:
    return {name: value for name, value in asdict(sizes).items() if name != "model"}
