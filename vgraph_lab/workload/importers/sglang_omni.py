"""Graph telemetry of sglang-omni, as JSON behind a log prefix or in a file of its own.

* ``Code2WavCudaGraphRunner.stats()``, logged as ``Code2Wav device graph startup stats={…}`` (``CUDA graph`` in older versions):
  captured keys under ``graph_contract``, ``graph_replays``, ``replay_failures`` and ``fallback_counts`` under ``runtime``, bytes
  per key under ``memory.tier1``. Graphs are replayed for exact shapes only.
* the scheduler's runtime snapshot: the same under ``cuda_graph_stats``, with ``initial_decode_batch_size_histogram`` and
  ``followup_decode_batch_size_histogram`` beside it.
* prefill counters of ``ModelWorker.model_info``: ``replay_count``, ``standard_eager_count``, ``custom_eager_count`` and
  ``replay_buckets``; and their summaries with ``scalar``, ``fallback_reasons`` and ``scheduled.full_histogram``.
* counts per shape, as https://github.com/sgl-project/sglang-omni/pull/1157 and /1758 propose them. The names of their keys were
  not settled, so ``replays`` / ``fallbacks`` (or ``replays_by_shape`` / ``fallbacks_by_shape``) are read as mappings of a shape
  (``B1/T10``, ``b1t10``, ``1x10``) to a count, or to counts by reason, or as lists of objects with ``batch_size`` and ``frames``.

All counters are cumulative. A ``schema_version`` above 1 is refused: its meaning is not known here.

Sources: ``sglang_omni/models/qwen3_omni/components/code2wav_cuda_graph.py`` and ``code2wav_scheduler.py`` beside it and
``sglang_omni/model_runner`` at https://github.com/sgl-project/sglang-omni; a summary in /pull/1581.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from vgraph_lab.graphs.table import MIB

from .records import REASONS, CallShape, CaptureRecord, MalformedError, Report, Sink

__all__ = ["CODE2WAV", "PREFILL", "SglangOmniFormat", "read_telemetry"]

CODE2WAV, HISTOGRAM, PREFILL = "sglang-omni code2wav", "sglang-omni decode batches", "sglang-omni prefill"
PREFILL_HISTOGRAM = "sglang-omni prefill tokens"
CODE2WAV_TARGET, PREFILL_TARGET = "qwen3_omni.code2wav", "sglang.prefill"
VERSION = 1

_MARKERS = (
    '"graph_contract"', '"fallback_counts"', '"graph_replays"', '"replay_count"', '"full_histogram"', '"fallback_reasons"',
    'decode_batch_size_histogram"', '"replays_by_shape"', '"fallbacks_by_shape"',
)  # fmt: skip
_SHAPE = re.compile(r"[bB]?(\d+)\s*[/x×,]?\s*[tT]?(\d+)")


class SglangOmniFormat:
    """A JSON object within one line; no state."""

    def read(self, line: int, process: str, message: str, sink: Sink) -> bool:
        """Take a line if it holds telemetry."""
        start = message.find("{")
        if start < 0 or not (any(marker in message for marker in _MARKERS) or ('"replays"' in message and '"fallbacks"' in message)):
            return "graph startup stats={" in message and read_telemetry(message[start:], process, sink)
        return read_telemetry(message[start:], process, sink)

    def finish(self, sink: Sink) -> None:
        """Nothing is open."""


def read_telemetry(text: str, process: str, sink: Sink) -> bool:
    """Telemetry from a text that begins with a JSON object.

    Returns:
        Whether there was any in it.

    Raises:
        MalformedError: the object is cut or not what it should be.
    """
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError) as error:
        raise MalformedError("the JSON object is cut or damaged") from error
    if not isinstance(value, Mapping):
        raise MalformedError("the JSON is no object")
    reports: list[Report] = []
    captures: list[CaptureRecord] = []
    for part in _parts(value):
        version = part.get("schema_version", part.get("telemetry_version", VERSION))
        if type(version) is not int or version > VERSION:
            raise MalformedError(f"telemetry of version {version!r}; this release reads up to {VERSION}. Try a newer one")
        reports += _reports(part)
        captures += _captures(part, process)
    for report in reports:
        sink.report(process, report)
    for capture in captures:
        sink.capture(capture)
    return bool(reports or captures)


def _parts(value: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The object and the objects in it that are telemetry of their own."""
    yield value
    if depth < 3:
        for name in ("cuda_graph_stats", "prefill_cuda_graph", "code2wav_graph"):
            if isinstance(value.get(name), Mapping):
                yield from _parts(value[name], depth + 1)


def _reports(part: Mapping[str, Any]) -> Iterator[Report]:
    owner = _mapping(part, "binding").get("owner_pid")
    process = f"pid={owner}" if type(owner) is int else ""
    runtime = _mapping(part, "runtime") or part
    by_shape = _by_shape(runtime)
    if by_shape:
        yield Report(CODE2WAV, "cumulative", by_shape, process=process)
    elif "fallback_counts" in runtime or "graph_replays" in runtime:
        yield Report(CODE2WAV, "cumulative", _without_shapes(runtime), process=process)
    batches = {
        CallShape(CODE2WAV_TARGET, "observed", rows, phase=phase): n
        for phase in ("initial", "followup")
        for rows, n in _histogram(part, f"{phase}_decode_batch_size_histogram").items()
    }
    if batches:
        yield Report(HISTOGRAM, "cumulative", batches)
    if "replay_count" in part or "scalar" in part or "fallback_reasons" in part:
        yield Report(PREFILL, "cumulative", _prefill(part))
    tokens = _histogram(_mapping(part, "scheduled"), "full_histogram")
    if tokens:
        yield Report(
            PREFILL_HISTOGRAM, "cumulative", {CallShape(PREFILL_TARGET, "observed", 1, n, unit="tokens"): c for n, c in tokens.items()}
        )


