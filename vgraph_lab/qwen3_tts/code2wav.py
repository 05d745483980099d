"""Qwen3-TTS's Code2Wav stage as a model that a runner drives: batches of chunks in, samples out.

The model declares which of its callables may be captured (:meth:`Qwen3TTSCode2Wav.get_vocoder_cudagraph_targets`) and
calls them, whoever answers. It knows nothing of the Manager that binds graphs to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from vgraph_lab.config import ModelExtensions, StageConfig
from vgraph_lab.errors import ConfigError
from vgraph_lab.graphs.target import Target
from vgraph_lab.requests import ChunkRequest, ChunkResult

from .checkpoint import load_decoder
from .decoder import Code2WavDecoder
from .incremental_forms import FormReport, choose_form
from .incremental_path import INCREMENTAL_TARGET_ID, IncrementalPath
from .settings import EXTENSIONS, STREAMING_TARGET_IDS, TARGET_IDS, IncrementalTargetKeys, Qwen3TTSGraphKeys, StatelessTargetKeys
from .stateless import STATELESS_TARGET_ID, stateless_buckets
from .stateless_path import StatelessPath
from .stream_path import StreamingPath

__all__ = ["Qwen3TTSCode2Wav"]


class Qwen3TTSCode2Wav(nn.Module):
    """Routes requests to Targets, composes them in one forward, keeps request state.

    With ``async_chunk: true`` requests are streamed chunk by chunk (Targets ``icl_prefix``, ``xvec_prefix``, ``suffix``; with
    ``streaming_algorithm: incremental`` the one Target ``incremental``), otherwise they come whole (Target ``stateless``). Use it
    through a runner; it is not thread-safe by itself.

    Args:
        decoder: the eager decoder; its device and dtype are the model's.
        cfg: the stage's configuration.

    Attributes:
        streaming: the published streaming path, if that is what the configuration asks for.
        incremental: the incremental one, likewise.

    Raises:
        ConfigError: the configuration holds keys or Target ids that this model does not have, or sizes that do not fit
            the decoder.
    """

    supports_vocoder_cudagraph: ClassVar[bool] = True
    vocoder_cudagraph_extensions: ClassVar[ModelExtensions] = EXTENSIONS

    def __init__(self, decoder: Code2WavDecoder, cfg: StageConfig) -> None:
        super().__init__()
        cfg.check_model(EXTENSIONS, TARGET_IDS)
        self.decoder, self.cfg = decoder, cfg
        keys = cfg.extension(Qwen3TTSGraphKeys)
        _check_algorithm(cfg, keys)
        path: StreamingPath | IncrementalPath | StatelessPath
        if not cfg.async_chunk:
            path = _stateless(decoder, cfg, keys)
        else:
            path = _incremental(decoder, cfg, keys) if keys.streaming_algorithm == "incremental" else _streaming(decoder, cfg, keys)
        self.streaming = path if isinstance(path, StreamingPath) else None
        self.incremental = path if isinstance(path, IncrementalPath) else None
        self._path = path

    @classmethod
    def from_checkpoint(
        cls, folder: str | Path, cfg: StageConfig, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
    ) -> Qwen3TTSCode2Wav:
        """The model of a ``speech_tokenizer`` folder (or a model folder that contains one).

        Raises:
            CheckpointError: the folder cannot be read.
            ConfigError: the configuration does not fit.
        """
        return cls(load_decoder(folder, device, dtype), cfg)

    @property
    def device(self) -> torch.device:
        """Device of weights, request state and results."""
        return self.decoder.device

    @property
    def sample_rate(self) -> int:
        """Samples per second of the results."""
        return self.decoder.sample_rate

    @property
    def state_bytes(self) -> int:
        """Memory of the request state, allocated once; 0 without streaming."""
        return 0 if isinstance(self._path, StatelessPath) else self._path.table.nbytes

    @property
    def live_requests(self) -> tuple[str, ...]:
        """Requests that have begun and not ended."""
        return () if isinstance(self._path, StatelessPath) else tuple(self._path.book.live)

    def get_vocoder_cudagraph_targets(self) -> Sequence[Target[Any]]:
        """The Targets of this configuration, always the same objects."""
        return self._path.targets

    def forward(self, chunks: Sequence[ChunkRequest]) -> dict[str, ChunkResult]:
        """Decode one batch of chunks, at most one of each request.

        Returns:
            By request id, in the order of the chunks: float32 [samples] on :attr:`device` (of the new frames; empty for an
            empty last chunk), or the :class:`~vgraph_lab.errors.RequestError` of a request that cannot be served.

        Raises:
            Exception: a graph or the decoder failed, and no request has changed; or, if the state could not be written, the
                requests of this call have ended.
        """
        with torch.no_grad():
            return self._path.forward(chunks)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests early and release their state.

        Returns:
            Ids that were live; others have ended before or never began.
        """
        return self._path.abort(request_ids)

    def reset(self) -> None:
        """Forget all requests, live and past: the model is as new."""
        self._path.reset()


