"""Retiring graphs: all together when there is no room (``eviction: generation``), or those of one Target."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from vgraph_lab.errors import BorrowedOutputError, FallbackReason
from vgraph_lab.graphs import Descriptor, Retirement, Target, VocoderCUDAGraphManager
from vgraph_lab.graphs.backends.base import GraphBackend

from .suite import LARGE, SMALL, MakeManager, ManagerSuite
from .toy import toy_target

R = FallbackReason


def renewing(max_extra_graphs: int = 1, target_id: str = "toy.main", **fields: Any) -> dict[str, Any]:
    lazy = {"enable_lazy_capture": True, "max_extra_graphs": max_extra_graphs}
    return {"eviction": "generation", "targets": {target_id: lazy}, **fields}


class GenerationContract(ManagerSuite):
    """Subclassed once per backend, which provides the ``backend`` fixture."""

    def call(self, backend: GraphBackend, target: Target[Any], batch: int, frames: int, times: int = 1) -> None:
        """Call and compare with eager; shapes are exact, so every bit counts."""
        for seed in range(times):
            x = self.x(backend, batch, frames, seed)
            assert torch.equal(target(x), target.routine.eager_call(x)), (batch, frames)

    # ------------------------------------------------------------------------------------------------ policy

    def test_the_cap_retires_the_generation(
        self, backend: GraphBackend, make: MakeManager, target: Target[Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        manager = make(target, **renewing())
        manager.capture()
        handle, first = target._delegate, manager.entries()
        self.call(backend, target, 1, 9)
        self.call(backend, target, 1, 10)  # three graphs, one call served: not yet
        assert (manager.generation, manager.stats().reasons()) == (1, {R.CAPACITY: 1})
        with manager._turn:  # the answer is known and waits for nobody
            self.call(backend, target, 1, 10)
        assert (manager.generation, manager.stats().reasons()) == (1, {R.CAPACITY: 2})
        self.call(backend, target, 1, 9, times=2)
        self.call(backend, target, 1, 10)
        assert manager.generation == 2
        assert [(e.descriptor, e.lazy, e.cost.order) for e in manager.entries()] == [
            (LARGE, False, 0),
            (SMALL, False, 1),
            (Descriptor(1, 10), True, 2),
        ]
        assert all(e.is_released for e in first)
        assert target._delegate is handle
        (retirement,) = manager.retirements()
        assert isinstance(retirement, Retirement)
        assert (retirement.generation, retirement.calls_served, retirement.graphs) == (1, 3, 3)
        assert (retirement.recaptured, retirement.lost) == (2, 0)
        assert "toy.main B1×T10 (capacity: max_extra_graphs is 1)" in retirement.why
        assert str(retirement) in caplog.text
        assert "; 1 generation retired in" in str(manager.stats())
        assert manager.stats().reasons() == {R.CAPACITY: 2}
        assert manager.rejections() == {}, "what is postponed is not rejected"
        self.call(backend, target, 2, 8)
        self.call(backend, target, 1, 9)  # two of three calls served: it waits again
        assert manager.stats().reasons() == {R.CAPACITY: 3}
        self.call(backend, target, 1, 9)
        assert manager.generation == 2, "only served calls count"
        self.call(backend, target, 2, 8)
        self.call(backend, target, 1, 9)
        assert manager.generation == 3
        assert [e.descriptor for e in manager.entries() if e.lazy] == [Descriptor(1, 9)]

    def test_without_the_policy_the_cap_is_final(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target, **renewing(eviction="none"))
        manager.capture()
        self.call(backend, target, 1, 9, times=5)
        self.call(backend, target, 1, 10, times=2)
        assert (manager.generation, manager.stats().reasons()) == (1, {R.CAPACITY: 2})
        assert manager.retirements() == ()
        assert "retired" not in str(manager.stats())

    def limited(self, backend: GraphBackend, make: MakeManager) -> tuple[VocoderCUDAGraphManager, Target[Any]]:
        """A Manager whose limit has room for start-up's graph and one large lazy graph."""
        probe = toy_target(backend.device, SMALL)
        with VocoderCUDAGraphManager(backend, [probe]) as manager:
            manager.capture()
            store = manager._store
            store.attempt(probe, Descriptor(4, 8192), lazy=True)
            limit = manager.charged_bytes + (1 << 19)
        target = toy_target(backend.device, SMALL)
        manager = make(target, **renewing(9, max_memory_bytes=limit))
        manager.capture()
        return manager, target

    def test_the_memory_limit_retires_the_generation(self, backend: GraphBackend, make: MakeManager) -> None:
        manager, target = self.limited(backend, make)
        first, second = Descriptor(4, 8192), Descriptor(4, 8000)
        self.call(backend, target, 4, 8192)
        self.call(backend, target, 4, 8000, times=3)
        assert manager.stats().reasons() == {R.OVER_BUDGET: 3}
        assert target.routine.events.count(f"allocate {second}") == 1, "a postponed Descriptor costs nothing while it waits"
        self.call(backend, target, 4, 8192)
        self.call(backend, target, 4, 8000)
        assert (manager.generation, manager.stats().reasons()) == (2, {R.OVER_BUDGET: 3})
        assert [e.descriptor for e in manager.entries()] == [SMALL, second]
        assert manager.charged_bytes <= (manager.settings.max_memory_bytes or 0)
        self.call(backend, target, 1, 4)
        self.call(backend, target, 4, 8192, times=2)
        assert manager.generation == 3
        assert [e.descriptor for e in manager.entries()] == [SMALL, first]

    def test_what_fits_nowhere_is_remembered(self, backend: GraphBackend, make: MakeManager) -> None:
        manager, target = self.limited(backend, make)
        huge = Descriptor(16, 8192)
        self.call(backend, target, 4, 8192)
        self.call(backend, target, 16, 8192)
        self.call(backend, target, 4, 8192)
        self.call(backend, target, 16, 8192)
        # CUDA cannot give back what the rejected capture took while another graph of the pool lives: it retires once more.
        generation = 2 if backend.name == "cpu" else 3
        assert (manager.generation, manager.rejections()["toy.main", huge].reason) == (generation, R.OVER_BUDGET)
        assert manager.charged_bytes <= (manager.settings.max_memory_bytes or 0)
        self.call(backend, target, 4, 8192, times=9)
        self.call(backend, target, 16, 8192, times=3)
        assert (manager.generation, manager.stats().reasons()) == (generation, {R.OVER_BUDGET: 5})
        assert target.routine.events.count(f"allocate {huge}") == 2

    def test_start_up_alone_is_never_retired(self, backend: GraphBackend, make: MakeManager) -> None:
        """A fresh generation would be the same again."""
        manager, target = self.limited(backend, make)
        self.call(backend, target, 1, 4, times=9)
        self.call(backend, target, 16, 8192, times=2)
        assert (manager.generation, manager.stats().reasons()) == (1, {R.OVER_BUDGET: 2})
        assert target.routine.events.count("allocate B16×T8192") == 1

    def test_failed_descriptors_stay_failed(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target, **renewing())
        manager.capture()
        target.routine.fail, target.routine.fail_for = {"allocate": RuntimeError("no room")}, {Descriptor(1, 12)}
        self.call(backend, target, 1, 12)
        self.call(backend, target, 1, 9, times=3)
        self.call(backend, target, 1, 10)
        target.routine.fail = {}
        self.call(backend, target, 1, 12)
        assert (manager.generation, manager.stats().reasons()) == (2, {R.FAILED_DESCRIPTOR: 2})
        assert target.routine.events.count("allocate B1×T12") == 1

    # ------------------------------------------------------------------------------------------------ failures

    @pytest.mark.parametrize("step", ["allocate", "prepare", "forward", "capture"])
    @pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
    def test_a_failed_recapture_is_remembered_and_the_others_go_on(
        self, backend: GraphBackend, make: MakeManager, target: Target[Any], step: str, strict: bool
    ) -> None:
        other = toy_target(backend.device, SMALL, target_id="toy.other")
        manager = make(target, other, **renewing(strict=strict))
        manager.capture()
        self.call(backend, target, 1, 9, times=4)
        target.routine.fail, target.routine.fail_for = {step: torch.OutOfMemoryError("injected")}, {LARGE}
        self.call(backend, target, 1, 10)
        target.routine.fail = {}
        (retirement,) = manager.retirements()
        assert (retirement.recaptured, retirement.lost) == (2, 1)
        assert ", 1 lost in" in str(retirement)
        assert "injected" in manager.rejections()["toy.main", LARGE].detail
        self.call(backend, target, 2, 8)
        assert manager.stats().reasons() == {R.FAILED_DESCRIPTOR: 1}
        for shape in ((1, 4), (1, 10)):
            self.call(backend, target, *shape)
        self.call(backend, other, 1, 4)
        assert manager.stats().hits() == 4 + 1 + 3
        self.call(backend, target, 1, 11)
        assert manager.generation == 3
        assert manager.retirements()[1].lost == 0, "it is no more among what start-up is owed"

    def test_a_reset_that_fails_is_told_and_keeps_nothing(
        self, backend: GraphBackend, make: MakeManager, target: Target[Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        manager = make(target, **renewing())
        manager.capture()
        self.call(backend, target, 1, 9, times=3)
        reset = manager.entries()[0].graph.reset

        def broken() -> None:
            reset()
            raise RuntimeError("reset broke")

        manager.entries()[0].graph.reset = broken  # type: ignore[method-assign]
        self.call(backend, target, 1, 10)
        assert "a retired graph could not be reset: reset broke" in caplog.text
        assert (manager.generation, len(manager.entries())) == (2, 3)

    def test_an_interrupted_renewal_leaves_reasons(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target, **renewing())
        manager.capture()
        self.call(backend, target, 1, 9, times=3)
        target.routine.fail, target.routine.fail_for = {"allocate": KeyboardInterrupt()}, {SMALL}
        with pytest.raises(KeyboardInterrupt):
            target(self.x(backend, 1, 10))
        target.routine.fail = {}
        assert [e.descriptor for e in manager.entries()] == [LARGE]
        assert "interrupted by KeyboardInterrupt" in manager.rejections()["toy.main", SMALL].detail
        self.call(backend, target, 2, 8)
        self.call(backend, target, 1, 10)  # a new lazy graph: the turn was given back
        assert manager.stats().hits() == 5
        manager.clear()
        assert manager.pool.reserved_bytes == 0

    # ------------------------------------------------------------------------------------------------ memory and outputs

    def test_memory_is_returned(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target, **renewing(9))
        report = manager.capture()
        for frames in (9, 4096, 2000):
            self.call(backend, target, 4, frames)
        assert manager.pool.reserved_bytes > report.pool_reserved_bytes
        manager._generations.retire("a test")
        gc.collect()
        assert (manager.pool.reserved_bytes, manager.charged_bytes) == (report.pool_reserved_bytes, report.bytes)
        assert manager.entries()[0].cost.pool_reserved_before_bytes == 0

    def test_borrowed_outputs_of_a_retired_generation_are_stale(self, backend: GraphBackend, make: MakeManager) -> None:
        target = toy_target(backend.device, SMALL, clone_output=False)
        manager = make(target, debug=True)
        manager.capture()
        borrowed = target(self.x(backend))
        manager._generations.retire("a test")
        with pytest.raises(BorrowedOutputError, match=r"toy\.main B1×T4"):
            borrowed.sum()

    def test_kept_outputs_of_a_retired_generation_are_not_overwritten(self, backend: GraphBackend, make: MakeManager) -> None:
        target = toy_target(backend.device, SMALL, clone_output=False)
        manager = make(target)
        report = manager.capture()
        borrowed = target(self.x(backend))
        expected = borrowed.clone()
        manager._generations.retire("a test")
        assert manager.pool.reserved_bytes > report.pool_reserved_bytes, "the new graphs are in fresh memory, the kept output in its own"
        for seed in range(5):
            target(self.x(backend, seed=9 + seed))
        assert torch.equal(borrowed, expected)

    @pytest.mark.parametrize("policy", ["generation", "one target"])
    def test_gemm_graphs_outlive_what_is_retired(self, backend: GraphBackend, make: MakeManager, policy: str) -> None:
        """A GEMM workspace in the memory of a graph that went was a public fault. What stays bound must stay right."""
        shapes = [Descriptor(1, 64), Descriptor(1, 32), Descriptor(1, 16)]
        gone, stays = (toy_target(backend.device, *shapes, target_id=f"toy.{name}", hidden=4096) for name in ("gone", "stays"))
        gone.routine.make_descriptor = lambda key: key
        manager = make(gone, stays, **renewing(3, target_id="toy.gone"))
        manager.capture()
        if policy == "generation":
            gone.routine.fail, gone.routine.fail_for = {"forward": RuntimeError("injected")}, set(shapes)
            manager._generations.retire("a test")
            reason = R.FAILED_DESCRIPTOR
        else:
            for entry in manager.entries():
                if entry.target_id == "toy.gone":
                    manager._store.reject(gone, entry.descriptor, R.FAILED_DESCRIPTOR, "a test")
            assert manager._store.release("toy.gone") == []
            reason = R.FAILED_DESCRIPTOR
        assert {e.target_id for e in manager.entries()} == {"toy.stays"}
        gc.collect()
        backend.release_cached_memory()
        junk = [torch.full((1 << 20,), float("nan"), device=backend.device) for _ in range(16)]
        for seed in range(100):
            for shape in shapes:
                x = self.x(backend, 1, shape.frames, seed)
                assert torch.equal(stays(x), stays.routine.eager_call(x)), (seed, shape)
            if seed == 50:  # graphs that are captured later share the pool with those that stayed
                manager._store.attempt(stays, Descriptor(1, 48), lazy=True)
        for shape in shapes:
            self.call(backend, gone, 1, shape.frames)
        assert manager.stats().hits("toy.stays") == 300
        assert manager.stats().reasons("toy.gone") == {reason: 3}
        assert all(tensor.isnan().all() for tensor in junk), "nothing wrote outside the pool"

    # ------------------------------------------------------------------------------------------------ threads

    def test_calls_meanwhile_run_eager(self, backend: GraphBackend, make: MakeManager) -> None:
        """Of Targets without lazy capture, too; and nobody waits for the captures."""
        target, other = (toy_target(backend.device, SMALL, target_id=f"toy.{name}") for name in ("main", "other"))
        manager = make(target, other, **renewing())
        manager.capture()
        self.call(backend, target, 1, 9, times=3)
        entered, go_on = threading.Event(), threading.Event()
        allocate = target.routine.allocate_buffers

        def block(descriptor: Descriptor) -> Any:
            entered.set()
            assert go_on.wait(30)
            return allocate(descriptor)

        make_descriptor = target.routine.make_descriptor
        target.routine.allocate_buffers = block
        target.routine.make_descriptor = lambda key: make_descriptor(key) if not entered.is_set() else pytest.fail("captured by two")
        worker = threading.Thread(target=target, args=(self.x(backend, 1, 10),))
        worker.start()
        assert entered.wait(30)
        x, answers = self.x(backend, seed=3), []
        for t in (target, other):
            answers.append((t(x), t.routine.eager_call(x)))
        reasons = manager.stats().reasons("toy.other") | {R.CAPACITY: 0} | manager.stats().reasons("toy.main")
        go_on.set()
        worker.join()
        assert all(torch.equal(*pair) for pair in answers)
        assert reasons == {R.NOT_READY: 1, R.CAPACITY: 0}
        self.call(backend, other, 1, 4)
        assert (manager.generation, manager.stats().hits("toy.other")) == (2, 1)

    def test_a_graph_selected_before_its_retirement_is_not_replayed(
        self, backend: GraphBackend, make: MakeManager, target: Target[Any]
    ) -> None:
        manager = make(target, **renewing())
        manager.capture()
        runtime = target._delegate._VocoderGraphHandle__call  # type: ignore[attr-defined]
        old = {entry.descriptor: entry for entry in manager.entries()}
        manager._generations.retire("a test")
        select, runtime._select = runtime._select, lambda resolution: old[resolution.candidates[0]]
        self.call(backend, target, 1, 4)
        assert (manager.stats().hits(), manager.stats().reasons()) == (0, {R.NOT_READY: 1})
        runtime._select = select
        self.call(backend, target, 1, 4)
        assert manager.stats().hits() == 1

    def test_threads_go_on_through_generations(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target, **renewing(), num_warmups=1)
        manager.capture()
        wrong: list[str] = []

        def work(thread: int) -> None:
            try:
                for i in range(60):
                    x = self.x(backend, 1, (4, 9, 4, 10 + thread)[i % 4], seed=i)
                    if not torch.equal(target(x), target.routine.eager_call(x)):
                        wrong.append(f"{thread}/{i}")
            except BaseException as error:  # noqa: BLE001 - the thread's failure is the test's
                wrong.append(repr(error))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        stats = manager.stats()
        assert wrong == []
        assert (stats.calls(), stats.replay_errors()) == (120, 0)
        assert stats.retirements == manager.generation - 1 >= 1
