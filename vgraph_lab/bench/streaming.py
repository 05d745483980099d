"""``vgraph-lab bench streaming``: requests played chunk by chunk, eager and through graphs, on the same weights.

B requests go through ``execute_model`` in step, in an eager runner and in one with graphs, which take turns chunk by
chunk, so that both meet the same state and the same clock. Chunks are sorted by what the decoder does with them:

    first     the reference (if any) and the initial chunk
    growing   full chunks while fewer than W frames are kept
    steady    full chunks once W frames are kept: where a long utterance spends its time
    tail      a last chunk that is shorter

Wall time is from an idle device until the samples are there; host time until the call returns, when a device may still
be working. ``burst_host`` is the host time per call when steady calls follow each other without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from vgraph_lab.config import ConnectorConfig
from vgraph_lab.errors import InputError, RequestError
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.requests import ChunkRequest, ChunkResult
from vgraph_lab.runner import GPUGenerationModelRunner
from vgraph_lab.workload import ScheduledChunk, chunk_schedule

from .record import MeasurementRecord, describe_machine
from .runners import Progress, RunnerPair, runner_pair
from .timing import host_time_in_bursts_us, summarise_times, time_once

__all__ = ["PHASES", "bench_streaming"]

PHASES = ("first", "growing", "steady", "tail")
_LEAST_ROUNDS = 2
_BURST_CALLS = 8

Batch = list[ChunkRequest]
Times = dict[tuple[str, str], list[tuple[float, float]]]
"""(variant, phase) → wall and host milliseconds of each call."""


def bench_streaming(
    decoder: Code2WavDecoder,
    *,
    batch_sizes: Sequence[int] = (1, 4, 16),
    frames: int = 380,
    connector: ConnectorConfig | None = None,
    modes: Sequence[str] = ("icl", "xvec"),
    repeats: int = 20,
    seconds: float = 20.0,
    codes_on_host: bool = True,
    algorithm: str = "published",
    form: str | None = None,
    settings: dict[str, Any] | None = None,
    progress: Progress = lambda _: None,
) -> MeasurementRecord:
    """Measure every mode × batch size on the decoder's device.

    Args:
        decoder: what to measure; its device chooses the graph backend.
        batch_sizes: requests that are played together; graphs are captured for all of them.
        frames: new frames of each request.
        connector: how chunks are delivered; by default 1 frame first, then 25, and at most 72 of reference.
        modes: ``icl`` (with a reference of ``codec_left_context_frames``) and ``xvec`` (without).
        repeats: how often the requests are played, at most.
        seconds: once a case has been played this long, it is not played again (but it is twice).
        codes_on_host: hand codes over from the host, as a connector does; False has them on the device already.
        algorithm: ``published`` or ``incremental``, as the setting ``streaming_algorithm``.
        form: ``plain``, ``fast`` or ``compiled``: of the graphs' step with the incremental algorithm; None for the default. One that
            cannot run here is replaced by the plain one, which the record then names, and why.
        settings: what else describes the decoder (checkpoint or geometry), for the record.
        progress: told what is being measured.

    Raises:
        ConfigError: an algorithm or a form that does not exist.
        InputError: a mode that does not exist or comes twice, or a form with the published algorithm.
        RequestError: a runner refused a request.
    """
    unknown = [mode for mode in modes if mode not in ("icl", "xvec")]
    if unknown or not modes or len(set(modes)) < len(modes):
        raise InputError(f"modes are {list(modes)}; accepted are 'icl' and 'xvec', each once.")
    connector = connector or ConnectorConfig()
    rows: list[dict[str, Any]] = []
    with runner_pair(
        decoder, connector, batch_sizes=batch_sizes, max_num_seqs=max(batch_sizes), progress=progress, algorithm=algorithm, form=form
    ) as pair:
        for mode in modes:
            for batch_size in sorted(batch_sizes):
                progress(f"measuring {mode}, {batch_size} at a time")
                case = _Case(decoder, connector, mode, batch_size, frames, codes_on_host)
                rows.append(_measure(case, pair, repeats, seconds))
        capture, form_found = pair.capture_figures(), pair.form
    described = {
        **(settings or {}),
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "algorithm": algorithm,
        **form_found,
        "frames": frames,
        "connector": connector.model_dump(),
        "window_frames": decoder.geometry.sliding_window,
        "repeats": repeats,
        "codes_on_host": codes_on_host,
        "capture_batch_sizes": sorted(batch_sizes),
        "capture": capture,
        "request_state_bytes": pair.state_bytes,
    }
    return MeasurementRecord("streaming", described, rows, describe_machine(decoder.device))


class _Case:
    """B requests in step: their chunks, and the phase of each."""

    def __init__(
        self, decoder: Code2WavDecoder, connector: ConnectorConfig, mode: str, batch_size: int, frames: int, codes_on_host: bool
    ) -> None:
        self.mode, self.batch_size, self.device = mode, batch_size, decoder.device
        g, context = decoder.geometry, connector.codec_left_context_frames
        draw = torch.Generator().manual_seed(batch_size)

        def codes(length: int) -> Tensor:
            drawn = torch.randint(0, g.codebook_size, (g.num_quantizers, length), generator=draw)
            return drawn if codes_on_host else drawn.to(decoder.device)

        requests = [
            chunk_schedule(f"{row}", codes(frames), connector, reference=codes(context) if mode == "icl" else None)
            for row in range(batch_size)
        ]
        self.steps: list[tuple[ScheduledChunk, ...]] = list(zip(*requests, strict=True))
        self.phases = _phases([step[0].new_frames for step in self.steps], connector.codec_chunk_frames, g.sliding_window)
        self.full_chunk = [codes(connector.codec_chunk_frames) for _ in range(batch_size)]

    def batch(self, step: int, play: str) -> Batch:
        """The chunks of one step; a runner takes an id once, so every play has its own."""
        return [
            replace(chunk.request, request_id=f"{self.mode}-{self.batch_size}-{play}-{row}") for row, chunk in enumerate(self.steps[step])
        ]


def _phases(sizes: Sequence[int], chunk_frames: int, window: int) -> list[str]:
    phases, kept = [], 0
    for index, size in enumerate(sizes):
        if index == 0:
            phases.append("first")
        elif index == len(sizes) - 1 and size < chunk_frames:
            phases.append("tail")
        else:
            phases.append("steady" if kept >= window else "growing")
        kept += size
    return phases


def _measure(case: _Case, pair: RunnerPair, repeats: int, seconds: float) -> dict[str, Any]:
    graphs = pair.runners["graphs"]
    differences = _largest_differences(case, pair)  # warms both up, too
    before = graphs.stats()
    times: Times = {}
    rounds, begin = 0, perf_counter()
    while rounds < repeats and (rounds < _LEAST_ROUNDS or perf_counter() - begin < seconds):
        for step, phase in enumerate(case.phases):
            for variant, runner in pair.runners.items():
                batch = case.batch(step, f"round{rounds}")
                times.setdefault((variant, phase), []).append(time_once(_call(runner, batch), case.device))
        rounds += 1
    after = graphs.stats()
    row: dict[str, Any] = {"mode": case.mode, "batch_size": case.batch_size, "chunks": len(case.steps), "rounds": rounds}
    for (variant, phase), pairs in times.items():
        timing = summarise_times([wall for wall, _ in pairs], [host for _, host in pairs])
        row |= {f"{variant}_{phase}_{key}": value for key, value in asdict(timing).items() if key != "repeats"}
    for phase in PHASES:
        if ("eager", phase) in times:
            row[f"speedup_{phase}"] = row[f"eager_{phase}_wall_ms"] / row[f"graphs_{phase}_wall_ms"]
    if case.device.type == "cuda":  # on the CPU a call returns when its work is done, so there is no host time of its own
        row["graphs_steady_burst_host_us"] = _burst_us(case, graphs)
    row["graph_hits"], row["graph_fallbacks"] = after.hits() - before.hits(), after.fallbacks() - before.fallbacks()
    return row | {f"largest_difference_{phase}": value for phase, value in differences.items()}


def _call(runner: GPUGenerationModelRunner, batch: Batch) -> Callable[[], dict[str, ChunkResult]]:
    return lambda: runner.execute_model(batch)


def _largest_differences(case: _Case, pair: RunnerPair) -> dict[str, float]:
    """Play once through both runners and compare the samples; by phase, since only a tail is padded."""
    largest: dict[str, float] = {}
    for step, phase in enumerate(case.phases):
        batch = case.batch(step, "compared")
        eager, graphs = ([_samples(result) for result in runner.execute_model(batch).values()] for runner in pair.runners.values())
        differences = [float((a - b).abs().amax()) for a, b in zip(eager, graphs, strict=True)]
        largest[phase] = max(largest.get(phase, 0.0), *differences)
    return largest


def _samples(result: ChunkResult) -> Tensor:
    if isinstance(result, RequestError):
        raise result
    return result


def _burst_us(case: _Case, runner: GPUGenerationModelRunner) -> float | None:
    """Host time per steady call in bursts; None if the requests never get to a steady state."""
    if "steady" not in case.phases:
        return None
    for step in range(case.phases.index("steady")):
        batch = [replace(request, finished=False) for request in case.batch(step, "burst")]
        runner.execute_model(batch)
    ids = [request.request_id for request in batch]
    steady = [ChunkRequest(name, codes) for name, codes in zip(ids, case.full_chunk, strict=True)]
    try:
        return host_time_in_bursts_us(_call(runner, steady), case.device, calls=_BURST_CALLS)
    finally:
        runner.abort(ids)
