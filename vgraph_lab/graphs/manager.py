"""The Manager: owned by the runner, it decides what is captured, when, and what a Target may use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from vgraph_lab.config import VocoderGraphSettings
from vgraph_lab.errors import ConfigError, FallbackReason, LifecycleError

from .backends.base import DeviceMemory, GraphBackend, GraphPool
from .borrow import BorrowLedger
from .descriptor import Descriptor
from .entry import GraphEntry, Rejection
from .generation import Generations, Retirement
from .lazy import CaptureTurn, LazyCapture
from .profile import MemoryProfile, measure
from .progress import CaptureProgress
from .report import CaptureOutcome, CaptureReport
from .runtime import GraphRuntime
from .stats import StatsSink, StatsSnapshot
from .store import GraphStore
from .target import Target, VocoderGraphHandle

__all__ = ["ManagerState", "ProgressCallback", "VocoderCUDAGraphManager"]

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[CaptureProgress], None]


class ManagerState(Enum):
    """Where a Manager is in its life. It only moves forward."""

    NEW = "new"  # Targets are known, nothing is captured; Targets answer eagerly
    CAPTURING = "capturing"  # graphs are being captured; Targets still answer eagerly
    READY = "ready"  # Handles are bound
    CLEARED = "cleared"  # graphs are gone, Targets answer eagerly; the Manager is not used again


class VocoderCUDAGraphManager:
    """Policy, capture order, pool, memory accounting, lazy capture, statistics, binding and cleanup for Targets.

    ::

        with VocoderCUDAGraphManager(backend, targets, settings) as manager:
            print(manager.capture())
            targets[0](codes)              # hit | lazy capture | eager
            print(manager.stats())

    No Target changes its delegate until every capture is over. A Target that cannot be captured or bound stays eager
    and the report says why; with ``settings.strict`` any such failure is an error that rolls back everything.

    Args:
        backend: where to capture.
        targets: all Targets of the model; ids must be unique.
        settings: policy.

    Attributes:
        report: what :meth:`capture` returned; None before. It outlives :meth:`clear`.
        memory_before: the device's memory when :meth:`capture` began; None before. It outlives :meth:`clear`.

    Raises:
        ConfigError: no backend, duplicate Target ids, or settings for a Target that is not declared.
    """

    def __init__(self, backend: GraphBackend, targets: Sequence[Target[Any]], settings: VocoderGraphSettings | None = None) -> None:
        if not hasattr(backend, "create_pool"):
            raise ConfigError(f"backend must be a graph backend such as create_backend('auto'), got {backend!r}.")
        if isinstance(targets, Target):
            raise ConfigError("targets must be a sequence of Targets; for a single one write [target].")
        self.settings = settings or VocoderGraphSettings()
        self.backend = backend
        self.targets = {target.target_id: target for target in targets}
        if len(self.targets) != len(targets):
            ids = [target.target_id for target in targets]
            raise ConfigError(f"Target ids must be unique, got {', '.join(sorted({i for i in ids if ids.count(i) > 1}))} more than once.")
        self.settings.check_target_ids(self.targets)
        self.state = ManagerState.NEW
        self.report: CaptureReport | None = None
        self.memory_before: DeviceMemory | None = None
        self._store = GraphStore(backend, self.settings)
        for target_id in self.targets:
            self._store.add_target(target_id)
        self._delegates: dict[str, Callable[..., Any]] = {}  # what this Manager gave to its Targets
        self._eager_targets: dict[str, str] = {}
        self._sink = StatsSink()
        self._borrows = BorrowLedger() if self.settings.debug else None
        self._turn = CaptureTurn()
        self._generations = Generations(self._store, self.targets, self._borrows)
        self._profile: MemoryProfile | None = None

    # ------------------------------------------------------------------------------------------------ reading

    @property
    def is_ready(self) -> bool:
        """Whether start-up capture is over and Handles are bound."""
        return self.state is ManagerState.READY

    @property
    def pool(self) -> GraphPool:
        """The pool that all graphs share."""
        return self._store.pool

    @property
    def charged_bytes(self) -> int:
        """What counts against ``max_memory_bytes`` now: static buffers of all entries plus the pool."""
        return self._store.charged_bytes

    @property
    def generation(self) -> int:
        """Which set of graphs serves now, from 1; a new one begins each time that all are retired (``eviction: generation``)."""
        return len(self._generations.retirements) + 1

    def retirements(self) -> tuple[Retirement, ...]:
        """One record per retired generation, oldest first."""
        return tuple(self._generations.retirements)

    def entries(self) -> list[GraphEntry]:
        """All graphs of the present generation, in capture order."""
        return self._store.in_capture_order()

    def rejections(self) -> dict[tuple[str, Descriptor], Rejection]:
        """All Descriptors (and declined runtime keys) that have no graph and will not be tried again, with their reasons."""
        found: dict[tuple[str, Descriptor], Rejection] = {}
        for where in (self._store.declines, self._store.rejections):
            for target_id, of_target in where.items():
                found |= {(target_id, shape): rejection for shape, rejection in of_target.copy().items()}
        return found

    def stats(self) -> StatsSnapshot:
        """A consistent copy of all counters. May be called at any time, from any thread, after ``clear`` too."""
        retired = self.retirements()
        return replace(self._sink.snapshot(), retirements=len(retired), retirement_s=sum(r.seconds for r in retired))

    # ------------------------------------------------------------------------------------------------ capture

    def profile_memory(self, progress: ProgressCallback | None = None) -> MemoryProfile:
        """Find out what :meth:`capture` will take, by capturing all of it into a throwaway pool and releasing it again.

        Nothing is extrapolated: graphs of one pool share memory, so a few of them do not tell what all will take. What the
        pool reserves does not depend on what else is on the device. ``max_memory_bytes`` limits nothing here; the profile
        tells whether it will do. Afterwards the Manager is as new, and ``capture`` sets the profile beside what it measures.

        Args:
            progress: called before each Descriptor and once at the end.

        Raises:
            LifecycleError: the Manager is not new any more.
            VGraphLabError: in strict mode, the first failure; everything is released.
        """
        if self.state is not ManagerState.NEW:
            raise LifecycleError(f"profile_memory() needs a new Manager, this one is {self.state.value}. Profile before capture().")
        self.state = ManagerState.CAPTURING
        try:
            with self._turn:
                plan = [(target, descriptor) for target, descriptor in self.capture_plan() if self._is_enabled(target)]
                self._profile = measure(self.backend, self.settings, plan, progress)
        finally:
            self.state = ManagerState.NEW
            self._end_captures()
        return self._profile

    def capture(self, progress: ProgressCallback | None = None) -> CaptureReport:
        """Capture every Descriptor of every enabled Target, largest first, then bind Handles.

        Args:
            progress: called before each Descriptor and once at the end.

        Raises:
            LifecycleError: called twice, after ``clear``, or while another Manager serves one of the Targets.
            VGraphLabError: in strict mode, the first failure; everything is rolled back.
        """
        if self.state is not ManagerState.NEW:
            raise LifecycleError(f"capture() needs a new Manager, this one is {self.state.value}. Make another one to capture again.")
        for target in self.targets.values():
            if target.is_served:
                raise LifecycleError(f"{target.target_id} is served by another Manager. Clear that one before capturing again.")
        self.memory_before = self.backend.memory()
        self.state = ManagerState.CAPTURING
        start = perf_counter()
        try:
            with self._turn:
                outcomes = self._capture_all(progress)
                for target in self.targets.values():
                    self._bind_or_stay_eager(target)
                notes = tuple(note for target in self.targets.values() for note in target.routine.notes())
        except BaseException as error:
            try:
                self._release_all()
            except LifecycleError as second:
                error.add_note(f"While rolling back: {second}")
            raise
        finally:
            self._end_captures()
        self.state = ManagerState.READY
        self.report = CaptureReport(
            device=str(self.backend.device),
            outcomes=outcomes,
            eager_targets=dict(self._eager_targets),
            seconds=perf_counter() - start,
            static_buffer_bytes=self._store.static_buffer_bytes,
            pool_reserved_bytes=self.pool.reserved_bytes,
            free_bytes=self.backend.memory().free_bytes,
            profile=self._profile,
            notes=notes,
        )
        return self.report

    def capture_plan(self) -> list[tuple[Target[Any], Descriptor]]:
        """What start-up capture tries, in order: Target by Target, largest first within each.

        Not largest first over all of them: :attr:`Descriptor.work` counts in its Routine's own unit, so it compares shapes
        of one Target only.
        """
        return [(t, d) for t in self.targets.values() for d in sorted(t.descriptors, key=lambda d: (d.work, str(d)), reverse=True)]

    def _capture_all(self, progress: ProgressCallback | None) -> list[CaptureOutcome]:
        plan = self.capture_plan()
        outcomes: list[CaptureOutcome] = []
        for done, (target, descriptor) in enumerate(plan):
            if progress:
                progress(CaptureProgress(done, len(plan), target.target_id, descriptor))
            if self._is_enabled(target):
                result = self._store.attempt(target, descriptor, lazy=False, strict=self.settings.strict)
            else:
                result = self._store.reject(target, descriptor, FallbackReason.DISABLED, self._switched_off_by(target))
            cost, rejection = (None, result) if isinstance(result, Rejection) else (result.cost, None)
            outcomes.append(CaptureOutcome(target.target_id, descriptor, cost, rejection))
        if progress:
            progress(CaptureProgress(len(plan), len(plan), None, None))
        return outcomes

    def _end_captures(self) -> None:
        for target in self.targets.values():
            target.routine.captures_are_over()

    def _is_enabled(self, target: Target[Any]) -> bool:
        return not self.settings.enforce_eager and self.settings.for_target(target.target_id).enabled

    def _switched_off_by(self, target: Target[Any]) -> str:
        if self.settings.enforce_eager:
            return "switched off for all Targets (enforce_eager, or cudagraph_mode: NONE)"
        return f"switched off by targets.{target.target_id}.enabled: false"

    # ------------------------------------------------------------------------------------------------ binding

    def _bind_or_stay_eager(self, target: Target[Any]) -> None:
        try:
            self._bind(target)
        except Exception as error:
            if self.settings.strict:
                raise
            self._restore_eager(target)
            for second in self._store.release(target.target_id):
                logger.warning("%s: a graph could not be reset: %s", target.target_id, second)
            self._eager_targets[target.target_id] = f"it could not be bound: {self._store.describe(error)}"
            logger.warning("%s stays eager: %s", target.target_id, error)
            self._count_eager_calls(target)

    def _count_eager_calls(self, target: Target[Any]) -> None:
        """Let a Target that could not be bound answer eagerly through a delegate that counts."""
        try:
            counting = GraphRuntime(self._store, target, self._sink.recorder(target.target_id), constant_reason=FallbackReason.NO_GRAPH)
            target.observe(counting)
        except Exception as error:  # noqa: BLE001 - whatever kept it from being bound
            logger.warning("%s: its eager calls are not counted: %s", target.target_id, error)
        else:
            self._delegates[target.target_id] = counting

    def _bind(self, target: Target[Any]) -> None:
        target_id, settings = target.target_id, self.settings.for_target(target.target_id)
        enabled = self._is_enabled(target)
        lazy = enabled and settings.enable_lazy_capture and settings.max_extra_graphs != 0
        if lazy and settings.max_extra_graphs is None:
            logger.warning("%s: max_extra_graphs is null, so lazy capture is unbounded", target_id)
        generations = self._generations if self.settings.eviction == "generation" else None
        runtime = GraphRuntime(
            self._store,
            target,
            self._sink.recorder(target_id),
            constant_reason=None if enabled else FallbackReason.DISABLED,
            lazy_capture=LazyCapture(self._store, target, settings.max_extra_graphs, self._turn, generations) if lazy else None,
            borrows=self._borrows,
        )
        if self._store.entries[target_id] or lazy:
            handle = VocoderGraphHandle(runtime)
            target.bind(handle)
            self._delegates[target_id] = handle
        else:
            target.observe(runtime)
            self._delegates[target_id] = runtime
            self._eager_targets[target_id] = "it has no graph" if enabled else self._switched_off_by(target)

    # ------------------------------------------------------------------------------------------------ cleanup

    def clear(self) -> None:
        """Restore eager delegates, reset graphs, release entries, emit final statistics. Safe to call twice.

        Raises:
            LifecycleError: called while ``capture`` runs or by a Routine during a lazy capture or a replay; or a graph
                could not be reset, in which case all others were.
        """
        if self.state is ManagerState.CAPTURING:
            raise LifecycleError("clear() was called during capture(). To abort a capture, raise from its progress callback.")
        if self._turn.is_mine:
            raise LifecycleError("clear() was called by a Routine during a capture. Call it when the capture is over.")
        if self.state is ManagerState.CLEARED:
            return
        with self.pool.exclusive():
            if self._store.is_replaying:
                raise LifecycleError("clear() was called by a Routine during a replay. Call it when the call is over.")
        self._release_all()
        if self.settings.log_stats:
            logger.info("final statistics: %s", self.stats())

    def _release_all(self) -> None:
        self.state = ManagerState.CLEARED
        with self._turn:  # a lazy capture that is under way ends first
            self._store.is_closed = True
            for target in self.targets.values():
                self._restore_eager(target)
            errors = self._store.release(*self.targets)
        if errors:
            first = f"{type(errors[0]).__name__}: {errors[0]}"
            raise LifecycleError(f"{len(errors)} graphs could not be reset; all Targets are eager again. First: {first}") from errors[0]

    def _restore_eager(self, target: Target[Any]) -> None:
        delegate = self._delegates.pop(target.target_id, None)
        if delegate is not None:
            target.restore_eager(delegate)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.clear()

    def __repr__(self) -> str:
        return f"VocoderCUDAGraphManager({self.state.value}, {len(self.entries())} graphs, {len(self.targets)} targets)"
