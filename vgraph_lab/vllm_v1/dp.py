"""Agreement of data-parallel ranks on one step.

Ranks that exchange tokens inside a step must run it alike: all split it into micro-batches or none does, all pad it to
the largest if they run graphs, and all run the smallest of the modes that they could. Counterpart of
``vllm.v1.worker.dp_utils`` (0.25.1).

:func:`synchronize_dp_ranks` decides from what every rank proposes; :func:`coordinate_batch_across_dp` gathers the
proposals by an all-reduce of a [6, ranks] table in which each rank fills its own column. Two rows say which call it is, so that
ranks that do different things find out. What must be the same from the beginning is compared by :func:`check_equal_settings`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from pydantic import BaseModel
from torch import nn

from vgraph_lab.errors import ConfigError, InputError

from .dp_meeting import DPCall, checked_group, gathered, listed_ranks, met
from .modes import CUDAGraphMode
from .parallel import ParallelConfig
from .runner_config import RunnerConfig
from .ubatch import check_ubatch_thresholds, is_last_ubatch_empty

__all__ = [
    "DPAgreement",
    "DPProposal",
    "check_equal_settings",
    "coordinate_batch_across_dp",
    "synchronize_dp_ranks",
]


@dataclass(frozen=True, slots=True)
class DPProposal:
    """What one rank would do if it were alone.

    Attributes:
        num_tokens_unpadded: real tokens of its batch.
        num_tokens_padded: tokens with the padding that its graph needs.
        should_ubatch: whether its batch is large enough to be split.
        cudagraph_mode: its runtime mode.

    Raises:
        InputError: a count or the mode is not possible.
    """

    num_tokens_unpadded: int
    num_tokens_padded: int
    should_ubatch: bool
    cudagraph_mode: CUDAGraphMode

    def __post_init__(self) -> None:
        if not 1 <= self.num_tokens_unpadded <= self.num_tokens_padded:
            raise InputError(
                f"a rank proposes at least one token and no fewer with padding, got {self.num_tokens_unpadded} and "
                f"{self.num_tokens_padded}. An idle rank runs a dummy batch of one token."
            )
        if not self.cudagraph_mode.is_valid_runtime_mode():
            raise InputError(f"a rank proposes a runtime mode, got {self.cudagraph_mode}. Accepted: NONE, PIECEWISE, FULL.")

    def column(self) -> list[int]:
        """This rank's column of the table that is exchanged."""
        return [self.num_tokens_unpadded, self.num_tokens_padded, int(self.should_ubatch), self.cudagraph_mode.value]


class DPAgreement(NamedTuple):
    """What all ranks do in one step.

    Attributes:
        should_ubatch: whether every rank splits its batch.
        num_tokens_across_dp: tokens of each rank, padding included; None with a single rank.
        cudagraph_mode: the runtime mode of all.
    """

    should_ubatch: bool
    num_tokens_across_dp: tuple[int, ...] | None
    cudagraph_mode: CUDAGraphMode


def synchronize_dp_ranks(proposals: Sequence[DPProposal], num_ubatches: int) -> DPAgreement:
    """The rule of agreement. Every rank computes it from the same proposals, so all get the same answer.

    * The mode is the smallest proposed: a rank without a graph makes all of them eager.
    * Batches are split if all ranks propose it and no rank's last part would be all padding, judged by the smallest
      batch in the size of the largest. With fewer tokens than parts, they are not (vLLM makes empty parts there; its
      thresholds are larger).
    * With graphs or with micro-batches, all are padded to the largest; otherwise each keeps its own size.

    Args:
        proposals: one per rank, in rank order.
        num_ubatches: parts of a batch that is split.

    Raises:
        InputError: there is no rank.
    """
    if not proposals:
        raise InputError("there is no rank to agree with; pass one proposal per rank.")
    mode = CUDAGraphMode(min(proposal.cudagraph_mode.value for proposal in proposals))
    smallest = min(proposal.num_tokens_unpadded for proposal in proposals)
    largest = max(proposal.num_tokens_padded for proposal in proposals)
    wanted = all(proposal.should_ubatch for proposal in proposals)
    should_ubatch = wanted and largest >= num_ubatches and not is_last_ubatch_empty(smallest, largest, num_ubatches)
    if mode is not CUDAGraphMode.NONE or should_ubatch:
        return DPAgreement(should_ubatch, (largest,) * len(proposals), mode)
    return DPAgreement(should_ubatch, tuple(proposal.num_tokens_padded for proposal in proposals), mode)


