"""One look for all charts, readable on light and on dark pages.

Every colour has a contrast of at least 3 to 1 with white and with near-black (WCAG's figure for graphics), and the
colours that appear side by side stay apart for colour-blind eyes. Text and axes are drawn in one ink; :class:`Chart`
replaces it by the text colour of the page, so that they are as readable as the text around them.

Nothing here changes global state: Figures are made without pyplot, and settings hold inside :func:`look` only.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vgraph_lab.errors import FallbackReason

from .html import escape, styled

__all__ = ["COLOURS", "INK", "RC", "REASON_COLOURS", "Chart", "chart", "look"]

INK = "#7c7f86"  # a grey that is readable on both kinds of page where nobody replaces it

COLOURS = {
    "eager": "#2878c8",
    "graph": "#d9730f",
    "difference": "#d1416a",
    "exact hit": "#2878c8",
    "padded hit": "#1d9a7f",
    "hit": "#2878c8",
    "error": "#c2273d",
    "observed": "#7d8590",
    "charge": "#2878c8",
    "pool": "#d9730f",
    "device": "#7d8590",
}

REASON_COLOURS = {
    FallbackReason.SHAPE_NOT_COVERED: "#d9730f",
    FallbackReason.STATE_NOT_COVERED: "#b27a00",
    FallbackReason.NO_GRAPH: "#7d8590",
    FallbackReason.DISABLED: "#8c7b6b",
    FallbackReason.FAILED_DESCRIPTOR: "#d1416a",
    FallbackReason.OVER_BUDGET: "#a44cc4",
    FallbackReason.CAPACITY: "#7a66d9",
    FallbackReason.DECLINED: "#6b8e23",
    FallbackReason.NESTED_CAPTURE: "#b0559a",
    FallbackReason.NOT_READY: "#a0692f",
}

RC: dict[Any, Any] = {
    "figure.facecolor": "none",
    "figure.constrained_layout.use": True,
    "savefig.facecolor": "none",
    "svg.fonttype": "path",
    "svg.hashsalt": "vgraph_lab",
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.facecolor": "none",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "hatch.color": "#ffffff",
    "hatch.linewidth": 1.0,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


def look() -> AbstractContextManager[None]:
    """A context in which matplotlib draws in this look."""
    return mpl.rc_context(RC)


class Chart:
    """A finished Figure that shows itself as inline SVG in the page's own text colour.

    Attributes:
        figure: the matplotlib Figure, to change or to save.
        description: what the chart says, for people who cannot see it.
    """

    def __init__(self, figure: Figure, description: str) -> None:
        self.figure, self.description = figure, description

    def to_svg(self) -> str:
        """One ``<svg>`` element without links to anything outside."""
        buffer = io.StringIO()
        with look():
            self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        svg = buffer.getvalue()
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL).replace(INK, "currentColor")
        return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(self.description)}" ', 1)

    def _repr_html_(self) -> str:
        return styled(f'<div class="vgl-chart">{self.to_svg()}</div>').markup

    def __repr__(self) -> str:
        return f"Chart({self.description!r})"


def chart(plot: Callable[..., Axes], *data: Any, size_in: tuple[float, float] = (8.6, 3.2)) -> Chart:
    """Draw one plot of :mod:`vgraph_lab.views.plots` on a Figure of its own.

    ::

        chart(plots.memory_by_entry, entries_table(manager))

    Args:
        plot: takes ``data`` and ``ax``, returns the Axes. Its title and labels become the description.
        data: what it draws.
        size_in: width and height in inches; pages narrower than that shrink it.
    """
    with look():
        figure = Figure(figsize=size_in)
        axes = plot(*data, ax=figure.add_subplot())
    labels = [axes.get_title("left"), axes.get_xlabel(), axes.get_ylabel()]
    return Chart(figure, ". ".join(label.replace("\n", " ") for label in labels if label))
