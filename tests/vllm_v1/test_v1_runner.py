"""The runner of this path: which wrapper serves what, equality with eager, captures, and everything it refuses."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from contracts.v1 import Around, ready_runner
from dense_reference import dense_logits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vgraph_lab.config import StageConfig
from vgraph_lab.errors import ConfigError, FallbackReason, InputError, LifecycleError
from vgraph_lab.graphs import CaptureProgress
from vgraph_lab.runner import GPUGenerationModelRunner
from vgraph_lab.vllm_v1 import (
    BatchDescriptor,
    BreakableCUDAGraphCapture,
    CUDAGraphMode,
    GPUModelRunner,
    ModelRunnerOutput,
    ParallelConfig,
    PrefetchOffloader,
    RunnerConfig,
    ScheduledRequest,
    WorkloadConfig,
    WorkloadModel,
    supports_vllm_v1,
    validate_cudagraph_capturing_enabled,
)
from vgraph_lab.vllm_v1.model_wrappers import EAGER_TARGET, FULL_TARGET, PIECEWISE_TARGET

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
SIZES = (1, 2, 4, 8)
CONFIG = WorkloadConfig(max_model_len=48, num_layers=2)
EXPERTS = CONFIG.model_copy(update={"num_experts": 4})


def ready(model: WorkloadConfig = CONFIG, **fields: Any) -> GPUModelRunner:
    config = RunnerConfig(**{"cudagraph_capture_sizes": SIZES, "block_size": 4, "max_num_batched_tokens": 48, "debug": True} | fields)
    return ready_runner(WorkloadModel(model), config)


def step(runner: GPUModelRunner, **requests: Any) -> ModelRunnerOutput:
    return runner.execute_model([ScheduledRequest(req_id, tokens) for req_id, tokens in requests.items()], return_hidden_states=True)


def expected(runner: GPUModelRunner, tokens: list[int]) -> Tensor:
    model = runner.get_model()
    assert isinstance(model, WorkloadModel)
    return dense_logits(model.state_dict(), model.config, tokens)[-1]


# ---------------------------------------------------------------------------------------------- precedence

# What serves a decode batch, a mixed one and an oversized one, in each mode.
PRECEDENCE = {
    CUDAGraphMode.NONE: (EAGER_TARGET, EAGER_TARGET, EAGER_TARGET),
    CUDAGraphMode.PIECEWISE: (PIECEWISE_TARGET, PIECEWISE_TARGET, "eager"),
    CUDAGraphMode.FULL: (FULL_TARGET, FULL_TARGET, "eager"),
    CUDAGraphMode.FULL_DECODE_ONLY: (FULL_TARGET, "eager", "eager"),
    CUDAGraphMode.FULL_AND_PIECEWISE: (FULL_TARGET, PIECEWISE_TARGET, "eager"),
}
# What start-up captures: sizes by wrapper. With max_num_seqs 4, uniform decode ends at 4 tokens.
CAPTURED: dict[CUDAGraphMode, dict[str, list[int]]] = {
    CUDAGraphMode.NONE: {},
    CUDAGraphMode.PIECEWISE: {PIECEWISE_TARGET: [8, 4, 2, 1]},
    CUDAGraphMode.FULL: {FULL_TARGET: [8, 4, 2, 1]},
    CUDAGraphMode.FULL_DECODE_ONLY: {FULL_TARGET: [4, 2, 1]},
    CUDAGraphMode.FULL_AND_PIECEWISE: {PIECEWISE_TARGET: [8, 4, 2, 1], FULL_TARGET: [4, 2, 1]},
}


@pytest.mark.parametrize("mode", CUDAGraphMode)
@pytest.mark.parametrize("model", [CONFIG, EXPERTS], ids=["mlp", "experts"])
def test_precedence_of_modes_and_wrappers(mode: CUDAGraphMode, model: WorkloadConfig) -> None:
    runner = ready(model, cudagraph_mode=mode, max_num_seqs=4)
    graphs = runner.graphs
    entries = graphs.entries()
    found: dict[str, list[int]] = {}
    for entry in entries:
        found.setdefault(entry.target_id, []).append(entry.descriptor.work)
    assert found == CAPTURED[mode]
    assert list(found) == list(CAPTURED[mode])  # PIECEWISE first
    shapes = [(entry.target_id, entry.descriptor) for entry in entries]
    assert len(set(shapes)) == len(shapes)
    assert [entry.cost.order for entry in entries] == list(range(len(entries)))
    for entry in entries:
        is_broken = isinstance(entry.graph, BreakableCUDAGraphCapture)
        assert is_broken == (entry.target_id == PIECEWISE_TARGET)
        assert (entry.cost.node_counts.get("host", 0) == model.num_layers) == is_broken  # FULL leaves nothing eager
        if isinstance(entry.graph, BreakableCUDAGraphCapture):
            assert entry.graph.num_eager_breaks == model.num_layers

    batches = ({"a": [1, 2], "b": [3]}, {"a": [4], "b": [5]}, {"a": [6, 7, 8], "b": [9]}, {"c": list(range(20)), "a": [1]})
    history: dict[str, list[int]] = {}
    before = graphs.stats()
    for number in range(3):  # first, second and n-th time
        for kind, batch in zip((1, 0, 1, 2), batches, strict=True):
            output = step(runner, **batch)
            served, after = PRECEDENCE[mode][kind], graphs.stats()
            for target in (FULL_TARGET, PIECEWISE_TARGET):
                assert after.hits(target) - before.hits(target) == (served == target), (kind, number, target)
            assert after.calls() - before.calls() == 1  # once, whatever happened
            assert after.fallbacks() - before.fallbacks() == (served not in (FULL_TARGET, PIECEWISE_TARGET))
            wanted = FULL if served == FULL_TARGET else PIECEWISE if served == PIECEWISE_TARGET else NONE
            assert output.execution.cudagraph_mode is wanted
            before = after
            for row, (req_id, tokens) in enumerate(batch.items()):
                history.setdefault(req_id, []).extend(tokens)
                assert torch.allclose(output.logits[row].double(), expected(runner, history[req_id]), atol=2e-4)
        assert graphs.entries() == entries  # nothing was captured again, nothing lost
        runner.finish_requests(["c"])
        history.pop("c")
    assert graphs.stats().replay_errors() == 0


def test_fallbacks_have_reasons() -> None:
    for mode, reason in ((NONE, FallbackReason.DISABLED), (CUDAGraphMode.FULL_DECODE_ONLY, FallbackReason.STATE_NOT_COVERED)):
        runner = ready(cudagraph_mode=mode)
        step(runner, a=[1, 2, 3])
        assert runner.graphs.stats().reasons() == {reason: 1}
    assert ready(enforce_eager=True).graphs.entries() == []


# ------------------------------------------------------------------------------------------------ equality


@settings(max_examples=6, deadline=None)
@given(st.sampled_from(CUDAGraphMode), st.integers(0, 1), st.booleans(), st.integers(0, 10_000))
def test_any_traffic_equals_the_dense_model(mode: CUDAGraphMode, speculative: int, weak: bool, seed: int) -> None:
    """Requests come, grow by chunks and single tokens, and end, in steps of any size."""
    rng = random.Random(seed)
    runner = ready(
        cudagraph_mode=mode, num_speculative_tokens=speculative, weak_ref_output=weak, cudagraph_capture_sizes=(2, 4, 8), max_num_seqs=4
    )
    live: dict[str, list[int]] = {}
    for number in range(10):
        ended = [req_id for req_id in live if rng.random() < 0.15 or len(live[req_id]) > 30]
        for req_id in ended:
            live.pop(req_id)
        while len(live) < rng.randint(1, 4):
            live[f"r{number}{len(live)}"] = []
        uniform = rng.random() < 0.4
        batch = {
            req_id: [rng.randrange(64) for _ in range(1 + speculative if uniform else rng.choice([1, 1, 2, 7]))]
            for req_id in rng.sample(sorted(live), rng.randint(1, len(live)))
        }
        output = runner.execute_model([ScheduledRequest(*item) for item in batch.items()], finished_req_ids=ended)
        for row, (req_id, tokens) in enumerate(batch.items()):
            live[req_id] += tokens
            assert runner.num_computed_tokens(req_id) == len(live[req_id])
            assert torch.allclose(output.logits[row].double(), expected(runner, live[req_id]), atol=3e-4)
            assert output.sampled_token_ids[row] == output.logits[row].argmax()


def test_a_batch_can_be_explained_without_running() -> None:
    runner = GPUModelRunner(RunnerConfig(cudagraph_capture_sizes=SIZES, max_num_batched_tokens=48), "cpu")
    assert str(runner.explain([1, 1])).endswith("runs as FULL 2 tok×2 req·uniform")
    assert runner.explain([3, 1]).execution.batch_descriptor == BatchDescriptor(4)
    assert runner.explain(np.array([3, 1])) == runner.explain((3, 1)) == runner.explain([np.int32(3), 1])
    for bad, words in (
        ([], r"a list with the tokens of each request, of one at least; got \[\]"),
        (3, "of one at least; got 3"),
        ("ab", "of one at least; got 'ab'"),
        ([1.5], r"a whole number of tokens from 1, got 1\.5 in \[1\.5\]"),
        ([[1]], r"got \[1\] in \[\[1\]\]"),
        ([2, True], "got True"),
        ([1, -1], "got -1"),
        ([1] * 9, "9 requests with 9 tokens do not run in one step: max_num_seqs is 8, max_num_batched_tokens 48"),
        ([49], "1 requests with 49 tokens do not run in one step"),
    ):
        with pytest.raises(InputError, match=words):
            runner.explain(bad)  # type: ignore[arg-type]


def test_hidden_states_of_all_tokens_are_real_and_owned() -> None:
    runner = ready()
    first = step(runner, a=[1, 2, 3])
    assert first.hidden_states is not None
    kept = first.hidden_states.clone()
    step(runner, b=[9, 8, 7])
    assert torch.equal(first.hidden_states, kept)
    assert first.hidden_states.shape == (3, CONFIG.hidden_size)
    assert torch.allclose(runner.get_model().compute_logits(kept)[-1], first.logits[0], atol=1e-5)


def test_weak_outputs_share_memory() -> None:
    strong, weak = (ready(weak_ref_output=is_weak, cudagraph_mode=FULL) for is_weak in (False, True))
    assert weak.graphs.pool.live_bytes == 0
    assert strong.graphs.pool.live_bytes >= sum(SIZES) * CONFIG.hidden_size * 4
    addresses = [entry.output.data_ptr() for entry in weak.graphs.entries()]
    assert len(set(addresses)) < len(addresses)


# ------------------------------------------------------------------------------------------------ captures


def test_capture_reports_progress_memory_and_time() -> None:
    runner = GPUModelRunner(RunnerConfig(cudagraph_capture_sizes=(4, 1), max_num_batched_tokens=16), "cpu")
    runner.load_model(WorkloadModel(CONFIG))
    seen: list[CaptureProgress] = []
    report = runner.capture_model(seen.append)
    assert [(p.done, p.total, p.target_id, p.descriptor) for p in seen] == [
        (0, 4, PIECEWISE_TARGET, BatchDescriptor(4)),
        (1, 4, PIECEWISE_TARGET, BatchDescriptor(1)),
        (2, 4, FULL_TARGET, BatchDescriptor(4, 4, True)),
        (3, 4, FULL_TARGET, BatchDescriptor(1, 1, True)),
        (4, 4, None, None),
    ]
    assert (report.requested, report.captured, report.failed) == (4, 4, 0)
    assert report.pool_reserved_bytes == runner.graphs.pool.reserved_bytes > 0
    for outcome in report.outcomes:
        assert outcome.cost is not None
        assert outcome.cost.capture_s > 0
        assert outcome.cost.warmup_s > 0
    assert runner.graphs.report is report
    assert runner.graphs.is_ready


def test_afterwards_nothing_is_captured_and_the_workspace_is_locked() -> None:
    runner = ready(EXPERTS)
    with pytest.raises(LifecycleError, match="capturing is disabled"):
        validate_cudagraph_capturing_enabled()
    model = runner.get_model()
    assert isinstance(model, WorkloadModel)
    assert model.workspace.is_locked()
    size = model.workspace.nbytes
    step(runner, a=[1] * 40, b=[2] * 8)  # the largest batch there may be
    assert model.workspace.nbytes == size
    with pytest.raises(LifecycleError, match="locked"):
        model.workspace.get_simultaneous(((size + 1,), torch.uint8))
    runner.graphs.clear()  # a shape that start-up did not capture, as far as the wrappers know
    with pytest.raises(LifecycleError, match=r"v1\.full 1 tok×1 req·uniform \(FULL\) would be captured now"):
        step(runner, a=[1])
    assert runner.num_computed_tokens("a") == 40  # the step never was
    runner.shutdown()
    assert not model.workspace.is_locked()


def test_a_capture_that_fails_leaves_nothing_and_may_be_repeated() -> None:
    runner = GPUModelRunner(RunnerConfig(cudagraph_capture_sizes=SIZES, max_num_batched_tokens=16), "cpu")
    runner.load_model(WorkloadModel(CONFIG))

    def fails(progress: CaptureProgress) -> None:
        if progress.done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.capture_model(fails)
    assert runner.graphs.entries() == []
    assert runner.graphs.pool.reserved_bytes == 0
    with pytest.raises(LifecycleError, match="capturing is disabled"):
        validate_cudagraph_capturing_enabled()
    with pytest.raises(LifecycleError, match=r"the runner is new\. Call capture_model"):
        step(runner, a=[1])
    assert runner.capture_model().captured == 8
    step(runner, a=[1])
    assert runner.graphs.stats().hits() == 1


def test_a_step_that_fails_never_was() -> None:
    runner = ready(cudagraph_mode=PIECEWISE)
    step(runner, a=[1, 2, 3])
    model, requests = runner.get_model(), runner._need().requests
    free = requests._pool.num_free_blocks
    model.compute_logits = None  # type: ignore[assignment]  # what reads the hidden states fails, after the graph
    with pytest.raises(TypeError):
        step(runner, a=[4, 5], b=[5])
    del model.compute_logits
    assert requests._pool.num_free_blocks == free
    assert "b" not in requests
    assert runner.num_computed_tokens("a") == 3
    assert runner.num_computed_tokens("b") == 0
    assert torch.allclose(step(runner, a=[4]).logits[0].double(), expected(runner, [1, 2, 3, 4]), atol=2e-4)


def test_a_dummy_step_counts_and_keeps_nothing() -> None:
    runner = ready(EXPERTS)
    step(runner, a=[1, 2, 3])
    cache, calls = runner._need().kv_cache.blocks.clone(), runner.graphs.stats().calls()
    assert runner.execute_dummy_batch().execution.cudagraph_mode is FULL
    assert torch.equal(runner._need().kv_cache.blocks, cache)
    assert runner.graphs.stats().calls() == calls


def test_shutdown_gives_everything_back() -> None:
    runner = ready()
    step(runner, a=[1])
    for _ in range(2):
        runner.shutdown()
    assert runner.graphs.pool.reserved_bytes == 0
    assert runner.graphs.stats().hits() == 1
    for call in (runner.get_model, runner.capture_model, lambda: step(runner, a=[1])):
        with pytest.raises(LifecycleError, match="no model is loaded"):
            call()
    with pytest.raises(LifecycleError, match="has or had a model"):
        runner.load_model(WorkloadModel(CONFIG))


# ------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cudagraph_capture_sizes": (4, 0)}, "0 cannot be captured"),
        ({"cudagraph_capture_sizes": (4, 2, 4)}, r"repeats 4\. Name each size once: \[2, 4\]"),
        ({"cudagraph_capture_sizes": (4, 64)}, "no batch reaches 64, max_num_batched_tokens is 48"),
        ({"cudagraph_capture_sizes": ()}, "FULL_AND_PIECEWISE needs at least one"),
        ({"max_num_seqs": 1, "max_num_batched_tokens": 60, "cudagraph_capture_sizes": (1,)}, "60 tokens never meet"),
        ({"num_warmups": -1}, r"^num_warmups: .* \(got -1\)"),
    ],
)
def test_bad_settings_fail(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ready(**fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_speculative_tokens": -1}, r"^num_speculative_tokens: .* \(got -1\)"),
        ({"cudagraph_mode": "ful"}, r"^cudagraph_mode: 'ful' is no graph mode\. Did you mean 'FULL'\?"),
        ({"cudagraph_mode": 2}, r"^cudagraph_mode: .* \(got 2\)"),
        ({"cudagraph_capture_sizes": 8}, r"^cudagraph_capture_sizes: must be a list, e\.g\. \[1, 4\] \(got 8\)"),
        ({"cudagraph_capture_sizes": (8.5,)}, r"^cudagraph_capture_sizes\.0: .* \(got 8\.5\)"),
        ({"cudagraph_capture_sizes": (0,)}, "^cudagraph_capture_sizes: 0 cannot be captured"),
        ({"cudagraph_capture_sizes": [2, 2]}, "^cudagraph_capture_sizes: repeats 2"),
        ({"debu": True}, r"^debu: unknown key\. Did you mean 'debug'\?"),
        ({"block_size": 0, "num_blocks": "x"}, r"^block_size: .*; num_blocks: .*"),
    ],
)
def test_settings_are_refused_as_they_are_written(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunnerConfig(**fields)


def test_unsorted_sizes_are_as_good_as_sorted_ones() -> None:
    one, other = ready(cudagraph_capture_sizes=(8, 1, 4)), ready(cudagraph_capture_sizes=(1, 4, 8))
    assert [str(e.descriptor) for e in one.graphs.entries()] == [str(e.descriptor) for e in other.graphs.entries()]


def test_default_sizes_are_those_of_vllm() -> None:
    assert RunnerConfig(max_num_seqs=8, max_num_batched_tokens=64).capture_sizes() == [1, 2, 4, 8, 16]
    assert RunnerConfig(cudagraph_mode="none").capture_sizes() == []  # type: ignore[arg-type]  # names are read
    speculating = RunnerConfig(num_speculative_tokens=2, max_num_seqs=4, max_num_batched_tokens=64)
    assert speculating.capture_sizes() == [3, 6, 9, 18, 24]


def test_micro_batches_need_two_ranks_and_no_offloader() -> None:
    with pytest.raises(ConfigError, match="2 micro-batches with data_parallel_size=1"):
        ParallelConfig(enable_dbo=True)
    with pytest.raises(ConfigError, match="micro-batches need them several times"):
        GPUModelRunner(RunnerConfig(), "cpu", parallel_config=ParallelConfig(2, 0, enable_dbo=True), offloader=PrefetchOffloader(1))


def test_wrong_models_fail() -> None:
    everything = "supports_vllm_v1, config, layers, exchange, workspace, bind_kv_cache, compute_logits"
    with pytest.raises(ConfigError, match=f"Linear cannot run here, it lacks: {everything}. See SupportsVllmV1"):
        GPUModelRunner(RunnerConfig(), "cpu").load_model(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="the model is on meta, the runner on cpu"):
        GPUModelRunner(RunnerConfig(), "cpu").load_model(WorkloadModel(CONFIG, device="meta"))
    runner = ready()
    with pytest.raises(LifecycleError, match="has or had a model"):
        runner.load_model(WorkloadModel(CONFIG))
    with pytest.raises(LifecycleError, match="has not captured yet, this one is ready"):
        runner.capture_model()


class Forwarding(Around):
    """It has a device of its own, and something is held back."""

    def __init__(self, held_back: str = "") -> None:
        super().__init__(WorkloadModel(CONFIG))
        self.device, self.held_back = torch.device("cpu"), held_back

    def __getattr__(self, key: str) -> Any:
        if key == self.__dict__.get("held_back"):
            raise AttributeError(key)
        return super().__getattr__(key)


def test_a_model_has_what_its_submodules_and_wrappers_give() -> None:
    """Which ``isinstance`` with a protocol does not see, from Python 3.12 on."""
    for model in (WorkloadModel(CONFIG), Forwarding()):
        assert supports_vllm_v1(model)
        with GPUGenerationModelRunner(StageConfig.from_dict({}), "cpu") as runner:
            runner.load_model(model)
            assert runner.v1_runner is not None
            assert runner.v1_runner.get_model() is model


@pytest.mark.parametrize("name", ["layers", "exchange", "compute_logits"])
def test_what_a_declared_model_lacks_is_named(name: str) -> None:
    model = Forwarding(name)
    assert not supports_vllm_v1(model)
    with pytest.raises(ConfigError, match=f"Forwarding cannot run here, it lacks: {name}. See SupportsVllmV1"):
        GPUGenerationModelRunner(StageConfig.from_dict({}), "cpu").load_model(model)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (None, "a batch is a list of ScheduledRequest, got a NoneType"),
        (ScheduledRequest("a", [1]), r"got a ScheduledRequest\. Write \[ScheduledRequest"),
        (iter([ScheduledRequest("a", [1])]), "got a list_iterator"),
        ([("a", [1])], r"got a list with \('a', \[1\]\)"),
        ([ScheduledRequest(3, [1])], "req_id: must be a text, got 3"),  # type: ignore[arg-type]
        ([ScheduledRequest(["a"], [1])], r"req_id: must be a text, got \['a'\]"),  # type: ignore[arg-type]
        ([ScheduledRequest("b", None)], "request 'b': token_ids must be a list of whole numbers, got None"),  # type: ignore[arg-type]
        ([ScheduledRequest("b", "abc")], "token_ids must be a list of whole numbers, got 'abc'"),  # type: ignore[arg-type]
        ([ScheduledRequest("b", iter([1]))], "token_ids must be a list of whole numbers, got <list_iterator"),  # type: ignore[arg-type]
        ([ScheduledRequest("b", np.ones((1, 1), int))], "token_ids must be a list of whole numbers, got array"),  # type: ignore[arg-type]
        ([ScheduledRequest("b", [1.0])], r"whole numbers from 0 to 63, got 1\.0"),  # type: ignore[list-item]
        ([ScheduledRequest("b", [True])], "whole numbers from 0 to 63, got True"),
    ],
)
def test_what_is_no_batch_is_told_and_changes_nothing(bad: Any, words: str) -> None:
    runner = ready(cudagraph_mode=NONE)
    step(runner, a=[1, 2])
    with pytest.raises(InputError, match=words):
        runner.execute_model(bad)
    for ids in (None, [["a"]], 3):
        with pytest.raises(InputError, match="requests are ended by a list of ids, each a text; got"):
            runner.finish_requests(ids)  # type: ignore[arg-type]
    assert runner.num_computed_tokens("a") == 2
    assert torch.allclose(step(runner, a=[3]).logits[0].double(), expected(runner, [1, 2, 3]), atol=2e-4)


def test_tokens_may_be_numbers_of_numpy() -> None:
    runner = ready(cudagraph_mode=NONE)
    plain, array, scalars = step(runner, a=[1, 2]), step(runner, b=np.array([1, 2])), step(runner, c=[np.int32(1), np.uint8(2)])
    assert torch.equal(plain.logits, array.logits)
    assert torch.equal(plain.logits, scalars.logits)


def test_refused_batches_change_nothing() -> None:
    runner = ready(max_num_seqs=2)
    step(runner, a=[1, 2])
    for bad, words in ((({"a": [99]}), "from 0 to 63, got 99"), ({"b": [1], "c": [1]}, "max_num_seqs is 2"), ({}, "at least one")):
        with pytest.raises(InputError, match=words):
            step(runner, **bad)
    assert runner.num_computed_tokens("a") == 2
    assert torch.allclose(step(runner, a=[3]).logits[0].double(), expected(runner, [1, 2, 3]), atol=2e-4)
    assert runner.graphs.stats().calls() == 2
