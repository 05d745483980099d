"""Structure of the charts of the vLLM v1 path: what is drawn where, and no text over another."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from test_plots import assert_no_text_overlaps

from vgraph_lab.inspect.v1_tables import DISPATCH_COLUMNS, SLICE_COLUMNS, STEP_COLUMNS, TRACE_COLUMNS, dispatch_table
from vgraph_lab.views import plots
from vgraph_lab.views.style import COLOURS, look
from vgraph_lab.vllm_v1 import CudagraphDispatcher, CUDAGraphMode, default_capture_sizes


def drawn(plot: Any, table: pd.DataFrame, height_in: float = 2.4) -> Axes:
    with look():
        ax = Figure(figsize=(8.6, height_in)).add_subplot()
        assert plot(table, ax=ax) is ax
    return ax


def named(ax: Axes, gid: str) -> list[Any]:
    return [artist for artist in (*ax.patches, *ax.lines) if artist.get_gid() == gid]


def boxes(ax: Axes, gid: str) -> list[tuple[float, float, float]]:
    """Left end, width and line of each rectangle of a kind."""
    return [
        (box.get_x(), box.get_width(), round(box.get_y() + box.get_height() / 2, 6)) for box in named(ax, gid) if isinstance(box, Rectangle)
    ]


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts if text.get_text()]


def legend(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def lines(ax: Axes) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


def handle_colours(ax: Axes) -> list[str]:
    return [to_hex(handle.get_facecolor()) for handle in ax.get_legend().legend_handles if isinstance(handle, Patch)]


# --------------------------------------------------------------------------------------------------------- the map


def dispatch(*sizes: int, mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE, most: int = 12, **fields: int) -> pd.DataFrame:
    return dispatch_table(CudagraphDispatcher(mode, sizes, **{"max_num_seqs": 4, **fields}), most)


def test_blocks_of_the_map_are_graphs_filled_as_far_as_batches_fill_them():
    ax = drawn(plots.dispatch_map, dispatch(1, 4, 8))
    assert lines(ax) == ["mixed", "decode"]
    assert boxes(ax, "graph") == [(1.5, 3, 0), (4.5, 4, 0), (0.5, 1, 1), (1.5, 3, 1)]
    (full,) = (stairs.get_data() for stairs in named(ax, "FULL") if len(stairs.get_data().values) == 3)
    assert list(full.edges) == [1.5, 2.5, 3.5, 4.5]
    assert list(full.values) == pytest.approx([0.7 + 0.6 * tokens / 4 for tokens in (2, 3, 4)])
    padding = [stairs.get_data() for stairs in named(ax, "padding")]
    assert [list(each.edges) for each in padding] == [[1.5, 2.5, 3.5, 4.5], [4.5, 5.5, 6.5, 7.5, 8.5], [1.5, 2.5, 3.5, 4.5]]
    (eager,) = (stairs.get_data() for stairs in named(ax, "NONE"))
    assert (eager.edges[0], eager.edges[-1]) == (8.5, 12.5)
    assert sorted(texts(ax)) == ["1", "4", "4", "8", "no graph"]
    assert legend(ax) == ["FULL: one graph", "PIECEWISE: graph with breaks", "NONE: eager", "padding, computed for nothing"]
    assert handle_colours(ax)[:3] == [COLOURS["graph"], COLOURS["padded hit"], COLOURS["eager"]]
    assert "tokens" in ax.get_xlabel()
    assert_no_text_overlaps(ax)


def test_decode_steps_of_several_tokens_are_as_wide_as_a_step():
    ax = drawn(plots.dispatch_map, dispatch(3, 9, uniform_decode_query_len=3))
    decode = [box[:2] for box in boxes(ax, "graph") if box[2] == 1]
    assert decode == [(0.5, 3), (3.5, 6)]
    assert [list(each.get_data().edges) for each in named(ax, "FULL")] == [[0.5, 3.5], [3.5, 6.5, 9.5]]
    assert_no_text_overlaps(ax)


def test_a_map_of_many_sizes_has_no_number_that_does_not_fit():
    ax = drawn(plots.dispatch_map, dispatch(*default_capture_sizes(256, 1024), most=700, max_num_seqs=256))
    assert len(boxes(ax, "graph")) == 35 + 50
    assert texts(ax) == ["no graph"]
    assert_no_text_overlaps(ax)


def test_a_map_without_graphs_is_eager():
    ax = drawn(plots.dispatch_map, dispatch(mode=CUDAGraphMode.NONE))
    assert boxes(ax, "graph") == []
    assert texts(ax) == ["no graph", "no graph"]
    assert legend(ax) == ["NONE: eager"]
    assert_no_text_overlaps(ax)


# ---------------------------------------------------------------------------------------------- segments and breaks


def steps(**graphs: list[int | str]) -> pd.DataFrame:
    """Nodes of segments and names of breaks, per graph."""
    rows = []
    for graph, parts in graphs.items():
        for number, part in enumerate(parts):
            is_break = isinstance(part, str)
            rows.append((f"v1.{graph} 8 tok", number, "break" if is_break else "segment", str(part), None if is_break else part, 0))
    return pd.DataFrame(rows, columns=list(STEP_COLUMNS)).astype({"nodes": "Int64"})


def test_segments_are_as_long_as_their_nodes_and_breaks_are_gaps():
    ax = drawn(plots.graph_steps, steps(full=[100], piecewise=[20, "attention", 30, "all_to_all", 4, "attention", 20]), 2.0)
    assert lines(ax) == ["v1.full\n8 tok", "v1.piecewise\n8 tok"]
    whole, *parts = boxes(ax, "segment")
    assert whole == (0, 100, 0)
    assert [width for _, width, _ in parts] == [20, 30, 4, 20]
    ends = [(left, left + width) for left, width, _ in parts]
    gaps = [(stop, start) for (_, stop), (start, _) in pairwise(ends)]
    assert [stop - start for start, stop in gaps] == pytest.approx([4.0] * 3)
    marks = named(ax, "break")
    assert [line.get_xdata()[0] for line in marks] == pytest.approx([(start + stop) / 2 for start, stop in gaps])
    assert marks[0].get_color() == marks[2].get_color() != marks[1].get_color()
    assert legend(ax) == ["break, 2 ×: attention", "break, 1 ×: all_to_all"]
    assert texts(ax) == ["100 nodes", "20 nodes", "30 nodes", "4", "20 nodes"]
    assert_no_text_overlaps(ax)


def test_many_breaks_leave_room_for_segments():
    ax = drawn(plots.graph_steps, steps(piecewise=[part for _ in range(40) for part in (12, "attention")]), 1.6)
    assert len(named(ax, "break")) == 40
    segments = sum(width for _, width, _ in boxes(ax, "segment"))
    assert segments / ax.get_xlim()[1] > 0.6
    assert legend(ax) == ["break, 40 ×: attention"]
    assert_no_text_overlaps(ax)


def test_a_graph_without_breaks_has_no_legend():
    ax = drawn(plots.graph_steps, steps(full=[7]), 1.4)
    assert ax.get_legend() is None
    assert_no_text_overlaps(ax)


# ------------------------------------------------------------------------------------------------------------ slices


def slices(*pieces: tuple[int, int | None, int, int], cut: tuple[int, ...] = ()) -> pd.DataFrame:
    rows = [(u, "padding" if r is None else "request", r, a, b, b - a, r in cut) for u, r, a, b in pieces]
    return pd.DataFrame(rows, columns=list(SLICE_COLUMNS)).astype({"request": "Int64"})


def test_requests_are_bars_of_tokens_cut_at_slice_borders():
    ax = drawn(plots.ubatch_slices, slices((0, 0, 0, 4), (0, 1, 4, 8), (1, 1, 8, 9), (1, 2, 9, 12), (1, None, 12, 16), cut=(1,)))
    assert lines(ax) == ["request 0", "request 1", "request 2", "padding"]
    assert boxes(ax, "request") == [(0, 4, 0), (4, 4, 1), (8, 1, 1), (9, 3, 2)]
    assert [to_hex(bar.get_facecolor()) for bar in named(ax, "request")] == [COLOURS["eager"]] * 2 + [COLOURS["graph"]] * 2
    assert boxes(ax, "padding") == [(12, 4, 3)]
    assert not named(ax, "padding")[0].get_fill()
    (cut,) = named(ax, "cut")
    assert list(cut.get_xdata()) == [8, 8]
    assert ax.get_title("left") == "2 micro-batches; 1 request lies on a cut"
    assert texts(ax) == ["4", "4", "1", "3", "4", "micro-batch 0: 8 tokens", "micro-batch 1: 8 tokens"]
    assert_no_text_overlaps(ax)


def test_a_part_that_is_all_padding_is_said():
    ax = drawn(plots.ubatch_slices, slices((0, 0, 0, 3), (0, None, 3, 4), (1, None, 4, 8)), 1.6)
    assert ax.get_title("left") == "2 micro-batches; micro-batch 1 has padding only"
    assert_no_text_overlaps(ax)


def test_many_requests_have_few_names_and_small_pieces_no_numbers():
    ax = drawn(plots.ubatch_slices, slices(*((n // 40, n, n, n + 1) for n in range(120))), 4.0)
    assert len(boxes(ax, "request")) == 120
    assert 10 < len(lines(ax)) <= 24
    assert len(named(ax, "cut")) == 2
    assert texts(ax) == [f"micro-batch {n}: 40 tokens" for n in range(3)]
    assert_no_text_overlaps(ax)


# ---------------------------------------------------------------------------------------------------------- timeline


def trace(*spans: tuple[int, int, int, str, str, int | None], unit_s: float = 1e-3) -> pd.DataFrame:
    rows = [(5 + a * unit_s, 5 + b * unit_s, *rest) for a, b, *rest in spans]
    return pd.DataFrame(rows, columns=list(TRACE_COLUMNS)).astype({"hands_to": "Int64"})


SPANS = trace(
    (0, 10, 0, "host", "turn", 1),
    (0, 10, 0, "compute", "compute", None),
    (10, 30, 0, "comm", "all-to-all", None),
    (12, 20, 1, "host", "turn", None),
    (12, 25, 1, "compute", "experts", None),
    (21, 24, 1, "host", "turn", 0),
    (25, 40, 0, "host", "turn", None),
)


def test_threads_and_streams_have_lines_and_turns_are_handed_over():
    ax = drawn(plots.ubatch_timeline, SPANS)
    assert lines(ax) == ["thread 0", "thread 1", "compute", "communication"]
    host = [(pytest.approx(a), pytest.approx(b), c) for a, b, c in [(0, 10, 0), (12, 8, 1), (21, 3, 1), (25, 15, 0)]]
    assert boxes(ax, "host") == host
    assert boxes(ax, "compute") == [(pytest.approx(0, abs=1e-9), pytest.approx(10), 2), (pytest.approx(12), pytest.approx(13), 2)]
    assert boxes(ax, "comm") == [(pytest.approx(10), pytest.approx(20), 3)]
    colours = [to_hex(bar.get_facecolor()) for bar in named(ax, "compute")]
    assert colours == [COLOURS["eager"], COLOURS["graph"]]
    arrows = [arrow._posA_posB for arrow in named(ax, "hand-over")]
    assert arrows == [
        [(pytest.approx(10), 0), (pytest.approx(12), 1)],
        [(pytest.approx(24), 1), (pytest.approx(25), 0)],
    ]
    assert ax.get_title("left") == "Who ran when: 2 hand-overs"
    assert ax.get_xlabel() == "ms since the first turn"
    assert texts(ax) == ["all-to-all", "experts"]
    assert [bar.get_alpha() for bar in named(ax, "compute")] == [0.5, 1.0]  # work without a name stands back
    assert legend(ax) == ["micro-batch 0", "micro-batch 1", "hand-over from thread to thread"]
    assert_no_text_overlaps(ax)


def test_streams_alone_have_no_hand_overs_and_short_times_are_microseconds():
    short = trace((0, 3, 0, "compute", "compute", None), (3, 9, 0, "comm", "all-to-all", None), unit_s=1e-5)
    ax = drawn(plots.ubatch_timeline, short)
    assert lines(ax) == ["compute", "communication"]
    assert named(ax, "hand-over") == []
    assert ax.get_xlabel() == "µs since the first turn"
    assert boxes(ax, "comm") == [(pytest.approx(30), pytest.approx(60), 1)]
    assert legend(ax) == ["micro-batch 0"]
    assert_no_text_overlaps(ax)


@pytest.mark.parametrize(
    ("plot", "columns"),
    [
        (plots.dispatch_map, DISPATCH_COLUMNS),
        (plots.graph_steps, STEP_COLUMNS),
        (plots.ubatch_slices, SLICE_COLUMNS),
        (plots.ubatch_timeline, TRACE_COLUMNS),
    ],
)
def test_nothing_gives_an_empty_chart(plot, columns):
    ax = drawn(plot, pd.DataFrame([], columns=list(columns)))
    assert ax.get_title("left")
    assert ax.get_legend() is None
