"""The transitions of streamed requests, which of them have graphs, and how often requests took them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import pandas as pd

from vgraph_lab.errors import FallbackReason
from vgraph_lab.graphs.descriptor import Descriptor
from vgraph_lab.graphs.entry import GraphEntry
from vgraph_lab.graphs.stats import StatsSnapshot
from vgraph_lab.qwen3_tts.stream_path import ICL_PREFIX_TARGET_ID, SUFFIX_TARGET_ID, XVEC_PREFIX_TARGET_ID
from vgraph_lab.qwen3_tts.stream_routines import SuffixDescriptor
from vgraph_lab.qwen3_tts.transitions import TransitionTable
from vgraph_lab.runner import GPUGenerationModelRunner

from .stream_calls import streaming_of

__all__ = ["TRANSITION_COLUMNS", "transition_table"]

TRANSITION_COLUMNS = {
    "mode": "xvec (no reference), icl (behind a reference) or icl, long reference (longer than the window; never in a graph)",
    "kept_frames": "new frames kept before the chunk, the state that a request is in; 0 is its start",
    "new_frames": "frames of the chunk; a shorter last chunk counts here, too",
    "after_frames": "kept and new frames together; the window W of them are kept at most",
    "is_rolling": "whether W frames were kept before, so that the transition repeats until the request ends",
    "is_scheduled": "whether the connector's schedule has it; others run eager unless they were captured lazily",
    "target": "id of the Target that serves it",
    "captured_batch_sizes": "rows of the graphs that exist for it; empty for none",
    "hits": "calls that those graphs served; a call may serve several requests",
    "misses": "valid calls that ran eager",
    "errors": "calls that failed during copy-in, replay or materialisation",
}
"""The columns of :func:`transition_table`, in order, with their meaning."""

_FIRST_TARGETS = {"xvec": XVEC_PREFIX_TARGET_ID, "icl": ICL_PREFIX_TARGET_ID}
_LONG = "icl, long reference"


class _Edge(NamedTuple):
    mode: str
    kept: int
    new: int


def transition_table(runner: GPUGenerationModelRunner) -> pd.DataFrame:
    """One row per mode and transition: the connector's schedule, then whatever else was captured or called.

    It may be called at any time while a model is loaded: before capture, with graphs switched off, after lazy captures.
    Hits, misses and errors add up to all calls of the streaming Targets.

    Returns:
        The columns of :data:`TRANSITION_COLUMNS`.

    Raises:
        InputError: the model does not stream.
        LifecycleError: no model is loaded (any more).
    """
    schedule = streaming_of(runner).transitions
    planned = [_Edge(mode, t.source, t.new_frames) for mode in _FIRST_TARGETS for t in schedule.transitions]
    graphs: defaultdict[_Edge, set[int]] = defaultdict(set)
    for edge, batch_size in _captured(runner.manager.entries() if runner.manager else []):
        graphs[edge].add(batch_size)
    counts = _counted(runner.stats(), schedule)
    others = sorted({*graphs, *(edge for edge, _ in counts)} - set(planned))
    rows = [
        {
            "mode": edge.mode,
            "kept_frames": edge.kept,
            "new_frames": edge.new,
            "after_frames": edge.kept + edge.new,
            "is_rolling": edge.kept >= schedule.window,
            "is_scheduled": place < len(planned),
            "target": SUFFIX_TARGET_ID if edge.kept else _FIRST_TARGETS[edge.mode.partition(",")[0]],
            "captured_batch_sizes": tuple(sorted(graphs[edge])),
            **{outcome: counts[edge, outcome] for outcome in ("hits", "misses", "errors")},
        }
        for place, edge in enumerate([*planned, *others])
    ]
    return pd.DataFrame(rows, columns=list(TRANSITION_COLUMNS))


def _captured(entries: list[GraphEntry]) -> Iterator[tuple[_Edge, int]]:
    for entry in entries:
        edge = _edge(entry.target_id, entry.descriptor)
        if edge is not None:
            yield edge, entry.descriptor.batch_size


def _edge(target_id: str, shape: Descriptor) -> _Edge | None:
    """The transition of a graph or of a call's exact shape; None for other Targets."""
    if isinstance(shape, SuffixDescriptor):
        return _Edge(shape.state, shape.source, shape.frames - shape.source)
    for mode, first_target in _FIRST_TARGETS.items():
        if target_id == first_target:
            return _Edge(_LONG if shape.state else mode, 0, shape.frames)
    return None


def _counted(stats: StatsSnapshot, schedule: TransitionTable) -> Counter[tuple[_Edge, str]]:
    """Calls by transition and outcome: those in a graph by its transition, others by their own frames.

    A short last chunk that ran eager belongs to the transition that it would have been padded to. Nothing in its key says
    that it was the last one, but a last one is never ``shape_not_covered``: any larger graph would do.
    """
    counts: Counter[tuple[_Edge, str]] = Counter()
    for kind, calls in stats.counts.items():
        edge = _edge(kind.target_id, kind.descriptor or kind.key)
        if edge is None:
            continue
        if kind.reason not in (None, FallbackReason.SHAPE_NOT_COVERED) and edge.mode != _LONG:
            step = schedule.after(edge.kept, edge.new)
            if step is not None and edge.new < step.new_frames:
                edge = edge._replace(new=step.new_frames)
        counts[edge, "errors" if kind.error else "misses" if kind.reason else "hits"] += calls
    return counts
