"""What tables of streaming share: the streaming part of a runner's model, and the calls between two moments."""

from __future__ import annotations

from collections import Counter

from vgraph_lab.errors import InputError
from vgraph_lab.graphs.stats import CallKind, StatsSnapshot
from vgraph_lab.qwen3_tts.code2wav import Qwen3TTSCode2Wav
from vgraph_lab.qwen3_tts.stream_path import StreamingPath
from vgraph_lab.runner import GPUGenerationModelRunner

__all__ = ["calls_between", "streaming_of"]


def calls_between(before: StatsSnapshot, after: StatsSnapshot) -> Counter[CallKind]:
    """The calls that were counted between two snapshots of one Manager, by kind.

    Raises:
        InputError: a count went down, so ``after`` is the older snapshot or another Manager's.
    """
    counted = Counter(dict(after.counts))
    counted.subtract(before.counts)
    if any(calls < 0 for calls in counted.values()):
        raise InputError("the second snapshot counts fewer calls than the first. Pass snapshots of one Manager, the older one first.")
    return +counted


def streaming_of(runner: GPUGenerationModelRunner) -> StreamingPath:
    """The streaming part of a runner's model, if it follows the published algorithm.

    Raises:
        InputError: the model does not stream, or does so incrementally.
        LifecycleError: no model is loaded (any more).
    """
    model = runner.model
    streaming = model.streaming if isinstance(model, Qwen3TTSCode2Wav) else None
    if isinstance(model, Qwen3TTSCode2Wav) and model.incremental is not None:
        raise InputError("this table shows the published algorithm's states. Load a model with streaming_algorithm: published.")
    if streaming is None:
        raise InputError(f"{type(model).__name__} does not stream here. Load a Qwen3TTSCode2Wav with async_chunk: true.")
    return streaming
