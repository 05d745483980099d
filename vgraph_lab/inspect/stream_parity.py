"""A streamed request through graphs against the same request through eager, and against its utterance decoded whole."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import torch

from vgraph_lab.errors import InputError

from .audio import EXACT, Tolerance, Waveform, WaveformDifference, dbfs, tolerance_for, verdict, waveform_difference
from .request_life import RequestLife, Samples

__all__ = ["STREAM_PARITY_COLUMNS", "StreamComparison", "chunk_differences", "compare_streams"]

STREAM_PARITY_COLUMNS = {
    "request": "id of the request",
    "chunk": "position in the request, from 0",
    "new_frames": "frames that it speaks",
    "kept_before_frames": "new frames kept from earlier chunks",
    "outcome": "how the chunk was served",
    "why": "reason of a fallback, kind of a refusal; otherwise empty",
    "samples": "samples compared",
    "max_dbfs": "largest absolute difference, dB relative to full scale; −inf for identical",
    "rms_dbfs": "RMS of the difference, likewise",
    "snr_db": "energy of the reference over energy of the difference",
}
"""The columns of :func:`chunk_differences`, in order; a comparison with eager has ``allowed_dbfs`` and ``agreement``, too."""


def chunk_differences(reference: Waveform, life: RequestLife) -> pd.DataFrame:
    """How each chunk's samples differ from the same samples of a reference.

    Args:
        reference: waveform [samples], as long as the request's.
        life: the request.

    Raises:
        InputError: the lengths differ, or the reference is no vector of floating-point numbers.
    """
    rows = [{**_facts(life, row), **_figures(difference)} for row, difference in _by_chunk(reference, life)]
    return pd.DataFrame(rows, columns=list(STREAM_PARITY_COLUMNS))


@dataclass(frozen=True)
class StreamComparison:
    """One request, streamed twice.

    Attributes:
        name: the request's id.
        eager: its samples through eager, float32 [samples].
        graph: through graphs, likewise.
        life: what happened to each chunk on the way through graphs.
        table: one row per chunk that gave samples: :data:`STREAM_PARITY_COLUMNS`, ``allowed_dbfs`` and ``agreement``.
        difference: of all samples.
    """

    name: str
    eager: Samples
    graph: Samples
    life: RequestLife
    table: pd.DataFrame
    difference: WaveformDifference

    @property
    def passed(self) -> bool:
        """Whether every chunk is as equal as it must be."""
        return len(self.table) > 0 and not (self.table["agreement"] == "DIFFERS").any()

    @property
    def text(self) -> str:
        """The outcome in words."""
        counts = self.table["agreement"].value_counts(sort=False)
        return ", ".join(f"{count} {'chunk' if count == 1 else 'chunks'} {agreement}" for agreement, count in counts.items())


def compare_streams(
    eager: RequestLife, graph: RequestLife, *, device: str | torch.device, tolerance: Tolerance | None = None
) -> StreamComparison:
    """Compare a request that was streamed through eager with the same chunks streamed through graphs.

    Exact hits and fallbacks must equal eager bit for bit; padded hits may differ by rounding.

    Args:
        eager: life of the request in a runner without graphs.
        graph: its life in a runner with graphs.
        device: where both ran; it decides how much rounding is accepted.
        tolerance: for padded hits, in place of :func:`~vgraph_lab.inspect.audio.tolerance_for` float32 there.

    Raises:
        InputError: the two gave different numbers of samples, or none.
    """
    rounding = tolerance or tolerance_for(torch.float32, torch.device(device))
    rows = []
    for row, difference in _by_chunk(eager.samples, graph):
        allowed = rounding if row["outcome"] == "padded hit" else EXACT
        passed = verdict(difference, allowed).passed
        agreement = "DIFFERS" if not passed else "bit for bit" if difference.is_identical else "within tolerance"
        rows.append({**_facts(graph, row), **_figures(difference), "allowed_dbfs": dbfs(allowed.max_abs), "agreement": agreement})
    table = pd.DataFrame(rows, columns=[*STREAM_PARITY_COLUMNS, "allowed_dbfs", "agreement"])
    whole = waveform_difference(eager.samples, graph.samples)
    return StreamComparison(graph.request_id, eager.samples, graph.samples, graph, table, whole)


def _by_chunk(reference: Waveform, life: RequestLife) -> list[tuple[dict[str, object], WaveformDifference]]:
    expected = reference.shape[-1] if reference.ndim else 0
    if reference.ndim != 1 or expected != len(life.samples) or not expected:
        raise InputError(
            f"{life.request_id} gave {len(life.samples)} samples and the reference has the shape {list(reference.shape)}. "
            "Compare vectors of one length, with at least one sample."
        )
    found, start = [], 0
    for row, piece in zip(life.table.to_dict("records"), life.pieces, strict=True):
        if len(piece):
            part = reference[start : start + len(piece)]
            found.append(({str(key): value for key, value in row.items()}, waveform_difference(part, piece)))
            start += len(piece)
    return found


def _facts(life: RequestLife, row: dict[str, object]) -> dict[str, object]:
    return {"request": life.request_id, **{name: row[name] for name in STREAM_PARITY_COLUMNS if name in row}}


def _figures(difference: WaveformDifference) -> dict[str, float]:
    return {"max_dbfs": difference.max_dbfs, "rms_dbfs": difference.rms_dbfs, "snr_db": difference.snr_db}
