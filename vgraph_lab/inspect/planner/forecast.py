"""What given capture sizes are worth for given traffic, at once: nothing is searched, and nothing captured.

::

    forecaster = Forecaster(traffic_from(runner), costs)
    forecast = forecaster.of(space.choice(batch_sizes=(1, 4)))
    forecast.figures["coverage"], forecast.memory_source, forecast.coverage

Which graph serves which call is the Routines' rule and exact. Bytes and seconds come from a cost table; shapes that it lacks are
modelled (see :mod:`.costs`), and figures that it cannot tell are not known, never zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import pandas as pd

from vgraph_lab.errors import FallbackReason, InputError
from vgraph_lab.graphs.descriptor import Descriptor
from vgraph_lab.graphs.stats import CallKind, StatsSnapshot
from vgraph_lab.inspect.coverage import coverage_table
from vgraph_lab.inspect.recording import Source, stats_of
from vgraph_lab.qwen3_tts.stream_routines import SuffixDescriptor
from vgraph_lab.qwen3_tts.transitions import TransitionTable

from .costs import COST_COLUMNS, CostBook, complete_costs, cost_table
from .demand import Demand
from .free_form import FreeForm
from .plan import point_of
from .shapes import SUFFIX_TARGET_ID, Shape, descriptor_of, kept_frames
from .spaces import Choice
from .traffic import check_traffic, traffic_of, traffic_of_calls, traffic_table

__all__ = ["FigureSource", "Forecast", "Forecaster", "Traffic", "traffic_from"]

Traffic: TypeAlias = Source | StatsSnapshot | pd.DataFrame
"""A runner, a Manager, a recording, statistics, a coverage table, or a traffic table."""

FigureSource = Literal["measured", "modelled", "unknown"]
"""Where a predicted figure comes from."""

_SHAPE = ["target", "state", "batch_size", "frames"]
_MEMORY, _TIMES = ("charge_bytes", "shared_bytes", "capture_s"), ("replay_ms", "eager_ms")


@dataclass(frozen=True)
class Forecast:
    """What one choice of sizes is predicted to do.

    Attributes:
        choice: the sizes, and the graphs that they capture.
        figures: as in :data:`~.plan.FRONT_COLUMNS`. Those that are not known are None.
        coverage: the calls as :func:`~vgraph_lab.inspect.coverage.coverage_table` would count them.
        memory_source: where bytes and capture seconds come from.
        times_source: where the time saved comes from.
        why_unknown: what to do about figures that are not known; empty if all are.
    """

    choice: Choice
    figures: Mapping[str, Any]
    coverage: pd.DataFrame
    memory_source: FigureSource
    times_source: FigureSource
    why_unknown: str = ""

    @property
    def graphs(self) -> pd.DataFrame:
        """The graphs: one row each, with the columns ``target``, ``state``, ``batch_size`` and ``frames``."""
        return pd.DataFrame(self.choice.graphs, columns=_SHAPE)

    @property
    def split_calls(self) -> int:
        """Calls of more rows than any graph has. Here they count as not in graphs; a runner splits them into calls that fit."""
        most = max((graph.batch_size for graph in self.choice.graphs), default=0)
        return int(self.coverage.loc[self.coverage["batch_size"] > most, "calls"].sum()) if most else 0


class Forecaster:
    """Traffic and costs, ready to tell what any sizes are worth.

    Args:
        traffic: see :func:`~.traffic.traffic_table`.
        costs: see :func:`~.costs.cost_table`. Without it, only coverage and padding can be told.
        frame_s: seconds of audio in a frame.

    Attributes:
        traffic: checked.
        costs: as given; may be replaced at any time.

    Raises:
        ConfigError: a Target that does not exist.
        InputError: the traffic holds no calls, or a table is malformed.
    """

    def __init__(self, traffic: pd.DataFrame, costs: pd.DataFrame | None = None, *, frame_s: float = 0.08) -> None:
        self.traffic = check_traffic(traffic, FreeForm().target_ids)
        self.costs = None if costs is None else cost_table(costs)
        self.frame_s = frame_s
        self._wanted = [Shape(*row) for row in self.traffic[_SHAPE].itertuples(index=False, name=None)]

    def of(self, choice: Choice) -> Forecast:
        """What these sizes are worth.

        Args:
            choice: as a space makes it, or any graphs: ``Choice(graphs=(Shape(…), …))``.
        """
        costs, knows_memory, knows_times, why = self._completed(choice)
        demand = Demand(self.traffic, CostBook(costs))
        figures = dict(point_of(demand, costs, choice, self.frame_s).figures)
        for is_known, names in ((knows_memory, ("charge_bytes", "capture_s")), (knows_times, ("saved_s", "saved_share"))):
            figures |= {} if is_known else dict.fromkeys(names)
        modelled = {Shape(*row) for row in costs.loc[costs["source"] == "modelled", _SHAPE].itertuples(index=False, name=None)}
        memory: FigureSource = "unknown" if not knows_memory else "measured" if modelled.isdisjoint(choice.graphs) else "modelled"
        times: FigureSource = (
            "unknown" if not knows_times else "measured" if modelled.isdisjoint((*choice.graphs, *self._wanted)) else "modelled"
        )
        return Forecast(choice, figures, coverage_table(StatsSnapshot(self._counts(demand, choice))), memory, times, why)

    def _completed(self, choice: Choice) -> tuple[pd.DataFrame, bool, bool, str]:
        """Costs of every shape that matters, zero where nothing is known; whether memory and times are; and why not."""
        shapes = list(dict.fromkeys([*self._wanted, *choice.graphs]))
        why = "no shape has been measured yet"
        if self.costs is not None:
            try:
                return complete_costs(self.costs, shapes), True, True, ""
            except InputError as error:
                why = str(error)
            try:
                without_times = self.costs.assign(**dict.fromkeys(_TIMES, 0.0))
                # Of shapes that are only asked for, no memory is needed: none of them is captured.
                captured = complete_costs(without_times, choice.graphs)
                rest = [shape for shape in shapes if shape not in set(choice.graphs)]
                return _with_zeros(captured, rest), True, False, why
            except InputError as error:
                why = str(error)
        return _with_zeros(None, shapes), False, False, why

    def _counts(self, demand: Demand, choice: Choice) -> Counter[CallKind]:
        served, counts = demand.serve(choice.graphs), Counter[CallKind]()
        targets, states = ({part(graph) for graph in choice.graphs} for part in (lambda g: g.target, lambda g: (g.target, g.state)))
        for shape, place, calls in zip(self._wanted, served.graph.tolist(), demand.calls.tolist(), strict=True):
            key = _key_of(shape)
            if place >= 0:
                kind = CallKind(shape.target, key, descriptor=descriptor_of(choice.graphs[place]))
            elif shape.target not in targets:
                kind = CallKind(shape.target, key, reason=FallbackReason.DISABLED)
            elif (shape.target, shape.state) not in states:
                kind = CallKind(shape.target, key, reason=FallbackReason.STATE_NOT_COVERED)
            else:
                kind = CallKind(shape.target, key, reason=FallbackReason.SHAPE_NOT_COVERED)
            counts[kind] += calls
        return counts


def _with_zeros(costs: pd.DataFrame | None, shapes: list[Shape]) -> pd.DataFrame:
    rows = pd.DataFrame(shapes, columns=_SHAPE).assign(**dict.fromkeys((*_MEMORY, *_TIMES), 0.0), source="modelled")
    if costs is not None:
        known = set(costs[_SHAPE].itertuples(index=False, name=None))
        rows = rows[[tuple(shape) not in known for shape in shapes]]
        rows = pd.concat([costs, rows], ignore_index=True) if len(rows) else costs
    return cost_table(rows[list(COST_COLUMNS)])


def _key_of(shape: Shape) -> Descriptor:
    """The runtime key of a call, of one that no graph can serve, too."""
    found = descriptor_of(shape)
    if found is not None:
        return found
    if shape.target == SUFFIX_TARGET_ID:
        return SuffixDescriptor(shape.batch_size, shape.frames, shape.state.rsplit(" ", 1)[0], kept_frames(shape.target, shape.state))
    return Descriptor(shape.batch_size, shape.frames, shape.state)


def traffic_from(source: Traffic, transitions: TransitionTable | None = None) -> pd.DataFrame:
    """The traffic behind whatever counts calls.

    Args:
        source: a traffic or a coverage table, or what :func:`~vgraph_lab.inspect.coverage.coverage_table` takes.
        transitions: see :func:`~.traffic.traffic_of`; not needed for a traffic table.

    Returns:
        The columns of :data:`~.traffic.TRAFFIC_COLUMNS`.

    Raises:
        InputError: it is none of these, or a column is missing or malformed.
    """
    if not isinstance(source, pd.DataFrame):
        return traffic_of(stats_of(source), transitions)
    if "outcome" not in source:
        return traffic_table(source)
    needed = ("target", "state", "source_frames", "batch_size", "frames", "reason", "captured_batch_size", "captured_frames", "calls")
    missing = [name for name in needed if name not in source]
    if missing:
        raise InputError(f"the coverage table lacks {', '.join(missing)}. Pass all of coverage_table(…), or rows of it.")
    for reason in source.loc[source["outcome"] == "fallback", "reason"].unique():
        if reason not in set(FallbackReason):
            accepted = ", ".join(FallbackReason)
            raise InputError(f"the coverage table names the reason {reason!r} of a fallback. Accepted: {accepted}.")
    return traffic_of_calls(source, transitions)