def _by_shape(runtime: Mapping[str, Any]) -> dict[CallShape, int]:
    counts: dict[CallShape, int] = {}
    for name in ("replays_by_shape", "replays", "fallbacks_by_shape", "fallbacks"):
        is_hit, value = name.startswith("replays"), runtime.get(name)
        if not isinstance(value, Mapping | list):
            continue
        for rows, frames, what in _shapes(name, value):
            by_reason = what if isinstance(what, Mapping) else {"": what}
            for reason, n in by_reason.items():
                if is_hit:
                    shape = CallShape(CODE2WAV_TARGET, "exact hit", rows, frames, captured_batch_size=rows, captured_frames=frames)
                else:
                    shape = CallShape(CODE2WAV_TARGET, "fallback", rows, frames, reason=_reason(reason))
                counts[shape] = counts.get(shape, 0) + _count(name, n)
    return counts


def _shapes(name: str, value: Mapping[str, Any] | list[Any]) -> Iterator[tuple[int, int, Any]]:
    if isinstance(value, Mapping):
        for key, what in value.items():
            shape = _SHAPE.fullmatch(str(key).strip("()[] "))
            if shape is None:
                raise MalformedError(f"{name} has a key that is no shape: {key!r}")
            yield int(shape[1]), int(shape[2]), what
        return
    for entry in value:
        if not isinstance(entry, Mapping):
            raise MalformedError(f"{name} has an entry that is no object")
        n = next((entry[key] for key in ("count", "calls", "replays", "fallbacks", "reasons") if key in entry), None)
        if "reason" in entry:
            n = {str(entry["reason"]): n}
        yield _count("batch_size", entry.get("batch_size")), _count("frames", entry.get("frames")), n


def _without_shapes(runtime: Mapping[str, Any]) -> dict[CallShape, int]:
    counts = {CallShape(CODE2WAV_TARGET, "exact hit"): _count("graph_replays", runtime.get("graph_replays", 0))}
    counts[CallShape(CODE2WAV_TARGET, "error")] = _count("replay_failures", runtime.get("replay_failures", 0))
    for reason, n in _mapping(runtime, "fallback_counts").items():
        counts[CallShape(CODE2WAV_TARGET, "fallback", reason=_reason(reason))] = _count("fallback_counts", n)
    return counts


def _prefill(part: Mapping[str, Any]) -> dict[CallShape, int]:
    scalar = _mapping(part, "scalar") or part
    counts: dict[CallShape, int] = {}

    def add(n: int, outcome: str, **shape: Any) -> None:
        key = CallShape(PREFILL_TARGET, outcome, unit="tokens", **shape)
        counts[key] = counts.get(key, 0) + n

    buckets = _histogram(part, "replay_buckets")
    replays = _count("replay_count", scalar.get("replay_count", 0))
    for tokens, n in buckets.items():
        add(n, "hit", captured_batch_size=1, captured_frames=tokens)
    if not buckets and {"exact_replay_count", "padded_replay_count"} <= scalar.keys():
        add(_count("exact_replay_count", scalar["exact_replay_count"]), "exact hit")
        add(_count("padded_replay_count", scalar["padded_replay_count"]), "padded hit")
    elif not buckets:
        add(replays, "hit")
    served = sum(counts.values())
    if served != replays:
        raise MalformedError(f"replays by shape or kind add up to {served}, replay_count is {replays}")
    eager = {name: _count(name, scalar.get(name, 0)) for name in ("standard_eager_count", "custom_eager_count")}
    reasons = {reason: _count("fallback_reasons", n) for reason, n in _mapping(part, "fallback_reasons").items()}
    for reason, n in (reasons or eager).items():
        add(n, "fallback", reason=_reason(reason.removesuffix("_count")))
    return counts


def _captures(part: Mapping[str, Any], process: str) -> Iterator[CaptureRecord]:
    keys = _mapping(part, "graph_contract").get("keys", [])
    if not isinstance(keys, list):
        return
    footprint = _mapping(_mapping(_mapping(part, "memory"), "tier1"), "per_key_footprint_bytes")
    for key in keys:
        if not isinstance(key, Mapping):
            raise MalformedError("graph_contract.keys has an entry that is no object")
        rows, frames = _count("batch_size", key.get("batch_size")), _count("frames", key.get("frames"))
        size = footprint.get(f"b{rows}t{frames}")
        mib = size / MIB if isinstance(size, int | float) else None
        yield CaptureRecord(process, CODE2WAV, CODE2WAV_TARGET, "graph", rows, frames, mib=mib)


def _mapping(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = value.get(name)
    return found if isinstance(found, Mapping) else {}


def _histogram(value: Mapping[str, Any], name: str) -> dict[int, int]:
    try:
        return {int(size): _count(name, n) for size, n in _mapping(value, name).items()}
    except ValueError as error:
        raise MalformedError(f"{name} is no histogram: {error}") from error


def _count(name: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise MalformedError(f"{name} must be whole numbers from 0, got {value!r}")
    return value


def _reason(text: object) -> str:
    return str(REASONS.get(str(text), text))
