"""A choice as a configuration, and the proof of it: the traffic resolved again by the real Routines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
import yaml
from torch import Tensor

from vgraph_lab.config import VocoderGraphSettings
from vgraph_lab.errors import ConfigError, FallbackReason, InputError
from vgraph_lab.graphs.stats import CallKind, StatsSnapshot
from vgraph_lab.graphs.target import Target
from vgraph_lab.qwen3_tts.stateless import STATELESS_TARGET_ID
from vgraph_lab.qwen3_tts.stream_path import ICL_PREFIX_TARGET_ID, SUFFIX_TARGET_ID, XVEC_PREFIX_TARGET_ID
from vgraph_lab.qwen3_tts.stream_routines import OwnState

from .grids import StatelessGrid, StreamingGrid
from .shapes import Shape, descriptor_of, kept_frames
from .spaces import Choice, Space
from .traffic import check_traffic

__all__ = ["as_yaml", "replay_traffic", "stage_of"]


def stage_of(space: Space, choice: Choice) -> dict[str, Any]:
    """A stage that captures exactly this choice, as :meth:`StageConfig.from_dict` reads it.

    Raises:
        ConfigError: a configuration cannot say it.
    """
    graphs: dict[str, Any] = {"capture_batch_sizes": list(choice.batch_sizes)} if choice.graphs else {"enforce_eager": True}
    if isinstance(space, StreamingGrid):
        off = [target for target in space.target_ids if target not in choice.targets] if choice.graphs else []
        graphs |= {"targets": {target: {"enabled": False} for target in off}} if off else {}
        return {"async_chunk": True, "connector": space.connector.model_dump(mode="json"), "vocoder_cudagraph": graphs}
    if isinstance(space, StatelessGrid):
        graphs |= {"decode_chunk_frames": space.chunk_frames, "decode_left_context_frames": space.left_context_frames}
        extra = [size for size in choice.frame_sizes if size not in space.forced]
        graphs |= {"targets": {STATELESS_TARGET_ID: {"capture_bucket_sizes": extra}}} if extra else {}
        return {"async_chunk": False, "vocoder_cudagraph": graphs}
    raise ConfigError(
        "a configuration names batch sizes and buckets, not single graphs, so a plan in the free form has no YAML. Plan with StreamingGrid "
        "or StatelessGrid; the graphs of this one are point.descriptors()."
    )


def as_yaml(stage: dict[str, Any], headline: str, path: Path, *, overwrite: bool) -> Path:
    """Write a stage with a comment above it.

    Raises:
        InputError: the file exists (and ``overwrite`` is False) or cannot be written.
    """
    text = f"# Planned from traffic. {headline}\n" + yaml.safe_dump(stage, sort_keys=False, default_flow_style=None)
    try:
        with path.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InputError(
            f"{path}: exists, and nothing is written over. Choose another name, or overwrite it (overwrite=True, --overwrite)."
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}.") from error
    return path


def replay_traffic(traffic: pd.DataFrame, targets: Iterable[Target[Any]], settings: VocoderGraphSettings | None = None) -> StatsSnapshot:
    """What becomes of the traffic if every Descriptor of these Targets has a graph: each call resolved by its real Routine.

    Nothing is captured and nothing decoded; inputs have shapes and no memory.

    Args:
        traffic: see :func:`~.traffic.traffic_table`.
        targets: ``model.get_vocoder_cudagraph_targets()``; all Targets that are called.
        settings: which of them are switched off (``cfg.graph_settings``); by default none.

    Returns:
        Statistics as a runner would have them; :func:`~vgraph_lab.inspect.coverage.coverage_table` reads them.

    Raises:
        ConfigError: a Target that is called is not among them.
        InputError: the traffic is malformed or holds no calls.
    """
    by_id = {target.target_id: target for target in targets}
    table = check_traffic(traffic, tuple(by_id))
    policy = settings or VocoderGraphSettings()
    counts: Counter[CallKind] = Counter()
    captured = {target_id: set(target.descriptors) for target_id, target in by_id.items()}
    for target_id, state, rows, frames, may_pad, calls in table.itertuples(index=False, name=None):
        shape, target = Shape(target_id, state, rows, frames), by_id[target_id]
        resolution = target.routine.resolve(*_inputs(shape, may_pad, target.routine))
        graph = next((found for found in resolution.candidates if found in captured[target_id]), None)
        if policy.enforce_eager or not policy.for_target(target_id).enabled:
            kind = CallKind(target_id, resolution.key, reason=FallbackReason.DISABLED)
        elif graph is None:
            kind = CallKind(target_id, resolution.key, reason=resolution.miss_reason)
        else:
            kind = CallKind(target_id, resolution.key, descriptor=graph)
        counts[kind] += calls
    return StatsSnapshot(dict(counts))


def _inputs(shape: Shape, is_last: bool, routine: Any) -> tuple[Any, ...]:
    """Arguments of a call of this shape. They share one element of memory."""

    def blank(*sizes: int) -> Tensor:
        return torch.zeros((), dtype=torch.int64).expand(sizes)

    geometry = routine.decoder.geometry
    can_be_captured = descriptor_of(shape) is not None
    codes = blank(shape.batch_size, geometry.num_quantizers, shape.frames - kept_frames(shape.target, shape.state))
    if shape.target == STATELESS_TARGET_ID:
        return (codes,)
    if shape.target == XVEC_PREFIX_TARGET_ID:
        return codes, is_last
    if shape.target == ICL_PREFIX_TARGET_ID:
        reference = blank(shape.batch_size, geometry.num_quantizers, geometry.sliding_window + (0 if can_be_captured else 1))
        return codes, reference, blank(shape.batch_size), is_last
    if shape.target == SUFFIX_TARGET_ID:
        mode, kept = shape.state.rsplit(" ", 1)
        state = blank(shape.batch_size) if can_be_captured else OwnState(cast(Any, None), cast(Any, None))
        return codes, state, mode, int(kept), is_last
    raise ConfigError(f"calls of {shape.target} cannot be made up here: its arguments are not known.")
