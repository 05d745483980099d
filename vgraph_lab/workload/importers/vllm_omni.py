"""Lines of vllm-omni's Code2Wav stage for Qwen3-TTS.

Statistics of the segmented wrapper (``VLLM_OMNI_QWEN3_CODE2WAV_CUDAGRAPH_STATS=1``; every 100 requests by default, also into a
file with ``pid=…`` in front)::

    Segmented Code2Wav CUDA Graph stats: requests=R hits=H fallbacks=F hit_rate=P% replays=[((phase, batch, requests), n), …]
    fallback_groups=[((phase:reason, requests), n), …]

Counters are cumulative and count requests; each list names the 20 most frequent only. Phases are ``icl_prefix``,
``xvec_prefix`` and ``suffix_<target frames>``; which mode a suffix step had is not told, nor the frames of a first chunk.

Batch statistics (``VLLM_OMNI_QWEN3_CODE2WAV_BATCH_STATS=1``) are cumulative as well and name 12 shapes::

    Code2Wav batch stats: forwards=… groups=… requests=… avg_group_size=… padded_frames=… decoded_frames=… pad_ratio=…%
    top_actual_frames=[(frames, n), …] top_bucket_groups=[((group size, longest), n), …]

A stateless wrapper before it wrote ``Code2Wav CUDA Graph stats: total=… hits=… fallbacks=… … top_hits=[((batch, frames,
padded), n), …] top_fallbacks=…``; both write ``Captured … CUDA Graph for batch=… size=…``.

Sources: ``qwen3_tts/segmented_graph_wrapper.py``, ``qwen3_tts/qwen3_tts_code2wav.py`` and ``qwen3_tts/cuda_graph_decoder_wrapper.py``
under https://github.com/vllm-project/vllm-omni/tree/main/vllm_omni/model_executor/models; capture lines as in
https://github.com/vllm-project/vllm-omni/pull/1898.
"""

from __future__ import annotations

import re
from typing import NoReturn

from vgraph_lab.qwen3_tts.stateless import STATELESS_TARGET_ID
from vgraph_lab.qwen3_tts.stream_path import ICL_PREFIX_TARGET_ID, SUFFIX_TARGET_ID, XVEC_PREFIX_TARGET_ID

from .literals import counter_entries
from .records import REASONS, CallShape, CaptureRecord, MalformedError, Report, Sink

__all__ = ["BATCH_STATS", "SEGMENTED", "STATELESS", "VllmOmniFormat"]

SEGMENTED, BATCH_STATS, STATELESS = "vllm-omni segmented", "vllm-omni batch stats", "vllm-omni stateless"
FORWARD_TARGET = "qwen3_tts.code2wav"
"""Where batch statistics count: whole forwards, before they are split into Target calls."""

_SEGMENTED = re.compile(
    r"Segmented Code2Wav CUDA Graph stats: requests=(\d+) hits=(\d+) fallbacks=(\d+) hit_rate=[\d.]+% "
    r"replays=(\[.*\]) fallback_groups=(\[.*\])\s*$"
)
_BATCHES = re.compile(
    r"Code2Wav batch stats: forwards=(\d+) groups=(\d+) requests=(\d+) avg_group_size=[\d.]+ padded_frames=(\d+) decoded_frames=(\d+) "
    r"pad_ratio=[\d.]+% top_actual_frames=(\[.*\]) top_bucket_groups=(\[.*\])\s*$"
)
_STATELESS = re.compile(
    r"Code2Wav CUDA Graph stats: total=(\d+) hits=(\d+) fallbacks=(\d+) .*?hit_rate=[\d.]+% .*?"
    r"top_hits=(\[.*?\]) top_fallbacks=(\[.*\])\s*$"
)
_CAPTURED = re.compile(
    r"Captured (ICL prefix |xvec prefix |combined suffix |xvec suffix |stateless )?CUDA Graph for (?:batch=(\d+))? ?(?:size=(\d+))?$"
)
_CAPTURED_TARGETS = {
    "ICL prefix": ICL_PREFIX_TARGET_ID,
    "xvec prefix": XVEC_PREFIX_TARGET_ID,
    "combined suffix": SUFFIX_TARGET_ID,
    "xvec suffix": SUFFIX_TARGET_ID,
}
_SUFFIX = re.compile(r"suffix_(\d+)")
_LISTED, _LISTED_BATCHES = 20, 12


class VllmOmniFormat:
    """All of these lines; no state."""

    def read(self, line: int, process: str, message: str, sink: Sink) -> bool:
        """Take a line if it is one of them."""
        if "Segmented Code2Wav CUDA Graph stats:" in message:
            sink.report(process, _segmented(_match(_SEGMENTED, message)))
        elif "Code2Wav batch stats:" in message:
            sink.report(process, _batches(_match(_BATCHES, message)))
        elif "Code2Wav CUDA Graph stats: total=" in message:
            sink.report(process, _stateless(_match(_STATELESS, message)))
        elif message.startswith("Captured ") and (captured := _CAPTURED.match(message)):
            kind, rows, size = (captured[1] or "").strip(), captured[2], captured[3]
            target = _CAPTURED_TARGETS.get(kind, STATELESS_TARGET_ID)
            sink.capture(CaptureRecord(process, "vllm-omni captures", target, "graph", int(rows or 1), int(size) if size else None))
        else:
            return False
        return True

    def finish(self, sink: Sink) -> None:
        """Nothing is open."""


