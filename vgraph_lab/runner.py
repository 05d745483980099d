"""The runner: loads a model, captures its graphs, executes batches of requests, shuts down.

    GPUGenerationModelRunner(cfg) ─load_model─▶ loaded ─capture_model─▶ ready ─execute_model …─▶ ready ─shutdown─▶ shut down

It owns the Manager and the device; the model owns mathematics, Targets and request state. A model that does not declare
``supports_vocoder_cudagraph`` takes vLLM's own path, if it can (``supports_vllm_v1``, :mod:`vgraph_lab.vllm_v1`), and runs eager
otherwise. Both paths show in the same tables.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import TracebackType
from typing import Any, Protocol, Self, TypeGuard, cast

import torch
from torch import nn

from .config import StageConfig
from .errors import ConfigError, InputError, LifecycleError
from .graphs import (
    CaptureProgress,
    CaptureReport,
    MemoryProfile,
    StatsSink,
    StatsSnapshot,
    Target,
    VocoderCUDAGraphManager,
    create_backend,
)
from .graphs.backends import execution_lock
from .graphs.manager import ManagerState, ProgressCallback
from .requests import ChunkRequest, ChunkResult
from .vllm_v1 import CUDAGraphMode, GPUModelRunner, RunnerConfig, ScheduledRequest

__all__ = ["GPUGenerationModelRunner", "GenerationModel", "RunnerState", "SupportsVocoderCUDAGraph"]

logger = logging.getLogger(__name__)


class GenerationModel(Protocol):
    """What a runner needs of a model. One that keeps nothing between calls may leave out ``abort`` and ``reset``."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def __call__(self, chunks: Sequence[ChunkRequest]) -> Mapping[str, ChunkResult]:
        """Decode one batch; one result for each request id."""

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests early; returns those that were live."""

    def reset(self) -> None:
        """Forget all requests: the model is as new."""


class SupportsVocoderCUDAGraph(Protocol):
    """The capability of a model whose callables a Manager may capture."""

    supports_vocoder_cudagraph: bool

    def get_vocoder_cudagraph_targets(self) -> Sequence[Target[Any]]:
        """The Targets, always the same objects."""


class RunnerState(Enum):
    """Where a runner is in its life. It only moves forward, but for a capture that fails: the model stays loaded then."""

    NEW = "new"
    LOADED = "loaded"
    CAPTURING = "capturing"
    READY = "ready"
    SHUT_DOWN = "shut down"


class GPUGenerationModelRunner:
    """Drives one model on one device.

    ::

        with GPUGenerationModelRunner(cfg, device="auto") as runner:
            runner.load_model(model)
            print(runner.capture_model(progress=True))
            samples = runner.execute_model([ChunkRequest("req-1", codes, ref_frames=72)])["req-1"]

    Calls from several threads take turns; on CUDA, the work of each starts after that of the one before, whatever
    streams they are on.

    Args:
        cfg: the stage's configuration.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        v1_config: of vLLM's own path, for a model that takes it. Mode, ``enforce_eager`` and ``max_num_seqs`` are the stage's.

    Attributes:
        manager: of the graphs. On vLLM's path it is a :class:`~vgraph_lab.vllm_v1.WrapperGraphs`, which can be read in the same way.
        v1_runner: the runner of vLLM's path; None on the other one.

    Raises:
        ConfigError: ``v1_config`` contradicts the stage.
    """

    def __init__(self, cfg: StageConfig, device: str | torch.device = "auto", *, v1_config: RunnerConfig | None = None) -> None:
        self.cfg, self.backend = cfg, create_backend(device)
        self._v1_config = _v1_config(cfg, v1_config or RunnerConfig())
        self.v1_runner: GPUModelRunner | None = None
        self.device = self.backend.device
        self.state = RunnerState.NEW
        self.manager: VocoderCUDAGraphManager | None = None
        self._model: GenerationModel | None = None
        self._lock = execution_lock(self.device)

    # ------------------------------------------------------------------------------------------------ lifecycle

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted: only once every capture is over."""
        return self.state is RunnerState.READY

    @property
    def model(self) -> GenerationModel:
        """The loaded model.

        Raises:
            LifecycleError: none is loaded.
        """
        if self._model is None:
            raise LifecycleError(f"no model is loaded (the runner is {self.state.value}). Call load_model(model).")
        return self._model

    def load_model(self, model: GenerationModel | nn.Module) -> None:
        """Take a model, check the configuration against what it declares, and choose its path.

        Raises:
            ConfigError: keys or Target ids that the model does not have, a model on another device or with another
                configuration.
            LifecycleError: a model is loaded already, or the model serves another runner.
        """
        with self._lock:
            self._expect(RunnerState.NEW, "load_model", "Make another runner for another model")
            model = cast("GenerationModel", model)
            if torch.device(model.device) != self.device:
                raise ConfigError(
                    f"the model is on {model.device}, the runner on {self.device}. Load the model with device='{self.device}'."
                )
            if getattr(model, "cfg", self.cfg) != self.cfg:
                raise ConfigError("the model was made with another configuration than the runner. Give both the same StageConfig.")
            if self._is_capable(model):
                self.manager = self._new_manager(model)
            elif getattr(model, "supports_vllm_v1", False):
                v1_runner = GPUModelRunner(self._v1_config, self.backend)
                v1_runner.load_model(cast("nn.Module", model))
                self.v1_runner, self.manager = v1_runner, cast("VocoderCUDAGraphManager", v1_runner.graphs)  # for reading
            else:
                logger.warning(
                    "%s does not declare supports_vocoder_cudagraph: it runs eager, without graphs and without coverage statistics.",
                    type(model).__name__,
                )
            self._model, self.state = model, RunnerState.LOADED

    def capture_model(self, progress: bool | ProgressCallback = False) -> CaptureReport:
        """Capture all graphs that the configuration asks for; the runner is ready afterwards.

        Args:
            progress: True for a bar, or a callback.

        Raises:
            LifecycleError: no model is loaded, it is captured already, or another runner serves it.
            VGraphLabError: in strict mode, the first failure. Nothing is captured then, and the call may be repeated.
        """
        with self._lock:
            self._expect(RunnerState.LOADED, "capture_model", "Call load_model(model) once, then capture_model()")
            if self.v1_runner is not None:
                self.state = RunnerState.CAPTURING
                try:
                    report = self.v1_runner.capture_model(_callback(progress))
                except BaseException:
                    self.state = RunnerState.LOADED
                    raise
            elif self.manager is None:
                why = {type(self.model).__name__: "it does not declare supports_vocoder_cudagraph"}
                report = CaptureReport(str(self.device), (), why, 0.0, 0, 0, self.backend.memory().free_bytes)
            else:
                self.state = RunnerState.CAPTURING
                try:
                    report = self.manager.capture(_callback(progress))
                except BaseException:
                    self.state = RunnerState.LOADED
                    if self.manager.state is ManagerState.CLEARED:
                        self.manager = self._new_manager(self.model)
                    raise
            self.state = RunnerState.READY
            return report

    def profile_memory(self, progress: bool | ProgressCallback = False) -> MemoryProfile:
        """What the graphs would take, measured in a throwaway pool; ``capture_model`` afterwards compares.

        Raises:
            LifecycleError: the runner is not loaded, or captured already; or its model has no graphs.
        """
        with self._lock:
            self._expect(RunnerState.LOADED, "profile_memory", "Call it between load_model(model) and capture_model()")
            if self.v1_runner is not None:
                return self.v1_runner.profile_memory(_callback(progress))
            if self.manager is None:
                raise LifecycleError(
                    f"{type(self.model).__name__} does not declare supports_vocoder_cudagraph: there is nothing to profile."
                )
            return self.manager.profile_memory(_callback(progress))

    def shutdown(self) -> None:
        """Release graphs, requests and model. Safe to call twice. Statistics can still be read.

        Raises:
            LifecycleError: called by a progress callback during a capture; or a graph could not be reset. In the latter case
                all others were, and the runner is shut down.
        """
        with self._lock:
            if self.state is RunnerState.CAPTURING:
                raise LifecycleError("shutdown() was called during capture_model(). To abort a capture, raise from its progress callback.")
            model, self._model, self.state = self._model, None, RunnerState.SHUT_DOWN
            try:
                if self.v1_runner is not None:
                    self.v1_runner.shutdown()
                elif self.manager is not None:
                    self.manager.clear()
            finally:
                getattr(model, "reset", _do_nothing)()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.shutdown()

    # ------------------------------------------------------------------------------------------------ requests

    def execute_model(self, requests: Sequence[ChunkRequest] | Sequence[ScheduledRequest]) -> dict[str, ChunkResult]:
        """Decode one batch of chunks, at most one of each request. On vLLM's path: run one step of ScheduledRequests.

        Returns:
            By request id, in the order of the requests: float32 samples [n] on the device, not waited for; or a
            :class:`~vgraph_lab.errors.RequestError` for a request that cannot be served. The others are served. On vLLM's path:
            logits [vocab_size] of each request's last token.

        Values of codes that are on a CUDA device already are checked in debug mode only: to look at them is to wait for it.

        Raises:
            InputError: ``requests`` is no sequence of ChunkRequests (of ScheduledRequests on vLLM's path, where one that cannot be served
                refuses the whole batch).
            LifecycleError: the runner is not ready.
            Exception: the device or a graph failed; see the model for what became of the requests.
        """
        kind = ChunkRequest if self.v1_runner is None else ScheduledRequest
        if not isinstance(requests, Sequence):
            raise InputError(f"execute_model takes a list or tuple of {kind.__name__}s, got {type(requests).__name__}.")
        for request in requests:
            if not isinstance(request, kind) or not isinstance(getattr(request, "request_id", getattr(request, "req_id", None)), str):
                raise InputError(f"execute_model takes {kind.__name__}s with text ids, got {request!r}.")
        with self._lock:
            self._expect(RunnerState.READY, "execute_model", "Call load_model(model), then capture_model()")
            if self.v1_runner is not None:
                output = self.v1_runner.execute_model(cast("Sequence[ScheduledRequest]", requests))
                return dict(zip(output.req_ids, output.logits, strict=True))
            return dict(self.model(cast("Sequence[ChunkRequest]", requests)))

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests early and release their state.

        Returns:
            Ids that were live. Others have ended before or never began, which is not an error: an abort may come late. It is
            not remembered for an id that has yet to begin.

        Raises:
            InputError: something else than text ids.
            LifecycleError: the runner is not ready.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids) if isinstance(request_ids, Iterable) else [request_ids]
        if not all(isinstance(request_id, str) for request_id in ids):
            raise InputError(f"abort takes request ids, which are text, got {request_ids!r}.")
        with self._lock:
            self._expect(RunnerState.READY, "abort", "Only a ready runner has requests")
            if self.v1_runner is not None:
                return self.v1_runner.finish_requests(ids)
            return list(getattr(self.model, "abort", _nothing_live)(ids))

    def stats(self) -> StatsSnapshot:
        """Coverage statistics so far; empty for a model without the capability."""
        return self.manager.stats() if self.manager else StatsSink().snapshot()

    # ------------------------------------------------------------------------------------------------ inside

    def _expect(self, state: RunnerState, step: str, instead: str) -> None:
        if self.state is not state:
            raise LifecycleError(f"{step} needs a runner that is {state.value}, this one is {self.state.value}. {instead}.")

    @staticmethod
    def _is_capable(model: GenerationModel) -> bool:
        return bool(getattr(model, "supports_vocoder_cudagraph", False))

    def _new_manager(self, model: GenerationModel) -> VocoderCUDAGraphManager:
        if not _has_targets(model):
            raise ConfigError(f"{type(model).__name__} declares supports_vocoder_cudagraph, but has no get_vocoder_cudagraph_targets().")
        targets = model.get_vocoder_cudagraph_targets()
        ids = [target.target_id for target in targets]
        extensions = getattr(model, "vocoder_cudagraph_extensions", None)
        self.cfg.check_model(extensions, {*ids, *(extensions.targets if extensions else ())})
        settings = self.cfg.graph_settings
        # A model has the Targets of one mode at a time; overrides of its others wait for that mode.
        overrides = {target_id: override for target_id, override in settings.targets.items() if target_id in ids}
        return VocoderCUDAGraphManager(self.backend, targets, settings.model_copy(update={"targets": overrides}))

    def __repr__(self) -> str:
        return f"GPUGenerationModelRunner({self.state.value}, {self.device}, {type(self._model).__name__ if self._model else 'no model'})"


