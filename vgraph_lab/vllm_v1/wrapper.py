"""A callable with one graph per batch descriptor: vLLM's CUDAGraphWrapper on the backends of this package."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from vgraph_lab.errors import ConfigError, ForkedProcessError, ReplayError
from vgraph_lab.graphs import Buffers, Descriptor, GraphEntry, Resolution, Routine, StatsSink, Target
from vgraph_lab.graphs.backends.base import GraphBackend
from vgraph_lab.graphs.capture import capture_entry, is_capture_underway
from vgraph_lab.graphs.structure import clone, nbytes

from .arguments import Arguments, named_leaves
from .descriptor import BatchDescriptor
from .forward_context import ForwardContext, get_forward_context, is_forward_context_available
from .modes import CUDAGraphMode
from .monitor import validate_cudagraph_capturing_enabled

__all__ = ["CUDAGraphOptions", "CUDAGraphWrapper", "Offloader", "WrapperGraphs"]


class Offloader(Protocol):
    """Prefetches weights on a stream of its own. Graphs must neither miss a prefetch nor leave one unjoined."""

    def sync_prev_onload(self) -> None:
        """Wait for prefetches begun before; called before a capture and before a replay."""

    def join_after_forward(self) -> None:
        """Join the prefetch stream to the current one; called at the end of a captured pass, inside the capture."""


@dataclass(frozen=True, slots=True)
class CUDAGraphOptions:
    """How one wrapper captures and replays.

    Attributes:
        num_warmups: eager runs before each capture. They run for real, so work that changes its inputs changes them.
        clone_output: results own their memory. Off, as in vLLM: a result is the graph's own output, which the next
            graph of the pool may overwrite, and which the next piece of the model may read at a fixed address.
        debug: check each replay's arguments against those of the capture, and name the one that differs.
    """

    num_warmups: int = 1
    clone_output: bool = False
    debug: bool = False


class WrapperGraphs:
    """What the wrappers of one model share: backend, pool, statistics, and all graphs in the order of their captures."""

    def __init__(self, backend: GraphBackend) -> None:
        self.backend, self.pool, self.sink = backend, backend.create_pool(), StatsSink()
        self.wrappers: dict[str, CUDAGraphWrapper] = {}
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


@dataclass
class _RunnableRoutine(Routine[Any]):
    """One call of a runnable, as a capture wants it."""

    runnable: Callable[[], Any]
    modules: Iterable[nn.Module] = field(default_factory=tuple)

    def captured_modules(self) -> Iterable[nn.Module]:
        return self.modules

    def forward_for_capture(self, descriptor: Descriptor, buffers: Buffers) -> Any:
        return self.runnable()

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


class CUDAGraphWrapper:
    """A callable that replays a graph if the forward context names its mode, and is the plain callable otherwise.

    Counterpart of ``vllm.compilation.cuda_graph.CUDAGraphWrapper`` (0.25.1). It trusts the context: mode NONE, or another
    mode than its own, or no context at all means the plain call, so that wrappers of different modes can be nested.
    Otherwise the descriptor's graph is replayed; it is captured at the first call, provided that capturing is enabled
    (:mod:`~vgraph_lab.vllm_v1.monitor`). A capturing call replays its graph once, so it returns what eager would.

    The wrapper copies no inputs: the caller writes them into the tensors of the capture. Attributes that it has not got
    are those of the runnable.

    Args:
        runnable: what to capture; tensors come in as arguments, parameters and buffers belong to its modules.
        runtime_mode: FULL or PIECEWISE.
        graphs: shared with the other wrappers of the model.
        target_id: name in entries and statistics, dotted and in lower case.
        cudagraph_options: see there.
        modules: whose parameters and buffers the runnable reads, if it is neither a module nor a method of one.
        static_tensors: other tensors that it reads or writes in place, by name: KV caches. Read at each capture.
        offloader: joined around captures and before replays.

    Raises:
        ConfigError: the mode is not FULL or PIECEWISE, or the id is taken or malformed.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        runtime_mode: CUDAGraphMode,
        graphs: WrapperGraphs,
        *,
        target_id: str = "v1.model",
        cudagraph_options: CUDAGraphOptions | None = None,
        modules: Iterable[nn.Module] = (),
        static_tensors: Mapping[str, Tensor] | None = None,
        offloader: Offloader | None = None,
    ) -> None:
        if runtime_mode not in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
            raise ConfigError(f"runtime_mode: a wrapper captures FULL or PIECEWISE, got {runtime_mode}. Mode NONE needs no wrapper.")
        self.runnable, self.runtime_mode, self.graphs, self.target_id = runnable, runtime_mode, graphs, target_id
        self.cudagraph_options = cudagraph_options or CUDAGraphOptions()
        self.concrete_cudagraph_entries: dict[BatchDescriptor, GraphEntry] = {}
        owner = runnable if isinstance(runnable, nn.Module) else getattr(runnable, "__self__", None)
        self._modules = (*((owner,) if isinstance(owner, nn.Module) else ()), *modules)
        self._static_tensors = {} if static_tensors is None else static_tensors
        self._offloader = offloader
        self._arguments = Arguments(runnable)
        self._constants: dict[BatchDescriptor, dict[str, Any]] = {}
        self._recorder = graphs.sink.recorder(target_id)
        self._is_audited = False
        graphs.add(self)

    def __getattr__(self, key: str) -> Any:
        runnable = self.__dict__.get("runnable")  # not yet there while a copy is being made
        if runnable is None or not hasattr(runnable, key):
            raise AttributeError(f"neither CUDAGraphWrapper nor its runnable {runnable!r} has an attribute {key!r}")
        return getattr(runnable, key)

    def unwrap(self) -> Callable[..., Any]:
        """The plain callable."""
        return self.runnable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = get_forward_context() if is_forward_context_available() else ForwardContext()
        mode, batch = context.cudagraph_runtime_mode, context.batch_descriptor
        if not self._serves(mode) or batch is None or is_capture_underway() or self.graphs.backend.is_capturing():
            if mode is CUDAGraphMode.NONE and context.fallback_reason is not None and context.runtime_key is not None:
                self._recorder.record_fallback(context.runtime_key, context.fallback_reason)
            return self.runnable(*args, **kwargs)
        with self.graphs.pool.exclusive():
            entry = self.concrete_cudagraph_entries.get(batch)
            if entry is not None:
                return self._replay(entry, batch, context, args, kwargs)
            entry = self._capture(batch, context, args, kwargs)
            entry.graph.replay()
            return self._result(entry)

    def _serves(self, mode: CUDAGraphMode) -> bool:
        """Whether calls in this mode are this wrapper's to replay."""
        return mode is self.runtime_mode

    def clear_graphs(self) -> None:
        """Release this wrapper's graphs. Safe to call twice."""
        with self.graphs.pool.exclusive():
            self.graphs.backend.synchronize()  # a replay may still be running
            for entry in self.concrete_cudagraph_entries.values():
                entry.release()
            self.concrete_cudagraph_entries.clear()
            self._constants.clear()

    def _capture(self, batch: BatchDescriptor, context: ForwardContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GraphEntry:
        validate_cudagraph_capturing_enabled(f"{self.target_id} {batch} ({context.cudagraph_runtime_mode})")
        inputs, constants = self._inputs(context, args, kwargs)
        buffers = {**inputs, **self._static_tensors}
        known = [[dict(entry.buffers), entry.output] for entry in self.graphs.in_capture_order()]  # a piece reads the last one's output
        static_buffer_bytes = nbytes([*known, buffers]) - nbytes(known)

        def run() -> Any:
            output = self.runnable(*args, **kwargs)
            if self._offloader is not None:
                self._offloader.join_after_forward()
            return output

        if self._offloader is not None:
            self._offloader.sync_prev_onload()
        entry = self._capture_entry(batch, run, buffers, static_buffer_bytes)
        self.concrete_cudagraph_entries[batch], self._constants[batch] = entry, constants
        return entry

    def _capture_entry(
        self, batch: BatchDescriptor, run: Callable[[], Any], buffers: dict[str, Tensor], static_buffer_bytes: int
    ) -> GraphEntry:
        entry = capture_entry(
            self.graphs.backend,
            self.graphs.pool,
            Target(self.target_id, _RunnableRoutine(run, self._modules)),
            batch,
            buffers,
            static_buffer_bytes=static_buffer_bytes,
            num_warmups=self.cudagraph_options.num_warmups,
            audit=not self._is_audited,
            order=self.graphs.next_order(),
        )
        self._is_audited = True  # the same code runs for its other shapes
        return entry

    def _replay(
        self, entry: GraphEntry, batch: BatchDescriptor, context: ForwardContext, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if os.getpid() != self.graphs.process:
            raise ForkedProcessError(f"{self.target_id} was captured in process {self.graphs.process}; capture again in its fork.")
        if self.cudagraph_options.debug:
            self._check_arguments(entry, batch, context, args, kwargs)
        key = context.runtime_key or batch
        try:
            if self._offloader is not None:
                self._offloader.sync_prev_onload()
            entry.graph.replay()
            output = self._result(entry)
        except BaseException as error:
            self._recorder.record_replay_error(key, batch, error)
            raise
        entry.touch()
        self._recorder.record_graph_hit(key, batch)
        return output

    def _result(self, entry: GraphEntry) -> Any:
        return clone(entry.output) if self.cudagraph_options.clone_output else entry.output

    def _inputs(
        self, context: ForwardContext, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and constants that a graph of this call would hold. Attention metadata is one of them in FULL mode only."""
        leaves = self._arguments.leaves(args, kwargs)
        if context.cudagraph_runtime_mode is CUDAGraphMode.FULL:
            leaves |= named_leaves("attn_metadata", context.attn_metadata)
        tensors = {name: value for name, value in leaves.items() if isinstance(value, Tensor)}
        return tensors, {name: value for name, value in leaves.items() if name not in tensors}

    def _check_arguments(
        self, entry: GraphEntry, batch: BatchDescriptor, context: ForwardContext, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        tensors, constants = self._inputs(context, args, kwargs)
        captured = {name: _place(tensor) for name, tensor in entry.buffers.items() if name not in self._static_tensors}
        captured |= {name: repr(value) for name, value in self._constants[batch].items()}
        given = {name: _place(tensor) for name, tensor in tensors.items()} | {name: repr(value) for name, value in constants.items()}
        wrong = [
            f"{name} was {captured.get(name, 'not there')}, is {given.get(name, 'not there')}"
            for name in {**captured, **given}
            if captured.get(name) != given.get(name)
        ]
        if wrong:
            raise ReplayError(
                f"{self.target_id} {batch}: a graph reads what it was captured with, but arguments changed: {'; '.join(wrong)}. "
                "Copy new values into the tensors of the capture, and keep constants in the descriptor's batch the same."
            )


def _place(tensor: Tensor) -> str:
    """Where a tensor is and how it is laid out: all that a graph knows of it."""
    layout = "" if tensor.is_contiguous() else f" strides {list(tensor.stride())}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{layout} at {tensor.data_ptr():#x}"
