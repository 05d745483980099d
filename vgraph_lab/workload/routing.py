"""Which Target and runtime key a chunk of Qwen3-TTS leads to, in numbers alone.

The rules are those of :mod:`vgraph_lab.qwen3_tts.stream_path` and its Routines; transitions come from the same table, and a
test compares what is counted here with the statistics of a real runner. Nothing here needs a decoder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from vgraph_lab.config import StageConfig
from vgraph_lab.errors import ConfigError, FallbackReason
from vgraph_lab.graphs.descriptor import Descriptor
from vgraph_lab.graphs.stats import CallKind
from vgraph_lab.qwen3_tts.settings import EXTENSIONS, TARGET_IDS, Qwen3TTSGraphKeys, StatelessTargetKeys
from vgraph_lab.qwen3_tts.stateless import STATELESS_TARGET_ID, stateless_buckets
from vgraph_lab.qwen3_tts.stream_path import ICL_PREFIX_TARGET_ID, SUFFIX_TARGET_ID, XVEC_PREFIX_TARGET_ID
from vgraph_lab.qwen3_tts.stream_routines import SuffixDescriptor
from vgraph_lab.qwen3_tts.transitions import TransitionTable

from .schedules import PlannedChunk

__all__ = ["Group", "RoutedChunk", "RoutingRules", "TrafficCall"]

WINDOW_FRAMES = 72
"""Sliding window of the published 12 Hz decoder."""


class TrafficCall(NamedTuple):
    """One kind of Target call.

    Attributes:
        target_id: the Target.
        key: exact shape, as the runner counts it.
        is_last: whether no row is continued, so that a graph with more frames may serve it.
    """

    target_id: str
    key: Descriptor
    is_last: bool


class Group(NamedTuple):
    """Chunks that one call may take together.

    Attributes:
        mode: ``icl`` or ``xvec``.
        kept: suffix frames before the step, at most W; 0 for a first chunk.
        width: new frames that the step is padded to.
        long_reference: length of a reference longer than W, whose requests run alone; 0 for all others.
    """

    mode: str
    kept: int
    width: int
    long_reference: int


class RoutedChunk(NamedTuple):
    """A planned chunk with its way through the model; ``group`` is None for the empty chunk that only ends a request."""

    group: Group | None
    frames: int
    ref_frames: int
    available_after_frames: int
    is_last: bool


@dataclass(frozen=True)
class RoutingRules:
    """The routing of one stage.

    Args:
        cfg: the stage's configuration.
        window_frames: the decoder's sliding window W.

    Raises:
        ConfigError: a key that Qwen3-TTS does not have.
    """

    cfg: StageConfig
    window_frames: int = WINDOW_FRAMES

    def __post_init__(self) -> None:
        self.cfg.check_model(EXTENSIONS, TARGET_IDS)
        if self.cfg.async_chunk and self.keys.streaming_algorithm != "published":
            raise ConfigError("streaming_algorithm: calls are foretold for 'published' only. Record those of 'incremental' from a runner.")

    @cached_property
    def transitions(self) -> TransitionTable:
        """The schedule's transitions."""
        return TransitionTable.from_connector(self.cfg.connector, self.window_frames)

    @cached_property
    def keys(self) -> Qwen3TTSGraphKeys:
        """The keys that the Targets share."""
        return self.cfg.extension(Qwen3TTSGraphKeys)

    @cached_property
    def largest_batch(self) -> int:
        """The most rows of one call."""
        return self.keys.batch_limit if self.cfg.graph_settings.enforce_eager else max(self.keys.capture_batch_sizes)

    def declared(self) -> dict[str, tuple[Descriptor, ...]]:
        """Start-up Descriptors by Target id, as the model declares them; none for a Target that is switched off."""
        sizes = self.keys.capture_batch_sizes
        found: dict[str, tuple[Descriptor, ...]]
        if self.cfg.async_chunk:
            starts = tuple(Descriptor(rows, start.new_frames) for rows in sizes for start in self.transitions.starts)
            steps = tuple(
                SuffixDescriptor(rows, step.target, mode, step.source)
                for rows in sizes
                for mode in ("icl", "xvec")
                for step in self.transitions.steps
            )
            found = {ICL_PREFIX_TARGET_ID: starts, XVEC_PREFIX_TARGET_ID: starts, SUFFIX_TARGET_ID: steps}
        else:
            configured = self.cfg.target_extension(STATELESS_TARGET_ID, StatelessTargetKeys).capture_bucket_sizes
            buckets = stateless_buckets(
                configured, chunk_frames=self.keys.decode_chunk_frames, left_context_frames=self.keys.decode_left_context_frames
            )
            found = {STATELESS_TARGET_ID: tuple(Descriptor(rows, frames) for rows in sizes for frames in buckets)}
        return {target_id: descriptors if self.is_enabled(target_id) else () for target_id, descriptors in found.items()}

    def is_enabled(self, target_id: str) -> bool:
        """Whether the settings allow graphs for a Target."""
        settings = self.cfg.graph_settings
        return not settings.enforce_eager and settings.for_target(target_id).enabled

    # ------------------------------------------------------------------------------------------------ from chunks to calls

    def route(self, plan: Sequence[PlannedChunk], ref_frames: int) -> tuple[RoutedChunk, ...]:
        """The way of one request's chunks; it does not depend on other requests.

        Args:
            plan: its chunks in order.
            ref_frames: frames of its reference as it was given.

        Raises:
            ConfigError: a chunk is longer than any that the connector delivers.
        """
        reference = min(ref_frames, self.cfg.connector.codec_left_context_frames)
        mode, long_reference = "icl" if reference else "xvec", reference if reference > self.window_frames else 0
        routed, suffix_frames = [], 0
        for index, chunk in enumerate(plan):
            group = None
            if chunk.new_frames:
                kept = min(suffix_frames, self.window_frames)
                group = Group(mode, kept, self._width(suffix_frames, chunk), long_reference)
                suffix_frames = kept + chunk.new_frames
            routed.append(RoutedChunk(group, chunk.new_frames, 0 if index else reference, chunk.available_after_frames, chunk.is_last))
        return tuple(routed)

    def _width(self, suffix_frames: int, chunk: PlannedChunk) -> int:
        if chunk.new_frames > self.transitions.largest_chunk:
            raise ConfigError(
                f"a chunk of {chunk.new_frames} frames is longer than any of the connector ({self.transitions.largest_chunk})."
            )
        transition = self.transitions.after(suffix_frames, chunk.new_frames)
        if transition is None:
            return chunk.new_frames
        fits = chunk.new_frames == transition.new_frames or (chunk.is_last and chunk.new_frames < transition.new_frames)
        return transition.new_frames if fits else chunk.new_frames

    def call(self, group: Group, rows: int, frames: int, is_last: bool) -> TrafficCall:
        """The call of some chunks of one group.

        Args:
            group: theirs.
            rows: how many.
            frames: new frames of the longest.
            is_last: whether all of them end their requests.
        """
        mode, kept, _, long_reference = group
        if kept:
            state = "icl, long reference" if long_reference else mode
            return TrafficCall(SUFFIX_TARGET_ID, SuffixDescriptor(rows, kept + frames, state, kept), is_last)
        if mode == "xvec":
            return TrafficCall(XVEC_PREFIX_TARGET_ID, Descriptor(rows, frames), is_last)
        return TrafficCall(ICL_PREFIX_TARGET_ID, Descriptor(rows, frames, "long reference" if long_reference else ""), is_last)

    def windows(self, lengths: Sequence[int]) -> Iterator[TrafficCall]:
        """Calls for whole utterances that came together (``async_chunk: false``).

        Args:
            lengths: frames of each, reference included.
        """
        chunk, context = self.keys.decode_chunk_frames, self.keys.decode_left_context_frames
        ascending = sorted(lengths)
        for first in range(0, len(ascending), self.largest_batch):
            batch = ascending[first : first + self.largest_batch]
            for start in range(0, batch[-1], chunk):
                frames = min(chunk, batch[-1] - start) + min(start, context)
                yield TrafficCall(STATELESS_TARGET_ID, Descriptor(len(batch), frames), True)

    # ------------------------------------------------------------------------------------------------ from calls to outcomes

    def outcome(self, call: TrafficCall, captured: Collection[Descriptor]) -> CallKind:
        """What becomes of a call if exactly these graphs of its Target exist. Lazy capture is left out of account."""
        target_id, key, is_last = call
        if not self.is_enabled(target_id):
            return CallKind(target_id, key, reason=FallbackReason.DISABLED)
        fitting = [d for d in captured if _fits(target_id, key, d, is_last)]
        if fitting:
            return CallKind(target_id, key, descriptor=min(fitting, key=lambda d: (d.work, d.frames)))
        return CallKind(target_id, key, reason=self._miss(target_id, key))

    def _miss(self, target_id: str, key: Descriptor) -> FallbackReason:
        if key.state.endswith("long reference"):
            return FallbackReason.STATE_NOT_COVERED
        is_unknown = isinstance(key, SuffixDescriptor) and self.transitions.after(key.source) is None
        return FallbackReason.STATE_NOT_COVERED if is_unknown else FallbackReason.SHAPE_NOT_COVERED

    def outcomes(self, calls: Mapping[TrafficCall, int], captured: Mapping[str, Collection[Descriptor]]) -> dict[CallKind, int]:
        """:meth:`outcome` of many calls, added up."""
        counts: dict[CallKind, int] = {}
        for call, n in calls.items():
            kind = self.outcome(call, captured.get(call.target_id, ()))
            counts[kind] = counts.get(kind, 0) + n
        return counts


def _fits(target_id: str, key: Descriptor, graph: Descriptor, is_last: bool) -> bool:
    if key.state.endswith("long reference") or graph.batch_size < key.batch_size or graph.state != key.state:
        return False
    if isinstance(key, SuffixDescriptor) and not (isinstance(graph, SuffixDescriptor) and graph.source == key.source):
        return False
    if is_last or target_id == STATELESS_TARGET_ID:
        return graph.frames >= key.frames
    return graph.frames == key.frames
