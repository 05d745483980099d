"""A callable with one graph per batch descriptor: vLLM's CUDAGraphWrapper on the backends of this package."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from vgraph_lab.errors import ConfigError, FallbackReason, ForkedProcessError, ReplayError
from vgraph_lab.graphs import GraphEntry, Target
from vgraph_lab.graphs.capture import capture_entry, is_capture_underway
from vgraph_lab.graphs.structure import clone, nbytes

from .arguments import Arguments, named_leaves
from .descriptor import BatchDescriptor
from .forward_context import ForwardContext, get_forward_context, is_forward_context_available, override_forward_context
from .modes import CUDAGraphMode
from .monitor import validate_cudagraph_capturing_enabled
from .weak_ref import weak_ref_tensors
from .wrapper_graphs import WrappedRoutine, WrapperGraphs

__all__ = ["CUDAGraphOptions", "CUDAGraphWrapper", "Offloader"]

_capturing: ContextVar[tuple[WrapperGraphs, ...]] = ContextVar("capturing_wrapper_graphs", default=())
"""Whose wrappers are warming up or capturing around the caller, who may be a micro-batch."""


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
        weak_ref_output: do not keep the output's memory from later captures of the pool. The result is then good until the next
            graph of the pool replays; what is safe and why, see :mod:`~vgraph_lab.vllm_v1.weak_ref`. As in vLLM, for the last
            piece of a model, whose result its caller reads at once.
        debug: check each replay's arguments against those of the capture, and name the one that differs.
    """

    num_warmups: int = 1
    clone_output: bool = False
    weak_ref_output: bool = False
    debug: bool = False


class CUDAGraphWrapper:
    """A callable that replays a graph if the forward context names its mode, and is the plain callable otherwise.

    Counterpart of ``vllm.compilation.cuda_graph.CUDAGraphWrapper`` (0.25.1). It trusts the context: mode NONE, or another
    mode than its own, or no context at all means the plain call, so that wrappers of different modes can be nested.
    Otherwise the descriptor's graph is replayed; it is captured at the first call, provided that capturing is enabled
    (:mod:`~vgraph_lab.vllm_v1.monitor`). A capturing call replays its graph once, so it returns what eager would.

    A batch that the context wants a graph for, and that runs plainly all the same, is counted with its reason: ``nested_capture``
    inside of somebody else's capture, ``no_graph`` in a mode that no wrapper of these graphs serves.

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
        inner = self.unwrap()
        owner = inner if isinstance(inner, nn.Module) else getattr(inner, "__self__", None)
        self._modules = (*((owner,) if isinstance(owner, nn.Module) else ()), *modules)
        self._static_tensors = {} if static_tensors is None else static_tensors
        self.offloader = offloader
        self._arguments = Arguments(inner)
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
        """The plain callable, under all wrappers."""
        inner = getattr(self.runnable, "unwrap", None)
        return self.runnable if inner is None else cast("Callable[..., Any]", inner())

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Whose parameters and buffers the graphs read."""
        return self._modules

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = get_forward_context() if is_forward_context_available() else ForwardContext()
        mode, batch = context.cudagraph_runtime_mode, context.batch_descriptor
        if not self._serves(mode) or batch is None or self._is_nested():
            return self._run_eagerly(context, args, kwargs)
        with self.graphs.pool.exclusive():
            entry = self.concrete_cudagraph_entries.get(batch)
            if entry is not None:
                return self._replay(entry, batch, context, args, kwargs)
            entry = self._capture(batch, context, args, kwargs)
            entry.graph.replay()
            result = self._result(entry)
            if self.cudagraph_options.weak_ref_output:
                entry.output = weak_ref_tensors(entry.output)  # this call's result still holds it
            return result

    def _run_eagerly(self, context: ForwardContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The plain call. A batch without a graph is counted once: by the outermost wrapper."""
        reason = self._fallback_reason(context)
        if not context.is_counted or reason is None or context.runtime_key is None:
            return self.runnable(*args, **kwargs)
        self._recorder.record_fallback(context.runtime_key, reason)
        with override_forward_context(replace(context, fallback_reason=None, is_counted=False)):
            return self.runnable(*args, **kwargs)

    def _fallback_reason(self, context: ForwardContext) -> FallbackReason | None:
        """Why this plain call has no graph; None where that is as it should be: a graph of these wrappers will hold or serve it."""
        mode = context.cudagraph_runtime_mode
        if not mode:
            return context.fallback_reason
        if self.graphs in _capturing.get():
            return None
        if self._serves(mode):
            return FallbackReason.NESTED_CAPTURE
        return None if any(wrapper._serves(mode) for wrapper in self.graphs.wrappers.values()) else FallbackReason.NO_GRAPH

    def _is_nested(self) -> bool:
        """Whether this call belongs into a capture that is under way: of another wrapper, or of somebody else."""
        return is_capture_underway() or self.graphs.backend.is_capturing()

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
            if self.offloader is not None:
                self.offloader.join_after_forward()
            return output

        if self.offloader is not None:
            self.offloader.sync_prev_onload()
        with _capture_of(self.graphs):
            entry = self._capture_entry(batch, run, buffers, static_buffer_bytes)
        self.concrete_cudagraph_entries[batch], self._constants[batch] = entry, constants
        return entry

    def _capture_entry(
        self, batch: BatchDescriptor, run: Callable[[], Any], buffers: dict[str, Tensor], static_buffer_bytes: int
    ) -> GraphEntry:
        entry = capture_entry(
            self.graphs.backend,
            self.graphs.pool,
            Target(self.target_id, WrappedRoutine(self._modules, run)),
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
            if self.offloader is not None:
                self.offloader.sync_prev_onload()
            entry.graph.replay()
            output = self._result(entry)
        except BaseException as error:
            self._recorder.record_replay_error(key, batch, error)
            raise
        if context.is_counted:
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


@contextmanager
def _capture_of(graphs: WrapperGraphs) -> Iterator[None]:
    """A warm-up and a capture. Not in inference mode: what it makes could not be written outside of that mode later."""
    token = _capturing.set((*_capturing.get(), graphs))
    try:
        with torch.inference_mode(mode=False), torch.no_grad():
            yield
    finally:
        _capturing.reset(token)


def _place(tensor: Tensor) -> str:
    """Where a tensor is and how it is laid out: all that a graph knows of it."""
    layout = "" if tensor.is_contiguous() else f" strides {list(tensor.stride())}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{layout} at {tensor.data_ptr():#x}"
