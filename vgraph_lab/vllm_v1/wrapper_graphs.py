"""What the wrappers of one model share; it can be read like a ``VocoderCUDAGraphManager``, so that both paths have the same tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from torch import nn

from vgraph_lab.config.validation import Settings
from vgraph_lab.errors import ConfigError, InputError
from vgraph_lab.graphs import (
    Buffers,
    Descriptor,
    GraphEntry,
    ManagerState,
    Rejection,
    Resolution,
    Routine,
    StatsSink,
    StatsSnapshot,
    Target,
)
from vgraph_lab.graphs.backends.base import DeviceMemory, GraphBackend
from vgraph_lab.graphs.report import CaptureReport

from .descriptor import BatchDescriptor

if TYPE_CHECKING:
    from .wrapper import CUDAGraphWrapper

__all__ = ["WrappedRoutine", "WrapperGraphs"]


class WrapperGraphs:
    """What the wrappers of one model share: backend, pool, statistics, and all graphs in the order of their captures.

    Args:
        backend: where to capture.
        settings: of the runner, for records.

    Attributes:
        state: as a Manager's; a runner moves it.
        report: of the runner's capture; None before.
        memory_before: the device's memory when that began; None before.
        plan: what that captures, in order: wrapper and shape.
    """

    def __init__(self, backend: GraphBackend, settings: BaseModel | None = None) -> None:
        self.backend, self.pool, self.sink = backend, backend.create_pool(), StatsSink()
        self.settings = Settings() if settings is None else settings
        self.wrappers: dict[str, CUDAGraphWrapper] = {}
        self.state = ManagerState.NEW
        self.report: CaptureReport | None = None
        self.memory_before: DeviceMemory | None = None
        self.plan: Sequence[tuple[str, BatchDescriptor]] = ()
        self._captures = 0
        self.process = os.getpid()

    def add(self, wrapper: CUDAGraphWrapper) -> None:
        """Take a wrapper in.

        Raises:
            ConfigError: another one has its id.
        """
        if wrapper.target_id in self.wrappers:
            raise ConfigError(f"two wrappers are called {wrapper.target_id!r}. Give each piece of the model an id of its own.")
        self.wrappers[wrapper.target_id] = wrapper

    def next_order(self) -> int:
        """The position of the next capture; callers hold the pool."""
        self._captures += 1
        return self._captures - 1

    def in_capture_order(self) -> list[GraphEntry]:
        """All graphs, first captured first."""
        found = [entry for wrapper in self.wrappers.values() for entry in wrapper.concrete_cudagraph_entries.values()]
        return sorted(found, key=lambda entry: entry.cost.order)

    def clear(self) -> None:
        """Release every graph and the pool's memory. Wrappers stay, and may capture again. Safe to call twice."""
        with self.pool.exclusive():
            for wrapper in self.wrappers.values():
                wrapper.clear_graphs()
            self.backend.release_cached_memory()
            self._captures = 0

    def close(self) -> None:
        """Release every graph, and let go of the wrappers: they hold the model and its caches. Statistics stay. Safe to call twice."""
        with self.pool.exclusive():
            self.clear()
            self.wrappers.clear()
            self.plan = ()

    # ------------------------------------------------------------------------------------------- read like a Manager

    @property
    def is_ready(self) -> bool:
        """Whether start-up capture is over."""
        return self.state is ManagerState.READY

    def entries(self) -> list[GraphEntry]:
        """All graphs, in capture order."""
        return self.in_capture_order()

    def rejections(self) -> dict[tuple[str, Descriptor], Rejection]:
        """None: a shape that cannot be captured ends the start-up, as in vLLM."""
        return {}

    def stats(self) -> StatsSnapshot:
        """A consistent copy of all counters."""
        return self.sink.snapshot()

    @property
    def targets(self) -> dict[str, Target[Any]]:
        """One per wrapper, for reading only: its id, and whose memory its graphs read."""
        return {target_id: Target(target_id, WrappedRoutine(wrapper.modules)) for target_id, wrapper in self.wrappers.items()}

    def capture_plan(self) -> list[tuple[Target[Any], Descriptor]]:
        """What start-up capture captures, in order."""
        targets = self.targets
        return [(targets[target_id], descriptor) for target_id, descriptor in self.plan]


class WrappedRoutine(Routine[Any]):
    """A wrapper's runnable, as a capture and the tables want it.

    Args:
        modules: whose parameters and buffers it reads.
        runnable: one call of it; None for tables, which only read.
    """

    def __init__(self, modules: Iterable[nn.Module], runnable: Callable[[], Any] | None = None) -> None:
        self._modules, self._runnable = tuple(modules), runnable

    def captured_modules(self) -> tuple[nn.Module, ...]:
        return self._modules

    def forward_for_capture(self, descriptor: Descriptor, buffers: Buffers) -> Any:
        if self._runnable is None:
            raise InputError(
                f"the model of {descriptor} runs in the forward context of a batch, which its runner makes: it cannot run from here."
            )
        return self._runnable()

    def prepare_for_capture(self, descriptor: Descriptor, buffers: Buffers) -> None:
        """Nothing: the caller has filled its arguments."""

    def validate_runtime_inputs(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("a wrapper replays by itself")

    def resolve(self, *args: Any, **kwargs: Any) -> Resolution:
        raise NotImplementedError("a wrapper is told its descriptor by the forward context")

    def allocate_buffers(self, descriptor: Descriptor) -> Buffers:
        raise NotImplementedError("a wrapper's arguments are its buffers")

    def copy_runtime_inputs(self, descriptor: Descriptor, buffers: Buffers, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("a wrapper's caller writes into its own buffers")

    def output_after_replay(self, descriptor: Descriptor, buffers: Buffers, output: Any, *args: Any, **kwargs: Any) -> Any:
        return output

    def eager_call(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a wrapper calls its runnable itself")
