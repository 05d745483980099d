"""When calls hit graphs and when they did not: statistics read several times, as calls per interval."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise

import pandas as pd

from vgraph_lab.errors import InputError
from vgraph_lab.graphs.stats import CallKind, StatsSnapshot

from .coverage import OUTCOMES, outcome_of
from .recording import Source, stats_of

__all__ = ["TIMELINE_COLUMNS", "Timeline", "timeline_table"]

TIMELINE_COLUMNS = {
    "start_s": "beginning of the interval, in seconds from the first reading",
    "end_s": "end of the interval",
    "target": "id of the Target",
    "outcome": "exact hit, padded hit, fallback (ran eager) or error",
    "reason": "why it fell back, or the exception of an error; empty for hits",
    "calls": "number of such calls in the interval",
}
"""The columns of :func:`timeline_table`, in order, with their meaning. An interval without calls has no row."""


class Timeline:
    """Readings of one source's statistics; taking one costs a copy of its counters, and any thread may do it.

    ::

        timeline = Timeline(runner)
        ...                          # traffic
        timeline.sample()            # as often as you like
        views.chart(views.plots.hits_over_time, timeline.table())

    Args:
        source: a live runner or Manager. What it has counted already is left out.
        clock: seconds from anywhere, never falling.
    """

    def __init__(self, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._clock, self._begin = source, clock, clock()
        self._samples = [(0.0, stats_of(source))]

    def sample(self) -> None:
        """Take a reading: ends an interval, and begins the next one."""
        self._samples.append((self._clock() - self._begin, stats_of(self._source)))

    def table(self) -> pd.DataFrame:
        """Calls between readings; see :data:`TIMELINE_COLUMNS`."""
        return timeline_table(self._samples)


def timeline_table(samples: Iterable[tuple[float, StatsSnapshot]]) -> pd.DataFrame:
    """Calls between readings of cumulative statistics.

    Args:
        samples: (seconds, statistics so far) in the order of time; the first one is where counting begins. For simulated traffic,
            :meth:`~vgraph_lab.workload.simulation.TrafficResult.samples` makes them.

    Returns:
        The columns of :data:`TIMELINE_COLUMNS`; ``calls`` adds up to what was counted between the first reading and the last.

    Raises:
        InputError: times or counters fall.
    """
    rows = [row for earlier, later in pairwise(samples) for row in _interval(earlier, later)]
    table = pd.DataFrame(rows, columns=list(TIMELINE_COLUMNS))
    table["outcome"] = pd.Categorical(table["outcome"], categories=list(OUTCOMES), ordered=True)
    return table.astype({"start_s": "float64", "end_s": "float64", "target": "str", "reason": "str", "calls": "int64"})


def _interval(earlier: tuple[float, StatsSnapshot], later: tuple[float, StatsSnapshot]) -> list[tuple[float, float, str, str, str, int]]:
    (start, before), (end, after) = earlier, later
    if not start <= end:
        raise InputError(f"readings must be in the order of time, but {end} s follows {start} s.")
    if any(n > after.counts.get(kind, 0) for kind, n in before.counts.items()):
        raise InputError(f"calls were lost between {start} and {end} s: the readings are of different runners. Use one Timeline for each.")
    calls: Counter[tuple[str, str, str]] = Counter()
    for kind, n in after.counts.items():
        calls[_what(kind)] += n - before.counts.get(kind, 0)
    return [(start, end, *what, n) for what, n in sorted(calls.items()) if n]


def _what(kind: CallKind) -> tuple[str, str, str]:
    return kind.target_id, outcome_of(kind), str(kind.error or kind.reason or "")
