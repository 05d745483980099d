"""Structure of the plan's chart: what is drawn, with which labels and units."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from vgraph_lab.inspect.planner import FRONT_COLUMNS, Choice, Plan, PlanPoint, StatelessGrid, plan_captures, traffic_table
from vgraph_lab.views import chart, plots
from vgraph_lab.views.style import COLOURS, INK, look

STATELESS = "qwen3_tts.stateless"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Six kinds of calls, and costs that make small graphs good and large ones dear."""
    traffic: dict[str, list[Any]] = {
        "target": [STATELESS] * 6,
        "batch_size": [1, 1, 2, 2, 3, 4],
        "frames": [20, 40, 30, 60, 24, 24],
        "calls": [9, 7, 5, 3, 2, 1],
    }
    shapes = [(1, 10), (4, 60)]
    costs = {
        "target": [STATELESS] * 2,
        "batch_size": [rows for rows, _ in shapes],
        "frames": [frames for _, frames in shapes],
        "charge_bytes": [2**20, 24 * 2**20],
        "shared_bytes": [2**19, 20 * 2**20],
        "capture_s": [0.1, 2.0],
        "replay_ms": [1.0, 40.0],
        "eager_ms": [5.0, 44.0],
    }
    return plan_captures(traffic_table(traffic), pd.DataFrame(costs), StatelessGrid(chunk_frames=20, left_context_frames=4))


def drawn(front: pd.DataFrame, *points: PlanPoint | None) -> Axes:
    with look():
        return plots.pareto_front(front, *points, ax=Figure(figsize=(8.6, 3.8)).add_subplot())


def dots(ax: Axes) -> list[PathCollection]:
    return [artist for artist in ax.collections if isinstance(artist, PathCollection)]


def words(ax: Axes) -> list[str]:
    legend = ax.get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def test_every_set_is_a_dot_in_mib_and_percent(plan: Plan) -> None:
    ax = drawn(plan.front)
    (cloud,) = dots(ax)
    places = {(round(float(x), 9), round(float(y), 9)) for x, y in np.asarray(cloud.get_offsets())}
    figures: list[Any] = plan.front.to_dict("records")
    expected = {(round(row["charge_bytes"] / 2**20, 9), round(100 * row["coverage"], 9)) for row in figures}
    assert places == expected
    assert "MiB" in ax.get_xlabel()
    assert "%" in ax.get_ylabel()


def test_the_line_is_the_best_coverage_for_the_memory(plan: Plan) -> None:
    (line,) = drawn(plan.front).lines
    for x, y in zip(np.asarray(line.get_xdata()), np.asarray(line.get_ydata()), strict=True):
        affordable = plan.front[plan.front["charge_bytes"] / 2**20 <= x + 1e-9]
        assert y <= 100 * affordable["coverage"].max() + 1e-9
    assert np.asarray(line.get_ydata()).max() == pytest.approx(100 * plan.front["coverage"].max())
    assert line.get_drawstyle() == "steps-post"


def test_colour_is_the_time_saved_and_has_a_scale(plan: Plan) -> None:
    ax = drawn(plan.front)
    (cloud,) = dots(ax)
    saved = plan.front.sort_values(["charge_bytes", "coverage"], kind="stable")["saved_share"]
    assert np.asarray(cloud.get_array()).tolist() == pytest.approx((100 * saved).tolist())
    assert [to_hex(cloud.get_cmap()(end)) for end in (0.0, 1.0)] == [INK, COLOURS["graph"]]
    figure = ax.figure
    (scale,) = [other for other in figure.axes if other is not ax]
    assert scale.get_ylabel() == "time saved against eager (%)"


@pytest.mark.parametrize("nothing", [0.0, float("nan")])
def test_without_times_there_is_no_scale(plan: Plan, nothing: float) -> None:
    ax = drawn(plan.front.assign(saved_share=nothing))
    assert ax.figure.axes == [ax]
    assert len(dots(ax)) == 1


def test_points_are_ringed_where_they_lie_and_named(plan: Plan) -> None:
    best, current = plan.recommend(min_coverage=0.5), plan.evaluate(StatelessGrid(20, 4).choice((1,)))
    ax = drawn(plan.front, best, current)
    _, its, other = dots(ax)
    for ring, point in ((its, current), (other, best)):
        assert np.asarray(ring.get_offsets())[0].tolist() == pytest.approx(
            [point.figures["charge_bytes"] / 2**20, 100 * point.figures["coverage"]]
        )
    names = words(ax)
    assert names[0] == "best for the memory"
    assert names[1] == f"current: batch size 1 ({current.figures['graphs']} graphs)"
    assert names[2].startswith("proposed: batch size")
    assert to_hex(np.asarray(its.get_edgecolor())[0]) != to_hex(np.asarray(other.get_edgecolor())[0])


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        (Choice(), "no graphs"),
        (StatelessGrid(20, 4).choice((1,)), "batch size 1 (2 graphs)"),
        (StatelessGrid(20, 4).choice((1, 2)), "batch sizes 1, 2 (4 graphs)"),
        (StatelessGrid(20, 4).choice(range(1, 8)), "14 graphs"),
    ],
    ids=["none", "one", "two", "many"],
)
def test_sizes_in_a_few_words(plan: Plan, choice: Choice, name: str) -> None:
    assert words(drawn(plan.front, plan.evaluate(choice)))[-1] == f"proposed: {name}"


def test_a_point_outside_the_front_is_within_the_limits(plan: Plan) -> None:
    current = plan.evaluate(StatelessGrid(20, 4).choice(range(1, 8)))
    assert current.figures["charge_bytes"] > plan.front["charge_bytes"].max()
    ax = drawn(plan.front, None, current)
    assert ax.get_xlim()[1] > current.figures["charge_bytes"] / 2**20


def test_an_empty_front_gives_an_empty_chart() -> None:
    ax = drawn(pd.DataFrame(columns=list(FRONT_COLUMNS)).astype({"charge_bytes": "int64", "coverage": "float64", "saved_share": "float64"}))
    assert ax.get_title("left") == "What coverage costs"


def test_no_text_touches_another_or_leaves_the_figure(plan: Plan) -> None:
    shown = chart(plots.pareto_front, plan.front, plan.recommend(min_coverage=0.5), plan.evaluate(Choice()), size_in=(8.6, 3.8))
    assert shown.description.startswith("What coverage costs. static buffers and pool (MiB)")
    figure: Any = shown.figure
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    found = []
    for axes in figure.axes:
        legend = axes.get_legend()
        ticks = [tick.label1 for tick in axes.xaxis._update_ticks()]  # those within the limits
        ticks += [tick.label2 if axes is not figure.axes[0] else tick.label1 for tick in axes.yaxis._update_ticks()]
        found += [*ticks, axes._left_title, axes.xaxis.label, axes.yaxis.label, *(legend.get_texts() if legend else [])]
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in found if text.get_text() and text.get_visible()]
    assert len(boxes) > 12
    for number, (text, box) in enumerate(boxes):
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
        for other, its_box in boxes[number + 1 :]:
            assert not box.shrunk(0.96, 0.8).overlaps(its_box.shrunk(0.96, 0.8)), f"{text!r} touches {other!r}"
