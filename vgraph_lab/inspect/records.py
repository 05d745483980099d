"""The parts of a recording: graphs, calls, memory and a capture's figures, as plain data that JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import Field, PlainSerializer, PlainValidator

from vgraph_lab.errors import FallbackReason
from vgraph_lab.graphs.backends.base import GraphNode
from vgraph_lab.graphs.descriptor import Descriptor
from vgraph_lab.graphs.entry import CaptureCost, Rejection
from vgraph_lab.graphs.report import CaptureReport
from vgraph_lab.qwen3_tts.stream_routines import SuffixDescriptor

__all__ = [
    "BlockRecord",
    "CaptureFigures",
    "CountedCalls",
    "EstimatedGraph",
    "GraphRecord",
    "MemoryReading",
    "RecordedDescriptor",
    "SegmentRecord",
]

# ---------------------------------------------------------------------------------------------------- shapes and nodes


@dataclass(frozen=True, slots=True)
class RecordedDescriptor(Descriptor):
    """A Descriptor of a class that is not this package's, read from a file.

    Attributes:
        text: as it printed itself.
        extra: its further fields, by name; values that JSON does not have are their ``repr``.
    """

    text: str = ""
    extra: tuple[tuple[str, bool | int | float | str | None], ...] = ()

    def __str__(self) -> str:
        return self.text


_DESCRIPTORS: dict[str, type[Descriptor]] = {cls.__name__: cls for cls in (Descriptor, SuffixDescriptor)}


def _shape_to_plain(shape: Descriptor) -> dict[str, Any]:
    known = _DESCRIPTORS.get(type(shape).__name__) is type(shape)
    if not known and not isinstance(shape, RecordedDescriptor):
        names = [f.name for f in fields(shape)[3:]]
        extra = tuple((name, _json_value(getattr(shape, name))) for name in names)
        shape = RecordedDescriptor(shape.batch_size, shape.frames, shape.state, str(shape), extra)
    plain = {f.name: getattr(shape, f.name) for f in fields(shape)}
    return {"class": type(shape).__name__, **plain} if type(shape) is not Descriptor else plain


def _json_value(value: object) -> bool | int | float | str | None:
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _shape_from_plain(plain: object) -> Descriptor:
    if isinstance(plain, Descriptor):
        return plain
    if not isinstance(plain, dict):
        raise ValueError(f"a shape has named fields, got {plain!r}")
    given = dict(plain)
    name = given.pop("class", "Descriptor")
    cls = RecordedDescriptor if name == "RecordedDescriptor" else _DESCRIPTORS.get(name)
    if cls is None:
        raise ValueError(f"a shape is of a known class ({', '.join(_DESCRIPTORS)}), got {name!r}")
    if any(type(given.get(size)) is not int for size in ("batch_size", "frames")) or given.keys() - {f.name for f in fields(cls)}:
        raise ValueError(f"a {name} has the fields {', '.join(f.name for f in fields(cls))}, got {plain!r}")
    if cls is RecordedDescriptor:
        given["extra"] = tuple((key, value) for key, value in given.get("extra", ()))
    return cls(**given)


def _nodes_to_plain(nodes: Sequence[GraphNode]) -> dict[str, Any]:
    names = list(dict.fromkeys(node.name for node in nodes))  # a few hundred names stand for thousands of nodes
    number = {name: index for index, name in enumerate(names)}
    return {"names": names, "nodes": [[node.kind, number[node.name], list(node.dependencies)] for node in nodes]}


def _nodes_from_plain(plain: object) -> tuple[GraphNode, ...]:
    if isinstance(plain, tuple):
        return plain
    try:
        names, rows = plain["names"], plain["nodes"]  # type: ignore[index]  # whatever it is: the handler tells
        nodes = [GraphNode(i, kind, names[name], tuple(before)) for i, (kind, name, before) in enumerate(rows)]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"nodes are rows of kind, name and dependencies: {error}") from None
    if not all(isinstance(before, int) and 0 <= before < node.index for node in nodes for before in node.dependencies):
        raise ValueError("a node depends on earlier nodes only")
    return tuple(nodes)


Shape = Annotated[Descriptor, PlainSerializer(_shape_to_plain), PlainValidator(_shape_from_plain)]
Nodes = Annotated[tuple[GraphNode, ...], PlainSerializer(_nodes_to_plain), PlainValidator(_nodes_from_plain)]
Count = Annotated[int, Field(ge=1)]

# ------------------------------------------------------------------------------------------------------------- records


@dataclass(frozen=True, slots=True)
class GraphRecord:
    """One graph, or one Descriptor without a graph.

    Attributes:
        target_id: its Target.
        descriptor: its shape.
        cost: what its capture took; None for a rejected one.
        rejection: why there is no graph; None for a captured one.
        is_lazy: whether a call asked for it, rather than start-up.
        last_use_unix_s: when it served the last call; None if it served none.
        nodes: the graph's nodes; empty if they were not listed.
        modules: what launched each node; empty if nobody asked.

    Raises:
        ValueError: neither a cost nor a rejection, or modules that are not one per node.
    """

    target_id: str
    descriptor: Shape
    cost: CaptureCost | None = None
    rejection: Rejection | None = None
    is_lazy: bool = False
    last_use_unix_s: float | None = None
    nodes: Nodes = ()
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.cost is None) == (self.rejection is None):
            raise ValueError("a graph has a cost, a Descriptor without a graph a rejection")
        if self.modules and len(self.modules) != len(self.nodes):
            raise ValueError(f"{len(self.nodes)} nodes cannot have {len(self.modules)} modules")


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One allocation in a segment of the pool, or a gap between allocations.

    Attributes:
        size_bytes: as the allocator rounded it up.
        is_live: whether something lives there.
        held_by: ``target descriptor`` whose captured output that is; empty if it is no graph's output.
    """

    size_bytes: Count
    is_live: bool
    held_by: str


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """What the pool got from the system in one piece.

    Attributes:
        size_bytes: of all of it.
        made_by: ``target descriptor`` whose capture took it; empty if that graph was rejected or is gone.
        blocks: in order; they add up to the segment.
    """

    size_bytes: Count
    made_by: str
    blocks: tuple[BlockRecord, ...]


