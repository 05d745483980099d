"""The picture of the transitions: what is drawn, where, in which style. Truth: tables made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from vgraph_lab.qwen3_tts.transitions import TransitionTable
from vgraph_lab.views.style import COLOURS, INK, look
from vgraph_lab.views.transitions import transition_chart, transition_graph

DEFAULT = TransitionTable((1,), 25, 72)


@pytest.fixture
def ax() -> Iterator[Axes]:
    with look():
        yield Figure(figsize=(8.6, 4)).add_subplot()


def table(schedule: TransitionTable = DEFAULT, sizes: tuple[int, ...] = (1, 2), **changes: Any) -> pd.DataFrame:
    """Rows of both modes; ``changes`` maps a column to values by (mode, kept, new)."""
    rows = []
    for mode in ("xvec", "icl"):
        for t in schedule.transitions:
            row = {
                "mode": mode,
                "kept_frames": t.source,
                "new_frames": t.new_frames,
                "after_frames": t.target,
                "is_rolling": t.is_rolling,
                "is_scheduled": True,
                "captured_batch_sizes": sizes,
                "hits": 0,
                "misses": 0,
                "errors": 0,
            }
            key = (mode, t.source, t.new_frames)
            rows.append({**row, **{column: values[key] for column, values in changes.items() if key in values}})
    return pd.DataFrame(rows)


def arrows(ax: Axes) -> list[FancyArrowPatch]:
    return [patch for patch in ax.patches if isinstance(patch, FancyArrowPatch)]


def nodes(ax: Axes) -> list[FancyBboxPatch]:
    return [patch for patch in ax.patches if isinstance(patch, FancyBboxPatch)]


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def legend(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_states_are_nodes_and_chunks_are_edges(ax):
    assert transition_graph(table(), ax=ax) is ax
    assert len(arrows(ax)) == 10
    assert len(nodes(ax)) == 10  # start, 1, 26, 51 and 72, twice
    words = texts(ax)
    for state in ("start", "1", "26", "51", "72"):
        assert words.count(state) == 2
    assert words.count("+25") == 8
    assert words.count("+1") == 2
    assert [word for word in words if ":" in word] == ["x-vector: no reference", "ICL: behind a reference"]


def test_the_rolling_transition_is_a_loop(ax):
    transition_graph(table(), ax=ax)
    ends = [(arrow._path_original.vertices[0], arrow._path_original.vertices[-1]) for arrow in arrows(ax)]
    loops = [(start, end) for start, end in ends if start[0] == end[0]]
    assert len(loops) == 2
    assert all(start[1] > end[1] for start, end in loops)
    assert all(end[0] > start[0] for start, end in ends if start[0] != end[0])  # all others go to the right


def test_edges_without_graphs_look_different(ax):
    transition_graph(table(captured_batch_sizes={("icl", 72, 25): ()}), ax=ax)
    styles = [(to_hex(arrow.get_edgecolor()), arrow.get_linestyle()) for arrow in arrows(ax)]
    assert styles[:-1] == [(COLOURS["graph"], "-")] * 9
    assert styles[-1][0] == INK
    assert styles[-1][1] != "-"
    assert legend(ax) == ["has graphs for batch sizes 1, 2", "no graph: runs eager"]


def test_before_capture_nothing_has_graphs(ax):
    transition_graph(table(sizes=()), ax=ax)
    assert {to_hex(arrow.get_edgecolor()) for arrow in arrows(ax)} == {INK}
    assert legend(ax) == ["no graph: runs eager"]


def test_different_batch_sizes_are_told_at_the_edges(ax):
    transition_graph(table(captured_batch_sizes={("xvec", 1, 25): (1,)}), ax=ax)
    assert texts(ax).count("B 1") == 1
    assert texts(ax).count("B 1, 2") == 9
    assert legend(ax) == ["has graphs; B: their batch sizes"]


def test_calls_are_words_and_widths(ax):
    hits, misses = {("xvec", 0, 1): 1, ("xvec", 1, 25): 40}, {("xvec", 1, 25): 2}
    transition_graph(table(hits=hits, misses=misses, errors={("xvec", 26, 25): 3}), ax=ax)
    words = texts(ax)
    assert "1 hit" in words
    assert "40 hits\n2 eager" in words
    assert "3 failed" in words
    first, second, _, never, *_ = (arrow.get_linewidth() for arrow in arrows(ax))
    assert second > first > never


def test_first_chunks_of_several_sizes_have_lines_of_their_own(ax):
    transition_graph(table(TransitionTable((2, 4, 8, 16), 25, 72)), ax=ax)
    heights = {}
    for text in ax.texts:
        if text.get_text() in ("2", "4", "8", "16", "27", "29", "33", "41"):
            heights.setdefault(text.get_text(), []).append(text.xy[1])
    for first, second in (("2", "27"), ("4", "29"), ("8", "33"), ("16", "41")):
        assert heights[first] == heights[second]
    assert len({height for both in heights.values() for height in both}) == 8  # four lines in two lanes


def test_steps_off_the_schedule_are_told_in_words(ax):
    off = table(hits={("xvec", 1, 25): 1}, misses={("xvec", 1, 25): 2}).query("kept_frames == 1 and mode == 'xvec'")
    transition_graph(pd.concat([table(), off.assign(is_scheduled=False, new_frames=10)]), ax=ax)
    assert len(arrows(ax)) == 10
    assert ax.get_xlabel().endswith("off the schedule: 3 calls, 2 of them eager")


schedules = st.one_of(
    st.builds(
        TransitionTable,
        st.lists(st.integers(1, 30), min_size=1, max_size=5, unique=True).map(tuple),
        st.integers(3, 40),
        st.integers(3, 72),
    ),
    st.builds(
        TransitionTable, st.just((1,)), st.integers(3, 40), st.just(72), st.lists(st.integers(1, 40), min_size=1, max_size=8).map(tuple)
    ),
)


@settings(max_examples=40)
@given(schedule=schedules)
def test_every_schedule_has_one_arrow_per_transition_and_no_two_states_in_one_place(schedule):
    with look():
        axes = transition_graph(table(schedule), ax=Figure().add_subplot())
    assert len(arrows(axes)) == 2 * len(schedule.transitions)
    places = [tuple(node.get_bbox().p0.round(6)) for node in nodes(axes)]
    assert len(set(places)) == len(places)
    below, above = axes.get_ylim()
    left, right = axes.get_xlim()
    assert all(left < x < right and below < y < above for x, y in places)


def test_chart_grows_with_its_lines_and_says_what_it_shows():
    small, large = transition_chart(table()), transition_chart(table(TransitionTable((2, 4, 8, 16), 25, 72)))
    assert large.figure.get_figheight() > small.figure.get_figheight() + 3
    some = transition_chart(table(captured_batch_sizes={("icl", 1, 25): ()}))
    assert "ICL: behind a reference: 0 to 1, 1 to 26 (no graph), 26 to 51" in some.description
    assert "<svg" in some._repr_html_()
    assert INK not in some._repr_html_()  # the page's own text colour takes its place
