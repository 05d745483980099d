"""Our own contenders: configurations of the model, each behind a runner of its own.

A runner's calls are prepared with their requests, so that a timed call is ``execute_model`` and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from vgraph_lab.config import ConnectorConfig, StageConfig
from vgraph_lab.errors import ConfigError, RequestError
from vgraph_lab.graphs.entry import GraphEntry
from vgraph_lab.qwen3_tts.code2wav import Qwen3TTSCode2Wav
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.incremental_path import INCREMENTAL_TARGET_ID, IncrementalPath
from vgraph_lab.requests import ChunkRequest
from vgraph_lab.runner import GPUGenerationModelRunner

from .contender import NotRunError, Streams
from .forms import FormInUse, form_in_use, state_for_comparison
from .runners import Progress

__all__ = ["BASELINE", "OWN", "Form", "RunnerContender", "RunnerStreams"]

BASELINE = "published-eager"
_names = count()


@dataclass(frozen=True)
class Form:
    """A configuration of our own to measure.

    Attributes:
        what: in a few words.
        algorithm: ``streaming_algorithm``.
        form: ``targets.qwen3_tts.incremental.form``; None leaves it as it is by default.
        has_graphs: replay graphs, or run eager.
        only_if_asked: leave it out unless it is named, with this reason.
    """

    what: str
    algorithm: str
    form: str | None = None
    has_graphs: bool = True
    only_if_asked: str | None = None

    def stage(self, connector: ConnectorConfig, batch_sizes: Sequence[int], max_num_seqs: int) -> dict[str, Any]:
        """Its configuration."""
        keys: dict[str, Any] = {"capture_batch_sizes": sorted(batch_sizes), "streaming_algorithm": self.algorithm}
        if self.form is not None:
            keys["targets"] = {INCREMENTAL_TARGET_ID: {"form": self.form}}
        return {
            "connector": connector.model_dump(),
            "max_num_seqs": max_num_seqs,
            "enforce_eager": not self.has_graphs,
            "vocoder_cudagraph": keys,
        }


OWN = {
    BASELINE: Form("the published design, which decodes context again for every chunk; eager", "published", has_graphs=False),
    "published-graphs": Form("the published design through graphs", "published"),
    "incremental-eager": Form("each chunk by itself, exact; eager", "incremental", has_graphs=False),
    "incremental-graphs": Form("each chunk by itself, through graphs", "incremental"),
    "incremental-fast": Form("the same in channels-last with kernels of our own, through graphs", "incremental", "fast"),
    "incremental-compiled": Form(
        "the same compiled by torch.compile, through graphs",
        "incremental",
        "compiled",
        only_if_asked="compiling takes minutes. Name it in --contenders, or ask for all of them",
    ),
}
"""Our own contenders by name, in the order in which they are shown."""


class RunnerStreams:
    """Live requests of one runner."""

    def __init__(self, runner: GPUGenerationModelRunner, rows: int) -> None:
        self._runner = runner
        self.ids = [f"compare-{next(_names)}" for _ in range(rows)]

    def prepare(self, codes: Tensor) -> Callable[[], Sequence[Tensor]]:
        requests = [ChunkRequest(name, row) for name, row in zip(self.ids, codes.unbind(0), strict=True)]
        runner = self._runner

        def run() -> Sequence[Tensor]:
            return [_samples(result) for result in runner.execute_model(requests).values()]

        return run

    def close(self) -> None:
        self._runner.abort(self.ids)


def _samples(result: Tensor | RequestError) -> Tensor:
    if isinstance(result, RequestError):
        raise result
    return result


class RunnerContender:
    """One of :data:`OWN` behind a runner, captured.

    Args:
        name: its name there.
        form: what it is.
        decoder: the decoder; its device and dtype are the contender's.
        connector: how chunks are delivered.
        batch_sizes: row counts to capture.
        progress: told each graph that is captured.

    Raises:
        NotRunError: the settings do not know the form, or the model runs another one.
    """

    def __init__(
        self,
        name: str,
        form: Form,
        decoder: Code2WavDecoder,
        connector: ConnectorConfig,
        batch_sizes: Sequence[int],
        progress: Progress = lambda _: None,
    ) -> None:
        self.name, self.what = name, form.what
        progress(f"{name}: getting ready")
        stage = form.stage(connector, batch_sizes, max_num_seqs=2 * max(batch_sizes))  # steady streams, and those that begin beside them
        begin = perf_counter()
        with ExitStack() as stack:
            try:
                cfg = StageConfig.from_dict(stage)
                self.model = Qwen3TTSCode2Wav(decoder, cfg)
            except ConfigError as error:
                if form.form is None:
                    raise
                raise NotRunError(f"the settings refuse the form {form.form!r}: {error}") from error
            self._check_form(form)
            self.runner = stack.enter_context(GPUGenerationModelRunner(cfg, decoder.device))
            self.runner.load_model(self.model)
            self.report = self.runner.capture_model((lambda step: progress(f"{name}: capturing {step}")) if form.has_graphs else False)
            if form.has_graphs and not self.report.captured:
                why = [f"{outcome.descriptor}: {outcome.rejection.detail}" for outcome in self.report.outcomes if outcome.rejection]
                raise NotRunError(f"none of its {self.report.requested} graphs could be captured ({why[0] if why else 'no reason given'})")
            in_use = self._check_form(form)  # again: a capture may have fallen back
            self._stack = stack.pop_all()
        self.facts: dict[str, Any] = {
            "form": in_use and in_use.form,
            "form_error_ratio": in_use and in_use.error_ratio,
            "ready_seconds": perf_counter() - begin,
            "state_bytes_per_request": self._state_bytes(),
            **self._capture_figures(),
        }

    def _check_form(self, asked: Form) -> FormInUse | None:
        path = self.model.incremental
        in_use = form_in_use(path) if path else None
        if asked.form is not None and in_use is not None and in_use.form != asked.form:
            raise NotRunError(f"asked for the form {asked.form!r}, the model runs {in_use.form!r}: {in_use.reason or 'no reason given'}")
        return in_use

    @property
    def incremental(self) -> IncrementalPath | None:
        """The incremental path, if it decodes so."""
        return self.model.incremental

    def _state_bytes(self) -> int:
        path = self.incremental
        return path.table.bytes_per_request if path else self.model.state_bytes // self.runner.cfg.max_num_seqs

    def _capture_figures(self) -> dict[str, Any]:
        costs = [outcome.cost for outcome in self.report.outcomes if outcome.cost]
        return {
            "graphs": self.report.captured,
            "failed": self.report.failed,
            "seconds": self.report.seconds,
            "capture_seconds": sum(cost.capture_s for cost in costs),
            "pool_reserved_bytes": self.report.pool_reserved_bytes,
            "static_buffer_bytes": self.report.static_buffer_bytes,
        }

    def start(self, rows: int) -> RunnerStreams:
        return RunnerStreams(self.runner, rows)

    def handle_call(self, streams: Streams, codes: Tensor, *, begins: bool = False) -> Callable[[], Tensor] | None:
        """The call of the Target alone that decodes the next chunk of live streams; None if no single Target does it.

        With ``begins`` it decodes their first one, in the same place.

        Calling it again decodes at the same place again; the streams are of no use afterwards.
        """
        path = self.incremental
        if path is None:
            return None
        (target,) = path.targets
        live = [path.state_of(name)[0] for name in _ids(streams)]
        places = torch.tensor([(request.slot, 0 if begins else request.ref_frames + request.suffix_frames) for request in live])
        return lambda: target(codes, places, False, False)

    def states(self, streams: Streams) -> list[Tensor] | None:
        """What the layers of live streams carry over; None if they carry over something else than exact incremental decoding does."""
        path = self.incremental
        return None if path is None else [state_for_comparison(path, name) for name in _ids(streams)]

    def entries_used(self, run: Callable[[], Any]) -> list[GraphEntry]:
        """The graphs that one call replays."""
        manager = self.runner.manager
        assert manager is not None  # the model declares Targets
        before = manager.stats().counts
        run()
        used = {
            (kind.target_id, kind.descriptor)
            for kind, calls in manager.stats().counts.items()
            if kind.descriptor is not None and calls > before.get(kind, 0)
        }
        return [entry for entry in manager.entries() if (entry.target_id, entry.descriptor) in used]

    def close(self) -> None:
        """Release the graphs."""
        self._stack.close()


def _ids(streams: Streams) -> list[str]:
    assert isinstance(streams, RunnerStreams)
    return streams.ids
