"""The two sides of a comparison: one decoder behind an eager runner and behind a runner with graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from vgraph_lab.config import ConnectorConfig, StageConfig
from vgraph_lab.errors import InputError
from vgraph_lab.graphs import CaptureReport
from vgraph_lab.qwen3_tts.code2wav import Qwen3TTSCode2Wav
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.incremental_path import INCREMENTAL_TARGET_ID
from vgraph_lab.runner import GPUGenerationModelRunner

from .forms import form_facts

__all__ = ["Progress", "RunnerPair", "runner_pair"]

Progress = Callable[[str], None]
"""Told what is being done."""


@dataclass(frozen=True)
class RunnerPair:
    """Two ready runners on the same weights.

    Attributes:
        runners: ``eager`` and ``graphs``.
        report: what the second one captured.
        state_bytes: request state of one of the models.
        form: of the second one's graphs, see :func:`~.forms.form_facts`. Eager calls always take the plain one.
    """

    runners: Mapping[str, GPUGenerationModelRunner]
    report: CaptureReport
    state_bytes: int
    form: Mapping[str, Any] = field(default_factory=lambda: form_facts(None))

    def capture_figures(self) -> dict[str, Any]:
        """The capture in figures, for a record."""
        costs = [outcome.cost for outcome in self.report.outcomes if outcome.cost]
        return {
            "graphs": self.report.captured,
            "failed": self.report.failed,
            "seconds": self.report.seconds,
            "capture_seconds": sum(cost.capture_s for cost in costs),
            "static_buffer_bytes": self.report.static_buffer_bytes,
            "pool_reserved_bytes": self.report.pool_reserved_bytes,
        }


@contextmanager
def runner_pair(
    decoder: Code2WavDecoder,
    connector: ConnectorConfig,
    *,
    batch_sizes: Sequence[int],
    max_num_seqs: int,
    progress: Progress,
    algorithm: str = "published",
    form: str | None = None,
) -> Iterator[RunnerPair]:
    """Build both runners, capture the second one's graphs, and shut both down at the end.

    Args:
        decoder: shared by both; its device is theirs.
        connector: how chunks are delivered.
        batch_sizes: row counts to capture each shape for; the largest is also the most rows of an eager call.
        max_num_seqs: live requests for which each model keeps state.
        progress: told each graph that is being captured.
        algorithm: ``streaming_algorithm`` of both.
        form: ``targets.qwen3_tts.incremental.form`` of both; None leaves it as it is by default.

    Raises:
        ConfigError: there is no such algorithm, or no such form.
        InputError: a form of another algorithm than the incremental one.
    """
    if form is not None and algorithm == "published":
        raise InputError(
            f"form {form!r} is one of incremental decoding, and the algorithm is 'published'. Choose 'incremental', or no form."
        )
    graphs: dict[str, Any] = {"capture_batch_sizes": sorted(batch_sizes), "streaming_algorithm": algorithm}
    if form is not None:
        graphs["targets"] = {INCREMENTAL_TARGET_ID: {"form": form}}
    stage = {"connector": connector.model_dump(), "max_num_seqs": max_num_seqs, "vocoder_cudagraph": graphs}
    with ExitStack() as stack:
        runners: dict[str, GPUGenerationModelRunner] = {}
        for name in ("eager", "graphs"):
            cfg = StageConfig.from_dict({**stage, "enforce_eager": name == "eager"})
            model = Qwen3TTSCode2Wav(decoder, cfg)
            runners[name] = stack.enter_context(GPUGenerationModelRunner(cfg, decoder.device))
            runners[name].load_model(model)
        runners["eager"].capture_model()
        report = runners["graphs"].capture_model(lambda step: progress(f"capturing {step}"))
        yield RunnerPair(runners, report, model.state_bytes, form_facts(model.incremental))
