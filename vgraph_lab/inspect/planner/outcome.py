"""Prediction against outcome: what captured graphs take, and what they make of the traffic that they were chosen for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import pandas as pd

from vgraph_lab.errors import LifecycleError
from vgraph_lab.graphs.descriptor import Descriptor
from vgraph_lab.graphs.manager import VocoderCUDAGraphManager
from vgraph_lab.graphs.stats import CallKind, StatsSnapshot
from vgraph_lab.graphs.table import MIB
from vgraph_lab.graphs.target import Target
from vgraph_lab.inspect.coverage import coverage_table

from .export import replay_traffic
from .forecast import Forecast

__all__ = ["OUTCOME_COLUMNS", "compare_outcome", "resolve_traffic"]


OUTCOME_COLUMNS = {
    "figure": "what is compared",
    "unit": "its unit",
    "predicted": "before the capture; missing where it was not known",
    "outcome": "after it: counted, measured, or resolved by the real Routines with the graphs that exist",
    "difference": "outcome minus predicted",
    "source": "of the prediction: rule (exact), measured, modelled or unknown",
}
"""The columns of :func:`compare_outcome`, in order, with their meaning."""


def resolve_traffic(traffic: pd.DataFrame, manager: VocoderCUDAGraphManager) -> StatsSnapshot:
    """What would become of the traffic with the graphs that a Manager has now: each call resolved by its real Routine.

    Unlike :func:`~.export.replay_traffic` it counts graphs that exist, not Descriptors that were asked for: a call of one that
    failed or did not fit falls back with that reason, unless another graph fits.

    Raises:
        ConfigError: a Target that is called is not among the Manager's.
        InputError: the traffic is malformed or holds no calls.
    """
    targets, rejections = list(manager.targets.values()), manager.rejections()
    existing = {(entry.target_id, entry.descriptor) for entry in manager.entries()}
    present = [Target(t.target_id, t.routine, [d for d in t.descriptors if (t.target_id, d) in existing]) for t in targets]
    found = _with_lazy_graphs(replay_traffic(traffic, present, manager.settings), existing)
    if not rejections:
        return found
    asked = replay_traffic(traffic, targets, manager.settings)
    meant = {(kind.target_id, kind.key): kind.descriptor for kind in asked.counts if kind.descriptor is not None}
    counts: Counter[CallKind] = Counter()
    for kind, calls in found.counts.items():
        wanted = meant.get((kind.target_id, kind.key)) if kind.reason else None
        rejection = rejections.get((kind.target_id, wanted)) if wanted else None
        counts[kind._replace(reason=rejection.reason) if rejection else kind] += calls
    return StatsSnapshot(counts)


def _with_lazy_graphs(found: StatsSnapshot, existing: Collection[tuple[str, Descriptor]]) -> StatsSnapshot:
    """Routines name declared Descriptors only; a graph that was captured lazily has the runtime key of its call."""
    counts: Counter[CallKind] = Counter()
    for kind, calls in found.counts.items():
        has_own = kind.reason is not None and (kind.target_id, kind.key) in existing
        counts[CallKind(kind.target_id, kind.key, descriptor=kind.key) if has_own else kind] += calls
    return StatsSnapshot(counts)


def compare_outcome(forecast: Forecast, traffic: pd.DataFrame, manager: VocoderCUDAGraphManager) -> pd.DataFrame:
    """What was predicted beside what a capture brought.

    Args:
        forecast: of the sizes that were captured.
        traffic: what it was made for.
        manager: after its capture.

    Returns:
        The columns of :data:`OUTCOME_COLUMNS`, one row per figure.

    Raises:
        LifecycleError: the Manager has no capture, or was cleared.
    """
    report = manager.report
    if report is None or not manager.is_ready:
        raise LifecycleError(f"there is no outcome to compare with: the Manager is {manager.state.value}. Capture first.")
    shares = _shares(coverage_table(resolve_traffic(traffic, manager)))
    figures, memory = forecast.figures, forecast.memory_source
    capture_s = sum(outcome.cost.total_s for outcome in report.outcomes if outcome.cost)
    charge = figures["charge_bytes"]
    rows = [
        ("graphs", "", figures["graphs"], report.captured, "rule"),
        ("calls in graphs", "%", _percent(figures["coverage"]), _percent(shares["calls"]), "rule"),
        ("audio in graphs", "%", _percent(figures["audio_coverage"]), _percent(shares["audio"]), "rule"),
        ("padding", "% of computed frames", _percent(figures["wasted_share"]), _percent(shares["wasted"]), "rule"),
        ("memory", "MiB", None if charge is None else charge / MIB, report.bytes / MIB, memory),
        ("captures", "s", figures["capture_s"], capture_s, memory),
    ]
    table = pd.DataFrame(rows, columns=["figure", "unit", "predicted", "outcome", "source"])
    table = table.astype({"predicted": "float64", "outcome": "float64"})
    return table.assign(difference=table["outcome"] - table["predicted"])[list(OUTCOME_COLUMNS)]


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _shares(coverage: pd.DataFrame) -> dict[str, float | None]:
    """Of the calls and of their new frames, the share in graphs; of the frames that graphs compute, the share for nothing."""
    frames = coverage["calls"] * coverage["batch_size"] * (coverage["frames"] - coverage["source_frames"].fillna(0).astype("int64"))
    is_hit = coverage["outcome"].isin(["exact hit", "padded hit"])
    hits = coverage[is_hit]
    requested, padding = (hits["calls"] * hits["batch_size"] * hits["frames"]).sum(), hits["padding_frames"].sum()
    return {
        "calls": hits["calls"].sum() / coverage["calls"].sum(),
        "audio": frames[is_hit].sum() / frames.sum(),
        "wasted": padding / (requested + padding) if len(hits) else None,
    }
