"""A breakable graph against eager, segment by segment: the first one that differs, and the operation in it.

A captured operation that should have been a break goes on doing what it did when it was captured: it has numbers of that batch baked
in. Then the graph is right for the batch of its capture and wrong for others. So check with other batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tag, Tensor
from torch.utils._python_dispatch import _disable_current_modes

from vgraph_lab.errors import InputError, LifecycleError, ReplayError
from vgraph_lab.graphs.backends.audit import CheckedMode, Origins
from vgraph_lab.graphs.backends.base import CapturedGraph
from vgraph_lab.graphs.backends.call import Call, storage_id, tensors_in, user_line
from vgraph_lab.graphs.backends.cpu import CpuGraph
from vgraph_lab.graphs.backends.rules import capture_conditions
from vgraph_lab.graphs.capture import owned_tensors

from .breakable import BreakableCUDAGraphCapture, BreakableCUDAGraphWrapper, observed_breaks
from .forward_context import get_forward_context

__all__ = ["ParityReport", "StepParity", "check_parity", "check_tolerance"]


@dataclass(frozen=True, slots=True)
class StepParity:
    """One segment or break of a breakable graph beside the same stretch of the eager pass.

    Attributes:
        name: ``segment N``, or the marked operation's.
        max_difference: largest absolute difference of what it leaves; infinite for another shape or another operation.
        is_equal: whether that is within the tolerance.
        operation: the first operation that differs; empty if none does, or on a backend that cannot tell.
        where: the user's line that ran it eagerly.
        why: anything else that is known.
    """

    name: str
    max_difference: float
    is_equal: bool
    operation: str = ""
    where: str = ""
    why: str = ""

    def __str__(self) -> str:
        if self.is_equal:
            return f"{self.name}: equal (largest difference {self.max_difference:.2g})"
        by = f" by {self.max_difference:.2g}" if isfinite(self.max_difference) else ""
        found = f", first at {self.operation}" if self.operation else ""
        return f"{self.name}: differs from eager{by}{found}" + "".join(
            f"\n    {words}" for words in (self.where and f"at {self.where}", self.why) if words
        )


@dataclass(frozen=True, slots=True)
class ParityReport:
    """What :func:`check_parity` found.

    Attributes:
        graph: wrapper and shape.
        steps: segments and breaks in order, up to the first that differs.
    """

    graph: str
    steps: tuple[StepParity, ...]

    @property
    def first_difference(self) -> StepParity | None:
        """The step that differs; None if none does."""
        return next((step for step in self.steps if not step.is_equal), None)

    @property
    def is_equal(self) -> bool:
        """Whether the graph does what eager does."""
        return self.first_difference is None

    def __str__(self) -> str:
        lines = [f"{self.graph}: {'equal to eager' if self.is_equal else 'DIFFERS from eager'}", *(f"  {step}" for step in self.steps)]
        if not self.is_equal:
            lines.append(
                "  What differs was captured and does what it did for the batch of its capture. If it depends on the batch, mark it with "
                "eager_break_during_capture; if on a tensor, write new values into the one of the capture."
            )
        return "\n".join(lines)


def check_tolerance(atol: float, rtol: float) -> None:
    """Refuse what cannot be compared with.

    Raises:
        InputError: a tolerance is not a finite number from 0.
    """
    for name, value in (("atol", atol), ("rtol", rtol)):
        if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value) or value < 0:
            raise InputError(f"{name}: a tolerance is a finite number from 0, got {value!r}.")


def check_parity(wrapper: BreakableCUDAGraphWrapper, *args: Any, atol: float = 1e-5, rtol: float = 1e-4, **kwargs: Any) -> ParityReport:
    """Run a batch eagerly and by its graph, and compare after each segment and each break.

    Call it as the wrapper would be called, in the forward context of the batch. State that both passes write (buffers of the
    wrapper's modules, its static tensors, its arguments) is put back; nothing is counted.

    Args:
        wrapper: with the graph of this batch.
        args: the wrapper's.
        atol: absolute tolerance.
        rtol: relative tolerance.
        kwargs: the wrapper's.

    Raises:
        LifecycleError: the wrapper has no graph for this batch.
        InputError: the batch does not run in PIECEWISE mode, or a tolerance is not a finite number from 0.
    """
    check_tolerance(atol, rtol)
    context = get_forward_context()
    batch = context.batch_descriptor
    entry = None if batch is None else wrapper.concrete_cudagraph_entries.get(batch)
    if entry is None or not isinstance(entry.graph, BreakableCUDAGraphCapture):
        raise LifecycleError(f"{wrapper.target_id} has no breakable graph for {batch}. Dispatch the batch first, and capture before that.")
    if not context.cudagraph_runtime_mode.has_piecewise_cudagraphs():
        raise InputError(f"only PIECEWISE graphs have segments, the batch runs as {context.cudagraph_runtime_mode}.")
    state = [*entry.buffers.values(), *(tensor for module in wrapper.modules for tensor in module.buffers())]
    saved = [tensor.clone() for tensor in state]

    def restore() -> None:
        for tensor, before in zip(state, saved, strict=True):
            tensor.copy_(before)

    with wrapper.graphs.pool.exclusive(), torch.no_grad(), ExitStack() as afterwards:
        afterwards.callback(restore)
        device = wrapper.graphs.backend.device
        drawing = [device.index] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=drawing):
            eager = _Eager.of(lambda: wrapper.runnable(*args, **kwargs), Origins(entry.buffers.values(), owned_tensors(wrapper.modules)))
        restore()
        if wrapper.offloader is not None:
            wrapper.offloader.sync_prev_onload()  # as before each replay
        with torch.random.fork_rng(devices=drawing):
            steps = list(_compare(entry.graph, entry.output, eager, _Tolerance(atol, rtol)))
    return ParityReport(f"{wrapper.target_id} {batch}", tuple(steps))


@dataclass(frozen=True, slots=True)
class _Operation:
    name: str
    results: list[Tensor]
    where: str


@dataclass(slots=True)
class _Break:
    name: str
    before: list[Tensor]
    after: list[Tensor]

    def unwritten(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Those of ``given`` that the operation leaves as they are."""
        return [tensor for tensor, one, other in zip(given, self.before, self.after, strict=True) if torch.equal(one, other)]


@dataclass(frozen=True, slots=True)
class _Tolerance:
    atol: float
    rtol: float

    def difference(self, found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, bool]:
        """The largest absolute difference, and whether all are within the tolerance."""
        if [t.shape for t in found] != [t.shape for t in expected]:
            return float("inf"), False
        largest, is_equal = 0.0, True
        for one, other in zip(found, expected, strict=True):
            if not one.numel():
                continue
            is_equal &= torch.allclose(one.double(), other.double(), rtol=self.rtol, atol=self.atol, equal_nan=True)
            apart = (one.double() - other.double()).abs()
            apart = torch.where((one == other) | (one.isnan() & other.isnan()), 0, apart)
            largest = max(largest, float(torch.nan_to_num(apart, nan=torch.inf).max()))
        return largest, is_equal


class _Eager(CheckedMode):
    """The eager pass: the operations of each stretch between breaks, what each break was given and left, and the output."""

    def __init__(self, origins: Origins) -> None:
        super().__init__(origins)
        self.stretches: list[list[_Operation]] = [[]]
        self.breaks: list[_Break] = []
        self.output: list[Tensor] = []

    @classmethod
    def of(cls, forward: Callable[[], Any], origins: Origins) -> _Eager:
        """Run the pass. Operations are listed on the CPU only, where a node is an operation."""
        found = cls(origins)
        watched = all(tensor.device.type == "cpu" for tensor in origins.static_inputs)
        with capture_conditions(), observed_breaks(found.at_break), ExitStack() as stack:
            if watched:
                stack.enter_context(found)
            output = forward()
        found.output = _copies(output)
        return found

    def at_break(self, name: str, call: Callable[[], Any], given: Any) -> Any:
        with _disable_current_modes():
            before = _copies(given)
            result = call()
            self.breaks.append(_Break(name, before, _copies(given)))
        self.stretches.append([])
        return result

    def run(self, call: Call) -> Any:
        result = self.execute(call)
        held = set() if call.lifts_constant else {storage_id(tensor) for tensor in call.inputs}
        fresh = [tensor for tensor in tensors_in(result) if storage_id(tensor) not in held]
        only_checks = bool(call.inputs) and not call.op._schema.returns
        is_allocation = call.name.removeprefix("aten::").removeprefix("new_").startswith("empty")
        if Tag.inplace_view not in call.op.tags and not is_allocation and (fresh or call.written or only_checks):
            with _disable_current_modes():
                self.stretches[-1].append(_Operation(str(call.op), _copies([*call.written, *fresh]), user_line(beyond=__file__)))
        return result


def _copies(value: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors_in(value)]


def _compare(graph: BreakableCUDAGraphCapture, output: Any, eager: _Eager, tolerance: _Tolerance) -> Sequence[StepParity]:
    """Steps up to the first that differs."""
    steps: list[StepParity] = []
    passed = 0
    for name, step in graph.segments:
        if isinstance(step, CapturedGraph):
            found = _run_segment(name, step, eager.stretches[passed] if passed < len(eager.stretches) else [], tolerance)
            if found.is_equal and passed == len(eager.breaks):  # the last one
                found = StepParity(name, *tolerance.difference(list(tensors_in(output)), eager.output))
        elif passed == len(eager.breaks) or eager.breaks[passed].name != name:
            found = StepParity(name, float("inf"), is_equal=False, why="the eager pass has no such break here")
        else:
            step()
            beside, given = eager.breaks[passed], _given(step)
            found = StepParity(name, *tolerance.difference(given, beside.after))
            if not found.is_equal and steps and not tolerance.difference(beside.unwritten(given), beside.unwritten(beside.after))[1]:
                # It was given other values than eagerly, so what went before differs: where operations cannot be watched.
                return [*steps[:-1], replace(steps[-1], max_difference=found.max_difference, is_equal=False)]
            passed += 1
        steps.append(found)
        if not found.is_equal:
            break
    return steps


def _given(step: Any) -> list[Tensor]:
    """The tensors that a break of a graph is given."""
    return list(tensors_in((step.args, step.keywords)))


def _run_segment(name: str, graph: CapturedGraph, eager: list[_Operation], tolerance: _Tolerance) -> StepParity:
    """Replay a segment; on the CPU operation by operation, each beside eager's."""
    if not isinstance(graph, CpuGraph):
        graph.replay()
        return StepParity(name, 0.0, is_equal=True)
    largest = 0.0
    for number, record in enumerate(graph.records):
        other = eager[number] if number < len(eager) else None
        if other is None or other.name != record.name:
            instead = "nothing more" if other is None else other.name
            why = f"the graph runs {record.name}, the eager pass {instead}"
            return StepParity(name, float("inf"), False, record.name, "" if other is None else other.where, why)
        try:
            record.run()
        except ReplayError as error:
            return StepParity(name, float("inf"), False, record.name, other.where, str(error))
        difference, is_equal = tolerance.difference(record.writes, other.results)
        largest = max(largest, difference)
        if not is_equal:
            return StepParity(name, difference, False, record.name, other.where)
    if len(eager) > len(graph.records):
        more = eager[len(graph.records)]
        return StepParity(name, float("inf"), False, more.name, more.where, "the eager pass runs it, the graph does not")
    return StepParity(name, largest, is_equal=True)
