"""Runners of several data-parallel ranks: real processes over gloo, in every mode, whole and in micro-batches, against the dense model
and against the rule of agreement; and what becomes of the others when one is lost in a step."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import runner_dp_child
import torch
from dense_reference import dense_logits
from rank_processes import run_ranks
from runner_dp_child import DECODE_THRESHOLD, PREFILL_THRESHOLD, SIZES

from vgraph_lab.errors import ConfigError, LifecycleError
from vgraph_lab.graphs import CaptureProgress
from vgraph_lab.vllm_v1 import (
    CUDAGraphMode,
    DPAgreement,
    DPProposal,
    GPUModelRunner,
    ParallelConfig,
    RunnerConfig,
    SMControlContextManager,
    UBatchTrace,
    WorkloadConfig,
    WorkloadModel,
    dbo_current_ubatch_id,
    synchronize_dp_ranks,
)
from vgraph_lab.vllm_v1.model_wrappers import FULL_TARGET, PIECEWISE_TARGET, UBATCH_TARGET

MODEL = {"max_model_len": 32, "num_layers": 2, "num_experts": 0}
EXPERTS = MODEL | {"num_experts": 4}
Request = tuple[str, list[int]]
Steps = list[list[list[Request]]]  # of each step, for each rank, its requests with their new tokens; none: a dummy batch


def agreement(step: list[list[Request]], mode: CUDAGraphMode, parts: int) -> DPAgreement:
    """What the rule says of a step, from what each rank would do alone."""
    return synchronize_dp_ranks([_proposal([len(new) for _, new in requests] or [1], mode, parts) for requests in step], parts)


def _proposal(lens: list[int], mode: CUDAGraphMode, parts: int) -> DPProposal:
    tokens, is_decode = sum(lens), set(lens) == {1}
    runtime = mode.decode_mode() if is_decode and mode.separate_routine() else mode.mixed_mode()
    padded = next((size for size in SIZES if size >= tokens), None)
    if not runtime or padded is None:
        runtime, padded = CUDAGraphMode.NONE, tokens
    is_split = parts > 1 and tokens >= (DECODE_THRESHOLD if is_decode else PREFILL_THRESHOLD)
    return DPProposal(tokens, padded, is_split, runtime)


def check(found: list[dict[str, Any]], name: str, steps: Steps, model: dict[str, Any]) -> None:
    """Every step was agreed on as the rule says, and every rank's logits are those of the dense model."""
    mode, parts = name.split("×")
    config = WorkloadConfig(**model)
    weights = WorkloadModel(config).state_dict()
    for rank, result in enumerate(found):
        history: dict[str, list[int]] = {}
        for step, done in zip(steps, result[name]["steps"], strict=True):
            agreed = agreement(step, CUDAGraphMode[mode], int(parts))
            assert (done["split"], tuple(done["tokens"]), done["mode"]) == (agreed[0], agreed[1], agreed[2].name)
            for (req_id, tokens), row in zip(step[rank], done["logits"], strict=True):
                history.setdefault(req_id, []).extend(tokens)
                assert torch.allclose(torch.tensor(row).double(), dense_logits(weights, config, history[req_id])[-1], atol=2e-4)


STEPS_OF_2: Steps = [
    [[("a", [1, 2, 3]), ("b", [4])], [("x", [5, 6])]],  # one is too small to be split
    [[("a", [7]), ("b", [8])], [("x", [9])]],  # likewise, decode
    [[], [("x", [1, 2, 3, 4, 5])]],  # a dummy batch on one side
    [[("a", [3] * 12)], [("x", [2] * 11)]],  # beyond all graphs: split eager
    [[("c", [5] * 7)], [("y", [1, 2]), ("z", [3, 4, 5, 6])]],  # split, mixed, within a graph's size
    [[("a", [1]), ("b", [2]), ("c", [3])], [("y", [4]), ("z", [5]), ("x", [6])]],  # split, decode
    [[("c", [5] * 4)], [("y", [1, 2]), ("z", [3, 4])]],  # split, without padding
    [[("c", [5, 6, 7, 8, 9])], [("y", [1, 2, 3, 4])]],  # padded to 8, of which one rank's second half would be empty
]
SPLIT = [False, False, False, True, True, True, True]  # and the last one where it is padded to a graph's size, or not
WHOLE_MODES = [f"{mode}×0" for mode in ("NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE")]
SPLIT_MODES = [name.replace("0", "2") for name in WHOLE_MODES]


