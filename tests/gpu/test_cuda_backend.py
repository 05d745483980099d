"""What only a CUDA device has: streams, the caching allocator, invalidated captures, raw graphs."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch
from contracts.toy import WIDTH, toy_target

from vgraph_lab.errors import BackendError, CaptureError
from vgraph_lab.graphs import Descriptor, VocoderCUDAGraphManager, create_backend
from vgraph_lab.graphs.backends.base import GraphBackend
from vgraph_lab.graphs.backends.cuda import CudaGraphBackend, allocator_segments


def test_device_index_is_kept_and_checked() -> None:
    count = torch.cuda.device_count()
    assert create_backend(f"cuda:{count - 1}").device == torch.device("cuda", count - 1)
    with pytest.raises(BackendError, match=f"cuda:{count} is not a CUDA device"):
        CudaGraphBackend(f"cuda:{count}")


@pytest.mark.parametrize("index", range(2))
def test_capture_lands_on_the_configured_device(index: int) -> None:
    """Not on the current one: an empty graph on cuda:1 was a public fault."""
    if index >= torch.cuda.device_count():
        pytest.skip(f"this machine has no cuda:{index}")
    target = toy_target(f"cuda:{index}", Descriptor(1, 4))
    with VocoderCUDAGraphManager(create_backend(f"cuda:{index}"), [target]) as manager:
        report = manager.capture()
        assert report.captured == 1
        assert sum(manager.entries()[0].cost.node_counts.values()) > 0
        x = torch.randn(1, 4, WIDTH, device=f"cuda:{index}")
        assert torch.equal(target(x), target.routine.eager_call(x))


def _synchronise_behind_torch(x: torch.Tensor) -> torch.Tensor:
    """What a third-party extension might do: no aten operation tells of it."""
    y = x * 2
    torch._C._cuda_synchronize()
    return y


@pytest.mark.parametrize("earlier_graph", [False, True], ids=["alone", "beside a graph"])
def test_invalidated_capture_is_unwound(backend: GraphBackend, earlier_graph: bool) -> None:
    x = torch.ones(1 << 22, device="cuda")
    pool = backend.create_pool()
    if earlier_graph:
        kept, kept_output = backend.capture(lambda: x + 1, pool, static_inputs=[x], owned=())
    torch.cuda.empty_cache()
    before, live = backend.memory().reserved_bytes, pool.live_bytes
    for _ in range(2):
        with pytest.raises(CaptureError, match="CUDA refused the capture") as error:
            backend.capture(lambda: _synchronise_behind_torch(x), pool, static_inputs=[x], owned=())
        assert "test_cuda_backend.py" in str(error.value)
        assert pool.live_bytes == live
        assert not backend.is_capturing()
    gc.collect()
    torch.cuda.empty_cache()
    if earlier_graph:
        kept.replay()
        assert (kept_output == 2).all()
    else:
        assert backend.memory().reserved_bytes == before
    torch.rand(3, device="cuda")  # the generator is free again
    torch.zeros(1, device="cuda").item()
    graph, output = backend.capture(lambda: x + 5, pool, static_inputs=[x], owned=())
    graph.replay()
    assert (output == 6).all()
    graph.reset()


def test_out_of_memory_in_a_capture_is_unwound(backend: GraphBackend) -> None:
    x = torch.ones(8, device="cuda")
    pool = backend.create_pool()
    total = backend.memory().total_bytes
    with pytest.raises(CaptureError, match="out of memory"):
        backend.capture(lambda: (x + 1, torch.empty(2 * total, dtype=torch.uint8, device="cuda")), pool, static_inputs=[x], owned=())
    torch.cuda.empty_cache()
    assert (pool.live_bytes, pool.reserved_bytes) == (0, 0)
    graph, output = backend.capture(lambda: x + 1, pool, static_inputs=[x], owned=())
    graph.replay()
    assert (output == 2).all()


def test_pool_bytes_are_those_of_the_allocators_snapshot(backend: GraphBackend) -> None:
    def private() -> dict[int, dict[str, int]]:
        return {s["address"]: s for s in torch._C._cuda_memorySnapshot(None)["segments"] if tuple(s["segment_pool_id"]) != (0, 0)}

    x = torch.ones(1 << 22, device="cuda")
    pool = backend.create_pool()
    earlier, before = private(), backend.memory()
    graph, output = backend.capture(lambda: (x + 1) * 2, pool, static_inputs=[x], owned=())
    mine = [segment for address, segment in private().items() if address not in earlier]
    assert pool.reserved_bytes == sum(s["total_size"] for s in mine)
    assert pool.live_bytes == sum(s["allocated_size"] for s in mine) == output.numel() * 4
    assert before.free_bytes - backend.memory().free_bytes >= pool.reserved_bytes
    graph.reset()


def test_reading_a_pool_takes_no_reference_of_its_number(backend: GraphBackend) -> None:
    """torch's own way of reading one pool does; behind number 256, where numbers are objects that die, that ends the process."""
    while max(torch.cuda.graph_pool_handle()) < 300:
        pass
    x, pool = torch.ones(8, device="cuda"), backend.create_pool()
    graph, output = backend.capture(lambda: x + 1, pool, static_inputs=[x], owned=())
    (handle,) = {
        s["segment_pool_id"] for s in torch._C._cuda_memorySnapshot(None)["segments"] if s["address"] == pool.segments()[0].address
    }
    assert max(handle) > 300
    mine = torch.cuda.graph_pool_handle()
    number = max(mine)
    kept = [number] * 1000  # if references are taken, there are enough for this test to end
    before = sys.getrefcount(number)
    for _ in range(100):
        assert allocator_segments([mine]) == {mine: []}
        assert [segment["total_size"] for segment in allocator_segments([mine, handle])[handle]] == [pool.reserved_bytes]
    assert sys.getrefcount(number) == before

    beside = torch.cuda.CUDAGraph()
    with torch.cuda.graph(beside, pool=mine):
        other = x + 2
    assert sum(segment["allocated_size"] for segment in allocator_segments([mine])[mine]) == 512  # what the allocator gives at least
    number = max(pool._handles[-1])
    kept += [number] * 1000
    before = sys.getrefcount(number)
    for _ in range(100):
        assert len(pool.segments()) == 1
        assert (pool.live_bytes, pool.reserved_bytes) == (512, 2 << 20)
    assert sys.getrefcount(number) == before
    assert len(kept) == 2000
    del other, output
    beside.reset()
    graph.reset()