def _match(pattern: re.Pattern[str], message: str) -> re.Match[str]:
    found = pattern.search(message)
    if found is None:
        raise MalformedError("the line is cut or mixed with another")
    return found


def _segmented(found: re.Match[str]) -> Report:
    requests, hits, fallbacks = (int(found[i]) for i in (1, 2, 3))
    if hits + fallbacks != requests:
        raise MalformedError(f"hits={hits} and fallbacks={fallbacks} do not add up to requests={requests}")
    counts: dict[CallShape, int] = {}
    listed_hits = listed_fallbacks = 0
    replays, groups = counter_entries("replays", found[4]), counter_entries("fallback_groups", found[5])
    for key, n in replays:
        match key:
            case (str(phase), int(captured), int(rows)) if 1 <= rows <= captured:
                target, frames = _target(phase)
                outcome = "exact hit" if rows == captured else "padded hit"
                shape = CallShape(target, outcome, rows, frames, phase, captured_batch_size=captured, captured_frames=frames)
                counts[shape] = counts.get(shape, 0) + n
                listed_hits += rows * n
            case _:
                _wrong_key("replays", key)
    for key, n in groups:
        match key:
            case (str(name), int(rows)) if rows >= 1:
                phase, _, reason = name.partition(":")
                target, frames = _target(phase)
                shape = CallShape(target, "fallback", rows, frames, phase, reason=str(REASONS.get(reason, reason)))
                counts[shape] = counts.get(shape, 0) + n
                listed_fallbacks += rows * n
            case _:
                _wrong_key("fallback_groups", key)
    _check_listed("replays", listed_hits, hits, is_all=len(replays) < _LISTED)
    _check_listed("fallback_groups", listed_fallbacks, fallbacks, is_all=len(groups) < _LISTED)
    totals = {"rows": requests, "hits": hits, "fallbacks": fallbacks}
    return Report(SEGMENTED, "cumulative", counts, totals, is_complete=max(len(replays), len(groups)) < _LISTED)


def _target(phase: str) -> tuple[str, int | None]:
    suffix = _SUFFIX.fullmatch(phase)
    return (SUFFIX_TARGET_ID, int(suffix[1])) if suffix else (f"qwen3_tts.{phase}", None)


def _batches(found: re.Match[str]) -> Report:
    _, groups, requests, padded, decoded = (int(found[i]) for i in (1, 2, 3, 4, 5))
    counter_entries("top_actual_frames", found[6])
    counts: dict[CallShape, int] = {}
    listed = 0
    shapes = counter_entries("top_bucket_groups", found[7])
    for key, n in shapes:
        match key:
            case (int(rows), int(frames)) if rows >= 1 and frames >= 1:
                counts[CallShape(FORWARD_TARGET, "observed", rows, frames)] = n
                listed += n
            case _:
                _wrong_key("top_bucket_groups", key)
    _check_listed("top_bucket_groups", listed, groups, is_all=len(shapes) < _LISTED_BATCHES)
    totals = {"calls": groups, "requests": requests, "padded": padded, "decoded": decoded}
    return Report(BATCH_STATS, "cumulative", counts, totals, is_complete=len(shapes) < _LISTED_BATCHES)


def _stateless(found: re.Match[str]) -> Report:
    total, hits, fallbacks = (int(found[i]) for i in (1, 2, 3))
    counts: dict[CallShape, int] = {}
    lists = {"hit": counter_entries("top_hits", found[4]), "fallback": counter_entries("top_fallbacks", found[5])}
    for outcome, entries in lists.items():
        for key, n in entries:
            match key:
                case (int(rows), int(frames), int(padded)) if outcome == "hit" and rows >= 1 and 1 <= frames <= padded:
                    exact = "exact hit" if frames == padded else "padded hit"
                    shape = CallShape(STATELESS_TARGET_ID, exact, rows, frames, captured_batch_size=rows, captured_frames=padded)
                case (int(rows), int(frames), _) if outcome == "fallback" and rows >= 1 and frames >= 1:
                    shape = CallShape(STATELESS_TARGET_ID, outcome, rows, frames)
                case _:
                    _wrong_key(f"top_{outcome}s", key)
            counts[shape] = counts.get(shape, 0) + n
    # Calls that a compiled decoder served are hits without a graph's shape, so lists that name everything may fall short.
    _check_listed("top_hits", sum(n for _, n in lists["hit"]), hits, is_all=False)
    _check_listed("top_fallbacks", sum(n for _, n in lists["fallback"]), fallbacks, is_all=False)
    totals = {"calls": total, "hits": hits, "fallbacks": fallbacks}
    return Report(STATELESS, "cumulative", counts, totals, is_complete=max(map(len, lists.values())) < _LISTED_BATCHES)


def _check_listed(name: str, listed: int, total: int, *, is_all: bool) -> None:
    if listed > total or (is_all and listed != total):
        raise MalformedError(f"{name} lists {listed}, the total is {total}")


def _wrong_key(name: str, key: object) -> NoReturn:
    raise MalformedError(f"{name} has a key of another kind: {key!r}")
