"""``vgraph-lab bench stateless``: one window of codes, eager, as a raw graph, and through the Handle.

Four variants, interleaved, each from an idle device:

    eager          the decoder's mathematics
    replay         graph.replay() alone
    copy_replay    codes copied into the static buffer, then graph.replay(): the least that a caller must do
    handle         the Target: validation, resolution, locking, copy, replay, cut, clone, statistics

What the Handle costs is handle − copy_replay of host time. It is taken twice: in bursts of calls, as a busy server makes
them, and (``idle``) one call at a time from an idle device, with the processor's caches full of eager's Python.

Beside the times, capturing all shapes through the Manager
is compared with capturing them by hand in one pool.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any

import torch

from vgraph_lab.graphs import Descriptor, VocoderCUDAGraphManager, create_backend
from vgraph_lab.graphs.backends.cuda import allocator_segments
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.stateless import stateless_target

from .record import MeasurementRecord, describe_machine
from .timing import host_time_in_bursts_us, time_interleaved

__all__ = ["bench_stateless"]

Progress = Callable[[str], None]


def bench_stateless(
    decoder: Code2WavDecoder,
    *,
    batch_sizes: Sequence[int] = (1, 4, 16),
    frames: Sequence[int] = (1, 25, 97, 150, 325),
    repeats: int = 50,
    settings: dict[str, Any] | None = None,
    progress: Progress = lambda _: None,
) -> MeasurementRecord:
    """Measure every batch size × frame count on the decoder's device.

    Args:
        decoder: what to measure; its device chooses the backend.
        batch_sizes: rows per call.
        frames: frames per row.
        repeats: timed runs per variant.
        settings: what else describes the decoder (checkpoint or geometry), for the record.
        progress: told what is being measured.
    """
    device = decoder.device
    backend = create_backend(device)
    by_hand = _capture_by_hand(decoder, batch_sizes, frames) if device.type == "cuda" else None
    rows: list[dict[str, Any]] = []
    target = stateless_target(decoder, bucket_frames=frames, batch_sizes=batch_sizes)
    with VocoderCUDAGraphManager(backend, [target]) as manager:
        report = manager.capture(lambda step: progress(f"capturing {step}"))
        for number, entry in enumerate(manager.entries(), start=1):
            progress(f"measuring {entry.descriptor}, shape {number} of {report.captured}")
            rows.append(_measure(decoder, manager, target, entry.descriptor, repeats))
        capture = {
            "graphs": report.captured,
            "failed": report.failed,
            "seconds": report.seconds,
            "capture_seconds": sum(e.cost.capture_s for e in manager.entries()),
            "pool_reserved_bytes": report.pool_reserved_bytes,
            "static_buffer_bytes": report.static_buffer_bytes,
        }
    rows.sort(key=lambda row: (row["batch_size"], row["frames"]))
    described = {
        **(settings or {}),
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "repeats": repeats,
        "capture": capture,
        "capture_by_hand": by_hand,
    }
    return MeasurementRecord("stateless", described, rows, describe_machine(device))


def _measure(
    decoder: Code2WavDecoder, manager: VocoderCUDAGraphManager, target: Any, descriptor: Descriptor, repeats: int
) -> dict[str, Any]:
    entry = next(e for e in manager.entries() if e.descriptor == descriptor)
    codes = _codes(decoder, descriptor)
    static = entry.buffers["codes"]

    def copy_replay() -> None:
        static.copy_(codes)
        entry.graph.replay()

    with torch.no_grad():
        variants: dict[str, Callable[[], Any]] = {
            "eager": lambda: decoder.decode(codes),
            "replay": entry.graph.replay,
            "copy_replay": copy_replay,
            "handle": lambda: target(codes),
        }
        timings = time_interleaved(variants, decoder.device, repeats=repeats)
        bursts: dict[str, float] = {}
        if decoder.device.type == "cuda":  # on the CPU a call returns when its work is done, so there is no host time of its own
            for name in ("copy_replay", "handle"):
                bursts[name] = host_time_in_bursts_us(variants[name], decoder.device)
    row: dict[str, Any] = {"batch_size": descriptor.batch_size, "frames": descriptor.frames}
    for name, timing in timings.items():
        row |= {f"{name}_{key}": value for key, value in asdict(timing).items() if key != "repeats"}
    row |= {f"{name}_burst_host_us": value for name, value in bursts.items()}
    if bursts:
        row["handle_overhead_host_us"] = bursts["handle"] - bursts["copy_replay"]
        row["handle_overhead_host_idle_us"] = 1e3 * (timings["handle"].host_ms - timings["copy_replay"].host_ms)
    row["speedup_replay"] = timings["eager"].wall_ms / timings["replay"].wall_ms
    row["speedup_handle"] = timings["eager"].wall_ms / timings["handle"].wall_ms
    row["nodes"] = dict(entry.cost.node_counts)
    row["pool_delta_bytes"] = entry.cost.pool_delta_bytes
    row["capture_s"] = entry.cost.capture_s
    row["warmup_s"] = entry.cost.warmup_s
    return row


def _codes(decoder: Code2WavDecoder, descriptor: Descriptor) -> torch.Tensor:
    g = decoder.geometry
    shape = (descriptor.batch_size, g.num_quantizers, descriptor.frames)
    return torch.randint(0, g.codebook_size, shape, generator=torch.Generator().manual_seed(descriptor.work)).to(decoder.device)


def _capture_by_hand(decoder: Code2WavDecoder, batch_sizes: Sequence[int], frames: Sequence[int]) -> dict[str, Any]:
    """The same shapes with ``torch.cuda.graph`` in one pool: the yardstick for capture time and pool bytes."""
    shapes = sorted((Descriptor(b, t) for b in batch_sizes for t in frames), key=lambda d: d.work, reverse=True)
    pool = torch.cuda.graph_pool_handle()
    kept: list[Any] = []
    capture_seconds = 0.0
    start = perf_counter()
    with torch.no_grad():
        for shape in shapes:
            codes = _codes(decoder, shape)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    decoder.decode(codes)
            torch.cuda.synchronize()
            began = perf_counter()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                output = decoder.decode(codes)
            torch.cuda.synchronize()
            capture_seconds += perf_counter() - began
            kept.append((graph, codes, output))
    seconds = perf_counter() - start
    reserved = sum(segment["total_size"] for segment in allocator_segments([pool])[pool])
    for graph, *_ in kept:
        graph.reset()
    kept.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return {"graphs": len(shapes), "seconds": seconds, "capture_seconds": capture_seconds, "pool_reserved_bytes": reserved}
