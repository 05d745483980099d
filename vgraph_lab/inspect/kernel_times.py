"""Where the time of a call goes: device time by kernel, from a profiler's trace, and by part of the model.

On CUDA the trace sees the kernels inside replayed graphs; times are the device's, without gaps. A kernel that was started while
the one before it still ran (programmatic dependent launch) counts from that one's end: until then it only waited. On the CPU the trace
sees aten operations, each without those inside it, so a replayed tape and eager code are told apart in the same way. A trace slows
the host down: compare shares and device times, and take wall times without it.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from .work_kinds import WORK_KINDS, kind_of_work

__all__ = ["KERNEL_TIME_COLUMNS", "REST", "added_times", "kernel_times", "part_times", "times_by_kind"]

KERNEL_TIME_COLUMNS = {
    "work": "kind of work, told by the name",
    "name": "kernel (CUDA) or aten operation (CPU)",
    "calls": "how often it ran in one call",
    "total_ms": "time of all of them in one call; on the CPU without the operations inside it",
    "time_share": "of the time of all kernels, 0 to 1",
}
"""The columns of :func:`kernel_times`, in order, with their meaning."""

REST = "rest"
"""What runs outside of all parts."""

_PREFIX = "vgraph_lab part: "


def kernel_times(run: Callable[[], Any], device: torch.device, *, repeats: int = 10) -> pd.DataFrame:
    """Profile ``repeats`` calls and give the time of one, by kernel, longest first.

    Where kernels run beside each other, on several streams too, the one that began first has the time; the others have their calls.

    Args:
        run: what to call; called once more before the trace.
        device: where the work runs.
        repeats: calls in the trace.

    Returns:
        The columns of :data:`KERNEL_TIME_COLUMNS`. Empty if the profiler saw no kernel, as on a GPU that does not let it.
    """
    is_cuda = device.type == "cuda"
    with _traced(run, device, repeats, [ProfilerActivity.CUDA] if is_cuda else [ProfilerActivity.CPU]) as trace:
        seen = _device_times(trace) if is_cuda else _operation_times(trace)
    rows = [(kind_of_work(name), name, len(times) / repeats, sum(times) / repeats / 1e3) for name, times in seen.items()]
    table = pd.DataFrame(rows, columns=list(KERNEL_TIME_COLUMNS)[:-1]).astype({"calls": "float64", "total_ms": "float64"})
    table["time_share"] = table["total_ms"] / (table["total_ms"].sum() or 1.0)
    return table.sort_values(["total_ms", "name"], ascending=[False, True], ignore_index=True)


def _device_times(trace: profile) -> dict[str, list[float]]:
    """Microseconds of each run of each kernel."""
    ran = [event for event in trace.events() if event.device_type.name == "CUDA"]
    found: dict[str, list[float]] = {}
    for event, us in zip(ran, added_times([(e.time_range.start, e.time_range.end) for e in ran]), strict=True):
        found.setdefault(event.name, []).append(us)
    return found


def _operation_times(trace: profile) -> dict[str, list[float]]:
    """The same of aten operations, each without those inside it."""
    found: dict[str, list[float]] = {}
    for event in trace.events():
        if event.device_type.name == "CPU" and "::" in event.name:
            found.setdefault(event.name, []).append(event.self_cpu_time_total)
    return {name: times for name, times in found.items() if sum(times) > 0}


def added_times(spans: Sequence[tuple[float, float]]) -> list[float]:
    """By how much each (start, end) makes the time longer in which anything ran, in order of their starts; in the order given."""
    added, busy_until = [0.0] * len(spans), -math.inf
    for place in sorted(range(len(spans)), key=spans.__getitem__):
        start, end = spans[place]
        added[place] = max(0.0, end - max(start, busy_until))
        busy_until = max(busy_until, end)
    return added


def times_by_kind(kernels: pd.DataFrame) -> dict[str, float]:
    """Milliseconds of one call by kind of work, in the order of :data:`~.work_kinds.WORK_KINDS`, without kinds that took none."""
    sums = kernels.groupby("work")["total_ms"].sum()
    return {kind: float(sums[kind]) for kind in WORK_KINDS if kind in sums.index}


def part_times(
    run: Callable[[], Any], device: torch.device, parts: Mapping[str, Sequence[nn.Module]], *, repeats: int = 5
) -> dict[str, float]:
    """Milliseconds of one eager call by part of the model: device time on CUDA, host time on the CPU.

    Args:
        run: an eager call; a replayed graph runs no module.
        device: where the work runs.
        parts: name → modules, none of which is inside another one.
        repeats: calls in the trace.

    Returns:
        Part → ms, in the order of ``parts``; and under :data:`REST` what ran outside of all of them. Empty if the profiler saw nothing.
    """
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with _marked(parts), _traced(run, device, repeats, activities) as trace:
        averages = trace.key_averages()
    found: Counter[str] = Counter()
    total = 0.0
    for event in averages:
        if event.device_type.name != "CPU":
            continue
        if event.key.startswith(_PREFIX):
            found[event.key.removeprefix(_PREFIX)] += event.device_time_total if is_cuda else event.cpu_time_total
        total += event.self_device_time_total if is_cuda else event.self_cpu_time_total
    if not total:
        return {}
    inside = {name: found[name] / repeats / 1e3 for name in parts}
    return {**inside, REST: max(0.0, total / repeats / 1e3 - sum(inside.values()))}


@contextmanager
def _traced(run: Callable[[], Any], device: torch.device, repeats: int, activities: list[ProfilerActivity]) -> Iterator[profile]:
    """A finished trace of ``repeats`` calls."""

    if device.type == "cpu":  # where torch is built for CUDA and there is no driver, the tracer would call that an error
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    wait()
    with profile(activities=activities, acc_events=True) as trace:
        for _ in range(repeats):
            run()
        wait()
    yield trace


@contextmanager
def _marked(parts: Mapping[str, Sequence[nn.Module]]) -> Iterator[None]:
    """Let every part leave its name in the trace."""
    open_ranges: list[Any] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            mark = record_function(_PREFIX + name)
            mark.__enter__()
            open_ranges.append(mark)

        return hook

    def leave(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        for name, modules in parts.items():
            for module in modules:
                stack.callback(module.register_forward_pre_hook(enter(name)).remove)
                stack.callback(module.register_forward_hook(leave).remove)
        yield
