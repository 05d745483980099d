"""``vgraph-lab bench service``: a simulated service, eager and through graphs, in one run on the same weights.

Both runners serve the same requests (:mod:`vgraph_lab.workload`), in turn and several times; which one goes first
alternates. Time is virtual: codes arrive at the talker's pace, and a step takes what running it takes until the samples
are on the host. Every figure is the median of the runs; ``low`` and ``high`` are the extremes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from vgraph_lab import bundled
from vgraph_lab.config import ConnectorConfig
from vgraph_lab.errors import InputError, MissingExtraError
from vgraph_lab.inspect.recogniser import Recogniser, WhisperTiny
from vgraph_lab.inspect.speech_metrics import word_errors
from vgraph_lab.qwen3_tts.codes import read_codes
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.workload import RequestKind, ServiceRequest, ServiceResult, ServiceSummary, draw_requests, simulate_service

from .record import MeasurementRecord, describe_machine
from .runners import Progress, runner_pair

__all__ = ["Speech", "bench_service", "find_recogniser", "speech_for"]

_CAPTURE_BATCH_SIZES = (1, 4, 16, 64)
# What is compared: name with its unit, and the figure of a summary.
_FIGURES: dict[str, Callable[[ServiceSummary], float | None]] = {
    "requests_per_s": lambda s: s.requests_per_s,
    "audio_s_per_s": lambda s: s.audio_s_per_s,
    "mean_e2e_ms": lambda s: _ms(s.mean_e2e_s),
    "p99_e2e_ms": lambda s: _ms(s.p99_e2e_s),
    "mean_rtf": lambda s: s.mean_rtf,
    "mean_ttfp_ms": lambda s: _ms(s.mean_ttfp_s),
    "p99_ttfp_ms": lambda s: _ms(s.p99_ttfp_s),
    "successes": lambda s: s.successes,
    "underruns": lambda s: s.underruns,
    "mean_batch_size": lambda s: s.mean_batch_size,
    "busy_percent": lambda s: None if s.busy_share is None else 100 * s.busy_share,
}


@dataclass(frozen=True)
class Speech:
    """What is said.

    Attributes:
        codes: utterance → integers [num_quantizers, T].
        speakers: utterance → who says it.
        texts: English utterance → its words; empty if the codes are no speech.
    """

    codes: Mapping[str, Tensor]
    speakers: Mapping[str, str]
    texts: Mapping[str, str]


def speech_for(decoder: Code2WavDecoder, folder: Path | None) -> Speech:
    """The evaluation clips of a checkpoint that has some; for others, random codes as long as the bundled clips.

    Args:
        decoder: what will decode the codes.
        folder: its checkpoint; None for random weights.
    """
    speaks = folder is not None and (folder / "utterances").is_dir()
    clips = bundled.utterances(folder if speaks else None)
    codes = {clip.id: read_codes(clip.codes_file)[clip.id] for clip in clips}
    if speaks:
        texts = {clip.id: clip.text for clip in clips if clip.language == "en"}
        return Speech(codes, {clip.id: clip.speaker for clip in clips}, texts)
    draw, g = torch.Generator().manual_seed(0), decoder.geometry
    random = {name: torch.randint(0, g.codebook_size, (g.num_quantizers, given.shape[1]), generator=draw) for name, given in codes.items()}
    return Speech(random, {}, {})


def find_recogniser(speech: Speech) -> Recogniser | str:
    """The offline recogniser, or why words cannot be counted."""
    if not speech.texts:
        return "these weights come without clips that they speak"
    try:
        return WhisperTiny(threads=torch.get_num_threads())
    except MissingExtraError as error:
        return str(error)


def bench_service(
    decoder: Code2WavDecoder,
    speech: Speech,
    *,
    requests: int = 32,
    concurrency: int = 16,
    talker_frames_per_s: float = 50.0,
    kind: RequestKind = "mixed",
    connector: ConnectorConfig | None = None,
    repeats: int = 5,
    seed: int = 0,
    algorithm: str = "published",
    form: str | None = None,
    recogniser: Recogniser | str = "not asked for",
    settings: dict[str, Any] | None = None,
    progress: Progress = lambda _: None,
) -> MeasurementRecord:
    """Serve the same requests eager and through graphs.

    Args:
        decoder: what to measure; its device chooses the graph backend.
        speech: what is said.
        requests: how many requests.
        concurrency: how many of them are live at once.
        talker_frames_per_s: pace at which each live request's codes arrive.
        kind: with a reference (``icl``), without (``xvec``) or both in turn (``mixed``).
        connector: how chunks are delivered; by default 1 frame first, then 25, and at most 72 of reference.
        repeats: how often each side serves them.
        seed: of the choice of utterances and references.
        algorithm: ``published`` or ``incremental``, as the setting ``streaming_algorithm``.
        form: ``plain``, ``fast`` or ``compiled``: of the graphs' step with the incremental algorithm; None for the default. One that
            cannot run here is replaced by the plain one, which the record then names, and why.
        recogniser: counts the word errors of each side's first run; a string says why that is not done.
        settings: what else describes the decoder (checkpoint or geometry), for the record.
        progress: told what is being done.

    Returns:
        A record with one row per figure: ``metric``, ``eager``, ``graphs`` and ``change_percent`` (of graphs against eager), the
        extremes of the runs, and for a figure that is missing, ``absent_because``.

    Raises:
        ConfigError: an algorithm or a form that does not exist.
        InputError: repeats, requests or concurrency below 1, a pace that is none, or a form with the published algorithm.
    """
    if repeats < 1 or concurrency < 1:
        raise InputError(f"repeats and concurrency must be at least 1, got {repeats} and {concurrency}.")
    if not talker_frames_per_s > 0:
        raise InputError(f"talker_frames_per_s must be above 0, got {talker_frames_per_s}.")
    connector = connector or ConnectorConfig()
    batch_sizes = sorted({*(size for size in _CAPTURE_BATCH_SIZES if size < concurrency), concurrency})
    traffic = draw_requests(requests, kind=kind, codes=speech.codes, speakers=speech.speakers, seed=seed)
    kept: dict[str, ServiceResult] = {}
    summaries: dict[str, list[ServiceSummary]] = {"eager": [], "graphs": []}
    with runner_pair(
        decoder, connector, batch_sizes=batch_sizes, max_num_seqs=concurrency, progress=progress, algorithm=algorithm, form=form
    ) as pair:

        def serve(variant: str, run: str, played: tuple[ServiceRequest, ...], *, keep_audio: bool = False) -> ServiceResult:
            return simulate_service(
                pair.runners[variant],
                played,
                connector,
                concurrency=concurrency,
                talker_frames_per_s=talker_frames_per_s,
                sample_rate=decoder.sample_rate,
                keep_audio=keep_audio,
                id_prefix=f"{run}-",
                progress=False,
            )

        for variant in summaries:
            progress(f"warming up, {variant}")
            serve(variant, "warm-up", traffic[:concurrency])
        before = pair.runners["graphs"].stats()
        for repeat in range(repeats):
            for variant in list(summaries)[:: -1 if repeat % 2 else 1]:
                progress(f"serving {requests} requests, {variant}, run {repeat + 1} of {repeats}")
                result = serve(variant, f"run{repeat}", traffic, keep_audio=repeat == 0 and not isinstance(recogniser, str))
                kept.setdefault(variant, result)
                summaries[variant].append(result.summary())
        after = pair.runners["graphs"].stats()
        capture, form_found = pair.capture_figures(), pair.form
    rows = [_row(metric, {name: [figure(s) for s in runs] for name, runs in summaries.items()}) for metric, figure in _FIGURES.items()]
    progress("counting word errors")
    rows.append(_word_error_row(kept, speech, recogniser, decoder.sample_rate))
    described = {
        **(settings or {}),
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "algorithm": algorithm,
        **form_found,
        "requests": requests,
        "concurrency": concurrency,
        "talker_frames_per_s": talker_frames_per_s,
        "kind": kind,
        "connector": connector.model_dump(),
        "repeats": repeats,
        "seed": seed,
        "frames": sum(request.frames for request in traffic),
        "capture_batch_sizes": batch_sizes,
        "capture": capture,
        "graph_hits": after.hits() - before.hits(),
        "graph_fallbacks": after.fallbacks() - before.fallbacks(),
        "runs": [{"variant": name, **asdict(summary)} for name, runs in summaries.items() for summary in runs],
    }
    return MeasurementRecord("service", described, rows, describe_machine(decoder.device))


def _row(metric: str, runs: Mapping[str, list[float | None]]) -> dict[str, Any]:
    row: dict[str, Any] = {"metric": metric}
    known = {name: [value for value in values if value is not None] for name, values in runs.items()}
    for name, values in known.items():
        row[name] = median(values) if values else None
    row["change_percent"] = 100 * (row["graphs"] / row["eager"] - 1) if row["eager"] and row["graphs"] is not None else None
    for name, values in known.items():
        row |= {f"{name}_low": min(values, default=None), f"{name}_high": max(values, default=None)}
    return row | {"absent_because": None if all(known.values()) else "no request was served to its end"}


def _word_error_row(results: Mapping[str, ServiceResult], speech: Speech, recogniser: Recogniser | str, sample_rate: int) -> dict[str, Any]:
    metric = "word_error_rate_percent"
    if isinstance(recogniser, str):
        return _row(metric, {"eager": [None], "graphs": [None]}) | {"absent_because": recogniser}
    rates = {name: [_word_error_rate_percent(result, speech, recogniser, sample_rate)] for name, result in results.items()}
    return _row(metric, rates) | {"absent_because": None if rates["eager"] != [None] else "no English request was served"}


def _word_error_rate_percent(result: ServiceResult, speech: Speech, recogniser: Recogniser, sample_rate: int) -> float | None:
    """Errors over words of all English requests together."""
    errors, words = 0, 0
    served = result.requests[result.requests["success"]]
    for name, utterance in served["utterance"].items():
        if utterance in speech.texts:
            said = recogniser.words(speech.texts[utterance])
            heard = recogniser.words(recogniser.transcribe(result.audio[str(name)], sample_rate))
            errors, words = errors + word_errors(said, heard), words + len(said)
    return 100 * errors / words if words else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
