"""Which form of incremental decoding a model really runs, and what its state is; the one place that asks it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from vgraph_lab.qwen3_tts.incremental_path import IncrementalPath

__all__ = ["FormInUse", "form_facts", "form_in_use", "state_for_comparison"]


class FormInUse(NamedTuple):
    """A form of the same mathematics.

    Attributes:
        form: ``plain``, or another one that the settings know.
        reason: why it is another one than was asked for; None if it is that one.
        error_ratio: its error over the plain form's, where the model has checked that.
    """

    form: str
    reason: str | None = None
    error_ratio: float | None = None


def form_in_use(path: IncrementalPath) -> FormInUse:
    """What a path decodes with."""
    report = path.form_report
    return FormInUse(report.form, report.reason, report.error_ratio)


def form_facts(path: IncrementalPath | None) -> dict[str, Any]:
    """What a record says of the form: which one was asked for, which one decodes, and why that is another one.

    Args:
        path: as it is once its graphs are captured. None where nothing is decoded incrementally: then there is no form.
    """
    if path is None:
        return dict.fromkeys(("form_asked", "form", "form_reason", "form_error_ratio"))
    in_use = form_in_use(path)
    return {
        "form_asked": path.form_report.asked,
        "form": in_use.form,
        "form_reason": in_use.reason,
        "form_error_ratio": in_use.error_ratio,
    }


def state_for_comparison(path: IncrementalPath, request_id: str) -> Tensor:
    """A copy of what a live request's layers carry over, in one order whatever the form keeps it in."""
    return path.state_of(request_id)[1]
