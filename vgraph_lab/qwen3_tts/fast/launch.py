"""Launching a kernel: the one place that knows how kernels follow each other."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["can_be_resident", "launch", "multiprocessors"]


def launch(kernel: object, grid: tuple[int, ...], *args: Any, compile_only: bool = False, **constants: Any) -> None:
    """Launch a kernel on the device of its first tensor, or only compile it.

    From Hopper on, a kernel is made ready while the one before it still runs (programmatic dependent launch); in a graph that is
    a programmatic edge. Each kernel waits for the other's results by itself (``EARLY``).
    """
    function = cast("Any", kernel)
    if _starts_early(next(value.device for value in args if isinstance(value, Tensor))):
        constants |= {"EARLY": True, "launch_pdl": True}
    if compile_only:
        function.warmup(*args, grid=grid, **constants)
    else:
        function[grid](*args, **constants)


@lru_cache
def _starts_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def can_be_resident(weights: Tensor) -> bool:
    """Whether the kernel that keeps its weights in shared memory runs on their device: it is written for Hopper's matrix unit."""
    return weights.is_cuda and weights.dtype != torch.float32 and torch.cuda.get_device_capability(weights.device)[0] == 9


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many the device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
