"""Rating by MUSHRA (ITU-R BS.1534-3): how good is each condition, from 0 to 100, beside the reference?

On each page the listener hears one sample: the open reference, and all conditions under letters. One of them is the
reference again, hidden: who rates that low did not hear well, and is left out afterwards. A low anchor, the reference
without its treble, ties the lower end of the scale to something that everybody hears.

Pages come in random order, and on each one the conditions have a random order of their own, which owes nothing to other
pages: whoever finds the anchor on every page knows no more about the rest. So each condition stands equally often under each
letter on average only. Any stricter balance tells something: with three conditions it leaves two orders of the six, and the
letter after the anchor is then the same condition on every page.

Means by condition are withheld until the last page is rated, since they say which letters were which.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import pandas as pd
from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass

from vgraph_lab.errors import InputError

from .checks import checked_names, checked_seconds, checked_whole, is_number
from .listening_run import ListeningRun, Words

__all__ = ["MUSHRA_COLUMNS", "MUSHRA_SUMMARY_COLUMNS", "MushraPage", "MushraRating", "MushraResult", "MushraTest"]

CONFIDENCE = 0.95
LOWEST_FOR_REFERENCE, MOST_LOW_SHARE = 90, 0.15  # BS.1534-3, section 4.1.2: rule for leaving a listener out

MUSHRA_COLUMNS = {
    "page": "number of the page, from 1",
    "sample": "what was heard",
    "letter": "under which the condition stood",
    "condition": "which it was; missing until the test is finished",
    "score": "0 (bad) to 100 (excellent); missing if not rated",
    "seconds": "time taken for the page, where it was measured",
}
"""The columns of :meth:`MushraTest.table`, in order, with their meaning."""

MUSHRA_SUMMARY_COLUMNS = {
    "condition": "name",
    "is_reference": "whether it is the hidden reference",
    "ratings": "samples rated",
    "mean": "mean score; missing (NaN) until the test is finished, and so is its interval",
    "mean_low": "lower end of its 95 % confidence interval (Student's t over the samples, cut at 0); NaN below two ratings",
    "mean_high": "upper end, cut at 100",
}
"""The columns of :attr:`MushraResult.table`, likewise."""


@checked_dataclass(frozen=True)
class MushraPage:
    """One sample with all its conditions. ``stimuli`` is not for the listener's eyes.

    Attributes:
        number: from 1, in the order in which pages are heard.
        sample: what is heard.
        stimuli: letter → condition, in the order of the letters.
    """

    number: int
    sample: str
    stimuli: dict[str, str]


@checked_dataclass(frozen=True)
class MushraRating:
    """The scores of one page, and the seconds that it took, if measured. ``scores`` is by condition: not for the listener's eyes."""

    number: int
    scores: dict[str, float]
    seconds: float | None = None


@checked_dataclass(frozen=True)
class _Saved:
    samples: list[str]
    conditions: list[str]
    seed: int
    pages: list[MushraPage]
    ratings: list[MushraRating]


