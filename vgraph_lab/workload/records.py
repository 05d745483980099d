"""What a simulated service leaves behind: a row per chunk, a row per request, and the figures a service is judged by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import pandas as pd
from torch import Tensor

from .traffic import ServiceRequest

__all__ = ["ChunkRecord", "ServiceResult", "ServiceSummary"]


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One executed chunk. Times are seconds since the service began.

    Attributes:
        request: id of the request.
        chunk: its number in the request, from 0.
        frames: new frames.
        ref_frames: frames of reference that came with it.
        is_last: whether it ended the request.
        available_s: when its last frame (or the news of the end) had come.
        started_s: when the step that ran it began.
        finished_s: when the step was over.
        step: number of the step, from 0.
        batch_size: chunks in that step.
        samples: samples that it gave.
        error: why it gave none, or an empty string.
    """

    request: str
    chunk: int
    frames: int
    ref_frames: int
    is_last: bool
    available_s: float
    started_s: float
    finished_s: float
    step: int
    batch_size: int
    samples: int
    error: str


@dataclass(frozen=True, slots=True)
class ServiceSummary:
    """The figures that a service is judged by. Latencies are those of successful requests; None where there is none.

    Attributes:
        requests: requests that were played.
        successes: requests whose every chunk was served.
        duration_s: from the first request's beginning to the last chunk's end.
        requests_per_s: successful requests per second of it.
        audio_s_per_s: seconds of their speech per second of it.
        mean_e2e_s: end-to-end latency, from a request's beginning to its last samples.
        p99_e2e_s: its 99th percentile, interpolated linearly.
        mean_rtf: real-time factor: end-to-end latency over seconds of speech.
        mean_ttfp_s: time to the first audio packet.
        p99_ttfp_s: its 99th percentile.
        underruns: chunks that came after a listener, who plays from the first packet on, had run out of audio.
        steps: executions.
        mean_batch_size: chunks per execution.
        busy_share: share of the duration in which something was executed.
    """

    requests: int
    successes: int
    duration_s: float
    requests_per_s: float | None
    audio_s_per_s: float | None
    mean_e2e_s: float | None
    p99_e2e_s: float | None
    mean_rtf: float | None
    mean_ttfp_s: float | None
    p99_ttfp_s: float | None
    underruns: int
    steps: int
    mean_batch_size: float
    busy_share: float | None

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return "\n".join(f"{name.ljust(16)}  {'none' if value is None else f'{value:.4g}'}" for name, value in values.items())


@dataclass(frozen=True)
class ServiceResult:
    """Everything that a simulated service recorded.

    Attributes:
        chunks: one row per executed chunk, in order of execution; columns as in :class:`ChunkRecord`, and ``stalled_s``:
            how long a listener waited for it.
        requests: one row per request, indexed by id: ``utterance``, ``ref_frames``, ``frames``, ``chunks``, ``began_s``,
            ``ttfp_s``, ``e2e_s``, ``audio_s``, ``rtf``, ``underruns``, ``stalled_s``, ``success``, ``error``.
        audio: request id → its samples, float32 [samples] on the host; empty unless they were to be kept.
    """

    chunks: pd.DataFrame
    requests: pd.DataFrame
    audio: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        requests: Sequence[ServiceRequest],
        records: Sequence[ChunkRecord],
        began_s: Mapping[str, float],
        *,
        sample_rate: int,
        audio: Mapping[str, Tensor],
    ) -> ServiceResult:
        """Tables of what was recorded.

        Args:
            requests: what was played.
            records: all chunks, in order of execution.
            began_s: request id → when it began.
            sample_rate: of the samples, in Hz.
            audio: see the class.
        """
        stalls = _stalls(records, sample_rate)
        chunks = pd.DataFrame([{**asdict(record), "stalled_s": stall} for record, stall in zip(records, stalls, strict=True)])
        rows = []
        for request in requests:
            own = chunks[chunks["request"] == request.id]
            audio_s = int(own["samples"].sum()) / sample_rate
            e2e_s = float(own["finished_s"].iloc[-1]) - began_s[request.id]
            heard = own[own["samples"] > 0]
            error = str(own["error"].iloc[-1])
            rows.append(
                {
                    "request": request.id,
                    "utterance": request.utterance,
                    "ref_frames": int(own["ref_frames"].sum()),
                    "frames": request.frames,
                    "chunks": len(own),
                    "began_s": began_s[request.id],
                    "ttfp_s": float(heard["finished_s"].iloc[0]) - began_s[request.id] if len(heard) else math.nan,
                    "e2e_s": e2e_s,
                    "audio_s": audio_s,
                    "rtf": e2e_s / audio_s if audio_s else math.nan,
                    "underruns": int((own["stalled_s"] > 0).sum()),
                    "stalled_s": float(own["stalled_s"].sum()),
                    "success": not error and bool(own["is_last"].iloc[-1]) and audio_s > 0,
                    "error": error,
                }
            )
        return cls(chunks, pd.DataFrame(rows).set_index("request"), audio)

    def summary(self) -> ServiceSummary:
        """The figures that the service is judged by."""
        good = self.requests[self.requests["success"]]
        steps = self.chunks.drop_duplicates("step")
        duration_s = float(self.chunks["finished_s"].max() - self.requests["began_s"].min())
        busy_s = float((steps["finished_s"] - steps["started_s"]).sum())
        return ServiceSummary(
            requests=len(self.requests),
            successes=len(good),
            duration_s=duration_s,
            requests_per_s=len(good) / duration_s if duration_s else None,
            audio_s_per_s=float(good["audio_s"].sum()) / duration_s if duration_s else None,
            mean_e2e_s=_mean(good["e2e_s"]),
            p99_e2e_s=_p99(good["e2e_s"]),
            mean_rtf=_mean(good["rtf"]),
            mean_ttfp_s=_mean(good["ttfp_s"]),
            p99_ttfp_s=_p99(good["ttfp_s"]),
            underruns=int(good["underruns"].sum()),
            steps=len(steps),
            mean_batch_size=len(self.chunks) / len(steps),
            busy_share=busy_s / duration_s if duration_s else None,
        )


def _stalls(records: Sequence[ChunkRecord], sample_rate: int) -> list[float]:
    """How long a listener, who plays from the first samples on, waits for each chunk."""
    plays_until: dict[str, float] = {}
    stalls = []
    for record in records:
        runs_out_s = plays_until.get(record.request, record.finished_s)
        stall = max(0.0, record.finished_s - runs_out_s) if record.samples else 0.0
        stalls.append(stall)
        if record.samples:
            plays_until[record.request] = runs_out_s + stall + record.samples / sample_rate
    return stalls


def _mean(values: pd.Series[float]) -> float | None:
    return float(values.mean()) if len(values) else None


def _p99(values: pd.Series[float]) -> float | None:
    return float(np.percentile(values, 99)) if len(values) else None
