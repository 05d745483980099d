"""Graph backends: which ones exist, which one this machine gets, and why."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import RLock

import torch

from vgraph_lab.errors import BackendError

from .base import BackendName, GraphBackend
from .cpu import CpuGraphBackend
from .cpu.session import is_capturing as _is_capturing_on_cpu
from .cuda import CudaGraphBackend, StreamOrderedLock, cuda_device

__all__ = ["BackendChoice", "backend_kind", "checked_device", "choose_backend", "create_backend", "execution_lock", "is_capturing"]


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend that a machine gets by default, with the reason in words."""

    name: BackendName
    why: str


def choose_backend() -> BackendChoice:
    """``cuda`` where torch finds a CUDA device, otherwise ``cpu``."""
    if torch.cuda.is_available():
        found = f"{torch.cuda.device_count()} CUDA device(s), first {torch.cuda.get_device_name(0)}"
        return BackendChoice("cuda", f"torch {torch.__version__} finds {found}")
    if torch.version.cuda is None:
        return BackendChoice("cpu", f"torch {torch.__version__} is built without CUDA")
    return BackendChoice("cpu", f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, but finds no CUDA device or driver")


def backend_kind(device: str | torch.device) -> BackendName:
    """Which backend captures on a device, there or not.

    Raises:
        BackendError: none does.
    """
    name = str(device)
    if name.partition(":")[0] == "cuda":
        return "cuda"
    if name == "cpu":
        return "cpu"
    raise BackendError(f"no graph backend captures on {name!r}. Accepted: 'auto', 'cpu', 'cuda', 'cuda:N'.")


def checked_device(device: str | torch.device) -> torch.device:
    """A device that a graph backend captures on and that is there.

    Args:
        device: ``auto`` (see :func:`choose_backend`), ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        BackendError: it is another kind of device, or not there.
    """
    name = choose_backend().name if device == "auto" else str(device)
    return cuda_device(name) if backend_kind(name) == "cuda" else torch.device("cpu")


def create_backend(device: str | torch.device = "auto") -> GraphBackend:
    """The graph backend for a device.

    Args:
        device: ``auto`` (see :func:`choose_backend`), ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        BackendError: the device is not there, or no backend captures on it.
    """
    place = checked_device(device)
    return CudaGraphBackend(place) if place.type == "cuda" else CpuGraphBackend()


def is_capturing() -> bool:
    """Whether the calling thread is inside a capture of any backend, so that data must not be looked at."""
    return _is_capturing_on_cpu() or (torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing()))


def execution_lock(device: torch.device) -> AbstractContextManager[object]:
    """A re-entrant lock for work on one device: threads take turns, and on CUDA their streams do, too."""
    return StreamOrderedLock(device) if device.type == "cuda" else RLock()