def _v1_config(cfg: StageConfig, given: RunnerConfig) -> RunnerConfig:
    """What is said of the other path, with what the stage says of both."""
    stage = RunnerConfig(cudagraph_mode=CUDAGraphMode[cfg.cudagraph_mode], enforce_eager=cfg.enforce_eager, max_num_seqs=cfg.max_num_seqs)
    for name in sorted(stage.model_fields_set & given.model_fields_set):
        if getattr(given, name) != getattr(stage, name):
            raise ConfigError(f"v1_config.{name}: is {getattr(given, name)}, the stage says {getattr(stage, name)}. Leave it out there.")
    return given.model_copy(update={name: getattr(stage, name) for name in stage.model_fields_set})


def _has_targets(model: object) -> TypeGuard[SupportsVocoderCUDAGraph]:
    """Whether it has what it declares. ``isinstance`` would not see what a wrapper around a model gives by ``__getattr__``."""
    return callable(getattr(model, "get_vocoder_cudagraph_targets", None))


def _do_nothing() -> None:
    """Instead of a ``reset`` that a model does not have."""


def _nothing_live(request_ids: Iterable[str]) -> list[str]:
    """Instead of an ``abort`` that a model does not have."""
    return []


def _callback(progress: bool | ProgressCallback) -> ProgressCallback | None:
    return _ProgressBar() if progress is True else (progress or None)


class _ProgressBar:
    """A tqdm bar of one capture; a widget in notebooks, on stderr elsewhere."""

    def __init__(self) -> None:
        from tqdm.auto import tqdm

        self._bar: Any = tqdm(desc="capture", unit="graph")

    def __call__(self, progress: CaptureProgress) -> None:
        self._bar.total, self._bar.n = progress.total, progress.done
        self._bar.set_postfix_str("" if progress.descriptor is None else f"{progress.target_id} {progress.descriptor}")
        if progress.done == progress.total:
            self._bar.close()
