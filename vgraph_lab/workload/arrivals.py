"""When requests come: at once, at random, in bursts, at a rate that climbs, or as a trace says.

Every process gives the same moments for the same seed and goes on for as long as it is asked, except a trace, which ends.
The first request comes at 0.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

from vgraph_lab.errors import InputError

__all__ = ["AllAtOnce", "Arrivals", "BurstyArrivals", "PoissonArrivals", "RampArrivals", "TraceArrivals"]


class Arrivals(Protocol):
    """Moments at which requests come."""

    def times(self, seed: int) -> Iterator[float]:
        """Seconds since the beginning, ascending."""


@dataclass(frozen=True, slots=True)
class AllAtOnce:
    """Everybody is there from the start."""

    def times(self, seed: int) -> Iterator[float]:
        """0 for all."""
        return repeat(0.0)


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """Independent requests at a mean rate: exponential gaps.

    Args:
        rate_per_s: mean requests per second.

    Raises:
        InputError: the rate is not a finite number above 0.
    """

    rate_per_s: float

    def __post_init__(self) -> None:
        _check_positive(rate_per_s=self.rate_per_s)

    def times(self, seed: int) -> Iterator[float]:
        """Partial sums of exponential gaps, from 0."""
        draw, now = random.Random(seed), 0.0
        while True:
            yield now
            now += draw.expovariate(self.rate_per_s)


@dataclass(frozen=True, slots=True)
class BurstyArrivals:
    """Bursts of requests: the bursts come at random, a burst's requests follow each other closely.

    Sizes of bursts are geometric. Gaps between bursts are such that the mean rate of requests comes out right.

    Args:
        rate_per_s: mean requests per second over a long time.
        burst_size: mean requests per burst, at least 1.
        gap_s: time between two requests of a burst, 0 or more.

    Raises:
        InputError: a value is out of range, or the bursts alone take longer than the rate allows.
    """

    rate_per_s: float
    burst_size: float = 8.0
    gap_s: float = 0.0

    def __post_init__(self) -> None:
        _check_positive(rate_per_s=self.rate_per_s, burst_size=self.burst_size)
        if self.burst_size < 1:
            raise InputError(f"burst_size must be at least 1 request, got {self.burst_size}.")
        if not (math.isfinite(self.gap_s) and self.gap_s >= 0):
            raise InputError(f"gap_s must be a finite number from 0, got {self.gap_s}.")
        if self.pause_s <= 0:
            raise InputError(
                f"bursts of {self.burst_size:g} requests {self.gap_s:g} s apart leave no pause at {self.rate_per_s:g} requests/s. "
                "Lower gap_s, burst_size or rate_per_s."
            )

    @property
    def pause_s(self) -> float:
        """Mean time from the last request of a burst to the first of the next."""
        return self.burst_size / self.rate_per_s - (self.burst_size - 1) * self.gap_s

    def times(self, seed: int) -> Iterator[float]:
        """Within a burst ``gap_s`` apart, between bursts an exponential pause."""
        draw, now, ends = random.Random(seed), 0.0, 1 / self.burst_size
        while True:
            yield now
            now += draw.expovariate(1 / self.pause_s) if draw.random() < ends else self.gap_s


@dataclass(frozen=True, slots=True)
class RampArrivals:
    """A rate that changes linearly and then stays: Poisson arrivals of a service that fills up or drains.

    Args:
        from_rate_per_s: at the beginning, 0 or more.
        to_rate_per_s: from ``duration_s`` on, above 0.
        duration_s: how long the change takes.

    Raises:
        InputError: a value is out of range.
    """

    from_rate_per_s: float
    to_rate_per_s: float
    duration_s: float

    def __post_init__(self) -> None:
        _check_positive(to_rate_per_s=self.to_rate_per_s, duration_s=self.duration_s)
        if not (math.isfinite(self.from_rate_per_s) and self.from_rate_per_s >= 0):
            raise InputError(f"from_rate_per_s must be a finite number from 0, got {self.from_rate_per_s}.")

    def times(self, seed: int) -> Iterator[float]:
        """Unit-rate Poisson moments, mapped through the inverse of the expected count by then."""
        draw, expected = random.Random(seed), 0.0
        while True:
            yield self._when(expected)
            expected += draw.expovariate(1.0)

    def _when(self, expected: float) -> float:
        start, slope = self.from_rate_per_s, (self.to_rate_per_s - self.from_rate_per_s) / self.duration_s
        by_the_end = (start + self.to_rate_per_s) / 2 * self.duration_s
        if expected >= by_the_end:
            return self.duration_s + (expected - by_the_end) / self.to_rate_per_s
        root = math.sqrt(start * start + 2 * slope * expected)
        return 2 * expected / (start + root) if expected else 0.0


@dataclass(frozen=True, slots=True)
class TraceArrivals:
    """Moments that somebody recorded, counted from the first.

    Args:
        moments_s: seconds, ascending, from any origin.

    Raises:
        InputError: no moment, one that is not finite, or one before its predecessor.
    """

    moments_s: Sequence[float]

    def __post_init__(self) -> None:
        if not self.moments_s or not all(map(math.isfinite, self.moments_s)):
            raise InputError("a trace needs one or more finite moments in seconds.")
        if any(later < earlier for earlier, later in zip(self.moments_s, self.moments_s[1:], strict=False)):
            raise InputError("the moments of a trace must ascend. Try sorted(moments).")

    def times(self, seed: int) -> Iterator[float]:
        """The trace, from 0; it ends."""
        return (moment - self.moments_s[0] for moment in self.moments_s)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} must be a finite number above 0, got {value}.")
