"""The vLLM v1 path on a CUDA device: the shared suites, and what only a device shows.

That is: side streams that a capture must join, memory of the caching allocator, launches, raw graphs.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from contracts.v1 import (
    FULL,
    PIECEWISE,
    BreakableContract,
    Metadata,
    Mixer,
    OffloaderContract,
    RunnerContract,
    WrapperContract,
    fresh,
    layers_of,
    mix,
    passing,
    runner_of,
)
from torch import Tensor, nn

from vgraph_lab.errors import CaptureError
from vgraph_lab.graphs.backends.base import CapturedGraph, GraphBackend, GraphNode
from vgraph_lab.graphs.backends.cuda.graph import CudaCapturedGraph
from vgraph_lab.vllm_v1 import (
    BreakableCUDAGraphCapture,
    BreakableCUDAGraphWrapper,
    CUDAGraphMode,
    CUDAGraphOptions,
    CUDAGraphWrapper,
    PrefetchOffloader,
    ScheduledRequest,
    WrapperGraphs,
    cudagraph_capturing,
)
from vgraph_lab.vllm_v1.model_wrappers import FULL_TARGET, PIECEWISE_TARGET

WIDE = 1024  # a layer's weights take 4 MiB: their copies are slow enough to be overtaken, if nobody waits for them


@pytest.fixture(scope="module", autouse=True)
def _cheap_collections() -> Iterator[None]:
    """Each pool's first capture collects garbage: keep what the test session holds out of that."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def launches(work: Callable[[], object]) -> dict[str, int]:
    """Graphs and kernels that the host launches."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
        work()
        torch.cuda.synchronize()
    wanted = ("cudaGraphLaunch", "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
    found = {event.key: event.count for event in recorded.key_averages() if event.key in wanted}
    return {"graphs": found.pop("cudaGraphLaunch", 0), "kernels": sum(found.values())}


class TestWrapper(WrapperContract):
    def test_weak_outputs_take_nothing_from_the_allocator(self, backend: GraphBackend, graphs: WrapperGraphs, x: Tensor) -> None:
        readings = []
        for number, weak in enumerate((True, True, True, False)):
            options = CUDAGraphOptions(weak_ref_output=weak)
            wrapper = CUDAGraphWrapper(torch.neg, FULL, graphs, target_id=f"v1.{number}", cudagraph_options=options)
            self.captured(wrapper, x, 8)
            readings.append(torch.cuda.memory_allocated())
        # From the second capture on: with the first one, the random generator gets a few bytes for its seed.
        assert [later - earlier for earlier, later in pairwise(readings)] == [0, 0, x.nbytes]

    def test_a_replay_is_one_launch(self, backend: GraphBackend, graphs: WrapperGraphs, x: Tensor) -> None:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).to(backend.device)
        wrapper = CUDAGraphWrapper(model, FULL, graphs)
        self.captured(wrapper, x, 8)
        with passing(FULL, 8), torch.no_grad():
            wrapper(x)
            assert launches(lambda: wrapper(x)) == {"graphs": 1, "kernels": 0}
            assert launches(lambda: model(x))["kernels"] >= 8

    def test_replays_on_other_streams_take_turns(self, graphs: WrapperGraphs) -> None:
        """The output of one stream's replay is copied before the other stream's replay may overwrite it."""
        x = torch.zeros(1 << 22, device="cuda")

        def slow(x: Tensor) -> Tensor:
            for _ in range(20):
                x = x + 1
            return x

        wrapper = CUDAGraphWrapper(slow, FULL, graphs, cudagraph_options=CUDAGraphOptions(clone_output=True))
        with passing(FULL, 8), cudagraph_capturing():
            wrapper(x)
        torch.cuda.synchronize()
        found = []
        for number in range(6):
            with torch.cuda.stream(torch.cuda.Stream()), graphs.pool.exclusive(), passing(FULL, 8):
                x.fill_(number)
                found.append(wrapper(x))
        torch.cuda.synchronize()
        assert [sorted(set(each[:: 1 << 12].tolist())) for each in found] == [[number + 20] for number in range(6)]


class TestBreakable(BreakableContract):
    def test_listings_are_those_of_the_raw_segments(self, backend: GraphBackend, graphs: WrapperGraphs, x: Tensor) -> None:
        from cuda.bindings import runtime

        wrapper = BreakableCUDAGraphWrapper(Mixer().to(backend.device), graphs)
        with passing(PIECEWISE, 8, Metadata(8)), cudagraph_capturing(), torch.no_grad():
            wrapper(x)
        (entry,) = graphs.entries()
        assert isinstance(entry.graph, BreakableCUDAGraphCapture)
        total = 0
        for _, step in entry.graph.segments:
            if isinstance(step, CapturedGraph):
                assert isinstance(step, CudaCapturedGraph)
                assert step._graph is not None
                status, _, count = runtime.cudaGraphGetNodes(runtime.cudaGraph_t(step._graph.raw_cuda_graph()))
                assert int(status) == 0
                assert len(step.nodes()) == count > 0
                total += count
        assert sum(entry.cost.node_counts.values()) == total + 3
        assert entry.cost.node_counts["host"] == 3

    def test_a_replay_launches_each_segment_once(self, backend: GraphBackend, graphs: WrapperGraphs, x: Tensor) -> None:
        """Between them, the kernels of the breaks; they are those of the breaks alone."""
        wrapper = BreakableCUDAGraphWrapper(Mixer().to(backend.device), graphs)
        with passing(PIECEWISE, 8, Metadata(8)), torch.no_grad():
            with cudagraph_capturing():
                wrapper(x)
            wrapper(x)
            found = launches(lambda: wrapper(x))
            alone = launches(lambda: [mix(x, torch.empty_like(x)) for _ in range(3)])
        assert found == {"graphs": 4, "kernels": alone["kernels"]}
        assert alone["graphs"] == 0

    def test_a_capture_that_the_driver_refuses_is_told_so(self, backend: GraphBackend, graphs: WrapperGraphs, x: Tensor) -> None:
        """Synchronised behind torch's back: in the first segment, between two breaks, and twice in a row."""

        def model(x: Tensor, where: int) -> Tensor:
            for number in range(3):
                x = x * 2
                if number == where:
                    torch._C._cuda_synchronize()
                out = torch.empty_like(x)
                mix(x, out)
                x = out
            return x + 1

        reserved = backend.memory().reserved_bytes
        for number, where in enumerate((0, 1, 2, 2)):
            wrapper = BreakableCUDAGraphWrapper(lambda x, where=where: model(x, where), graphs, PIECEWISE, target_id=f"v1.refused{number}")
            with passing(PIECEWISE, 8, Metadata(8)), cudagraph_capturing():
                with pytest.raises(CaptureError, match="CUDA refused the capture") as refused:
                    wrapper(x)
                assert "test_cuda_vllm_v1.py" in str(refused.value)
                assert graphs.pool.live_bytes == 0  # although the error is still there
        del refused
        self.assert_empty(graphs)
        assert backend.memory().reserved_bytes <= reserved
        self.assert_captures_again(graphs, x)


