"""Replay: fixed addresses, static inputs, and immunity to whatever modes the caller has active."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vgraph_lab.errors import CaptureError, ForkedProcessError, ReplayError
from vgraph_lab.graphs.backends import rules
from vgraph_lab.graphs.backends.base import CapturedGraph, GraphBackend, GraphPool
from vgraph_lab.graphs.backends.cpu import ArenaPool, CpuGraphBackend

Capture = Callable[..., tuple[Any, Any]]


def test_the_backend_keeps_the_protocols(cpu_backend: CpuGraphBackend, cpu_pool: ArenaPool, cpu_capture: Capture) -> None:
    typed: GraphBackend = cpu_backend
    x = torch.ones(2)
    graph, _ = cpu_capture(lambda: x + 1, x)
    assert isinstance(cpu_pool, GraphPool)
    assert isinstance(graph, CapturedGraph)
    assert (typed.name, typed.device) == ("cpu", torch.device("cpu"))
    typed.synchronize()
    typed.release_cached_memory()
    memory = typed.memory()
    assert 0 < memory.free_bytes <= memory.total_bytes


def test_output_keeps_its_address_and_is_overwritten(cpu_capture: Capture) -> None:
    x = torch.zeros(3)
    graph, output = cpu_capture(lambda: (x * 2).exp(), x)
    address, old = output.data_ptr(), output.clone()
    x.fill_(1.0)
    assert torch.equal(output, old), "a static input alone changes nothing"
    graph.replay()
    assert output.data_ptr() == address
    assert torch.equal(output, torch.full((3,), 2.0).exp())


@torch.library.custom_op("vgraph_lab_test::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    return x[x > 0]  # a shape that depends on data, hidden from the capture rules


@pytest.mark.parametrize("count", [1, 3, 64])
def test_a_result_of_another_shape_is_an_error_not_a_broadcast(count: int, cpu_capture: Capture) -> None:
    x = torch.tensor([1.0, 2.0] + [-1.0] * 62)
    graph, output = cpu_capture(lambda: positive(x), x)
    x.fill_(-1)[:count] = 5.0
    with pytest.raises(ReplayError, match=rf"\({count},\) where it had given \(2,\)"):
        graph.replay()
    assert output.tolist() == [1, 2]


def test_an_operation_that_resizes_its_place_cannot_reach_another_graphs_memory(
    cpu_capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_UNTAGGED_SHAPES", {})  # as if the operation were not known
    x, lengths, y = torch.randn(2, 64, 8), torch.tensor([64, 2]), torch.zeros(512)
    packing, packed = cpu_capture(lambda: nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True).data, x, lengths)
    other, output = cpu_capture(lambda: y + 1, y)
    other.replay()
    lengths.fill_(64)
    with pytest.raises(RuntimeError, match="not resizable"):
        packing.replay()
    assert torch.equal(output, torch.ones(512))
    assert packed.shape == (66, 8)


def test_intermediates_keep_their_addresses_too(cpu_capture: Capture) -> None:
    x, seen = torch.randn(64), []

    def function() -> Tensor:
        y = x + 1
        seen.append(y.data_ptr())
        return y * 2

    graph, output = cpu_capture(function, x)
    graph.replay()
    assert len(seen) == 1, "no Python of the function runs in a replay"
    assert torch.equal(output, (x + 1) * 2)


def test_aliased_static_inputs_are_one_memory(cpu_capture: Capture) -> None:
    base = torch.zeros(6)
    head, tail = base[:4], base[2:]

    def function() -> Tensor:
        head.add_(1)
        return tail * 10 + base[2:]

    graph, output = cpu_capture(function, base, head, tail)
    assert not base.any(), "the capture itself leaves no trace"
    graph.replay()
    assert base.tolist() == [1, 1, 1, 1, 0, 0]
    assert output.tolist() == [11, 11, 0, 0]


def test_weights_updated_in_place_are_seen(cpu_capture: Capture) -> None:
    net, x = nn.Linear(2, 2), torch.randn(1, 2)
    graph, output = cpu_capture(lambda: net(x), x, owned=net.parameters())
    with torch.no_grad():
        net.weight.mul_(3)
        graph.replay()
        assert torch.equal(output, net(x))


class _Spy(TorchDispatchMode):
    """Turns every operation that it sees into an error."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"the caller's dispatch mode saw {op}")


class _FunctionSpy(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"the caller's function mode saw {function}")


CALLERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "dispatch_mode": _Spy,
    "function_mode": _FunctionSpy,
    "meta_device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("caller", CALLERS)
def test_replay_ignores_the_modes_of_its_caller(caller: str, cpu_capture: Capture) -> None:
    torch.manual_seed(2)
    lstm, linear, x = nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 6), torch.randn(2, 5, 6)

    def function() -> Tensor:
        result: Tensor = linear(lstm(x)[0]) + torch.arange(6) + torch.zeros(6)
        return result

    graph, output = cpu_capture(function, x, owned=[*lstm.parameters(), *linear.parameters()])
    x.normal_()
    version = output._version
    with CALLERS[caller]():
        graph.replay()
    with torch.no_grad():
        assert torch.equal(output, function())
    assert output.dtype == torch.float32
    assert not output.requires_grad
    assert output._version == version


def test_replay_ignores_the_default_dtype(cpu_capture: Capture) -> None:
    x = torch.zeros(3)

    def function() -> Tensor:
        return torch.linspace(0, 1, 3) / 3 + torch.rand(3) + x

    graph, output = cpu_capture(function, x)
    torch.manual_seed(3)
    expected = function()
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        graph.replay()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(output, expected)


def test_autocast_weight_cache_does_not_reach_the_graph(cpu_capture: Capture) -> None:
    net, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            before = net(x)  # fills the cache of weight casts
        graph, output = cpu_capture(lambda: net(x), x, owned=net.parameters())
        assert torch.equal(output, before)
        assert torch.is_autocast_cache_enabled(), "the caller's setting is back"
        with torch.no_grad():
            net.weight.add_(1)
    graph.replay()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(output, net(x))
    assert not torch.equal(output, before)


def test_casts_that_the_caller_has_cached_are_not_used(cpu_backend: CpuGraphBackend) -> None:
    net, x = nn.Linear(4, 4), torch.ones(1, 4)

    def caching() -> Any:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
            return net(x)

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        net(x)
        net.weight.add_(1)
        first = cpu_backend.warm_up(caching, static_inputs=[x], owned=net.parameters(), audit=False)
        net.weight.add_(1)
        second = net(x)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(second, net(x)), "nor does the caller use those of the warm-up"
        net.weight.sub_(1)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(first, net(x))


def test_a_reset_graph_does_not_replay(cpu_capture: Capture) -> None:
    x = torch.ones(2)
    graph, output = cpu_capture(lambda: x + 1, x)
    graph.reset()
    graph.reset()
    assert graph.nodes() == ()
    with pytest.raises(ReplayError, match="reset"):
        graph.replay()
    assert output.tolist() == [2, 2], "a live output keeps its bytes"


def test_a_forked_process_does_not_replay(cpu_capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2)
    graph, _ = cpu_capture(lambda: x + 1, x)
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(ForkedProcessError, match="capture again"):
        graph.replay()


def test_captures_do_not_nest(cpu_backend: CpuGraphBackend, cpu_capture: Capture) -> None:
    x = torch.ones(2)
    inner, _ = cpu_capture(lambda: x * 3, x)
    seen = []

    def nested() -> Any:
        seen.append(cpu_backend.is_capturing())
        return cpu_backend.capture(lambda: x + 1, cpu_backend.create_pool(), static_inputs=[x], owned=[])[1]

    with pytest.raises(CaptureError, match="inside another"):
        cpu_capture(nested, x)

    def replaying() -> Tensor:
        inner.replay()
        return x + 1

    with pytest.raises(ReplayError, match="inside a capture"):
        cpu_capture(replaying, x)
    assert seen == [True]
    assert not cpu_backend.is_capturing()
    inner.replay()


def test_a_pool_of_another_backend_is_refused(cpu_backend: CpuGraphBackend) -> None:
    class Other:
        reserved_bytes = live_bytes = 0

        def exclusive(self) -> AbstractContextManager[None]:
            return nullcontext()

    with pytest.raises(CaptureError, match="Other"):
        cpu_backend.capture(lambda: None, Other(), static_inputs=[], owned=[])


def test_a_default_device_does_not_disturb_the_capture(cpu_capture: Capture) -> None:
    x = torch.ones(3)
    with torch.device("meta"):
        graph, output = cpu_capture(lambda: x + torch.ones(3, device="cpu") * torch.tensor(2.0, device="cpu"), x)
        x.add_(1)
        graph.replay()
    assert output.tolist() == [4, 4, 4]
