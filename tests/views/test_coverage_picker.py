"""The live coverage map without a browser: what it shows, what Python reads back, what it refuses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab.errors import FallbackReason, InputError
from vgraph_lab.graphs import Descriptor
from vgraph_lab.graphs.stats import CallKind, StatsSnapshot
from vgraph_lab.inspect import coverage_table
from vgraph_lab.views import CoverageMap
from vgraph_lab.views.style import COLOURS, REASON_COLOURS


def call(rows: int, frames: int, captured: tuple[int, int] | None, target: str = "a.b") -> CallKind:
    key = Descriptor(rows, frames)
    if captured is None:
        return CallKind(target, key, reason=FallbackReason.SHAPE_NOT_COVERED)
    return CallKind(target, key, descriptor=Descriptor(*captured))


def table(counts: dict[CallKind, int]) -> pd.DataFrame:
    return coverage_table(StatsSnapshot(counts))


SMALL = {call(1, 50, (1, 50)): 7, call(1, 48, (1, 50)): 3, call(2, 50, None): 2, call(2, 50, (2, 50), "c.d"): 1}


@pytest.fixture
def picker() -> CoverageMap:
    return CoverageMap(table(SMALL))


def cell_of(picker: CoverageMap, rows: int, frames: int) -> dict[str, Any]:
    grid = picker.grid
    (found,) = [c for c in grid["cells"] if (grid["rows"][c["row"]], grid["columns"][c["column"]]) == (rows, frames)]
    return found


def test_cells_are_what_became_of_calls(picker):
    grid = picker.grid
    assert (grid["rows"], grid["columns"], grid["calls"], grid["unplaced_calls"]) == ([1, 2], [48, 50], 13, 0)
    assert [c["name"] for c in grid["categories"]] == ["exact hit", "padded hit", "fallback: shape_not_covered"]
    assert [c["colour"] for c in grid["categories"]] == [
        COLOURS["exact hit"], COLOURS["padded hit"], REASON_COLOURS[FallbackReason.SHAPE_NOT_COVERED],
    ]  # fmt: skip
    assert len({c["pattern"] for c in grid["categories"]}) == 3  # told apart without colour
    both = cell_of(picker, 2, 50)
    assert [(part["category"], part["calls"], part["graphs"]) for part in both["parts"]] == [(0, 1, ["B2×T50"]), (2, 2, [])]
    assert (both["calls"], both["has_graph"]) == (3, True)
    padded = cell_of(picker, 1, 48)
    assert (padded["has_graph"], padded["padding_frames"]) == (False, 3 * 2)
    assert cell_of(picker, 1, 50)["strength"] == 1.0


def test_every_graph_is_outlined_with_entries():
    entries = pd.DataFrame({"batch_size": [4, 8], "frames": [99, 99], "reason": ["", "over_budget"]})
    picker = CoverageMap(table(SMALL), entries)
    assert [c["has_graph"] for c in picker.grid["cells"]] == [False, False, False, True]
    assert (cell_of(picker, 4, 99)["calls"], cell_of(picker, 4, 99)["strength"]) == (0, 0.0)
    picker.selection = [(4, 99)]  # a graph without calls may be chosen, and has no rows
    assert picker.selected().empty
    assert list(picker.selected().columns) == list(picker.coverage.columns)


def test_the_selection_is_read_back(picker):
    assert picker.selection == ()
    assert picker.selected().empty
    heard = []
    picker.observe(lambda change: heard.append(change.new), "selection")
    picker.selection = [[2, 50], (1, 48), (2, 50)]  # as JSON has it, in any order, twice
    assert picker.selection == ((1, 48), (2, 50))
    assert heard == [((1, 48), (2, 50))]
    found = picker.selected()
    assert found["calls"].sum() == 3 + 3
    assert set(zip(found["batch_size"], found["frames"], strict=True)) == {(1, 48), (2, 50)}


@pytest.mark.parametrize(
    "rows", [lambda table: table.to_numpy(), lambda table: list(table.to_numpy()), lambda table: table.values.tolist()]
)
def test_rows_of_a_table_are_chosen(picker, rows):
    picker.selection = rows(picker.coverage.query("batch_size == 1")[["batch_size", "frames"]])
    assert picker.selection == ((1, 48), (1, 50))
    assert {type(size) for cell in picker.selection for size in cell} == {int}  # as JSON needs it


def test_a_click_comes_as_json(picker):
    picker.set_state({"selection": [[2, 50]]})
    assert picker.selection == ((2, 50),)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([(1, 49)], r"\(1, 49\) is no cell of this map.*Near it are \(1, 48\)"),
        ([(1, 50), (3, 3)], r"\(3, 3\) is no cell"),
        ([5], "5 is no cell. A cell is a pair"),
        ([(1, 50.5)], "is no cell. A cell is a pair"),
        ([(True, 50)], "is no cell. A cell is a pair"),
        ([(1, 2, 3)], "is no cell. A cell is a pair"),
        ([np.array([1.0, 50.0])], "is no cell. A cell is a pair"),
        ([np.zeros((2, 2), int)], "is no cell. A cell is a pair"),
        ([(np.True_, 50)], "is no cell. A cell is a pair"),
        ([(10**400, 1)], r"is no cell of this map.*Near it are \(2, 50\)"),
        ([(0, 10**400)], "is no cell of this map.*Near it are"),
    ],
)
def test_what_is_no_cell_is_refused_and_changes_nothing(picker, given, message):
    picker.selection = [(1, 48)]
    with pytest.raises(InputError, match=message):
        picker.selection = given
    with pytest.raises(InputError, match=message):
        picker.set_state({"selection": given})  # as the browser does
    assert picker.selection == ((1, 48),)


def test_update_keeps_what_is_still_there(picker):
    picker.selection = [(1, 50), (2, 50)]
    picker.update(table({call(1, 50, (1, 50)): 9}))
    assert picker.selection == ((1, 50),)
    assert picker.selected()["calls"].tolist() == [9]
    with pytest.raises(InputError, match="the coverage table lacks frames"):
        picker.update(table(SMALL).drop(columns="frames"))
    with pytest.raises(InputError, match="the entries table lacks reason"):
        picker.update(table(SMALL), pd.DataFrame({"batch_size": [1], "frames": [1]}))
    with pytest.raises(InputError, match="the coverage table is NoneType"):
        picker.update(None)
    with pytest.raises(InputError, match="the entries table is list"):
        picker.update(table(SMALL), [])
    assert picker.grid["calls"] == 9
    picker.update(table({}))
    assert (picker.selection, picker.grid["cells"]) == ((), [])


def test_only_update_changes_the_grid(picker):
    with pytest.raises(Exception, match="read-only"):
        picker.grid = {}


def test_only_a_table_is_shown():
    with pytest.raises(InputError, match="the coverage table is NoneType"):
        CoverageMap(None)


def test_nothing_at_all_is_a_map_too():
    empty = CoverageMap(table({}))
    assert (empty.grid["rows"], empty.grid["calls"]) == ([], 0)
    assert "<svg" in empty._repr_mimebundle_()[0]["text/html"]
    with pytest.raises(InputError, match="The map is empty"):
        empty.selection = [(1, 1)]


def test_calls_without_a_shape_are_counted(picker):
    """Some logs tell no shapes."""
    unknown = table(SMALL).astype({"batch_size": "Int64", "frames": "Int64"})
    unknown.loc[0, "frames"] = pd.NA
    lost = int(unknown.loc[0, "calls"])
    picker.update(unknown)
    assert (picker.grid["calls"], picker.grid["unplaced_calls"]) == (13 - lost, lost)


def test_shows_itself_live_and_static(picker):
    bundle, _ = picker._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "Calls by shape" in bundle["text/html"]
    assert bundle["text/plain"] == repr(picker) == "CoverageMap(2 × 2 shapes, 13 calls, 0 cells chosen)"


@given(st.dictionaries(st.builds(call, st.integers(1, 30), st.integers(1, 400), st.none() | st.just((30, 400))), st.integers(1, 10**6)))
def test_no_call_is_lost(counts):
    coverage = table(counts)
    grid = CoverageMap(coverage)
    by_category: Counter[str] = Counter()
    for cell in grid.grid["cells"]:
        assert sum(part["calls"] for part in cell["parts"]) == cell["calls"]
        for part in cell["parts"]:
            by_category[grid.grid["categories"][part["category"]]["name"]] += part["calls"]
    assert by_category.total() == grid.grid["calls"] == sum(counts.values())
    grid.selection = tuple(grid._cells)
    assert len(grid.selected()) == len(coverage)
    grid.close()
