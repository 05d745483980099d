"""The ABX test: can a listener tell two conditions apart at all?

In each trial A and B are the two conditions, and X is one of them again; the listener says which. Whoever hears no
difference is right in half of the trials, so the number of right answers has a binomial distribution, and its exact tail
says how often guessing alone would do as well.

X is tossed anew in each trial. So the distribution is exact for every way of guessing, for answers that are half A and half
B as well as for all A, and no trial can be worked out from others. The rest is balanced: every sample comes equally often,
and each condition is A as often as B, both within one trial. Keep right and wrong to yourself until the end all the same:
whoever is told learns while the test goes on, and then its trials are not alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import pandas as pd
from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass

from vgraph_lab.errors import InputError

from .binomial import ALPHA, MOST_TRIALS, chance_of, critical_count, detectable_hit_rate, hit_rate_bounds, trials_needed
from .checks import checked_names, checked_seconds, checked_whole
from .listening_run import ListeningRun, Words
from .trials import ABXTrial, Choice, draw_trials

__all__ = ["ABX_COLUMNS", "ABXAnswer", "ABXResult", "ABXTest", "ABXTrial", "Choice"]

ABX_COLUMNS = {
    "trial": "number of the trial, from 1",
    "sample": "what was heard",
    "a": "condition that was A",
    "b": "condition that was B",
    "x": "which of them X was; missing until the test is finished",
    "answer": "what the listener said; missing if not answered",
    "is_correct": "whether that is right; missing until the test is finished",
    "seconds": "time taken, where it was measured",
}
"""The columns of :meth:`ABXTest.table`, in order, with their meaning."""


@checked_dataclass(frozen=True)
class ABXAnswer:
    """What the listener said to one trial, and the seconds that it took, if measured."""

    number: int
    choice: Choice
    seconds: float | None = None


@checked_dataclass(frozen=True)
class _Saved:
    samples: list[str]
    conditions: tuple[str, str]
    seed: int
    trials: list[ABXTrial]
    answers: list[ABXAnswer]


class ABXResult:
    """What the answers say. Probabilities are exact, however somebody guesses, since X is tossed in each trial.

    Attributes:
        trials: trials of the test.
        answered: trials answered so far.
        correct: right answers among them.
        p_value: chance of that many right answers or more by guessing; 1 without answers.
        hit_rate: share of right answers; NaN without answers.
        hit_rate_at_least: one-sided 95 % lower bound of the listener's true share (Clopper and Pearson).
        hit_rate_at_most: upper bound, likewise.
        needed: right answers that the whole test needs for p ≤ 0.05; None if even all of them are not enough.
        detectable_hit_rate: true share of right answers that the whole test finds with 80 % power; None likewise.
    """

    def __init__(self, trials: int, answered: int, correct: int) -> None:
        self.trials, self.answered, self.correct = trials, answered, correct
        self.p_value = chance_of(correct, answered)
        self.hit_rate = correct / answered if answered else math.nan
        self.hit_rate_at_least, self.hit_rate_at_most = hit_rate_bounds(correct, answered)
        self.needed = critical_count(trials)
        self.detectable_hit_rate = None if self.needed is None else detectable_hit_rate(trials, self.needed)

    @property
    def is_finished(self) -> bool:
        """Whether every trial was answered."""
        return self.answered == self.trials

    @property
    def is_heard(self) -> bool | None:
        """Whether a difference was heard (p ≤ 0.05 over the whole test); None while the test is unfinished."""
        return self.p_value <= ALPHA if self.is_finished else None

    @property
    def text(self) -> str:
        """The outcome in words, with what it can and cannot say."""
        if not self.answered:
            return f"No answer yet, {self.trials} trials to go. {self.power_note}"
        counted = f"{self.correct} of {self.answered} right; guessing does as well or better with p = {self.p_value:.2g}"
        if not self.is_finished:
            return (
                f"Unfinished, {self.trials - self.answered} of {self.trials} trials to go: {counted}. "
                "Whoever stops when p looks good is wrong more often than p says."
            )
        if self.is_heard:
            sure = _percent(self.hit_rate_at_least)
            return f"A difference was heard: {counted}. The true share of right answers is {sure} or more, with 95 % confidence."
        return (
            f"No difference was shown: {counted}. That is no proof of equality: the true share of right answers is at most "
            f"{_percent(self.hit_rate_at_most)}, with 95 % confidence. {self.power_note}"
        )

    @property
    def power_note(self) -> str:
        """Which listeners this test could have found, and how many trials one who is right in 75 % of them needs."""
        wanted = f"finding a listener who is right in 75 % of the trials takes {trials_needed()} trials (p ≤ 0.05, 80 % power)"
        if self.needed is None or self.detectable_hit_rate is None:
            return f"{self.trials} trials cannot show anything, even all right answers may be guesses (p > 0.05); {wanted}."
        could = _percent(self.detectable_hit_rate)
        needs = (
            f"{self.trials} trials need {self.needed} right answers, and find a listener who is right in {could} of them, with 80 % power"
        )
        return f"{needs}; {wanted}."

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"ABXResult({self.correct} of {self.answered} right, {self.trials} trials, p = {self.p_value:.3g})"


class ABXTest(ListeningRun[ABXTrial, ABXAnswer]):
    """One run of an ABX test: its trials, and the answers so far. The same arguments give the same trials.

    ::

        test = ABXTest(audio.samples, ("eager", "graph"), num_trials=24, seed=1)
        while (trial := test.next_trial) is not None:
            test.answer(trial.number, listen(trial))
        print(test.result())

    Args:
        samples: names of what is heard.
        conditions: the two that are compared.
        num_trials: how many trials; 24 find most listeners who hear something (:func:`~.binomial.trials_needed`).
        seed: a whole number from 0; another one gives other trials.

    Raises:
        InputError: no samples, the same sample or condition twice, no trials, or a seed that is none.
    """

    conditions: tuple[str, str]
    _WORDS = Words("ABX test", "trial", "answer", "answered")
    _ADAPTER = TypeAdapter(_Saved)

    def __init__(self, samples: Sequence[str], conditions: tuple[str, str], *, num_trials: int, seed: int) -> None:
        heard, pair, seed = checked_names("samples", samples), _two(conditions), checked_whole("seed", seed, 0)
        num_trials = checked_whole("num_trials", num_trials, 1)
        if num_trials > MOST_TRIALS:
            raise InputError(f"num_trials is {num_trials}; nobody answers more than {MOST_TRIALS}.")
        super().__init__(heard, pair, seed, draw_trials(heard, pair, num_trials, seed))

    @property
    def trials(self) -> tuple[ABXTrial, ...]:
        """All trials, in the order in which they are heard."""
        return self._items

    @property
    def answers(self) -> tuple[ABXAnswer, ...]:
        """The answers so far, by number of the trial."""
        return self._in_order

    @property
    def next_trial(self) -> ABXTrial | None:
        """The first trial without an answer; None if the test is finished."""
        return self._next

    def answer(self, number: int, choice: Choice, seconds: float | None = None) -> None:
        """Note what the listener said.

        Args:
            number: of the trial.
            choice: which of A and B the listener takes X for.
            seconds: time taken, if measured.

        Raises:
            InputError: no such trial, another answer than A or B, or a time that is none. Nothing was noted.
            LifecycleError: the trial was answered already. The first answer stands.
        """
        number = self._item(number).number
        if not isinstance(choice, str) or choice not in ("A", "B"):
            raise InputError(f"the answer to trial {number} is {choice!r}; accepted are 'A' and 'B'. Whoever is not sure guesses.")
        self._keep(ABXAnswer(number, choice, checked_seconds(seconds)))

    def _in_brackets(self, note: ABXAnswer) -> str:
        return f" ({note.choice})"

    def result(self) -> ABXResult:
        """What the answers so far say; it may be asked for at any time and tells when it is not final."""
        correct = sum(self._item(answer.number).x == answer.choice for answer in self.answers)
        return ABXResult(len(self.trials), len(self.answers), correct)

    def table(self) -> pd.DataFrame:
        """One row per trial, with the columns of :data:`ABX_COLUMNS`. What X was is hidden until the test is finished."""
        rows = []
        for trial in self.trials:
            answer = self._notes.get(trial.number)
            choice = answer.choice if answer else None
            x, is_correct = (trial.x, trial.x == choice) if self.is_finished else (None, None)
            seconds = math.nan if answer is None or answer.seconds is None else answer.seconds
            rows.append((trial.number, trial.sample, trial.a, trial.b, x, choice, is_correct, seconds))
        return pd.DataFrame(rows, columns=list(ABX_COLUMNS)).astype({"x": "string", "answer": "string", "is_correct": "boolean"})

    def _saved(self) -> _Saved:
        return _Saved(list(self.samples), self.conditions, self.seed, list(self.trials), list(self.answers))

    @classmethod
    def _restored(cls, saved: _Saved) -> Self:
        test = cls(saved.samples, saved.conditions, num_trials=max(len(saved.trials), 1), seed=saved.seed)
        _check_trials(saved)
        test._items = tuple(saved.trials)
        for answer in saved.answers:
            test.answer(answer.number, answer.choice, answer.seconds)
        return test


def _two(conditions: Sequence[str]) -> tuple[str, str]:
    found = checked_names("conditions", conditions)
    if len(found) != 2:
        raise InputError(f"an ABX test compares two conditions, got {list(found)}. Choose two of them.")
    return found[0], found[1]


def _check_trials(saved: _Saved) -> None:
    for number, trial in enumerate(saved.trials, start=1):
        if trial.number != number or trial.sample not in saved.samples or {trial.a, trial.b} != set(saved.conditions):
            raise InputError(f"trial {number} is {trial}, which does not fit its samples and conditions.")
    if not saved.trials:
        raise InputError("it has no trials.")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
