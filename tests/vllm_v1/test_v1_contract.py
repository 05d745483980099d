"""The shared suites on the CPU backend."""

from __future__ import annotations

import pytest
from contracts.v1 import BreakableContract, OffloaderContract, RunnerContract, WrapperContract

from vgraph_lab.graphs.backends.cpu import CpuGraphBackend


@pytest.fixture
def backend() -> CpuGraphBackend:
    return CpuGraphBackend()


class TestWrapper(WrapperContract):
    pass


class TestBreakable(BreakableContract):
    pass


class TestRunner(RunnerContract):
    pass


class TestOffloader(OffloaderContract):
    pass
