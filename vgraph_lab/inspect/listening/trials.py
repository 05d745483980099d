"""Balanced trials of an ABX test, and the checks that listening tests have in common."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Literal

from pydantic.dataclasses import dataclass as checked_dataclass

from vgraph_lab.errors import InputError

__all__ = ["ABXTrial", "Choice", "checked_names", "checked_seconds", "checked_whole", "draw_trials"]

Choice = Literal["A", "B"]


@checked_dataclass(frozen=True)
class ABXTrial:
    """One trial. ``x`` is the right answer: not for the listener's eyes.

    Attributes:
        number: from 1, in the order in which they are heard.
        sample: what is heard.
        a: condition that is A.
        b: condition that is B.
        x: which of them X is.
    """

    number: int
    sample: str
    a: str
    b: str
    x: Choice

    @property
    def x_condition(self) -> str:
        """The condition that X is."""
        return self.a if self.x == "A" else self.b


def draw_trials(samples: tuple[str, ...], conditions: tuple[str, str], num_trials: int, seed: int) -> tuple[ABXTrial, ...]:
    """Trials of an ABX test: every sample equally often, and X, its condition and the condition of A in balance, where numbers allow."""
    rng = random.Random(seed)
    # The order makes any run of neighbours balanced in x, and any four in everything; the toss of the start keeps it
    # unknown. Trials of one sample are neighbours here, and are mixed below.
    flip_position, flip_x = rng.random() < 0.5, rng.random() < 0.5
    kinds = itertools.cycle([(position ^ flip_position, x ^ flip_x) for position, x in ((0, 0), (1, 1), (1, 0), (0, 1))])
    order = rng.sample(samples, len(samples))
    shares = [num_trials // len(order) + (index < num_trials % len(order)) for index in range(len(order))]
    decks = {
        sample: rng.sample(kind_list := list(itertools.islice(kinds, share)), len(kind_list))
        for sample, share in zip(order, shares, strict=True)
    }
    trials: list[ABXTrial] = []
    while len(trials) < num_trials:  # rounds, each with every sample that has trials left
        for sample in rng.sample(order, len(order)):
            if decks[sample]:
                position, x = decks[sample].pop()
                a, b = conditions[::-1] if position else conditions
                trials.append(ABXTrial(len(trials) + 1, sample, a, b, "B" if x else "A"))
    return tuple(trials)


def checked_names(what: str, names: Sequence[str]) -> tuple[str, ...]:
    """Names as a tuple.

    Raises:
        InputError: none, one of them twice, an empty one, or no sequence of names.
    """
    if isinstance(names, str) or not all(isinstance(name, str) and name.strip() for name in names):
        raise InputError(f"{what} are {names!r}; a sequence of names is needed.")
    if not names or len(set(names)) < len(names):
        raise InputError(f"{what} are {list(names)}; at least one is needed, and none twice.")
    return tuple(names)


def checked_whole(what: str, value: int, least: int) -> int:
    """A whole number from ``least``.

    Raises:
        InputError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{what} is {value!r}; a whole number from {least} is needed.")
    return value


def checked_seconds(seconds: float | None) -> None:
    """Refuse a time that is none.

    Raises:
        InputError: negative, NaN, infinite or no number.
    """
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not (math.isfinite(seconds) and seconds >= 0):
        raise InputError(f"seconds is {seconds!r}; a finite number from 0 is needed, or None where it was not measured.")
