"""What ``vgraph-lab plan`` plans from: traffic, the stage it came to, and costs; of a recording, or of a log and a stage file."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from vgraph_lab import bundled
from vgraph_lab.errors import InputError

from .shared import Dtype, status

if TYPE_CHECKING:
    from vgraph_lab.config import StageConfig
    from vgraph_lab.graphs.descriptor import Descriptor
    from vgraph_lab.inspect.planner import Choice, StatelessGrid, StreamingGrid
    from vgraph_lab.inspect.recording import Recording
    from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder

__all__ = ["CostSource", "PlanInput", "read_plan_input"]


@dataclass(frozen=True)
class PlanInput:
    """All that a plan needs.

    Attributes:
        traffic: calls, as the planner takes them.
        space: what the stage could say instead.
        current: the graphs that there are, or that the stage declares.
        costs: what shapes take.
        has_times: whether times of calls are among the costs.
        notes: what a reader should know about the traffic.
        kept: keys of the stage that a plan does not choose and a service needs.
    """

    traffic: pd.DataFrame
    space: StreamingGrid | StatelessGrid
    current: Choice
    costs: pd.DataFrame
    has_times: bool
    notes: tuple[str, ...] = ()
    kept: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CostSource:
    """Where costs come from besides a recording: a CSV file, or a checkpoint that is measured here.

    Attributes:
        file: ``--costs``.
        checkpoint: ``--checkpoint``; empty without one.
        device: ``--device``.
        dtype: ``--dtype``.
    """

    file: Path | None
    checkpoint: str
    device: str
    dtype: Dtype | None

    def __post_init__(self) -> None:
        if self.file and self.checkpoint:
            raise InputError("--costs and --checkpoint are two sources of the same figures. Give one of them.")

    @cached_property
    def decoder(self) -> Code2WavDecoder:
        """The decoder of the checkpoint, loaded once."""
        from vgraph_lab.graphs.backends import checked_device
        from vgraph_lab.qwen3_tts.checkpoint import load_decoder

        place = checked_device(self.device)
        kept_as = (self.dtype or (Dtype.float32 if place.type == "cpu" else Dtype.bfloat16)).torch
        return load_decoder(bundled.checkpoint_folder() if self.checkpoint == "bundled" else Path(self.checkpoint), place, kept_as)

    def read(self, cfg: StageConfig) -> pd.DataFrame | None:
        """Costs of the file, or measured here; None without either."""
        if self.file:
            return _costs_file(self.file)
        return self._measured(cfg) if self.checkpoint else None

    def _measured(self, cfg: StageConfig) -> pd.DataFrame:
        """The largest and the smallest shape of each Target, measured on this machine."""
        from vgraph_lab.graphs.backends import create_backend
        from vgraph_lab.inspect.planner import measure_costs
        from vgraph_lab.qwen3_tts.code2wav import Qwen3TTSCode2Wav

        with status() as tell:
            targets = Qwen3TTSCode2Wav(self.decoder, cfg).get_vocoder_cudagraph_targets()
            ends = {target.target_id: tuple(dict.fromkeys((target.descriptors[0], target.descriptors[-1]))) for target in targets}
            device = next(self.decoder.parameters()).device
            return measure_costs(create_backend(device), targets, ends, progress=tell)


def read_plan_input(path: Path, *, config: Path | None, window: int | None, kind: str, costs: CostSource) -> PlanInput:
    """A recording, or a log (or table of calls) with the stage file of the service that wrote it.

    Raises:
        InputError: the file is neither, a stage or costs are missing or given twice, or nothing in it can be planned for.
    """
    if zipfile.is_zipfile(path) if path.is_file() else config is None:
        if config:
            raise InputError(f"{path} is a recording and has its own stage. Leave --config out.")
        return _of_recording(path, window, costs)
    if config is None:
        raise InputError(f"{path} is no recording, so it does not say what stage its calls came to. Give its file with --config.")
    return _of_log(path, config, window, kind, costs)


# ------------------------------------------------------------------------------------------------------------ recordings


def _of_recording(path: Path, window: int | None, source: CostSource) -> PlanInput:
    from vgraph_lab.config import StageConfig
    from vgraph_lab.inspect.planner import traffic_of
    from vgraph_lab.inspect.recording import Recording

    found = Recording.load(path)
    if found.stage is None:
        raise InputError(f"{path} was made of a bare Manager and has no stage to plan for. Record a runner: record(runner).save(path).")
    cfg = StageConfig.from_dict(dict(found.stage))
    space = _space(cfg, window or _recorded_window(found, cfg, path))
    costs = source.read(cfg)
    has_times = costs is not None
    known = _recorded_costs(found) if costs is None else costs
    present = _choice_of((graph.target_id, graph.descriptor) for graph in found.graphs if graph.cost)
    return PlanInput(traffic_of(found.stats, getattr(space, "transitions", None)), space, present, known, has_times, kept=_kept(cfg))


def _recorded_window(found: Recording, cfg: StageConfig, path: Path) -> int:
    from vgraph_lab.qwen3_tts.stream_routines import SuffixDescriptor

    kept = [graph.descriptor.source for graph in found.graphs if isinstance(graph.descriptor, SuffixDescriptor)]
    if cfg.async_chunk and not kept:
        raise InputError(f"{path} lists no graph of a suffix, from which the decoder's sliding window shows. Say it with --window.")
    return max(kept, default=0)  # the schedule ends in the rolling step, which keeps a whole window


def _recorded_costs(found: Recording) -> pd.DataFrame:
    """What the recording's own graphs took; what they save is not known."""
    from vgraph_lab.inspect.entries import entries_table
    from vgraph_lab.inspect.planner import costs_of_entries

    entries = entries_table(found)
    # A graph that fitted into what the pool held has intermediates of at most that much: taken as what they are, a budget is kept.
    most = costs_of_entries(entries.assign(pool_delta_mib=np.inf))
    is_known = costs_of_entries(entries)["charge_bytes"].notna()
    return most.assign(replay_ms=0.0, eager_ms=0.0, source=most["source"].where(is_known, "modelled"))


