"""Graphs with gaps: one capture of the whole pass, whose marked operations run eagerly between graph segments.

Counterpart of ``vllm.compilation.breakable_cudagraph`` (0.25.1). Attention is marked with
:func:`eager_break_during_capture`; a capture in PIECEWISE mode ends the current segment there, runs the operation, and
begins the next segment::

    capture   begin ── segment 0 ── end │ attention │ begin ── segment 1 ── end │ attention │ …
    replay    graph 0                   │ attention │ graph 1                   │ attention │ …

A break reads the attention metadata of the pass that is under way, real and not padded, and writes into a tensor that
it is given: the next segment reads that address. In FULL mode nothing breaks.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from vgraph_lab.errors import CaptureError, ReplayError
from vgraph_lab.graphs import GraphEntry
from vgraph_lab.graphs.backends.audit import Origins
from vgraph_lab.graphs.backends.base import CapturedGraph, GraphBackend, GraphNode, GraphPool
from vgraph_lab.graphs.backends.call import storage_id, tensors_in
from vgraph_lab.graphs.backends.rules import capture_conditions
from vgraph_lab.graphs.capture import CaptureMeter, capture_underway, owned_tensors
from vgraph_lab.graphs.structure import signature

from .descriptor import BatchDescriptor
from .forward_context import ForwardContext, get_forward_context, is_forward_context_available
from .modes import CUDAGraphMode
from .segments import Segment, pool_memory, refusal_of, segment_maker, segment_session
from .weak_ref import weak_ref_tensor
from .wrapper import CUDAGraphWrapper
from .wrapper_graphs import WrapperGraphs

__all__ = ["BreakableCUDAGraphCapture", "BreakableCUDAGraphWrapper", "eager_break_during_capture", "observed_breaks"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
BreakObserver = Callable[[str, Callable[[], Any], Any], Any]
_thread = threading.local()


def eager_break_during_capture(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Mark an operation that a breakable capture leaves out. Apply it outside of other decorators.

    Outside of such a capture, and in FULL mode, it is a plain call. A replay calls it again with the same arguments, so
    it must write its result into one of them; what it returns may only be one of them, or a view of one.
    """

    @functools.wraps(function)
    def wrapper(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        capture = BreakableCUDAGraphCapture.current()
        is_full = is_forward_context_available() and get_forward_context().cudagraph_runtime_mode is CUDAGraphMode.FULL
        if capture is not None and capture.is_capturing and not is_full:
            result: Result = capture.add_eager(function, args, kwargs)
            return result
        observer: BreakObserver | None = getattr(_thread, "observer", None)
        if observer is not None:
            observed: Result = observer(_name(function), lambda: function(*args, **kwargs), (args, kwargs))
            return observed
        return function(*args, **kwargs)

    return wrapper


@contextmanager
def observed_breaks(observer: BreakObserver) -> Iterator[None]:
    """Let ``observer`` call the marked operations that this thread calls eagerly: it gets name, call and arguments of each."""
    before = getattr(_thread, "observer", None)
    _thread.observer = observer
    try:
        yield
    finally:
        _thread.observer = before


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


class BreakableCUDAGraphCapture:
    """One capture session and what came of it: graph segments and eager breaks, in order.

    Use it as a context around the pass, then call :meth:`replay`. It is a
    :class:`~vgraph_lab.graphs.backends.base.CapturedGraph`; its breaks are listed as ``host`` nodes.

    Args:
        backend: where to capture.
        pool: memory of all segments.
        static_inputs: the buffers through which inputs change.
        owned: parameters and buffers of the model.
        before_end: called at the end of each segment, inside its capture: what joins side streams, which no capture may leave open.

    Raises:
        BackendError: the backend cannot end a capture and go on with another one inside one pass.

    The context raises :class:`~vgraph_lab.errors.CaptureError` at its end where the driver has refused the capture.
    """

    def __init__(
        self,
        backend: GraphBackend,
        pool: GraphPool,
        *,
        static_inputs: Iterable[Tensor] = (),
        owned: Iterable[Tensor] = (),
        before_end: Callable[[], None] | None = None,
    ) -> None:
        self._make_segment, self._before_end = segment_maker(backend, pool), before_end
        self.segments: list[tuple[str, CapturedGraph | Callable[[], Any]]] = []
        self.is_capturing = False  # False inside a break
        self.output: Any = None  # of the pass; set it before the session ends, to have its origin checked
        self._backend, self._pool = backend, pool
        self._static_inputs, self._owned = tuple(static_inputs), tuple(owned)
        self._origins: Origins | None = None
        self._segment: Segment | None = None
        self._ended: list[Segment] = []
        self._idle: list[CapturedGraph] = []  # segments that launch nothing, and may own what a break writes into
        self._conditions = ExitStack()
        self._is_reset = False

    @classmethod
    def current(cls) -> BreakableCUDAGraphCapture | None:
        """The session that this thread is in."""
        return getattr(_thread, "session", None)

    @property
    def num_graphs(self) -> int:
        """Graph segments; those without any operation are not kept."""
        return len(self.segments) - self.num_eager_breaks

    @property
    def num_eager_breaks(self) -> int:
        """Operations that run eagerly at each replay."""
        return sum(not isinstance(step, CapturedGraph) for _, step in self.segments)

    def __enter__(self) -> BreakableCUDAGraphCapture:
        if self.current() is not None:
            raise CaptureError("a breakable capture cannot begin inside another one; capture the inner pass before or after the outer one.")
        with ExitStack() as conditions:
            conditions.enter_context(self._pool.exclusive())
            for condition in (segment_session(self._backend), capture_conditions(), capture_underway()):
                conditions.enter_context(condition)
            _thread.session = self
            conditions.callback(setattr, _thread, "session", None)
            self._origins = Origins(self._static_inputs, self._owned)  # one for all segments: later ones read what earlier ones made
            self._begin()
            self._conditions = conditions.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        is_complete = False
        try:
            with self._conditions:  # which may refuse the capture at its end, too
                if kind is None:
                    self._end(self.output)
                elif self._segment is not None:
                    self._segment.abort()
            is_complete = kind is None
        finally:
            self.is_capturing, self._segment, self._origins, self.output = False, None, None, None
            if not is_complete:
                self.reset()
                for segment in self._ended:  # the error's traceback may keep what they made
                    segment.roll_back()
            self._ended.clear()
        refusal = None if error is None else refusal_of(error)
        if refusal is not None:
            raise refusal from None

    def add_eager(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End the segment, run ``function`` eagerly, keep it for replays, begin the next segment.

        Arguments that segments have made are kept weakly (:mod:`~vgraph_lab.vllm_v1.weak_ref`), so that later segments may have
        their memory once the pass has let go of them.

        Args:
            function: the operation.
            args: its positional arguments.
            kwargs: its keyword arguments; each tensor that it returns must share memory with an argument.

        Raises:
            CaptureError: it returned a fresh tensor.
        """
        self._end(None)
        result = function(*args, **kwargs)
        held = {storage_id(tensor) for tensor in tensors_in((args, kwargs))}
        fresh = [tensor for tensor in tensors_in(result) if storage_id(tensor) not in held]
        if fresh:
            raise CaptureError(
                f"{_name(function)} runs eagerly between two graph segments and returned a fresh tensor ({signature(fresh[0])}): the next "
                "segment would go on reading its address after it is gone. Let it write into a tensor that it is given and return that, "
                "or None."
            )
        assert self._origins is not None
        is_made = pool_memory(self._pool, self._origins)
        args, kwargs = tree_map(lambda v: weak_ref_tensor(v) if isinstance(v, Tensor) and is_made(v) else v, (args, kwargs))
        self.segments.append((_name(function), functools.partial(function, *args, **kwargs)))
        self._begin()
        return result

    def _begin(self) -> None:
        assert self._origins is not None
        self._segment, self.is_capturing = self._make_segment(self._origins), True

    def _end(self, output: Any) -> None:
        segment = self._segment
        assert segment is not None
        if self._before_end is not None:
            self._before_end()
        self._segment, self.is_capturing = None, False
        try:
            graph = segment.end(output)
        except BaseException:
            segment.roll_back()
            raise
        self._ended.append(segment)
        if graph.nodes():
            self.segments.append((f"segment {self.num_graphs}", graph))
        else:
            self._idle.append(graph)

    def replay(self) -> None:
        """Run segments and breaks in order, on the recorded memory and in the forward context of now.

        Raises:
            ReplayError: the graphs were reset.
        """
        if self._is_reset:
            raise ReplayError("this breakable graph was reset and holds nothing to replay; capture it again.")
        with torch.no_grad():
            for _, step in self.segments:
                step.replay() if isinstance(step, CapturedGraph) else step()

    def reset(self) -> None:
        """Release all segments and what the breaks hold. Safe to call twice."""
        self._is_reset = True
        for graph in (*(step for _, step in self.segments if isinstance(step, CapturedGraph)), *self._idle):
            graph.reset()
        self.segments.clear()
        self._idle.clear()

    def nodes(self) -> Sequence[GraphNode]:
        """The nodes of all segments, with one ``host`` node per break that depends on all before it."""
        found: list[GraphNode] = []
        for name, step in self.segments:
            first = len(found)
            if isinstance(step, CapturedGraph):
                barrier = (first - 1,) if first else ()
                for node in step.nodes():
                    before = tuple(first + d for d in node.dependencies) or barrier
                    found.append(GraphNode(first + node.index, node.kind, node.name, before))
            else:
                found.append(GraphNode(first, "host", name, tuple(range(first))))
        return found

    def __repr__(self) -> str:
        return f"BreakableCUDAGraphCapture(graphs={self.num_graphs}, eager_breaks={self.num_eager_breaks})"


class BreakableCUDAGraphWrapper(CUDAGraphWrapper):
    """Like :class:`~vgraph_lab.vllm_v1.CUDAGraphWrapper`, for a whole model whose attention is marked.

    In PIECEWISE mode, marked operations break the graph; in FULL mode nothing does. A runner wraps it in a
    ``CUDAGraphWrapper`` of mode FULL and lets it serve PIECEWISE only. By itself, it may serve both: its entries are keyed by
    descriptor, which tells the two apart (only FULL ones name a number of requests).

    Args:
        runnable: the model.
        graphs: shared with the other wrappers of the model.
        runtime_mode: FULL or PIECEWISE; None for both.
        arguments: those of ``CUDAGraphWrapper``.
    """

    def __init__(
        self, runnable: Callable[..., Any], graphs: WrapperGraphs, runtime_mode: CUDAGraphMode | None = None, **arguments: Any
    ) -> None:
        super().__init__(runnable, CUDAGraphMode.PIECEWISE if runtime_mode is None else runtime_mode, graphs, **arguments)
        self._serves_both = runtime_mode is None
        self._captured_modes: dict[BatchDescriptor, CUDAGraphMode] = {}

    def _serves(self, mode: CUDAGraphMode) -> bool:
        return mode is not CUDAGraphMode.NONE if self._serves_both else super()._serves(mode)

    def _replay(
        self, entry: GraphEntry, batch: BatchDescriptor, context: ForwardContext, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        captured = self._captured_modes[batch]
        if captured is not context.cudagraph_runtime_mode:
            raise ReplayError(
                f"{self.target_id} {batch} was captured in mode {captured} and is asked for in {context.cudagraph_runtime_mode}. "
                "Use the descriptor that dispatch() returned with the mode."
            )
        return super()._replay(entry, batch, context, args, kwargs)

    def _capture_entry(
        self, batch: BatchDescriptor, run: Callable[[], Any], buffers: dict[str, Tensor], static_buffer_bytes: int
    ) -> GraphEntry:
        graphs = self.graphs
        backend, pool, owned = graphs.backend, graphs.pool, owned_tensors(self._modules)
        join = None if self.offloader is None else self.offloader.join_after_forward
        capture = BreakableCUDAGraphCapture(backend, pool, static_inputs=tuple(buffers.values()), owned=owned, before_end=join)
        meter = CaptureMeter(backend, pool)
        with meter.warm_up():
            for _ in range(self.cudagraph_options.num_warmups):
                # Not audited: breaks may do what a graph may not, and the tape checks each segment.
                backend.warm_up(run, static_inputs=(), owned=(), audit=False)
        order = graphs.next_order()
        meter.collect_garbage(everything=order == 0)  # once, not per segment
        with meter.capture(), capture:
            output = capture.output = run()
        try:
            if not capture.num_graphs:
                raise CaptureError(f"the breakable graph of {batch} is empty: outside of its breaks, the pass launched nothing.")
            cost = meter.cost(capture, output, order=order, static_buffer_bytes=static_buffer_bytes)
        except BaseException:
            capture.reset()
            raise
        self._captured_modes[batch] = get_forward_context().cudagraph_runtime_mode
        return GraphEntry(self.target_id, batch, buffers, capture, output, cost, owned=owned, lazy=False)
