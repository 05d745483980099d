"""Tables of the vLLM v1 path. Truth: the published dispatch cases, counting tokens one by one, and graphs' own nodes."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab.errors import FallbackReason, InputError
from vgraph_lab.inspect.v1_tables import (
    BATCH_COLUMNS,
    CANDIDATE_COLUMNS,
    DISPATCH_COLUMNS,
    SLICE_COLUMNS,
    STEP_COLUMNS,
    TRACE_COLUMNS,
    batches_table,
    candidates_table,
    dispatch_table,
    graph_steps_table,
    ubatch_slices_table,
    ubatch_trace_table,
)
from vgraph_lab.vllm_v1 import (
    CudagraphDispatcher,
    CUDAGraphMode,
    GPUModelRunner,
    RunnerConfig,
    ScheduledRequest,
    UBatchSlice,
    UBatchSpan,
    UBatchTrace,
    WorkloadConfig,
    WorkloadModel,
    maybe_create_ubatch_slices,
)

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data/vllm_v1/dispatch_cases.json").read_text())["dispatch"]
PLAIN = [case for case in CASES if case["max_loras"] is None]


# ---------------------------------------------------------------------------------------------------------- dispatch


def case_name(case: dict[str, Any]) -> str:
    sizes = case["cudagraph_capture_sizes"]
    return f"{case['cudagraph_mode']}-{len(sizes)}-{sizes[-1] if sizes else 0}-{case['uniform_decode_query_len']}"


@pytest.mark.parametrize("case", PLAIN, ids=case_name)
def test_published_cases_are_in_the_table(case: dict[str, Any]) -> None:
    dispatcher = CudagraphDispatcher(
        CUDAGraphMode[case["cudagraph_mode"]],
        case["cudagraph_capture_sizes"],
        max_num_seqs=case["max_num_seqs"],
        uniform_decode_query_len=case["uniform_decode_query_len"],
    )
    most = max(call["num_tokens"] for call in case["calls"])
    table = dispatch_table(dispatcher, most).set_index(["kind", "num_tokens"])
    found = 0
    for call in case["calls"]:
        key = ("decode" if call["uniform_decode"] else "mixed", call["num_tokens"])
        if call["invalid_modes"] or call["num_active_loras"] or key not in table.index:
            continue
        row, expected, found = table.loc[key], call["descriptor"], found + 1
        assert (row["mode"], row["padded_tokens"]) == (call["mode"], expected["num_tokens"])
        assert row["padding_tokens"] == expected["num_tokens"] - call["num_tokens"]
        assert row["wasted_share"] == pytest.approx(1 - call["num_tokens"] / expected["num_tokens"])
        assert (pd.isna(row["padded_reqs"]) and expected["num_reqs"] is None) or row["padded_reqs"] == expected["num_reqs"]
        assert (row["reason"] == "") == (call["mode"] != "NONE")
    assert found


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 24))
def test_rows_are_the_batches_that_there_can_be(query_len: int, max_num_seqs: int, most: int) -> None:
    dispatcher = CudagraphDispatcher(CUDAGraphMode.FULL, [8], max_num_seqs=max_num_seqs, uniform_decode_query_len=query_len)
    table = dispatch_table(dispatcher, most)
    assert list(table) == list(DISPATCH_COLUMNS)
    decode = {reqs * query_len for reqs in range(1, max_num_seqs + 1)} & set(range(1, most + 1))
    assert table.loc[table["kind"] == "decode", "num_tokens"].tolist() == sorted(decode)
    # Every way to divide so many tokens among requests is uniform: only one token, of one request, in steps of one.
    mixed = [n for n in range(1, most + 1) if not (n == 1 and query_len == 1)]
    assert table.loc[table["kind"] == "mixed", "num_tokens"].tolist() == mixed


def test_reasons_and_refusals_of_dispatch() -> None:
    table = dispatch_table(CudagraphDispatcher(CUDAGraphMode.FULL_DECODE_ONLY, [4], max_num_seqs=6), 6)
    reasons = table.groupby("kind")["reason"].agg(list)
    assert reasons["decode"] == [""] * 4 + ["shape_not_covered"] * 2
    assert reasons["mixed"] == ["state_not_covered"] * 3 + ["shape_not_covered"] * 2
    with pytest.raises(InputError, match="one token at least, got 0"):
        dispatch_table(CudagraphDispatcher(CUDAGraphMode.NONE, [], max_num_seqs=1), 0)


def test_candidates_come_in_order_with_their_reasons() -> None:
    dispatcher = CudagraphDispatcher(CUDAGraphMode.FULL_AND_PIECEWISE, [4, 8], max_num_seqs=4)
    table = candidates_table(dispatcher.explain(3))
    assert list(table) == list(CANDIDATE_COLUMNS)
    assert table["mode"].tolist() == ["FULL", "PIECEWISE"]
    assert table["is_chosen"].tolist() == [False, True]
    assert table["descriptor"].tolist() == ["4 tok×4 req", "4 tok"]
    assert table["reason"].tolist() == [str(FallbackReason.STATE_NOT_COVERED), ""]
    assert "uniform decode only" in table["why_not"][0]
    beyond = candidates_table(dispatcher.explain(9))
    assert beyond["mode"].tolist() == ["FULL", "PIECEWISE", "NONE"]
    assert beyond["descriptor"].tolist() == ["", "", "9 tok"]
    runner = GPUModelRunner(RunnerConfig(cudagraph_capture_sizes=(4, 8), max_num_seqs=4), "cpu")
    assert candidates_table(runner.explain([2, 1])).equals(table)


# ------------------------------------------------------------------------------------------------ segments and breaks


@pytest.fixture(scope="module")
def runner() -> Any:
    found = GPUModelRunner(RunnerConfig(cudagraph_capture_sizes=(2, 4), max_num_seqs=4), "cpu")
    found.load_model(WorkloadModel(WorkloadConfig(num_layers=3)))
    found.capture_model()
    yield found
    found.shutdown()


def test_steps_are_the_nodes_of_the_graph_between_its_host_nodes(runner: GPUModelRunner) -> None:
    for entry in runner.graphs.entries():
        table = graph_steps_table(entry)
        assert list(table) == list(STEP_COLUMNS)
        kinds = ["break" if node.kind == "host" else "segment" for node in entry.graph.nodes()]
        runs = [1] if kinds else []
        for before, after in pairwise(kinds):
            if before == after == "segment":
                runs[-1] += 1
            else:
                runs.append(1)
        assert [nodes if kind == "segment" else 1 for nodes, kind in zip(table["nodes"], table["kind"], strict=True)] == runs
        assert table["nodes"].sum() == sum(count for kind, count in entry.cost.node_counts.items() if kind != "host")
        assert table["first_node"].tolist() == (table["nodes"].fillna(0).cumsum() - table["nodes"].fillna(0)).tolist()
        assert table["step"].tolist() == list(range(len(table)))
        breaks = table.loc[table["kind"] == "break", "name"].tolist()
        assert breaks == ["unified_attention_with_output"] * (3 if entry.target_id == "v1.piecewise" else 0)


def test_batches_are_told_with_the_pieces_of_their_graphs(runner: GPUModelRunner) -> None:
    batches = [[1, 1, 1], [1, 2], [3, 4]]
    table = batches_table(runner, batches)
    assert list(table) == list(BATCH_COLUMNS)
    assert table["batch"].tolist() == ["1 + 1 + 1", "1 + 2", "3 + 4"]
    assert table["kind"].tolist() == ["decode", "mixed", "mixed"]
    assert table["mode"].tolist() == ["FULL", "PIECEWISE", "NONE"]
    assert table["padding_tokens"].tolist() == [1, 1, 0]
    assert table["segments"].tolist() == [1, 4, pd.NA]
    assert table["breaks"].tolist() == [0, 3, pd.NA]
    assert table["reason"].tolist() == ["", "", "shape_not_covered"]
    before = batches_table(GPUModelRunner(runner.config, "cpu"), batches)
    assert before[["segments", "breaks"]].isna().all(axis=None)
    assert before.drop(columns=["segments", "breaks"]).equals(table.drop(columns=["segments", "breaks"]))
    with pytest.raises(InputError, match=r"a whole number of tokens from 1, got 0 in \[1, 0\]"):
        batches_table(runner, [[1, 0]])


def test_several_graphs_make_one_table(runner: GPUModelRunner) -> None:
    piecewise, _, full, _ = runner.graphs.entries()
    table = graph_steps_table(full, piecewise)
    assert list(dict.fromkeys(table["graph"])) == ["v1.full 4 tok×4 req·uniform", "v1.piecewise 4 tok"]
    assert table.groupby("graph").size().to_dict() == {"v1.full 4 tok×4 req·uniform": 1, "v1.piecewise 4 tok": 7}
    assert table["name"].iloc[0] == "whole pass"
    assert graph_steps_table().empty


def test_graphs_that_are_gone_fail() -> None:
    runner = GPUModelRunner(RunnerConfig(cudagraph_capture_sizes=(2,)), "cpu")
    runner.load_model(WorkloadModel(WorkloadConfig(num_layers=1)))
    runner.capture_model()
    runner.execute_model([ScheduledRequest("a", [1, 2])])
    entries = runner.graphs.entries()
    runner.shutdown()
    for entry in entries:
        with pytest.raises(InputError, match="holds nothing: its graph was reset"):
            graph_steps_table(entry)


# ------------------------------------------------------------------------------------------------------------ slices


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 20), st.integers(2, 4))
def test_every_token_is_in_one_piece(lens: list[int], padding: int, parts: int) -> None:
    padded = max(sum(lens) + padding, parts)
    _, slices = maybe_create_ubatch_slices(True, lens, padded, len(lens), parts)
    assert slices is not None
    table = ubatch_slices_table(lens, slices)
    assert list(table) == list(SLICE_COLUMNS)
    owners = [number for number, count in enumerate(lens) for _ in range(count)] + [None] * (padded - sum(lens))
    step = padded // parts
    expected = Counter((min(token // step, parts - 1), owner, token) for token, owner in enumerate(owners))
    found: Counter[tuple[int, int | None, int]] = Counter()
    for row in table.to_dict("records"):
        owner = None if pd.isna(row["request"]) else row["request"]
        assert (row["kind"] == "padding") == (owner is None)
        assert row["tokens"] == row["end_token"] - row["start_token"] > 0
        if owner is not None:
            others = {(u, o) for u, o, _ in expected if o == owner}
            assert row["is_cut"] == (len(others) > 1)
        found.update((row["ubatch"], owner, token) for token in range(row["start_token"], row["end_token"]))
    assert found == expected
    for number, each in enumerate(slices):  # requests as the slices themselves count them, where they have real tokens
        own = table[(table["ubatch"] == number) & (table["kind"] == "request")]["request"]
        if len(own):
            assert (own.min(), own.max() + 1) == (each.request_slice.start, min(each.request_slice.stop, len(lens)))


def test_unpadded_slices_and_a_last_part_without_tokens() -> None:
    real, padded = maybe_create_ubatch_slices(True, [3, 2], 12, 2, 2)
    assert real is not None
    assert padded is not None
    assert ubatch_slices_table([3, 2], padded)["ubatch"].tolist() == [0, 0, 0, 1]
    assert ubatch_slices_table([3, 2], padded)["kind"].tolist() == ["request", "request", "padding", "padding"]
    assert ubatch_slices_table([3, 2], real)["ubatch"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("cuts", [[], [(1, 5)], [(0, 2), (3, 5)], [(0, 2), (2, 4)]], ids=["none", "late", "gap", "short"])
def test_slices_that_do_not_hold_the_batch_fail(cuts: list[tuple[int, int]]) -> None:
    slices = [UBatchSlice(slice(0, 1), slice(*cut)) for cut in cuts]
    with pytest.raises(InputError, match="must follow each other from token 0 to 5"):
        ubatch_slices_table([5], slices)


# ------------------------------------------------------------------------------------------------------------- traces


def test_turns_are_handed_to_who_comes_next() -> None:
    spans = [
        UBatchSpan(3.0, 4.0, 1, "host", "turn"),
        UBatchSpan(0.0, 1.0, 0, "host", "turn"),
        UBatchSpan(0.0, 0.5, 0, "compute", "attention"),
        UBatchSpan(1.5, 2.0, 2, "host", "turn"),
        UBatchSpan(2.0, 2.5, 2, "host", "turn"),
    ]
    table = ubatch_trace_table(spans)
    assert list(table) == list(TRACE_COLUMNS)
    assert table["start_s"].is_monotonic_increasing
    host = table[table["stream"] == "host"]
    assert host["ubatch"].tolist() == [0, 2, 2, 1]
    assert host["hands_to"].tolist() == [2, pd.NA, 1, pd.NA]
    assert table.loc[table["stream"] == "compute", "hands_to"].isna().all()


def test_a_trace_is_read_like_its_spans() -> None:
    trace = UBatchTrace()
    assert ubatch_trace_table(trace).empty
    for ubatch in (0, 1):
        trace.begin(ubatch, "compute", None)
        trace.end(ubatch)
    table = ubatch_trace_table(trace)
    assert table.equals(ubatch_trace_table(trace.spans()))
    assert table.loc[table["stream"] == "host", "hands_to"].tolist() == [1, pd.NA]
