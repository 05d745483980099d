"""The front against brute force: every set of sizes tried, every call served one by one. And what is made of the front."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vgraph_lab.config import ConnectorConfig, StageConfig
from vgraph_lab.errors import ConfigError, InputError
from vgraph_lab.graphs import Descriptor
from vgraph_lab.inspect.planner import (
    FRONT_COLUMNS,
    PREDICTION_COLUMNS,
    FreeForm,
    Plan,
    StatelessGrid,
    StreamingGrid,
    plan_captures,
    search,
    traffic_table,
)
from vgraph_lab.inspect.planner.spaces import Space
from vgraph_lab.qwen3_tts.stream_routines import SuffixDescriptor

STATELESS, ICL, XVEC, SUFFIX = "qwen3_tts.stateless", "qwen3_tts.icl_prefix", "qwen3_tts.xvec_prefix", "qwen3_tts.suffix"
CONNECTOR = ConnectorConfig(codec_chunk_frames=8, initial_codec_chunk_frames=2, codec_left_context_frames=16)
STREAMING_CELLS = [(ICL, "", 2), (XVEC, "", 2)] + [(SUFFIX, f"{m} {k}", k + 8) for m in ("icl", "xvec") for k in (2, 10, 16)]
"""By hand for W = 16: 2, 10, 18 ≥ 16, and from there on 16 → 24."""

Graph = tuple[str, str, int, int]
Call = tuple[str, str, int, int, bool, int]
Costs = dict[Graph, tuple[int, int, int, int, int]]  # own bytes, shared bytes, capture µs, replay ns, eager ns


def table_of(calls: Iterable[Call]) -> pd.DataFrame:
    rows = [dict(zip(("target", "state", "batch_size", "frames", "may_pad_frames", "calls"), call, strict=True)) for call in calls]
    return traffic_table(pd.DataFrame(rows))


def costs_of(shapes: Iterable[Graph], draw: Callable[[Graph], tuple[int, int, int, int, int]]) -> Costs:
    return {shape: draw(shape) for shape in dict.fromkeys(shapes)}


def cost_frame(costs: Costs) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                **dict(zip(("target", "state", "batch_size", "frames"), shape, strict=True)),
                "charge_bytes": own + shared,
                "shared_bytes": shared,
                "capture_s": capture / 1e6,
                "replay_ms": replay / 1e6,
                "eager_ms": eager / 1e6,
            }
            for shape, (own, shared, capture, replay, eager) in costs.items()
        ]
    )


Figures = tuple[int, int, int, int, int]  # calls, audio frames, ns saved (more is better); bytes, capture µs (fewer is better)


def figures(calls: Sequence[Call], graphs: Sequence[Graph], costs: Costs) -> Figures:
    """What the graphs are worth, by the words of the contract alone."""
    hits = audio = saved = 0
    for target, state, rows, frames, may_pad, count in calls:
        fitting = [g for g in graphs if g[:2] == (target, state) and g[2] >= rows and (g[3] >= frames if may_pad else g[3] == frames)]
        if fitting:
            graph = min(fitting, key=lambda g: (g[2] * g[3], g[3]))
            hits += count
            audio += count * rows * (frames - (int(state.split()[1]) if target == SUFFIX else 0))
            saved += count * (costs[target, state, rows, frames][4] - costs[graph][3])
    own = sum(costs[g][0] for g in graphs)
    return hits, audio, saved, own + max((costs[g][1] for g in graphs), default=0), sum(costs[g][2] for g in graphs)


def better(figures: Figures, benefits: Sequence[int]) -> tuple[int, ...]:
    return (*(-figures[b] for b in benefits), *figures[3:])


def best_of(found: Iterable[Figures], benefits: Sequence[int]) -> set[tuple[int, ...]]:
    keys = {better(f, benefits) for f in found}
    return {k for k in keys if not any(o != k and all(a <= b for a, b in zip(o, k, strict=True)) for o in keys)}


def subsets(items: Iterable[Any]) -> Iterable[tuple[Any, ...]]:
    listed = list(items)
    return chain.from_iterable(combinations(listed, n) for n in range(len(listed) + 1))


def planned(plan: Plan, benefits: Sequence[int]) -> list[tuple[int, ...]]:
    front = plan.front
    told = zip(
        front["calls"],
        (front["audio_s"] / 0.08).round().astype(int),
        (front["saved_s"] * 1e9).round().astype(int),
        front["charge_bytes"],
        (front["capture_s"] * 1e6).round().astype(int),
        strict=True,
    )
    return [better(row, benefits) for row in told]


def check_predictions(plan: Plan, calls: Sequence[Call], costs: Costs) -> None:
    """Every point is what its own graphs are worth, padding included."""
    for row in range(len(plan.front)):
        point = plan.point(row)
        told = planned(plan, (0, 1, 2))[row]
        assert told == better(figures(calls, point.choice.graphs, costs), (0, 1, 2))
        predicted = plan.predict(point)
        assert list(predicted.columns) == list(PREDICTION_COLUMNS)
        assert predicted.loc[predicted["captured"] != "", "calls"].sum() == point.figures["calls"]


small = st.integers(0, 6)
some_costs = st.tuples(small, small, small, small, small)


@st.composite
def streamed(draw: st.DrawFn) -> tuple[list[Call], Costs]:
    calls: dict[tuple[Any, ...], Call] = {}
    for _ in range(draw(st.integers(1, 6))):
        target, state, frames = draw(st.sampled_from([*STREAMING_CELLS, (SUFFIX, "icl 5", 13), (ICL, "long reference", 2)]))
        kept = int(state.split()[1]) if target == SUFFIX else 0
        short = draw(st.integers(0, frames - kept - 1)) if draw(st.booleans()) else 0
        is_last = draw(st.booleans())  # a short chunk that is not the last one fits no graph
        call = (target, state, draw(st.integers(1, 4)), frames - short, is_last, draw(st.integers(1, 3)))
        calls[call[:5]] = call
    listed = list(calls.values())
    batch = sorted({c[2] for c in listed})
    shapes = [c[:4] for c in listed] + [(t, s, b, f) for t, s, f in STREAMING_CELLS for b in batch]
    return listed, costs_of(shapes, lambda _: draw(some_costs))


@settings(max_examples=40)
@given(streamed())
def test_streaming_front_is_the_brute_force_front(case: tuple[list[Call], Costs]) -> None:
    calls, costs = case
    plan = plan_captures(table_of(calls), cost_frame(costs), StreamingGrid(CONNECTOR, 16))
    batch = {c[2] for c in calls}
    sets = [
        [(t, s, b, f) for t, s, f in STREAMING_CELLS if t in targets for b in sizes]
        for targets in subsets((ICL, XVEC, SUFFIX))
        for sizes in subsets(batch)
    ]
    found = planned(plan, (0, 1, 2))
    assert len(found) == len(set(found))
    assert set(found) == best_of((figures(calls, graphs, costs) for graphs in sets), (0, 1, 2))
    check_predictions(plan, calls, costs)


@st.composite
def whole_utterances(draw: st.DrawFn) -> tuple[list[Call], Costs]:
    sizes = st.sampled_from([1, 3, 12, 24, 30, 150, 151])
    keys = draw(st.lists(st.tuples(st.integers(1, 3), sizes), min_size=1, max_size=6, unique=True))
    calls: list[Call] = [(STATELESS, "", rows, frames, True, draw(st.integers(1, 3))) for rows, frames in keys]
    frames = {24, 150, *(c[3] for c in calls)}
    return calls, costs_of([(STATELESS, "", b, f) for b in {c[2] for c in calls} for f in frames], lambda _: draw(some_costs))


GRID = StatelessGrid(chunk_frames=20, left_context_frames=4)


@settings(max_examples=40)
@given(whole_utterances())
def test_stateless_front_is_the_brute_force_front(case: tuple[list[Call], Costs]) -> None:
    calls, costs = case
    plan = plan_captures(table_of(calls), cost_frame(costs), GRID)
    more = {c[3] for c in calls} - {24, 150}
    sets = [
        [(STATELESS, "", b, f) for b in sizes for f in {24, 150, *frames}]
        for sizes in subsets({c[2] for c in calls})
        for frames in subsets(more)
    ]
    found = planned(plan, (0, 1, 2))
    assert set(found) == best_of((figures(calls, graphs, costs) for graphs in sets), (0, 1, 2))
    assert len(found) == len(set(found))
    check_predictions(plan, calls, costs)


def candidates(calls: Sequence[Call]) -> list[Graph]:
    """Rows × frames of each state; frames of last chunks only where they are the most."""
    found = []
    for group in {c[:2] for c in calls if c[1] != "long reference"}:
        own = [c for c in calls if c[:2] == group]
        frames = {c[3] for c in own if not c[4] or group[0] == STATELESS} | {max(c[3] for c in own)}
        found += [(*group, b, f) for b in {c[2] for c in own} for f in frames]
    return found


@st.composite
def for_any_graphs(draw: st.DrawFn) -> tuple[list[Call], Costs]:
    keys = draw(
        st.lists(
            st.one_of(
                st.tuples(st.just(STATELESS), st.just(""), st.integers(1, 2), st.sampled_from([2, 5, 9]), st.just(True)),
                st.tuples(st.just(SUFFIX), st.just("icl 2"), st.integers(1, 2), st.sampled_from([5, 10]), st.booleans()),
                st.tuples(st.just(ICL), st.just("long reference"), st.just(1), st.just(2), st.just(False)),
            ),
            min_size=1,
            max_size=5,
            unique=True,
        )
    )
    calls: list[Call] = [(*key, draw(st.integers(1, 3))) for key in keys]
    shapes = [c[:4] for c in calls] + candidates(calls)
    return calls, costs_of(shapes, lambda _: draw(some_costs))


WIDE_THEN_NARROW: list[Call] = [(SUFFIX, "icl 2", 2, 10, False, 1), (SUFFIX, "icl 2", 1, 5, False, 1), (SUFFIX, "icl 2", 2, 5, True, 1)]
"""With B2×T10 and B1×T5, the last of these calls is served by the first of these graphs."""


@settings(max_examples=40)
@given(for_any_graphs())
@example((WIDE_THEN_NARROW, dict.fromkeys(candidates(WIDE_THEN_NARROW), (1, 0, 1, 0, 0)) | {(SUFFIX, "icl 2", 2, 5): (9, 9, 9, 0, 0)}))
def test_free_front_is_the_brute_force_front(case: tuple[list[Call], Costs]) -> None:
    calls, costs = case
    graphs = candidates(calls)
    plan = plan_captures(table_of(calls), cost_frame(costs), FreeForm())
    found = planned(plan, (0, 1))
    assert set(found) == best_of((figures(calls, chosen, costs) for chosen in subsets(graphs)), (0, 1))
    assert len(found) == len(set(found))
    check_predictions(plan, calls, costs)


# ---------------------------------------------------------------------------------------------------- what is made of it

CALLS: list[Call] = [(STATELESS, "", 1, 20, True, 60), (STATELESS, "", 2, 24, True, 30), (STATELESS, "", 3, 150, True, 10)]


def affine(shape: Graph) -> tuple[int, int, int, int, int]:
    work = shape[2] * shape[3]
    return 2**20, work * 2**16, 500_000, work * 10_000, 1_000_000 + work * 10_000


def known_plan(calls: Sequence[Call] = tuple(CALLS), space: Space = GRID) -> Plan:
    shapes = [(STATELESS, "", b, f) for b in (1, 2, 3) for f in (20, 24, 150)]
    return plan_captures(table_of(calls), cost_frame(costs_of(shapes, affine)), space)


def test_the_front_is_documented_and_begins_with_nothing() -> None:
    front = known_plan().front
    assert list(front.columns) == list(FRONT_COLUMNS)
    first = front.iloc[0]
    assert (first["graphs"], first["calls"], first["charge_bytes"], first["capture_s"]) == (0, 0, 0, 0)
    assert pd.isna(first["wasted_share"])
    assert front["charge_bytes"].is_monotonic_increasing
    assert not front["has_modelled_costs"].any()


def test_figures_of_a_known_point() -> None:
    """Batch sizes 1 and 3 with buckets 24 and 150: 60 calls in B1×T24, 30 in B3×T24, 10 in B3×T150."""
    plan = known_plan(space=StatelessGrid(20, 4, batch_sizes=(1, 3), frame_sizes=(24,)))
    row = next(r for r, choice in enumerate(plan.choices) if choice.batch_sizes == (1, 3))
    point, f = plan.point(row), plan.point(row).figures
    assert (f["graphs"], f["calls"], f["coverage"], f["audio_coverage"]) == (4, 100, 1.0, 1.0)
    assert f["audio_s"] == pytest.approx((60 * 20 + 30 * 48 + 10 * 450) * 0.08)
    assert f["padding_frames"] == 60 * 4 + 30 * (72 - 48)
    assert f["wasted_share"] == pytest.approx(f["padding_frames"] / (60 * 24 + 30 * 72 + 10 * 450))
    assert f["charge_bytes"] == 4 * 2**20 + 450 * 2**16, "what is shared counts once"
    assert f["capture_s"] == 2.0
    assert f["saved_s"] == pytest.approx((100 * 1_000_000 - f["padding_frames"] * 10_000) / 1e9)
    assert point.descriptors() == {STATELESS: (Descriptor(1, 24), Descriptor(1, 150), Descriptor(3, 24), Descriptor(3, 150))}
    told = plan.explain(point).splitlines()
    assert told[0].startswith("batch sizes 1, 3; frame sizes 24, 150: 4 graphs, 100.0% of calls")
    assert told[1] == (
        "batch size 3 (2 graphs): serves 40 calls (40.0%); takes 20.75 MiB and 1.00 s of capture. "
        "Without it 40 calls (40.0%) would run eager, 0.0328 s more in all."
    )
    assert told[2] == (
        "batch size 1 (2 graphs): serves 60 calls (60.0%); takes 2.00 MiB and 1.00 s of capture. "
        "Without it 60 would use larger graphs, 0.0288 s more in all."
    )
    assert "bucket of 150 frames (2 graphs): serves 10 calls (10.0%)" in told[3]
    assert "It is always captured. Otherwise 10 calls (10.0%) would run eager" in told[3]
    assert told[-1].startswith("frame sizes tried: 24, 150. Sizes that occur and were not tried: 1")


def test_any_choice_can_be_evaluated() -> None:
    plan = known_plan()
    for row, choice in enumerate(plan.choices):
        told, on_front = plan.evaluate(choice).figures, plan.point(row).figures
        assert {k: v for k, v in told.items() if k != "wasted_share"} == {k: v for k, v in on_front.items() if k != "wasted_share"}
        assert told["wasted_share"] == pytest.approx(on_front["wasted_share"], nan_ok=True)
    what_if = plan.evaluate(GRID.choice(batch_sizes=(4,), frame_sizes=(60,)))
    assert what_if.choice.frame_sizes == (24, 60, 150)
    assert what_if.figures["has_modelled_costs"], "no row of the cost table has 4 rows"
    assert what_if.figures["charge_bytes"] == 3 * 2**20 + 600 * 2**16, "and the model is the line that made the table"
    assert what_if.figures["padding_frames"] == 90 * 96 + 10 * 600 - (60 * 20 + 30 * 48 + 10 * 450)
    assert "batch size 4 (3 graphs): serves 100 calls" in plan.explain(what_if)
    assert set(plan.predict(what_if)["captured"]) == {"B4×T24", "B4×T150"}


def test_choices_are_checked() -> None:
    space = StreamingGrid(CONNECTOR, 16)
    assert space.choice((2, 1), (SUFFIX, ICL)).targets == (ICL, SUFFIX)
    assert len(space.choice((2, 1)).graphs) == 2 * len(STREAMING_CELLS)
    assert space.choice((1,), ()).graphs == ()
    with pytest.raises(ConfigError, match=r"'qwen3_tts\.sufix' does not stream. Did you mean 'qwen3_tts\.suffix'"):
        space.choice((1,), ("qwen3_tts.sufix",))
    with pytest.raises(ConfigError, match="batch_sizes must be one or more whole numbers"):
        GRID.choice(())


def test_groups_larger_than_the_largest_size_are_pointed_out() -> None:
    plan = known_plan(space=StatelessGrid(20, 4, batch_sizes=(1,)))
    assert "40 calls with more rows than the largest batch size, 1: counted as eager" in plan.explain(plan.recommend())


def test_recommendations_keep_their_limits_and_are_the_best() -> None:
    plan = known_plan()
    front = plan.front
    for budget in sorted(set(front["charge_bytes"]))[1:]:
        got = plan.recommend(budget_bytes=int(budget)).figures
        assert got["charge_bytes"] <= budget
        assert got["saved_s"] == front.loc[front["charge_bytes"] <= budget, "saved_s"].max()
    most = plan.recommend(objective="calls").figures
    assert most["calls"] == 100
    assert most["charge_bytes"] == front.loc[front["calls"] == 100, "charge_bytes"].min()
    both = plan.recommend(max_capture_s=1.0, min_coverage=0.9, objective="audio").figures
    assert both["capture_s"] <= 1.0
    assert both["coverage"] >= 0.9


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"budget_bytes": 1000}, r"the budget is 0\.00 MiB, and the smallest set of graphs takes 11\.38 MiB\. Loosen it, or run without"),
        ({"max_capture_s": 0.5}, r"max_capture_s is 0\.5, and the quickest set of graphs takes 1\."),
        ({"budget_bytes": 12_000_000, "min_coverage": 1.0}, "each of these limits can be kept, but not all together"),
        ({"budget_bytes": -1}, "budget_bytes must be 0 or more"),
        ({"max_capture_s": float("nan")}, "max_capture_s must be 0 or more"),
        ({"min_coverage": 1.5}, "from 0 to 1"),
        ({"objective": "speed"}, "accepted are 'saved', 'calls', 'audio'"),
    ],
)
def test_limits_that_cannot_be_kept(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        known_plan().recommend(**limits)


def test_coverage_that_nothing_reaches() -> None:
    calls: list[Call] = [(XVEC, "", 1, 2, False, 3), (ICL, "long reference", 1, 2, False, 1)]
    costs = cost_frame(costs_of([(t, s, 1, f) for t, s, f in STREAMING_CELLS], affine) | costs_of([c[:4] for c in calls], affine))
    plan = plan_captures(table_of(calls), costs, StreamingGrid(CONNECTOR, 16))
    with pytest.raises(ConfigError, match=r"min_coverage is 0\.9, and no set of graphs covers more than 0\.75"):
        plan.recommend(min_coverage=0.9)
    only_long = plan_captures(table_of(calls[1:]), costs, StreamingGrid(CONNECTOR, 16))
    with pytest.raises(ConfigError, match="no graph that can be chosen would serve any of these calls"):
        only_long.recommend()


def test_graphs_that_only_lose_time_are_not_recommended() -> None:
    slow = costs_of([(STATELESS, "", b, f) for b in (1, 2, 3) for f in (20, 24, 150)], lambda _: (1, 1, 1, 9, 5))
    plan = plan_captures(table_of(CALLS), cost_frame(slow), GRID)
    assert str(plan.recommend()) == "no graphs: every call runs eager"
    assert plan.stage(plan.recommend())["vocoder_cudagraph"]["enforce_eager"] is True
    assert plan.recommend(min_coverage=0.1).figures["saved_s"] < 0


def test_yaml_is_written_once(tmp_path: Path) -> None:
    plan = known_plan()
    path = plan.write_yaml(plan.recommend(), tmp_path / "stage.yaml")
    assert StageConfig.from_yaml(path) == StageConfig.from_dict(plan.stage(plan.recommend()))
    before = path.read_text()
    with pytest.raises(InputError, match="exists, and nothing is written over"):
        plan.write_yaml(plan.recommend(), path)
    assert path.read_text() == before
    plan.write_yaml(plan.point(0), path, overwrite=True)
    assert StageConfig.from_yaml(path).graph_settings.enforce_eager
    with pytest.raises(InputError, match="cannot be written"):
        plan.write_yaml(plan.recommend(), tmp_path / "missing" / "stage.yaml")


def test_free_plans_have_descriptors_and_no_yaml() -> None:
    calls: list[Call] = [(SUFFIX, "icl 16", 2, 24, False, 5), (XVEC, "", 1, 2, False, 1)]
    plan = plan_captures(table_of(calls), cost_frame(costs_of([c[:4] for c in calls], affine)), FreeForm())
    best = plan.recommend(objective="calls")
    assert best.descriptors() == {SUFFIX: (SuffixDescriptor(2, 24, "icl", 16),), XVEC: (Descriptor(1, 2),)}
    assert "qwen3_tts.suffix B2·icl 16→24 (1 graph): serves 5 calls" in plan.explain(best)
    with pytest.raises(ConfigError, match="a plan in the free form has no YAML"):
        plan.stage(best)


def test_a_larger_graph_does_not_serve_what_needs_exactly_its_frames() -> None:
    calls: list[Call] = [(STATELESS, "", 1, 20, False, 5), (STATELESS, "", 1, 20, True, 3)]
    costs = cost_frame(costs_of([(STATELESS, "", 1, f) for f in (20, 30)], affine))
    plan = plan_captures(table_of(calls), costs, FreeForm(frame_sizes=(30,)))
    assert plan.front["calls"].tolist() == [0, 3]


# ---------------------------------------------------------------------------------------------------- bad input, and scale


@pytest.mark.parametrize(
    ("calls", "space", "error", "message"),
    [
        ([], GRID, InputError, "holds no calls"),
        ([(STATELESS, "", 1, 20, True, 0)], GRID, InputError, "holds no calls"),
        ([("qwen3_tts.statless", "", 1, 20, True, 1)], GRID, ConfigError, "Did you mean 'qwen3_tts.stateless'"),
        ([(XVEC, "", 1, 2, False, 1)], GRID, ConfigError, "plan for one kind of traffic at a time"),
        ([(STATELESS, "", 1, 20, False, 1)], GRID, InputError, "may be padded; the traffic says of some that they may not"),
        (CALLS, StatelessGrid(batch_sizes=()), ConfigError, r"batch_sizes must be one or more whole numbers from 1, got \[\]"),
        (CALLS, StatelessGrid(frame_sizes=(0,)), ConfigError, r"frame_sizes must be one or more whole numbers from 1, got \[0\]"),
        (CALLS, StatelessGrid(20, 4, batch_sizes=tuple(range(1, 14))), InputError, "Name at most 12"),
    ],
)
def test_traffic_that_cannot_be_planned(calls: Any, space: Space, error: type[Exception], message: str) -> None:
    columns = ["target", "state", "batch_size", "frames", "may_pad_frames", "calls"]
    costs = cost_frame(costs_of([(STATELESS, "", b, f) for b in (1, 2) for f in (20, 24)], affine))
    with pytest.raises(error, match=message):
        plan_captures(pd.DataFrame(calls, columns=columns), costs, space)


def test_rows_of_the_front_are_counted() -> None:
    with pytest.raises(InputError, match="the front has rows 0 to"):
        known_plan().point(10_000)


def test_too_many_sets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "LABEL_LIMIT", 3)
    with pytest.raises(InputError, match="Give fewer candidates"):
        known_plan()


def test_the_search_does_not_depend_on_the_number_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is counted in labels. A thousand times as many calls of the same shapes take the same work."""
    worked: list[int] = []
    real = search.extended

    def counted(labels: search.Ints, *rest: Any) -> search.Ints:
        worked.append(len(labels))
        return real(labels, *rest)

    monkeypatch.setattr(search, "extended", counted)
    known_plan()
    first, worked[:] = sum(worked), []
    known_plan([(*call[:5], call[5] * 1000) for call in CALLS])
    assert sum(worked) == first > 0


def test_many_sizes_stay_within_bounds() -> None:
    """64 batch sizes and 325 lengths: candidates are cut to what an exact search can do, and the plan says so."""
    calls: list[Call] = [(STATELESS, "", b, f, True, 1) for b in range(1, 65) for f in range(1, 326)]
    costs = cost_frame(costs_of([(STATELESS, "", b, f) for b in (1, 64) for f in (1, 325)], affine))
    plan = plan_captures(table_of(calls), costs, StatelessGrid())
    batch, frames = StatelessGrid().candidates(plan.demand.traffic)
    assert batch == (1, 2, 4, 8, 16, 32, 64)
    assert frames == tuple(range(25, 326, 25))
    assert ["not tried: 57" in plan.notes[0], "not tried: 312" in plan.notes[1]] == [True, True]
    assert plan.recommend(objective="calls").figures["coverage"] == 1.0
    assert plan.front.loc[plan.front["graphs"] > 0, "has_modelled_costs"].all()