def coordinate_batch_across_dp(
    num_tokens_unpadded: int,
    allow_microbatching: bool,
    parallel_config: ParallelConfig,
    num_tokens_padded: int | None = None,
    uniform_decode: bool | None = None,
    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    *,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 60.0,
    call: DPCall = DPCall.STEP,
) -> DPAgreement:
    """Agree with the other ranks on the step that all of them are about to run. Every rank must call it, once per step.

    Args:
        num_tokens_unpadded: real tokens of this rank's batch.
        allow_microbatching: whether it may be split.
        parallel_config: ranks, this rank, and when batches are split.
        num_tokens_padded: tokens with padding; by default without any.
        uniform_decode: what kind of batch it is; needed with ``allow_microbatching``.
        cudagraph_mode: this rank's runtime mode.
        group: a gloo group of the data-parallel ranks; by default the whole world.
        timeout_s: how long to wait for the other ranks.
        call: for what.

    Returns:
        The agreement, the same on every rank. A single rank agrees with itself at once.

    Raises:
        InputError: the batch is not possible.
        ConfigError: the group has other ranks than ``parallel_config`` says.
        LifecycleError: the ranks called for different things, or not equally often; names what each did. All of them raise it.
        RankLostError: a rank died, failed, or did not come within ``timeout_s``; names it. The group is of no use after that.
    """
    if allow_microbatching and uniform_decode is None:
        raise InputError("uniform_decode is None: the threshold for micro-batches depends on the kind of batch. Pass True or False.")
    proposal = DPProposal(
        num_tokens_unpadded,
        num_tokens_unpadded if num_tokens_padded is None else num_tokens_padded,
        allow_microbatching and check_ubatch_thresholds(parallel_config, num_tokens_unpadded, bool(uniform_decode)),
        cudagraph_mode,
    )
    if parallel_config.data_parallel_size == 1:
        return DPAgreement(False, None, cudagraph_mode)
    group = checked_group(parallel_config, group)
    columns = met(call, proposal.column(), group, timeout_s, is_next=True)
    proposals = [DPProposal(real, padded, bool(split), CUDAGraphMode(mode)) for real, padded, split, mode in columns]
    return synchronize_dp_ranks(proposals, parallel_config.num_ubatches)


def check_equal_settings(
    config: RunnerConfig,
    model: nn.Module,
    parallel_config: ParallelConfig,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 60.0,
) -> None:
    """Compare what all ranks must have alike: what decides about graphs, warm-ups, batches, micro-batches, and the model's sizes.

    Every rank calls it. Without any process group, nothing is compared: the first step says that there is none.

    Args:
        config: of the runner.
        model: its ``config``, if there is one, and its dtype are compared.
        parallel_config: ranks, this rank, and micro-batches.
        group: see :func:`coordinate_batch_across_dp`.
        timeout_s: how long to wait for the other ranks.

    Raises:
        ConfigError: a setting differs, on every rank; names all of them with their values. Or the group has other ranks.
        LifecycleError: another rank called for something else.
        RankLostError: a rank did not come.
    """
    if parallel_config.data_parallel_size == 1 or (group is None and not dist.is_initialized()):
        return
    group, load = checked_group(parallel_config, group), DPCall.LOAD
    own = json.dumps({name: str(value) for name, value in _shared(config, model, parallel_config).items()}).encode()
    sizes = [size for size, *_ in met(load, [len(own), 0, 0, 0], group, timeout_s)]
    texts = gathered([*own, *bytes(max(sizes) - len(own))], group, timeout_s, str(load))
    found: list[dict[str, str]] = [json.loads(bytes(text[:size])) for text, size in zip(texts, sizes, strict=True)]
    differences = []
    for name in dict.fromkeys(name for each in found for name in each):
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(found):
            ranks.setdefault(each.get(name, "not there"), []).append(rank)
        if len(ranks) > 1:
            differences.append(f"{name}: " + ", ".join(f"{value} on {listed_ranks(where)}" for value, where in ranks.items()))
    if differences:
        raise ConfigError(f"data-parallel ranks must have the same settings. {'; '.join(differences)}. Give all ranks the same.")


def _shared(config: RunnerConfig, model: nn.Module, parallel_config: ParallelConfig) -> dict[str, object]:
    """By name, what all ranks must have alike."""
    shared: dict[str, object] = {"cudagraph_mode": config.mode, "cudagraph_capture_sizes": config.capture_sizes()}
    shared |= {name: getattr(config, name) for name in ("max_num_seqs", "max_num_batched_tokens", "num_speculative_tokens", "num_warmups")}
    names = ("num_ubatches", "dbo_decode_token_threshold", "dbo_prefill_token_threshold")
    shared |= {name: getattr(parallel_config, name) for name in names}
    sizes = getattr(model, "config", None)
    if isinstance(sizes, BaseModel):
        shared |= {f"model.{name}": value for name, value in sizes.model_dump().items()}
    return shared | {"model dtype": next((each.dtype for each in model.parameters()), None)}
