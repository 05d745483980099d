"""Fixtures of the vLLM v1 path's tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from vgraph_lab.graphs.backends.cpu import CpuGraphBackend
from vgraph_lab.vllm_v1 import WrapperGraphs


@pytest.fixture(scope="module", autouse=True)
def _cheap_collections() -> Iterator[None]:
    """Each pool's first capture collects garbage: keep what the test session holds out of that."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def graphs() -> WrapperGraphs:
    """An empty collection on the cpu backend."""
    return WrapperGraphs(CpuGraphBackend())
