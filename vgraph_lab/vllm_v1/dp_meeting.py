"""How data-parallel ranks meet: a table that each fills a column of, and what becomes of a meeting to which somebody does not come."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from vgraph_lab.errors import ConfigError, LifecycleError, RankLostError

from .parallel import ParallelConfig

__all__ = ["DPCall", "checked_group", "gathered", "listed_ranks", "met", "rank_failures"]


class DPCall(IntEnum):
    """What ranks meet for; all must have called for the same."""

    LOAD = 0
    STEP = 1
    EXPLAIN = 2
    PARITY = 3

    def __str__(self) -> str:
        return {
            DPCall.LOAD: "load_model()",
            DPCall.STEP: "a step (execute_model() or execute_dummy_batch())",
            DPCall.EXPLAIN: "explain()",
            DPCall.PARITY: "check_parity()",
        }[self]


_rounds: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_told: WeakSet[dist.ProcessGroup] = WeakSet()
_LINGER_S = 2.0
_POLL_S = 0.01


def checked_group(config: ParallelConfig, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, by default the whole world.

    Raises:
        ConfigError: there is none, or it has other ranks than the settings say.
    """
    group = dist.group.WORLD if group is None else group
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
    return group


def met(call: DPCall, column: list[int], group: dist.ProcessGroup, timeout_s: float, *, is_next: bool = False) -> list[list[int]]:
    """The columns of all ranks, once they have all called for the same.

    Args:
        call: for what.
        column: of this rank, four numbers.
        group: of the ranks.
        timeout_s: how long to wait for the others.
        is_next: whether another step begins with it.

    Raises:
        LifecycleError: the ranks called for different things, or not equally often. All of them raise it.
        RankLostError: a rank did not come.
    """
    if is_next:
        _rounds[group] = _rounds.get(group, -1) + 1
    number = _rounds.get(group, -1)
    where = str(call) if call is DPCall.LOAD else f"step {number}"
    columns = gathered([*column, int(call), number], group, timeout_s, where)
    calls = [(DPCall(each[-2]), each[-1]) for each in columns]
    if len(set(calls)) > 1:
        told = ", ".join(f"rank {rank}: {other}, number {count}" for rank, (other, count) in enumerate(calls))
        raise LifecycleError(f"the data-parallel ranks have called for different things ({told}). Make the same calls on every rank.")
    if group in _told:  # this rank had failed, and all have come nevertheless
        _store(group).set(f"failed/{dist.get_rank(group)}", "")
        _told.discard(group)
    return [each[:-2] for each in columns]


