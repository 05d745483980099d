"""Timing several variants of the same work in one run, interleaved, so that a drifting clock meets all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter_ns
from typing import Any

import torch

__all__ = ["Timing", "host_time_in_bursts_us", "summarise_times", "time_interleaved", "time_once"]

_LEAST_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one variant, in milliseconds.

    Attributes:
        wall_ms: median from start to finish (CUDA events on a GPU).
        wall_p10_ms: 10th percentile.
        wall_p90_ms: 90th percentile.
        host_ms: median until the call returns to Python; on a GPU the work may still be running then.
        host_p10_ms: 10th percentile.
        host_p90_ms: 90th percentile.
        repeats: number of runs.
    """

    wall_ms: float
    wall_p10_ms: float
    wall_p90_ms: float
    host_ms: float
    host_p10_ms: float
    host_p90_ms: float
    repeats: int


def time_interleaved(
    variants: Mapping[str, Callable[[], Any]], device: torch.device, *, repeats: int = 50, warmups: int = 3, seconds: float = 2.0
) -> dict[str, Timing]:
    """Run all variants ``repeats`` times in turn, each from an idle device.

    Args:
        variants: name → what to run; results are dropped at once.
        device: where the work runs.
        repeats: timed runs of each variant, at most.
        warmups: runs of each before them.
        seconds: once all variants together have run this long, no further round is begun (but ten are always run).
    """
    for _ in range(warmups):
        for run in variants.values():
            run()
    walls: dict[str, list[float]] = {name: [] for name in variants}
    hosts: dict[str, list[float]] = {name: [] for name in variants}
    start = perf_counter_ns()
    for done in range(repeats):
        if done >= _LEAST_ROUNDS and perf_counter_ns() - start > seconds * 1e9:
            break
        for name, run in variants.items():
            wall, host = time_once(run, device)
            walls[name].append(wall)
            hosts[name].append(host)
    return {name: summarise_times(walls[name], hosts[name]) for name in variants}


def host_time_in_bursts_us(
    run: Callable[[], Any], device: torch.device, *, calls: int = 16, bursts: int = 25, seconds: float = 1.0
) -> float:
    """Median host time per call, in µs, when calls follow each other and the device need not be waited for.

    Args:
        run: what to call; each call only queues work on a GPU.
        device: where the work runs; waited for before each burst.
        calls: calls per burst, few enough for the launch queue.
        bursts: how many bursts, at most.
        seconds: once they have run this long together, no further one is begun (but one is always run).
    """
    per_call: list[float] = []
    begin = perf_counter_ns()
    while not per_call or (len(per_call) < bursts and perf_counter_ns() - begin < seconds * 1e9):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = perf_counter_ns()
        for _ in range(calls):
            run()
        per_call.append((perf_counter_ns() - start) / calls / 1e3)
    return median(per_call)


def time_once(run: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Wall and host milliseconds of one run from an idle device; on a CPU the two are the same."""
    if device.type != "cuda":
        start = perf_counter_ns()
        run()
        elapsed = (perf_counter_ns() - start) / 1e6
        return elapsed, elapsed
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.current_stream(device)  # events go to the current device's stream by default, whatever ran elsewhere
    torch.cuda.synchronize(device)
    begin.record(stream)
    start = perf_counter_ns()
    run()
    host = (perf_counter_ns() - start) / 1e6
    end.record(stream)
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)), host


def summarise_times(walls: Sequence[float], hosts: Sequence[float]) -> Timing:
    """Medians and tails of runs, in the unit in which they come."""

    def tails(values: Sequence[float]) -> tuple[float, float]:
        deciles = quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
        return deciles[0], deciles[-1]

    return Timing(median(walls), *tails(walls), median(hosts), *tails(hosts), len(walls))
