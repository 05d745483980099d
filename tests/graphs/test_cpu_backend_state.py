"""A capture leaves no trace; a replay advances state and random streams exactly as one eager call does."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vgraph_lab.errors import CaptureRefusedError
from vgraph_lab.graphs.backends.cpu import CpuGraphBackend

Capture = Callable[..., tuple[Any, Any]]


class Accumulator(nn.Module):
    """Keeps a ring of past inputs and a count of calls in its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ring", torch.zeros(4, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        ring, calls = self.get_buffer("ring"), self.get_buffer("calls")
        ring.copy_(torch.cat([ring[1:], x[None]]))
        calls += 1
        x.mul_(2)
        return ring.sum(0) / calls


def test_state_is_untouched_by_the_capture_and_advances_once_per_replay(cpu_capture: Capture) -> None:
    graphed, eager = Accumulator(), Accumulator()
    x = torch.tensor([1.0, 2.0, 3.0])
    graph, output = cpu_capture(lambda: graphed(x), x, owned=graphed.buffers())
    assert not graphed.get_buffer("ring").any()
    assert graphed.get_buffer("calls") == 0
    assert x.tolist() == [1, 2, 3]
    for step in range(1, 7):
        x.fill_(step)
        twin = x.clone()
        graph.replay()
        assert torch.equal(output, eager(twin))
        assert torch.equal(x, twin), "a write to a static input is part of the graph"
        assert torch.equal(graphed.get_buffer("ring"), eager.get_buffer("ring"))
        assert graphed.get_buffer("calls") == step


def test_state_is_put_back_through_views_and_detours(cpu_capture: Capture) -> None:
    x, y = torch.arange(8.0), torch.arange(6.0).view(2, 3)

    def function() -> Tensor:
        x[2:4].view(2, 1).zero_()
        torch.add(y, 1, out=y)
        torch._foreach_mul_([x[:2], y[0]], 3.0)
        x.data.sub_(1)
        return y.t()[1]

    graph, output = cpu_capture(function, x, y)
    assert torch.equal(x, torch.arange(8.0))
    assert torch.equal(y, torch.arange(6.0).view(2, 3))
    graph.replay()
    assert x.tolist() == [-1, 2, -1, -1, 3, 4, 5, 6]
    assert y.tolist() == [[3, 6, 9], [4, 5, 6]]
    assert output.tolist() == [6, 5]


def noise(x: Tensor) -> tuple[Tensor, ...]:
    y = torch.empty_like(x).uniform_()
    return x + torch.randn(3), torch.rand_like(x), y, F.dropout(x, 0.5, training=True), torch.randperm(5), x.abs().multinomial(2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_random_numbers_are_fresh_and_of_the_eager_stream(
    mode: type[torch.no_grad] | type[torch.inference_mode], cpu_capture: Capture
) -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    torch.manual_seed(5)
    with mode():
        graph, output = cpu_capture(lambda: noise(x), x)
    replayed = []
    for _ in range(3):
        graph.replay()
        replayed.append([tensor.clone() for tensor in output])
    torch.manual_seed(5)
    for step in range(3):
        with mode():
            eager = noise(x)
        for a, b in zip(replayed[step], eager, strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(replayed[0][1], replayed[1][1]), "each replay draws anew"
    torch.manual_seed(5)
    graph.replay()
    assert torch.equal(output[0], replayed[0][0]), "seeding repeats the stream"


@torch.library.custom_op("vgraph_lab_test::jitter", mutates_args=())
def jitter(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape)


def test_draws_inside_opaque_operators_are_put_back_too(cpu_capture: Capture) -> None:
    x = torch.zeros(3)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    graph, output = cpu_capture(lambda: jitter(x) * 2, x)
    assert torch.equal(torch.get_rng_state(), before)
    graph.replay()
    torch.manual_seed(11)
    assert torch.equal(output, jitter(x) * 2)


def test_automatic_garbage_collection_pauses(cpu_capture: Capture) -> None:
    x, seen = torch.zeros(3), []

    def function() -> Tensor:
        seen.append(gc.isenabled())
        return x + 1

    cpu_capture(function, x)
    with pytest.raises(CaptureRefusedError):
        cpu_capture(lambda: function().nonzero(), x)
    assert seen == [False, False]
    assert gc.isenabled()


def test_a_number_that_is_written_to_starts_anew_at_each_replay(cpu_capture: Capture) -> None:
    x = torch.ones(3)

    def function() -> Tensor:
        total = torch.tensor(10.0)
        total += x.sum()
        return total

    graph, output = cpu_capture(function, x)
    for _ in range(2):
        graph.replay()
        assert output == 13


def test_uninitialised_memory_is_not_copied(cpu_capture: Capture) -> None:
    x = torch.ones(3)
    graph, output = cpu_capture(lambda: torch.empty(3).copy_(x), x)
    assert [node.name for node in graph.nodes()] == ["aten.copy_.default"]
    x.fill_(6)
    graph.replay()
    assert output.tolist() == [6, 6, 6]


def test_warm_up_runs_without_gradients_and_without_the_weight_cache(cpu_backend: CpuGraphBackend) -> None:
    net, x = nn.Linear(3, 3), torch.ones(1, 3)
    seen = []

    def function() -> Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), cpu_backend.is_capturing()))
        result: Tensor = net(x)
        return result

    for audit in (False, True):
        output = cpu_backend.warm_up(function, static_inputs=[x], owned=net.parameters(), audit=audit)
        assert not output.requires_grad
    assert seen == [(False, False, False)] * 2
    assert torch.is_autocast_cache_enabled()
    assert torch.is_grad_enabled()