class MushraResult:
    """What the ratings so far say.

    Attributes:
        pages: pages of the test.
        rated: pages rated so far.
        table: one row per condition, with the columns of :data:`MUSHRA_SUMMARY_COLUMNS`. Without means while the test is
            unfinished: they would tell the listener which letters were which.
        low_references: pages on which the hidden reference was rated below 90; None while the test is unfinished, likewise.
    """

    def __init__(self, pages: int, conditions: Sequence[str], ratings: Sequence[MushraRating]) -> None:
        self.pages, self.rated = pages, len(ratings)
        scores = {condition: [rating.scores[condition] for rating in ratings] for condition in conditions}
        rows = [
            (name, name == conditions[0], len(found), *_mean_and_interval(found if self.is_finished else []))
            for name, found in scores.items()
        ]
        self.table = pd.DataFrame(rows, columns=list(MUSHRA_SUMMARY_COLUMNS))
        is_low = [score < LOWEST_FOR_REFERENCE for score in scores[conditions[0]]]
        self.low_references = sum(is_low) if self.is_finished else None

    @property
    def is_finished(self) -> bool:
        """Whether every page was rated."""
        return self.rated == self.pages

    @property
    def is_reliable(self) -> bool | None:
        """Whether the listener passes the rule of BS.1534-3; None while the test is unfinished."""
        return None if self.low_references is None else self.low_references <= MOST_LOW_SHARE * self.rated

    @property
    def text(self) -> str:
        """The outcome in words, with the rule that a listener must pass."""
        if not self.rated:
            return f"No rating yet, {self.pages} pages to go."
        if not self.is_finished:
            return f"Unfinished, {self.pages - self.rated} of {self.pages} pages to go. Means are withheld until the last one is rated."
        means = "Means and 95 % confidence intervals: " + "; ".join(map(_in_words, self.table.to_dict("records")))
        rule = f"the hidden reference was rated below {LOWEST_FOR_REFERENCE} on {self.low_references} of {self.rated} pages"
        limit = f"{MOST_LOW_SHARE:.0%} are accepted".replace("%", " %")
        if not self.is_reliable:
            return f"Not to be counted: {rule}, and {limit}. {means}."
        return f"{means}. Reliable: {rule}, and {limit}."

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"MushraResult({self.rated} of {self.pages} pages, {len(self.table)} conditions)"


def _mean_and_interval(scores: Sequence[float]) -> tuple[float, float, float]:
    if not scores:
        return math.nan, math.nan, math.nan
    mean = float(np.mean(scores))
    if len(scores) == 1:
        return mean, math.nan, math.nan
    from scipy.stats import t  # only where it is needed: the import takes a while

    half = float(t.ppf((1 + CONFIDENCE) / 2, len(scores) - 1)) * float(np.std(scores, ddof=1)) / math.sqrt(len(scores))
    return mean, max(0.0, mean - half), min(100.0, mean + half)  # a mean lies within the scale


def _in_words(row: Mapping[Any, Any]) -> str:
    interval = f" ({row['mean_low']:.0f} to {row['mean_high']:.0f})" if math.isfinite(row["mean_low"]) else ""
    return f"{row['condition']}{' (hidden reference)' if row['is_reference'] else ''} {row['mean']:.0f}{interval}"


