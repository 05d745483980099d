"""The blind test as a widget: waveforms under letters, switched without a gap, and the outcome at the end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import anywidget
import numpy as np
import pandas as pd
import traitlets as t

from vgraph_lab.errors import InputError, LifecycleError, VGraphLabError
from vgraph_lab.inspect.listening.abx import ABXResult, ABXTest
from vgraph_lab.inspect.listening.audio_set import AudioSet
from vgraph_lab.inspect.listening.mushra import MushraResult, MushraTest

from .ab_player import send_waveform
from .html import escape, script, style_sheet, styled
from .levels import shared_gain

__all__ = ["BlindTest", "Given"]

Given: TypeAlias = "str | Mapping[str, float]"
"""``"A"`` or ``"B"`` in an ABX test; letter → score from 0 to 100 in a MUSHRA test."""

logger = logging.getLogger(__name__)

_REFERENCE = "Reference"


class BlindTest(anywidget.AnyWidget):
    """Listen and answer, trial by trial; a notebook can do the same without a click.

    ::

        blind = BlindTest(audio, ABXTest(audio.samples, ("eager", "graph"), num_trials=16, seed=1))
        blind                       # a listener answers, or
        blind.answer("A")           # a program does
        print(blind.result())

    The browser gets waveforms under letters, cut to no length that would give them away, and nothing else: which
    condition a letter is stays in Python until the last answer. Whoever compares bytes in the browser's tools can of
    course see that X equals A; this protects a listener's judgement and not against cheating.

    The test may be answered elsewhere, too, in another widget or by ``test.answer``: this one goes on from there. A widget
    lives as long as the kernel and keeps its AudioSet, or until ``close()``, which also takes it out of the page.

    Args:
        audio_set: has the samples and conditions of the test.
        test: an :class:`~vgraph_lab.inspect.listening.abx.ABXTest`, or a
            :class:`~vgraph_lab.inspect.listening.mushra.MushraTest` whose first
            condition is the open reference, too. One that was begun goes on where it stopped.
        save_to: file in which the test is saved now and after each answer; None saves nothing.

    Attributes:
        message: what went wrong with the last answer; empty if nothing did.

    Raises:
        InputError: samples or conditions that the set does not have, something that is no test, or a file that holds
            another test.
    """

    _esm = script("audio_engine.js", "audio_canvas.js", "blind_test.js")
    _css = style_sheet("ab_player.css") + style_sheet("blind_test.css")

    _page = t.Dict().tag(sync=True)
    _sample_rate = t.Int(1).tag(sync=True)
    _gain = t.Float(1.0).tag(sync=True)
    message = t.Unicode("")

    def __init__(self, audio_set: AudioSet, test: ABXTest | MushraTest, *, save_to: str | Path | None = None) -> None:
        if not isinstance(audio_set, AudioSet) or not isinstance(test, (ABXTest, MushraTest)):
            raise InputError(
                f"BlindTest takes an AudioSet and an ABXTest or MushraTest, got {type(audio_set).__name__} and {type(test).__name__}."
            )
        waveforms = [audio_set.waveform(condition, sample) for condition in test.conditions for sample in test.samples]
        if save_to is not None:
            test.save(save_to)
        self._audio, self._test, self._save_to = audio_set, test, save_to
        super().__init__(_page=self._next_page(), _sample_rate=audio_set.sample_rate, _gain=shared_gain(waveforms))
        self.on_msg(self._on_message)

    # ------------------------------------------------------------------------------------------------------ results

    @property
    def test(self) -> ABXTest | MushraTest:
        """The test, with all answers so far."""
        return self._test

    @property
    def is_finished(self) -> bool:
        """Whether everything was answered."""
        return self._test.is_finished

    def result(self) -> ABXResult | MushraResult:
        """What the answers so far say."""
        return self._test.result()

    def table(self) -> pd.DataFrame:
        """One row per trial, or per page and letter; the truth is hidden until the end."""
        return self._test.table()

    def answer(self, given: Given, seconds: float | None = None) -> None:
        """Answer the next trial or page, as a click does.

        Args:
            given: ``"A"`` or ``"B"``, or a score for each letter.
            seconds: time taken, if measured.

        Raises:
            InputError: the answer does not fit; or it was noted and cannot be saved.
            LifecycleError: the test is finished.
        """
        self._refresh()
        number = self._page.get("number")
        if number is None:
            raise LifecycleError("the test is finished: read result(). Make another test to go on.")
        self._note(number, given, seconds)

    def _note(self, number: int, given: Given, seconds: float | None) -> None:
        try:
            if isinstance(self._test, MushraTest):
                self._test.rate(number, given, seconds)  # type: ignore[arg-type]  # it checks
            else:
                self._test.answer(number, given, seconds)  # type: ignore[arg-type]  # likewise
        finally:
            self._refresh()
        if self._save_to is not None:
            self._test.save(self._save_to)

    # --------------------------------------------------------------------------------------- what goes to the browser

    def _refresh(self) -> None:
        """Show what is next now, which somebody else may have changed by an answer."""
        self._page = self._next_page()

    def _next_page(self) -> dict[str, Any]:
        """What a listener may know of the next trial. Lengths are the longest of all, so that they say nothing."""
        test = self._test
        if isinstance(test, MushraTest):
            common: dict[str, Any] = {"mode": "mushra", "total": len(test.pages), "answered": len(test.ratings)}
        else:
            common = {"mode": "abx", "total": len(test.trials), "answered": len(test.answers)}
        following = test.next_page if isinstance(test, MushraTest) else test.next_trial
        if following is None:
            return {**common, "result": self._outcome()}
        length = max(len(self._audio.waveform(condition, following.sample)) for condition in test.conditions)
        labels = list(self._behind(following.number))
        return {**common, "number": following.number, "sample": following.sample, "length": length, "labels": labels}

    def _behind(self, number: int) -> dict[str, str]:
        """Letter → condition of a trial or page. This never leaves Python."""
        if isinstance(self._test, MushraTest):
            return {_REFERENCE: self._test.reference, **self._test.pages[number - 1].stimuli}
        trial = self._test.trials[number - 1]
        return {"A": trial.a, "B": trial.b, "X": trial.x_condition}

    def _outcome(self) -> dict[str, Any]:
        """The end, in words and as a table: only now may the browser know what was what."""
        result, table = self._test.result(), self._test.table()
        if isinstance(result, ABXResult):
            headline = f"{result.correct} of {result.trials} right, p = {result.p_value:.2g}"
            table = table.assign(is_correct=table["is_correct"].map({True: "right", False: "wrong"})).rename(
                columns={"is_correct": "outcome"}
            )
        else:
            headline = "All pages rated"
        rows = [
            ["" if pd.isna(cell) else f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row] for row in table.to_numpy()
        ]
        return {
            "headline": headline,
            "text": result.text.replace(" %", "\N{NO-BREAK SPACE}%"),
            "columns": list(table.columns),
            "rows": rows,
        }

    def _on_message(self, _: object, content: Any, buffers: object) -> None:
        facts = content if isinstance(content, dict) else {}
        kind, number = facts.get("kind"), facts.get("number")
        if kind == "fetch":
            self._refresh()
            if number is not None and number == self._page.get("number"):
                self._send_waveforms()
        elif kind == "answer":
            self.message = ""
            try:
                self._note(number, facts.get("given", ""), facts.get("seconds"))  # type: ignore[arg-type]  # it checks
            except VGraphLabError as error:  # told to the listener, and kept for the program
                self.message = str(error)
                self.send({"kind": "refused", "message": str(error)})
        else:
            logger.warning("BlindTest ignores a message that it does not know: %r", content)

    def _send_waveforms(self) -> None:
        """What is behind the letters of the page that is shown."""
        number, sample, length = self._page["number"], self._page["sample"], self._page["length"]
        for track, condition in enumerate(self._behind(number).values()):
            waveform = self._audio.waveform(condition, sample)
            send_waveform(self, np.pad(waveform, (0, length - len(waveform))), {"number": number, "track": track})

    # ------------------------------------------------------------------------------------------------------- static

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The live widget where there is one; elsewhere how far it is, and at the end the outcome with its table."""
        self._refresh()
        data, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        return {**data, "text/plain": repr(self), "text/html": self._static_html()}, metadata

    def _static_html(self) -> str:
        result = self._page.get("result")
        if result is None:
            text = f"{self._page['answered']} of {self._page['total']} answered. The test runs in a live notebook."
            return styled(
                f'<section class="vgl-ab"><strong>Blind test</strong><div class="vgl-quiet">{escape(text)}</div></section>'
            ).markup
        head = "".join(f'<th class="vgl-text" scope="col">{escape(column)}</th>' for column in result["columns"])
        body = "".join("<tr>" + "".join(f'<td class="vgl-text">{escape(cell)}</td>' for cell in row) + "</tr>" for row in result["rows"])
        return styled(
            f'<section class="vgl-ab"><strong>{escape(result["headline"])}</strong><p>{escape(result["text"])}</p>'
            f'<table class="vgl-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></section>'
        ).markup

    def __repr__(self) -> str:
        return f"BlindTest({self._test!r})"
