"""Notebook 01 as a person uses it: run all, change the sizes, press Capture."""

from __future__ import annotations


def test_the_capture_button_captures_anew(open_notebook):
    opened = open_notebook("01_capture.ipynb")
    opened.run_all()
    panel = opened.output("panel = CapturePanel")
    assert "3 of 3 done" in panel.inner_text()
    opened.python("first = panel.report")

    frames = panel.get_by_label("Frames per graph")
    frames.fill("50, sixty")
    panel.get_by_role("button", name="Capture").click()
    alert = panel.get_by_role("alert")
    alert.wait_for()
    assert "'sixty' is not a whole number" in alert.inner_text()
    assert opened.value("panel.report is first")

    frames.fill("50, 60")
    panel.get_by_role("button", name="Capture").click()
    panel.get_by_text("2 of 2 done").wait_for()
    assert alert.count() == 0
    opened.wait_for("panel.report is not first and panel.report is not None")
    assert opened.value("[outcome.descriptor.frames for outcome in panel.report.outcomes]") == [60, 50]
    assert opened.value("panel.manager.is_ready")
    opened.screenshots("01_capture_panel", panel)
    opened.python("panel.close()")