class MushraTest(ListeningRun[MushraPage, MushraRating]):
    """One listener's run: its pages, and the ratings so far. The same arguments give the same pages.

    ::

        audio = with_anchor(audio)
        test = MushraTest(audio.samples, audio.conditions, seed=1)
        while (page := test.next_page) is not None:
            test.rate(page.number, {letter: score(...) for letter in page.stimuli})
        print(test.result())

    Args:
        samples: names of what is heard.
        conditions: what is rated. The first is the reference, which is also hidden among the others.
        seed: a whole number from 0; another one gives another order.

    Raises:
        InputError: no samples, fewer than two conditions or more than 26, a name twice, or a seed that is none.
    """

    _WORDS = Words("MUSHRA test", "page", "rating", "rated")
    _ADAPTER = TypeAdapter(_Saved)

    def __init__(self, samples: Sequence[str], conditions: Sequence[str], *, seed: int) -> None:
        heard, compared = checked_names("samples", samples), checked_names("conditions", conditions)
        seed = checked_whole("seed", seed, 0)
        if not 2 <= len(compared) <= len(string.ascii_uppercase):
            raise InputError(f"{len(compared)} conditions cannot be rated side by side; 2 to 26 can, and BS.1534 advises 12 at most.")
        super().__init__(heard, compared, seed, _draw(heard, compared, seed))

    @property
    def reference(self) -> str:
        """The condition that is both open and hidden."""
        return self.conditions[0]

    @property
    def pages(self) -> tuple[MushraPage, ...]:
        """All pages, in the order in which they are heard."""
        return self._items

    @property
    def ratings(self) -> tuple[MushraRating, ...]:
        """The ratings so far, by number of the page."""
        return self._in_order

    @property
    def next_page(self) -> MushraPage | None:
        """The first page without a rating; None if the test is finished."""
        return self._next

    def rate(self, number: int, scores: Mapping[str, float], seconds: float | None = None) -> None:
        """Note the scores of one page.

        Args:
            number: of the page.
            scores: letter → score from 0 to 100, one for each letter of the page.
            seconds: time taken, if measured.

        Raises:
            InputError: no such page, letters that are missing or unknown, scores off the scale, or a time that is none.
                Nothing was noted.
            LifecycleError: the page was rated already. The first rating stands.
        """
        page = self._item(number)
        if not isinstance(scores, Mapping) or set(scores) != set(page.stimuli):
            given = ", ".join(map(str, scores)) if isinstance(scores, Mapping) else repr(scores)
            raise InputError(f"page {page.number} needs one score for each of {', '.join(page.stimuli)}; got {given or 'none'}.")
        for letter, score in scores.items():
            if not is_number(score) or not 0 <= score <= 100:
                raise InputError(
                    f"the score of {letter} on page {page.number} is {score!r}; accepted are numbers from 0 (bad) to 100 (excellent)."
                )
        by_condition = {page.stimuli[letter]: float(score) for letter, score in scores.items()}
        ordered = {condition: by_condition[condition] for condition in self.conditions}
        self._keep(MushraRating(page.number, ordered, checked_seconds(seconds)))

    def result(self) -> MushraResult:
        """What the ratings say; it may be asked for at any time. Before the end it says how far the test is, and no means."""
        return MushraResult(len(self.pages), self.conditions, self.ratings)

    def table(self) -> pd.DataFrame:
        """One row per page and letter, with the columns of :data:`MUSHRA_COLUMNS`. Conditions are hidden until the test is finished."""
        rows = []
        for page in self.pages:
            rating = self._notes.get(page.number)
            for letter, condition in page.stimuli.items():
                score = rating.scores[condition] if rating else math.nan
                seconds = math.nan if rating is None or rating.seconds is None else rating.seconds
                rows.append((page.number, page.sample, letter, condition if self.is_finished else None, score, seconds))
        return pd.DataFrame(rows, columns=list(MUSHRA_COLUMNS)).astype({"condition": "string"})

    def _saved(self) -> _Saved:
        return _Saved(list(self.samples), list(self.conditions), self.seed, list(self.pages), list(self.ratings))

    @classmethod
    def _restored(cls, saved: _Saved) -> Self:
        test = cls(saved.samples, saved.conditions, seed=saved.seed)
        _check_pages(saved)
        test._items = tuple(saved.pages)
        for rating in saved.ratings:
            letters = {condition: letter for letter, condition in test._item(rating.number).stimuli.items()}
            by_letter = {letters.get(condition, condition): score for condition, score in rating.scores.items()}
            test.rate(rating.number, by_letter, rating.seconds)
        return test


def _draw(samples: tuple[str, ...], conditions: tuple[str, ...], seed: int) -> tuple[MushraPage, ...]:
    rng = random.Random(seed)
    heard = rng.sample(samples, len(samples))
    orders = (dict(zip(string.ascii_uppercase, rng.sample(conditions, len(conditions)), strict=False)) for _ in heard)
    return tuple(MushraPage(number, sample, order) for number, (sample, order) in enumerate(zip(heard, orders, strict=True), start=1))


def _check_pages(saved: _Saved) -> None:
    letters = set(string.ascii_uppercase[: len(saved.conditions)])
    for number, page in enumerate(saved.pages, start=1):
        fits = page.number == number and set(page.stimuli) == letters and set(page.stimuli.values()) == set(saved.conditions)
        if not fits or page.sample not in saved.samples:
            raise InputError(f"page {number} is {page}, which does not fit its samples and conditions.")
    if len(saved.pages) != len(saved.samples):
        raise InputError(f"it has {len(saved.pages)} pages for {len(saved.samples)} samples.")