def test_nodes_are_those_of_the_raw_graph(backend: GraphBackend) -> None:
    """Kernels by name, a copy and a fill, compared with a listing by the runtime API."""
    from cuda.bindings import runtime

    x, y = torch.ones(64, 64, device="cuda"), torch.empty(64, 64, device="cuda")

    def work() -> torch.Tensor:
        y.copy_(x)
        y.zero_()
        return (x @ x).relu()

    backend.warm_up(work, static_inputs=[x, y], owned=(), audit=True)
    graph, _ = backend.capture(work, backend.create_pool(), static_inputs=[x, y], owned=())
    nodes = graph.nodes()
    status, _, count = runtime.cudaGraphGetNodes(runtime.cudaGraph_t(graph._graph.raw_cuda_graph()))  # type: ignore[union-attr, attr-defined]
    assert int(status) == 0
    assert len(nodes) == count
    kinds = [n.kind for n in nodes]
    assert kinds.count("memcpy") == 1
    assert any("relu" in n.name or "clamp" in n.name or "elementwise" in n.name for n in nodes)
    assert all(n.name for n in nodes if n.kind == "kernel")


def test_two_streams_wait_for_each_other(backend: GraphBackend) -> None:
    """A second thread on its own stream must not overwrite buffers whose replay is still running on the first."""
    descriptor = Descriptor(8, 1 << 16)
    target = toy_target("cuda", descriptor)
    with VocoderCUDAGraphManager(backend, [target]) as manager:
        manager.capture()
        inputs = [torch.randn(8, 1 << 16, WIDTH, generator=torch.Generator().manual_seed(i)).cuda() for i in range(2)]
        expected = [target.routine.eager_call(x) for x in inputs]
        torch.cuda.synchronize()
        wrong: list[int] = []

        def work(i: int) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                outputs = [target(inputs[i]) for _ in range(30)]
                torch.cuda.current_stream().synchronize()
                wrong.extend(i for y in outputs if not torch.equal(y, expected[i]))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert wrong == []
        assert manager.stats().hits() == 60


