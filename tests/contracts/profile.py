"""Profiling: what a capture will take, measured beforehand; and nothing of it stays."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch

from vgraph_lab.errors import LifecycleError
from vgraph_lab.graphs import CaptureProgress, Descriptor, ManagerState, MemoryProfile, ProfileLine, Target
from vgraph_lab.graphs.backends.base import GraphBackend

from .suite import LARGE, SMALL, MakeManager, ManagerSuite
from .toy import toy_target

SIZES = [Descriptor(b, t) for b, t in itertools.product((1, 4), (2048, 8192))]
MIB = 1 << 20


class ProfileContract(ManagerSuite):
    """Subclassed once per backend, which provides the ``backend`` fixture."""

    def test_estimated_is_what_is_measured(self, backend: GraphBackend, make: MakeManager) -> None:
        target = toy_target(backend.device, *SIZES)
        manager = make(target)
        profile = manager.profile_memory()
        assert [line.descriptor for line in profile.lines] == [d for _, d in manager.capture_plan()]
        report = manager.capture()
        assert report.profile is profile
        assert report.profile_error == 0
        costs = [(e.target_id, e.descriptor, e.cost.static_buffer_bytes, e.cost.pool_delta_bytes) for e in manager.entries()]
        assert [(p.target_id, p.descriptor, p.static_buffer_bytes, p.pool_delta_bytes) for p in profile.lines] == costs
        assert (profile.static_buffer_bytes, profile.pool_reserved_bytes) == (report.static_buffer_bytes, report.pool_reserved_bytes)
        figures = f"estimated {profile.bytes / MIB:,.2f} MiB, measured {report.bytes / MIB:,.2f} MiB (error +0.0%)"
        assert figures in report.headline()
        assert figures in report._repr_html_()

    def test_a_shared_pool_is_measured_not_extrapolated(self, backend: GraphBackend, make: MakeManager) -> None:
        profile = make(toy_target(backend.device, *SIZES)).profile_memory()
        alone = [make(toy_target(backend.device, size)).profile_memory().pool_reserved_bytes for size in SIZES]
        assert profile.lines[0].pool_delta_bytes == max(alone)
        assert max(alone) <= profile.pool_reserved_bytes < 0.8 * sum(alone)

    def test_other_memory_in_use_changes_nothing(self, backend: GraphBackend, make: MakeManager) -> None:
        target = toy_target(backend.device, *SIZES)
        first = make(target).profile_memory()
        junk = torch.ones(64 * MIB, device=backend.device)
        second = make(target).profile_memory()
        assert first.lines == second.lines
        assert junk.numel() == 64 * MIB

    def test_nothing_stays(self, backend: GraphBackend, make: MakeManager) -> None:
        target = toy_target(backend.device, *SIZES, clone_output=False)
        make(target).profile_memory()  # libraries initialise themselves on first use
        manager = make(target, debug=True)
        before = backend.memory()
        manager.profile_memory()
        gc.collect()
        after = backend.memory()
        assert after.allocated_bytes <= before.allocated_bytes
        assert after.reserved_bytes <= before.reserved_bytes
        assert (manager.state, manager.entries(), manager.rejections()) == (ManagerState.NEW, [], {})
        assert (manager.pool.reserved_bytes, manager.pool.live_bytes, manager.charged_bytes) == (0, 0, 0)
        assert (target.is_bound, manager.stats().calls(), manager.generation) == (False, 0, 1)
        x = self.x(backend, 1, 2048)
        assert torch.equal(target(x), target.routine.eager_call(x))

    def test_it_captures_as_capture_does(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        make(target, num_warmups=5).profile_memory()
        steps = [f"{step} {d}" for d in (LARGE, SMALL) for step in ("allocate", "prepare", "forward", "prepare", "capture")]
        assert target.routine.events == steps

    @pytest.mark.parametrize("fields", [{"enforce_eager": True}, {"targets": {"toy.main": {"enabled": False}}}], ids=["stage", "target"])
    def test_what_is_switched_off_takes_nothing(
        self, backend: GraphBackend, make: MakeManager, target: Target[Any], fields: dict[str, Any]
    ) -> None:
        profile = make(target, **fields).profile_memory()
        assert (profile.bytes, profile.lines, target.routine.events) == (0, (), [])
        assert profile.headline().startswith("0 of 0 graphs profiled")

    def test_the_limit_is_judged_not_obeyed(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target, max_memory_bytes=1)
        profile = manager.profile_memory()
        assert (len(profile.graphs), profile.fits) == (2, False)
        assert f"{(profile.bytes - 1) / MIB:,.2f} MiB too little" in str(profile)
        report = manager.capture()
        assert (report.captured, report.profile_error) == (0, None)
        assert f"estimated {profile.bytes / MIB:,.2f} MiB, measured 0.00 MiB (for 2 graphs)" in str(report)
        assert make(target, max_memory_bytes=profile.bytes).profile_memory().fits is True
        assert make(target, max_memory_bytes=profile.bytes - 1).profile_memory().fits is False
        assert make(target).profile_memory().fits is None

    def test_a_profile_that_fits_captures(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        needed = make(target).profile_memory().bytes
        report = make(target, max_memory_bytes=needed).capture()
        assert (report.captured, report.is_degraded) == (2, False)

    def test_no_profile_no_comparison(self, make: MakeManager, target: Target[Any]) -> None:
        report = make(target).capture()
        assert (report.profile, report.profile_error) == (None, None)
        assert "estimated" not in str(report)

    # ------------------------------------------------------------------------------------------------ failures

    @pytest.mark.parametrize("step", ["allocate", "prepare", "forward", "capture"])
    def test_a_failure_is_told_per_descriptor(self, backend: GraphBackend, make: MakeManager, target: Target[Any], step: str) -> None:
        target.routine.fail, target.routine.fail_for = {step: torch.OutOfMemoryError("injected")}, {LARGE}
        manager = make(target)
        profile = manager.profile_memory()
        assert [(line.descriptor, bool(line.failure)) for line in profile.lines] == [(LARGE, True), (SMALL, False)]
        assert "injected" in profile.lines[0].failure
        assert "1 of 2 graphs profiled" in str(profile)
        assert (manager.rejections(), manager.pool.reserved_bytes) == ({}, 0)
        target.routine.fail = {}
        report = manager.capture()
        assert (report.captured, report.profile_error) == (2, None), "a failed profile rejects nothing"

    def test_strict_raises_and_leaves_a_new_manager(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        target.routine.fail, target.routine.fail_for = {"forward": RuntimeError("injected")}, {SMALL}
        manager = make(target, strict=True)
        with pytest.raises(RuntimeError, match="injected"):
            manager.profile_memory()
        target.routine.fail = {}
        assert (manager.state, manager.entries()) == (ManagerState.NEW, [])
        report = manager.capture()
        assert (report.captured, report.profile) == (2, None)

    def test_an_interrupt_releases_everything(self, backend: GraphBackend, make: MakeManager, target: Target[Any]) -> None:
        manager, before = make(target), backend.memory().allocated_bytes

        def stop(p: CaptureProgress) -> None:
            if p.done == 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            manager.profile_memory(stop)
        gc.collect()
        assert (manager.state, backend.memory().allocated_bytes <= before) == (ManagerState.NEW, True)
        assert manager.capture().captured == 2

    def test_a_reset_that_fails_is_an_error(
        self, backend: GraphBackend, make: MakeManager, target: Target[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        capture = backend.capture

        def captured(*args: Any, **kwargs: Any) -> Any:
            graph, output = capture(*args, **kwargs)
            reset = graph.reset

            def broken() -> None:
                reset()
                raise RuntimeError("reset broke")

            graph.reset = broken  # type: ignore[method-assign]
            return graph, output

        monkeypatch.setattr(backend, "capture", captured)
        manager = make(target)
        with pytest.raises(LifecycleError, match=r"2 profiled graphs could not be reset.*reset broke"):
            manager.profile_memory()
        assert manager.state is ManagerState.NEW

    def test_it_needs_a_new_manager(self, make: MakeManager, target: Target[Any]) -> None:
        manager = make(target)
        manager.capture()
        with pytest.raises(LifecycleError, match=r"this one is ready. Profile before capture"):
            manager.profile_memory()
        manager.clear()
        with pytest.raises(LifecycleError, match="this one is cleared"):
            manager.profile_memory()

    @pytest.mark.parametrize("call", ["capture", "clear", "profile_memory"])
    def test_it_is_not_interrupted_from_inside(self, make: MakeManager, target: Target[Any], call: str) -> None:
        manager = make(target)
        with pytest.raises(LifecycleError):
            manager.profile_memory(lambda _: getattr(manager, call)())
        assert manager.state is ManagerState.NEW

    # ------------------------------------------------------------------------------------------------ reading

    def test_progress(self, make: MakeManager, target: Target[Any]) -> None:
        seen: list[str] = []
        make(target).profile_memory(lambda p: seen.append(str(p)))
        assert seen == ["0/2 toy.main B2×T8", "1/2 toy.main B1×T4", "2/2 done"]

    def test_it_prints(self) -> None:
        lines = [
            ProfileLine("toy.main", LARGE, static_buffer_bytes=MIB, pool_delta_bytes=2 * MIB),
            ProfileLine("toy.main", SMALL, static_buffer_bytes=MIB // 2, pool_delta_bytes=0),
            ProfileLine("toy.<b>", SMALL, failure="it broke\nbadly"),
        ]
        profile = MemoryProfile("cpu", lines, max_memory_bytes=4 * MIB, seconds=0.5)
        assert str(profile).splitlines() == [
            "2 of 3 graphs profiled on cpu in 0.50 s (1 failed): 1.50 MiB static buffers + 2.00 MiB pool; "
            "max_memory_bytes is 4.00 MiB: fits",
            "",
            "target    descriptor  buffers MiB  pool + MiB  total MiB  failure",
            "toy.main  B2×T8       1.00         2.00        3.00",
            "toy.main  B1×T4       0.50         0.00        3.50",
            "toy.<b>   B1×T4                                           it broke badly",
            "(in capture order: pool + is marginal, graphs of one pool share memory)",
        ]
        page = profile._repr_html_()
        assert "toy.&lt;b&gt;" in page
        assert "<td>3.50</td>" in page
