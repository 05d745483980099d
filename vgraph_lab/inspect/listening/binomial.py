"""Exact figures of a test with right and wrong answers, in which guessing is right every other time."""

from __future__ import annotations

import math
from functools import lru_cache

from vgraph_lab.errors import InputError

__all__ = [
    "ALPHA",
    "HEARER",
    "MOST_TRIALS",
    "POWER",
    "chance_of",
    "critical_count",
    "detectable_hit_rate",
    "hit_rate_bounds",
    "trials_needed",
]

ALPHA = 0.05
"""Accepted chance of taking a guesser for a hearer."""
POWER = 0.8
"""Wanted chance of finding a hearer."""
HEARER = 0.75
"""True share of right answers of the hearer that is looked for: hears it in half of the trials and guesses in the rest."""
MOST_TRIALS = 100_000


def chance_of(correct: int, answered: int, hit_rate: float = 0.5) -> float:
    """Chance of ``correct`` or more right answers for a listener whose true share of them is ``hit_rate``; exact.

    Raises:
        InputError: counts below 0, more right answers than answers, or a share outside 0 … 1.
    """
    if not 0 <= correct <= answered or not 0 <= hit_rate <= 1:
        raise InputError(f"{correct} of {answered} right at a share of {hit_rate} is impossible.")
    if not answered:
        return 1.0
    from scipy.stats import binomtest  # only where it is needed: the import takes a while

    return float(binomtest(correct, answered, hit_rate, alternative="greater").pvalue)


def critical_count(num_trials: int, alpha: float = ALPHA) -> int | None:
    """Least number of right answers of ``num_trials`` that guessing reaches with a chance of ``alpha`` at most; None if no number is."""
    from scipy.stats import binom

    count = int(binom.isf(alpha, num_trials, 0.5)) + 1  # isf: least k with P(X > k) <= alpha
    return count if count <= num_trials else None


@lru_cache
def trials_needed(hit_rate: float = HEARER, *, alpha: float = ALPHA, power: float = POWER) -> int:
    """Fewest trials that find a listener with this true share of right answers, at this level and power (exact).

    Raises:
        InputError: a share that guessing reaches, too, or one so near to it that more than 100,000 trials are needed; or
            a level or power outside 0 … 1.
    """
    if not (0.5 < hit_rate <= 1 and 0 < alpha < 1 and 0 < power < 1):
        raise InputError(
            f"hit_rate {hit_rate}, alpha {alpha}, power {power}: a share above 0.5 up to 1 and levels between 0 and 1 are needed."
        )
    # The normal approximation skips what is hopeless: half of what it asks for has never been enough.
    from scipy.stats import norm

    reach = norm.isf(alpha) * 0.5 + max(0.0, norm.isf(1 - power)) * math.sqrt(hit_rate * (1 - hit_rate))
    start = max(1, int((reach / (hit_rate - 0.5)) ** 2 / 2))
    for count in range(start, MOST_TRIALS + 1):
        needed = critical_count(count, alpha)
        if needed is not None and chance_of(needed, count, hit_rate) >= power:
            return count
    raise InputError(f"a listener who is right in {hit_rate:.4%} of the trials is not found with {MOST_TRIALS} of them.")


def detectable_hit_rate(num_trials: int, needed: int) -> float:
    """True share of right answers with which a listener reaches ``needed`` of ``num_trials`` with a chance of :data:`POWER`."""
    from scipy.special import betaincinv

    return float(betaincinv(needed, num_trials - needed + 1, POWER))  # P(X >= needed) is a regularised incomplete beta function


def hit_rate_bounds(correct: int, answered: int) -> tuple[float, float]:
    """Lower and upper bound of the true share of right answers, each one-sided with 95 % confidence (Clopper and Pearson)."""
    if not answered:
        return 0.0, 1.0
    from scipy.stats import binomtest

    bounds = (binomtest(correct, answered, alternative=side).proportion_ci(0.95) for side in ("greater", "less"))
    (low, _), (_, high) = ((float(b.low), float(b.high)) for b in bounds)
    return low, high