@pytest.mark.parametrize("cleared_by", ["reset", "someone"])
def test_gemm_graphs_survive_whoever_clears_the_workspaces(backend: GraphBackend, cleared_by: str) -> None:
    """A cuBLAS workspace that a graph shares with the rest of the process was a public fault.

    It lived in a reset graph's memory, or in memory that torch's compiler, or a newer torch at any graph's reset, gives
    back. The long inner dimension makes cuBLAS split it, and the parts meet in the workspace.
    """
    wide, narrow = torch.randn(512, 8192, device="cuda"), torch.randn(8192, 64, device="cuda") / 90
    pool = backend.create_pool()
    inputs = [torch.randn(n, 512, device="cuda") for n in (64, 32, 16)]

    def work(x: torch.Tensor) -> torch.Tensor:
        return (x @ wide) @ narrow

    graphs = []
    for x in inputs:
        backend.warm_up(lambda x=x: work(x), static_inputs=[x], owned=[wide, narrow], audit=True)
        graphs.append(backend.capture(lambda x=x: work(x), pool, static_inputs=[x], owned=[wide, narrow]))
    if cleared_by == "reset":
        graphs[0][0].reset()
        graphs[0] = (graphs[0][0], None)
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    for _ in range(100):
        for (graph, output), x in list(zip(graphs, inputs, strict=True))[1:]:
            graph.replay()
            assert torch.equal(output, work(x))
    assert all(tensor.isnan().all() for tensor in junk), "a replay wrote into memory that is not its pool's"


def test_a_workspace_is_the_pools_and_goes_with_it(backend: GraphBackend) -> None:
    weight, x = torch.randn(8192, 64, device="cuda"), torch.randn(16, 8192, device="cuda")
    backend.warm_up(lambda: x @ weight, static_inputs=[x], owned=[weight], audit=True)
    backend.release_cached_memory()
    before, pool = backend.memory(), backend.create_pool()
    graph, output = backend.capture(lambda: x @ weight, pool, static_inputs=[x], owned=[weight])
    assert pool.live_bytes == output.numel() * 4, "the workspace is free again, for the next graph of the pool"
    assert pool.reserved_bytes > pool.live_bytes + (1 << 20), "but it was there"
    with pytest.raises(ZeroDivisionError):
        backend.capture(lambda: (x @ weight, 1 // 0), pool, static_inputs=[x], owned=[weight])
    assert pool.live_bytes == output.numel() * 4
    del output
    graph.reset()
    backend.release_cached_memory()
    assert (pool.reserved_bytes, backend.memory().allocated_bytes) == (0, before.allocated_bytes)


def test_a_renewed_pool_starts_in_fresh_memory(backend: GraphBackend) -> None:
    x, pool = torch.ones(1 << 20, device="cuda"), backend.create_pool()
    graph, kept = backend.capture(lambda: x + 1, pool, static_inputs=[x], owned=())
    graph.replay()
    graph.reset()
    pool.renew()
    graph, output = backend.capture(lambda: x + 2, pool, static_inputs=[x], owned=())
    graph.replay()
    assert (output == 3).all()
    assert (kept == 2).all()
    owners = {segment["address"]: segment["segment_pool_id"] for segment in torch._C._cuda_memorySnapshot(None)["segments"]}
    assert len({owners[segment.address] for segment in pool.segments()}) == 2
    graph.reset()
