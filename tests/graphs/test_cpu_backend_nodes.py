"""Node listings: kinds, names, and dependencies that make every other order of replay give the same result."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vgraph_lab.graphs.backends.base import GraphNode, count_nodes
from vgraph_lab.graphs.backends.cpu import CpuGraph

Capture = Callable[..., tuple[Any, Any]]


def listing(graph: CpuGraph) -> list[tuple[str, str, tuple[int, ...]]]:
    assert [node.index for node in graph.nodes()] == list(range(len(graph.nodes())))
    return [(node.kind, node.name, node.dependencies) for node in graph.nodes()]


def test_kinds_names_and_views(cpu_capture: Capture) -> None:
    x, y = torch.ones(2, 3), torch.zeros(3, 2)

    def function() -> Tensor:
        a = torch.zeros(2, 3)  # 0: a fill
        b = x.clone()  # 1: a copy
        y.copy_(b.t())  # 2: a copy that reads 1
        c = b.to(torch.float64)  # 3: a conversion is a kernel
        a.unsqueeze_(0).squeeze_().add_(1)  # 4: writes what 0 wrote
        return a.view(3, 2).t().double() @ c.t()  # 5 conversion, 6 product; views are no nodes

    graph, _ = cpu_capture(function, x, y)
    assert listing(graph) == [
        ("memset", "aten.zeros.default", ()),
        ("memcpy", "aten.clone.default", ()),
        ("memcpy", "aten.copy_.default", (1,)),
        ("kernel", "aten._to_copy.default", (1,)),
        ("kernel", "aten.add_.Tensor", (0,)),
        ("kernel", "aten._to_copy.default", (4,)),
        ("kernel", "aten.mm.default", (3, 5)),
    ]
    assert count_nodes(graph.nodes()) == {"kernel": 4, "memcpy": 2, "memset": 1}


def test_hazards_on_parts_of_one_buffer(cpu_capture: Capture) -> None:
    x = torch.zeros(8)

    def function() -> Tensor:
        x[:4].add_(1)  # 0
        x[4:].add_(2)  # 1: another part, no dependency
        y = x[2:6] * 3  # 2: reads both parts
        x[:2].sub_(1)  # 3: after 0 only: 2 does not read this part
        x[2:4].sub_(1)  # 4: after its reader 2
        return y + x[2:6]  # 5

    graph, _ = cpu_capture(function, x)
    assert [node.dependencies for node in graph.nodes()] == [(), (), (0, 1), (0,), (2,), (1, 2, 4)]


def test_a_reused_block_makes_its_new_writer_wait_for_its_old_readers(cpu_capture: Capture) -> None:
    x = torch.zeros(100)

    def function() -> tuple[Tensor, Tensor]:
        a = x + 1  # 0
        b = a * 2  # 1
        del a
        c = x + 3  # 2: reuses the block of a, so it must wait for 1
        return b, c

    graph, _ = cpu_capture(function, x)
    assert [node.dependencies for node in graph.nodes()] == [(), (0,), (1,)]


def test_draws_keep_their_order(cpu_capture: Capture) -> None:
    def function() -> tuple[Tensor, ...]:
        a = torch.rand(3)
        b = torch.ones(3)
        c = torch.rand(3, generator=torch.default_generator)
        q = a.view(1, 1, 1, 3)
        e = torch.nn.functional.scaled_dot_product_attention(q, q, q)  # draws only if it drops
        return a, b, c, e, torch.rand(3)  # its block was attention's second result

    graph, _ = cpu_capture(function)
    assert [node.dependencies for node in graph.nodes()] == [(), (), (0,), (0,), (2, 3)]


def some_order(nodes: tuple[GraphNode, ...], rng: random.Random) -> list[int]:
    """A random order that keeps the dependencies."""
    done: list[int] = []
    waiting = set(range(len(nodes)))
    while waiting:
        ready = sorted(i for i in waiting if not set(nodes[i].dependencies) & waiting)
        done.append(rng.choice(ready))
        waiting.remove(done[-1])
    return done


@pytest.mark.parametrize("seed", range(8))
def test_any_order_that_keeps_the_dependencies_gives_the_same_result(seed: int, cpu_capture: Capture) -> None:
    torch.manual_seed(seed)
    lstm, layer = nn.LSTM(8, 8, batch_first=True), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x, state = torch.randn(2, 5, 8), torch.zeros(5, 8)

    def function() -> tuple[Tensor, Tensor, Tensor]:
        y, (h, _) = lstm(layer(x) + state)
        state.copy_(y[0])
        z = layer(y)
        state[:2].mul_(0.5)
        return z + torch.rand(8), h + 1, x.cumsum(1) * torch.rand(())

    graph, output = cpu_capture(function, x, state, owned=[*lstm.parameters(), *layer.parameters()])
    x.normal_()
    torch.manual_seed(7)
    graph.replay()
    expected = [*(tensor.clone() for tensor in output), state.clone()]
    steps = list(graph._steps)
    graph._steps[:] = [steps[i] for i in some_order(tuple(graph.nodes()), random.Random(seed))]
    state.zero_()
    torch.manual_seed(7)
    graph.replay()
    for found, wanted in zip([*output, state], expected, strict=True):
        assert torch.equal(found, wanted)
