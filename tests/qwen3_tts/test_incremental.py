"""The incremental contract on the CPU backend."""

from __future__ import annotations

import pytest
from contracts.incremental import IncrementalContract


@pytest.fixture
def device() -> str:
    return "cpu"


class TestIncremental(IncrementalContract):
    """On the CPU."""
