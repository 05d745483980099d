"""What graphs cost and save: measured where something was measured, from an explicit model elsewhere.

The model is affine in rows × frames, for each Target and each figure on its own::

    figure = fixed + per_frame · (rows · frames)        least squares over the measured shapes, never below 0

Launches and copies are the fixed part, arithmetic and memory the other one. It has no caches, no tiles and no occupancy: near a
measured shape it is a fair guess, far away it is not. Rows that it filled in say ``modelled``.

Graphs of one pool share memory. ``charge_bytes`` is what a graph takes when it is alone in a pool; ``shared_bytes`` of these are
intermediates, of which a pool with several graphs holds the largest only. Static buffers and outputs add up::

    bytes of a set of graphs = Σ (charge − shared) + max shared

Allocators round, and fragment: what a capture measures may be some segments (2 MiB on CUDA) off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch

from vgraph_lab.config import VocoderGraphSettings
from vgraph_lab.errors import CaptureError, InputError
from vgraph_lab.graphs.backends.base import GraphBackend
from vgraph_lab.graphs.descriptor import Descriptor
from vgraph_lab.graphs.entry import GraphEntry, Rejection
from vgraph_lab.graphs.store import GraphStore
from vgraph_lab.graphs.table import MIB
from vgraph_lab.graphs.target import Target

from .shapes import SUFFIX_TARGET_ID, Shape, shape_of, suffix_state

__all__ = ["COST_COLUMNS", "CostBook", "complete_costs", "cost_table", "costs_of_entries", "measure_costs"]

COST_COLUMNS = {
    "target": "id of the Target",
    "state": "as in the traffic table",
    "batch_size": "rows",
    "frames": "frames per row as Descriptors count them",
    "charge_bytes": "static buffers and pool memory of the graph alone in a pool",
    "shared_bytes": "of these, intermediates: a pool holds the largest of its graphs', not the sum. 0 where it is not known to be shared",
    "capture_s": "seconds of its capture: warm-up, capture, garbage collection",
    "replay_ms": "one replay, without copying inputs in and outputs out",
    "eager_ms": "the same work without a graph",
    "source": "measured, or modelled if any figure of the row is",
}
"""The columns of a cost table, in order, with their meaning. Each shape stands in one row."""

_KEYS = ["target", "state", "batch_size", "frames"]
_FIGURES = ["charge_bytes", "shared_bytes", "capture_s", "replay_ms", "eager_ms"]


def cost_table(data: pd.DataFrame | Mapping[str, Sequence[Any]]) -> pd.DataFrame:
    """A cost table from columns, checked. Figures that are not known are missing; ``shared_bytes`` may be left out (then 0).

    Raises:
        InputError: a column is missing, a figure is negative, a shape stands twice.
    """
    table = pd.DataFrame(data)
    missing = [name for name in COST_COLUMNS if name not in table and name not in ("state", "shared_bytes", "source")]
    if missing:
        raise InputError(f"the cost table lacks {', '.join(missing)}. Columns: {', '.join(COST_COLUMNS)}.")
    for name, value in (("state", ""), ("shared_bytes", 0), ("source", "measured")):
        if name not in table:
            table[name] = value
    table = table[list(COST_COLUMNS)].astype({"target": "str", "state": "str", "source": "str"})
    try:
        table = table.astype({"batch_size": "int64", "frames": "int64", **dict.fromkeys(_FIGURES, "float64")})
    except (TypeError, ValueError) as error:
        raise InputError(f"the cost table holds something else than numbers: {error}") from error
    for name in _FIGURES:
        bad = table[(table[name] < 0) | np.isinf(table[name])]
        if len(bad):
            raise InputError(f"{name} of {Shape(*bad.iloc[0][_KEYS])} is {bad.iloc[0][name]}; expected 0 or more.")
    if (table["shared_bytes"] > table["charge_bytes"]).any():
        row = table[table["shared_bytes"] > table["charge_bytes"]].iloc[0]
        raise InputError(f"shared_bytes of {Shape(*row[_KEYS])} is more than its charge_bytes, of which it is a part.")
    repeated = table[table.duplicated(_KEYS)]
    if len(repeated):
        raise InputError(f"the cost table names {Shape(*repeated.iloc[0][_KEYS])} twice. Keep one row of each shape.")
    return table.sort_values(_KEYS, ignore_index=True)


def costs_of_entries(entries: pd.DataFrame) -> pd.DataFrame:
    """Costs from an entries table (see :func:`~vgraph_lab.inspect.entries.entries_table`), of a live Manager or a recording.

    An entries table has no times of calls, so ``replay_ms`` and ``eager_ms`` are missing. In a pool that others filled before, a
    graph's own intermediates show only if the pool had to grow; elsewhere they (and the charge) are missing, too.

    Raises:
        InputError: the table holds no captured graph.
    """
    captured = entries[entries["status"] == "captured"].sort_values("order")
    if captured.empty:
        raise InputError("the entries table holds no captured graph, so it tells no costs. Capture first.")
    outputs = captured["output_mib"].cumsum() * MIB
    shared = (captured["pool_after_mib"] * MIB - outputs).clip(lower=0)
    shared = shared.where(captured["pool_delta_mib"] > captured["output_mib"])
    own = (captured["static_buffer_mib"] + captured["output_mib"]) * MIB
    suffix = captured["target"] == SUFFIX_TARGET_ID
    kept = captured["descriptor"].str.extract(r" (\d+)→")[0]
    states = [suffix_state(m, int(k)) if s else m for m, k, s in zip(captured["state"], kept, suffix, strict=True)]
    return cost_table(
        {
            **{name: captured[name].to_list() for name in ("target", "batch_size", "frames")},
            "state": states,
            "charge_bytes": (own + shared).round().to_list(),
            "shared_bytes": shared.round().to_list(),
            "capture_s": (captured["warmup_s"] + captured["capture_s"] + captured["gc_s"]).to_list(),
            "replay_ms": [np.nan] * len(captured),
            "eager_ms": [np.nan] * len(captured),
        }
    )


def measure_costs(
    backend: GraphBackend,
    targets: Iterable[Target[Any]],
    descriptors: Mapping[str, Sequence[Descriptor]] | None = None,
    *,
    repeats: int = 10,
    progress: Callable[[str], None] | None = None,
) -> pd.DataFrame:
    """Capture every shape alone in a throwaway pool, and time its replay against the same work without a graph, in turn.

    Both times are medians, on the graph's static buffers, from an idle device until it is idle again. Nothing is bound, and all
    is released again.

    Args:
        backend: where to capture.
        targets: whose shapes; ``model.get_vocoder_cudagraph_targets()``.
        descriptors: Target id → what to measure, by default all that the Target declares. A few of each Target, small and large,
            are enough for :func:`complete_costs`.
        repeats: timed runs of each.
        progress: told each shape before its turn.

    Returns:
        The columns of :data:`COST_COLUMNS`, nothing missing, all ``measured``.

    Raises:
        CaptureError: a shape cannot be captured.
        InputError: there is nothing to measure.
    """
    rows: list[dict[str, Any]] = []
    for target in targets:
        for descriptor in target.descriptors if descriptors is None else descriptors.get(target.target_id, ()):
            if progress:
                progress(f"measuring {target.target_id} {descriptor}")
            rows.append(_measured(backend, target, descriptor, repeats))
    if not rows:
        raise InputError("there is no shape to measure. Name Descriptors of Targets that the model has.")
    return cost_table(pd.DataFrame(rows))


def _measured(backend: GraphBackend, target: Target[Any], descriptor: Descriptor, repeats: int) -> dict[str, Any]:
    store = GraphStore(backend, VocoderGraphSettings())
    store.add_target(target.target_id)
    try:
        entry = store.try_capture(target, descriptor, lazy=False)
        if isinstance(entry, Rejection):
            raise CaptureError(f"{target.target_id} {descriptor} has no cost, since it cannot be captured: {entry.detail}")
        with store.pool.exclusive(), torch.no_grad():
            replay_ms, eager_ms = _times(backend, target, entry, repeats)
        cost = entry.cost
        del entry
    finally:
        errors = store.retire()
    if errors:
        raise errors[0]
    return {
        **shape_of(target.target_id, descriptor)._asdict(),
        "charge_bytes": cost.charge_bytes,
        "shared_bytes": max(0, cost.pool_delta_bytes - cost.output_bytes),
        "capture_s": cost.total_s,
        "replay_ms": replay_ms,
        "eager_ms": eager_ms,
        "source": "measured",
    }


def _times(backend: GraphBackend, target: Target[Any], entry: GraphEntry, repeats: int) -> tuple[float, float]:
    """Median ms of a replay and of the eager work, measured in turn, so that a drifting clock meets both alike."""
    runs: tuple[Callable[[], object], ...] = (
        entry.graph.replay,
        lambda: target.routine.forward_for_capture(entry.descriptor, entry.buffers),
    )
    times: tuple[list[float], ...] = ([], [])
    for number in range(repeats + 1):
        for run, found in zip(runs, times, strict=True):
            backend.synchronize()
            begin = perf_counter()
            run()
            backend.synchronize()
            if number:  # the first round warms up
                found.append((perf_counter() - begin) * 1e3)
    return median(times[0]), median(times[1])


def complete_costs(costs: pd.DataFrame, shapes: Iterable[Shape]) -> pd.DataFrame:
    """Costs of all these shapes: what the table has, and what the affine model of its Target says (see the module).

    Args:
        costs: see :func:`cost_table`.
        shapes: what must have a row; others stay.

    Raises:
        InputError: a figure is missing and fewer than two shapes of different size of its Target have it.
    """
    known = cost_table(costs)
    have = set(known[_KEYS].itertuples(index=False, name=None))
    added = pd.DataFrame([s for s in dict.fromkeys(shapes) if tuple(s) not in have], columns=_KEYS)
    if len(added):
        known = pd.concat([known, added.assign(**dict.fromkeys(_FIGURES, np.nan), source="modelled")], ignore_index=True)
    parts = {"own": known["charge_bytes"] - known["shared_bytes"], **{name: known[name] for name in _FIGURES[1:]}}
    work = (known["batch_size"] * known["frames"]).to_numpy(dtype="float64")
    filled = pd.DataFrame({name: values.to_numpy(dtype="float64") for name, values in parts.items()})
    for target_id in known["target"].unique():
        own_rows = (known["target"] == target_id).to_numpy()
        for name in filled:
            values = filled[name].to_numpy(copy=True)
            unknown = own_rows & np.isnan(values)
            if unknown.any():
                values[unknown] = _affine(str(target_id), str(name), work, values, own_rows & ~unknown, work[unknown])
                filled[name] = values
                known.loc[unknown, "source"] = "modelled"
    known["charge_bytes"] = (filled["own"] + filled["shared_bytes"]).round()
    for name in _FIGURES[1:]:
        known[name] = filled[name].round() if name == "shared_bytes" else filled[name]
    return cost_table(known)


def _affine(target_id: str, figure: str, work: Any, values: Any, known: Any, wanted: Any) -> Any:
    sizes = len(np.unique(work[known]))
    if sizes < 2:
        name = "charge_bytes" if figure == "own" else figure
        raise InputError(
            f"{name} of {target_id} is known for too few sizes, {sizes}; a model of the others needs two. Measure a small and a large "
            "shape of it with measure_costs, or give a cost table that has them."
        )
    design = np.stack([np.ones(int(known.sum())), work[known]], axis=1)
    fixed, per_frame = np.linalg.lstsq(design, values[known], rcond=None)[0]
    return np.maximum(0.0, fixed + per_frame * wanted)


class CostBook:
    """Costs by shape in whole numbers: bytes, microseconds of capture, nanoseconds of calls.

    Args:
        costs: a complete cost table; see :func:`complete_costs`.
    """

    def __init__(self, costs: pd.DataFrame) -> None:
        table = cost_table(costs)
        figures = {
            "own": table["charge_bytes"] - table["shared_bytes"],
            "shared": table["shared_bytes"],
            "capture_us": table["capture_s"] * 1e6,
            "replay_ns": table["replay_ms"] * 1e6,
            "eager_ns": table["eager_ms"] * 1e6,
        }
        self._places = {Shape(*key): place for place, key in enumerate(table[_KEYS].itertuples(index=False, name=None))}
        self._figures = {name: values.to_numpy(dtype="float64") for name, values in figures.items()}

    def covers(self, shapes: Iterable[Shape]) -> bool:
        """Whether each of these shapes has a row."""
        return all(shape in self._places for shape in shapes)

    def figure(self, name: str, shapes: Sequence[Shape]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """One figure of each shape: int64 [shapes].

        Raises:
            InputError: a shape has no row, or not this figure.
        """
        places = np.array([self._place(shape) for shape in shapes], dtype=np.int64)
        found = self._figures[name][places]
        if np.isnan(found).any():
            raise InputError(f"{name} of {shapes[int(np.isnan(found).argmax())]} is missing. Fill it in with complete_costs.")
        return np.asarray(np.rint(found), dtype=np.int64)

    def _place(self, shape: Shape) -> int:
        place = self._places.get(shape)
        if place is None:
            raise InputError(f"the cost table has no row for {shape}. Fill it in with complete_costs.")
        return place
