"""Structure of the charts: what is drawn, with which labels and units."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vgraph_lab.errors import FallbackReason, InputError
from vgraph_lab.graphs import CallKind, Descriptor, StatsSnapshot
from vgraph_lab.inspect.coverage import coverage_table
from vgraph_lab.views import plots
from vgraph_lab.views.style import COLOURS, REASON_COLOURS, look

A, B = Descriptor(1, 4), Descriptor(1, 8)


@pytest.fixture
def ax() -> Iterator[Axes]:
    with look():
        yield Figure().add_subplot()


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
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1. t.one\nB1×T8", "2. t.two\nB1×T4"]


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


def test_waveforms_has_three_lanes_on_one_time_axis(ax):
    eager = np.sin(np.arange(24_000) * 0.05) * 0.3
    assert plots.waveforms(eager, eager + 1e-5, 24_000, ax=ax) is ax
    assert len(ax.collections) == 3
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["eager\n±0.5", "graph\n±0.5", "difference\npeak −100.0 dBFS\n+90 dB amplified"]
    assert ax.get_xlim() == (0, 1)
    assert ax.get_xlabel() == "time (s)"


def test_waveforms_keeps_every_peak(ax):
    eager = np.zeros(100_000)
    eager[77_777] = -0.5
    plots.waveforms(eager, eager, 24_000, ax=ax)
    lane = ax.collections[0].get_paths()[0].vertices
    assert lane[:, 1].min() == pytest.approx(-1.0)  # −0.5 on a scale of ±0.5
    assert ax.get_yticklabels()[2].get_text() == "difference\nsilent: identical"


def test_waveforms_of_different_lengths_fail(ax):
    with pytest.raises(InputError, match="different lengths"):
        plots.waveforms(np.zeros(10), np.zeros(11), 24_000, ax=ax)


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


def test_lanes_can_have_names_of_their_own(ax):
    plots.waveforms(np.ones(100) * 0.5, np.ones(100) * 0.5, 24_000, ax=ax, names=("whole", "streamed"))
    assert [label.get_text() for label in ax.get_yticklabels()][:2] == ["whole\n±0.5", "streamed\n±0.5"]
