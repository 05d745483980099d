"""How :mod:`~.compare` measures: the streams of one batch size, played, compared with the truth, timed in turn and taken apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from vgraph_lab.config import ConnectorConfig
from vgraph_lab.errors import MissingExtraError
from vgraph_lab.inspect.anatomy import anatomy
from vgraph_lab.inspect.anatomy_diff import nodes_by_kind
from vgraph_lab.inspect.audio import dbfs, waveform_difference
from vgraph_lab.inspect.kernel_times import kernel_times, part_times, times_by_kind
from vgraph_lab.inspect.work_kinds import WORK_KINDS
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder

from .contender import Contender, Streams
from .floors import Ceilings, decoder_parts, floor_table
from .own_contenders import BASELINE, RunnerContender
from .runners import Progress
from .timing import Timing, host_time_in_bursts_us, summarise_times, time_once

__all__ = ["Comparison"]

_LEAST_ROUNDS = 3
_WARM_UPS = 2
_BURST_CALLS, _BURST_S = 8, 0.3
_MOST_KERNELS = 12
_TRACED_CALLS = {"cuda": 10, "cpu": 2}
Run = Callable[[], Any]
Name = TypeVar("Name")


class _Codes(NamedTuple):
    first: Tensor
    chunks: tuple[Tensor, ...]
    whole: Tensor


class _Player(NamedTuple):
    contender: Contender
    streams: Streams
    steady: Run


class _ContenderFailedError(Exception):
    """What a contender raised."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.name = name


