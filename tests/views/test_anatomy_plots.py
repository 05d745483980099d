"""Structure of the charts of where the time goes: what is drawn where, and no text over another."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from test_plots import assert_no_text_overlaps

from vgraph_lab.bench.compare_frames import KIND_COLUMNS, PART_COLUMNS, TIME_COLUMNS
from vgraph_lab.graphs.backends.base import GraphNode
from vgraph_lab.inspect import Anatomy
from vgraph_lab.inspect.anatomy_diff import anatomy_diff
from vgraph_lab.inspect.work_kinds import WORK_KINDS
from vgraph_lab.views import anatomy_plots as plots
from vgraph_lab.views.style import chart, look

TIMES = pd.DataFrame(
    [
        ("published-eager", 1, 16.9, 16.5, 17.5, 1.0, 0.2, 0.012, 9.0, 40.0),
        ("published-eager", 16, 49.7, 49.0, 51.0, 1.0, 2.8, 0.056, 9.0, 40.0),
        ("incremental-fast", 1, 0.97, 0.96, 0.99, 17.4, 0.2, 0.2, 0.5, 41.0),
        ("incremental-fast", 16, 5.8, 5.7, 6.0, 8.6, 2.8, 0.48, 0.6, 41.0),
    ],
    columns=list(TIME_COLUMNS),
)
KINDS = pd.DataFrame(
    [
        ("published-eager", "convolution", 6.0, 0.5),
        ("published-eager", "layout conversion", 4.0, 0.33),
        ("published-eager", "copy", 2.0, 0.17),
        ("incremental-fast", "own kernels", 0.9, 0.9),
        ("incremental-fast", "copy", 0.1, 0.1),
    ],
    columns=list(KIND_COLUMNS),
)
PARTS = pd.DataFrame(
    [(who, part, ms * factor, ms / 2) for who, factor in (("a", 2.0), ("b", 1.0)) for part, ms in (("block 0", 1.0), ("block 1", 3.0))],
    columns=list(PART_COLUMNS),
)


def drawn(plot: Any, table: pd.DataFrame, height_in: float = 2.8) -> Axes:
    with look():
        ax = Figure(figsize=(8.6, height_in)).add_subplot()
        assert plot(table, ax=ax) is ax
    return ax


def bars(ax: Axes, gid: str) -> list[tuple[float, float]]:
    return [(round(float(patch.get_x()), 6), round(float(patch.get_width()), 6)) for patch in ax.patches if patch.get_gid() == gid]


def lines(ax: Axes) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


def test_steady_times() -> None:
    ax = drawn(plots.steady_times, TIMES)
    assert lines(ax) == ["published-eager", "incremental-fast"]
    assert ax.get_xscale() == "log"
    floors = [line.get_xdata()[0] for line in ax.lines if line.get_gid() == "floor"]
    assert floors == [0.2, 2.8]
    assert [text.get_text() for text in ax.texts] == ["16.9", "0.97", "49.7", "5.80"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["1 stream", "16 streams", "floor"]
    marks = {line.get_gid(): list(line.get_xdata()) for line in ax.lines}
    assert (marks["B=1"], marks["B=16"]) == ([16.9, 0.97], [49.7, 5.8])
    assert_no_text_overlaps(ax)


def test_time_by_kind() -> None:
    ax = drawn(plots.time_by_kind, KINDS)
    assert lines(ax) == ["published-eager", "incremental-fast"]
    assert bars(ax, "convolution") == [(0.0, 6.0), (0.0, 0.0)]
    assert bars(ax, "own kernels") == [(6.0, 0.0), (0.0, 0.9)]
    assert bars(ax, "copy") == [(6.0, 2.0), (0.9, 0.1)]
    assert bars(ax, "layout conversion")[0] == (8.0, 4.0)
    assert {"12.0", "1.00", "6.00"} <= {text.get_text() for text in ax.texts}, "totals, and parts that are wide enough"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["convolution", "own kernels", "copy", "layout conversion"]
    assert_no_text_overlaps(ax)


def test_every_kind_has_a_colour_of_its_own() -> None:
    assert set(plots._KINDS) == set(WORK_KINDS)
    assert len({to_hex(colour) for colour in plots._KINDS.values()}) == len(WORK_KINDS)


def test_time_by_part() -> None:
    ax = drawn(plots.time_by_part, PARTS)
    assert lines(ax) == ["block 0", "block 1"]
    assert [width for _, width in bars(ax, "a")] == [2.0, 6.0]
    assert [width for _, width in bars(ax, "b")] == [1.0, 3.0]
    (floor,) = [found for found in ax.collections if found.get_gid() == "floor"]
    assert [segment[0][0] for segment in floor.get_segments()] == [0.5, 1.5]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b", "floor"]
    assert_no_text_overlaps(ax)


def test_nodes_side_by_side() -> None:
    def made(*names: str) -> Anatomy:
        return Anatomy("x", tuple(GraphNode(index, "kernel", name) for index, name in enumerate(names)))

    difference = anatomy_diff(made("convolve", "gemm"), made("gemm", "gemm", "gemm"))
    ax = drawn(plots.nodes_side_by_side, difference.kinds)
    assert lines(ax) == ["matrix product", "own kernels"]
    assert [width for _, width in bars(ax, "a")] == [1, 1]
    assert [width for _, width in bars(ax, "b")] == [3, 0]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a: 2 nodes", "b: 3 nodes"]
    assert_no_text_overlaps(ax)


@pytest.mark.parametrize(("plot", "table"), [(plots.time_by_kind, KINDS), (plots.time_by_part, PARTS), (plots.steady_times, TIMES)])
def test_nothing_to_draw(plot: Any, table: pd.DataFrame) -> None:
    drawn(plot, table.iloc[:0])
    assert "ms" in chart(plot, table).description