class TestRunner(RunnerContract):
    def test_launches_of_a_step(self, backend: GraphBackend) -> None:
        """FULL leaves nothing eager; PIECEWISE leaves a break per layer."""
        runner = runner_of(backend, CUDAGraphMode.FULL_AND_PIECEWISE)
        batch = [ScheduledRequest("a", [1, 2, 3]), ScheduledRequest("b", [4])]
        for _ in range(2):
            broken = launches(lambda: runner.execute_model(batch))
            whole = launches(lambda: runner.execute_model([ScheduledRequest("a", [5]), ScheduledRequest("b", [6])]))
        assert (broken["graphs"], whole["graphs"]) == (3, 1)
        assert whole["kernels"] < broken["kernels"]  # the head, and copies
        runner.shutdown()

    def test_memory_per_graph_is_the_allocators(self, backend: GraphBackend) -> None:
        runner = runner_of(backend, CUDAGraphMode.FULL_AND_PIECEWISE)
        entries = runner.graphs.entries()
        assert {entry.target_id for entry in entries} == {FULL_TARGET, PIECEWISE_TARGET}
        assert entries[0].cost.pool_delta_bytes > 0
        for earlier, later in pairwise(entries):
            assert later.cost.pool_reserved_before_bytes == earlier.cost.pool_reserved_after_bytes > 0
        pool = runner.graphs.pool
        assert pool.reserved_bytes == entries[-1].cost.pool_reserved_after_bytes
        owners = {s["address"]: s["segment_pool_id"] for s in torch._C._cuda_memorySnapshot(None)["segments"]}
        found = {owners[segment.address] for segment in pool.segments()}
        assert len(found) == 1  # all graphs of the runner share one pool
        assert (0, 0) not in found  # which is not the ordinary one
        assert pool.live_bytes == 0  # outputs and what breaks were given are held weakly
        runner.shutdown()


