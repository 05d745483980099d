"""Fixtures of the graph framework's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from vgraph_lab.graphs.backends.cpu import ArenaPool, CpuGraph, CpuGraphBackend

Capture = Callable[..., tuple[CpuGraph, Any]]


@pytest.fixture
def cpu_backend() -> CpuGraphBackend:
    return CpuGraphBackend()


@pytest.fixture
def cpu_pool(cpu_backend: CpuGraphBackend) -> ArenaPool:
    return cpu_backend.create_pool()


@pytest.fixture
def cpu_capture(cpu_backend: CpuGraphBackend, cpu_pool: ArenaPool) -> Capture:
    """``capture(function, *static_inputs, owned=())`` into the test's pool."""

    def capture(function: Callable[[], Any], *static_inputs: torch.Tensor, owned: Iterable[torch.Tensor] = ()) -> tuple[CpuGraph, Any]:
        return cpu_backend.capture(function, cpu_pool, static_inputs=static_inputs, owned=owned)

    return capture
