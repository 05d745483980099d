"""Progress while capturing: a bar on stderr in terminals, a widget in notebooks, nothing if switched off.

Neither is stored with a notebook's results: tqdm writes to stderr, and a widget's state lives in the front end. A
static page shows the widget's last state as plain HTML.
"""

from __future__ import annotations

import sys
from typing import Any

import ipywidgets as widgets
from tqdm import tqdm

from vgraph_lab.graphs.manager import ProgressCallback
from vgraph_lab.graphs.report import CaptureProgress

from .html import escape, styled

__all__ = ["ProgressWidget", "TerminalProgress", "capture_progress"]


def capture_progress(*, enabled: bool = True) -> ProgressCallback | None:
    """A progress callback for ``Manager.capture``: ``manager.capture(progress=capture_progress())``.

    Args:
        enabled: False gives None, which ``capture`` takes as silence.
    """
    if not enabled:
        return None
    if not _in_notebook():
        return TerminalProgress()
    from IPython.display import display

    shown = ProgressWidget()
    display(shown)  # type: ignore[no-untyped-call]  # IPython is untyped
    return shown


def _in_notebook() -> bool:
    """Whether this process is the kernel of a front end that can show widgets. A terminal IPython is not."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class TerminalProgress:
    """A tqdm bar on stderr, closed by the last report."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None

    def __call__(self, progress: CaptureProgress) -> None:
        """Show one report of ``Manager.capture``."""
        if self._bar is None:
            self._bar = tqdm(total=progress.total, unit="graph", desc="capture")
        self._bar.set_postfix_str(str(progress.descriptor or "done"), refresh=False)
        self._bar.update(progress.done - self._bar.n)
        self._bar.refresh()
        if progress.descriptor is None:
            self._bar.close()


class ProgressWidget:
    """A bar with a line of text. ``widget`` can be placed in a layout; displaying the object shows it, too."""

    def __init__(self) -> None:
        self._bar = widgets.IntProgress(value=0, max=1, layout=widgets.Layout(width="20em"))
        self._text = widgets.Label("")
        self.widget = widgets.HBox([self._bar, self._text])

    @property
    def text(self) -> str:
        """What the line says now."""
        return str(self._text.value)

    def __call__(self, progress: CaptureProgress) -> None:
        """Show one report of ``Manager.capture``."""
        self._bar.max, self._bar.value = max(1, progress.total), progress.done
        is_over = progress.descriptor is None
        self._bar.bar_style = "success" if is_over else ""
        self._text.value = (
            f"{progress.done} of {progress.total} done"
            if is_over
            else f"{progress.done + 1} of {progress.total}: {progress.target_id} {progress.descriptor} …"
        )

    def fail(self) -> None:
        """Mark the bar as stopped where it is; nothing happens if it has not started."""
        if self.text:
            self._bar.bar_style = "danger"
            self._text.value = f"stopped at {self._bar.value} of {self._bar.max}"

    def reset(self) -> None:
        """Back to nothing done."""
        self._bar.value, self._bar.bar_style, self._text.value = 0, "", ""

    def _static_html(self) -> str:
        share = 100 * self._bar.value / self._bar.max
        return styled(f'<div class="vgl-bar"><span style="width:{share:.0f}%"></span></div>{escape(self.text)}').markup

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        return {**self.widget._repr_mimebundle_(), "text/html": self._static_html(), "text/plain": self.text}