class Forgetful(PrefetchOffloader):
    """Leaves its copies unjoined."""

    def join_after_forward(self) -> None:
        """Forgets it."""


class TestOffloader(OffloaderContract):
    width = WIDE

    def test_copies_run_beside_the_layers(self, backend: GraphBackend, graphs: WrapperGraphs) -> None:
        """On a stream of their own in eager passes; in a graph, on a branch of their own."""
        layers = layers_of(backend, 6, WIDE)
        offloader = PrefetchOffloader(2)
        offloader.wrap_modules(list(layers))
        x = torch.ones(8, WIDE, device="cuda")
        whole = nn.Sequential(*layers)
        with torch.no_grad():
            whole(x)
        assert offloader._stream is not None
        assert offloader._stream.cuda_stream != torch.cuda.current_stream().cuda_stream
        assert [event is not None for event in offloader._in_flight.values()] == [True]
        assert all(host.is_pinned() and not host.is_cuda for host in offloader.host.buffers())

        wrapper = CUDAGraphWrapper(whole, FULL, graphs, offloader=offloader, modules=(offloader.host,))
        with passing(FULL, 8), cudagraph_capturing(), torch.no_grad():
            wrapper(x)
        (entry,) = graphs.entries()
        nodes = entry.graph.nodes()
        copies = [node for node in nodes if node.kind == "memcpy"]
        assert len(copies) == offloader.num_offloaded == 3
        before = ancestors(nodes)
        for copied in copies[:-1]:  # the last one is for the next pass: nothing is left to run beside it
            apart = [n for n in nodes if n.kind == "kernel" and copied.index not in before[n.index] and n.index not in before[copied.index]]
            assert apart, copied

    @pytest.mark.parametrize("mode", [FULL, PIECEWISE], ids=str)
    @pytest.mark.parametrize("num_warmups", [0, 1])
    def test_a_capture_without_the_join_is_refused(
        self, backend: GraphBackend, graphs: WrapperGraphs, mode: CUDAGraphMode, num_warmups: int
    ) -> None:
        """With a warm-up, the capture meets a copy that began outside of it; without, one that does not end inside."""
        layers = layers_of(backend, 4, WIDE)
        reference = copy.deepcopy(layers)
        offloader = Forgetful(2)
        offloader.wrap_modules(list(layers))

        def model(layers: Any, x: Tensor) -> Tensor:
            for number, layer in enumerate(layers):
                x = layer(x)
                if number == 1 and mode is PIECEWISE:
                    out = torch.empty_like(x)
                    mix(x, out)
                    x = out
            return x

        kind = CUDAGraphWrapper if mode is FULL else BreakableCUDAGraphWrapper
        arguments: dict[str, Any] = {"graphs": graphs, "runtime_mode": mode, "offloader": offloader, "modules": (layers, offloader.host)}
        wrapper = kind(lambda x: model(layers, x), cudagraph_options=CUDAGraphOptions(num_warmups=num_warmups), **arguments)
        x = torch.ones(8, WIDE, device="cuda")
        refused = pytest.raises(CaptureError, match="CUDA refused the capture")
        with passing(mode, 8, Metadata(8)), cudagraph_capturing(), torch.no_grad(), refused:
            wrapper(x)
        del refused
        offloader.restart()
        assert not backend.is_capturing()
        with torch.cuda.stream(offloader._stream):
            assert not torch.cuda.is_current_stream_capturing()
        self.assert_empty(graphs)
        with passing(CUDAGraphMode.NONE, 8, Metadata(8)), torch.no_grad():  # eager passes go on
            for seed in range(2):
                assert torch.equal(model(layers, fresh(x, seed)), model(reference, x))
        self.assert_captures_again(graphs, torch.ones(8, 64, device="cuda"))


def ancestors(nodes: list[GraphNode]) -> list[set[int]]:
    """All nodes that must finish before each node."""
    before: list[set[int]] = []
    for node in nodes:
        before.append(set(node.dependencies).union(*(before[d] for d in node.dependencies)))
    return before
