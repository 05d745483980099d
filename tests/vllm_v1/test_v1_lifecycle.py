"""One model, one runner at a time: what a runner takes, what it gives back, and what passes that stop half way leave."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contracts.v1 import Around, ready_runner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vgraph_lab.config import StageConfig
from vgraph_lab.errors import LifecycleError
from vgraph_lab.graphs import CaptureProgress
from vgraph_lab.graphs.backends.cpu import CpuGraphBackend
from vgraph_lab.graphs.manager import ManagerState
from vgraph_lab.runner import GPUGenerationModelRunner
from vgraph_lab.vllm_v1 import (
    BatchDescriptor,
    BreakableCUDAGraphWrapper,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GPUModelRunner,
    PrefetchOffloader,
    RunnerConfig,
    ScheduledRequest,
    WorkloadConfig,
    WorkloadModel,
    WorkspaceManager,
    WrapperGraphs,
    cudagraph_capturing,
    set_forward_context,
)

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
CONFIG = WorkloadConfig(num_layers=4)
EXPERTS = WorkloadConfig(num_layers=2, num_experts=4)


def runner_of(model: nn.Module, mode: CUDAGraphMode = NONE, offloader: PrefetchOffloader | None = None, **fields: Any) -> GPUModelRunner:
    config = RunnerConfig(cudagraph_mode=mode, cudagraph_capture_sizes=(1, 4), max_num_batched_tokens=16, **fields)
    return ready_runner(model, config, offloader=offloader)


def logits(runner: GPUModelRunner, tokens: tuple[int, ...] = (1, 2, 3)) -> Tensor:
    runner.finish_requests(["z"])
    return runner.execute_model([ScheduledRequest("z", tokens)]).logits


@pytest.fixture(scope="module")
def expected() -> Tensor:
    """Of a runner that shares nothing with anybody."""
    return logits(runner_of(WorkloadModel(CONFIG)))


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


# ---------------------------------------------------------------------------------------------- one model, one runner


@pytest.mark.parametrize("wrap", [lambda model: model, Around], ids=["itself", "in a wrapper"])
def test_a_model_of_a_live_runner_is_refused_and_nothing_changes(wrap: Callable[[WorkloadModel], nn.Module], expected: Tensor) -> None:
    model = WorkloadModel(CONFIG)
    first = runner_of(model, CUDAGraphMode.FULL_AND_PIECEWISE)
    second = GPUModelRunner(RunnerConfig(cudagraph_mode=NONE), "cpu")
    words = rf"this {type(wrap(model)).__name__} serves another runner, which is ready: .* Call shutdown\(\) there first"
    with pytest.raises(LifecycleError, match=words):
        second.load_model(wrap(model))
    second.shutdown()
    assert model.workspace.is_locked()
    check(logits(first), expected)
    first.execute_model([ScheduledRequest("a", [1, 2])])
    check(first.execute_model([ScheduledRequest("a", [3])]).logits, expected)  # what the second step reads is in its own cache


def test_the_runner_of_stages_refuses_it_too() -> None:
    model = WorkloadModel(CONFIG)
    cfg = StageConfig(cudagraph_mode="NONE")
    with GPUGenerationModelRunner(cfg, "cpu") as first, GPUGenerationModelRunner(cfg, "cpu") as second:
        first.load_model(model)
        with pytest.raises(LifecycleError, match="this WorkloadModel serves another runner, which is new"):
            second.load_model(model)
        first.shutdown()
        second.load_model(model)
        second.capture_model()


def test_runners_one_after_the_other(expected: Tensor) -> None:
    model = WorkloadModel(CONFIG)
    first = runner_of(model, FULL)
    check(logits(first), expected)
    first.shutdown()
    second = runner_of(model, PIECEWISE)
    first.shutdown()  # once more: the model is another runner's by now
    assert model.workspace.is_locked()
    check(logits(second), expected)


def test_a_refused_model_can_be_loaded_later(expected: Tensor) -> None:
    model = WorkloadModel(CONFIG)
    first, second = runner_of(model), GPUModelRunner(RunnerConfig(cudagraph_mode=NONE), "cpu")
    with pytest.raises(LifecycleError, match="serves another runner"):
        second.load_model(model)
    first.shutdown()
    second.load_model(model)
    second.capture_model()
    check(logits(second), expected)


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_a_runner_that_is_dropped_has_no_model_any_more(is_offloaded: bool, expected: Tensor) -> None:
    model = WorkloadModel(CONFIG)
    runner = runner_of(model, FULL, PrefetchOffloader(2) if is_offloaded else None)
    check(logits(runner), expected)
    runner.itself = runner  # type: ignore[attr-defined]  # in a cycle, as an error with its frames would have it
    del runner
    assert model.workspace.is_locked()
    check(logits(runner_of(model, FULL)), expected)


def test_nothing_keeps_a_model_alive_after_shutdown() -> None:
    offloader = PrefetchOffloader(1)
    model = WorkloadModel(CONFIG)
    runner = runner_of(model, FULL, offloader)
    logits(runner)
    runner.shutdown()
    held = [weakref.ref(module) for module in (model, model.layers, model.layers[0])]
    del model
    gc.collect()
    assert [module() for module in held] == [None] * 3


# ------------------------------------------------------------------------------------------- offloaders and failures


def stopped(runner: GPUModelRunner, kind: str) -> None:
    """A pass that fails before the last layer is done, or a comparison that finds a difference there."""

    def fails(module: nn.Module, args: Any) -> None:
        raise ValueError("half way")

    late = runner.get_model().layers[3].mlp_norm  # type: ignore[union-attr, index]
    scheduled = [ScheduledRequest("b", [1, 2, 3])]
    if kind == "difference":
        hook = late.register_forward_hook(lambda module, args, output: output + 1)
        try:
            assert not runner.check_parity(scheduled).is_equal
        finally:
            hook.remove()
        return
    calls = {"step": runner.execute_model, "parity": runner.check_parity, "dummy": lambda _: runner.execute_dummy_batch()}
    hook = late.register_forward_pre_hook(fails)
    try:
        with pytest.raises(ValueError, match="half way"):
            calls[kind](scheduled)  # type: ignore[operator]
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("kind", "mode"), [("step", NONE), ("dummy", NONE), ("parity", PIECEWISE), ("difference", PIECEWISE)], ids=lambda v: str(v)
)
@pytest.mark.parametrize("step", [1, 2])
def test_passes_that_stop_half_way_leave_the_right_weights(kind: str, mode: CUDAGraphMode, step: int, expected: Tensor) -> None:
    runner = runner_of(WorkloadModel(CONFIG), mode, PrefetchOffloader(1, 1, step))
    check(logits(runner), expected)
    stopped(runner, kind)
    for _ in range(2):
        check(logits(runner), expected)


def test_a_capture_that_fails_half_way_leaves_the_right_weights(expected: Tensor) -> None:
    runner = GPUModelRunner(RunnerConfig(cudagraph_mode=FULL, cudagraph_capture_sizes=(1, 4)), "cpu", offloader=PrefetchOffloader(1))
    model = WorkloadModel(CONFIG)
    runner.load_model(model)
    hook = model.layers[3].register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.capture_model()
    hook.remove()
    runner.profile_memory()
    runner.capture_model()
    check(logits(runner), expected)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3))
def test_unwrapped_layers_are_as_before(count: int, group: int, in_group: int, step: int, passes: int) -> None:
    layers = [nn.Linear(2, 2, bias=bool(group % 2)) for _ in range(count)]
    parameters = [list(layer.parameters()) for layer in layers]
    before = [[p.detach().clone() for p in each] for each in parameters]
    offloader = PrefetchOffloader(group, min(in_group, group), step)
    for _ in range(2):
        offloader.wrap_modules(layers)
        for _ in range(passes):
            for layer in layers:
                layer(torch.ones(1, 2))
        offloader.unwrap_modules()
        offloader.unwrap_modules()
        assert offloader.num_offloaded == offloader.host_bytes == len(list(offloader.host.buffers())) == 0
        for layer, own, values in zip(layers, parameters, before, strict=True):
            assert all(one is other for one, other in zip(layer.parameters(), own, strict=True))
            assert all(torch.equal(one, other) for one, other in zip(own, values, strict=True))
            assert not layer._forward_hooks
            assert not layer._forward_pre_hooks
    addresses = [p.data_ptr() for each in parameters for p in each]
    assert len(set(addresses)) == len(addresses)


def test_weights_are_back_after_shutdown(expected: Tensor) -> None:
    model, other = WorkloadModel(CONFIG), WorkloadModel(CONFIG).state_dict()
    for offloader in (PrefetchOffloader(2), PrefetchOffloader(1, 1, 2), None):
        runner = runner_of(model, NONE, offloader)
        check(logits(runner), expected)
        runner.shutdown()
        assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())


def test_a_wrapped_model_is_not_wrapped_again() -> None:
    model = WorkloadModel(CONFIG)
    offloader, other = PrefetchOffloader(2), PrefetchOffloader(1)
    offloader.wrap_modules(list(model.layers))
    with pytest.raises(LifecycleError, match="another offloader has weights of these layers"):
        other.wrap_modules(list(model.layers))
    for its in (other, None):
        with pytest.raises(LifecycleError, match="an offloader has weights of this WorkloadModel"):
            GPUModelRunner(RunnerConfig(), "cpu", offloader=its).load_model(model)
    assert offloader.num_offloaded == 2
    offloader.unwrap_modules()
    other.wrap_modules(list(model.layers))


def test_wrapping_that_fails_gives_all_weights_back(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Linear(2, 2) for _ in range(4)]
    before = [layer.weight.detach().clone() for layer in layers]
    offloader, register, calls = PrefetchOffloader(1), nn.Module.register_buffer, []

    def runs_out(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 4:
            raise MemoryError
        register(*args)

    monkeypatch.setattr(nn.Module, "register_buffer", runs_out)
    with pytest.raises(MemoryError):
        offloader.wrap_modules(layers)
    assert all(torch.equal(layer.weight, value) for layer, value in zip(layers, before, strict=True))
    offloader.wrap_modules(layers)
    assert offloader.num_offloaded == 4


def test_unwrapping_that_fails_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Linear(2, 2) for _ in range(3)]
    before = [layer.weight.detach().clone() for layer in layers]
    offloader, to, calls = PrefetchOffloader(1), Tensor.to, []
    offloader.wrap_modules(layers)

    def runs_out(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        if len(calls) == 4:  # the second weight of the second layer
            raise MemoryError
        moved: Tensor = to(*args, **kwargs)
        return moved

    monkeypatch.setattr(Tensor, "to", runs_out)
    with pytest.raises(MemoryError):
        offloader.unwrap_modules()
    assert offloader.num_offloaded == 2
    with pytest.raises(LifecycleError, match="another offloader has weights"):
        PrefetchOffloader(1).wrap_modules(layers)
    offloader.unwrap_modules()
    assert all(torch.equal(layer.weight, value) for layer, value in zip(layers, before, strict=True))
    assert len({layer.weight.data_ptr() for layer in layers}) == 3


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_a_model_that_could_not_be_loaded_can_be_loaded_again(is_offloaded: bool, expected: Tensor) -> None:
    model = WorkloadModel(CONFIG)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    runner = GPUModelRunner(
        RunnerConfig(cudagraph_mode=FULL, cudagraph_capture_sizes=(1, 4)), "cpu", offloader=PrefetchOffloader(1) if is_offloaded else None
    )
    hook = model.layers[2].register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.load_model(model)
    hook.remove()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    runner.load_model(model)
    runner.capture_model()
    check(logits(runner), expected)


# ---------------------------------------------------------------------------------------------------- inference mode


@pytest.mark.parametrize("mode", CUDAGraphMode)
@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["mlp", "experts"])
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_what_is_made_in_inference_mode_serves_outside_of_it(mode: CUDAGraphMode, config: WorkloadConfig, is_offloaded: bool) -> None:
    expected = logits(runner_of(WorkloadModel(config)))
    with torch.inference_mode():
        model = WorkloadModel(config)
        runner = runner_of(model, mode, PrefetchOffloader(1) if is_offloaded else None)
        check(logits(runner), expected)
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
    for _ in range(2):
        check(logits(runner), expected)
        logits(runner, (5,)), logits(runner, tuple(range(9)))
        runner.execute_dummy_batch()
        with torch.inference_mode():
            check(logits(runner), expected)
    with torch.inference_mode():
        runner.shutdown()
    check(logits(runner_of(model)), expected)


def test_a_workspace_made_in_inference_mode_is_written_outside_of_it() -> None:
    with torch.inference_mode():
        manager = WorkspaceManager(torch.device("cpu"))
        for make in (lambda: manager.get_simultaneous(((4,), torch.float32)), lambda: manager.divide(2, lambda: 1)):
            make()
            assert not any(buffer.is_inference() for buffer in manager.tensors().values())
    for buffer in manager.tensors().values():
        buffer.fill_(1)


def test_layers_wrapped_and_unwrapped_in_inference_mode_run_outside_of_it() -> None:
    layers, offloader = [nn.Linear(2, 2, bias=False) for _ in range(3)], PrefetchOffloader(1)
    before = [layer.weight.detach().clone() for layer in layers]
    for wraps in (True, False):
        with torch.inference_mode():
            offloader.wrap_modules(layers) if wraps else offloader.unwrap_modules()
        assert not any(p.is_inference() for layer in layers for p in layer.parameters())
        for layer, weight in zip(layers, before, strict=True):
            x = torch.ones(1, 2)
            torch.testing.assert_close(layer(x), x @ weight.T)


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
def test_graphs_captured_in_inference_mode_replay_outside_of_it(mode: CUDAGraphMode) -> None:
    graphs, x = WrapperGraphs(CpuGraphBackend()), torch.ones(4)

    def model(x: Tensor) -> Tensor:
        assert not torch.is_inference_mode_enabled()  # what a CUDA graph makes would be written by replays outside of it
        return torch.zeros_like(x).add_(x).mul_(2)

    kind: Any = BreakableCUDAGraphWrapper(model, graphs, mode) if mode is PIECEWISE else CUDAGraphWrapper(model, mode, graphs)
    with set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=BatchDescriptor(4, 4)):
        with torch.inference_mode(), cudagraph_capturing():
            kind(x)
        x.fill_(3)
        found = kind(x)
    assert (found == 6).all()
    assert not found.is_inference()
    found.add_(1)


# ---------------------------------------------------------------------------------------------- shutdown in a capture


@pytest.mark.parametrize("step", ["capture_model", "profile_memory"])
def test_a_shutdown_by_a_progress_callback_is_refused(step: str, expected: Tensor) -> None:
    runner = GPUModelRunner(RunnerConfig(cudagraph_mode=FULL, cudagraph_capture_sizes=(1, 4)), "cpu")
    runner.load_model(WorkloadModel(CONFIG))
    refused: list[str] = []

    def stops(progress: CaptureProgress) -> None:
        if progress.done == 1:
            runner.shutdown()

    def tries(progress: CaptureProgress) -> None:
        try:
            runner.shutdown()
        except LifecycleError as error:
            refused.append(str(error))

    with pytest.raises(LifecycleError, match="To abort a capture, raise from its progress callback"):
        getattr(runner, step)(stops)
    assert runner.graphs.state is ManagerState.NEW
    assert runner.graphs.entries() == []
    getattr(runner, step)(tries)  # to refuse it is enough: the capture goes on
    assert len(refused) == 3
    if step == "profile_memory":
        runner.capture_model()
    check(logits(runner), expected)
    runner.shutdown()
    with pytest.raises(LifecycleError, match="has or had a model"):
        runner.load_model(WorkloadModel(CONFIG))


def test_a_release_that_fails_does_not_lock_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    model = WorkloadModel(CONFIG)
    runner = runner_of(model, FULL)

    def fails() -> None:
        raise RuntimeError("a graph could not be reset")

    monkeypatch.setattr(runner.graphs, "clear", fails)
    with pytest.raises(RuntimeError, match="could not be reset"):
        runner.shutdown()
    assert runner.graphs.state is ManagerState.CLEARED
    assert not model.workspace.is_locked()
    runner_of(model)