def test_every_mode_in_micro_batches_is_eager_without_them(tmp_path: Path) -> None:
    """Without experts nothing has to travel, so that a CPU graph may hold micro-batches."""
    codes, found = run_ranks(tmp_path, runner_dp_child.main, size=2, model=MODEL, runs=[*WHOLE_MODES, *SPLIT_MODES], steps=STEPS_OF_2)
    assert codes == [0, 0]
    for name in (*WHOLE_MODES, *SPLIT_MODES):
        check(found, name, STEPS_OF_2, MODEL)
        for result in found:
            runs = result[name]["steps"]
            assert [done["split"] for done in runs[:-1]] == (SPLIT if name in SPLIT_MODES else [False] * len(SPLIT))
            assert runs[-1]["split"] == (name == "NONE×2")
            for done, eager in zip(runs, result["NONE×0"]["steps"], strict=True):
                assert torch.allclose(torch.tensor(done["logits"]), torch.tensor(eager["logits"]), atol=1e-5)
    for result in found:
        # FULL: mixed and decode batches share their shapes, which are captured split from the mixed threshold on.
        assert result["FULL×2"]["graphs"] == [[UBATCH_TARGET, 8], [UBATCH_TARGET, 4], [FULL_TARGET, 2], [FULL_TARGET, 1]]
        assert result["FULL×2"]["hits"] == {FULL_TARGET: 1, PIECEWISE_TARGET: 0, UBATCH_TARGET: 3}
        piecewise = [[PIECEWISE_TARGET, size] for size in (8, 4, 2, 1)]
        assert result["PIECEWISE×2"]["graphs"] == piecewise
        full = [*([UBATCH_TARGET, size] for size in (8, 4, 2)), [FULL_TARGET, 1]]
        assert result["FULL_AND_PIECEWISE×2"]["graphs"] == [*piecewise, *full]
        assert result["FULL_AND_PIECEWISE×2"]["hits"][UBATCH_TARGET] == 1
    # Whole batches of shapes that are captured split: the first, the dummy one (not counted), and the last.
    assert [result["FULL×2"]["not_covered"] for result in found] == [2, 3]


def test_what_a_step_says_is_what_is_counted(tmp_path: Path) -> None:
    """Where a graph of the other kind makes a batch eager, explanation, padding statistics and counters tell the same."""
    decode: Steps = [[[("p", [1]), ("q", [2])], [("r", [3]), ("s", [4])]]]  # mode FULL: split from 2 tokens on, captured whole below 4
    names = [*SPLIT_MODES, "FULL_DECODE_ONLY×2"]
    codes, found = run_ranks(tmp_path, runner_dp_child.main, size=2, model=MODEL, runs=names, steps=STEPS_OF_2 + decode, has_tables=True)
    assert codes == [0, 0]
    for rank, result in enumerate(found):
        for name in names:
            runs = result[name]["steps"]
            counted = [done for done, step in zip(runs, STEPS_OF_2 + decode, strict=True) if step[rank]]
            assert sum(done["reason"] is None for done in counted) == sum(result[name]["hits"].values())
            assert sum(done["reason"] == "state_not_covered" for done in counted) == result[name]["not_covered"]
            for done in runs:
                runs_as = "NONE" if done["reason"] else done["mode"]
                assert done["runs_as"] == [runs_as] * 2
                segments = {"NONE": 0, "FULL": 1, "PIECEWISE": MODEL["num_layers"] + 1}[runs_as]
                assert done["table"] == [runs_as, done["reason"] or "", segments]
        words = {name: [done["words"] for done in result[name]["steps"]] for name in names}
        assert words["FULL×2"][0].startswith("runs eager whole, padded to 4 tok×4 req: the FULL graph of that shape holds micro-batches")
        assert words["FULL×2"][-1] == "runs eager in micro-batches, padded to 2 tok×2 req: the FULL graph of that shape holds whole batches"
        for name in ("FULL_AND_PIECEWISE×2", "FULL_DECODE_ONLY×2"):
            assert words[name][-1] == "runs as FULL 2 tok×2 req·uniform"


