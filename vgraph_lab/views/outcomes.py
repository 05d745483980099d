"""How outcomes of calls look, wherever they are drawn: name, order, colour, hatch."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from vgraph_lab.errors import FallbackReason

from .style import COLOURS, REASON_COLOURS

__all__ = ["categories", "colour_of", "hatch_of", "in_order"]

_ORDER = ("exact hit", "padded hit", "hit", "fallback", "error", "observed")
_REASONS = {str(reason): colour for reason, colour in REASON_COLOURS.items()}


def categories(coverage: pd.DataFrame) -> pd.Series[str]:
    """Outcome of each row, with the reason of a fallback or the exception of an error: ``fallback: shape_not_covered``."""
    outcome = coverage["outcome"].astype(str)
    return outcome.where(coverage["reason"] == "", outcome.str.cat(coverage["reason"], sep=": "))


def in_order(names: Iterable[str]) -> list[str]:
    """Hits, then fallbacks, then errors; each by name."""
    return sorted(names, key=lambda name: (_ORDER.index(name.partition(":")[0]), name))


def colour_of(category: str) -> str:
    """One colour per outcome, and of a fallback per reason. Reasons of other projects share that of ``no_graph``."""
    outcome, _, reason = category.partition(": ")
    return _REASONS.get(reason, REASON_COLOURS[FallbackReason.NO_GRAPH]) if outcome == "fallback" else COLOURS[outcome]


def hatch_of(category: str) -> str | None:
    """What tells padded hits from exact ones without colour."""
    return "//" if category == "padded hit" else None
