"""What a configuration can express: capture sizes of a streaming stage, and of one that decodes whole utterances."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd

from vgraph_lab.config import ConnectorConfig
from vgraph_lab.errors import ConfigError, InputError, did_you_mean
from vgraph_lab.qwen3_tts.code2wav import Qwen3TTSCode2Wav
from vgraph_lab.qwen3_tts.settings import Qwen3TTSGraphKeys
from vgraph_lab.qwen3_tts.stateless import STATELESS_TARGET_ID, stateless_buckets
from vgraph_lab.qwen3_tts.stream_path import ICL_PREFIX_TARGET_ID, SUFFIX_TARGET_ID, XVEC_PREFIX_TARGET_ID
from vgraph_lab.qwen3_tts.transitions import TransitionTable

from .demand import Demand
from .search import CALLS, CHOICE, Choices, Ints, chain, finished, start
from .shapes import Shape, suffix_state
from .spaces import (
    MOST_BATCH_SIZES,
    MOST_SHARED_BATCH_SIZES,
    Choice,
    batch_candidates,
    checked_sizes,
    frame_candidates,
    gains_of,
    note,
    one_front,
)

__all__ = ["StatelessGrid", "StreamingGrid", "space_of"]

_STREAMING = (ICL_PREFIX_TARGET_ID, XVEC_PREFIX_TARGET_ID, SUFFIX_TARGET_ID)


def space_of(model: Qwen3TTSCode2Wav) -> StreamingGrid | StatelessGrid:
    """What the configuration of a model could say instead: its mode, its chunks or windows, other sizes.

    Raises:
        ConfigError: the model streams incrementally; its one Target is planned with :class:`~.free_form.FreeForm`.
    """
    if model.incremental is not None:
        raise ConfigError("streaming_algorithm: plans of a configuration are made for 'published'. Plan 'incremental' with FreeForm.")
    if model.streaming is not None:
        return StreamingGrid(model.cfg.connector, model.decoder.geometry.sliding_window)
    keys = model.cfg.extension(Qwen3TTSGraphKeys)
    return StatelessGrid(keys.decode_chunk_frames, keys.decode_left_context_frames)


@dataclass(frozen=True)
class StreamingGrid:
    """What a streaming stage can express: shared ``capture_batch_sizes`` for the whole schedule, and Targets switched on or off.

    Attributes:
        connector: how chunks are delivered.
        window: the decoder's sliding window W.
        batch_sizes: row counts to choose from, by default those that occur (if more than 16 do: powers of two and the largest).
    """

    connector: ConnectorConfig
    window: int
    batch_sizes: tuple[int, ...] | None = None

    @property
    def target_ids(self) -> tuple[str, ...]:
        """The three streaming Targets."""
        return _STREAMING

    @property
    def transitions(self) -> TransitionTable:
        """The schedule."""
        return TransitionTable.from_connector(self.connector, self.window)

    def cells(self, target_id: str) -> list[tuple[str, int]]:
        """State and frames of everything that one batch size of a Target captures."""
        schedule = self.transitions
        if target_id != SUFFIX_TARGET_ID:
            return [("", start.new_frames) for start in schedule.starts]
        return [(suffix_state(mode, step.source), step.target) for mode in ("icl", "xvec") for step in schedule.steps]

    def candidates(self, traffic: pd.DataFrame) -> tuple[int, ...]:
        """Row counts that are tried."""
        return batch_candidates(self.batch_sizes, traffic, MOST_SHARED_BATCH_SIZES)

    def graphs(self, targets: Iterable[str], batch_sizes: Iterable[int]) -> tuple[Shape, ...]:
        """What these settings capture."""
        sizes = tuple(batch_sizes)
        return tuple(Shape(target, state, rows, frames) for target in targets for rows in sizes for state, frames in self.cells(target))

    def choice(self, batch_sizes: Iterable[int], targets: Sequence[str] = _STREAMING) -> Choice:
        """These settings as a choice, to ask a plan what they are worth.

        Raises:
            ConfigError: no sizes, or a Target that does not stream.
        """
        for target in targets:
            if target not in _STREAMING:
                raise ConfigError(f"{target!r} does not stream.{did_you_mean(target, _STREAMING)} Accepted: {', '.join(_STREAMING)}.")
        sizes, on = checked_sizes("batch_sizes", batch_sizes), tuple(target for target in _STREAMING if target in targets)
        return Choice(on, sizes, (), self.graphs(on, sizes)) if on else Choice()

    def shapes(self, traffic: pd.DataFrame) -> list[Shape]:
        """Every shape of the schedule, called or not: it is captured and paid for."""
        return list(self.graphs(_STREAMING, self.candidates(traffic)))

    def notes(self, traffic: pd.DataFrame) -> tuple[str, ...]:
        """What the search left out."""
        return note("batch sizes", self.candidates(traffic), traffic["batch_size"])

    def search(self, demand: Demand) -> tuple[Ints, list[Choice]]:
        """Every combination of Targets, and for each all sets of batch sizes that nothing beats."""
        sizes, choices = self.candidates(demand.traffic), Choices()
        figures = {target: self._figures(demand, target, sizes) for target in _STREAMING}
        active = [target for target, (gains, _) in figures.items() if gains[:, :, CALLS].any()]
        found: list[tuple[Ints, tuple[str, ...]]] = [(start(), ())]
        for count in range(1, len(active) + 1):
            for targets in combinations(active, count):
                costs = np.stack([figures[target][1] for target in targets])
                together = np.concatenate([costs[:, :, :2].sum(axis=0), costs[:, :, 2:].max(axis=0)], axis=1)
                gains = np.sum([figures[target][0] for target in targets], axis=0)
                labels = finished(chain(gains, together, choices))
                found.append((labels[labels[:, CHOICE] != 0], targets))  # no sizes are no graphs, whatever the Targets
        labels, owners = one_front(found)
        chosen = []
        for row, targets in zip(labels, owners, strict=True):
            picked = tuple(sizes[place] for place in choices.items(int(row[CHOICE])))
            chosen.append(Choice(targets, picked, (), self.graphs(targets, picked)))
        return labels, chosen

    def _figures(self, demand: Demand, target: str, sizes: tuple[int, ...]) -> tuple[Ints, Ints]:
        """Gains [n + 1, n, 5] and costs [n, 3] of each batch size, for one Target."""
        cells = self.cells(target)
        cumulated = np.zeros((len(sizes) + 1, len(cells), 4), dtype=np.int64)  # figures up to each size
        for number, (state, frames) in enumerate(cells):
            rows = demand.groups.get((target, state), np.zeros(0, dtype=np.int64))
            shorter = max((f for s, f in cells if s == state and f < frames), default=0)
            wanted, may_pad = demand.frames[rows], demand.may_pad[rows]
            rows = rows[(wanted == frames) | (may_pad & (wanted < frames) & (wanted > shorter))]
            for place, size in enumerate(sizes, start=1):
                within = rows[demand.rows[rows] <= size]
                cumulated[place, number] = demand.figures[within].sum(axis=0)
        served = cumulated[None] - cumulated[:, None]  # [next smaller, size, cell, figure]
        shapes = [[Shape(target, state, size, frames) for state, frames in cells] for size in sizes]
        replay, own, shared, capture = (
            np.stack([demand.book.figure(name, row) for row in shapes]) for name in ("replay_ns", "own", "shared", "capture_us")
        )
        work = np.array([[size * frames for _, frames in cells] for size in sizes], dtype=np.int64)
        gains = gains_of(served[:, 1:], replay, work)
        return gains, np.stack([own.sum(axis=1), capture.sum(axis=1), shared.max(axis=1)], axis=1)


@dataclass(frozen=True)
class StatelessGrid:
    """What a stage without streaming can express: ``capture_batch_sizes`` × (``capture_bucket_sizes`` and two fixed buckets).

    Attributes:
        chunk_frames: new frames of one window (``decode_chunk_frames``).
        left_context_frames: frames before them (``decode_left_context_frames``). 150 frames and a whole window are always captured.
        batch_sizes: row counts to choose from, by default those that occur (if more than 8 do: powers of two and the largest).
        frame_sizes: buckets to choose from, by default the frames that occur (if more than 12 do: rounded up to multiples of 25).
    """

    chunk_frames: int = Qwen3TTSGraphKeys().decode_chunk_frames
    left_context_frames: int = Qwen3TTSGraphKeys().decode_left_context_frames
    batch_sizes: tuple[int, ...] | None = None
    frame_sizes: tuple[int, ...] | None = None

    @property
    def target_ids(self) -> tuple[str, ...]:
        """The stateless Target."""
        return (STATELESS_TARGET_ID,)

    @property
    def forced(self) -> tuple[int, ...]:
        """Buckets that are always captured."""
        return stateless_buckets(chunk_frames=self.chunk_frames, left_context_frames=self.left_context_frames)

    def candidates(self, traffic: pd.DataFrame) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Row counts and frame counts that are tried."""
        batch = batch_candidates(self.batch_sizes, traffic, MOST_BATCH_SIZES)
        if self.frame_sizes is not None:
            frames = set(checked_sizes("frame_sizes", self.frame_sizes))
        else:
            frames = frame_candidates(set(traffic["frames"].tolist()), max(self.forced))
        return batch, tuple(sorted({*frames, *self.forced}))

    def graphs(self, batch_sizes: Iterable[int], frame_sizes: Sequence[int]) -> tuple[Shape, ...]:
        """What these settings capture."""
        return tuple(Shape(STATELESS_TARGET_ID, "", rows, frames) for rows in batch_sizes for frames in frame_sizes)

    def choice(self, batch_sizes: Iterable[int], frame_sizes: Iterable[int] = ()) -> Choice:
        """These settings as a choice, to ask a plan what they are worth; the fixed buckets come with it.

        Raises:
            ConfigError: no batch sizes, or sizes that are none.
        """
        rows, frames = checked_sizes("batch_sizes", batch_sizes), checked_sizes("frame_sizes", (*frame_sizes, *self.forced))
        return Choice((STATELESS_TARGET_ID,), rows, frames, self.graphs(rows, frames))

    def shapes(self, traffic: pd.DataFrame) -> list[Shape]:
        """All row counts with all frame counts."""
        return list(self.graphs(*self.candidates(traffic)))

    def notes(self, traffic: pd.DataFrame) -> tuple[str, ...]:
        """What the search left out."""
        batch, frames = self.candidates(traffic)
        return (
            *note("batch sizes", batch, traffic["batch_size"]),
            *note("frame sizes", frames, traffic["frames"]),
        )

    def search(self, demand: Demand) -> tuple[Ints, list[Choice]]:
        """Every set of batch sizes, and for each all sets of buckets that nothing beats."""
        batch, frames = self.candidates(demand.traffic)
        if len(batch) > 12:
            raise InputError(f"{len(batch)} batch sizes make {2 ** len(batch) - 1:,} sets, too many to try each. Name at most 12 of them.")
        choices = Choices()
        forced = [frames.index(size) for size in self.forced]
        cumulated = self._cumulated(demand, batch, frames)
        shapes = [[Shape(STATELESS_TARGET_ID, "", rows, size) for rows in batch] for size in frames]
        figures = {
            name: np.stack([demand.book.figure(name, row) for row in shapes]) for name in ("replay_ns", "own", "shared", "capture_us")
        }
        work = np.array([[rows * size for rows in batch] for size in frames], dtype=np.int64)
        found: list[tuple[Ints, tuple[int, ...]]] = [(start(), ())]
        for count in range(1, len(batch) + 1):
            for places in combinations(range(len(batch)), count):
                columns = list(places)
                up_to = np.concatenate([np.zeros_like(cumulated[:, :1]), cumulated], axis=1)[:, [0, *(p + 1 for p in places)]]
                served = np.diff(up_to, axis=1)  # by which batch size: [frames + 1, sizes, figure]
                gains = gains_of(served[None, 1:] - served[:, None], figures["replay_ns"][:, columns], work[:, columns])
                costs = np.stack(
                    [
                        figures["own"][:, columns].sum(axis=1),
                        figures["capture_us"][:, columns].sum(axis=1),
                        figures["shared"][:, columns].max(axis=1),
                    ],
                    axis=1,
                )
                found.append((finished(chain(gains, costs, choices, forced=forced)), tuple(batch[p] for p in places)))
        labels, owners = one_front(found)
        chosen = []
        for row, rows in zip(labels, owners, strict=True):
            picked = tuple(frames[place] for place in choices.items(int(row[CHOICE])))
            chosen.append(Choice((STATELESS_TARGET_ID,), rows, picked, self.graphs(rows, picked)) if rows else Choice())
        return labels, chosen

    def _cumulated(self, demand: Demand, batch: tuple[int, ...], frames: tuple[int, ...]) -> Ints:
        """Figures of the calls within each frame and batch size: int64 [frames + 1, batch, 4]."""
        cumulated = np.zeros((len(frames) + 1, len(batch), 4), dtype=np.int64)
        rows = demand.groups.get((STATELESS_TARGET_ID, ""), np.zeros(0, dtype=np.int64))
        if not demand.may_pad[rows].all():
            raise InputError(f"calls of {STATELESS_TARGET_ID} may be padded; the traffic says of some that they may not.")
        by_frames = np.searchsorted(frames, demand.frames[rows])
        by_rows = np.searchsorted(batch, demand.rows[rows])
        fits = (by_frames < len(frames)) & (by_rows < len(batch))
        np.add.at(cumulated, (by_frames[fits] + 1, by_rows[fits]), demand.figures[rows[fits]])
        return cumulated.cumsum(axis=0).cumsum(axis=1)