@dataclass(frozen=True, slots=True)
class CountedCalls:
    """How many calls of one kind were counted (:class:`~vgraph_lab.graphs.stats.CallKind`)."""

    target_id: str
    key: Shape
    descriptor: Shape | None
    reason: FallbackReason | None
    error: str | None
    calls: Count


@dataclass(frozen=True, slots=True)
class EstimatedGraph:
    """A graph in the memory profile and in the start-up capture after it.

    Attributes:
        target_id: its Target.
        descriptor: its shape.
        estimated_bytes: static buffers and growth of the pool in the profile; None if it was not captured there.
        measured_bytes: likewise in the capture.
    """

    target_id: str
    descriptor: Shape
    estimated_bytes: int | None
    measured_bytes: int | None


@dataclass(frozen=True, slots=True)
class CaptureFigures:
    """The figures of one start-up capture's report (:class:`~vgraph_lab.graphs.report.CaptureReport`).

    Attributes:
        headline: the report in one line.
        notes: what the model said of its graphs, such as the form that they have and why.
        seconds: wall time.
        requested: Descriptors declared.
        captured: graphs made.
        failed: captures that raised.
        skipped: Descriptors that policy left out.
        is_degraded: whether anything that was asked for is missing.
        static_buffer_bytes: of all graphs, after the capture.
        pool_reserved_bytes: held by the pool, after the capture.
        eager_targets: Targets without graphs, with the reason in words.
        estimates: profile beside capture, in capture order; empty if ``profile_memory`` was not asked.
    """

    headline: str
    seconds: float
    requested: int
    captured: int
    failed: int
    skipped: int
    is_degraded: bool
    static_buffer_bytes: int
    pool_reserved_bytes: int
    eager_targets: Mapping[str, str]
    estimates: tuple[EstimatedGraph, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, report: CaptureReport) -> CaptureFigures:
        """The figures of a report."""
        measured = {(o.target_id, o.descriptor): o.cost.charge_bytes for o in report.outcomes if o.cost}
        lines = report.profile.lines if report.profile else ()
        estimated = {(line.target_id, line.descriptor): line.bytes for line in lines if not line.failure}
        graphs = [graph for graph in dict.fromkeys([*estimated, *measured]) if lines]
        return cls(
            headline=report.headline(),
            notes=tuple(report.notes),
            seconds=report.seconds,
            requested=report.requested,
            captured=report.captured,
            failed=report.failed,
            skipped=report.skipped,
            is_degraded=report.is_degraded,
            static_buffer_bytes=report.static_buffer_bytes,
            pool_reserved_bytes=report.pool_reserved_bytes,
            eager_targets=dict(report.eager_targets),
            estimates=tuple(EstimatedGraph(*graph, estimated.get(graph), measured.get(graph)) for graph in graphs),
        )


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The device's memory at one moment, in bytes, by what holds it.

    Attributes:
        total_bytes: of the device (CPU: of the machine).
        free_bytes: of these, free.
        weights_bytes: parameters and buffers of the model, without request state.
        state_bytes: request state.
        static_buffer_bytes: static buffers of all graphs.
        pool_bytes: held by the graph pool.
        pool_live_bytes: of these, occupied by live tensors.
    """

    total_bytes: int
    free_bytes: int
    weights_bytes: int
    state_bytes: int
    static_buffer_bytes: int
    pool_bytes: int
    pool_live_bytes: int

    @property
    def other_bytes(self) -> int:
        """What is left: other programs, the driver's context, libraries, cached memory. By definition, so that all adds up."""
        known = self.weights_bytes + self.state_bytes + self.static_buffer_bytes + self.pool_bytes
        return self.total_bytes - self.free_bytes - known
