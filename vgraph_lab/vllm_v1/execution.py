"""How one batch is executed: what it is, which graph serves it, how it is padded and split, and what the other ranks make of that.

Counterpart of ``GPUModelRunner._determine_batch_execution_and_padding`` (vLLM 0.25.1), as a function of what the method reads
from its runner. Steps, in order:

1. *uniform decode* or not: all requests have exactly the tokens of a decode step;
2. *dispatch*: mode and padded shape, FULL left out for cascade attention;
3. with several data-parallel ranks, *agreement*: one mode, one size, split or not, for all of them;
4. *dispatch again* with the size and the mode that were agreed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from vgraph_lab.errors import ConfigError, FallbackReason, InputError

from .descriptor import BatchDescriptor
from .dispatcher import CudagraphDispatcher, DispatchCandidate, DispatchExplanation
from .dp import DPAgreement, coordinate_batch_across_dp
from .dp_meeting import DPCall
from .modes import CUDAGraphMode
from .parallel import ParallelConfig
from .ubatch import check_ubatch_thresholds, is_captured_in_ubatches

__all__ = [
    "BatchExecution",
    "CUDAGraphStat",
    "ExecutionExplanation",
    "determine_batch_execution_and_padding",
    "explain_batch_execution",
    "is_uniform_decode",
]

_NONE, _FULL = CUDAGraphMode.NONE, CUDAGraphMode.FULL


@dataclass(frozen=True, slots=True)
class CUDAGraphStat:
    """What a batch costs in padding, as vLLM logs it.

    Attributes:
        num_unpadded_tokens: of the batch.
        num_padded_tokens: that are computed.
        num_paddings: of these, for nothing.
        runtime_mode: what the batch runs as: NONE, too, where the graph of its shape is of the other kind (whole, or in micro-batches).
    """

    num_unpadded_tokens: int
    num_padded_tokens: int
    num_paddings: int
    runtime_mode: str


class BatchExecution(NamedTuple):
    """How one batch runs.

    Attributes:
        cudagraph_mode: its runtime mode, as dispatched and agreed on; see :attr:`ExecutionExplanation.runs_as`.
        batch_descriptor: the padded batch.
        should_ubatch: whether it is split into micro-batches.
        num_tokens_across_dp: tokens of each data-parallel rank, padding included; None with a single one.
        cudagraph_stats: its padding.
    """

    cudagraph_mode: CUDAGraphMode
    batch_descriptor: BatchDescriptor
    should_ubatch: bool
    num_tokens_across_dp: tuple[int, ...] | None
    cudagraph_stats: CUDAGraphStat


@dataclass(frozen=True, slots=True)
class ExecutionExplanation:
    """How one batch runs, and why.

    Attributes:
        execution: what :func:`determine_batch_execution_and_padding` returns.
        uniform_decode: whether it counts as uniform decode.
        why_uniform: the same in words.
        dispatch: what this rank would do alone.
        why_ubatch: whether it is split, in words.
        agreement: what all ranks agreed on; None with a single one.
        graph_in_ubatches: whether the graph of the padded batch holds micro-batches; None if no graph was dispatched.
    """

    execution: BatchExecution
    uniform_decode: bool
    why_uniform: str
    dispatch: DispatchExplanation
    why_ubatch: str
    agreement: DPAgreement | None
    graph_in_ubatches: bool | None

    @property
    def runs_as(self) -> CUDAGraphMode:
        """What the batch runs as: what was dispatched, or NONE if that graph is whole and the batch is split, or the other way round."""
        return self.execution.cudagraph_mode if self.graph_in_ubatches is self.execution.should_ubatch else _NONE

    @property
    def fallback_reason(self) -> FallbackReason | None:
        """Why the batch runs eager; None if a graph serves it. A rank whose own batch had one follows the others."""
        if self.runs_as is not _NONE:
            return None
        if self.execution.cudagraph_mode is not _NONE:
            return FallbackReason.STATE_NOT_COVERED
        return self.dispatch.fallback_reason or FallbackReason.STATE_NOT_COVERED

    def __str__(self) -> str:
        done, kind = self.execution, "uniform decode" if self.uniform_decode else "mixed"
        lines = [f"{kind}: {self.why_uniform}", str(self.dispatch), f"micro-batches: {self.why_ubatch}"]
        if self.agreement is not None:
            tokens = ", ".join(map(str, self.agreement.num_tokens_across_dp or ()))
            split = "split" if self.agreement.should_ubatch else "whole"
            lines.append(f"all ranks: {self.agreement.cudagraph_mode}, {split}, tokens {tokens}")
        runs = f"runs as {done.cudagraph_mode} {done.batch_descriptor}"
        if self.runs_as is not done.cudagraph_mode:
            how = "in micro-batches" if done.should_ubatch else "whole"
            why = "PIECEWISE graphs hold whole batches"
            if done.cudagraph_mode is _FULL:
                why = f"the FULL graph of that shape holds {'micro-batches' if self.graph_in_ubatches else 'whole batches'}"
            runs = f"runs eager {how}, padded to {done.batch_descriptor}: {why}"
        return "\n".join([*lines, runs])


def is_uniform_decode(
    max_num_scheduled_tokens: int,
    uniform_decode_query_len: int,
    num_tokens: int,
    num_reqs: int,
    force_uniform_decode: bool | None = None,
) -> bool:
    """Whether every request has exactly the tokens of a decode step: 1 + speculative ones.

    Args:
        max_num_scheduled_tokens: of any request.
        uniform_decode_query_len: of a decode step.
        num_tokens: of the batch.
        num_reqs: of the batch.
        force_uniform_decode: the answer, if it is not None: a capture knows what it captures.
    """
    if force_uniform_decode is not None:
        return force_uniform_decode
    return max_num_scheduled_tokens == uniform_decode_query_len and num_tokens == max_num_scheduled_tokens * num_reqs


def determine_batch_execution_and_padding(
    dispatcher: CudagraphDispatcher,
    parallel_config: ParallelConfig,
    num_tokens: int,
    num_reqs: int,
    num_scheduled_tokens_np: NDArray[np.integer],
    max_num_scheduled_tokens: int,
    use_cascade_attn: bool = False,
    allow_microbatching: bool = True,
    force_eager: bool = False,
    force_uniform_decode: bool | None = None,
    force_num_active_loras: int | None = None,
    *,
    num_active_loras: int = 0,
    dp_group: dist.ProcessGroup | None = None,
    timeout_s: float = 60.0,
    call: DPCall = DPCall.STEP,
) -> BatchExecution:
    """How one batch runs. With several data-parallel ranks, every rank calls it once per step.

    Args:
        dispatcher: of the runner.
        parallel_config: of the runner.
        num_tokens: of the batch, without padding.
        num_reqs: of the batch.
        num_scheduled_tokens_np: tokens of each request [num_reqs].
        max_num_scheduled_tokens: the largest of them.
        use_cascade_attn: attention shares a prefix, which a FULL graph cannot.
        allow_microbatching: whether the batch may be split.
        force_eager: no graph.
        force_uniform_decode: see :func:`is_uniform_decode`.
        force_num_active_loras: counts instead of ``num_active_loras``: a capture knows what it captures.
        num_active_loras: how many different adapters the batch uses.
        dp_group: of the data-parallel ranks; by default the whole world.
        timeout_s: how long to wait for other ranks.
        call: for what; the same on every rank.

    Raises:
        InputError: the numbers contradict each other.
        ConfigError: the ranks agreed on a graph that this one has not got: they are configured differently.
        LifecycleError: the ranks called for different things.
        RankLostError: a rank did not take part.
    """
    return explain_batch_execution(
        dispatcher,
        parallel_config,
        num_tokens,
        num_reqs,
        num_scheduled_tokens_np,
        max_num_scheduled_tokens,
        use_cascade_attn,
        allow_microbatching,
        force_eager,
        force_uniform_decode,
        force_num_active_loras,
        num_active_loras=num_active_loras,
        dp_group=dp_group,
        timeout_s=timeout_s,
        call=call,
    ).execution


def explain_batch_execution(
    dispatcher: CudagraphDispatcher,
    parallel_config: ParallelConfig,
    num_tokens: int,
    num_reqs: int,
    num_scheduled_tokens_np: NDArray[np.integer],
    max_num_scheduled_tokens: int,
    use_cascade_attn: bool = False,
    allow_microbatching: bool = True,
    force_eager: bool = False,
    force_uniform_decode: bool | None = None,
    force_num_active_loras: int | None = None,
    *,
    num_active_loras: int = 0,
    dp_group: dist.ProcessGroup | None = None,
    timeout_s: float = 60.0,
    call: DPCall = DPCall.STEP,
) -> ExecutionExplanation:
    """:func:`determine_batch_execution_and_padding` with its reasons; it takes part in the agreement of ranks just as that does."""
    _check(num_tokens, num_reqs, num_scheduled_tokens_np, max_num_scheduled_tokens)
    query_len = dispatcher.uniform_decode_query_len
    uniform = is_uniform_decode(max_num_scheduled_tokens, query_len, num_tokens, num_reqs, force_uniform_decode)
    loras = num_active_loras if force_num_active_loras is None else force_num_active_loras

    def dispatch(size: int, valid_modes: Collection[CUDAGraphMode] | None = None) -> DispatchExplanation:
        if force_eager:
            candidate = DispatchCandidate(_NONE, BatchDescriptor(size))
            return DispatchExplanation(
                size, (DispatchCandidate(_FULL, None, "the caller forces eager", FallbackReason.DISABLED), candidate)
            )
        excluded = {_FULL} if use_cascade_attn else None
        return dispatcher.explain(size, uniform_decode=uniform, num_active_loras=loras, valid_modes=valid_modes, invalid_modes=excluded)

    alone = dispatch(num_tokens)
    mode, batch = alone.mode, alone.descriptor
    agreement: DPAgreement | None = None
    if parallel_config.data_parallel_size > 1:
        agreement = coordinate_batch_across_dp(
            num_tokens,
            allow_microbatching,
            parallel_config,
            batch.num_tokens,
            uniform,
            mode,
            group=dp_group,
            timeout_s=timeout_s,
            call=call,
        )
        assert agreement.num_tokens_across_dp is not None  # several ranks
        size = agreement.num_tokens_across_dp[parallel_config.data_parallel_rank]
        mode, batch = _agreed(dispatch, size, agreement.cudagraph_mode)
    should_ubatch = agreement is not None and agreement.should_ubatch
    graph_in_ubatches = mode is _FULL and is_captured_in_ubatches(parallel_config, batch) if mode else None
    runs_as = mode if graph_in_ubatches is should_ubatch else _NONE
    execution = BatchExecution(
        mode,
        batch,
        should_ubatch,
        None if agreement is None else agreement.num_tokens_across_dp,
        CUDAGraphStat(num_tokens, batch.num_tokens, batch.num_tokens - num_tokens, str(runs_as)),
    )
    return ExecutionExplanation(
        execution,
        uniform,
        _why_uniform(num_scheduled_tokens_np, query_len, force_uniform_decode),
        alone,
        _why_ubatch(parallel_config, allow_microbatching, num_tokens, uniform, agreement),
        agreement,
        graph_in_ubatches,
    )


def _agreed(
    dispatch: Callable[[int, Collection[CUDAGraphMode] | None], DispatchExplanation], size: int, mode: CUDAGraphMode
) -> tuple[CUDAGraphMode, BatchDescriptor]:
    """Dispatch with what was agreed: the same mode and exactly that size, or the ranks are configured differently."""
    try:
        found = dispatch(size, {mode})
    except InputError as error:
        raise ConfigError(
            f"the data-parallel ranks agreed on {mode} with {size} tokens, for which this rank has no graph. Give all ranks the same "
            f"cudagraph_mode, capture sizes and adapters. ({error})"
        ) from None
    if found.descriptor.num_tokens != size:
        raise ConfigError(
            f"the data-parallel ranks agreed on {size} tokens, this rank would pad them to {found.descriptor.num_tokens}. "
            "Give all ranks the same capture sizes."
        )
    return found.mode, found.descriptor


def _why_uniform(tokens: NDArray[np.integer], query_len: int, forced: bool | None) -> str:
    if forced is not None:
        return "the caller says so"
    odd = np.flatnonzero(tokens != query_len)
    if not odd.size:
        return f"each request has {query_len} token{'s' * (query_len > 1)}"
    return f"request {odd[0]} has {tokens[odd[0]]} tokens, a decode step {query_len}"


def _why_ubatch(config: ParallelConfig, allowed: bool, num_tokens: int, uniform: bool, agreement: DPAgreement | None) -> str:
    if not config.use_ubatching:
        return "off (enable_dbo and ubatch_size)"
    if not allowed:
        return "the caller excludes them"
    threshold = config.dbo_decode_token_threshold if uniform else config.dbo_prefill_token_threshold
    if not check_ubatch_thresholds(config, num_tokens, uniform):
        return f"{num_tokens} tokens are fewer than the threshold, {threshold}"
    if agreement is not None and not agreement.should_ubatch:
        return "another rank's batch is too small, or its last part would be all padding"
    return f"split in {config.num_ubatches}: {num_tokens} tokens reach the threshold, {threshold}, and all ranks agree"


def _check(num_tokens: int, num_reqs: int, tokens: NDArray[np.integer], most: int) -> None:
    if len(tokens) != num_reqs or not num_reqs or tokens.min() < 1:
        raise InputError(f"num_scheduled_tokens_np must hold a number from 1 for each of {num_reqs} requests, got {tokens.tolist()}.")
    if tokens.sum() != num_tokens or tokens.max() != most:
        raise InputError(
            f"num_scheduled_tokens_np has {tokens.sum()} tokens and {tokens.max()} at most, the call says {num_tokens} and {most}."
        )
