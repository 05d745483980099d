"""The plan: every set of capture sizes that nothing beats, what each is worth, and which one to take under which limits.

::

    plan = plan_captures(traffic, costs, StreamingGrid(cfg.connector, window=72))
    plan.front                                              # a table, one row per point
    best = plan.recommend(budget_bytes=2 * 2**30, min_coverage=0.95)
    print(plan.explain(best))
    plan.write_yaml(best, "stage.yaml")

Predictions are for the calls as they came. A model splits groups of more rows than it has captured into smaller calls, which then
hit: a call that is predicted to miss because of its rows may in truth be two hits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from vgraph_lab.errors import ConfigError, InputError
from vgraph_lab.graphs.descriptor import Descriptor
from vgraph_lab.graphs.table import MIB

from .costs import CostBook, complete_costs
from .demand import Demand
from .explain import explain_choice
from .export import as_yaml, stage_of
from .search import AUDIO, BYTES, CALLS, CAPTURE, COMPUTED, REQUESTED, SAVED, Ints, start
from .shapes import Shape, descriptor_of
from .spaces import Choice, Space
from .traffic import check_traffic

__all__ = ["FRONT_COLUMNS", "PREDICTION_COLUMNS", "Objective", "Plan", "PlanPoint", "plan_captures", "point_of"]

FRONT_COLUMNS = {
    "graphs": "number of graphs",
    "targets": "Targets that are captured",
    "batch_sizes": "capture_batch_sizes; empty in the free form",
    "frame_sizes": "frame counts of the stateless Target, the two that are always captured included; empty elsewhere",
    "calls": "calls that hit a graph",
    "coverage": "share of all calls, 0 to 1",
    "audio_s": "seconds of audio that these calls decode, padded rows and frames not counted (left context of windows is)",
    "audio_coverage": "share of all audio, 0 to 1",
    "saved_s": "seconds that all hits take less than eager; negative if padding costs more than graphs save",
    "saved_share": "share of the time that all calls would take eagerly",
    "padding_frames": "rows × frames that hits compute for nothing",
    "wasted_share": "share of the frames that hits compute, 0 to 1; missing without hits",
    "charge_bytes": "static buffers and pool: what counts against max_memory_bytes",
    "capture_s": "seconds of all captures",
    "has_modelled_costs": "whether a cost behind this row was modelled rather than measured",
}
"""The columns of :attr:`Plan.front`, in order, with their meaning."""

PREDICTION_COLUMNS = {
    "target": "id of the Target",
    "state": "as in the traffic table",
    "batch_size": "rows of the call",
    "frames": "frames of the call",
    "may_pad_frames": "as in the traffic table",
    "calls": "number of such calls",
    "captured": "Descriptor of the graph that serves them; empty for none",
}
"""The columns of :meth:`Plan.predict`, in order, with their meaning."""

Objective = Literal["saved", "calls", "audio"]
"""What to have most of: time saved against eager, calls in graphs, or audio seconds in graphs."""

_BEST_FIRST = {"saved": "saved_s", "calls": "calls", "audio": "audio_s"}


@dataclass(frozen=True)
class PlanPoint:
    """One set of capture sizes and what it is predicted to do. Figures as in :data:`FRONT_COLUMNS`.

    Attributes:
        choice: the sizes, and the graphs that they capture.
        figures: the point's row of the front.
    """

    choice: Choice
    figures: Mapping[str, Any]

    def descriptors(self) -> dict[str, tuple[Descriptor, ...]]:
        """The graphs as Descriptors, by Target."""
        found: dict[str, tuple[Descriptor, ...]] = {}
        for shape in self.choice.graphs:
            descriptor = descriptor_of(shape)
            if descriptor is not None:
                found[shape.target] = (*found.get(shape.target, ()), descriptor)
        return found

    def __str__(self) -> str:
        f = self.figures
        if not f["graphs"]:
            return "no graphs: every call runs eager"
        sizes = [f"{name.replace('_', ' ')} {', '.join(map(str, f[name]))}" for name in ("batch_sizes", "frame_sizes") if f[name]]
        return (
            f"{'; '.join(sizes) or 'sizes of its own'}: {f['graphs']} graphs, {f['coverage']:.1%} of calls and "
            f"{f['audio_coverage']:.1%} of audio, {_speed(f['saved_s'], f['saved_share'])}, "
            f"{f['charge_bytes'] / MIB:,.1f} MiB, {f['capture_s']:.2f} s to capture"
        )


def _speed(saved_s: float, saved_share: float) -> str:
    return f"{abs(saved_s):.2f} s {'faster' if saved_s >= 0 else 'SLOWER'} than eager ({abs(saved_share):.1%})"


def point_of(demand: Demand, costs: pd.DataFrame, choice: Choice, frame_s: float) -> PlanPoint:
    """What one choice is worth.

    Args:
        demand: traffic with costs of every shape that matters.
        costs: the same costs as a table, which tells what was modelled.
        choice: which graphs.
        frame_s: seconds of audio in a frame.
    """
    served = demand.serve(choice.graphs)
    label = start()
    label[0, [CALLS, AUDIO, SAVED]] = -served.calls, -served.audio_frames, -served.saved_ns
    label[0, [COMPUTED, REQUESTED]] = served.computed_frames, served.requested_frames
    label[0, [BYTES, CAPTURE]] = served.charge_bytes, served.capture_us
    row = _front_table(demand, costs, label, [choice], frame_s).iloc[0]
    return PlanPoint(choice, {str(name): value for name, value in row.items()})


def plan_captures(traffic: pd.DataFrame, costs: pd.DataFrame, space: Space, *, frame_s: float = 0.08) -> Plan:
    """Find every set of capture sizes that no other one beats in calls, audio, time saved, bytes and capture seconds at once.

    Exact: a set is in the plan if and only if, among all that can be made of the candidates (see :attr:`Plan.notes`), none is at
    least as good in all five and different in one.

    Args:
        traffic: see :func:`~.traffic.traffic_table`.
        costs: see :func:`~.costs.cost_table`. Shapes and figures that are missing are modelled; see :mod:`.costs`.
        space: what can be chosen.
        frame_s: seconds of audio in a frame; 12.5 frames per second by default.

    Raises:
        ConfigError: a Target that does not exist or is not of this space, or candidates that are no sizes.
        InputError: the traffic holds no calls, costs cannot be completed, or there are too many candidates.
    """
    checked = check_traffic(traffic, space.target_ids)
    wanted = [Shape(*row) for row in checked[["target", "state", "batch_size", "frames"]].itertuples(index=False, name=None)]
    completed = complete_costs(costs, [*wanted, *space.shapes(checked)])
    demand = Demand(checked, CostBook(completed))
    labels, choices = space.search(demand)
    front = _front_table(demand, completed, labels, choices, frame_s)
    order = front.sort_values(["charge_bytes", "capture_s", "calls"], kind="stable").index
    return Plan(demand, costs, completed, space, front.loc[order].reset_index(drop=True), tuple(choices[place] for place in order), frame_s)


def _front_table(demand: Demand, costs: pd.DataFrame, labels: Ints, choices: Sequence[Choice], frame_s: float) -> pd.DataFrame:
    computed, modelled = labels[:, COMPUTED], _modelled(costs)
    eager_is_modelled = not modelled.isdisjoint(demand.shapes)
    table = pd.DataFrame(
        {
            "graphs": [len(choice.graphs) for choice in choices],
            "targets": [choice.targets for choice in choices],
            "batch_sizes": [choice.batch_sizes for choice in choices],
            "frame_sizes": [choice.frame_sizes for choice in choices],
            "calls": -labels[:, CALLS],
            "coverage": -labels[:, CALLS] / demand.calls.sum(),
            "audio_s": -labels[:, AUDIO] * frame_s,
            "audio_coverage": -labels[:, AUDIO] / demand.audio_frames.sum(),
            "saved_s": -labels[:, SAVED] / 1e9,
            "saved_share": -labels[:, SAVED] / max(1, int(demand.eager_ns.sum())),
            "padding_frames": computed - labels[:, REQUESTED],
            "wasted_share": np.where(computed > 0, (computed - labels[:, REQUESTED]) / np.maximum(computed, 1), np.nan),
            "charge_bytes": labels[:, BYTES],
            "capture_s": labels[:, CAPTURE] / 1e6,
            "has_modelled_costs": [not modelled.isdisjoint(choice.graphs) or eager_is_modelled for choice in choices],
        }
    )
    return table[list(FRONT_COLUMNS)]


def _modelled(costs: pd.DataFrame) -> set[Shape]:
    rows = costs.loc[costs["source"] == "modelled", ["target", "state", "batch_size", "frames"]]
    return {Shape(*row) for row in rows.itertuples(index=False, name=None)}


@dataclass(frozen=True)
class Plan:
    """All sets of capture sizes that nothing beats, for one traffic and one space. Made by :func:`plan_captures`.

    Attributes:
        demand: the traffic with its costs.
        given_costs: the cost table as it was given.
        costs: the same with what was modelled.
        space: what could be chosen.
        front: one row per set, fewest bytes first: the columns of :data:`FRONT_COLUMNS`. No graphs at all is one of them.
        choices: the set of each row.
        frame_s: seconds of audio in a frame.
    """

    demand: Demand
    given_costs: pd.DataFrame
    costs: pd.DataFrame
    space: Space
    front: pd.DataFrame
    choices: tuple[Choice, ...]
    frame_s: float = 0.08

    @property
    def notes(self) -> tuple[str, ...]:
        """What the search did not try, in words."""
        return self.space.notes(self.demand.traffic)

    def point(self, row: int) -> PlanPoint:
        """One row of the front.

        Raises:
            InputError: there is no such row.
        """
        if not 0 <= row < len(self.choices):
            raise InputError(f"the front has rows 0 to {len(self.choices) - 1}, got {row}.")
        return PlanPoint(self.choices[row], {str(name): value for name, value in self.front.iloc[row].items()})

    def evaluate(self, choice: Choice) -> PlanPoint:
        """What any choice is worth for this traffic, whether on the front or not: the present settings, or a what-if.

        Args:
            choice: as the space makes it, e.g. ``plan.space.choice(batch_sizes=(1, 2, 4))``. Costs that are missing are modelled.

        Raises:
            InputError: costs cannot be completed.
        """
        demand, costs = self._demand_for(choice)
        return point_of(demand, costs, choice, self.frame_s)

    def recommend(
        self,
        *,
        budget_bytes: int | None = None,
        max_capture_s: float | None = None,
        min_coverage: float | None = None,
        objective: Objective = "saved",
    ) -> PlanPoint:
        """The best set of capture sizes within limits.

        Args:
            budget_bytes: static buffers and pool at most; what ``max_memory_bytes`` will be.
            max_capture_s: seconds of all captures at most.
            min_coverage: share of the calls that must hit, 0 to 1.
            objective: what to have most of; of equals, the one with the fewest bytes. In the free form, time saved is the best
                among the sets of the front, not among all.

        Returns:
            The point. Without ``min_coverage`` it may be the one without graphs, if every graph costs more time than it saves.

        Raises:
            ConfigError: a limit is out of range, or nothing with a graph is within the limits; it says what the least is.
        """
        self._check_limits(budget_bytes, max_capture_s, min_coverage, objective)
        table = self.front
        within = pd.Series(True, index=table.index)
        if budget_bytes is not None:
            within &= table["charge_bytes"] <= budget_bytes
        if max_capture_s is not None:
            within &= table["capture_s"] <= max_capture_s
        if min_coverage is not None:
            within &= table["coverage"] >= min_coverage
        if not (within & (table["graphs"] > 0)).any():
            raise ConfigError(self._why_none(budget_bytes, max_capture_s, min_coverage))
        ranked = table[within].sort_values(
            [_BEST_FIRST[objective], "charge_bytes", "capture_s"], ascending=[False, True, True], kind="stable"
        )
        return self.point(int(ranked.index[0]))

    @staticmethod
    def _check_limits(budget_bytes: int | None, max_capture_s: float | None, min_coverage: float | None, objective: str) -> None:
        if objective not in get_args(Objective):
            raise ConfigError(f"objective is {objective!r}; accepted are {', '.join(map(repr, get_args(Objective)))}.")
        for name, value in (("budget_bytes", budget_bytes), ("max_capture_s", max_capture_s)):
            if value is not None and not value >= 0:
                raise ConfigError(f"{name} must be 0 or more, got {value}.")
        if min_coverage is not None and not 0 <= min_coverage <= 1:
            raise ConfigError(f"min_coverage is a share of the calls, from 0 to 1, got {min_coverage}.")

    def _why_none(self, budget_bytes: int | None, max_capture_s: float | None, min_coverage: float | None) -> str:
        graphs = self.front[self.front["graphs"] > 0]
        if graphs.empty:
            return "no graph that can be chosen would serve any of these calls. Check the states and frames of the traffic."
        problems = []
        if budget_bytes is not None and budget_bytes < graphs["charge_bytes"].min():
            least = graphs["charge_bytes"].min()
            problems.append(f"the budget is {budget_bytes / MIB:,.2f} MiB, and the smallest set of graphs takes {least / MIB:,.2f} MiB")
        if max_capture_s is not None and max_capture_s < graphs["capture_s"].min():
            problems.append(f"max_capture_s is {max_capture_s:g}, and the quickest set of graphs takes {graphs['capture_s'].min():.3g}")
        if min_coverage is not None and min_coverage > graphs["coverage"].max():
            problems.append(
                f"min_coverage is {min_coverage:g}, and no set of graphs covers more than {graphs['coverage'].max():.4g} of the calls"
            )
        if problems:
            return "; ".join(problems) + ". Loosen it, or run without graphs (enforce_eager: true)."
        return "each of these limits can be kept, but not all together. Loosen one; the front shows what goes with what."

    def predict(self, point: PlanPoint) -> pd.DataFrame:
        """Which graph serves which calls: one row per row of the traffic, the columns of :data:`PREDICTION_COLUMNS`."""
        served = self._demand_for(point.choice)[0].serve(point.choice.graphs)
        names = [str(descriptor_of(graph)) for graph in point.choice.graphs]
        table = self.demand.traffic.copy()
        table["captured"] = [names[place] if place >= 0 else "" for place in served.graph]
        return table[list(PREDICTION_COLUMNS)]

    def explain(self, point: PlanPoint) -> str:
        """Every chosen size in words: what it serves, what it costs, what would be lost without it."""
        return "\n".join([str(point), *explain_choice(self._demand_for(point.choice)[0], self.space, point.choice), *self.notes])

    def _demand_for(self, choice: Choice) -> tuple[Demand, pd.DataFrame]:
        """The traffic with costs of these graphs, too, and those costs."""
        if self.demand.book.covers(choice.graphs):
            return self.demand, self.costs
        costs = complete_costs(self.given_costs, [*self.demand.shapes, *choice.graphs])
        return Demand(self.demand.traffic, CostBook(costs)), costs

    def stage(self, point: PlanPoint) -> dict[str, Any]:
        """The point as a configuration that :meth:`StageConfig.from_dict` reads: the stage's mode, its chunks, its graphs.

        Raises:
            ConfigError: a configuration cannot say it (free form).
        """
        return stage_of(self.space, point.choice)

    def write_yaml(self, point: PlanPoint, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write :meth:`stage` to a file that :meth:`StageConfig.from_yaml` reads.

        Raises:
            ConfigError: a configuration cannot say it (free form).
            InputError: the file exists (and ``overwrite`` is False) or cannot be written.
        """
        return as_yaml(self.stage(point), f"{point}", Path(path), overwrite=overwrite)
