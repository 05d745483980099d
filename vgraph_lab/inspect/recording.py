"""What the tables need of a live runner, as plain data that outlives it."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from vgraph_lab import __version__
from vgraph_lab.errors import InputError, LifecycleError
from vgraph_lab.graphs.backends.base import GraphBackend
from vgraph_lab.graphs.manager import VocoderCUDAGraphManager
from vgraph_lab.graphs.report import CaptureReport
from vgraph_lab.graphs.stats import CallKind, StatsSnapshot
from vgraph_lab.graphs.structure import nbytes
from vgraph_lab.qwen3_tts.incremental_state import StateArena
from vgraph_lab.qwen3_tts.state_table import StateTable
from vgraph_lab.runner import GPUGenerationModelRunner
from vgraph_lab.vllm_v1 import KVCache, WrapperGraphs

from .archive import read_archive, write_archive
from .modules import launching_modules
from .pool_layout import Graphs, pool_layout
from .records import CaptureFigures, CountedCalls, GraphRecord, MemoryReading, SegmentRecord

__all__ = ["Live", "Recording", "Source", "figures_of", "graphs_of", "memory_before", "read_memory", "record", "segments_of", "stats_of"]

Live: TypeAlias = GPUGenerationModelRunner | Graphs


@dataclass(frozen=True)
class Recording:
    """Everything that the tables of :mod:`vgraph_lab.inspect` need, as plain data.

    Attributes:
        made_utc: when, ISO 8601.
        device: where the graphs were; its type names the backend.
        machine: card or processor, and versions.
        model: class of the model; empty for a bare Manager or after a shutdown.
        stage: the stage's configuration, as ``StageConfig.from_dict`` reads it; None for a bare Manager.
        settings: policy of the Manager; empty without one.
        state: of the Manager, as :class:`~vgraph_lab.graphs.manager.ManagerState` has it; ``none`` without one.
        targets: ids of all Targets.
        graphs: graphs and rejected Descriptors, in the order in which they were tried.
        calls: statistics, by kind of call.
        memory: when the recording was made.
        memory_before: when the capture began; None without one.
        capture: the report's figures; None without a capture.
        retirements: how often all graphs were retired together and captured anew.
        retirement_s: seconds that took.
        segments: of the graph pool; None in recordings of before they were kept.
    """

    made_utc: str
    device: str
    machine: Mapping[str, str]
    model: str
    stage: Mapping[str, Any] | None
    settings: Mapping[str, Any]
    state: str
    targets: tuple[str, ...]
    graphs: tuple[GraphRecord, ...]
    calls: tuple[CountedCalls, ...]
    memory: MemoryReading
    memory_before: MemoryReading | None = None
    capture: CaptureFigures | None = None
    retirements: int = 0
    retirement_s: float = 0.0
    segments: tuple[SegmentRecord, ...] | None = None
    stats: StatsSnapshot = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        counts: dict[CallKind, int] = {}
        for c in self.calls:
            kind = CallKind(c.target_id, c.key, c.descriptor, c.reason, c.error)
            counts[kind] = counts.get(kind, 0) + c.calls
        object.__setattr__(self, "stats", StatsSnapshot(counts, self.retirements, self.retirement_s))

    def graph(self, which: int | str) -> GraphRecord:
        """One row of the entries table: by its position from 1, or by ``target descriptor`` as they print.

        The Target may be left out where only one has such a Descriptor.

        Raises:
            InputError: there is no such row, or several.
        """
        if isinstance(which, int) or which.strip().isdecimal():
            position = int(which)
            if 1 <= position <= len(self.graphs):
                return self.graphs[position - 1]
            raise InputError(f"there is no entry {position}; the recording has {len(self.graphs)}, counted from 1.")
        wanted = which.strip()
        found = [g for g in self.graphs if wanted in (f"{g.target_id} {g.descriptor}", str(g.descriptor))]
        if len(found) == 1:
            return found[0]
        known = "; ".join(f"{g.target_id} {g.descriptor}" for g in (found or self.graphs)) or "none"
        raise InputError(f"{len(found) or 'no'} entries are {wanted!r}. Name one by its number from 1 or in full: {known}.")

    # ------------------------------------------------------------------------------------------------ the file

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the file. It appears whole or not at all; folders are made as needed.

        Args:
            path: where to.
            overwrite: replace a file that is there.

        Raises:
            InputError: a file is there already, or none can be written there.
        """
        path = Path(path)
        write_archive(path, _ADAPTER.dump_json(self, exclude={"stats"}, indent=1), overwrite=overwrite)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Read a file that :meth:`save` wrote.

        Raises:
            InputError: it is not there, empty, damaged, no recording, or of a newer version.
        """
        text = read_archive(Path(path))
        try:
            return _ADAPTER.validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the text"
            raise InputError(f"{path} is damaged: {where}: {first['msg']} ({error.error_count()} such findings).") from None

    def __str__(self) -> str:
        graphs = sum(g.cost is not None for g in self.graphs)
        words = f"{graphs} of {len(self.graphs)} graphs on {self.device} ({self.state}); {self.stats}"
        return f"recording of {self.model or 'a Manager'}, {self.made_utc}: {words}"


Source: TypeAlias = Live | Recording
"""What every table takes: a live runner, a live Manager, or a recording of one."""

_ADAPTER = TypeAdapter(Recording)


# ----------------------------------------------------------------------------------------------------------- recording


def record(
    source: Source,
    *,
    report: CaptureReport | None = None,
    before: MemoryReading | None = None,
    nodes: bool = True,
    modules: bool = False,
) -> Recording:
    """Everything that the tables need, as of now. Do it before ``shutdown``: afterwards only statistics and rejections are left.

    ::

        runner.capture_model()
        ...                                       # traffic
        record(runner).save("monday.vgl")

    Args:
        source: a runner or a Manager, in any state. A recording is returned as it is.
        report: whose figures to keep; by default the report that the Manager kept of its capture.
        before: what :func:`read_memory` returned before the capture; by default :func:`memory_before`.
        nodes: list each graph's nodes, which :func:`~vgraph_lab.inspect.anatomy.anatomy` needs.
        modules: find out which module launched each node, by running each captured function once more; CPU only
            (:func:`~vgraph_lab.inspect.modules.launching_modules`).

    Raises:
        InputError: ``source`` is something else, or the modules cannot be found out.
    """
    if isinstance(source, Recording):
        return source
    manager, stats = _manager_of(source), stats_of(source)
    stage = source.cfg.to_dict() if isinstance(source, GPUGenerationModelRunner) else None
    return Recording(
        made_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        device=str(source.backend.device),
        machine=_machine(source.backend.device),
        model=_model_name(source),
        stage=json.loads(json.dumps(stage)),  # as a file gives it back: tuples are lists
        settings=manager.settings.model_dump(mode="json") if manager else {},
        state=manager.state.value if manager else "none",
        targets=tuple(manager.targets) if manager else (),
        graphs=graphs_of(source, nodes=nodes or modules, modules=modules),
        calls=tuple(CountedCalls(*kind, calls) for kind, calls in stats.counts.items()),
        memory=read_memory(source),
        memory_before=before or memory_before(source),
        capture=CaptureFigures.of(report) if report else figures_of(source),
        retirements=stats.retirements,
        retirement_s=stats.retirement_s,
        segments=segments_of(source),
    )


def stats_of(source: Source | StatsSnapshot) -> StatsSnapshot:
    """The calls that a source has counted so far.

    Raises:
        InputError: it is no source.
    """
    if isinstance(source, StatsSnapshot):
        return source
    return source.stats if isinstance(source, Recording) else _checked(source).stats()


def graphs_of(source: Source, *, nodes: bool = False, modules: bool = False) -> tuple[GraphRecord, ...]:
    """Graphs and rejected Descriptors of a source, in the order in which they were tried.

    Start-up Descriptors come first, Target by Target and largest first; lazily captured ones follow in the order of their
    captures, lazily rejected ones in the order of their rejections.

    Args:
        source: a runner, a Manager or a recording.
        nodes: list each graph's nodes; a recording has what it has.
        modules: find out what launched each of them.

    Raises:
        InputError: ``source`` is something else, or the modules cannot be found out.
    """
    if isinstance(source, Recording):
        return source.graphs
    manager = _manager_of(source)
    if manager is None:
        return ()
    return tuple(record for _, record in sorted(_tried(manager, nodes, modules), key=lambda found: found[0]))


def _tried(manager: Graphs, nodes: bool, modules: bool) -> Iterator[tuple[tuple[int, int], GraphRecord]]:
    """Each record with its sort key: the place in the start-up plan, else after it."""
    planned = {(target.target_id, descriptor): place for place, (target, descriptor) in enumerate(manager.capture_plan())}
    for entry in manager.entries():
        place = planned.get((entry.target_id, entry.descriptor))
        found = GraphRecord(
            entry.target_id,
            entry.descriptor,
            entry.cost,
            is_lazy=entry.lazy,
            last_use_unix_s=entry.last_use_unix_s,
            nodes=tuple(entry.graph.nodes()) if nodes else (),
            modules=launching_modules(manager, entry) if modules else (),
        )
        yield (1, entry.cost.order) if place is None else (0, place), found
    for number, ((target_id, descriptor), rejection) in enumerate(manager.rejections().items()):
        place = planned.get((target_id, descriptor))
        key = (2, number) if place is None else (0, place)
        yield key, GraphRecord(target_id, descriptor, rejection=rejection, is_lazy=place is None)


def read_memory(source: Source) -> MemoryReading:
    """What holds the device's memory now.

    Weights and state are the distinct memory of the model's parameters and buffers; of a bare Manager, those that its
    Targets capture. What a tensor takes beyond its own size (the allocator's rounding) counts as other.

    Raises:
        InputError: ``source`` is no source.
    """
    if isinstance(source, Recording):
        return source.memory
    manager, backend = _manager_of(source), source.backend
    weights, state = _model_tensors(source, manager, backend)
    device = backend.memory()
    return MemoryReading(
        total_bytes=device.total_bytes,
        free_bytes=device.free_bytes,
        weights_bytes=nbytes([*weights, *state]) - nbytes(state),
        state_bytes=nbytes(state),
        static_buffer_bytes=nbytes([dict(entry.buffers) for entry in manager.entries()]) if manager else 0,
        pool_bytes=manager.pool.reserved_bytes if manager else 0,
        pool_live_bytes=manager.pool.live_bytes if manager else 0,
    )


def memory_before(source: Source) -> MemoryReading | None:
    """What held the device's memory when the capture began; None if there was no capture.

    The Manager reads the device then, and no graph exists yet. Weights and state are those of now, since a capture changes
    neither; of a model that is gone, they count as other at both moments.

    Raises:
        InputError: ``source`` is no source.
    """
    if isinstance(source, Recording):
        return source.memory_before
    manager = _manager_of(source)
    if manager is None or manager.memory_before is None:
        return None
    device, now = manager.memory_before, read_memory(source)
    return replace(
        now, total_bytes=device.total_bytes, free_bytes=device.free_bytes, static_buffer_bytes=0, pool_bytes=0, pool_live_bytes=0
    )


def segments_of(source: Source) -> tuple[SegmentRecord, ...]:
    """The segments of a source's graph pool, in the order of the captures that took them.

    Raises:
        InputError: ``source`` is no source, or a recording of before segments were kept.
    """
    if isinstance(source, Recording):
        if source.segments is None:
            raise InputError("this recording was made before segments of the pool were kept. Record again.")
        return source.segments
    manager = _manager_of(source)
    return () if manager is None else pool_layout(manager)


def figures_of(source: Source) -> CaptureFigures | None:
    """The figures of a source's start-up capture; None if there was none.

    Raises:
        InputError: ``source`` is no source.
    """
    if isinstance(source, Recording):
        return source.capture
    manager = _manager_of(source)
    return None if manager is None or manager.report is None else CaptureFigures.of(manager.report)


def _model_tensors(source: Live, manager: Graphs | None, backend: GraphBackend) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and request state on the backend's device."""
    modules = [module for target in manager.targets.values() for module in target.routine.captured_modules()] if manager else []
    model = _model_of(source)
    if isinstance(model, nn.Module):
        modules.append(model)
    weights: list[Tensor] = []
    state: list[Tensor] = []
    for module in {id(part): part for whole in modules for part in whole.modules()}.values():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        (state if isinstance(module, StateTable | StateArena | KVCache) else weights).extend(t for t in own if t.device == backend.device)
    return weights, state


def _model_of(source: Live) -> object:
    """A runner's model while one is loaded; else None."""
    try:
        return source.model if isinstance(source, GPUGenerationModelRunner) else None
    except LifecycleError:
        return None


def _model_name(source: Live) -> str:
    model = _model_of(source)
    return "" if model is None else type(model).__name__


def _manager_of(source: Live) -> Graphs | None:
    live = _checked(source)
    return live.manager if isinstance(live, GPUGenerationModelRunner) else live


def _checked(source: Live) -> Live:
    if not isinstance(source, GPUGenerationModelRunner | VocoderCUDAGraphManager | WrapperGraphs):
        raise InputError(
            f"a table needs a GPUGenerationModelRunner, a VocoderCUDAGraphManager or a Recording, got {type(source).__name__}. "
            "Recording.load(path) reads a recorded one."
        )
    return source


def _machine(device: torch.device) -> dict[str, str]:
    is_cuda = device.type == "cuda"
    return {
        "card": torch.cuda.get_device_name(device) if is_cuda else f"CPU, {torch.get_num_threads()} threads",
        **({"cuda": str(torch.version.cuda)} if is_cuda else {}),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "vgraph_lab": __version__,
    }
