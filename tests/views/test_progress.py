"""Progress: each report is shown, and nothing is stored."""

from __future__ import annotations

import sys
import types

import pytest

from vgraph_lab.graphs import CaptureProgress, Descriptor
from vgraph_lab.views.progress import ProgressWidget, TerminalProgress, capture_progress

REPORTS = [
    CaptureProgress(0, 2, "t.one", Descriptor(1, 8)),
    CaptureProgress(1, 2, "t.one", Descriptor(1, 4)),
    CaptureProgress(2, 2, None, None),
]


def test_terminals_get_a_bar_on_stderr(capsys):
    progress = capture_progress()
    assert isinstance(progress, TerminalProgress)
    for report in REPORTS:
        progress(report)
    out, err = capsys.readouterr()
    assert out == ""
    assert "B1×T8" in err
    assert "2/2" in err
    assert err.endswith("\n")  # closed


def test_off_means_nothing():
    assert capture_progress(enabled=False) is None


def test_a_notebook_gets_a_displayed_widget(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    fake = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=object()), display=sys.modules["IPython"].display)
    monkeypatch.setitem(sys.modules, "IPython", fake)
    progress = capture_progress()
    assert isinstance(progress, ProgressWidget)
    assert shown == [progress]


def test_a_terminal_ipython_is_no_notebook(monkeypatch):
    fake = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", fake)
    assert isinstance(capture_progress(), TerminalProgress)


def test_widget_says_what_is_being_captured():
    progress = ProgressWidget()
    texts = []
    for report in REPORTS:
        progress(report)
        texts.append(progress.text)
    assert texts == ["1 of 2: t.one B1×T8 …", "2 of 2: t.one B1×T4 …", "2 of 2 done"]
    assert "width:100%" in progress._repr_mimebundle_()["text/html"]


@pytest.mark.parametrize("reports", [0, 1])
def test_a_stopped_bar_says_so_if_it_had_started(reports):
    progress = ProgressWidget()
    for report in REPORTS[:reports]:
        progress(report)
    progress.fail()
    assert progress.text == ("stopped at 0 of 2" if reports else "")
    progress.reset()
    assert progress.text == ""


def test_bundle_has_a_live_view_and_a_static_one():
    bundle = ProgressWidget()._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"} <= set(bundle)