def _choice_of(found: Iterable[tuple[str, Descriptor]]) -> Choice:
    """Graphs as a choice, by Target id and Descriptor."""
    from vgraph_lab.inspect.planner import Choice
    from vgraph_lab.inspect.planner.shapes import STATELESS_TARGET_ID, shape_of

    graphs = tuple(shape_of(target_id, descriptor) for target_id, descriptor in found)
    rows = tuple(sorted({graph.batch_size for graph in graphs}))
    frames = tuple(sorted({graph.frames for graph in graphs if graph.target == STATELESS_TARGET_ID}))
    return Choice(tuple(dict.fromkeys(graph.target for graph in graphs)), rows, frames, graphs)


# ------------------------------------------------------------------------------------------------------------ logs


def _of_log(path: Path, config: Path, window: int | None, kind: str, source: CostSource) -> PlanInput:
    from vgraph_lab.config import StageConfig
    from vgraph_lab.inspect.planner import StreamingGrid, traffic_of_calls, with_schedule
    from vgraph_lab.qwen3_tts.settings import TARGET_IDS
    from vgraph_lab.workload import RoutingRules
    from vgraph_lab.workload.importers import read_log

    log, cfg = read_log(path), StageConfig.from_yaml(config)
    log.check_targets(TARGET_IDS)
    sources = sorted(set(log.calls["source"]))
    if len(sources) != 1:
        raise InputError(
            f"{path} counts calls in {len(sources)} places ({', '.join(sources) or 'none'}), and a plan needs one. "
            "`vgraph-lab import` shows them; keep the lines of one."
        )
    if not (source.file or source.checkpoint):
        raise InputError("a log does not say what graphs take. Give --checkpoint (measures here) or --costs (measured elsewhere).")
    if cfg.async_chunk and window is None and not source.checkpoint:
        raise InputError("the schedule of a stream needs the decoder's sliding window. Say it with --window, or give --checkpoint.")
    window = window or (source.decoder.geometry.sliding_window if cfg.async_chunk else 0)
    space, calls = _space(cfg, window), log.of_source(sources[0])
    if isinstance(space, StreamingGrid):
        calls = with_schedule(calls, space.transitions, kind)
    shaped = calls.dropna(subset=["batch_size", "frames"])
    lost = int(calls["calls"].sum() - shaped["calls"].sum())
    if shaped.empty:
        raise InputError(f"{path} counts {lost:,} calls, and tells the shape of none. There is nothing to plan for.")
    traffic = traffic_of_calls(shaped, getattr(space, "transitions", None))
    costs = source.read(cfg)
    assert costs is not None
    declared = RoutingRules(cfg, window or 1).declared()
    current = _choice_of((target, descriptor) for target, descriptors in declared.items() for descriptor in descriptors)
    notes = [str(log.lines)] + ([f"{lost:,} calls have no shape and are left out"] if lost else [])
    return PlanInput(traffic, space, current, costs, has_times=True, notes=tuple(notes), kept=_kept(cfg))


# ------------------------------------------------------------------------------------------------------------ both


def _kept(cfg: StageConfig) -> dict[str, Any]:
    return {"max_num_seqs": cfg.max_num_seqs}


def _space(cfg: StageConfig, window: int) -> StreamingGrid | StatelessGrid:
    """What the stage could say instead."""
    from vgraph_lab.inspect.planner import StatelessGrid, StreamingGrid
    from vgraph_lab.qwen3_tts.settings import Qwen3TTSGraphKeys

    if cfg.async_chunk:
        return StreamingGrid(cfg.connector, window)
    keys = cfg.extension(Qwen3TTSGraphKeys)
    return StatelessGrid(keys.decode_chunk_frames, keys.decode_left_context_frames)


def _costs_file(file: Path) -> pd.DataFrame:
    from vgraph_lab.inspect.planner import cost_table

    try:
        table = pd.read_csv(file, keep_default_na=False, na_values=[""], dtype={"target": "str", "state": "str", "source": "str"})
    except (OSError, ValueError) as error:  # no file, no text, no columns, rows of unequal length
        raise InputError(f"{file} cannot be read as a CSV file with a header: {error}") from error
    return cost_table(table.fillna({"state": ""}) if "state" in table else table)
