"""A model that runs batches in micro-batches, eagerly or as one graph: vLLM's UBatchWrapper on the backends of this package."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from vgraph_lab.errors import ConfigError, FallbackReason, InputError
from vgraph_lab.graphs import GraphEntry
from vgraph_lab.graphs.capture import is_capture_underway

from .descriptor import BatchDescriptor
from .forward_context import ForwardContext, get_forward_context, is_forward_context_available, override_forward_context
from .modes import CUDAGraphMode
from .parallel import ParallelConfig
from .ubatch_inputs import concatenated, sliced_forward_contexts, sliced_inputs
from .ubatch_threads import UBatchThreads
from .ubatch_trace import UBatchTrace
from .ubatching import make_ubatch_contexts
from .wrapper import CUDAGraphOptions, CUDAGraphWrapper
from .wrapper_graphs import WrapperGraphs

__all__ = ["UBatchWrapper"]

_NONE, _FULL = CUDAGraphMode.NONE, CUDAGraphMode.FULL


class UBatchWrapper:
    """A model that runs in micro-batches if the forward context holds slices, and as it is otherwise.

    Counterpart of ``vllm.v1.worker.gpu_ubatch_wrapper.UBatchWrapper`` (0.25.1). It is the outermost wrapper. One shape has one graph,
    either of the whole batch or of its micro-batches; a batch that comes the other way runs eagerly and is counted so:

    ==================================  ================================  ==================================
    mode, and the shape's graph         without slices                    with slices
    ==================================  ================================  ==================================
    NONE                                the model                         micro-batches, eager
    PIECEWISE                           the model (its own wrapper)       micro-batches, eager
    FULL, no graph yet                  captured whole                    captured in micro-batches
    FULL, graph of the whole batch      that graph                        micro-batches, eager
    FULL, graph of micro-batches        the model, eager                  that graph
    ==================================  ================================  ==================================

    A graph of micro-batches is one capture in which all threads take part, in turns. On CUDA, each launches on the streams that are
    captured, and has found its way to the device before. The CPU backend records the calls of one thread; there, the recording goes
    from thread to thread with the turn (:mod:`~vgraph_lab.graphs.backends.threads`). Either way a replay needs no threads. The graph
    belongs to the batch's descriptor (vLLM: to its number of tokens), and may be replayed with other cuts between requests.

    An offloader that prefetches weights layer by layer does not go with micro-batches, since each layer runs several times per pass:
    there is no argument for one.

    Args:
        runnable: the model, or a wrapper of mode PIECEWISE around it.
        parallel_config: ranks and micro-batches.
        runtime_mode: FULL, or NONE for no graphs here.
        graphs: shared with the other wrappers of the model.
        target_id: name of whole graphs in entries and statistics; those of micro-batches have ``.ubatch`` after it.
        cudagraph_options: of the graphs.
        modules: see ``CUDAGraphWrapper``.
        static_tensors: see ``CUDAGraphWrapper``.
        sm_control: around captures and eager micro-batches.
        trace: takes the spans of eager micro-batches.
        timeout_s: how long one micro-batch may keep its turn while others wait.

    Attributes:
        cudagraph_wrapper: of whole batches; None with mode NONE.
        runtime_mode: FULL or NONE, not that of a wrapper inside. Other attributes that it has not got are those of the runnable.

    Raises:
        ConfigError: ``parallel_config`` has no micro-batches, or the mode is neither FULL nor NONE.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        parallel_config: ParallelConfig,
        runtime_mode: CUDAGraphMode,
        graphs: WrapperGraphs,
        *,
        target_id: str = "v1.full",
        cudagraph_options: CUDAGraphOptions | None = None,
        modules: Iterable[nn.Module] = (),
        static_tensors: Mapping[str, Tensor] | None = None,
        sm_control: AbstractContextManager[object] | None = None,
        trace: UBatchTrace | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        if not parallel_config.use_ubatching:
            raise ConfigError("UBatchWrapper without micro-batches: set enable_dbo or ubatch_size, or use CUDAGraphWrapper.")
        if runtime_mode not in (_NONE, _FULL):
            raise ConfigError(f"runtime_mode: micro-batches are captured FULL or not at all (NONE), got {runtime_mode}.")
        self.runnable, self.parallel_config, self.graphs, self.trace = runnable, parallel_config, graphs, trace
        self.runtime_mode, self.target_id = runtime_mode, target_id
        self.cudagraph_options = cudagraph_options or CUDAGraphOptions()
        self.sm_control = nullcontext() if sm_control is None else sm_control
        self.timeout_s = timeout_s
        device = graphs.backend.device
        # Of high priority: else an exchange waits behind the matrix product that it is to run beside, which has all SMs.
        self.comm_stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._threads = UBatchThreads(parallel_config.num_ubatches, device)
        self._recorder = graphs.sink.recorder(f"{target_id}.ubatch")
        shared: dict[str, Any] = {
            "cudagraph_options": self.cudagraph_options,
            "modules": tuple(modules),
            "static_tensors": static_tensors,
        }
        self.cudagraph_wrapper: CUDAGraphWrapper | None = None
        self._ubatches: Callable[..., Any] = _UBatches(self)
        self._ubatch_graphs: CUDAGraphWrapper | None = None
        if runtime_mode is _FULL:
            self.cudagraph_wrapper = CUDAGraphWrapper(runnable, _FULL, graphs, target_id=target_id, **shared)
            self._ubatch_graphs = CUDAGraphWrapper(self._ubatches, _FULL, graphs, target_id=f"{target_id}.ubatch", **shared)

    def __getattr__(self, key: str) -> Any:
        runnable = self.__dict__.get("runnable")  # not yet there while a copy is being made
        if runnable is None or not hasattr(runnable, key):
            raise AttributeError(f"neither UBatchWrapper nor its runnable {runnable!r} has an attribute {key!r}")
        return getattr(runnable, key)

    def unwrap(self) -> Callable[..., Any]:
        """The plain callable, under all wrappers."""
        inner = getattr(self.runnable, "unwrap", None)
        return self.runnable if inner is None else cast("Callable[..., Any]", inner())

    @property
    def cudagraphs(self) -> Mapping[BatchDescriptor, GraphEntry]:
        """The graphs of micro-batches."""
        return MappingProxyType({} if self._ubatch_graphs is None else self._ubatch_graphs.concrete_cudagraph_entries)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Whose parameters and buffers this wrapper's graphs read."""
        return () if self.cudagraph_wrapper is None else self.cudagraph_wrapper.modules

    @property
    def concrete_cudagraph_entries(self) -> Mapping[BatchDescriptor, GraphEntry]:
        """All graphs of this wrapper, of whole batches and of micro-batches: one per shape."""
        whole = {} if self.cudagraph_wrapper is None else self.cudagraph_wrapper.concrete_cudagraph_entries
        return MappingProxyType({**whole, **self.cudagraphs})

    def clear_graphs(self) -> None:
        """Release this wrapper's graphs, of whole batches and of micro-batches; not those of a wrapper inside. Safe to call twice."""
        for wrapper in (self.cudagraph_wrapper, self._ubatch_graphs):
            if wrapper is not None:
                wrapper.clear_graphs()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch as the forward context says.

        Raises:
            InputError: slices, metadata or arguments do not fit together; or mode FULL is asked for, and there are no graphs here.
            LifecycleError: a graph would have to be captured now, or a thread is still busy with a step that was given up.
            UBatchError: a micro-batch kept its turn for too long.
            Exception: what a micro-batch has raised; the others have ended with it.
        """
        context = get_forward_context() if is_forward_context_available() else ForwardContext()
        slices, mode = context.ubatch_slices, context.cudagraph_runtime_mode
        if slices is not None:
            if len(slices) != self.parallel_config.num_ubatches:
                raise InputError(
                    f"the batch is cut into {len(slices)} micro-batches, the settings say {self.parallel_config.num_ubatches}."
                )
            self._threads.prepare()
        if mode is _FULL and self.cudagraph_wrapper is None:
            raise InputError("the forward context says FULL, and this wrapper was made without graphs. Dispatch with cudagraph_mode NONE.")
        own, other = self.cudagraph_wrapper, self._ubatch_graphs
        if slices is not None:
            own, other = other, own
        has_other_graph = mode is _FULL and other is not None and context.batch_descriptor in other.concrete_cudagraph_entries
        if has_other_graph or (slices is not None and mode is CUDAGraphMode.PIECEWISE):
            context = replace(context, cudagraph_runtime_mode=_NONE, fallback_reason=FallbackReason.STATE_NOT_COVERED)
        with override_forward_context(context):
            if own is not None:
                return own(*args, **kwargs)
            if slices is None:
                return self.runnable(*args, **kwargs)
            self._count(context)
            return self._ubatches(*args, **kwargs)

    def shutdown(self) -> None:
        """End the threads; graphs are their owner's to clear. Safe to call twice; the next step starts new threads."""
        self._threads.shutdown()

    def _count(self, context: ForwardContext) -> None:
        """A batch without a graph, in the place of the wrappers inside, which do not get to see it."""
        key, reason = context.runtime_key, context.fallback_reason
        if hasattr(self.runnable, "unwrap") and context.is_counted and key is not None and reason is not None:
            self._recorder.record_fallback(key, reason)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the micro-batches of the forward context that this thread is in, and put their results together."""
        context, device = get_forward_context(), self.graphs.backend.device
        slices = context.ubatch_slices
        assert slices is not None  # that is how a call gets here
        inputs, forward_contexts = sliced_inputs(slices, args, kwargs), sliced_forward_contexts(context)
        trace = self.trace
        if trace is not None and (not trace.is_on or is_capture_underway() or self.graphs.backend.is_capturing()):
            trace = None
        if trace is not None:
            trace.start()
        contexts = make_ubatch_contexts(
            len(slices),
            torch.cuda.current_stream(device) if device.type == "cuda" else None,
            self.comm_stream,
            forward_contexts,
            threading.Barrier(len(slices) + 1),
            timeout_s=self.timeout_s,
            trace=trace,
        )
        calls = [partial(self.runnable, *own, **named) for own, named in inputs]
        names = [f"micro-batch {number} of {len(slices)} ({each})" for number, each in enumerate(slices)]
        with self.sm_control:
            outputs = self._threads.run(contexts, calls, names)
        return concatenated(slices, outputs)


class _UBatches:
    """The micro-batches of a wrapper as a runnable, which a CUDAGraphWrapper can look through."""

    def __init__(self, wrapper: UBatchWrapper) -> None:
        self._wrapper = wrapper

    def unwrap(self) -> Callable[..., Any]:
        return self._wrapper.unwrap()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapper._run(*args, **kwargs)
