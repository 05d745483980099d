"""Graph backends: which ones exist, which one this machine gets, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vgraph_lab.errors import BackendError

from .base import BackendName, GraphBackend
from .cpu import CpuGraphBackend
from .cpu.session import is_capturing as _is_capturing_on_cpu
from .cuda import CudaGraphBackend

__all__ = ["BackendChoice", "backend_kind", "checked_device", "choose_backend", "create_backend", "is_capturing"]


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
    return create_backend(device).device


def create_backend(device: str | torch.device = "auto") -> GraphBackend:
    """The graph backend for a device.

    Args:
        device: ``auto`` (see :func:`choose_backend`), ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        BackendError: the device is not there, or no backend captures on it.
    """
    name = choose_backend().name if device == "auto" else str(device)
    return CudaGraphBackend(name) if backend_kind(name) == "cuda" else CpuGraphBackend()


def is_capturing() -> bool:
    """Whether the calling thread is inside a capture of any backend, so that data must not be looked at."""
    return _is_capturing_on_cpu() or (torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing()))
