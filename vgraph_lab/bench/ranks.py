"""The ranks of a bench that runs on several devices: how they meet, wait for each other, and end if one is lost or stuck."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from vgraph_lab.errors import ConfigError, InputError, RankLostError

__all__ = ["Ranks", "Watchdog", "joined_ranks"]

Value = TypeVar("Value")

_LIMIT_S = 60.0
_TIMEOUT_S = 45.0  # of an exchange: shorter, so that the error that knows more comes first
_ONE_HOST = {
    "GLOO_SOCKET_IFNAME": "lo",  # a machine without a network has no address by its own name
    "NCCL_SOCKET_IFNAME": "lo",
}
_NCCL = {
    "NCCL_NVLS_ENABLE": "0",  # two ranks gain nothing by NVLink multicast, which not every host allows
    "NCCL_GRAPH_REGISTER": "0",  # buffers of a captured exchange lie in torch's pools, which are not NCCL's to register
}


class Watchdog:
    """Ends the process if a stage takes too long: a rank that waits for another one inside a CUDA call can do nothing by itself.

    Args:
        rank: of this process, for the message.
        limit_s: of each stage.
    """

    def __init__(self, rank: int, limit_s: float = _LIMIT_S) -> None:
        self.rank, self.limit_s = rank, limit_s
        self._timer: threading.Timer | None = None

    def stage(self, name: str) -> None:
        """A stage begins, the last one is over."""
        self.stop()
        self._timer = threading.Timer(self.limit_s, self._expire, [name])
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """The last stage is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self, name: str) -> None:
        told = (
            f"error: rank {self.rank} has been in stage {name!r} for {self.limit_s:g} s and ends here. Another rank has failed (look at "
            "its messages), or the devices cannot reach each other: try NCCL_DEBUG=INFO, and NCCL_P2P_DISABLE=1. Where its threads are:"
        )
        try:
            print(told, file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
        finally:
            os._exit(3)


@dataclass(frozen=True)
class Ranks:
    """This process among its like.

    Attributes:
        rank: its number.
        size: of all.
        device: its own.
        experts: the group of all ranks in which experts exchange tokens: NCCL on GPUs, gloo on CPUs.
        experts_with_share: the same with NCCL kept to a number of SMs; None without a share.
        watchdog: tell it each stage.
    """

    rank: int
    size: int
    device: torch.device
    experts: dist.ProcessGroup
    experts_with_share: dist.ProcessGroup | None
    watchdog: Watchdog

    def barrier(self) -> None:
        """Wait for all.

        Raises:
            RankLostError: one has ended, or did not come in time.
        """
        with _told(self.rank):
            dist.barrier()

    def gather(self, value: Value) -> list[Value]:
        """The value of every rank, on every rank.

        Raises:
            RankLostError: one has ended, or did not come in time.
        """
        found: list[Any] = [None] * self.size
        with _told(self.rank):
            dist.all_gather_object(found, value)
        return found


@contextmanager
def _told(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(
            (),
            f"rank {rank} waits for another one that has ended, or did not come within {_TIMEOUT_S:g} s: look at its messages. ({error})",
        ) from error


@contextmanager
def joined_ranks(device: str = "auto", *, comm_sms: int = 0, again: str = "") -> Iterator[Ranks]:
    """Meet the other ranks that torchrun has started, and part from them at the end. Every wait is bounded.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``; each rank takes the GPU of its local number.
        comm_sms: SMs that NCCL may use in the group with a share; 0 for no such group.
        again: what follows ``torchrun --nproc-per-node 2``, for the error.

    Raises:
        InputError: this process is alone, or the device is not one for all ranks.
        ConfigError: there are fewer GPUs than ranks.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2:
        raise InputError(
            "one process has nobody to exchange tokens with. Start two or more, one for each GPU: "
            f"torchrun --nproc-per-node 2 {again}".rstrip()
        )
    rank, place = int(os.environ["RANK"]), _place(device, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    watchdog = Watchdog(rank)
    watchdog.stage("meeting the other ranks")
    for name, value in (_NCCL | (_ONE_HOST if _is_one_host(size) else {})).items():
        os.environ.setdefault(name, value)
    timeout = timedelta(seconds=_TIMEOUT_S)
    try:
        dist.init_process_group("gloo", timeout=timeout)
        share = _experts(place, timeout, comm_sms) if comm_sms and place.type == "cuda" else None
        yield Ranks(rank, size, place, _experts(place, timeout), share, watchdog)
        watchdog.stage("parting from the other ranks")
        gc.collect()  # a graph that holds NCCL's kernels goes before its communicator
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        if place.type == "cpu" and dist.is_initialized():
            dist.destroy_process_group()
        elif place.type == "cuda":  # NCCL may wait for others that do not come any more
            faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
        raise
    finally:
        watchdog.stop()


def _place(device: str, local_rank: int) -> torch.device:
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device {device}: each rank takes a GPU of its own. Accepted: auto, cpu, cuda.")
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count, wanted = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if count < wanted:
        raise ConfigError(f"{wanted} ranks on this host, and {count} GPUs. Start as many ranks as GPUs, or pass --device cpu.")
    place = torch.device("cuda", local_rank)
    torch.cuda.set_device(place)
    return place


def _is_one_host(size: int) -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE", str(size)) == str(size) and Path("/sys/class/net/lo").exists()


def _experts(place: torch.device, timeout: timedelta, comm_sms: int = 0) -> dist.ProcessGroup:
    """A group of its own, so that exchanges and agreements do not meet; all ranks make it at the same time."""
    if place.type == "cpu":
        return _made(dist.new_group(backend="gloo", timeout=timeout))
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    if comm_sms:
        options.config.min_ctas = 1
        options.config.max_ctas = comm_sms
    return _made(dist.new_group(backend="nccl", timeout=timeout, pg_options=options))


def _made(group: Any) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup)  # all ranks are members
    return group