@pytest.mark.parametrize(
    ("section", "own", "words"),
    [
        ("runner", {"cudagraph_mode": "FULL"}, "cudagraph_mode: PIECEWISE on rank 0 and rank 2, FULL on rank 1"),
        ("runner", {"cudagraph_capture_sizes": (1, 6)}, r"cudagraph_capture_sizes: [1, 2, 4, 8] on rank 0 and rank 2, [1, 6] on rank 1"),
        ("runner", {"max_num_batched_tokens": 16}, "max_num_batched_tokens: 32 on rank 0 and rank 2, 16 on rank 1"),
        ("parallel", {"ubatch_size": 3}, "num_ubatches: 2 on rank 0 and rank 2, 3 on rank 1"),
        ("parallel", {"dbo_decode_token_threshold": 5}, "dbo_decode_token_threshold: 2 on rank 0 and rank 2, 5 on rank 1"),
        ("parallel", {"dbo_prefill_token_threshold": 6}, "dbo_prefill_token_threshold: 4 on rank 0 and rank 2, 6 on rank 1"),
        ("model", {"num_layers": 3}, "model.num_layers: 2 on rank 0 and rank 2, 3 on rank 1"),
    ],
)
def test_every_rank_is_told_which_setting_differs(tmp_path: Path, section: str, own: dict[str, Any], words: str) -> None:
    plan: dict[str, Any] = {"size": 3, "model": EXPERTS | {"num_experts": 3}, "run": "PIECEWISE×2", "timeout_s": 5}
    codes, found = run_ranks(tmp_path, runner_dp_child.meet, does=[["load"]] * 3, own=[{}, {section: own}, {}], **plan)
    assert codes == [0] * 3
    told = f"ConfigError []: data-parallel ranks must have the same settings. {words}. Give all ranks the same."
    assert found == [[told]] * 3


def test_a_rank_that_fails_and_lives_is_named_by_all(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"size": 3, "model": EXPERTS | {"num_experts": 3}, "run": "NONE×2", "timeout_s": 1, "own": [{}] * 3}
    does = [["load", "step", "step"], ["load", "fail", "step"], ["load", "step", "step"]]
    codes, found = run_ranks(tmp_path, runner_dp_child.meet, does=does, **plan)
    assert codes == [0] * 3
    assert found[1][:2] == ["", "ValueError []: boom"]
    for told in (found[0][1], found[2][1], *(each[2] for each in found)):
        assert told.startswith("RankLostError [1]: rank 1 failed in step 0 with ValueError: boom of the data-parallel group")


def test_a_failure_that_stranded_nobody_is_forgotten(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"size": 2, "model": MODEL, "run": "NONE×2", "timeout_s": 1, "own": [{}] * 2}
    does = [["load", "step", "step", "die"], ["load", "fail", "step", "step"]]
    codes, found = run_ranks(tmp_path, runner_dp_child.meet, does=does, **plan)
    assert codes == [3, 0]
    assert found[0] == [""] * 3
    assert found[1][:3] == ["", "ValueError []: boom", ""]
    assert found[1][3].startswith("RankLostError [0]: rank 0 of 2 did not take part in step 2")


@pytest.mark.parametrize(("call", "name"), [("explain", "explain()"), ("parity", "check_parity()")])
def test_ranks_that_call_for_different_things_are_told_so(tmp_path: Path, call: str, name: str) -> None:
    plan: dict[str, Any] = {"size": 2, "model": MODEL, "run": "PIECEWISE×0", "timeout_s": 5, "own": [{}] * 2}
    does = [["load", call, "step", call], ["load", "step", "step", call]]
    codes, found = run_ranks(tmp_path, runner_dp_child.meet, does=does, **plan)
    assert codes == [0, 0]
    for told in found:
        assert told[1].startswith("LifecycleError []: the data-parallel ranks have called for different things")
        assert f"(rank 0: {name}, number 0, rank 1: a step (execute_model() or execute_dummy_batch()), number 0)" in told[1]
        assert told[2:] == ["", ""], "they go on together"


def test_a_split_batch_says_that_breakable_graphs_do_not_serve_it(tmp_path: Path) -> None:
    codes, found = run_ranks(tmp_path, runner_dp_child.main, size=2, model=MODEL, runs=["PIECEWISE×2"], steps=STEPS_OF_2)
    assert codes == [0, 0]
    for result in found:
        _, _, _, eager, split, decode, *_ = result["PIECEWISE×2"]["steps"]
        assert eager["words"].startswith("runs as NONE")
        assert split["words"] == "runs eager in micro-batches, padded to 8 tok: PIECEWISE graphs hold whole batches"
        assert split["reason"] == decode["reason"] == "state_not_covered"
        assert result["PIECEWISE×2"]["not_covered"] == 3
        assert result["PIECEWISE×2"]["hits"][UBATCH_TARGET] == 0


