"""Managers over a toy Target, cleared at the end of each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from contracts.toy import toy_target

from vgraph_lab.config import VocoderGraphSettings
from vgraph_lab.graphs import Descriptor, Target, VocoderCUDAGraphManager, create_backend

MakeManager = Callable[..., tuple[VocoderCUDAGraphManager, Target[Any]]]


@pytest.fixture
def make_manager() -> Iterator[MakeManager]:
    """``make_manager(*descriptors, **settings)`` → a Manager that is not captured yet, and its Target."""
    made: list[VocoderCUDAGraphManager] = []

    def make(*descriptors: Descriptor, **settings: Any) -> tuple[VocoderCUDAGraphManager, Target[Any]]:
        backend = create_backend("cpu")
        target = toy_target("cpu", *descriptors, is_capturing=backend.is_capturing)
        made.append(VocoderCUDAGraphManager(backend, [target], VocoderGraphSettings.from_dict(settings)))
        return made[-1], target

    yield make
    for manager in made:
        manager.clear()
