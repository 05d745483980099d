"""Structure of the charts: what is drawn, with which labels and units."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vgraph_lab.errors import FallbackReason
from vgraph_lab.graphs import CallKind, Descriptor, StatsSnapshot
from vgraph_lab.inspect.coverage import coverage_table
from vgraph_lab.inspect.ledger import LEDGER_PARTS
from vgraph_lab.views import plots
from vgraph_lab.views.style import COLOURS, REASON_COLOURS, look

A, B = Descriptor(1, 4), Descriptor(1, 8)


@pytest.fixture
def ax() -> Iterator[Axes]:
    with look():
        yield Figure().add_subplot()


def assert_no_text_overlaps(ax: Axes) -> None:
    """No two texts of a finished chart touch each other, and none leaves the figure."""
    figure = ax.figure
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    legend = ax.get_legend()
    ticks = [tick.label1 for axis in (ax.xaxis, ax.yaxis) for tick in axis._update_ticks()]  # those within the limits
    found = [*ax.texts, *ticks, ax._left_title, ax.xaxis.label, ax.yaxis.label]
    found += legend.get_texts() if legend else []
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in found if text.get_text() and text.get_visible()]
    for number, (words, box) in enumerate(boxes):
        assert box.x0 >= 0, f"{words!r} leaves the figure"
        assert box.y0 >= 0, f"{words!r} leaves the figure"
        assert box.x1 <= figure.bbox.x1, f"{words!r} leaves the figure"
        assert box.y1 <= figure.bbox.y1, f"{words!r} leaves the figure"
        for other, its_box in boxes[number + 1 :]:
            assert not box.shrunk(0.96, 0.8).overlaps(its_box.shrunk(0.96, 0.8)), f"{words!r} touches {other!r}"


def drawn(plot: Any, *data: Any, size_in: tuple[float, float]) -> Axes:
    with look():
        return plot(*data, ax=Figure(figsize=size_in).add_subplot())


def entries(**changes: list[object]) -> pd.DataFrame:
    columns = {
        "target": ["t.one", "t.one"],
        "descriptor": ["B1×T8", "B1×T4"],
        "reason": ["", ""],
        "charge_mib": [90.5, 0.001],
        "pool_delta_mib": [90.0, 0.0],
        "device_delta_mib": [1200.0, -3.0],
    }
    return pd.DataFrame({**columns, **changes})


def test_memory_without_a_device_of_its_own(ax: Axes) -> None:
    """On the CPU the device delta is missing, so two series are left and no legend names a third."""
    plots.memory_by_entry(entries(device_delta_mib=[float("nan")] * 2), ax=ax)
    assert len(ax.containers) == 2
    assert not any("device" in text.get_text() for text in ax.get_legend().get_texts())


def coverage() -> pd.DataFrame:
    counts = {
        CallKind("t.one", A, descriptor=A): 3,
        CallKind("t.one", Descriptor(1, 6), descriptor=B): 2,
        CallKind("t.one", Descriptor(1, 9), reason=FallbackReason.SHAPE_NOT_COVERED): 1,
        CallKind("t.one", Descriptor(1, 9), reason=FallbackReason.NOT_READY): 1,
        CallKind("t.one", A, descriptor=A, error="ReplayError"): 1,
    }
    return coverage_table(StatsSnapshot(counts))


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_memory_shows_three_figures_per_graph_in_capture_order(ax):
    assert plots.memory_by_entry(entries(), ax=ax) is ax
    assert [[bar.get_height() for bar in bars] for bars in ax.containers] == [[90.5, 0.001], [90.0, 0.0], [1200.0, -3.0]]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1. B1×T8", "2. B1×T4"]
    assert ax.get_ylabel() == "MiB"
    assert "share memory" in ax.get_xlabel()
    assert len(ax.get_legend().get_texts()) == 3
    assert texts(ax) == ["90.5", "< 0.01", "90", "0", "1,200", "−3"]


def test_memory_shows_why_a_graph_is_missing(ax):
    nothing = [90.5, float("nan")]
    table = entries(reason=["", "over_budget"], charge_mib=nothing, pool_delta_mib=nothing, device_delta_mib=nothing)
    plots.memory_by_entry(table, ax=ax)
    assert texts(ax) == ["90.5", "", "90.5", "", "90.5", "", "no graph:\nover_budget"]


def test_memory_names_targets_if_there_are_several(ax):
    plots.memory_by_entry(entries(target=["t.one", "t.two"]), ax=ax)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1. one\nB1×T8", "2. two\nB1×T4"]


def test_outcomes_add_up_and_have_their_colours(ax):
    assert plots.calls_by_outcome(coverage(), ax=ax) is ax
    (bars,) = ax.containers
    assert [bar.get_width() for bar in bars] == [3, 2, 1, 1, 1]
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["exact hit", "padded hit", "fallback:\nnot_ready", "fallback:\nshape_not_covered", "error: ReplayError"]
    assert texts(ax)[0] == "3 of 8 (38%)"
    with look():
        expected = Figure().add_subplot().barh(
            range(5),
            1,
            color=[COLOURS["exact hit"], COLOURS["padded hit"], REASON_COLOURS[FallbackReason.NOT_READY],
                   REASON_COLOURS[FallbackReason.SHAPE_NOT_COVERED], COLOURS["error"]],
        )  # fmt: skip
    assert [bar.get_facecolor() for bar in bars] == [bar.get_facecolor() for bar in expected]


def test_sizes_stack_outcomes_and_mark_captured_ones(ax):
    assert plots.calls_by_frames(coverage(), ax=ax) is ax
    tops = {bar.get_x() + bar.get_width() / 2: 0.0 for bars in ax.containers for bar in bars}
    for bars in ax.containers:
        for bar in bars:
            tops[bar.get_x() + bar.get_width() / 2] += bar.get_height()
    assert {round(frames): calls for frames, calls in tops.items()} == {4: 4, 6: 2, 9: 2}
    assert [line.get_xdata()[0] for line in ax.lines] == [4, 8]
    assert "frames" in ax.get_xlabel()


@pytest.mark.parametrize("plot", [plots.calls_by_outcome, plots.calls_by_frames])
def test_no_calls_give_an_empty_chart(ax, plot):
    plot(coverage_table(StatsSnapshot({})), ax=ax)
    assert ax.get_title("left")


def test_no_entries_give_an_empty_chart(ax):
    plots.memory_by_entry(entries().iloc[:0], ax=ax)
    assert ax.get_ylabel() == "MiB"


def test_pool_growth_has_a_line_per_graph(ax):
    table = entries(descriptor=["B1×T8", "B1×T4"], pool_before_mib=[0.0, 90.0], pool_after_mib=[90.0, 90.0])
    assert plots.pool_growth(table, ax=ax) is ax
    before, added = ax.containers
    assert [bar.get_width() for bar in before] == [0, 90]
    assert [(bar.get_x(), bar.get_width()) for bar in added] == [(0, 90), (90, 0)]
    assert texts(ax) == ["+90", ""]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["one  B1×T8", "one  B1×T4"]
    assert "MiB" in ax.get_xlabel()


def test_pool_growth_shows_why_a_graph_is_missing(ax):
    nothing = [90.0, float("nan")]
    plots.pool_growth(entries(reason=["", "over_budget"], pool_before_mib=[0.0, float("nan")], pool_after_mib=nothing), ax=ax)
    assert texts(ax) == ["+90", "no graph: over_budget"]


def test_pool_growth_of_nothing_is_empty(ax):
    plots.pool_growth(entries(pool_before_mib=[0.0, 0.0], pool_after_mib=[0.0, 0.0]).iloc[:0], ax=ax)
    assert ax.get_title("left")


def test_targets_have_a_bar_each_with_reasons(ax):
    two = coverage().assign(target="t.two", calls=1)
    assert plots.calls_by_target(pd.concat([coverage(), two]), ax=ax) is ax
    assert [label.get_text() for label in ax.get_yticklabels()] == ["t.one", "t.two"]
    widths = {container.get_label(): [bar.get_width() for bar in container] for container in ax.containers}
    assert widths == {
        "exact hit": [3, 1],
        "padded hit": [2, 1],
        "fallback: not_ready": [1, 1],
        "fallback: shape_not_covered": [1, 1],
        "error: ReplayError": [1, 1],
    }
    assert [text for text in texts(ax) if "graphs" in text] == ["5 of 8 in graphs", "2 of 5 in graphs"]


def test_no_calls_give_an_empty_target_chart(ax):
    plots.calls_by_target(coverage_table(StatsSnapshot({})), ax=ax)
    assert ax.get_title("left") == "Coverage per Target"


LIFE = pd.DataFrame(
    {
        "chunk": [0, 1, 2, 3],
        "ref_frames": [9, 0, 0, 0],
        "new_frames": [2, 5, 3, 0],
        "kept_before_frames": [0, 2, 4, 0],
        "padding_frames": [0, 0, 2, 0],
        "samples": [20, 50, 30, 0],
    }
)


def test_frames_of_each_chunk_lie_on_the_request_s_axis(ax):
    assert plots.frames_by_chunk(LIFE, ax=ax) is ax
    spans = {
        bars.get_label().split(",")[0]: [(round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width()) for bar in bars]
        for bars in ax.containers
    }
    assert spans == {
        "reference": [(0, -9, 9), (1, -9, 9), (2, -9, 9)],
        "kept frames": [(1, 0, 2), (2, 3, 4)],
        "new frames": [(0, 0, 2), (1, 2, 5), (2, 7, 3)],
        "padding up to the graph": [(2, 10, 2)],
    }
    assert [label.get_text() for label in ax.get_yticklabels()] == ["chunk 0", "chunk 1", "chunk 2"]


def test_a_request_that_was_refused_gives_an_empty_chart(ax):
    plots.frames_by_chunk(LIFE.iloc[3:], ax=ax)
    assert ax.get_title("left")


# ------------------------------------------------------------------------------------------------- many graphs


def many_entries(count: int) -> pd.DataFrame:
    sizes = [float(400 / (i + 1)) for i in range(count)]
    table = pd.DataFrame(
        {
            "target": [f"qwen3_tts.{'suffix' if i % 2 else 'icl_prefix'}" for i in range(count)],
            "descriptor": [f"B{i + 1}·icl 72→97" for i in range(count)],
            "reason": "",
            "charge_mib": sizes,
            "pool_delta_mib": sizes,
            "device_delta_mib": [size + 2 for size in sizes],
        }
    )
    table.loc[2, ["reason", "charge_mib", "pool_delta_mib", "device_delta_mib"]] = ["over_budget", None, None, None]
    return table


def test_many_graphs_lie_below_each_other_in_capture_order():
    ax = drawn(plots.memory_by_entry, many_entries(12), size_in=(8.6, 6))
    assert len(ax.containers) == 3
    assert [bar.get_width() for bar in ax.containers[0]][:2] == [400, 200]
    assert [label.get_text() for label in ax.get_yticklabels()][:2] == ["1. icl_prefix  B1·icl 72→97", "2. suffix  B2·icl 72→97"]
    assert ax.yaxis_inverted()
    assert ax.get_xlabel().startswith("MiB, in capture order")
    assert [text for text in texts(ax) if "no graph" in text] == ["no graph: over_budget"]
    assert_no_text_overlaps(ax)


def test_few_graphs_stand_and_their_names_do_not_collide():
    assert_no_text_overlaps(drawn(plots.memory_by_entry, many_entries(5), size_in=(8.6, 3.6)))


# --------------------------------------------------------------------------------------------------- estimates


def estimates(*pairs: tuple[float, float]) -> pd.DataFrame:
    estimated, measured = (np.array(side, dtype=float) for side in zip(*pairs, strict=True))
    names = [f"B{i + 1}×T4" for i in range(len(pairs))]
    table = pd.DataFrame({"target": "t.one", "descriptor": names, "estimated_mib": estimated, "measured_mib": measured})
    total = {"target": "", "descriptor": "total", "estimated_mib": np.nansum(estimated), "measured_mib": np.nansum(measured)}
    return pd.concat([table, pd.DataFrame([total])], ignore_index=True)


def test_estimates_stand_beside_what_was_measured():
    nan = float("nan")
    ax = drawn(plots.estimate_against_measured, estimates((110, 100), (5, 8), (3, 3), (2, nan), (nan, 9)), size_in=(8.6, 2.8))
    estimated, measured = ax.lines
    assert list(estimated.get_xdata())[:4] == [110, 5, 3, 2]
    assert list(measured.get_xdata())[:3] == [100, 8, 3]
    assert texts(ax) == ["+10", "−3", "", "not captured", "not estimated"]
    assert ax.get_title("left") == "Estimated 120 MiB, measured 120 MiB (+0.0%)"
    assert ax.get_xlabel().startswith("MiB")
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"one  B{i}×T4" for i in range(1, 6)]
    assert_no_text_overlaps(ax)


def test_an_estimate_that_was_too_low_says_so(ax):
    plots.estimate_against_measured(estimates((90, 100)), ax=ax)
    assert ax.get_title("left") == "Estimated 90 MiB, measured 100 MiB (−10.0%)"


# ------------------------------------------------------------------------------------------------------ ledger


def ledger(now: dict[str, float], before: dict[str, float] | None = None) -> pd.DataFrame:
    rows = []
    for part in (*LEDGER_PARTS, "total"):
        sizes = [float("nan") if d is None else d.get(part, 0.0) if part != "total" else sum(d.values()) for d in (before, now)]
        rows.append({"part": part, "before_mib": sizes[0], "now_mib": sizes[1]})
    return pd.DataFrame(rows)


BEFORE = {"weights": 200.0, "state": 300.0, "other": 20_000.0, "free": 100_000.0}
NOW = BEFORE | {"static buffers": 1.0, "pool": 599.0, "free": 99_400.0}


def test_the_ledger_is_one_bar_per_moment_and_a_magnified_one():
    ax = drawn(plots.memory_ledger, ledger(NOW, BEFORE), size_in=(8.6, 2.9))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["before capture", "now", "now, model and\ngraphs × 50"]
    rows: dict[int, list[tuple[str, float, float]]] = {}
    for patch in ax.patches:
        rows.setdefault(round(patch.get_y() + 0.3), []).append((patch.get_label(), patch.get_x(), patch.get_width()))
    assert [name for name, *_ in rows[1]] == list(LEDGER_PARTS)
    assert [name for name, *_ in rows[0]] == ["weights", "state", "other", "free"], "nothing is drawn for nothing"
    for parts in rows.values():  # each part begins where the one before ends
        ends = np.cumsum([width for *_, width in parts])
        assert [left for _, left, _ in parts] == pytest.approx([0, *ends[:-1]])
    assert sum(width for *_, width in rows[1]) == pytest.approx(120_500 / 1024)
    assert sum(width for *_, width in rows[2]) == pytest.approx(50 * 1100 / 1024)
    assert ax.get_xlabel() == "GiB of the device's memory (the magnified row is not to this scale)"
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels[:2] == ["weights: 200 MiB", "state: 300 MiB"]
    assert labels[3] == "pool: 0 → 599 MiB"
    assert_no_text_overlaps(ax)


def test_a_small_device_needs_no_magnified_row_and_no_gib():
    ax = drawn(plots.memory_ledger, ledger({"weights": 500.0, "pool": 300.0, "other": 100.0, "free": 100.0}), size_in=(8.6, 2.2))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["now"]
    assert ax.get_xlabel() == "MiB of the device's memory"
    assert len(ax.patches) == 4
    assert_no_text_overlaps(ax)


# ------------------------------------------------------------------------------------------------ coverage map


def cells(ax: Axes) -> dict[tuple[int, int], list[tuple[str, float]]]:
    """Filled rectangles by (column, row): colour and width, from the left."""
    found: dict[tuple[int, int], list[tuple[str, float]]] = {}
    for patch in ax.patches:
        if isinstance(patch, Rectangle) and patch.get_fill():
            place = round(patch.get_x() + patch.get_width() / 2), round(patch.get_y() + 0.43)
            found.setdefault(place, []).append((to_hex(patch.get_facecolor()), patch.get_width()))
    return found


def test_the_map_divides_each_cell_among_outcomes():
    counts = {
        CallKind("t", A, descriptor=A): 999,
        CallKind("t", A, reason=FallbackReason.NOT_READY): 1,
        CallKind("t", Descriptor(1, 6), descriptor=B): 2,
        CallKind("t", Descriptor(4, 6), reason=FallbackReason.SHAPE_NOT_COVERED): 12_345,
    }
    ax = drawn(plots.coverage_map, coverage_table(StatsSnapshot(counts)), size_in=(8.6, 2.8))
    found = cells(ax)
    assert {place: [colour for colour, _ in parts] for place, parts in found.items()} == {
        (0, 0): [COLOURS["exact hit"], REASON_COLOURS[FallbackReason.NOT_READY]],
        (1, 0): [COLOURS["padded hit"]],
        (1, 1): [REASON_COLOURS[FallbackReason.SHAPE_NOT_COVERED]],
    }
    widths = [width for _, width in found[0, 0]]
    assert sum(widths) == pytest.approx(0.92)
    assert widths[1] > 0.08, "a single fallback among many hits is seen"
    assert sorted(texts(ax)) == ["1.0k", "12k", "2"]
    outlines = [(p.get_x() + 0.48, p.get_y() + 0.46) for p in ax.patches if not p.get_fill()]
    assert [tuple(map(round, place)) for place in outlines] == [(0, 0), (2, 0)], "B1×T4 and B1×T8"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["4", "6", "8"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1", "4"]
    assert "frames" in ax.get_xlabel()
    assert "rows" in ax.get_ylabel()
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["exact hit", "padded hit", "fallback: not_ready", "fallback: shape_not_covered", "a graph that served"]
    assert_no_text_overlaps(ax)


def test_the_map_outlines_every_graph_of_the_entries():
    table = pd.DataFrame({"batch_size": [1, 2, 8], "frames": [4, 10, 4], "reason": ["", "", "over_budget"]})
    ax = drawn(plots.coverage_map, coverage(), table, size_in=(8.6, 2.8))
    assert len([p for p in ax.patches if not p.get_fill()]) == 2
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1", "2"], "there is no graph of 8 rows"
    assert_no_text_overlaps(ax)


def test_a_wide_map_has_no_numbers_and_few_labels():
    counts = {CallKind("t", Descriptor(1, frames), reason=FallbackReason.SHAPE_NOT_COVERED): frames for frames in range(1, 101)}
    ax = drawn(plots.coverage_map, coverage_table(StatsSnapshot(counts)), size_in=(8.6, 2.4))
    assert texts(ax) == []
    assert len(ax.patches) == 100
    assert 8 <= len(ax.get_xticklabels()) <= 16
    alphas = [patch.get_alpha() for patch in ax.patches]
    assert alphas == sorted(alphas)
    assert alphas[-1] == pytest.approx(1.0)
    assert_no_text_overlaps(ax)


def test_no_calls_give_an_empty_map(ax):
    plots.coverage_map(coverage_table(StatsSnapshot({})), ax=ax)
    assert ax.get_title("left") == "Calls by shape"
    assert ax.get_legend() is None


def test_calls_of_a_log_without_shapes_are_counted_in_the_title():
    table = pd.DataFrame(
        {
            "batch_size": pd.array([1, pd.NA, 2], dtype="Int64"),
            "frames": pd.array([4, pd.NA, 4], dtype="Int64"),
            "captured_batch_size": pd.array([1, pd.NA, pd.NA], dtype="Int64"),
            "captured_frames": pd.array([4, pd.NA, pd.NA], dtype="Int64"),
            "outcome": ["exact hit", "fallback", "observed"],
            "reason": ["", "their_own_word", ""],
            "calls": [1, 1500, 3],
        }
    )
    ax = drawn(plots.coverage_map, table, size_in=(8.6, 2.4))
    assert ax.get_title("left") == "Calls by shape (1,500 more without a shape)"
    assert {place: parts[0][0] for place, parts in cells(ax).items()} == {(0, 0): COLOURS["exact hit"], (0, 1): COLOURS["observed"]}
    bars = drawn(plots.calls_by_outcome, table, size_in=(8.6, 2.4))
    assert [to_hex(bar.get_facecolor()) for bar in bars.patches] == [
        COLOURS["exact hit"],
        REASON_COLOURS[FallbackReason.NO_GRAPH],
        COLOURS["observed"],
    ]


# ------------------------------------------------------------------------------------------------ over time


def test_calls_over_time_are_rates_stacked_by_outcome():
    table = pd.DataFrame(
        {
            "start_s": [0.0, 0.0, 2.0],
            "end_s": [2.0, 2.0, 7.0],
            "target": "t",
            "outcome": ["exact hit", "fallback", "fallback"],
            "reason": ["", "capacity", "capacity"],
            "calls": [4, 2, 20],
        }
    )
    ax = drawn(plots.hits_over_time, table, size_in=(8.6, 2.4))
    bars = [(to_hex(b.get_facecolor()), b.get_x(), b.get_width(), b.get_y(), b.get_height()) for b in ax.patches if b.get_height()]
    capacity = REASON_COLOURS[FallbackReason.CAPACITY]
    assert bars == [(COLOURS["exact hit"], 0, 2, 0, 2), (capacity, 0, 2, 2, 1), (capacity, 2, 5, 0, 4)]
    assert ax.get_title("left") == "Hits and fallbacks over time: 4 of 26 calls in graphs (15%)"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("time (s)", "calls per second")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["exact hit", "fallback: capacity"]
    assert_no_text_overlaps(ax)


def test_long_times_are_minutes_and_no_time_is_empty(ax):
    table = pd.DataFrame({"start_s": [0.0], "end_s": [600.0], "target": "t", "outcome": "padded hit", "reason": "", "calls": [60]})
    plots.hits_over_time(table, ax=ax)
    (bar,) = ax.patches
    assert (ax.get_xlabel(), bar.get_width(), bar.get_height(), bar.get_hatch()) == ("time (min)", 10, 0.1, "//")
    empty = drawn(plots.hits_over_time, table.iloc[:0], size_in=(8, 2))
    assert (empty.get_title("left"), len(empty.patches), empty.get_legend()) == ("No calls", 0, None)


# ------------------------------------------------------------------------------------------------ the pool


def segments(*rows: tuple[int, float, str, float, float, bool, str]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["segment", "segment_mib", "made_by", "offset_mib", "block_mib", "is_live", "held_by"])


def test_the_pool_is_drawn_to_scale_segment_after_segment():
    table = segments(
        (1, 2.0, "a.one B1×T8", 0.0, 0.5, True, "a.one B1×T8"),
        (1, 2.0, "a.one B1×T8", 0.5, 1.5, False, ""),
        (2, 20.0, "a.one B1×T8", 0.0, 20.0, False, ""),
        (3, 10.0, "a.two B2×T8", 0.0, 4.0, True, ""),
        (3, 10.0, "a.two B2×T8", 4.0, 6.0, True, "a.one B1×T8"),
    )
    ax = drawn(plots.pool_segments, table, size_in=(8.6, 2.2))
    blocks = [(p.get_x(), p.get_width(), to_hex(p.get_facecolor()), p.get_alpha() or 1) for p in ax.patches if p.get_fill()]
    pool, other = COLOURS["pool"], COLOURS["difference"]
    assert blocks == [(0, 0.5, pool, 1), (0.5, 1.5, pool, 0.22), (2, 20, pool, 0.22), (22, 4, other, 1), (26, 6, pool, 1)]
    outlines = [(p.get_x(), p.get_width()) for p in ax.patches if not p.get_fill()]
    assert outlines == [(0, 2), (2, 20), (22, 10)]
    assert texts(ax) == ["one\nB1×T8", "two\nB2×T8"]
    assert ax.get_title("left") == "The pool: 3 segments, 32 MiB"
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["captured outputs: 6.5 MiB", "live, no graph's output: 4 MiB", "shared by replays in turn: 21.5 MiB"]
    assert ax.get_xlim() == (0, 32)
    assert_no_text_overlaps(ax)


def test_segments_that_are_too_narrow_to_name_are_counted():
    rows = [(n, 400.0 if n == 1 else 2.0, f"a.one B1×T{n}", 0.0, 400.0 if n == 1 else 2.0, False, "") for n in range(1, 12)]
    ax = drawn(plots.pool_segments, segments(*rows), size_in=(8.6, 2.2))
    assert texts(ax) == ["one\nB1×T1", "10 more, too narrow to name"]
    assert_no_text_overlaps(ax)


def test_what_is_left_of_graphs_that_are_gone_says_so(ax):
    plots.pool_segments(segments((1, 2.0, "", 0.0, 2.0, True, "")), ax=ax)
    assert texts(ax) == ["graphs that\nare gone"]


def test_an_empty_pool_is_drawn_empty(ax):
    plots.pool_segments(segments(), ax=ax)
    assert (ax.get_title("left"), len(ax.patches), ax.get_legend()) == ("The pool: 0 segments, 0 MiB", 0, None)