# Four ranks decide differently: by size, by kind, by what would be empty; and one has nothing to do.
STEPS_OF_4: Steps = [
    [[("a", [1] * 12)], [("b", [2] * 5), ("c", [3] * 7)], [("d", [4] * 11)], [("e", [5]), ("f", [6] * 10)]],
    [[("a", [1] * 6)], [("b", [2] * 5)], [("d", [4] * 3)], [("e", [5] * 8)]],  # rank 2 is too small
    [[("a", [1])], [("b", [2]), ("c", [3])], [("d", [4])], [("e", [5]), ("f", [6])]],  # decode, some too small
    [[("a", [1])], [("b", [2]), ("c", [3])], [], [("g", [5] * 12)]],  # one without work, one beyond all graphs
    [[("a", [1] * 8)], [("b", [2] * 8)], [("d", [4] * 7)], [("e", [5] * 4), ("f", [6] * 4)]],
    [[("a", [1] * 4)], [("b", [2] * 8)], [("d", [4] * 8)], [("e", [5] * 8)]],  # rank 0's second half would be empty
]


def test_four_ranks_agree_on_every_step(tmp_path: Path) -> None:
    runs = ["NONE×0", "NONE×2", "PIECEWISE×2", "PIECEWISE×3"]
    codes, found = run_ranks(tmp_path, runner_dp_child.main, size=4, model=EXPERTS, runs=runs, steps=STEPS_OF_4)
    assert codes == [0] * 4
    for name in runs:
        check(found, name, STEPS_OF_4, EXPERTS)
    assert [done["split"] for done in found[0]["PIECEWISE×2"]["steps"]] == [True, False, False, False, True, False]
    assert [done["split"] for done in found[0]["PIECEWISE×3"]["steps"]] == [True, False, False, False, True, False]


@pytest.mark.parametrize(("size", "how", "parts"), [(2, "die", 2), (4, "die", 2), (4, "die", 0), (2, "hang", 2), (4, "hang", 0)])
def test_a_rank_that_is_lost_in_a_step_is_named_by_all_others(tmp_path: Path, size: int, how: str, parts: int) -> None:
    steps = [step[:size] for step in STEPS_OF_4[:1]] * 2
    lost = size - 1
    plan = {"lost_rank": lost, "lost_in_step": 1, "how": how, "timeout_s": 2}
    codes, found = run_ranks(tmp_path, runner_dp_child.main, size=size, model=EXPERTS, runs=[f"NONE×{parts}"], steps=steps, **plan)
    assert codes == [0] * lost + [3]
    assert len(found) == lost
    for rank, survivor in enumerate(found):
        result = survivor[f"NONE×{parts}"]
        assert len(result["steps"]) == 1
        told = result["lost"]
        assert told["ranks"] == [lost]
        assert told["message"].startswith(f"rank {lost} of {size} ")
        assert "the exchange of experts over gloo failed" in told["message"]
        assert [note.split(" of ")[0][:-1] for note in told["notes"]] == ["raised in micro-batch "] * (parts > 1)
        assert told["kept"] == sum(len(new) for _, new in steps[0][rank]), "its requests are as they were before the step"


# ----------------------------------------------------------------------------------------------- without processes


