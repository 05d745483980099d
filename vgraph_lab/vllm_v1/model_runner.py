"""The runner of this path: requests in, logits out; in between, buffers, dispatch, wrappers and their graphs.

::

    execute_model ─▶ RequestTable ─▶ dispatch ─▶ InputBuffers ─▶ forward context ─▶ CUDAGraphWrapper (FULL)
                     blocks, slots   pad, agree   one copy                             └▶ BreakableCUDAGraphWrapper (PIECEWISE)
                                                                                            └▶ the model

The two wrappers are nested as in vLLM, and each serves one mode. While one captures, the other is a plain call. So a batch meets
exactly one graph, and no shape is captured twice. Where batches are split, ``UBatchWrapper`` stands in the place of the outer one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from vgraph_lab.errors import ConfigError, InputError, LifecycleError
from vgraph_lab.graphs import CaptureProgress, CaptureReport, ManagerState, MemoryProfile
from vgraph_lab.graphs.backends import create_backend, execution_lock
from vgraph_lab.graphs.backends.base import GraphBackend

from .breakable import BreakableCUDAGraphWrapper
from .descriptor import BatchDescriptor
from .dp import check_equal_settings
from .dp_meeting import DPCall, rank_failures
from .execution import ExecutionExplanation, explain_batch_execution
from .forward_context import get_forward_context, set_forward_context
from .input_batch import InputBatch, ScheduledRequest
from .loaded_model import LoadedModel, check_model
from .model_wrappers import EAGER_TARGET, PIECEWISE_TARGET, planned_graphs, wrap_model
from .modes import CUDAGraphMode
from .offloader import PrefetchOffloader
from .outputs import ModelRunnerOutput
from .parallel import ParallelConfig
from .parity import ParityReport, check_parity, check_tolerance
from .runner_config import RunnerConfig
from .start_up import capture_all, capture_report, memory_profile, spread
from .ubatch import UBatchSlices, maybe_create_ubatch_slices
from .ubatch_trace import UBatchTrace
from .ubatching import dbo_current_ubatch_id
from .wrapper_graphs import WrapperGraphs

__all__ = ["GPUModelRunner"]

_NONE, _PIECEWISE = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE


class GPUModelRunner:
    """Runs one model with paged KV cache and graphs; the counterpart of ``vllm.v1.worker.gpu_model_runner.GPUModelRunner`` (0.25.1).

    ::

        runner = GPUModelRunner(RunnerConfig(cudagraph_capture_sizes=(1, 2, 4, 8)), device="cpu")
        runner.load_model(WorkloadModel(WorkloadConfig()))
        print(runner.capture_model())
        output = runner.execute_model([ScheduledRequest("a", [1, 2, 3]), ScheduledRequest("b", [5])])
        runner.shutdown()

    Args:
        config: see there.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; or a backend.
        parallel_config: data-parallel ranks and micro-batches.
        dp_group: a gloo group of these ranks; by default the whole world.
        offloader: keeps weights on the host; not with micro-batches, where each layer runs several times per step.
        ubatch_trace: takes the spans of steps that run eagerly in micro-batches.
        sm_control: around micro-batches: a :class:`~vgraph_lab.vllm_v1.SMControlContextManager`.
        timeout_s: how long to wait for other ranks where they agree on a step. An exchange of experts waits as long as its group does.

    Raises:
        ConfigError: settings contradict each other.
    """

    def __init__(
        self,
        config: RunnerConfig,
        device: str | torch.device | GraphBackend = "auto",
        *,
        parallel_config: ParallelConfig | None = None,
        dp_group: dist.ProcessGroup | None = None,
        offloader: PrefetchOffloader | None = None,
        ubatch_trace: UBatchTrace | None = None,
        sm_control: AbstractContextManager[object] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.config, self.parallel_config = config, parallel_config or ParallelConfig()
        if self.parallel_config.use_ubatching and offloader is not None:
            raise ConfigError(
                "an offloader fetches a layer's weights once per step, micro-batches need them several times. Use one of both."
            )
        self._ubatch_options: dict[str, Any] = {"trace": ubatch_trace, "sm_control": sm_control}
        if not self.parallel_config.use_ubatching and (ubatch_trace is not None or sm_control is not None):
            raise ConfigError("ubatch_trace and sm_control are for micro-batches. Set enable_dbo or ubatch_size, or leave them out.")
        self.backend = create_backend(device) if isinstance(device, str | torch.device) else device
        self.device = self.backend.device
        self.cudagraph_dispatcher = config.dispatcher()
        self.graphs = WrapperGraphs(self.backend, config)
        self._dp_group, self._offloader, self._timeout_s = dp_group, offloader, timeout_s
        self._lock = execution_lock(self.device)
        self._loaded: LoadedModel | None = None
        self._profile: MemoryProfile | None = None

    # ------------------------------------------------------------------------------------------------ lifecycle

    def load_model(self, model: nn.Module) -> None:
        """Take a model: allocate its KV cache and input buffers, find out its scratch memory, and wrap it.

        Raises:
            ConfigError: the model lacks what this path needs, is elsewhere, or does not go with the settings; or ranks differ in them.
            LifecycleError: a model is loaded already, or the model serves another runner.
            Exception: its first pass failed. The model is as it was then, and the call may be repeated.
        """
        with self._lock, torch.inference_mode(mode=False):  # steps write into what is made here, in and outside of that mode
            if self._loaded is not None or self.graphs.state is not ManagerState.NEW:
                raise LifecycleError("this runner has or had a model. Make another runner for another model.")
            check_equal_settings(self.config, model, self.parallel_config, self._dp_group, self._timeout_s)
            supported = check_model(model, self.config, self.parallel_config, self.device)
            self._loaded = loaded = LoadedModel(model, self.config, self.device, self)
            try:
                if self._offloader is not None:
                    self._offloader.wrap_modules(list(supported.layers))
                if self.parallel_config.use_ubatching:
                    supported.workspace.divide(self.parallel_config.num_ubatches, dbo_current_ubatch_id)
                self.profile_run()
                loaded.callable = self._wrap(loaded)
                if self.parallel_config.use_ubatching:
                    self.profile_run(in_ubatches=True)
            except BaseException:
                self._let_go()
                raise
            self.graphs.plan = planned_graphs(self.cudagraph_dispatcher, self.parallel_config)

    def get_model(self) -> nn.Module:
        """The loaded model, under all wrappers."""
        return self._need().module

    def profile_run(self, *, in_ubatches: bool = False) -> None:
        """Run the largest batch once, eagerly and without attention: the workspace gets its final size.

        Args:
            in_ubatches: run it in micro-batches, if it has enough tokens: each thread, stream and exchange does its first work before
                the captures.
        """
        most = self.config.max_num_batched_tokens
        lens = spread(most, self.config.max_num_seqs)
        is_split = in_ubatches and most >= self.parallel_config.num_ubatches
        self._dummy_run(lens, _NONE, BatchDescriptor(most), should_ubatch=is_split, is_profile=True)

    def capture_model(self, progress: Callable[[CaptureProgress], None] | None = None) -> CaptureReport:
        """Capture all graphs: PIECEWISE first, then FULL, the largest first, into one pool. Afterwards nothing is captured any more,
        and the workspace is locked.

        Args:
            progress: called before each graph and once at the end.

        Raises:
            LifecycleError: there is no model, or it was captured before.
            Exception: a capture failed. All graphs are released then; the call may be repeated.
        """
        with self._lock, torch.inference_mode(mode=False):
            start = self._begin_captures("capture_model")
            try:
                capture_all(self.graphs, self.config, self._dummy_run, progress)
            except BaseException:
                self._release_captures()
                raise
            self._need().model.workspace.lock()
            self.graphs.state = ManagerState.READY
            name, seconds = type(self.get_model()).__name__, perf_counter() - start
            self.graphs.report = report = capture_report(self.graphs, self.config, name, seconds, self._profile)
            return report

    def profile_memory(self, progress: Callable[[CaptureProgress], None] | None = None) -> MemoryProfile:
        """What :meth:`capture_model` will take, found out by capturing all of it, micro-batches included, and releasing it again. The
        capture's report then sets it beside what was measured. All data-parallel ranks do so at the same time.

        Args:
            progress: called before each graph and once at the end.

        Raises:
            LifecycleError: there is no model, or it was captured before.
            Exception: a capture failed.
        """
        with self._lock, torch.inference_mode(mode=False):
            start = self._begin_captures("profile_memory")
            try:
                capture_all(self.graphs, self.config, self._dummy_run, progress)
                self._profile = profile = memory_profile(self.graphs, perf_counter() - start)
            finally:
                self._release_captures()
            return profile

    def shutdown(self) -> None:
        """Release graphs, requests, cache and model. Safe to call twice; statistics can still be read. A capture's callback may not."""
        with self._lock:
            if self.graphs.state is ManagerState.CAPTURING:
                raise LifecycleError("shutdown() was called during a capture. To abort a capture, raise from its progress callback.")
            self.graphs.state = ManagerState.CLEARED
            self._let_go()

    # ------------------------------------------------------------------------------------------------ steps

    def execute_model(
        self, scheduled: Sequence[ScheduledRequest], *, finished_req_ids: Collection[str] = (), return_hidden_states: bool = False
    ) -> ModelRunnerOutput:
        """Run one step. With several data-parallel ranks, every rank runs one at the same time, or :meth:`execute_dummy_batch`.

        Args:
            scheduled: requests with their next tokens.
            finished_req_ids: requests that ended before; unknown ids are no error.
            return_hidden_states: copy those out, too.

        Raises:
            InputError: the batch is not acceptable; nothing has changed but for the ends of ``finished_req_ids``.
            LifecycleError: the runner is not ready; or a graph would have to be captured now.
            RankLostError: a rank did not take part, or was lost on the way; names it. The groups are of no use after that.
            Exception: the step failed. Its requests are as they were before it.
        """
        with self._lock, self.graphs.pool.exclusive():
            loaded = self._ready()
            loaded.requests.finish(finished_req_ids)
            batch = self._prepare(loaded, scheduled)
            try:
                explanation, hidden = self._step(loaded, batch)
                with torch.no_grad():
                    logits = loaded.model.compute_logits(hidden.index_select(0, loaded.buffers.last_token_indices(batch.num_reqs)))
                    kept = hidden[: batch.num_tokens].clone() if return_hidden_states else None
            except BaseException:
                loaded.requests.give_up(batch)
                raise
            loaded.requests.commit(batch)
            return ModelRunnerOutput(batch.req_ids, logits, kept, explanation)

    def execute_dummy_batch(self) -> ExecutionExplanation:
        """Take part in a step without requests of its own: other ranks wait for this one, and for its experts.

        Raises:
            LifecycleError: the runner is not ready.
        """
        with self._lock, self.graphs.pool.exclusive():
            loaded = self._ready()
            batch = InputBatch.dummy([self.config.uniform_decode_query_len], loaded.requests.max_blocks)
            return self._step(loaded, batch, is_counted=False)[0]

    def explain(self, num_scheduled_tokens: Sequence[int]) -> ExecutionExplanation:
        """How a batch of requests with so many tokens each would run, and why; nothing runs. Other ranks must ask at the same time.

        Raises:
            InputError: a number is not a whole one from 1; there is no request, or more of them or of their tokens than a batch may have.
            LifecycleError: another rank does something else now.
        """
        return self._explain(self.config.checked_lens(num_scheduled_tokens), DPCall.EXPLAIN)

    def check_parity(self, scheduled: Sequence[ScheduledRequest], *, atol: float = 1e-5, rtol: float = 1e-4) -> ParityReport:
        """Compare a step's breakable graph with eager (:func:`~vgraph_lab.vllm_v1.parity.check_parity`); the step is not taken.

        Raises:
            InputError: the batch or a tolerance is not acceptable, or the batch does not run in PIECEWISE mode.
            LifecycleError: the runner is not ready.
        """
        check_tolerance(atol, rtol)
        with self._lock, self.graphs.pool.exclusive():
            loaded = self._ready()
            batch = self._prepare(loaded, scheduled)

            def compare(*inputs: Tensor) -> ParityReport:
                mode = get_forward_context().cudagraph_runtime_mode
                if mode is not _PIECEWISE:
                    raise InputError(f"the batch runs as {mode}; only a PIECEWISE graph has segments to compare.")
                wrapper = self.graphs.wrappers[PIECEWISE_TARGET]
                assert isinstance(wrapper, BreakableCUDAGraphWrapper)
                return check_parity(wrapper, *inputs, atol=atol, rtol=rtol)

            try:
                report: ParityReport = self._step(loaded, batch, is_counted=False, model=compare, call=DPCall.PARITY)[1]
            finally:
                loaded.requests.give_up(batch)
            return report

    def finish_requests(self, req_ids: Collection[str]) -> list[str]:
        """End requests and free their blocks; returns those that were live."""
        with self._lock:
            return self._need().requests.finish(req_ids)

    def num_computed_tokens(self, req_id: str) -> int:
        """How many tokens of a request are in the KV cache; 0 for one that is not live."""
        return self._need().requests.num_computed_tokens(req_id)

    # ------------------------------------------------------------------------------------------------ inside

    def _wrap(self, loaded: LoadedModel) -> Callable[..., Any]:
        modules = (loaded.kv_cache, *(() if self._offloader is None else (self._offloader.host,)))
        wrapping = (self.graphs, self.config, self.parallel_config, modules, loaded.model.workspace.tensors(), self._offloader)
        return wrap_model(loaded.model, *wrapping, ubatch_options=self._ubatch_options)

    def _prepare(self, loaded: LoadedModel, scheduled: Sequence[ScheduledRequest]) -> InputBatch:
        limits = {"max_num_seqs": self.config.max_num_seqs, "max_num_batched_tokens": self.config.max_num_batched_tokens}
        return loaded.requests.prepare(scheduled, **limits)

    def _step(
        self, loaded: LoadedModel, batch: InputBatch, *, is_counted: bool = True, model: Any = None, call: DPCall = DPCall.STEP
    ) -> tuple[ExecutionExplanation, Any]:
        explanation = self._explain(batch.num_scheduled_tokens, call)
        done, reason = explanation.execution, explanation.fallback_reason
        if is_counted and reason is not None and not self.graphs.wrappers:
            self.graphs.sink.recorder(EAGER_TARGET).record_fallback(BatchDescriptor(batch.num_tokens), reason)
        fields = {
            "num_tokens": batch.num_tokens,
            "fallback_reason": reason,
            "is_counted": is_counted,
            "ubatch_slices": self._slices(done.should_ubatch, batch, done.batch_descriptor),
            "num_tokens_across_dp": done.num_tokens_across_dp,
        }
        return explanation, self._forward(loaded, batch, done.cudagraph_mode, done.batch_descriptor, fields, model or loaded.callable)

    def _explain(self, tokens: NDArray[np.int64], call: DPCall) -> ExecutionExplanation:
        counts = (int(tokens.sum()), len(tokens), tokens, int(tokens.max(initial=0)))
        return explain_batch_execution(
            self.cudagraph_dispatcher, self.parallel_config, *counts, dp_group=self._dp_group, timeout_s=self._timeout_s, call=call
        )

    def _slices(self, should_ubatch: bool, batch: InputBatch, padded: BatchDescriptor) -> UBatchSlices | None:
        reqs, parts = padded.num_reqs or batch.num_reqs, self.parallel_config.num_ubatches
        return maybe_create_ubatch_slices(should_ubatch, batch.num_scheduled_tokens, padded.num_tokens, reqs, parts)[1]

    def _forward(
        self,
        loaded: LoadedModel,
        batch: InputBatch,
        mode: CUDAGraphMode,
        padded: BatchDescriptor,
        fields: Mapping[str, Any],
        model: Callable[..., Any],
        *,
        is_profile: bool = False,
    ) -> Any:
        loaded.buffers.fill(batch, padded.num_tokens, padded.num_reqs or batch.num_reqs)
        metadata = None if is_profile else loaded.metadata(batch, mode, padded, fields.get("ubatch_slices"))
        failures = rank_failures(self.parallel_config, self._dp_group, self._timeout_s)
        with failures, set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=padded, **fields), torch.no_grad():
            is_whole = False
            try:
                output = model(*loaded.buffers.model_inputs(padded.num_tokens))
                is_whole = model is loaded.callable
                return output
            finally:
                if not is_whole and self._offloader is not None:  # it failed, or a comparison stopped where it found a difference
                    self._offloader.restart()

    def _dummy_run(
        self, lens: Sequence[int], mode: CUDAGraphMode, padded: BatchDescriptor, *, should_ubatch: bool = False, is_profile: bool = False
    ) -> None:
        """Run requests of so many tokens that leave nothing behind. All ranks do so at the same time, with the same sizes."""
        loaded, ranks = self._need(), self.parallel_config.data_parallel_size
        batch = InputBatch.dummy(lens, loaded.requests.max_blocks)
        fields = {
            "num_tokens_across_dp": (padded.num_tokens,) * ranks if ranks > 1 else None,
            "ubatch_slices": self._slices(should_ubatch, batch, padded),
        }
        self._forward(loaded, batch, mode, padded, fields, loaded.callable, is_profile=is_profile)

    def _let_go(self) -> None:
        loaded, self._loaded = self._loaded, None
        try:
            self.graphs.close()
        finally:
            if loaded is not None:
                loaded.release()

    def _begin_captures(self, step: str) -> float:
        self._need()
        if self.graphs.state is not ManagerState.NEW:
            raise LifecycleError(f"{step}() needs a runner that has not captured yet, this one is {self.graphs.state.value}.")
        self.graphs.state, self.graphs.memory_before = ManagerState.CAPTURING, self.backend.memory()
        return perf_counter()

    def _release_captures(self) -> None:
        try:
            self.graphs.clear()
        finally:
            self.graphs.state = ManagerState.NEW

    def _need(self) -> LoadedModel:
        if self._loaded is None:
            raise LifecycleError("no model is loaded. Call load_model(model) on a new runner.")
        return self._loaded

    def _ready(self) -> LoadedModel:
        loaded = self._need()
        if not self.graphs.is_ready:
            raise LifecycleError(f"the runner is {self.graphs.state.value}. Call capture_model() once before the first step.")
        return loaded
