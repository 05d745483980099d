"""What every graph backend must do. Subclassed once per backend, which provides the ``backend`` fixture."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vgraph_lab.errors import CaptureError, CaptureRefusedError, ReplayError
from vgraph_lab.graphs.backends.base import CapturedGraph, GraphBackend, GraphPool, count_nodes

ROWS = 64


def prepare(
    backend: GraphBackend, function: Callable[[Tensor], Any], x: Tensor, pool: GraphPool, owned: tuple[Tensor, ...] = ()
) -> tuple[CapturedGraph, Any]:
    """Warm up and capture ``function(x)`` as a Manager does."""
    backend.warm_up(lambda: function(x), static_inputs=[x], owned=owned, audit=True)
    return backend.capture(lambda: function(x), pool, static_inputs=[x], owned=owned)


class BackendContract:
    """Same semantics, same errors, same records on every backend."""

    @pytest.fixture
    def x(self, backend: GraphBackend) -> Tensor:
        return torch.ones(ROWS, ROWS, device=backend.device)

    @pytest.fixture
    def weight(self, backend: GraphBackend) -> Tensor:
        return torch.randn(ROWS, ROWS, generator=torch.Generator().manual_seed(1)).to(backend.device)

    def test_replay_equals_eager(self, backend: GraphBackend, x: Tensor, weight: Tensor) -> None:
        def function(t: Tensor) -> Tensor:
            return (t @ weight).relu() + t

        graph, output = prepare(backend, function, x, backend.create_pool(), (weight,))
        for seed in range(5):
            x.copy_(torch.randn(ROWS, ROWS, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            assert torch.equal(output, function(x))

    def test_inputs_change_through_static_buffers_only(self, backend: GraphBackend, x: Tensor) -> None:
        graph, output = prepare(backend, lambda t: t * 2, x, backend.create_pool())
        graph.replay()
        assert (output == 2).all()
        x = x + 5  # a new tensor: the graph must not see it
        graph.replay()
        assert (output == 2).all()
        assert (x == 6).all()

    def test_segments_are_what_the_pool_holds(self, backend: GraphBackend, x: Tensor) -> None:
        pool = backend.create_pool()
        assert pool.segments() == ()
        graph, output = prepare(backend, lambda t: (t + 1) * 2, x, pool)
        segments = pool.segments()
        assert sum(segment.size_bytes for segment in segments) == pool.reserved_bytes
        for segment in segments:
            ends = [block.offset_bytes + block.size_bytes for block in segment.blocks]
            assert [0, *ends[:-1]] == [block.offset_bytes for block in segment.blocks]
            assert ends[-1] == segment.size_bytes
        live = [
            (segment.address + block.offset_bytes, block.size_bytes) for segment in segments for block in segment.blocks if block.is_live
        ]
        assert sum(size for _, size in live) == pool.live_bytes
        assert any(begin <= output.data_ptr() < begin + size for begin, size in live)
        del output
        graph.reset()
        backend.release_cached_memory()
        assert pool.segments() == ()

    def test_output_has_one_address_and_is_overwritten(self, backend: GraphBackend, x: Tensor) -> None:
        graph, output = prepare(backend, lambda t: t + 1, x, backend.create_pool())
        graph.replay()
        address, borrowed = output.data_ptr(), output[0]
        x.fill_(10)
        graph.replay()
        assert output.data_ptr() == address
        assert (borrowed == 11).all()

    def test_weights_are_read_in_place(self, backend: GraphBackend, x: Tensor) -> None:
        layer = nn.Linear(ROWS, ROWS, bias=False, device=backend.device)
        graph, output = prepare(backend, layer, x, backend.create_pool(), tuple(layer.parameters()))
        with torch.no_grad():
            layer.weight.fill_(0.25)
        graph.replay()
        assert torch.allclose(output, torch.full_like(output, ROWS * 0.25))

    def test_graphs_of_one_pool_replay_in_any_order(self, backend: GraphBackend, x: Tensor, weight: Tensor) -> None:
        pool = backend.create_pool()
        functions = [lambda t, k=k: ((t * k) @ weight).tanh() @ weight + k for k in (1.0, 2.0, 3.0)]
        graphs = [prepare(backend, f, x, pool, (weight,)) for f in functions]
        for index in (2, 0, 1, 1, 2, 0):
            graph, output = graphs[index]
            graph.replay()
            assert torch.equal(output, functions[index](x))

    def test_pool_is_shared(self, backend: GraphBackend) -> None:
        """Largest first: the smaller graphs fit into the memory of the first, so the sum of solo pools is larger."""
        big = [torch.ones(n, 1 << 20, device=backend.device) for n in (16, 8, 4)]  # 64, 32, 16 MiB

        def chain(t: Tensor) -> Tensor:
            return (t + 1).mul(2).sub(3).sum(1)

        solo = [backend.create_pool() for _ in big]
        kept = [prepare(backend, chain, t, pool) for t, pool in zip(big, solo, strict=True)]
        shared = backend.create_pool()
        kept += [prepare(backend, chain, t, shared) for t in big]
        assert shared.reserved_bytes <= solo[0].reserved_bytes
        assert shared.reserved_bytes < sum(p.reserved_bytes for p in solo) * 0.7
        for graph, _ in kept:
            graph.reset()

    def test_nodes(self, backend: GraphBackend, x: Tensor) -> None:
        graph, _ = prepare(backend, lambda t: (t + 1).relu() * 3, x, backend.create_pool())
        nodes = graph.nodes()
        assert count_nodes(nodes) == {"kernel": 3}
        assert [n.index for n in nodes] == [0, 1, 2]
        assert all(d < n.index for n in nodes for d in n.dependencies)
        assert [n.dependencies for n in nodes] == [(), (0,), (1,)]
        assert all(n.name for n in nodes)

    def test_reset_releases_the_pool(self, backend: GraphBackend) -> None:
        x = torch.ones(1 << 22, device=backend.device)
        pool = backend.create_pool()
        assert pool.reserved_bytes == 0
        graph, output = prepare(backend, lambda t: (t + 1) * 2, x, pool)
        assert pool.reserved_bytes >= output.numel() * 4
        assert pool.live_bytes >= output.numel() * 4
        del output
        graph.reset()
        graph.reset()
        backend.release_cached_memory()
        assert pool.reserved_bytes == 0
        assert graph.nodes() == [] or graph.nodes() == ()

    def test_replay_after_reset_fails(self, backend: GraphBackend, x: Tensor) -> None:
        graph, _ = prepare(backend, lambda t: t + 1, x, backend.create_pool())
        graph.reset()
        with pytest.raises(ReplayError, match="reset"):
            graph.replay()

    def test_a_pool_serves_again_after_its_last_graph(self, backend: GraphBackend, x: Tensor) -> None:
        pool = backend.create_pool()
        for k in (1, 2, 3):
            graph, output = prepare(backend, lambda t, k=k: t + k, x, pool)
            graph.replay()
            assert (output == 1 + k).all()
            if k == 2:
                del output  # and once with the output still alive
            graph.reset()

    def test_a_renewed_pool_leaves_kept_outputs_alone(self, backend: GraphBackend) -> None:
        """What outlives its graph keeps its memory; the next generation starts in fresh memory."""
        x, pool = torch.ones(1 << 21, device=backend.device), backend.create_pool()
        graph, kept = prepare(backend, lambda t: t + 1, x, pool)
        graph.replay()
        graph.reset()
        backend.release_cached_memory()
        old = pool.reserved_bytes
        pool.renew()
        graph, output = prepare(backend, lambda t: (t * 3 + 2) * 2, x, pool)
        graph.replay()
        assert (kept == 2).all()
        assert (output == 10).all()
        both = pool.reserved_bytes
        del kept
        backend.release_cached_memory()
        assert 0 < old == both - pool.reserved_bytes
        pool.renew()  # with a graph in it: that graph goes on
        again, other = prepare(backend, lambda t: t - 1, x, pool)
        graph.replay()
        assert (output == 10).all()
        again.replay()
        assert (other == 0).all()
        for captured in (graph, again):
            captured.reset()
        del output, other
        backend.release_cached_memory()
        assert pool.reserved_bytes == 0

    @pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
    def test_matrix_products_leave_nothing_in_the_pool(self, backend: GraphBackend, warm: bool) -> None:
        """Scratch memory that a library keeps between calls must not be a graph's, nor the other way round."""
        weight, x = torch.randn(4096, 64, device=backend.device), torch.randn(8, 4096, device=backend.device)
        expected, pool = x @ weight, backend.create_pool()
        if warm:
            backend.warm_up(lambda: x @ weight, static_inputs=[x], owned=[weight], audit=True)
        graph, output = backend.capture(lambda: x @ weight, pool, static_inputs=[x], owned=[weight])
        assert pool.live_bytes == 8 * 64 * 4
        graph.replay()
        assert torch.equal(output, expected)
        del output
        graph.reset()
        backend.release_cached_memory()
        assert pool.reserved_bytes == 0

    @pytest.mark.parametrize(
        ("function", "operation"),
        [
            (lambda t: t * float(t.sum()), "item"),
            (lambda t: t[t > 0], "index"),
            (lambda t: t.nonzero(), "nonzero"),
            (lambda t: t.cpu(), "cpu"),
            (lambda t: t.tolist(), "tolist"),
            (lambda t: t + 1 if t.sum() > 0 else t, ""),
            (lambda t: torch.unique(t), "unique"),
            (lambda t: torch.masked_select(t, t > 0), "masked_select"),
        ],
        ids=["item", "mask", "nonzero", "cpu", "tolist", "truth", "unique", "masked_select"],
    )
    def test_refusals_name_operation_and_line(
        self, backend: GraphBackend, x: Tensor, function: Callable[[Tensor], Any], operation: str
    ) -> None:
        pool = backend.create_pool()
        keep, keep_output = prepare(backend, lambda t: t - 1, x, pool)
        before = (pool.reserved_bytes, pool.live_bytes)
        with pytest.raises(CaptureRefusedError) as refusal:
            prepare(backend, function, x, pool)
        assert operation in str(refusal.value).lower()
        assert "contracts/backend.py" in refusal.value.where
        assert (pool.reserved_bytes, pool.live_bytes) == before
        keep.replay()
        assert (keep_output == 0).all()

    def test_foreign_tensor_is_refused(self, backend: GraphBackend, x: Tensor) -> None:
        fresh = torch.ones_like(x)
        with pytest.raises(CaptureRefusedError, match="outside the captured function"):
            prepare(backend, lambda t: t + fresh, x, backend.create_pool())

    def test_declared_tensor_is_accepted(self, backend: GraphBackend, x: Tensor) -> None:
        mine = torch.ones_like(x)
        graph, output = prepare(backend, lambda t: t + mine, x, backend.create_pool(), (mine,))
        graph.replay()
        assert (output == 2).all()

    def test_user_exception_passes_through_and_unwinds(self, backend: GraphBackend, x: Tensor) -> None:
        pool = backend.create_pool()
        with pytest.raises(ZeroDivisionError) as error:
            backend.capture(lambda: (x * 2, 1 // 0), pool, static_inputs=[x], owned=())
        assert pool.live_bytes == 0, error
        backend.release_cached_memory()
        assert pool.reserved_bytes == 0
        assert not backend.is_capturing()
        graph, output = prepare(backend, lambda t: t + 1, x, pool)
        graph.replay()
        assert (output == 2).all()

    def test_nested_capture_is_refused(self, backend: GraphBackend, x: Tensor) -> None:
        pool = backend.create_pool()

        def outer() -> Tensor:
            assert backend.is_capturing()
            with pytest.raises(CaptureError, match=r"nest|inside another"):
                backend.capture(lambda: x + 1, pool, static_inputs=[x], owned=())
            return x + 2

        assert not backend.is_capturing()
        graph, output = backend.capture(outer, pool, static_inputs=[x], owned=())
        graph.replay()
        assert (output == 3).all()

    def test_foreign_pool_is_refused(self, backend: GraphBackend, x: Tensor) -> None:
        class OtherPool:
            reserved_bytes = live_bytes = 0

        with pytest.raises(Exception, match="create_pool"):
            backend.capture(lambda: x + 1, OtherPool(), static_inputs=[x], owned=())  # type: ignore[arg-type]

    def test_autocast_weight_cache_stays_out(self, backend: GraphBackend, x: Tensor) -> None:
        """A cached half-precision copy of a weight would make replays miss later weight updates."""
        layer = nn.Linear(ROWS, ROWS, bias=False, device=backend.device)
        with torch.autocast(backend.device.type, torch.bfloat16):
            layer(x)  # fills the cache of this autocast region
            graph, output = prepare(backend, layer, x, backend.create_pool(), tuple(layer.parameters()))
        with torch.no_grad():
            layer.weight.fill_(0.5)
        graph.replay()
        assert (output.float() == ROWS * 0.5).all()
        assert torch.is_autocast_cache_enabled()

    def test_random_numbers_are_fresh_and_seedable(self, backend: GraphBackend, x: Tensor) -> None:
        graph, output = prepare(backend, lambda t: t + torch.rand_like(t), x, backend.create_pool())

        def draw(seed: int) -> Tensor:
            torch.manual_seed(seed)
            graph.replay()
            return output.clone()

        first = draw(1)
        graph.replay()
        assert not torch.equal(first, output)
        assert torch.equal(first, draw(1))
        assert not torch.equal(first, draw(2))

    def test_another_thread_may_work_during_a_capture(self, backend: GraphBackend, x: Tensor) -> None:
        host = torch.arange(1000.0)
        done: list[float] = []

        def side_work() -> None:
            done.append(float(host.to(backend.device).mul(2).sum().item()))

        def captured() -> Tensor:
            worker = threading.Thread(target=side_work)
            worker.start()
            y = x + 1
            worker.join()
            return y

        graph, output = backend.capture(captured, backend.create_pool(), static_inputs=[x], owned=())
        graph.replay()
        assert done == [999_000.0]
        assert (output == 2).all()

    def test_pool_is_exclusive_between_threads(self, backend: GraphBackend) -> None:
        pool, inside, worst = backend.create_pool(), [0], [0]

        def hold() -> None:
            for _ in range(200):
                with pool.exclusive(), pool.exclusive():
                    inside[0] += 1
                    worst[0] = max(worst[0], inside[0])
                    inside[0] -= 1

        threads = [threading.Thread(target=hold) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert worst == [1]

    def test_no_memory_is_left_behind(self, backend: GraphBackend) -> None:
        x = torch.ones(1 << 20, device=backend.device)

        def cycle() -> int:
            pool = backend.create_pool()
            graph, output = prepare(backend, lambda t: (t + 1).exp().log(), x, pool)
            graph.replay()
            del output
            graph.reset()
            gc.collect()
            backend.release_cached_memory()
            return backend.memory().reserved_bytes + pool.reserved_bytes

        first = cycle()
        assert [cycle() for _ in range(3)] == [first] * 3