def test_all_micro_batches_have_run_before_the_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    forward = WorkloadModel.forward

    def noting(model: WorkloadModel, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        seen.append((dbo_current_ubatch_id(), len(input_ids)))
        return forward(model, input_ids, positions)

    monkeypatch.setattr(WorkloadModel, "forward", noting)
    for parts, most in product((2, 3), (12, 2)):
        seen.clear()
        config = RunnerConfig(cudagraph_mode="NONE", max_num_seqs=2, max_num_batched_tokens=most)  # type: ignore[arg-type]
        runner = GPUModelRunner(config, "cpu", parallel_config=ParallelConfig(2, ubatch_size=parts))
        runner.load_model(WorkloadModel(WorkloadConfig(num_experts=2)))
        is_split = most >= parts
        assert sorted(seen[1:]) == ([(part, most // parts) for part in range(parts)] if is_split else [(0, most)])
        assert seen[0] == (0, most)
        model = runner.get_model()
        assert isinstance(model, WorkloadModel)
        assert len({tensor.nbytes for tensor in model.workspace.tensors().values()}) == 1
        assert len(model.workspace.tensors()) == parts
        runner.shutdown()


@pytest.mark.parametrize("parts", [0, 2, 3])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_a_profile_says_what_the_captures_will_take(mode: str, parts: int) -> None:
    config = RunnerConfig(cudagraph_mode=mode, cudagraph_capture_sizes=SIZES, max_num_batched_tokens=16)  # type: ignore[arg-type]
    thresholds = {"dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 4}
    runner = GPUModelRunner(config, "cpu", parallel_config=ParallelConfig(2, ubatch_size=parts, **thresholds))
    with pytest.raises(LifecycleError, match="no model is loaded"):
        runner.profile_memory()
    runner.load_model(WorkloadModel(WorkloadConfig()))
    seen: list[CaptureProgress] = []
    profile = runner.profile_memory(seen.append)
    assert [step.total for step in seen] == [len(profile.lines)] * (len(profile.lines) + 1)
    assert runner.graphs.entries() == []
    assert runner.graphs.pool.reserved_bytes == 0
    assert not runner.graphs.is_ready
    report = runner.capture_model()
    assert report.profile is profile
    assert profile.pool_reserved_bytes == report.pool_reserved_bytes
    assert profile.static_buffer_bytes == report.static_buffer_bytes
    costs = [(each.target_id, each.descriptor, each.cost) for each in report.outcomes]
    for line, (target_id, descriptor, cost) in zip(profile.lines, costs, strict=True):
        assert cost is not None
        assert (line.target_id, line.descriptor) == (target_id, descriptor)
        assert (line.static_buffer_bytes, line.pool_delta_bytes) == (cost.static_buffer_bytes, cost.pool_delta_bytes)
    assert (UBATCH_TARGET in {line.target_id for line in profile.lines}) == (parts > 1 and mode != "PIECEWISE")
    with pytest.raises(LifecycleError, match=r"profile_memory\(\) needs a runner that has not captured yet, this one is ready"):
        runner.profile_memory()


def test_a_profile_that_fails_leaves_nothing() -> None:
    runner = GPUModelRunner(RunnerConfig(), "cpu", parallel_config=ParallelConfig(2, enable_dbo=True, dbo_decode_token_threshold=2))
    runner.load_model(WorkloadModel(WorkloadConfig()))

    def stop(step: CaptureProgress) -> None:
        if step.done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.profile_memory(stop)
    assert runner.graphs.entries() == []
    assert runner.graphs.pool.reserved_bytes == 0
    report = runner.capture_model()
    assert report.profile is None
    assert report.captured == len(runner.graphs.plan) > 7


def test_a_model_may_be_loaded_again_after_its_micro_batches_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = WorkloadModel.forward

    def failing(model: WorkloadModel, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if dbo_current_ubatch_id():
            raise ValueError("not yet")
        return forward(model, input_ids, positions)

    monkeypatch.setattr(WorkloadModel, "forward", failing)
    runner = GPUModelRunner(RunnerConfig(), "cpu", parallel_config=ParallelConfig(2, enable_dbo=True))
    model = WorkloadModel(WorkloadConfig())
    with pytest.raises(ValueError, match="not yet"):
        runner.load_model(model)
    monkeypatch.setattr(WorkloadModel, "forward", forward)
    runner.load_model(model)
    assert list(runner.graphs.wrappers) == [PIECEWISE_TARGET, FULL_TARGET, UBATCH_TARGET]


def test_trace_and_sm_share_reach_the_micro_batches() -> None:
    trace, control = UBatchTrace(), SMControlContextManager(20, device="cpu")
    runner = GPUModelRunner(
        RunnerConfig(cudagraph_mode="NONE"),  # type: ignore[arg-type]
        "cpu",
        parallel_config=ParallelConfig(2, enable_dbo=True),
        ubatch_trace=trace,
        sm_control=control,
    )
    runner.load_model(WorkloadModel(WorkloadConfig(num_experts=2)))
    assert {(span.ubatch, span.name) for span in trace.spans() if span.stream == "compute"} >= set(
        product((0, 1), ("attention", "experts"))
    )
    assert control.num_uses == 1
    trace.clear()
    trace.is_on = False
    runner.profile_run(in_ubatches=True)
    assert trace.spans() == []
    assert control.num_uses == 2


@pytest.mark.parametrize("given", [{"ubatch_trace": UBatchTrace()}, {"sm_control": SMControlContextManager(1, device="cpu")}])
def test_what_is_for_micro_batches_needs_them(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="ubatch_trace and sm_control are for micro-batches"):
        GPUModelRunner(RunnerConfig(), "cpu", **given)
