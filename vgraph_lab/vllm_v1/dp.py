"""Agreement of data-parallel ranks on one step.

Ranks that exchange tokens inside a step must run it alike: all split it into micro-batches or none does, all pad it to
the largest if they run graphs, and all run the smallest of the modes that they could. Counterpart of
``vllm.v1.worker.dp_utils`` (0.25.1).

:func:`synchronize_dp_ranks` decides from what every rank proposes; :func:`coordinate_batch_across_dp` gathers the
proposals by an all-reduce of a [4, ranks] table in which each rank fills its own column.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from vgraph_lab.errors import ConfigError, InputError, RankLostError

from .modes import CUDAGraphMode
from .parallel import ParallelConfig
from .ubatch import check_ubatch_thresholds, is_last_ubatch_empty

__all__ = ["DPAgreement", "DPProposal", "coordinate_batch_across_dp", "name_lost_ranks", "synchronize_dp_ranks"]


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

    Returns:
        The agreement, the same on every rank. A single rank agrees with itself at once.

    Raises:
        InputError: the batch is not possible.
        ConfigError: the group has other ranks than ``parallel_config`` says.
        RankLostError: a rank died or did not come within ``timeout_s``; names it. The group is of no use after that.
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
    proposals = _exchange(proposal, parallel_config, dist.group.WORLD if group is None else group, timeout_s)
    return synchronize_dp_ranks(proposals, parallel_config.num_ubatches)


def name_lost_ranks(
    error: RankLostError, parallel_config: ParallelConfig, group: dist.ProcessGroup | None = None, timeout_s: float = 60.0
) -> RankLostError:
    """The error of a step whose exchange has failed, with the ranks that are lost. Every rank whose step fails so must call it.

    Args:
        error: of the exchange, which cannot know them.
        parallel_config: ranks, and this rank.
        group: the one in which they agree on steps; by default the whole world.
        timeout_s: how long the others may take to find out that the step has failed.
    """
    group = dist.group.WORLD if group is None else group
    if error.ranks or parallel_config.data_parallel_size == 1 or group is None:
        return error
    start = time.monotonic()
    lost, how = _lost_ranks(group, start + timeout_s + _LINGER_S)
    who = _named(lost, parallel_config.data_parallel_size)
    found = RankLostError(
        lost,
        f"{who} was lost in step {_rounds.get(group, 0)} of the data-parallel group ({time.monotonic() - start:.1f} s to find out; "
        f"{how}): {error}. Look at its log: no other rank can go on without it.",
    )
    for note in getattr(error, "__notes__", ()):
        found.add_note(note)
    return found


def _named(lost: Sequence[int], size: int) -> str:
    return f"{' and '.join(f'rank {number}' for number in lost) or 'no single rank'} of {size}"


_rounds: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_LINGER_S = 2.0
_POLL_S = 0.01


def _exchange(proposal: DPProposal, config: ParallelConfig, group: dist.ProcessGroup | None, timeout_s: float) -> list[DPProposal]:
    if group is None:
        raise ConfigError(
            f"data_parallel_size={config.data_parallel_size}, but no process group is there. "
            "Start the ranks with torchrun and call torch.distributed.init_process_group('gloo')."
        )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if (rank, size) != (config.data_parallel_rank, config.data_parallel_size):
        raise ConfigError(
            f"the process group says rank {rank} of {size}, the settings data_parallel_rank={config.data_parallel_rank} and "
            f"data_parallel_size={config.data_parallel_size}. Let them agree."
        )
    _rounds[group] = round_number = _rounds.get(group, -1) + 1
    table = torch.zeros(4, size, dtype=torch.int32)
    table[:, rank] = torch.tensor(proposal.column(), dtype=torch.int32)
    start = time.monotonic()
    try:
        work = dist.all_reduce(table, group=group, async_op=True)
        assert work is not None  # async_op
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        lost, how = _lost_ranks(group, start + timeout_s + _LINGER_S)
        raise RankLostError(
            lost,
            f"{_named(lost, size)} did not take part in step {round_number} of the data-parallel group "
            f"({time.monotonic() - start:.1f} s, timeout {timeout_s:g} s; {how}). Look at its log: no other rank can go on without it.",
        ) from error
    columns = table.T.tolist()
    return [DPProposal(real, padded, bool(split), CUDAGraphMode(mode)) for real, padded, split, mode in columns]


def _lost_ranks(group: dist.ProcessGroup, deadline_s: float) -> tuple[list[int], str]:
    """Which ranks are not there any more, and how that was found out.

    A failed collective does not say who is at fault: neighbours of a dead rank see a closed connection, others a timeout.
    So whoever fails signs in at the store, and the rank that does not is the lost one. Somebody must be; once only one
    name is missing, there is nothing to wait for. Some may find out inside of a step and some in the agreement on the next one;
    the group is of no use after either, so one list serves both.
    """
    # The store belongs to the default group; torch has no public way to it.
    name = f"vgraph_lab/lost/{group.group_name}"
    store = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    try:
        store.set(f"{rank}", "failed")
        missing = _absent(store, "", range(size), deadline_s, enough=1)
        # Whoever hosts the store must not leave before the others have looked.
        store.set(f"seen/{rank}", "1")
        with suppress(RuntimeError):  # the host has seen what it needs, and is gone: so have we
            _absent(store, "seen/", [r for r in range(size) if r not in missing], time.monotonic() + _LINGER_S, enough=0)
    except RuntimeError as error:
        return [0], f"the store that rank 0 keeps is gone: {str(error).splitlines()[0]}"
    return missing, "the others have signed in at the store"


def _absent(store: dist.distributed_c10d.Store, prefix: str, ranks: Sequence[int], deadline_s: float, *, enough: int) -> list[int]:
    """Ranks without a key, once there are ``enough`` or fewer of them or time is up."""
    while True:
        missing = [rank for rank in ranks if not store.check([f"{prefix}{rank}"])]
        if len(missing) <= enough or time.monotonic() > deadline_s:
            return missing
        time.sleep(_POLL_S)