@contextmanager
def _blamed_on(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _ContenderFailedError(name, error) from error


@dataclass
class Comparison:
    """What all contenders have in common.

    Attributes:
        decoder: the weights that are measured.
        reference: the same in fp32.
        truth: exact incremental decoding with ``reference``, eager: gives the states.
        connector: how chunks are delivered.
        repeats: timed calls of each kind, at most.
        seconds: for the calls of one kind and batch size, beyond three rounds.
        codes_on_host: where codes come from.
        ceilings: of the device.
        progress: told what is being measured.
        nodes_unknown: why the nodes of graphs could not be listed; None if they could.
        frames: of the streams that are compared with the truth.
    """

    decoder: Code2WavDecoder
    reference: Code2WavDecoder
    truth: RunnerContender
    connector: ConnectorConfig
    repeats: int
    seconds: float
    codes_on_host: bool
    ceilings: Ceilings
    progress: Progress
    nodes_unknown: str | None = None

    def __post_init__(self) -> None:
        self.device, self.chunk_frames = self.decoder.device, self.connector.codec_chunk_frames
        # The first full chunk with a full window behind it, and another one.
        self._full_chunks = -(-(self.decoder.geometry.sliding_window - 1) // self.chunk_frames) + 2
        self.frames = 1 + self._full_chunks * self.chunk_frames

    def floors(self, batch_size: int, frames: int) -> list[dict[str, Any]]:
        """The floor of a call, by part, its sum last."""
        table = floor_table(self.decoder.geometry, frames, batch_size, self.decoder.dtype, self.ceilings)
        return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]

    def measure(self, contenders: Mapping[str, Contender], batch_size: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Rows of all contenders, and those that failed, with what they said."""
        codes = self._codes(batch_size)
        rows: dict[str, dict[str, Any]] = {}
        failed: dict[str, str] = {}
        with ExitStack() as stack:
            with _without_tf32(self.device):
                truth, _ = self._played(self.truth, codes, stack)
            waveform = self._whole(codes)
            states = self.truth.states(truth)
            players: dict[str, _Player] = {}
            for name, contender in contenders.items():
                self.progress(f"{batch_size} at a time: {name} against the whole utterance")
                try:
                    with _blamed_on(name):
                        streams, heard = self._played(contender, codes, stack)
                        steady = streams.prepare(codes.chunks[-1])
                        own_states = contender.states(streams) if isinstance(contender, RunnerContender) else None
                        rows[name] = {"contender": name, "batch_size": batch_size, **_distances(waveform, heard, states, own_states)}
                        players[name] = _Player(contender, streams, steady)
                except _ContenderFailedError as error:
                    failed[name] = str(error)
            while True:  # one that fails must not end the others' measurement: it is told, and they are timed again without it
                try:
                    self._add_figures(rows, players, codes, batch_size)
                    break
                except _ContenderFailedError as error:
                    failed[error.name] = str(error)
                    del rows[error.name], players[error.name]
        self._add_ratios(rows, batch_size)
        return list(rows.values()), failed

    def _add_figures(self, rows: dict[str, dict[str, Any]], players: Mapping[str, _Player], codes: _Codes, batch_size: int) -> None:
        before = {name: _graph_calls(player.contender) for name, player in players.items()}
        self._add_times(rows, players, codes, batch_size)
        for name, player in players.items():
            self.progress(f"{batch_size} at a time: where the time of {name} goes")
            with _blamed_on(name):
                rows[name] |= _graph_calls(player.contender, since=before[name]) | self._anatomy_of(player)

    def _codes(self, batch_size: int) -> _Codes:
        g, draw = self.decoder.geometry, torch.Generator().manual_seed(batch_size)
        whole = torch.randint(0, g.codebook_size, (batch_size, g.num_quantizers, self.frames), generator=draw)
        placed = whole if self.codes_on_host else whole.to(self.device)
        first, *chunks = (part.contiguous() for part in placed.split([1, *[self.chunk_frames] * self._full_chunks], dim=2))
        return _Codes(first, tuple(chunks), whole)

    def _played(self, contender: Contender, codes: _Codes, stack: ExitStack) -> tuple[Streams, Tensor]:
        """Streams that have been played to their last chunk, and their samples [B, samples] on the host."""
        streams = contender.start(codes.whole.shape[0])
        stack.callback(streams.close)
        parts = [torch.stack(list(streams.prepare(chunk)())).float().cpu() for chunk in (codes.first, *codes.chunks)]
        return streams, torch.cat(parts, dim=1)

    def _whole(self, codes: _Codes) -> Tensor:
        """The truth, row by row, so that it needs the memory of one."""
        with _without_tf32(self.device):
            return torch.cat([self.reference.decode(row.to(self.device))[:, 0].cpu() for row in codes.whole.split(1)])

    # ------------------------------------------------------------------------------------------------ times

    def _add_times(self, rows: dict[str, dict[str, Any]], players: Mapping[str, _Player], codes: _Codes, batch_size: int) -> None:
        @contextmanager
        def beginning(contender: Contender) -> Iterator[Run]:
            streams = contender.start(batch_size)
            try:
                yield streams.prepare(codes.first)
            finally:
                streams.close()

        first = {name: partial(beginning, player.contender) for name, player in players.items()}
        self.progress(f"{batch_size} at a time: timing first chunks")
        for name, timing in self._interleaved(first).items():
            rows[name] |= _named("first", timing)
        calls = {(name, "steady"): player.steady for name, player in players.items()}
        for name, (contender, streams, _) in players.items():
            if isinstance(contender, RunnerContender) and contender.report.captured:
                for kind, chunk, begins in (("handle", codes.chunks[-1], False), ("handle_first", codes.first, True)):
                    handle = contender.handle_call(streams, chunk, begins=begins)
                    calls |= {(name, kind): handle} if handle else {}
        self.progress(f"{batch_size} at a time: timing steady chunks")
        for (name, kind), timing in self._interleaved({key: _ready(run) for key, run in calls.items()}).items():
            rows[name] |= _named(kind, timing)
        if self.device.type == "cuda":  # on the CPU a call returns when its work is done, so there is no host time of its own
            for (name, kind), run in calls.items():
                with _blamed_on(name):
                    burst = host_time_in_bursts_us(run, self.device, calls=_BURST_CALLS, seconds=_BURST_S)
                rows[name][f"{kind}_burst_host_us"] = burst

    def _interleaved(self, makers: Mapping[Name, Callable[[], AbstractContextManager[Run]]]) -> dict[Name, Timing]:
        walls: dict[Name, list[float]] = {name: [] for name in makers}
        hosts: dict[Name, list[float]] = {name: [] for name in makers}
        begin = perf_counter()
        for number in range(_WARM_UPS + self.repeats):
            if number >= _WARM_UPS + _LEAST_ROUNDS and perf_counter() - begin > self.seconds:
                break
            for name, make in makers.items():
                with _blamed_on(name[0] if isinstance(name, tuple) else str(name)), make() as run:
                    wall, host = time_once(run, self.device)
                if number >= _WARM_UPS:
                    walls[name].append(wall)
                    hosts[name].append(host)
        return {name: summarise_times(walls[name], hosts[name]) for name in makers}

    # ------------------------------------------------------------------------------------------------ where it goes

    def _anatomy_of(self, player: _Player) -> dict[str, Any]:
        contender, run = player.contender, player.steady
        calls = _TRACED_CALLS[self.device.type]
        kernels = kernel_times(run, self.device, repeats=calls)
        by_kind = times_by_kind(kernels)
        total = sum(by_kind.values())
        found: dict[str, Any] = {
            "kernel_ms_by_kind": by_kind,
            "conversion_share": by_kind.get("layout conversion", 0.0) / total if total else None,
            "longest_kernels": kernels.head(_MOST_KERNELS).to_dict("records"),
        }
        if isinstance(contender, RunnerContender):
            if contender.report.captured:
                found |= self._nodes_of(contender, run)
            else:
                found["part_ms"] = part_times(run, self.device, decoder_parts(self.decoder), repeats=calls)
        return found

    def _nodes_of(self, contender: RunnerContender, run: Run) -> dict[str, Any]:
        try:
            graphs = [anatomy(entry) for entry in contender.entries_used(run)]
        except MissingExtraError as error:
            self.nodes_unknown = str(error)
            return {"nodes": None, "nodes_by_kind": None}
        counts = [nodes_by_kind(graph) for graph in graphs]
        by_kind = {kind: sum(count.get(kind, 0) for count in counts) for kind in WORK_KINDS}
        return {"nodes": sum(by_kind.values()), "nodes_by_kind": {kind: count for kind, count in by_kind.items() if count}}

    def _add_ratios(self, rows: Mapping[str, dict[str, Any]], batch_size: int) -> None:
        (*_, floor), (*_, first) = self.floors(batch_size, self.chunk_frames), self.floors(batch_size, 1)
        audio_ms = 1e3 * self.chunk_frames * self.decoder.samples_per_frame / self.decoder.sample_rate
        baseline = rows.get(BASELINE, {}).get("steady_wall_ms")
        for row in rows.values():
            measured = row["steady_wall_ms"]
            row["speedup_steady"] = baseline and baseline / measured
            row["real_time_factor"] = measured / audio_ms
            row["floor_ms"], row["first_floor_ms"] = floor["floor_ms"], first["floor_ms"]
            row["arithmetic_floor_ms"], row["bytes_floor_ms"] = floor["arithmetic_ms"], floor["bytes_ms"]
            row["floor_share"] = floor["floor_ms"] / measured


def _distances(truth: Tensor, heard: Tensor, states: Sequence[Tensor] | None, own_states: Sequence[Tensor] | None) -> dict[str, Any]:
    """How far samples and states are from the truth. A ratio is None where nothing differs, or where numbers are not finite."""
    found = waveform_difference(truth.flatten(), heard.flatten())
    level = dbfs(float(truth.double().square().mean().sqrt()))
    row = {
        "snr_db": _finite(found.snr_db),
        "largest_difference": _finite(found.max_abs),
        "nonfinite_samples": found.nonfinite_samples,
        "level_dbfs": _finite(level),
        "state_snr_db": None,
        "state_largest_difference": None,
    }
    if states and own_states and all(a.shape == b.shape for a, b in zip(states, own_states, strict=True)):
        kept = waveform_difference(*(torch.stack(list(each)).float().cpu().flatten() for each in (states, own_states)))
        row |= {"state_snr_db": _finite(kept.snr_db), "state_largest_difference": _finite(kept.max_abs)}
    return row


@contextmanager
def _without_tf32(device: torch.device) -> Iterator[None]:
    """fp32 that is fp32: CUDA rounds the factors of convolutions to ten bits otherwise."""
    if device.type != "cuda":
        yield
        return
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = False
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _ready(run: Run) -> Callable[[], AbstractContextManager[Run]]:
    return lambda: nullcontext(run)


def _named(kind: str, timing: Timing) -> dict[str, Any]:
    return {f"{kind}_{key}": value for key, value in asdict(timing).items()}


def _graph_calls(contender: Contender, since: Mapping[str, int] | None = None) -> dict[str, int]:
    """Target calls that a graph served and that ran eager, so far or since then; none of a peer."""
    if not isinstance(contender, RunnerContender):
        return {}
    stats = contender.runner.stats()
    found = {"graph_hits": stats.hits(), "graph_fallbacks": stats.fallbacks()}
    return {key: value - (since or {}).get(key, 0) for key, value in found.items()}
