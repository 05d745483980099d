"""Notebook 04 as a person uses it: the coverage map by pointer and by keyboard, and the explorer."""

from __future__ import annotations

import re

from playwright.sync_api import expect

NOTEBOOK = "04_coverage_and_buckets.ipynb"


def test_cells_are_chosen_by_pointer_and_by_keyboard(opened):
    area = opened.output("picker = views.CoverageMap")
    grid = area.get_by_role("grid")
    opened.python("picker.selection = ()")
    expect(grid.locator("[aria-selected=true]")).to_have_count(0)

    choosable = grid.locator(".vgl-map-choosable")
    first, other = choosable.nth(0), choosable.nth(3)
    cells = [[int(cell.get_attribute("data-rows")), int(cell.get_attribute("data-frames"))] for cell in (first, other)]
    first.click()
    other.click()
    expect(grid.locator("[aria-selected=true]")).to_have_count(2)
    opened.wait_for_value("picker.selection", sorted(cells))
    assert opened.value("picker.selected()['calls'].sum().item()") == opened.value(
        "sum(picker.coverage.query('batch_size == @r and frames == @f')['calls'].sum().item() for r, f in picker.selection)"
    )
    opened.screenshots("04_coverage_map", area)

    other.click()  # once more: no longer chosen
    expect(grid.locator("[aria-selected=true]")).to_have_count(1)
    opened.page.keyboard.press("Escape")
    expect(grid.locator("[aria-selected=true]")).to_have_count(0)
    opened.wait_for_value("picker.selection", [])

    opened.page.keyboard.press("Control+Home")
    columns, rows = opened.value("picker.grid['columns']"), opened.value("picker.grid['rows']")
    expect(grid.locator(":focus")).to_have_attribute("aria-label", re.compile(f"^{rows[-1]} rows? × {columns[0]} frames?: "))
    opened.page.keyboard.press("Control+a")
    expect(grid.locator("[aria-selected=true]")).to_have_count(opened.value("len(picker.grid['cells'])"))
    opened.wait_for("len(picker.selection) == len(picker.grid['cells'])")


def test_sizes_are_tried_and_captured(opened):
    area = opened.output("explorer = views.CaptureExplorer")
    rows = area.get_by_label("Batch sizes")
    rows.fill("1")
    opened.wait_for("explorer.prediction.choice.batch_sizes == (1,)")
    before = opened.value("float(explorer.prediction.figures['coverage'])")
    tile = area.locator(".vgl-tile", has_text="Calls in graphs")
    expect(tile).to_contain_text(f"{100 * before:.1f}")

    rows.fill("1, 2, 4")
    opened.wait_for("explorer.prediction.choice.batch_sizes == (1, 2, 4)")
    after = opened.value("float(explorer.prediction.figures['coverage'])")
    assert after > before
    expect(tile).to_contain_text(f"{100 * after:.1f}")
    opened.screenshots("04_explorer_edited", area)

    rows.fill("1, two")  # refused while it is typed
    alert = area.get_by_role("alert")
    expect(alert).to_contain_text("'two' is not a whole number")
    opened.picture("04_explorer_message", area)
    assert opened.value("explorer.prediction.choice.batch_sizes") == [1, 2, 4]
    expect(tile).to_contain_text(f"{100 * after:.1f}")

    rows.fill("2, 4")
    expect(alert).to_have_count(0)
    opened.python("before = explorer.report")
    area.get_by_role("button", name="Capture", exact=True).click()
    expect(area.get_by_text(re.compile(r"(\d+) of \1 done"))).to_be_visible()
    opened.wait_for("explorer.report is not before and explorer.manager.is_ready")
    expect(area.get_by_text("Prediction and outcome")).to_be_visible()
    found = {row["figure"]: row for row in opened.value("explorer.comparison().to_dict('records')")}
    assert found["calls in graphs"]["difference"] == 0
    assert found["graphs"]["outcome"] == opened.value("explorer.report.captured")
    opened.screenshots("04_explorer", area)
    opened.python("explorer.close()")
