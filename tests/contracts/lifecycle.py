"""What the Manager promises, on every backend: order, isolation, fallback, failure at each step, cleanup."""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from vgraph_lab.errors import (
    BorrowedOutputError,
    ConfigError,
    FallbackReason,
    ForkedProcessError,
    InputError,
    LifecycleError,
    OutOfBudgetError,
    ReplayError,
    VGraphLabError,
)
from vgraph_lab.graphs import CaptureProgress, Descriptor, GraphEntry, ManagerState, Target, VocoderCUDAGraphManager
from vgraph_lab.graphs import manager as manager_module
from vgraph_lab.graphs.backends.base import GraphBackend

from .suite import LARGE, SMALL, MakeManager, ManagerSuite
from .toy import WIDTH, toy_target

R = FallbackReason


class LifecycleContract(ManagerSuite):
    """Subclassed once per backend, which provides the ``backend`` fixture."""

    # ------------------------------------------------------------------------------------------------ order

    def test_whole_lifecycle_in_order(self, backend: GraphBackend, make: MakeManager) -> None:
        events: list[str] = []
        target = toy_target(backend.device, SMALL, LARGE, events=events, is_capturing=backend.is_capturing)

        def progress(p: CaptureProgress) -> None:
            assert not target.is_bound
            events.append(f"progress {p}")

        manager = make(target, num_warmups=2)
        target(self.x(backend))
        manager.capture(progress)
        target(self.x(backend))
        target(self.x(backend, frames=9))
        manager.clear()
        target(self.x(backend))

        def capture(d: Descriptor) -> list[str]:
            return [f"allocate {d}", f"prepare {d}", f"forward {d}", f"prepare {d}", f"forward {d}", f"prepare {d}", f"capture {d}"]

        assert events == [
            "eager",
            "progress 0/2 toy.main B2×T8",
            *capture(LARGE),
            "progress 1/2 toy.main B1×T4",
            *capture(SMALL),
            "progress 2/2 done",
            *["validate", "resolve", f"copy {SMALL}", f"materialise {SMALL}"],
            *["validate", "resolve", "eager"],
            "eager",
        ]

    def test_routines_are_told_when_captures_are_over(
        self, backend: GraphBackend, make: MakeManager, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After a profile, a start-up capture and a lazy one, and after one that failed; once each."""
        events: list[str] = []
        target = toy_target(backend.device, SMALL, events=events, is_capturing=backend.is_capturing)
        monkeypatch.setattr(target.routine, "captures_are_over", lambda: events.append("over"), raising=False)
        manager = make(target, targets={"toy.main": {"enable_lazy_capture": True, "max_extra_graphs": 1}})
        manager.profile_memory()
        manager.capture()
        assert [event for event in events if event.startswith(("capture", "over"))] == [f"capture {SMALL}", "over"] * 2
        events.clear()
        target(self.x(backend, frames=9))
        assert events.index("over") > next(place for place, event in enumerate(events) if event.startswith("capture"))
        assert events.count("over") == 1
        manager.clear()
        events.clear()

        def stop(_: CaptureProgress) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            make(target).capture(stop)
        assert events == ["over"]

    def test_no_target_is_bound_before_all_captures_are_over(self, backend: GraphBackend, make: MakeManager) -> None:
        targets = [toy_target(backend.device, SMALL, target_id=f"toy.t{i}") for i in range(3)]
        seen: list[list[bool]] = []
        manager = make(*targets)
        manager.capture(lambda _: seen.append([t.is_bound for t in targets]))
        assert seen == [[False] * 3] * 4
        assert all(t.is_bound for t in targets)
        assert manager.is_ready

    def test_a_target_answers_eagerly_while_others_are_captured(self, backend: GraphBackend, make: MakeManager) -> None:
        first, second = (toy_target(backend.device, SMALL, target_id=f"toy.t{i}") for i in range(2))
        answers: list[Tensor] = []
        make(first, second).capture(lambda _: answers.append(first(self.x(backend))))
        assert all(torch.equal(a, first.routine.eager_call(self.x(backend))) for a in answers)

    def test_largest_first_and_marginal_memory(self, backend: GraphBackend, make: MakeManager) -> None:
        sizes = [Descriptor(b, t) for b in (1, 4) for t in (64, 512)]
        manager = make(toy_target(backend.device, *sizes))
        manager.capture()
        entries = manager.entries()
        assert [e.descriptor for e in entries] == sorted(sizes, key=lambda d: -d.work)
        assert [e.cost.order for e in entries] == [0, 1, 2, 3]
        assert entries[0].cost.pool_reserved_before_bytes == 0
        for before, after in itertools.pairwise(entries):
            assert after.cost.pool_reserved_before_bytes == before.cost.pool_reserved_after_bytes
        assert sum(e.cost.pool_delta_bytes for e in entries) == manager.pool.reserved_bytes
        assert sum(e.cost.charge_bytes for e in entries) == manager.charged_bytes
        assert entries[0].cost.static_buffer_bytes >= 4 * 512 * WIDTH * 4

    # ------------------------------------------------------------------------------------------------ hits

    def test_exact_hit_is_bit_equal_and_counted(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target)
        report = manager.capture()
        assert (report.requested, report.captured, report.failed, report.skipped, report.is_degraded) == (2, 2, 0, 0, False)
        for seed in range(4):
            x = self.x(backend, seed=seed)
            assert torch.equal(target(x), target.routine.eager_call(x))
        stats = manager.stats()
        assert (stats.calls(), stats.hits(), stats.graph_hits("toy.main", SMALL), stats.graph_hits("toy.main", LARGE)) == (4, 4, 4, 0)

    def test_neighbours_and_earlier_content_do_not_leak(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        """A row is the same alone, beside other rows, and after a larger batch used the buffers."""
        make(target).capture()
        row = self.x(backend, 1, 7, seed=3)
        alone = target(row)
        target(self.x(backend, 2, 8, seed=4) * 1e6)
        again = target(row)
        beside = target(torch.cat((row, self.x(backend, 1, 7, seed=5) * 1e6)))
        assert torch.equal(alone, again)
        assert torch.equal(alone[0], beside[0])

    def test_replays_do_not_drift(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        make(target).capture()
        x = self.x(backend)
        expected = target.routine.eager_call(x)
        assert all(torch.equal(target(x), expected) for _ in range(20))

    # ------------------------------------------------------------------------------------------------ reasons

    def test_shape_not_covered(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target)
        manager.capture()
        x = self.x(backend, 3, 4)
        assert torch.equal(target(x), target.routine.eager_call(x))
        assert manager.stats().reasons() == {R.SHAPE_NOT_COVERED: 1}

    def test_state_not_covered(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target)
        manager.capture()
        target(self.x(backend), state="rolling")
        assert manager.stats().reasons() == {R.STATE_NOT_COVERED: 1}

    @pytest.mark.parametrize("fields", [{"enforce_eager": True}, {"targets": {"toy.main": {"enabled": False}}}], ids=["stage", "target"])
    def test_disabled_captures_nothing(self, backend: GraphBackend, make: MakeManager, target: Target[Any], fields: dict[str, Any]) -> None:
        manager = make(target, **fields)
        report = manager.capture()
        assert (report.captured, report.skipped, report.is_degraded, report.bytes) == (0, 2, False, 0)
        key = "enforce_eager" if "enforce_eager" in fields else "targets.toy.main.enabled: false"
        assert key in report.eager_targets["toy.main"]
        assert all(outcome.rejection and key in outcome.rejection.detail for outcome in report.outcomes)
        x = self.x(backend)
        assert torch.equal(target(x), target.routine.eager_call(x))
        assert manager.stats().reasons() == {R.DISABLED: 1}
        assert (manager.entries(), manager.pool.reserved_bytes, target.is_bound) == ([], 0, False)

    def test_no_graph(self, backend: GraphBackend, make: MakeManager) -> None:
        """Nothing was declared for the shape that the Routine thinks of."""
        target = toy_target(backend.device)
        target.routine.descriptors = [SMALL]
        manager = make(target)
        manager.capture()
        target(self.x(backend))
        assert manager.stats().reasons() == {R.NO_GRAPH: 1}
        assert not target.is_bound

    def test_over_budget_leaves_no_graph(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target, max_memory_bytes=1)
        report = manager.capture()
        assert (report.captured, report.skipped, report.is_degraded) == (0, 2, True)
        x = self.x(backend)
        assert torch.equal(target(x), target.routine.eager_call(x))
        target(self.x(backend, 2, 8))
        assert manager.stats().reasons() == {R.OVER_BUDGET: 2}
        assert manager.pool.reserved_bytes == 0
        assert "max_memory_bytes is 1" in str(report)

    def test_over_budget_after_the_capture(self, backend: GraphBackend, make: MakeManager) -> None:
        """Static buffers fit, the pool does not: the capture is undone and the smaller shape is tried."""
        large, small = Descriptor(8, 1 << 18), Descriptor(1, 4)  # 64 MiB of input, more than 512 MiB of intermediates
        target = toy_target(backend.device, large, small)
        manager = make(target, max_memory_bytes=200 << 20, num_warmups=1)
        manager.capture()
        assert [e.descriptor for e in manager.entries()] == [small]
        assert manager.rejections()["toy.main", large].reason is R.OVER_BUDGET
        assert manager.charged_bytes <= 200 << 20

    def test_strict_over_budget_raises(self, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target, max_memory_bytes=1, strict=True)
        with pytest.raises(OutOfBudgetError, match="max_memory_bytes"):
            manager.capture()
        assert manager.state is ManagerState.CLEARED

    def test_nested_capture_runs_eager(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target)
        manager.capture()
        x, params = self.x(backend), tuple(target.routine.model.parameters())
        graph, output = backend.capture(lambda: target(x), backend.create_pool(), static_inputs=[x], owned=params)
        assert manager.stats().reasons() == {R.NESTED_CAPTURE: 1}
        x.copy_(self.x(backend, seed=9))
        graph.replay()
        assert torch.equal(output, target.routine.eager_call(x))

    # ------------------------------------------------------------------------------------------------ lazy capture

    def lazy(self, **fields: Any) -> dict[str, Any]:
        return {"targets": {"toy.main": {"enable_lazy_capture": True, **fields}}}

    def test_lazy_capture_then_hit(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target, **self.lazy(max_extra_graphs=1))
        manager.capture()
        x = self.x(backend, 3, 5)
        for _ in range(3):
            assert torch.equal(target(x), target.routine.eager_call(x))
        assert (manager.stats().hits(), manager.stats().fallbacks()) == (3, 0)
        assert [e.lazy for e in manager.entries()] == [False, False, True]

    def test_capacity(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target, **self.lazy(max_extra_graphs=1))
        manager.capture()
        for frames in (9, 10, 10, 9):
            target(self.x(backend, 1, frames))
        assert manager.stats().reasons() == {R.CAPACITY: 2}
        assert target.routine.events.count("make_descriptor B1×T10") == 1, "a rejected Descriptor is not tried again"

    def test_declined(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        target.routine.declines = True
        manager = make(target, **self.lazy(max_extra_graphs=4))
        manager.capture()
        for _ in range(2):
            target(self.x(backend, 3, 4))
        assert manager.stats().reasons() == {R.DECLINED: 2}
        assert target.routine.events.count("make_descriptor B3×T4") == 1

    def test_zero_extra_graphs_means_none(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target, **self.lazy(max_extra_graphs=0))
        manager.capture()
        target(self.x(backend, 3, 4))
        assert manager.stats().reasons() == {R.SHAPE_NOT_COVERED: 1}

    def test_unbounded_is_warned(self, make: MakeManager, target: Target[Any], caplog: pytest.LogCaptureFixture) -> None:
        make(target, **self.lazy(max_extra_graphs=None)).capture()
        assert "unbounded" in caplog.text

    def test_lazy_failure_runs_eager_and_is_remembered(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target, **self.lazy(max_extra_graphs=4))
        manager.capture()
        target.routine.fail, target.routine.fail_for = {"allocate": RuntimeError("no room")}, {Descriptor(3, 4)}
        x = self.x(backend, 3, 4)
        for _ in range(2):
            assert torch.equal(target(x), target.routine.eager_call(x))
        assert manager.stats().reasons() == {R.FAILED_DESCRIPTOR: 2}
        assert target.routine.events.count("allocate B3×T4") == 1
        assert "no room" in manager.rejections()["toy.main", Descriptor(3, 4)].detail

    def test_lazy_capture_is_one_at_a_time(self, backend: GraphBackend, make: MakeManager) -> None:
        slow, other = (toy_target(backend.device, SMALL, target_id=f"toy.{n}") for n in ("slow", "other"))
        lazy = {"enable_lazy_capture": True, "max_extra_graphs": 4}
        manager = make(slow, other, targets={"toy.slow": lazy, "toy.other": lazy})
        manager.capture()
        entered, go_on = threading.Event(), threading.Event()
        allocate = slow.routine.allocate_buffers

        def block(descriptor: Descriptor) -> Any:
            entered.set()
            assert go_on.wait(30)
            return allocate(descriptor)

        slow.routine.allocate_buffers = block
        worker = threading.Thread(target=slow, args=(self.x(backend, 1, 9),))
        worker.start()
        assert entered.wait(30)
        x = self.x(backend, 1, 9, seed=2)
        answer = other(x)
        go_on.set()
        worker.join()
        assert torch.equal(answer, other.routine.eager_call(x))
        assert manager.stats().reasons("toy.other") == {R.NOT_READY: 1}
        assert manager.stats().hits("toy.slow") == 1

    def test_lazy_only_target_is_bound(self, backend: GraphBackend, make: MakeManager) -> None:
        target = toy_target(backend.device)
        manager = make(target, **self.lazy(max_extra_graphs=1))
        manager.capture()
        assert target.is_bound
        target(self.x(backend))
        assert manager.stats().hits() == 1

    def test_make_descriptor_that_raises_runs_eager_and_is_remembered(
        self, backend: GraphBackend, make: MakeManager, target: Target[Any]
    ) -> None:
        manager = make(target, **self.lazy(max_extra_graphs=4))
        manager.capture()
        target.routine.fail = {"make_descriptor": ZeroDivisionError("oops")}
        x = self.x(backend, 3, 4)
        for _ in range(2):
            assert torch.equal(target(x), target.routine.eager_call(x))
        assert manager.stats().reasons() == {R.FAILED_DESCRIPTOR: 2}
        assert target.routine.events.count("make_descriptor B3×T4") == 1
        assert "ZeroDivisionError: oops" in manager.rejections()["toy.main", Descriptor(3, 4)].detail

    def test_a_declined_key_is_not_a_rejected_descriptor(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        """Key T12 is declined; key T10 may still be served by a graph of T12."""
        target.routine.make_descriptor = lambda key: None if key.frames == 12 else Descriptor(1, 12)
        manager = make(target, **self.lazy(max_extra_graphs=4))
        manager.capture()
        for frames in (12, 10, 9):
            target(self.x(backend, 1, frames))
        assert manager.stats().reasons() == {R.DECLINED: 1}
        assert manager.stats().graph_hits("toy.main", Descriptor(1, 12)) == 2

    def test_a_failed_start_up_shape_does_not_stop_a_larger_lazy_one(
        self, backend: GraphBackend, make: MakeManager, target: Target[Any]
    ) -> None:
        target.routine.fail, target.routine.fail_for = {"forward": ValueError("no")}, {LARGE}
        target.routine.make_descriptor = lambda key: Descriptor(2, 16)
        manager = make(target, **self.lazy(max_extra_graphs=1))
        manager.capture()
        x = self.x(backend, 2, 8)
        assert torch.allclose(target(x), target.routine.eager_call(x), atol=1e-6)
        assert manager.stats().hits() == 1

    def test_nothing_is_captured_after_clear(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        """By a kept Handle, or by a call that was under way."""
        manager = make(target, **self.lazy(max_extra_graphs=4))
        manager.capture()
        handle = target._delegate
        manager.clear()
        x = self.x(backend, 1, 9)
        assert torch.equal(handle(x), target.routine.eager_call(x))
        assert (manager.entries(), manager.pool.reserved_bytes) == ([], 0)
        assert manager.stats().reasons() == {R.NO_GRAPH: 1}

    def test_clear_by_a_routine_during_a_lazy_capture_is_refused(
        self, backend: GraphBackend, make: MakeManager, target: Target[Any]
    ) -> None:
        manager = make(target, **self.lazy(max_extra_graphs=4))
        manager.capture()
        target.routine.make_descriptor = lambda key: manager.clear()
        x = self.x(backend, 1, 9)
        assert torch.equal(target(x), target.routine.eager_call(x))
        assert "Call it when the capture is over" in manager.rejections()["toy.main", Descriptor(1, 9)].detail
        assert manager.is_ready

    def test_inspection_while_lazy_capture_decides(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        target.routine.declines = True
        manager = make(target, **self.lazy(max_extra_graphs=4))
        manager.capture()
        wrong: list[BaseException] = []
        stop = threading.Event()

        def read() -> None:
            try:
                while not stop.is_set():
                    manager.rejections(), manager.entries(), manager.charged_bytes
            except BaseException as error:  # noqa: BLE001 - the thread's failure is the test's
                wrong.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        for frames in range(300):
            target(self.x(backend, 1, 9 + frames))
        stop.set()
        reader.join()
        assert wrong == []
        assert len(manager.rejections()) == 300

    def test_handles_inside_another_capture_run_eager(self, backend: GraphBackend, make: MakeManager) -> None:
        """In its warm-ups too: what a replay wrote there would come from outside the new graph."""
        inner = toy_target(backend.device, SMALL, target_id="toy.inner")
        outer = toy_target(backend.device, target_id="toy.outer")
        outer.routine.captured_modules = lambda: (outer.routine.model, inner.routine.model)
        outer.routine.output = lambda y: inner(y)
        manager = make(inner, outer, targets={"toy.outer": {"enable_lazy_capture": True, "max_extra_graphs": 1}})
        manager.capture()
        x = self.x(backend)
        y = outer(x)
        assert (manager.stats().hits("toy.outer"), manager.stats().replay_errors()) == (1, 0), manager.rejections()
        assert set(manager.stats().reasons("toy.inner")) == {R.NESTED_CAPTURE}
        assert torch.equal(y, inner.routine.eager_call(outer.routine.model(x)))

    # ------------------------------------------------------------------------------------------------ failures

    def test_one_failing_reset_strands_nobody(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        other = toy_target(backend.device, SMALL, target_id="toy.other")
        manager = make(target, other)
        manager.capture()
        entries = manager.entries()
        reset = entries[0].graph.reset

        def broken() -> None:
            reset()
            raise RuntimeError("reset broke")

        entries[0].graph.reset = broken  # type: ignore[method-assign]
        with pytest.raises(LifecycleError, match=r"1 graphs could not be reset.*reset broke"):
            manager.clear()
        assert (target.is_bound, other.is_bound, manager.entries(), manager.pool.reserved_bytes) == (False, False, [], 0)
        manager.clear()

    @pytest.mark.parametrize("step", ["synchronize", "release_cached_memory"])
    def test_a_failing_device_strands_nobody(
        self, backend: GraphBackend, make: MakeManager, target: Target[Any], monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        manager = make(target)
        manager.capture()

        def broken() -> None:
            raise RuntimeError("device is gone")

        monkeypatch.setattr(backend, step, broken)
        with pytest.raises(LifecycleError, match="device is gone"):
            manager.clear()
        assert (target.is_bound, manager.entries()) == (False, [])

    def test_a_buffer_that_is_bound_anew_is_refused(
        self, backend: GraphBackend, make: MakeManager, target: Target[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The graph would go on reading the old tensor, and answer with old values without a word."""
        manager = make(target)
        manager.capture()
        x = self.x(backend)
        expected = target(x)

        def rebind(descriptor: Descriptor, buffers: Any, x: Tensor) -> None:
            buffers["x"] = x

        with monkeypatch.context() as patch:
            patch.setattr(target.routine, "copy_runtime_inputs", rebind)
            with pytest.raises(LifecycleError, match=r"static buffers 'x' cannot be replaced.*Copy into them: buffers\[name\]\.copy_"):
                target(x + 1)
        assert torch.equal(target(x), expected)
        stats = manager.stats()
        assert (stats.hits(), stats.replay_errors(), stats.fallbacks()) == (2, 1, 0)

    @pytest.mark.parametrize(
        "change", ["del b['x']", "b.update(x=1)", "b.pop('x')", "b.popitem()", "b.clear()", "b |= {}", "b.setdefault('y', 1)"]
    )
    def test_buffers_keep_their_names(self, make: MakeManager, target: Target[Any], change: str) -> None:
        manager = make(target)
        manager.capture()
        buffers = manager.entries()[0].buffers
        with pytest.raises(LifecycleError, match="cannot be replaced"):
            exec(change, {"b": buffers})
        assert list(buffers) == ["x"]
        copies = [copy.copy(buffers), copy.deepcopy(buffers)]
        assert [type(each) for each in copies] == [dict, dict]
        assert copies[0]["x"] is buffers["x"] is not copies[1]["x"]

    @pytest.mark.parametrize("step", ["copy_runtime_inputs", "output_after_replay"])
    def test_a_target_called_during_a_replay_runs_eager(
        self, backend: GraphBackend, make: MakeManager, target: Target[Any], step: str
    ) -> None:
        """Its graph would overwrite the memory of the one that is being replayed."""
        manager = make(target)
        manager.capture()
        original, zeros = getattr(target.routine, step), torch.zeros_like(self.x(backend))

        def calls_itself(*args: Any, **kwargs: Any) -> Any:
            setattr(target.routine, step, original)
            target(zeros)
            return original(*args, **kwargs)

        setattr(target.routine, step, calls_itself)
        x = self.x(backend)
        assert torch.equal(target(x), target.routine.eager_call(x))
        assert (manager.stats().hits(), manager.stats().reasons()) == (1, {R.NOT_READY: 1})
        assert torch.equal(target(x), target.routine.eager_call(x))

    def test_a_target_called_during_a_replay_captures_nothing(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        """A lazy capture would use the memory that is being replayed."""
        manager = make(target, **self.lazy(max_extra_graphs=4))
        manager.capture()
        original, uncovered = target.routine.copy_runtime_inputs, self.x(backend, 1, 9)

        def calls_itself(*args: Any, **kwargs: Any) -> Any:
            target.routine.copy_runtime_inputs = original
            target(uncovered)
            return original(*args, **kwargs)

        target.routine.copy_runtime_inputs = calls_itself
        x = self.x(backend)
        assert torch.equal(target(x), target.routine.eager_call(x))
        assert (manager.stats().hits(), manager.stats().reasons(), len(manager.entries())) == (1, {R.NOT_READY: 1}, 2)
        target(uncovered)
        assert len(manager.entries()) == 3

    def test_clear_by_a_routine_during_a_replay_is_refused(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target)
        manager.capture()
        target.routine.copy_runtime_inputs = lambda *_: manager.clear()
        with pytest.raises(LifecycleError, match="Call it when the call is over"):
            target(self.x(backend))
        del target.routine.copy_runtime_inputs
        assert torch.equal(target(self.x(backend)), target.routine.eager_call(self.x(backend)))

    STEPS = ("allocate", "prepare", "forward", "capture", "assemble", "bind", "copy", "replay", "materialise")

    @pytest.mark.parametrize("step", STEPS)
    def test_a_failure_stays_with_its_target(
        self, backend: GraphBackend, make: MakeManager, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        """At start-up the Target stays eager and says why; at runtime the call fails. Another Target's calls never notice."""
        target = toy_target(backend.device, SMALL, is_capturing=backend.is_capturing)
        before, after = (toy_target(backend.device, SMALL, target_id=f"toy.{name}") for name in ("before", "after"))
        manager = make(before, target, after)
        _inject(step, target, manager, monkeypatch)
        manager.capture()
        _inject_into_graph(step, target, manager)
        x = self.x(backend)
        if step in ("copy", "replay", "materialise"):
            with pytest.raises(RuntimeError, match="injected"):
                target(x)
            assert "eager" not in target.routine.events, "never retried in eager"
            expected: tuple[int, int, int] = (0, 0, 1)
        else:
            assert torch.equal(target(x), target.routine.eager_call(x))
            expected = (0, 0, 0) if step == "assemble" else (0, 1, 0)  # without a delegate nothing counts
            assert not target.is_bound
        stats = manager.stats()
        assert (stats.hits("toy.main"), stats.fallbacks("toy.main"), stats.replay_errors("toy.main")) == expected
        for other in (before, after):
            assert torch.equal(other(x), other.routine.eager_call(x))
            assert manager.stats().hits(other.target_id) == 1

    @pytest.mark.parametrize("step", STEPS[:6])
    def test_a_strict_failure_at_start_up_strands_nobody(
        self, backend: GraphBackend, make: MakeManager, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        targets = [toy_target(backend.device, SMALL, target_id=f"toy.{n}", is_capturing=backend.is_capturing) for n in ("first", "main")]
        manager = make(*targets, strict=True)
        _inject(step, targets[1], manager, monkeypatch)
        with pytest.raises(RuntimeError, match="injected"):
            manager.capture()
        assert (manager.state, manager.entries(), manager.pool.reserved_bytes) == (ManagerState.CLEARED, [], 0)
        monkeypatch.undo()
        for target in targets:
            target.routine.fail = {}
            assert not target.is_bound
            assert torch.equal(target(self.x(backend)), target.routine.eager_call(self.x(backend)))

    @pytest.mark.parametrize("step", ["allocate", "prepare", "forward", "capture"])
    def test_capture_failure_stays_with_its_descriptor(
        self, backend: GraphBackend, make: MakeManager, target: Target[Any], step: str
    ) -> None:
        other = toy_target(backend.device, SMALL, target_id="toy.other")
        target.routine.fail, target.routine.fail_for = {step: torch.OutOfMemoryError("injected")}, {LARGE}
        manager = make(target, other)
        report = manager.capture()
        assert (report.captured, report.failed, report.is_degraded) == (2, 1, True)
        assert "B2×T8" in str(report)
        assert "MiB free" in str(report)
        assert "DEGRADED" in report.headline()
        target.routine.fail = {}
        before = target.routine.events.count("allocate B2×T8")
        for t in (target, other):
            assert torch.equal(t(self.x(backend)), t.routine.eager_call(self.x(backend)))
        x = self.x(backend, 2, 8)
        assert torch.equal(target(x), target.routine.eager_call(x))
        assert target.routine.events.count("allocate B2×T8") == before, "a failed Descriptor is not tried again"
        assert manager.stats().reasons() == {R.FAILED_DESCRIPTOR: 1}
        assert manager.stats().hits() == 2

    @pytest.mark.parametrize("step", ["allocate", "prepare", "forward", "capture"])
    def test_strict_capture_failure_rolls_everything_back(
        self, backend: GraphBackend, make: MakeManager, target: Target[Any], step: str
    ) -> None:
        first = toy_target(backend.device, SMALL, target_id="toy.first")
        target.routine.fail, target.routine.fail_for = {step: RuntimeError("injected")}, {SMALL}
        manager = make(first, target, strict=True)
        with pytest.raises(RuntimeError, match="injected"):
            manager.capture()
        assert manager.state is ManagerState.CLEARED
        assert (manager.entries(), manager.pool.reserved_bytes) == ([], 0)
        assert not first.is_bound
        assert not target.is_bound

    def test_all_descriptors_failed_means_eager(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        """Having a Manager is not having a graph: the Target is not bound, and its calls are counted all the same."""
        target.routine.fail = {"forward": RuntimeError("injected")}
        manager = make(target)
        report = manager.capture()
        target.routine.fail = {}
        assert not target.is_bound
        assert "toy.main" in report.eager_targets
        target(self.x(backend))
        assert manager.stats().reasons() == {R.FAILED_DESCRIPTOR: 1}

    def test_bind_failure_stays_with_its_target(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        other = toy_target(backend.device, SMALL, target_id="toy.other")

        def refuse(_: Any) -> None:
            raise RuntimeError("cannot bind")

        target.bind = refuse  # type: ignore[method-assign]
        manager = make(target, other)
        report = manager.capture()
        assert "cannot bind" in report.eager_targets["toy.main"]
        assert [e.target_id for e in manager.entries()] == ["toy.other"]
        assert torch.equal(target(self.x(backend)), target.routine.eager_call(self.x(backend)))
        assert other.is_bound

    def test_a_reset_that_fails_after_a_failed_bind_is_told(
        self, make: MakeManager, target: Target[Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        manager = make(target)

        def refuse(_: Any) -> None:
            for entry in manager.entries():
                reset = entry.graph.reset

                def broken(reset: Callable[[], None] = reset) -> None:
                    reset()
                    raise RuntimeError("reset broke")

                entry.graph.reset = broken  # type: ignore[method-assign]
            raise RuntimeError("cannot bind")

        target.bind = refuse  # type: ignore[method-assign]
        report = manager.capture()
        assert "cannot bind" in report.eager_targets["toy.main"]
        assert caplog.text.count("a graph could not be reset: reset broke") == 2
        assert (manager.entries(), target.is_bound) == ([], False)

    def test_strict_bind_failure_rolls_everything_back(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        first = toy_target(backend.device, SMALL, target_id="toy.first")

        def refuse(_: Any) -> None:
            raise RuntimeError("cannot bind")

        target.bind = refuse  # type: ignore[method-assign]
        manager = make(first, target, strict=True)
        with pytest.raises(RuntimeError, match="cannot bind"):
            manager.capture()
        assert not first.is_bound
        assert manager.entries() == []

    @pytest.mark.parametrize("step", ["copy", "materialise"])
    def test_errors_after_the_first_write_propagate(self, backend: GraphBackend, make: MakeManager, target: Target[Any], step: str) -> None:
        manager = make(target)
        manager.capture()
        target.routine.fail = {step: ValueError("broken")}
        eager_calls = target.routine.events.count("eager")
        with pytest.raises(ValueError, match="broken"):
            target(self.x(backend))
        assert target.routine.events.count("eager") == eager_calls, "never retried in eager"
        target.routine.fail = {}
        assert torch.equal(target(self.x(backend)), target.routine.eager_call(self.x(backend)))
        stats = manager.stats()
        assert (stats.calls(), stats.hits(), stats.fallbacks(), stats.replay_errors()) == (2, 1, 0, 1)

    def test_replay_failure_propagates(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target)
        manager.capture()
        entry = next(e for e in manager.entries() if e.descriptor == SMALL)
        entry.graph.reset()
        with pytest.raises(ReplayError, match="reset"):
            target(self.x(backend))
        assert manager.stats().replay_errors() == 1

    def test_invalid_input_is_not_counted_and_writes_nothing(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target)
        manager.capture()
        with pytest.raises(InputError, match="x must be"):
            target(torch.zeros(1, 4, WIDTH + 1, device=backend.device))
        assert manager.stats().calls() == 0
        assert "copy" not in " ".join(target.routine.events)

    def test_output_that_changes_between_captures_is_refused(self, make: MakeManager, target: Target[Any]) -> None:
        shapes = iter(range(1, 99))
        target.routine.output = lambda y: tuple([y] * next(shapes))
        report = make(target).capture()
        assert report.failed == 2
        assert "changed its output" in str(report)

    def test_output_that_changes_at_replay_is_refused(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target)
        manager.capture()
        materialise = target.routine.output_after_replay
        target.routine.output_after_replay = lambda *args, **kwargs: (materialise(*args, **kwargs),)
        with pytest.raises(ReplayError, match="structure"):
            target(self.x(backend))
        del target.routine.output_after_replay
        assert torch.equal(target(self.x(backend)), target.routine.eager_call(self.x(backend)))

    def test_empty_graph_is_refused(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        target.routine.forward_for_capture = lambda descriptor, buffers: buffers["x"]
        report = make(target).capture()
        assert report.captured == 0
        assert "empty" in str(report)

    def test_model_with_own_cudagraphs_is_refused(self, make: MakeManager, target: Target[Any]) -> None:
        target.routine.model = torch.compile(target.routine.model, mode="reduce-overhead")
        report = make(target).capture()
        assert report.failed == 2
        assert "reduce-overhead" in str(report)

    def test_interrupt_during_capture_rolls_back(self, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target)

        def stop(p: CaptureProgress) -> None:
            if p.done == 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            manager.capture(stop)
        assert (manager.state, manager.entries(), manager.pool.reserved_bytes) == (ManagerState.CLEARED, [], 0)

    # ------------------------------------------------------------------------------------------------ outputs

    def test_cloned_output_survives_later_calls(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        target.routine.output = lambda y: {"wave": y, "state": (y + 1, [y * 2])}
        make(target).capture()
        x = self.x(backend)
        first, expected = target(x), target.routine.eager_call(x)
        target(self.x(backend, seed=8))
        assert torch.equal(first["wave"], expected["wave"])
        assert torch.equal(first["state"][0], expected["state"][0])
        assert torch.equal(first["state"][1][0], expected["state"][1][0])

    def test_borrowed_output_is_overwritten(self, backend: GraphBackend, make: MakeManager) -> None:
        target = toy_target(backend.device, SMALL, clone_output=False)
        make(target).capture()
        borrowed = target(self.x(backend))
        kept = borrowed.clone()
        other = target(self.x(backend, seed=8))
        assert borrowed.data_ptr() == other.data_ptr()
        assert not torch.equal(borrowed, kept)

    def test_debug_mode_detects_late_use(self, backend: GraphBackend, make: MakeManager) -> None:
        targets = [toy_target(backend.device, SMALL, target_id=f"toy.t{i}", clone_output=False) for i in range(2)]
        make(*targets, debug=True).capture()
        x = self.x(backend)
        borrowed = targets[0](x)
        view, total = borrowed[0], borrowed.sum()
        assert torch.equal(borrowed.clone(), targets[0].routine.eager_call(x))
        targets[1](x)  # another graph of the same pool
        for use in (lambda: borrowed + 1, lambda: view.max(), lambda: borrowed.cpu(), lambda: borrowed.tolist()):
            with pytest.raises(BorrowedOutputError, match=r"toy\.t0 B1×T4"):
                use()
        assert torch.equal(total, targets[0].routine.eager_call(x).sum()), "what was computed in time stays valid"

    def test_constants_in_outputs_may_vary(self, backend: GraphBackend, make: MakeManager) -> None:
        """The length of a padded call is the call's own, not the graph's."""
        target = toy_target(backend.device, LARGE)
        target.routine.output = lambda y: {"wave": y, "frames": y.shape[1]}
        target.routine.output_after_replay = lambda d, b, out, x: {"wave": out["wave"][: x.shape[0], : x.shape[1]], "frames": x.shape[1]}
        manager = make(target)
        manager.capture()
        for frames in (8, 5):
            x = self.x(backend, 2, frames)
            assert target(x)["frames"] == target.routine.eager_call(x)["frames"] == frames
        assert manager.stats().hits() == 2

    def test_structures_keep_their_classes(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        class Output(OrderedDict[str, Tensor]):
            pass

        class Pair(NamedTuple):
            first: Tensor
            second: list[Tensor]

        target.routine.output = lambda y: Output(pair=Pair(y, [y + 1]))  # type: ignore[arg-type]
        make(target).capture()
        found = target(self.x(backend))
        assert type(found) is Output
        assert type(found["pair"]) is Pair
        assert type(found["pair"].second) is list

    def test_a_graph_keeps_what_it_reads_alive(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        """Weights that the model lets go of after the capture: the graph still reads their memory."""
        make(target).capture()
        x = self.x(backend)
        expected = target.routine.eager_call(x)
        model = target.routine.model
        model.first, model.second = (nn.Parameter(torch.zeros_like(p)) for p in (model.first, model.second))
        gc.collect()
        backend.release_cached_memory()
        junk = [torch.full((1 << 16,), float("nan"), device=backend.device) for _ in range(64)]
        assert torch.equal(target(x), expected)
        assert len(junk) == 64

    # ------------------------------------------------------------------------------------------------ memory

    def test_shared_static_buffers_are_charged_once(self, backend: GraphBackend, make: MakeManager) -> None:
        shared = torch.zeros(4, 64, WIDTH, device=backend.device)
        sizes = [Descriptor(1, 64), Descriptor(2, 64), Descriptor(4, 64)]
        target = toy_target(backend.device, *sizes)
        target.routine.allocate_buffers = lambda d: {"x": shared[: d.batch_size]}
        manager = make(target)
        report = manager.capture()
        assert report.captured == 3
        assert report.static_buffer_bytes == shared.untyped_storage().nbytes()
        assert sum(e.cost.static_buffer_bytes for e in manager.entries()) == report.static_buffer_bytes
        assert manager.charged_bytes == sum(e.cost.charge_bytes for e in manager.entries())

    # ------------------------------------------------------------------------------------------------ cleanup

    def test_clear_twice_and_capture_again(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        first = make(target)
        first.capture()
        target(self.x(backend))
        final = first.stats()
        first.clear()
        first.clear()
        assert (first.entries(), first.pool.reserved_bytes, target.is_bound) == ([], 0, False)
        assert first.stats().counts == final.counts
        with pytest.raises(LifecycleError, match="new Manager"):
            first.capture()
        second = make(target)
        second.capture()
        first.clear()
        assert target.is_bound, "an old Manager does not unbind a new one's Handle"
        assert torch.equal(target(self.x(backend)), target.routine.eager_call(self.x(backend)))
        assert second.stats().hits() == 1

    def test_kept_handle_runs_eager_after_clear(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target)
        manager.capture()
        handle = target._delegate
        manager.clear()
        assert torch.equal(handle(self.x(backend)), target.routine.eager_call(self.x(backend)))
        assert manager.stats().reasons() == {R.NO_GRAPH: 1}

    def test_handle_exposes_only_call(self, make: MakeManager, target: Target[Any]) -> None:
        make(target).capture()
        assert [name for name in dir(target._delegate) if not name.startswith("_")] == []
        assert not hasattr(target._delegate, "__dict__")

    def test_capture_needs_a_new_manager(self, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target)
        manager.capture()
        with pytest.raises(LifecycleError, match="ready"):
            manager.capture()
        assert target.is_bound

    def test_clear_during_capture_is_refused(self, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target)
        with pytest.raises(LifecycleError, match="progress callback"):
            manager.capture(lambda _: manager.clear())
        assert manager.state is ManagerState.CLEARED

    def test_a_target_serves_one_manager(self, make: MakeManager, target: Target[Any]) -> None:
        make(target).capture()
        with pytest.raises(LifecycleError, match="another Manager"):
            make(target).capture()
        assert target.is_bound

    def test_context_manager_clears(self, backend: GraphBackend, target: Target[Any]) -> None:
        with VocoderCUDAGraphManager(backend, [target]) as manager:
            manager.capture()
            assert target.is_bound
        assert not target.is_bound
        assert manager.state is ManagerState.CLEARED

    def test_final_statistics_are_logged(
        self, backend: GraphBackend, make: MakeManager, target: Target[Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        manager = make(target, log_stats=True)
        manager.capture()
        target(self.x(backend))
        manager.clear()
        assert "1 call: 1 hit (100.0%), 0 fallbacks" in caplog.text

    # ------------------------------------------------------------------------------------------------ threads

    def test_threads_share_graphs(self, backend: GraphBackend, make: MakeManager) -> None:
        """Every call is right and counted once, whatever interleaves, and statistics can be read meanwhile."""
        targets = [toy_target(backend.device, SMALL, LARGE, target_id=f"toy.t{i}") for i in range(2)]
        manager = make(*targets)
        manager.capture()
        shapes = [(1, 4), (2, 8), (1, 7), (3, 3)]
        wrong: list[str] = []

        def work(thread: int) -> None:
            for i in range(25):
                target, (batch, frames) = targets[(thread + i) % 2], shapes[(thread * 7 + i) % 4]
                x = self.x(backend, batch, frames, seed=thread * 100 + i)
                if not torch.allclose(target(x), target.routine.eager_call(x), atol=1e-6):
                    wrong.append(f"{thread}/{i}")
                stats = manager.stats()
                if stats.calls() != stats.hits() + stats.fallbacks():
                    wrong.append("stats")

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert wrong == []
        assert manager.stats().calls() == 100

    def test_clear_while_calls_run(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target)
        manager.capture()
        wrong: list[BaseException] = []
        running = threading.Event()

        def work() -> None:
            x = self.x(backend)
            expected = target.routine.eager_call(x)
            try:
                for _ in range(200):
                    assert torch.equal(target(x), expected)
                    running.set()
            except BaseException as error:  # noqa: BLE001 - the thread's failure is the test's
                wrong.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        running.wait(30)
        manager.clear()
        thread.join()
        assert wrong == []

    def test_clone_survives_eviction_of_everything(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target)
        manager.capture()
        x = self.x(backend)
        y = target(x)
        manager.clear()
        assert torch.equal(y, target.routine.eager_call(x))

    # ------------------------------------------------------------------------------------------------ audit

    @pytest.mark.parametrize(("debug", "expected"), [(False, [True, False, True]), (True, [True, True, True])])
    def test_the_first_shape_of_each_target_is_audited(
        self, backend: GraphBackend, make: MakeManager, monkeypatch: pytest.MonkeyPatch, debug: bool, expected: list[bool]
    ) -> None:
        """The audit costs a run several times over, and the other shapes run the same code. Debug mode audits them all."""
        audits: list[bool] = []
        warm_up = backend.warm_up

        def watched(*args: Any, audit: bool, **kwargs: Any) -> Any:
            audits.append(audit)
            return warm_up(*args, audit=audit, **kwargs)

        monkeypatch.setattr(backend, "warm_up", watched)
        targets = [toy_target(backend.device, SMALL, LARGE), toy_target(backend.device, SMALL, target_id="toy.other")]
        make(*targets, num_warmups=1, debug=debug).capture()
        assert audits == expected

    def test_a_failed_audit_is_repeated_for_the_next_shape(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        foreign = torch.ones(1, device=backend.device)
        target.routine.output = lambda y: y + foreign
        report = make(target).capture()
        assert report.failed == 2
        assert str(report).count("outside the captured function") == 2

    # ------------------------------------------------------------------------------------------------ names

    def test_a_device_name_is_no_backend(self, target: Target[Any]) -> None:
        with pytest.raises(ConfigError, match=r"create_backend\('auto'\), got 'cpu'"):
            VocoderCUDAGraphManager("cpu", [target])  # type: ignore[arg-type]

    def test_one_target_is_no_sequence(self, backend: GraphBackend, target: Target[Any]) -> None:
        with pytest.raises(ConfigError, match=r"write \[target\]"):
            VocoderCUDAGraphManager(backend, target)  # type: ignore[arg-type]

    def test_duplicate_target_ids(self, backend: GraphBackend, make: MakeManager) -> None:
        with pytest.raises(ConfigError, match=r"toy\.main more than once"):
            make(toy_target(backend.device, SMALL), toy_target(backend.device, SMALL))

    def test_duplicate_descriptors(self, backend: GraphBackend) -> None:
        with pytest.raises(ConfigError, match="B1×T4"):
            toy_target(backend.device, SMALL, LARGE, Descriptor(1, 4))

    def test_unknown_target_id_in_settings(self, make: MakeManager, target: Target[Any]) -> None:
        with pytest.raises(ConfigError, match=r"targets\.toy\.mian.*Did you mean 'toy\.main'"):
            make(target, targets={"toy.mian": {}})

    def test_entries_are_plain_to_read(self, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target)
        manager.capture()
        entry = manager.entries()[0]
        assert isinstance(entry, GraphEntry)
        assert "B2×T8" in repr(entry)
        assert sum(entry.cost.node_counts.values()) == len(entry.graph.nodes()) > 0
        assert min(entry.cost.warmup_s, entry.cost.capture_s, entry.cost.gc_s) >= 0

    def test_every_error_is_ours_or_the_callers(self) -> None:
        assert issubclass(LifecycleError, VGraphLabError)


def _inject(step: str, target: Target[Any], manager: VocoderCUDAGraphManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one step of the lifecycle fail for one Target."""
    error = RuntimeError("injected")
    if step == "assemble":
        assembled = manager_module.GraphRuntime

        def assemble(store: Any, assembled_for: Target[Any], *args: Any, **kwargs: Any) -> Any:
            if assembled_for is target:
                raise error
            return assembled(store, assembled_for, *args, **kwargs)

        monkeypatch.setattr(manager_module, "GraphRuntime", assemble)
    elif step == "bind":

        def refuse(_: Any) -> None:
            raise error

        monkeypatch.setattr(target, "bind", refuse)
    else:
        target.routine.fail = {step: error}


def _inject_into_graph(step: str, target: Target[Any], manager: VocoderCUDAGraphManager) -> None:
    if step == "replay":
        (entry,) = (entry for entry in manager.entries() if entry.target_id == target.target_id)

        def broken() -> None:
            raise RuntimeError("injected")

        entry.graph.replay = broken  # type: ignore[method-assign]


def _call_in_child(target: Target[Any], x: Tensor, answers: Any) -> None:
    try:
        target(x)
        answers.put("answered")
    except ForkedProcessError as error:
        answers.put(f"refused: {error}")


def check_fork_is_refused(backend: GraphBackend) -> None:
    """A forked child must not replay. (A CUDA context does not survive a fork at all, so this runs on the CPU only.)"""
    target = toy_target(backend.device, SMALL)
    with VocoderCUDAGraphManager(backend, [target]) as manager:
        manager.capture()
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        child = context.Process(target=_call_in_child, args=(target, torch.zeros(1, 4, WIDTH), answers))
        child.start()
        answer = answers.get(timeout=60)
        child.join(60)
    assert answer.startswith("refused: toy.main was captured in process")
