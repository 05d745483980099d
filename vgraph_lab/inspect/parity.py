"""Graph against eager: the same inputs through a Target's Handle and through its eager contract, one by one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from vgraph_lab.errors import InputError, LifecycleError
from vgraph_lab.graphs.backends.base import GraphBackend
from vgraph_lab.graphs.manager import VocoderCUDAGraphManager
from vgraph_lab.graphs.stats import CallKind, StatsSnapshot
from vgraph_lab.graphs.target import Target

from .audio import EXACT, Tolerance, Verdict, WaveformDifference, dbfs, tolerance_for, verdict, waveform_difference
from .coverage import outcome_of
from .stream_calls import calls_between

__all__ = ["PARITY_COLUMNS", "Comparison", "compare_with_eager", "median_speedup", "parity_table"]

PARITY_COLUMNS = {
    "name": "name of the input",
    "requested": "exact shape of the call",
    "captured": "Descriptor of the graph that served it; empty if it ran eager",
    "outcome": "exact hit, padded hit, fallback or error",
    "reason": "why it fell back",
    "samples": "samples per row",
    "max_dbfs": "largest absolute difference from eager, dB relative to full scale; −inf for identical",
    "allowed_dbfs": "largest difference accepted; −inf where equality bit for bit is expected",
    "rms_dbfs": "RMS of the difference, likewise",
    "snr_db": "energy of eager over energy of the difference",
    "eager_s": "seconds of the eager call, after a first one that is not timed",
    "graph_s": "seconds of the Handle's call",
    "agreement": "bit for bit, within tolerance, or DIFFERS",
    "is_equal": "whether the difference is as small as it must be",
    "verdict": "the same in words",
}
"""The columns of :func:`parity_table`, in order, with their meaning."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One input, heard twice. Waveforms are copies on the host.

    Attributes:
        name: name of the input.
        call: what the Manager counted for the Handle's call.
        eager: waveform of the eager call, float32 [..., samples].
        graph: waveform of the Handle's call, likewise.
        difference: of the outputs as they were, before the conversion to float32.
        tolerance: what is accepted: none for exact hits and fallbacks, rounding for padded hits.
        verdict: whether the difference is within it.
        eager_s: seconds of the eager call.
        graph_s: seconds of the Handle's call.
    """

    name: str
    call: CallKind
    eager: np.ndarray[Any, np.dtype[np.float32]]
    graph: np.ndarray[Any, np.dtype[np.float32]]
    difference: WaveformDifference
    tolerance: Tolerance
    verdict: Verdict
    eager_s: float
    graph_s: float

    @property
    def outcome(self) -> str:
        """One of :data:`vgraph_lab.inspect.coverage.OUTCOMES`."""
        return outcome_of(self.call)

    @property
    def agreement(self) -> str:
        """How graph and eager agree: ``bit for bit``, ``within tolerance`` or ``DIFFERS``."""
        if not self.verdict.passed:
            return "DIFFERS"
        return "bit for bit" if self.difference.is_identical else "within tolerance"

    @property
    def route(self) -> str:
        """How the call was served, in words: ``padded hit: B1×T59 in B1×T69``."""
        captured, key = self.call.descriptor, self.call.key
        if captured is None:
            return f"fallback: {key} ran eager ({self.call.reason})"
        return f"{self.outcome}: {key}" + ("" if captured == key else f" in {captured}")


def compare_with_eager(
    manager: VocoderCUDAGraphManager, target: Target[Tensor], inputs: Mapping[str, Tensor], *, tolerance: Tolerance | None = None
) -> list[Comparison]:
    """Call a bound Target and its eager contract with every input.

    Each input is run eagerly once without a clock, so that kernels are chosen and loaded, then through the Handle, then
    eagerly again. The Manager counts the Handle's calls only.

    Args:
        manager: the Manager that serves the Target.
        target: a Target whose output is a waveform [..., samples].
        inputs: name → the Target's input.
        tolerance: for padded hits; by default :func:`~vgraph_lab.inspect.audio.tolerance_for` the output's dtype and device.

    Raises:
        LifecycleError: the Manager does not serve the Target, or someone else called it meanwhile.
        InputError: an input that the Target refuses, or an output that is not one tensor.
    """
    if not manager.is_ready or manager.targets.get(target.target_id) is not target:
        raise LifecycleError(f"{target.target_id} is not served by this Manager ({manager.state.value}). Call capture() first.")
    return [_compare(manager, target, name, value, tolerance) for name, value in inputs.items()]


def _compare(manager: VocoderCUDAGraphManager, target: Target[Tensor], name: str, value: Tensor, tolerance: Tolerance | None) -> Comparison:
    eager_call, backend = target.routine.eager_call, manager.backend
    eager_call(value)
    before = manager.stats()
    graph, graph_s = _timed(backend, target, value)
    call = _only_call(before, manager.stats(), target.target_id)
    eager, eager_s = _timed(backend, eager_call, value)
    difference = waveform_difference(eager, graph)
    is_padded = outcome_of(call) == "padded hit"
    allowed = (tolerance or tolerance_for(eager.dtype, eager.device)) if is_padded else EXACT
    return Comparison(name, call, _on_host(eager), _on_host(graph), difference, allowed, verdict(difference, allowed), eager_s, graph_s)


def _timed(backend: GraphBackend, function: Any, value: Tensor) -> tuple[Tensor, float]:
    backend.synchronize()
    start = perf_counter()
    output = function(value)
    backend.synchronize()
    seconds = perf_counter() - start
    if not isinstance(output, Tensor):
        raise InputError(f"only a Target that returns one waveform tensor can be compared, this one returned {type(output).__name__}.")
    return output, seconds


def _only_call(before: StatsSnapshot, after: StatsSnapshot, target_id: str) -> CallKind:
    found = [kind for kind in calls_between(before, after).elements() if kind.target_id == target_id]
    if len(found) != 1:
        raise LifecycleError(f"{len(found)} calls of {target_id} were counted instead of one. Compare while nobody else calls it.")
    return found[0]


def _on_host(waveform: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    return waveform.detach().float().cpu().numpy().copy()


def parity_table(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """One row per comparison, with the columns of :data:`PARITY_COLUMNS`."""
    rows = [
        {
            "name": c.name,
            "requested": str(c.call.key),
            "captured": str(c.call.descriptor or ""),
            "outcome": c.outcome,
            "reason": str(c.call.reason or ""),
            "samples": c.difference.candidate_samples,
            "max_dbfs": c.difference.max_dbfs,
            "allowed_dbfs": dbfs(c.tolerance.max_abs),
            "rms_dbfs": c.difference.rms_dbfs,
            "snr_db": c.difference.snr_db,
            "eager_s": c.eager_s,
            "graph_s": c.graph_s,
            "agreement": c.agreement,
            "is_equal": c.verdict.passed,
            "verdict": c.verdict.text,
        }
        for c in comparisons
    ]
    return pd.DataFrame(rows, columns=list(PARITY_COLUMNS))


def median_speedup(comparisons: Sequence[Comparison]) -> float | None:
    """Median over all hits of eager seconds / graph seconds; None without hits."""
    ratios = [c.eager_s / c.graph_s for c in comparisons if c.call.reason is None]
    return statistics.median(ratios) if ratios else None