def _check_algorithm(cfg: StageConfig, keys: Qwen3TTSGraphKeys) -> None:
    """Settings of a streaming Target that the other algorithm has would be without effect, and without a word."""
    if not cfg.async_chunk:
        return
    given = cfg.vocoder_cudagraph.targets
    is_incremental = keys.streaming_algorithm == "incremental"
    for target_id in (*STREAMING_TARGET_IDS, INCREMENTAL_TARGET_ID):
        if target_id in given and (target_id == INCREMENTAL_TARGET_ID) is not is_incremental:
            other = "published" if is_incremental else "incremental"
            raise ConfigError(
                f"vocoder_cudagraph.targets.{target_id}: there is no such Target with streaming_algorithm {keys.streaming_algorithm!r}. "
                f"Set vocoder_cudagraph.streaming_algorithm: {other}, or leave it out."
            )


def _streaming(decoder: Code2WavDecoder, cfg: StageConfig, keys: Qwen3TTSGraphKeys) -> StreamingPath:
    return StreamingPath(
        decoder,
        cfg.connector,
        batch_sizes=keys.capture_batch_sizes,
        largest_batch=_largest_batch(cfg, keys),
        max_requests=cfg.max_num_seqs,
        debug=cfg.vocoder_cudagraph.debug,
    )


def _incremental(decoder: Code2WavDecoder, cfg: StageConfig, keys: Qwen3TTSGraphKeys) -> IncrementalPath:
    target = cfg.target_extension(INCREMENTAL_TARGET_ID, IncrementalTargetKeys)
    settings = cfg.graph_settings
    has_graphs = not settings.enforce_eager and settings.for_target(INCREMENTAL_TARGET_ID).enabled
    options = {"autotune": target.autotune} if target.form == "fast" else {}
    if has_graphs:
        form, form_report = choose_form(target.form, decoder, **options)
    else:  # eager calls are plain
        form, form_report = choose_form("plain", decoder)
        form_report = FormReport(target.form, "plain", "there are no graphs" if target.form != "plain" else None)
    return IncrementalPath(
        decoder,
        cfg.connector,
        batch_sizes=keys.capture_batch_sizes,
        largest_batch=_largest_batch(cfg, keys),
        max_requests=cfg.max_num_seqs,
        more_widths=target.capture_widths,
        has_graphs=has_graphs,
        form=form,
        form_report=form_report,
        debug=cfg.vocoder_cudagraph.debug,
    )


def _stateless(decoder: Code2WavDecoder, cfg: StageConfig, keys: Qwen3TTSGraphKeys) -> StatelessPath:
    chunk, context = keys.decode_chunk_frames, keys.decode_left_context_frames
    configured = cfg.target_extension(STATELESS_TARGET_ID, StatelessTargetKeys).capture_bucket_sizes
    return StatelessPath(
        decoder,
        bucket_frames=stateless_buckets(configured, chunk_frames=chunk, left_context_frames=context),
        batch_sizes=keys.capture_batch_sizes,
        largest_batch=_largest_batch(cfg, keys),
        chunk_frames=chunk,
        left_context_frames=context,
        debug=cfg.vocoder_cudagraph.debug,
    )


def _largest_batch(cfg: StageConfig, keys: Qwen3TTSGraphKeys) -> int:
    """Groups are split where the largest captured batch ends; without graphs, where the configuration wants it."""
    return keys.batch_limit if cfg.graph_settings.enforce_eager else max(keys.capture_batch_sizes)
