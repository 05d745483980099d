"""Tests that need a CUDA device. Without one they skip; with VGL_REQUIRE_CUDA=1 they fail instead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from vgraph_lab.graphs import create_backend
from vgraph_lab.graphs.backends.base import GraphBackend


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.cuda)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        if os.environ.get("VGL_REQUIRE_CUDA") == "1":
            pytest.fail("VGL_REQUIRE_CUDA=1, but torch finds no CUDA device")
        pytest.skip("needs a CUDA device")


@pytest.fixture
def backend() -> GraphBackend:
    """Full fp32 precision, and deterministic cuDNN.

    Without the latter, transposed convolutions in half precision add up in an order that changes from run to run:
    eager then differs from itself, and nothing can be compared bit for bit.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    return create_backend("cuda")
