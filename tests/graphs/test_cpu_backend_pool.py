"""What graphs of one pool share, and what is given back when."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vgraph_lab.graphs.backends.cpu import ArenaPool, CpuGraph, CpuGraphBackend

MIB = 1 << 20


def chain(x: Tensor) -> Tensor:
    """Several intermediates of the input's size, which die one after the other."""
    y = x.sin()
    y = y * 2 + x
    return (y.exp() - y.cos()).tanh()


def capture(pool: ArenaPool, x: Tensor) -> tuple[CpuGraph, Tensor]:
    graph, output = CpuGraphBackend().capture(lambda: chain(x), pool, static_inputs=[x], owned=[])
    assert isinstance(output, Tensor)
    return graph, output


def test_dead_intermediates_are_reused_inside_one_graph(cpu_backend: CpuGraphBackend, cpu_pool: ArenaPool) -> None:
    x = torch.randn(1000)

    def function() -> tuple[int, int, int, Tensor]:
        first = x + 1
        view = first[10:]
        address = first.data_ptr()
        del first
        second = x + 2  # the view keeps the first block
        second_address = second.data_ptr()
        del view
        third = second + 3
        return address, second_address, third.data_ptr(), third

    _, (first, second, third, output) = cpu_backend.capture(function, cpu_pool, static_inputs=[x], owned=[])
    assert first != second
    assert third == first, "the death of the last view freed the block for the next operation"
    assert cpu_pool.live_bytes == 4096 == -(-output.numel() * 4 // 512) * 512


def test_a_long_chain_needs_a_few_blocks(cpu_backend: CpuGraphBackend, cpu_pool: ArenaPool) -> None:
    x = torch.randn(100_000)

    def function() -> Tensor:
        y = x
        for _ in range(50):
            y = y + 1
        return y

    graph, output = cpu_backend.capture(function, cpu_pool, static_inputs=[x], owned=[])
    assert len(graph.nodes()) == 50
    assert cpu_pool.reserved_bytes == 2 * MIB, "two blocks of 400 kB take turns"
    assert cpu_pool.live_bytes == -(-output.numel() * 4 // 512) * 512


@settings(max_examples=15)
@given(sizes=st.lists(st.integers(1, 700_000), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_graphs_of_one_pool_replay_in_any_order(sizes: list[int], seed: int) -> None:
    pool = ArenaPool()
    inputs = [torch.randn(size) for size in sizes]
    graphs = [capture(pool, x) for x in inputs]
    rng = random.Random(seed)
    for _ in range(6):
        i = rng.randrange(len(sizes))
        inputs[i].normal_()
        graph, output = graphs[i]
        graph.replay()
        assert torch.equal(output, chain(inputs[i]))
    assert len({output.data_ptr() for _, output in graphs}) == len(graphs), "live outputs never share memory"


def test_graphs_of_one_pool_take_less_than_alone() -> None:
    sizes = (1_200_000, 600_000, 300_000)
    shared, solo_bytes, reserved, kept = ArenaPool(), 0, [], []
    for size in sizes:
        solo = ArenaPool()
        kept += [capture(shared, torch.randn(size)), capture(solo, torch.randn(size))]
        solo_bytes += solo.reserved_bytes
        reserved.append(shared.reserved_bytes)
    assert reserved[-1] < solo_bytes
    assert reserved[0] == reserved[-1], "after the largest, smaller graphs reserve nothing"
    assert len(kept) == 6


def test_the_same_captures_give_the_same_layout() -> None:
    def layout() -> Any:
        pool = ArenaPool()
        kept = [capture(pool, torch.randn(size)) for size in (70_000, 1_200_000, 300)]
        return [(segment.size_bytes, segment.blocks) for segment in pool.segments()], len(kept)

    assert layout() == layout()


def test_reset_gives_back_segments_that_nobody_uses(cpu_pool: ArenaPool) -> None:
    large, large_output = capture(cpu_pool, torch.randn(3_000_000))
    small, small_output = capture(cpu_pool, torch.randn(100))
    both = cpu_pool.reserved_bytes
    large.reset()
    assert cpu_pool.reserved_bytes == 2 * MIB + 12 * MIB < both, "a live output keeps its segment"
    del large_output
    assert cpu_pool.reserved_bytes == 2 * MIB
    del small_output
    assert (cpu_pool.reserved_bytes, cpu_pool.live_bytes) == (2 * MIB, 0), "the graph still replays into its segment"
    small.replay()
    small.reset()
    assert cpu_pool.segments() == ()


def test_a_graph_that_is_dropped_gives_back_its_segments_too(cpu_pool: ArenaPool) -> None:
    graph, output = capture(cpu_pool, torch.randn(100))
    del graph, output
    gc.collect()
    assert cpu_pool.segments() == ()


def test_a_graph_outlives_its_pool_object(cpu_backend: CpuGraphBackend) -> None:
    x = torch.randn(50)
    graph, output = capture(cpu_backend.create_pool(), x)
    gc.collect()
    x.normal_()
    graph.replay()
    assert torch.equal(output, chain(x))


@pytest.mark.parametrize("kept", [False, True])
def test_recapturing_does_not_grow_the_pool(kept: bool, cpu_pool: ArenaPool) -> None:
    x, outputs, reserved = torch.randn(200_000), [], []
    for _ in range(4):
        graph, output = capture(cpu_pool, x)
        reserved.append(cpu_pool.reserved_bytes)
        if kept:
            outputs.append(output)
        graph.reset()
        del output
    assert cpu_pool.live_bytes == len(outputs) * -(-x.numel() * 4 // 512) * 512
    if not kept:
        assert len(set(reserved)) == 1
