"""One streamed request, chunk by chunk: which Target ran each chunk and how, and what the request keeps afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from vgraph_lab.errors import InputError, RequestError
from vgraph_lab.graphs.descriptor import Descriptor
from vgraph_lab.graphs.stats import CallKind
from vgraph_lab.qwen3_tts.stream_path import StreamingPath
from vgraph_lab.requests import ChunkRequest
from vgraph_lab.runner import GPUGenerationModelRunner

from .coverage import outcome_of
from .stream_calls import calls_between, streaming_of

__all__ = ["LIFE_COLUMNS", "STATE_COLUMNS", "RequestLife", "Samples", "play_request", "state_table"]

Samples: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"

LIFE_COLUMNS = {
    "chunk": "position in the request, from 0",
    "ref_frames": "frames of reference that came with it",
    "new_frames": "frames to speak",
    "kept_before_frames": "new frames kept from earlier chunks",
    "kept_after_frames": "new frames kept for later ones; missing once the request is over",
    "target": "id of the Target that ran; empty if none did",
    "requested": "exact shape of its call",
    "outcome": "exact hit, padded hit, fallback or error; refused (nothing ran) or ended (no frames came)",
    "captured": "Descriptor of the graph that served; empty for none",
    "why": "reason of a fallback, kind of a refusal; otherwise empty",
    "padding_frames": "rows x frames computed for nothing",
    "samples": "samples that came back",
    "state_kib": "size of the request's state afterwards; missing once the request is over",
    "message": "the error in words; empty for none",
    "served_s": "seconds of the call, until the samples were there",
}
"""The columns of :attr:`RequestLife.table`, in order, with their meaning. Units are in the names."""

STATE_COLUMNS = {
    "field": "name of the tensor",
    "part": "prefix (what the reference left behind, constant) or suffix (what the new frames left, replaced by every chunk)",
    "shape": "of one request",
    "size_kib": "bytes of one request",
    "purpose": "what the next chunk needs it for",
}
"""The columns of :func:`state_table`, in order, with their meaning."""

_PURPOSES = {
    "keys_values": "attention: new frames look back at the reference",
    "quantized_tail": "convolution context of the first new frames",
    "hidden_tail": "left context of the first samples",
    "pad_frames": "padding of a short reference, which attention masks",
    "quantized": "convolution context of the next chunk, and of the oldest kept frames",
    "conv": "kept frames, for the transformer to run over again",
}


@dataclass(frozen=True)
class RequestLife:
    """What became of a request.

    Attributes:
        request_id: its name.
        table: one row per chunk, with the columns of :data:`LIFE_COLUMNS`.
        pieces: the samples of each chunk, float32 [samples] on the host; empty for a chunk that gave none.
        error: why it ended early; None if it did not.
    """

    request_id: str
    table: pd.DataFrame
    pieces: tuple[Samples, ...]
    error: RequestError | None

    @property
    def samples(self) -> Samples:
        """All samples that came back, float32 [samples] on the host."""
        return np.concatenate([np.zeros(0, np.float32), *self.pieces])

    @property
    def is_all_hits(self) -> bool:
        """Whether graphs served every chunk that brought frames."""
        return set(self.table["outcome"]) <= {"exact hit", "padded hit", "ended"}

    def route(self) -> str:
        """What became of the chunks, in words: ``6 chunks: 5 exact hits, 1 padded hit``."""
        rows = zip(self.table["outcome"], self.table["why"], strict=True)
        kinds = Counter(f"{outcome}: {why}" if why else str(outcome) for outcome, why in rows)
        return f"{_counted(len(self.table), 'chunk')}: " + ", ".join(_counted(count, kind) for kind, count in kinds.items())


def play_request(runner: GPUGenerationModelRunner, chunks: Iterable[ChunkRequest]) -> RequestLife:
    """Play chunks of one request through a runner, one by one and alone, and note what happens to each.

    A refused chunk is noted like any other. Play while nobody else calls the runner: calls are told apart by their counts.

    Raises:
        InputError: no chunks, chunks of several requests, a model that does not stream, or somebody else's calls.
        LifecycleError: the runner is not ready.
    """
    chunks = list(chunks)
    ids = sorted({chunk.request_id for chunk in chunks})
    if len(ids) != 1:
        raise InputError(f"chunks of one request are needed, got {', '.join(ids) or 'none'}. Play each request by itself.")
    streaming = streaming_of(runner)
    rows: list[dict[str, Any]] = []
    pieces: list[Tensor] = []
    error: RequestError | None = None
    for number, chunk in enumerate(chunks):
        kept_before, _ = _state(streaming, chunk.request_id)
        before, start = runner.stats(), perf_counter()
        result = runner.execute_model([chunk])[chunk.request_id]
        runner.backend.synchronize()
        seconds = perf_counter() - start
        calls = list(calls_between(before, runner.stats()).elements())
        if len(calls) > 1:
            raise InputError(f"{len(calls)} calls were counted for one chunk. Play a request while nobody else calls the runner.")
        kept_after, state_bytes = _state(streaming, chunk.request_id)
        if isinstance(result, RequestError):
            error = error or result
        pieces.append(result if isinstance(result, Tensor) else torch.zeros(0))
        rows.append(
            {
                "chunk": number,
                "ref_frames": chunk.ref_frames,
                "new_frames": _new_frames(chunk, is_first=not kept_before),
                "kept_before_frames": kept_before or 0,
                "kept_after_frames": kept_after,
                **_served(calls[0] if calls else None, result),
                "samples": 0 if isinstance(result, RequestError) else len(result),
                "state_kib": None if state_bytes is None else state_bytes / 1024,
                "served_s": seconds,
            }
        )
    table = pd.DataFrame(rows, columns=list(LIFE_COLUMNS)).astype({"kept_after_frames": "Int64", "state_kib": "float64"})
    return RequestLife(ids[0], table, tuple(piece.cpu().numpy() for piece in pieces), error)


def _new_frames(chunk: ChunkRequest, *, is_first: bool) -> int:
    """Frames that a chunk brings; the reference comes with the first one only, whatever later ones repeat."""
    if not isinstance(chunk.codes, Tensor) or chunk.codes.dim() != 2:
        return 0  # refused
    return max(0, chunk.codes.shape[1] - (chunk.ref_frames if is_first and isinstance(chunk.ref_frames, int) else 0))


def state_table(runner: GPUGenerationModelRunner, request_id: str) -> pd.DataFrame:
    """What a live request keeps between two chunks: one row per tensor.

    Returns:
        The columns of :data:`STATE_COLUMNS`.

    Raises:
        InputError: no such live request, or a model that does not stream.
        LifecycleError: no model is loaded (any more).
    """
    _, prefix, suffix = streaming_of(runner).state_of(request_id)
    fields = [("prefix", name, value) for name, value in (prefix._asdict() if prefix else {}).items()]
    fields += [("suffix", name, value) for name, value in suffix._asdict().items()]
    rows = [
        {
            "field": name,
            "part": part,
            "shape": " × ".join(map(str, value.shape[1:])) or "1",
            "size_kib": value.nbytes / 1024,
            "purpose": _PURPOSES[name],
        }
        for part, name, value in fields
    ]
    return pd.DataFrame(rows, columns=list(STATE_COLUMNS))


def _state(streaming: StreamingPath, request_id: str) -> tuple[int | None, int | None]:
    """Kept frames and bytes of a live request's state; None for others."""
    if request_id not in streaming.book.live:
        return None, None
    _, prefix, suffix = streaming.state_of(request_id)
    return suffix.quantized.shape[-1], sum(field.nbytes for field in (*(prefix or ()), *suffix))


def _served(call: CallKind | None, result: Tensor | RequestError) -> dict[str, Any]:
    refused = isinstance(result, RequestError)
    told = {"why": str(result.kind), "message": str(result)} if isinstance(result, RequestError) else {"why": "", "message": ""}
    if call is None:
        return {"target": "", "requested": "", "outcome": "refused" if refused else "ended", "captured": "", "padding_frames": 0, **told}
    captured = call.descriptor
    return {
        "target": call.target_id,
        "requested": str(call.key),
        "outcome": outcome_of(call),
        "captured": str(captured or ""),
        "why": told["why"] or str(call.reason or ""),
        "padding_frames": 0 if captured is None else _frames(captured) - _frames(call.key),
        "message": told["message"],
    }


def _frames(shape: Descriptor) -> int:
    return shape.batch_size * shape.frames


def _counted(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    head, colon, reason = noun.partition(":")
    return f"{count} {head}" + ("s" if head in ("chunk", "exact hit", "padded hit", "fallback", "error") else "") + colon + reason