def gathered(column: list[int], group: dist.ProcessGroup, timeout_s: float, where: str) -> list[list[int]]:
    """The columns of all ranks, of the same length everywhere.

    Raises:
        RankLostError: a rank did not come; names it.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    table = torch.zeros(len(column), size, dtype=torch.int32)
    table[:, rank] = torch.tensor(column, dtype=torch.int32)
    start = time.monotonic()
    try:
        work = dist.all_reduce(table, group=group, async_op=True)
        assert work is not None  # async_op
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        lost, how, failures = _lost_ranks(group, start + timeout_s + _LINGER_S)
        raise RankLostError(
            lost,
            f"{failures or f'{_named(lost, size)} did not take part in {where}'} of the data-parallel group "
            f"({time.monotonic() - start:.1f} s, timeout {timeout_s:g} s; {how}). Look at its log: no other rank can go on without it.",
        ) from error
    columns: list[list[int]] = table.T.tolist()
    return columns


@contextmanager
def rank_failures(parallel_config: ParallelConfig, group: dist.ProcessGroup | None = None, timeout_s: float = 60.0) -> Iterator[None]:
    """Around the passes of a step: whatever fails in it names the rank at fault.

    If an exchange fails, its error says which ranks are lost. Any other error is told to the others, which may wait for this rank in
    vain; that waits for nobody.

    Args:
        parallel_config: ranks, and this rank.
        group: the one in which they agree on steps; by default the whole world.
        timeout_s: how long the others may take to find out that the step has failed.

    Raises:
        RankLostError: an exchange failed; names the ranks.
        BaseException: any other error, as it came.
    """
    try:
        yield
    except BaseException as error:
        group = dist.group.WORLD if group is None and dist.is_initialized() else group
        if group is None or parallel_config.data_parallel_size == 1:
            raise
        if isinstance(error, RankLostError) and not error.ranks:
            raise _with_names(error, parallel_config, group, timeout_s) from error
        if not isinstance(error, RankLostError):
            _tell(error, group)
        raise


def _tell(error: BaseException, group: dist.ProcessGroup) -> None:
    told = f"{_step(group)} with {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    with suppress(RuntimeError):  # the store is gone with the rank that kept it, and the others see that
        _store(group).set(f"failed/{dist.get_rank(group)}", told.removesuffix(": "))
        _told.add(group)


def _with_names(error: RankLostError, parallel_config: ParallelConfig, group: dist.ProcessGroup, timeout_s: float) -> RankLostError:
    start = time.monotonic()
    lost, how, failures = _lost_ranks(group, start + timeout_s + _LINGER_S)
    who = failures or f"{_named(lost, parallel_config.data_parallel_size)} was lost {_step(group)}"
    found = RankLostError(
        lost,
        f"{who} of the data-parallel group ({time.monotonic() - start:.1f} s to find out; "
        f"{how}): {error}. Look at its log: no other rank can go on without it.",
    )
    for note in getattr(error, "__notes__", ()):
        found.add_note(note)
    return found


def _step(group: dist.ProcessGroup) -> str:
    number = _rounds.get(group, -1)
    return f"in step {number}" if number >= 0 else "before step 0"


def listed_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    return " and ".join(f"rank {number}" for number in ranks)


def _named(lost: Sequence[int], size: int) -> str:
    return f"{listed_ranks(lost)} of {size}" if lost else f"none of the {size} ranks is missing by now, yet one"


def _store(group: dist.ProcessGroup) -> dist.distributed_c10d.Store:
    """Of the default group; torch has no public way to it."""
    return dist.distributed_c10d.PrefixStore(f"vgraph_lab/lost/{group.group_name}", dist.distributed_c10d._get_default_store())


def _lost_ranks(group: dist.ProcessGroup, deadline_s: float) -> tuple[list[int], str, str]:
    """Which ranks are at fault, how that was found out, and what they told of it, if they did (:func:`rank_failures`).

    A failed collective does not say who is at fault: neighbours of a dead rank see a closed connection, others a timeout.
    So whoever fails signs in at the store, and the rank that does not is the lost one. Somebody must be; once only one
    name is missing, there is nothing to wait for. Some may find out inside of a step and some in the agreement on the next one;
    the group is of no use after either, so one list serves both. A rank that has told of its failure is at fault whether it signs in or
    not: it may have gone on to the next step, and others may still wait for it in the last one.
    """
    store = _store(group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    try:
        store.set(f"{rank}", "failed")
        missing = _absent(store, "", range(size), deadline_s, enough=1)
        told = _failures(store, size)
        # Whoever hosts the store must not leave before the others have looked.
        store.set(f"seen/{rank}", "1")
        with suppress(RuntimeError):  # the host has seen what it needs, and is gone: so have we
            _absent(store, "seen/", [r for r in range(size) if r not in missing], time.monotonic() + _LINGER_S, enough=0)
    except RuntimeError as error:
        return [0], f"the store that rank 0 keeps is gone: {str(error).splitlines()[0]}", ""
    if told:
        return list(told), "it told so at the store", " and ".join(f"rank {each} failed {how}" for each, how in told.items())
    return missing, "the others have signed in at the store", ""


def _failures(store: dist.distributed_c10d.Store, size: int) -> dict[int, str]:
    """What ranks have told, by rank."""
    found = {rank: store.get(f"failed/{rank}").decode() for rank in range(size) if store.check([f"failed/{rank}"])}
    return {rank: told for rank, told in found.items() if told}


def _absent(store: dist.distributed_c10d.Store, prefix: str, ranks: Sequence[int], deadline_s: float, *, enough: int) -> list[int]:
    """Ranks without a key, once there are ``enough`` or fewer of them or time is up."""
    while True:
        missing = [rank for rank in ranks if not store.check([f"{prefix}{rank}"])]
        if len(missing) <= enough or time.monotonic() > deadline_s:
            return missing
        time.sleep(_POLL_S)
