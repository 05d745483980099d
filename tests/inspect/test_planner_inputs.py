"""Traffic and costs: what is read, what is refused, what is measured and what is modelled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from contracts.toy import toy_target
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab.config import ConnectorConfig
from vgraph_lab.errors import CaptureError, ConfigError, FallbackReason, InputError
from vgraph_lab.graphs import CallKind, Descriptor, StatsSnapshot, create_backend
from vgraph_lab.inspect.coverage import coverage_table
from vgraph_lab.inspect.entries import entries_table
from vgraph_lab.inspect.planner import (
    COST_COLUMNS,
    TRAFFIC_COLUMNS,
    complete_costs,
    cost_table,
    costs_of_entries,
    measure_costs,
    read_traffic_csv,
    replay_traffic,
    traffic_of,
    traffic_of_calls,
    traffic_table,
)
from vgraph_lab.inspect.planner.shapes import Shape, descriptor_of, shape_of
from vgraph_lab.inspect.planner.traffic import check_traffic, new_frames
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.settings import TARGET_IDS
from vgraph_lab.qwen3_tts.stateless import stateless_target
from vgraph_lab.qwen3_tts.stream_routines import SuffixDescriptor
from vgraph_lab.qwen3_tts.transitions import TransitionTable

STATELESS, ICL, XVEC, SUFFIX = "qwen3_tts.stateless", "qwen3_tts.icl_prefix", "qwen3_tts.xvec_prefix", "qwen3_tts.suffix"
SCHEDULE = TransitionTable.from_connector(ConnectorConfig(), 72)  # 1, 26, 51, 76, then 72 → 97

# ---------------------------------------------------------------------------------------------------- traffic


@st.composite
def counted(draw: st.DrawFn) -> CallKind:
    """A call of any Target: hit exactly, hit by a larger graph, or missed for any reason."""
    rows, kept, new = draw(st.integers(1, 4)), draw(st.sampled_from([1, 26, 72, 5])), draw(st.integers(1, 30))
    target = draw(st.sampled_from([STATELESS, XVEC, SUFFIX]))
    key = SuffixDescriptor(rows, kept + new, draw(st.sampled_from(["icl", "xvec"])), kept) if target == SUFFIX else Descriptor(rows, new)
    reason = draw(st.none() | st.sampled_from(FallbackReason))
    if reason is not None:
        return CallKind(target, key, reason=reason)
    return CallKind(target, key, descriptor=draw(st.sampled_from([key, replace(key, frames=key.frames + 3), replace(key, batch_size=9)])))


@given(st.dictionaries(counted(), st.integers(1, 50), max_size=8), st.booleans())
def test_a_table_of_calls_holds_the_same_traffic_as_the_statistics(counts: dict[CallKind, int], has_schedule: bool) -> None:
    snapshot, schedule = StatsSnapshot(counts), SCHEDULE if has_schedule else None
    pd.testing.assert_frame_equal(traffic_of_calls(coverage_table(snapshot), schedule), traffic_of(snapshot, schedule))


def test_calls_without_shapes_or_columns_are_refused() -> None:
    calls = coverage_table(StatsSnapshot({CallKind(STATELESS, Descriptor(1, 5), reason=FallbackReason.NO_GRAPH): 7}))
    with pytest.raises(InputError, match=r"lacks reason, calls\. It needs target"):
        traffic_of_calls(calls.drop(columns=["reason", "calls"]))
    with pytest.raises(InputError, match="7 calls have no shape"):
        traffic_of_calls(calls.assign(frames=pd.array([pd.NA], dtype="Int64")))


def test_traffic_of_known_calls() -> None:
    step, short, odd = SuffixDescriptor(2, 97, "icl", 72), SuffixDescriptor(1, 80, "icl", 72), SuffixDescriptor(1, 90, "xvec", 72)
    counts = {
        CallKind(STATELESS, Descriptor(1, 40), descriptor=Descriptor(1, 150)): 5,
        CallKind(SUFFIX, step, descriptor=step): 7,
        CallKind(SUFFIX, step, reason=FallbackReason.OVER_BUDGET): 2,
        CallKind(SUFFIX, short, descriptor=SuffixDescriptor(1, 97, "icl", 72)): 3,
        CallKind(SUFFIX, odd, reason=FallbackReason.DISABLED): 4,
        CallKind(XVEC, Descriptor(1, 1), descriptor=Descriptor(1, 1), error="ReplayError"): 1,
        CallKind(SUFFIX, SuffixDescriptor(1, 77, "icl, long reference", 72), reason=FallbackReason.STATE_NOT_COVERED): 6,
    }
    table = traffic_of(StatsSnapshot(counts))
    assert list(table.columns) == list(TRAFFIC_COLUMNS)
    assert list(table.itertuples(index=False, name=None)) == [
        (STATELESS, "", 1, 40, True, 5),
        (SUFFIX, "icl 72", 1, 80, True, 3),
        (SUFFIX, "icl 72", 2, 97, False, 9),
        (SUFFIX, "icl, long reference 72", 1, 77, False, 6),
        (SUFFIX, "xvec 72", 1, 90, False, 4),
        (XVEC, "", 1, 1, False, 1),
    ]
    assert new_frames(table).tolist() == [40, 8, 25, 5, 18, 1]
    scheduled = traffic_of(StatsSnapshot(counts), SCHEDULE).set_index(["state", "frames"])["may_pad_frames"]
    assert scheduled["xvec 72", 90], "only a last chunk is shorter than its transition"
    assert not scheduled["icl 72", 97]


def test_a_short_chunk_that_no_larger_graph_would_do_for_was_not_the_last() -> None:
    kind = CallKind(SUFFIX, SuffixDescriptor(1, 80, "icl", 72), reason=FallbackReason.SHAPE_NOT_COVERED)
    assert traffic_of(StatsSnapshot({kind: 1}), SCHEDULE)["may_pad_frames"].tolist() == [False]


steps = st.integers(1, 9).flatmap(
    lambda kept: st.builds(SuffixDescriptor, st.integers(1, 3), st.integers(kept + 1, 40), st.sampled_from(["icl", "xvec"]), st.just(kept))
)
keys = st.one_of(
    st.tuples(st.sampled_from([STATELESS, XVEC, ICL]), st.builds(Descriptor, st.integers(1, 4), st.integers(1, 30))),
    st.tuples(st.just(SUFFIX), steps),
)


@given(st.dictionaries(keys, st.integers(1, 9)))
def test_no_call_is_lost_and_shapes_come_back(counted: dict[tuple[str, Descriptor], int]) -> None:
    snapshot = StatsSnapshot({CallKind(target, key, reason=FallbackReason.NO_GRAPH): n for (target, key), n in counted.items()})
    table = traffic_of(snapshot)
    assert table["calls"].sum() == snapshot.calls()
    assert len(table) == len(counted)
    for target, key in counted:
        assert descriptor_of(shape_of(target, key)) == key
    assert traffic_table(table).equals(table)


def test_raw_calls_are_added_up() -> None:
    table = traffic_table({"target": [STATELESS] * 3 + [XVEC], "batch_size": [1, 1, 2, 1], "frames": [5, 5, 5, 1]})
    assert table["calls"].tolist() == [2, 1, 1]
    assert table["may_pad_frames"].tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": [0]}, "batch_size must be a whole number, 1 or more, got .*0.* in row 1"),
        ({"frames": [1.5]}, r"frames must be a whole number, 1 or more, got .*1\.5"),
        ({"frames": ["many"]}, "frames must be a whole number, 1 or more, got 'many'"),
        ({"calls": [-3]}, "calls must be a whole number, 0 or more, got .*-3"),
        ({"may_pad_frames": ["perhaps"]}, "may_pad_frames must be true or false, got 'perhaps'"),
        ({"frame": [5]}, "traffic has no column 'frame'. Did you mean 'frames'"),
        ({"frames": [1, 2]}, "the traffic is no table: "),
    ],
)
def test_traffic_that_is_refused(change: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        traffic_table({"target": [STATELESS], "batch_size": [1], "frames": [5], **change})


def test_traffic_without_sizes_is_refused() -> None:
    with pytest.raises(InputError, match="lacks batch_size, frames"):
        traffic_table({"target": [STATELESS]})


@pytest.mark.parametrize(("state", "message"), [("icl", "expected the mode and the frames kept"), ("icl 72", "brings no new ones")])
def test_suffix_steps_need_a_state(state: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_traffic(traffic_table({"target": [SUFFIX], "state": [state], "batch_size": [1], "frames": [25]}), TARGET_IDS)


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "calls.csv"
    path.write_text(f"target,state,batch_size,frames,may_pad_frames,calls\n{SUFFIX},icl 72,2,97,no,10\n{XVEC},,1,1,yes,4\n")
    assert list(read_traffic_csv(path).itertuples(index=False, name=None)) == [
        (SUFFIX, "icl 72", 2, 97, False, 10),
        (XVEC, "", 1, 1, True, 4),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is no CSV with a header"),
        ("target,frames\na,1\n", "lacks batch_size"),
        ("a,b\n1,2,3\n4\n5,6,7,8\n", "is no CSV"),
        (None, "cannot be read"),
    ],
)
def test_csv_that_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "calls.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=rf"calls\.csv: .*{message}"):
        read_traffic_csv(path)


# ---------------------------------------------------------------------------------------------------- costs


def known(*rows: tuple[int, int, float], **others: Any) -> pd.DataFrame:
    """Rows of batch size, frames and a figure that all columns are made from."""
    table = pd.DataFrame(rows, columns=["batch_size", "frames", "x"])
    x = table.pop("x")
    return cost_table(
        table.assign(target=STATELESS, charge_bytes=3000 * x, shared_bytes=1000 * x, capture_s=x, replay_ms=x, eager_ms=2 * x, **others)
    )


def test_the_model_is_the_line_through_two_points() -> None:
    costs = complete_costs(known((1, 10, 2.0), (2, 20, 5.0)), [Shape(STATELESS, "", 1, 25), Shape(STATELESS, "", 1, 10)])
    assert list(costs.columns) == list(COST_COLUMNS)
    by_shape = costs.set_index(["batch_size", "frames"])
    assert by_shape["source"].to_dict() == {(1, 10): "measured", (1, 25): "modelled", (2, 20): "measured"}
    made: Any = by_shape.loc[(1, 25)]  # 1 + 0.1 · 25 = 3.5
    assert [made[name] for name in ("charge_bytes", "shared_bytes", "capture_s", "replay_ms", "eager_ms")] == pytest.approx(
        [10500, 3500, 3.5, 3.5, 7.0]
    )


def test_the_model_never_goes_below_nothing() -> None:
    costs = complete_costs(known((1, 10, 0.0), (1, 20, 5.0)), [Shape(STATELESS, "", 1, 1)])
    assert (costs.loc[costs["frames"] == 1, ["charge_bytes", "shared_bytes", "capture_s", "replay_ms", "eager_ms"]] == 0).all(axis=None)


def test_one_point_makes_no_model() -> None:
    with pytest.raises(InputError, match=r"charge_bytes of qwen3_tts\.stateless is known for too few sizes, 1; a model of the others"):
        complete_costs(known((1, 10, 1.0), (10, 1, 1.0)), [Shape(STATELESS, "", 5, 5)])
    with pytest.raises(InputError, match=r"of qwen3_tts\.suffix is known for too few sizes, 0"):
        complete_costs(known((1, 10, 1.0), (1, 20, 2.0)), [Shape(SUFFIX, "icl 72", 1, 97)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capture_s": [-1.0]}, r"capture_s of qwen3_tts\.stateless B1×T5 is -1"),
        ({"shared_bytes": [20]}, "more than its charge_bytes, of which it is a part"),
        ({"replay_ms": ["fast"]}, "something else than numbers"),
    ],
)
def test_costs_that_are_refused(change: dict[str, list[Any]], message: str) -> None:
    row: dict[str, list[Any]] = {
        "target": [STATELESS],
        "batch_size": [1],
        "frames": [5],
        "charge_bytes": [9],
        "capture_s": [1.0],
        "replay_ms": [1.0],
        "eager_ms": [1.0],
    }
    assert cost_table(row)["shared_bytes"].tolist() == [0]
    with pytest.raises(InputError, match=message):
        cost_table({**row, **change})
    with pytest.raises(InputError, match="lacks frames"):
        cost_table({name: values for name, values in row.items() if name != "frames"})
    with pytest.raises(InputError, match="twice"):
        cost_table({name: values * 2 for name, values in row.items()})


def test_costs_from_entries_are_those_of_the_entries(make_manager: Any) -> None:
    manager, _ = make_manager(Descriptor(1, 8), Descriptor(4, 8))
    manager.capture()
    costs = costs_of_entries(entries_table(manager)).set_index("batch_size")
    first, second = (entry.cost for entry in manager.entries())  # the larger one comes first and fills the pool
    assert costs.loc[4, "charge_bytes"] == first.charge_bytes
    assert costs.loc[4, "shared_bytes"] == first.pool_delta_bytes - first.output_bytes
    assert costs["capture_s"].tolist() == pytest.approx([second.total_s, first.total_s])
    assert costs[["replay_ms", "eager_ms"]].isna().all(axis=None)
    if second.pool_delta_bytes <= second.output_bytes:
        assert costs["charge_bytes"].isna()[1], "what it shares cannot be seen"


def test_entries_of_suffix_steps_keep_their_state() -> None:
    row = {"target": SUFFIX, "descriptor": "B1·icl 72→97", "batch_size": 1, "frames": 97, "state": "icl", "status": "captured", "order": 0}
    mib = {"static_buffer_mib": 1.0, "output_mib": 2.0, "pool_before_mib": 0.0, "pool_after_mib": 10.0, "pool_delta_mib": 10.0}
    costs = costs_of_entries(pd.DataFrame([{**row, **mib, "warmup_s": 0.5, "capture_s": 0.25, "gc_s": 0.25}]))
    assert costs[["state", "charge_bytes", "shared_bytes", "capture_s"]].values.tolist() == [["icl 72", 11 * 2**20, 8 * 2**20, 1.0]]


def test_entries_without_a_graph_tell_no_costs(make_manager: Any) -> None:
    manager, _ = make_manager()
    with pytest.raises(InputError, match="no captured graph"):
        costs_of_entries(entries_table(manager))


def test_measured_costs_are_complete_and_leave_nothing_behind(tiny_decoder: Code2WavDecoder) -> None:
    backend, target = create_backend("cpu"), stateless_target(tiny_decoder, bucket_frames=(4, 8), batch_sizes=(1, 2))
    told: list[str] = []
    chosen = {STATELESS: [Descriptor(1, 4), Descriptor(2, 8)]}
    costs = measure_costs(backend, [target], chosen, repeats=2, progress=told.append)
    assert told == [f"measuring {STATELESS} B1×T4", f"measuring {STATELESS} B2×T8"]
    assert costs[["batch_size", "frames"]].values.tolist() == [[1, 4], [2, 8]]
    assert not costs.isna().any(axis=None)
    assert set(costs["source"]) == {"measured"}
    assert (costs[["capture_s", "replay_ms", "eager_ms", "charge_bytes"]] > 0).all(axis=None)
    own = costs["charge_bytes"] - costs["shared_bytes"]
    assert own.tolist() == [b * t * (16 * 8 + tiny_decoder.samples_per_frame * 4) for b, t in ((1, 4), (2, 8))], "codes and waveform"
    assert not target.is_bound
    whole = complete_costs(costs, [Shape(STATELESS, "", 1, 8)])
    assert whole["source"].tolist() == ["measured", "modelled", "measured"]


def test_what_cannot_be_captured_has_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = create_backend("cpu")
    target = toy_target("cpu", Descriptor(1, 4), is_capturing=backend.is_capturing)
    with pytest.raises(InputError, match="there is no shape to measure"):
        measure_costs(backend, [target], {})

    def broken(*_: Any) -> Any:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(target.routine, "forward_for_capture", broken)
    with pytest.raises(CaptureError, match=r"cannot be captured: .*no such luck"):
        measure_costs(backend, [target])


def test_a_replay_needs_the_targets_that_are_called(tiny_decoder: Code2WavDecoder) -> None:
    target = stateless_target(tiny_decoder, bucket_frames=(4,))
    with pytest.raises(ConfigError, match="plan for one kind of traffic at a time"):
        replay_traffic(traffic_table({"target": [XVEC], "batch_size": [1], "frames": [1]}), [target])
