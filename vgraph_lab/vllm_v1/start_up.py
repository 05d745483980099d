"""Start-up: all that a runner captures, in order, and what that takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from vgraph_lab.graphs import CaptureOutcome, CaptureProgress, CaptureReport, MemoryProfile
from vgraph_lab.graphs.profile import ProfileLine
from vgraph_lab.graphs.structure import nbytes

from .descriptor import BatchDescriptor
from .model_wrappers import PIECEWISE_TARGET, UBATCH_TARGET
from .modes import CUDAGraphMode
from .monitor import cudagraph_capturing
from .runner_config import RunnerConfig
from .wrapper_graphs import WrapperGraphs

__all__ = ["DummyRun", "capture_all", "capture_report", "memory_profile", "spread"]


class DummyRun(Protocol):
    """One pass of requests with so many tokens each, which leave nothing behind."""

    def __call__(self, lens: Sequence[int], mode: CUDAGraphMode, padded: BatchDescriptor, *, should_ubatch: bool) -> None: ...


def capture_all(
    graphs: WrapperGraphs, config: RunnerConfig, run: DummyRun, progress: Callable[[CaptureProgress], None] | None = None
) -> None:
    """Capture what ``graphs.plan`` says.

    Args:
        graphs: of the runner; its wrappers capture.
        config: of the runner.
        run: a pass, in which they do.
        progress: called before each graph and once at the end.
    """
    with cudagraph_capturing():
        for done, (target_id, batch) in enumerate(graphs.plan):
            if progress is not None:
                progress(CaptureProgress(done, len(graphs.plan), target_id, batch))
            mode = CUDAGraphMode.PIECEWISE if target_id == PIECEWISE_TARGET else CUDAGraphMode.FULL
            reqs = batch.num_reqs or min(batch.num_tokens, config.max_num_seqs)
            lens = [config.uniform_decode_query_len] * reqs if batch.uniform else spread(batch.num_tokens, reqs)
            run(lens, mode, batch, should_ubatch=target_id == UBATCH_TARGET)
    if progress is not None:
        progress(CaptureProgress(len(graphs.plan), len(graphs.plan), None, None))


def capture_report(
    graphs: WrapperGraphs, config: RunnerConfig, model_name: str, seconds: float, profile: MemoryProfile | None
) -> CaptureReport:
    """What was captured."""
    entries = graphs.entries()
    return CaptureReport(
        device=str(graphs.backend.device),
        outcomes=[CaptureOutcome(entry.target_id, entry.descriptor, entry.cost) for entry in entries],
        eager_targets={} if config.mode else {model_name: "graphs are off (cudagraph_mode NONE, or enforce_eager)"},
        seconds=seconds,
        static_buffer_bytes=nbytes([dict(entry.buffers) for entry in entries]),
        pool_reserved_bytes=graphs.pool.reserved_bytes,
        free_bytes=graphs.backend.memory().free_bytes,
        profile=profile,
    )


def memory_profile(graphs: WrapperGraphs, seconds: float) -> MemoryProfile:
    """What the graphs of now have taken."""
    lines = [
        ProfileLine(entry.target_id, entry.descriptor, entry.cost.static_buffer_bytes, entry.cost.pool_delta_bytes)
        for entry in graphs.entries()
    ]
    return MemoryProfile(str(graphs.backend.device), tuple(lines), None, seconds)


def spread(tokens: int, reqs: int) -> list[int]:
    """Tokens over at most so many requests, as evenly as can be."""
    each, rest = divmod(tokens, reqs)
    return [each + (number < rest) for number in range(reqs) if each + (number < rest)]
