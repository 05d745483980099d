"""The parity check: graphs that are right, captured operations that should have been breaks, breaks that differ; and both paths' tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.v1 import ready_runner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vgraph_lab import GPUGenerationModelRunner, StageConfig
from vgraph_lab.errors import ConfigError, FallbackReason, InputError, LifecycleError
from vgraph_lab.graphs.backends.base import GraphNode
from vgraph_lab.inspect import coverage_table, entries_table, ledger_table, record
from vgraph_lab.inspect.recording import Recording, read_memory
from vgraph_lab.vllm_v1 import (
    BatchDescriptor,
    BreakableCUDAGraphWrapper,
    CUDAGraphMode,
    GPUModelRunner,
    ParityReport,
    PrefetchOffloader,
    RunnerConfig,
    ScheduledRequest,
    WorkloadConfig,
    WorkloadModel,
    WrapperGraphs,
    check_parity,
    cudagraph_capturing,
    eager_break_during_capture,
    get_forward_context,
    set_forward_context,
    workload_model,
)
from vgraph_lab.vllm_v1.model_wrappers import FULL_TARGET, PIECEWISE_TARGET

PIECEWISE = CUDAGraphMode.PIECEWISE


def context(rows: int, size: int = 8, mode: CUDAGraphMode = PIECEWISE) -> dict[str, Any]:
    batch = BatchDescriptor(size, size if mode is CUDAGraphMode.FULL else None)
    return {"attn_metadata": {"rows": rows}, "cudagraph_runtime_mode": mode, "batch_descriptor": batch, "num_tokens": rows}


@eager_break_during_capture
def good_attention(x: Tensor, out: Tensor) -> None:
    rows = get_forward_context().attn_metadata["rows"]
    out.zero_()
    out[:rows] = x[:rows].cumsum(0)


def attention_that_is_captured(x: Tensor, out: Tensor) -> None:
    """Not marked: the graph keeps the number of rows of its capture."""
    rows = get_forward_context().attn_metadata["rows"]
    out.zero_()
    out[:rows] = x[:rows].cumsum(0)


def model_with(second: Any) -> Any:
    def model(x: Tensor) -> Tensor:
        for attend in (good_attention, second, good_attention):
            out = torch.empty_like(x)
            attend(x, out)
            x = (x + out).tanh()
        return x * 2

    return model


def captured(graphs: WrapperGraphs, model: Any, rows: int = 8) -> tuple[BreakableCUDAGraphWrapper, Tensor]:
    wrapper, x = BreakableCUDAGraphWrapper(model, graphs, PIECEWISE), torch.zeros(8, 4)
    with cudagraph_capturing(), set_forward_context(**context(rows)):
        wrapper(x)
    return wrapper, x.normal_(generator=torch.Generator().manual_seed(1))


def checked(wrapper: BreakableCUDAGraphWrapper, x: Tensor, rows: int) -> ParityReport:
    with set_forward_context(**context(rows)):
        return check_parity(wrapper, x)


def test_a_graph_that_is_right(graphs: WrapperGraphs) -> None:
    wrapper, x = captured(graphs, model_with(good_attention))
    for rows in (8, 5):
        report = checked(wrapper, x, rows)
        assert report.is_equal, str(report)
        assert [step.name for step in report.steps] == [
            "good_attention",
            "segment 0",
            "good_attention",
            "segment 1",
            "good_attention",
            "segment 2",
        ]
        assert "equal to eager" in str(report)
    assert graphs.sink.snapshot().calls() == 0


def test_a_captured_operation_that_should_have_been_a_break_is_named(graphs: WrapperGraphs) -> None:
    wrapper, x = captured(graphs, model_with(attention_that_is_captured))
    assert checked(wrapper, x, 8).is_equal  # the batch of the capture tells nothing
    report = checked(wrapper, x, 5)
    found = report.first_difference
    assert found is not None
    assert found.name == "segment 0"  # between the first and the third attention
    assert found.operation == "aten.cumsum.default"
    assert "attention_that_is_captured: out[:rows] = x[:rows].cumsum(0)" in found.where
    assert str(report).startswith("v1.model 8 tok: DIFFERS from eager")
    assert "mark it with eager_break_during_capture" in str(report)
    assert [step.is_equal for step in report.steps] == [True, False]


def test_other_operations_than_eagerly_are_named(graphs: WrapperGraphs) -> None:
    @eager_break_during_capture
    def nothing(x: Tensor) -> None:
        """Where the pass may change its mind."""

    def model(x: Tensor) -> Tensor:
        rows = get_forward_context().attn_metadata["rows"]
        y = x + 1
        nothing(y)
        if rows == 5:
            return y.exp()
        return y.sin() if rows == 8 else y.sin().cos()

    wrapper, x = captured(graphs, model)
    for rows, operation, words in (
        (5, "aten.sin.default", "the graph runs aten.sin.default, the eager pass aten.exp.default"),
        (6, "aten.cos.default", "the eager pass runs it, the graph does not"),
    ):
        found = checked(wrapper, x, rows).first_difference
        assert found is not None
        assert (found.name, found.operation) == ("segment 1", operation)
        assert words in str(found)


def test_a_break_that_differs_is_named(graphs: WrapperGraphs) -> None:
    """It remembers, so that the same call gives another result."""
    calls: list[int] = []

    @eager_break_during_capture
    def counting(x: Tensor, out: Tensor) -> None:
        calls.append(1)
        out.copy_(x * len(calls))

    def model(x: Tensor) -> Tensor:
        x = x + 1
        out = torch.empty_like(x)
        counting(x, out)
        return out + 1

    wrapper, x = captured(graphs, model)
    found = checked(wrapper, x, 8).first_difference
    assert found is not None
    assert found.name.endswith("counting")
    assert found.operation == ""


def test_without_a_listing_the_segment_is_named(graphs: WrapperGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where nodes are no operations: breaks and the output tell what went before."""
    import vgraph_lab.vllm_v1.parity as module

    class Other:
        """No CpuGraph is one."""

    def shifted(x: Tensor) -> Tensor:
        y = x + get_forward_context().attn_metadata["rows"]
        out = torch.empty_like(y)
        good_attention(y, out)
        return (x + out) * 2

    def late(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        good_attention(x + 1, out)
        return out * get_forward_context().attn_metadata["rows"]

    for number, (model, name) in enumerate(((shifted, "segment 0"), (late, "segment 1"))):
        wrapper = BreakableCUDAGraphWrapper(model, graphs, PIECEWISE, target_id=f"v1.m{number}")
        x = torch.ones(8, 4)
        with cudagraph_capturing(), set_forward_context(**context(8)):
            wrapper(x)
        with monkeypatch.context() as patched:
            patched.setattr(module, "CpuGraph", Other)
            report = checked(wrapper, x, 5)
        found = report.first_difference
        assert found is not None
        assert (found.name, found.operation) == (name, ""), str(report)


def test_state_is_put_back(graphs: WrapperGraphs) -> None:
    cache = {"kv_cache": torch.zeros(8, 4)}

    def model(x: Tensor) -> Tensor:
        cache["kv_cache"].add_(x)
        out = torch.empty_like(x)
        good_attention(x + 1, out)
        return cache["kv_cache"] + out

    wrapper, x = BreakableCUDAGraphWrapper(model, graphs, PIECEWISE, static_tensors=cache), torch.ones(8, 4)
    with cudagraph_capturing(), set_forward_context(**context(8)):
        wrapper(x)
    kept, given = cache["kv_cache"].clone(), x.clone()
    assert checked(wrapper, x, 8).is_equal
    assert torch.equal(cache["kv_cache"], kept)
    assert torch.equal(x, given)


def test_what_cannot_be_compared_fails(graphs: WrapperGraphs) -> None:
    wrapper, x = captured(graphs, model_with(good_attention))
    with set_forward_context(**context(4, 4)), pytest.raises(LifecycleError, match=r"v1\.model has no breakable graph for 4 tok"):
        check_parity(wrapper, x)
    both = BreakableCUDAGraphWrapper(lambda x: x + 1, graphs, target_id="v1.both")
    with set_forward_context(**context(8, mode=CUDAGraphMode.FULL)):
        with cudagraph_capturing():
            both(x)
        with pytest.raises(InputError, match="the batch runs as FULL"):
            check_parity(both, x)


CONFIG = WorkloadConfig(max_model_len=32, num_experts=4)


def ready(mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE) -> GPUModelRunner:
    return ready_runner(WorkloadModel(CONFIG), RunnerConfig(cudagraph_mode=mode, cudagraph_capture_sizes=(2, 4, 8), block_size=4))


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_the_workload_model_breaks_where_it_must(lens: list[int]) -> None:
    runner = ready(PIECEWISE)
    scheduled = [ScheduledRequest(f"r{n}", [n + 1] * count) for n, count in enumerate(lens)]
    if sum(lens) > 8:
        with pytest.raises(InputError, match="runs as NONE"):
            runner.check_parity(scheduled)
        return
    report = runner.check_parity(scheduled)
    assert report.is_equal, str(report)
    assert [s.name for s in report.steps if not s.name.startswith("segment")] == ["unified_attention_with_output"] * CONFIG.num_layers
    assert runner.num_computed_tokens("r0") == 0
    assert not runner._need().kv_cache.blocks.any()


def test_a_model_whose_attention_is_not_marked_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lens of the captured batch are baked in: text that makes no sense, and no error."""
    monkeypatch.setattr(workload_model, "unified_attention_with_output", workload_model.unified_attention_with_output.__wrapped__)
    runner = ready(PIECEWISE)
    report = runner.check_parity([ScheduledRequest("a", [1, 2, 3]), ScheduledRequest("b", [4])])
    found = report.first_difference
    assert found is not None
    assert found.name == "segment 0"
    assert found.operation.startswith("aten.")
    assert "paged_kv.py" in found.where
    assert "the graph runs" in str(report)


def test_an_offloaded_model_is_compared_like_any_other() -> None:
    config = RunnerConfig(cudagraph_mode=PIECEWISE, cudagraph_capture_sizes=(4,))
    runner = ready_runner(WorkloadModel(WorkloadConfig(num_layers=5)), config, offloader=PrefetchOffloader(2, 1, 2))
    for _ in range(2):
        report = runner.check_parity([ScheduledRequest("a", [1, 2, 3])])
        assert report.is_equal, str(report)


@pytest.mark.parametrize("name", ["atol", "rtol"])
@pytest.mark.parametrize("value", [None, -1.0, "x", float("nan"), float("inf"), True])
def test_what_is_no_tolerance_is_refused_before_the_step(graphs: WrapperGraphs, name: str, value: Any) -> None:
    runner = GPUModelRunner(RunnerConfig(cudagraph_mode=PIECEWISE, cudagraph_capture_sizes=(4,)), "cpu")
    with pytest.raises(InputError, match=f"{name}: a tolerance is a finite number from 0, got {value!r}"):
        runner.check_parity([ScheduledRequest("a", [1, 2])], **{name: value})
    wrapper = BreakableCUDAGraphWrapper(torch.neg, graphs, PIECEWISE)
    with pytest.raises(InputError, match=f"{name}: a tolerance"):
        check_parity(wrapper, **{name: value})


def test_a_decode_batch_has_no_segments() -> None:
    with pytest.raises(InputError, match="runs as FULL; only a PIECEWISE graph has segments"):
        ready().check_parity([ScheduledRequest("a", [1])])


# -------------------------------------------------------------------------------------------- the same tables


def stage_runner(**fields: Any) -> GPUGenerationModelRunner:
    cfg = StageConfig(cudagraph_mode="FULL_AND_PIECEWISE", max_num_seqs=4)
    runner = GPUGenerationModelRunner(cfg, "cpu", v1_config=RunnerConfig(cudagraph_capture_sizes=(1, 2, 8), **fields))
    runner.load_model(WorkloadModel(CONFIG))
    return runner


def test_a_model_without_the_capability_takes_this_path_and_shows_in_the_same_tables(tmp_path: Path) -> None:
    with stage_runner() as runner:
        report = runner.capture_model()
        assert (report.requested, report.captured) == (5, 5)
        logits = runner.execute_model([ScheduledRequest("a", [1, 2, 3]), ScheduledRequest("b", [4])])
        assert list(logits) == ["a", "b"]
        runner.execute_model([ScheduledRequest("a", [5]), ScheduledRequest("b", [6])])
        runner.execute_model([ScheduledRequest("c", list(range(20)))])
        assert runner.abort(["c", "zz"]) == ["c"]

        entries = entries_table(runner)
        assert entries["target"].tolist() == [PIECEWISE_TARGET] * 3 + [FULL_TARGET] * 2
        assert entries["descriptor"].tolist() == ["8 tok", "2 tok", "1 tok", "2 tok×2 req·uniform", "1 tok×1 req·uniform"]
        assert entries["hits"].tolist() == [1, 0, 0, 1, 0]
        assert (entries["capture_s"] > 0).all()
        assert (entries["nodes"] > 0).all()
        coverage = coverage_table(runner)
        assert sorted(coverage["outcome"]) == ["exact hit", "fallback", "padded hit"]
        assert coverage["calls"].sum() == 3
        assert runner.stats().reasons() == {FallbackReason.SHAPE_NOT_COVERED: 1}
        ledger = ledger_table(runner).set_index("part")["now_mib"]
        assert ledger["pool"] > 0
        assert read_memory(runner).static_buffer_bytes > 0

        kept = record(runner)
        assert kept.model == "WorkloadModel"
        assert kept.capture is not None
        assert all(isinstance(node, GraphNode) for graph in kept.graphs for node in graph.nodes)
        again = Recording.load(kept.save(tmp_path / "v1.vgl"))
        assert entries_table(again)["descriptor"].tolist() == entries["descriptor"].tolist()
        assert coverage_table(again)["calls"].sum() == 3
    assert runner.stats().hits() == 2
    assert entries_table(runner).empty


def test_refusals_on_this_path() -> None:
    with stage_runner() as runner:
        with pytest.raises(LifecycleError, match="needs a runner that is ready"):
            runner.execute_model([ScheduledRequest("a", [1])])
        profile = runner.profile_memory()
        assert runner.capture_model().profile is profile
        assert profile.bytes > 0
        with pytest.raises(LifecycleError, match="profile_memory needs a runner that is loaded"):
            runner.profile_memory()
        for wrong in ("x", [3], [ScheduledRequest(1, [2])]):  # type: ignore[arg-type]  # an id that is no text
            with pytest.raises(InputError, match="ScheduledRequest"):
                runner.execute_model(wrong)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="from 0 to 63, got 99"):
            runner.execute_model([ScheduledRequest("a", [99])])
    with pytest.raises(ConfigError, match=r"v1_config\.max_num_seqs: is 9, the stage says 4"):
        stage_runner(max_num_seqs=9)


def test_graphs_off() -> None:
    cfg = StageConfig(cudagraph_mode="FULL", enforce_eager=True)
    with GPUGenerationModelRunner(cfg, "cpu") as runner:
        runner.load_model(WorkloadModel(CONFIG))
        report = runner.capture_model()
        assert (report.requested, report.pool_reserved_bytes) == (0, 0)
        assert "graphs are off" in report.eager_targets["WorkloadModel"]
        runner.execute_model([ScheduledRequest("a", [1])])
        assert runner.stats().reasons() == {FallbackReason.DISABLED: 1}
