"""Trials of an ABX test: balanced in all but X, which is tossed."""

from __future__ import annotations

import itertools
import random
from typing import Literal

from pydantic.dataclasses import dataclass as checked_dataclass

__all__ = ["ABXTrial", "Choice", "draw_trials"]

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
    """Trials of an ABX test: every sample equally often, each condition as often A as B (both within one trial), and X by toss."""
    rng = random.Random(seed)
    first = rng.random() < 0.5
    is_swapped = itertools.cycle([first, not first])
    order = rng.sample(samples, len(samples))
    shares = [num_trials // len(order) + (index < num_trials % len(order)) for index in range(len(order))]
    decks = {
        sample: rng.sample(flips := list(itertools.islice(is_swapped, share)), len(flips))
        for sample, share in zip(order, shares, strict=True)
    }
    trials: list[ABXTrial] = []
    while len(trials) < num_trials:  # rounds, each with every sample that has trials left
        for sample in rng.sample(order, len(order)):
            if decks[sample]:
                a, b = conditions[::-1] if decks[sample].pop() else conditions
                # A toss of its own: the answers of whoever hears nothing, however they are chosen, are right binomially.
                trials.append(ABXTrial(len(trials) + 1, sample, a, b, "A" if rng.random() < 0.5 else "B"))
    return tuple(trials)
