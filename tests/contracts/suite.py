"""What the suites about Managers have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vgraph_lab.config import VocoderGraphSettings
from vgraph_lab.graphs import Descriptor, Target, VocoderCUDAGraphManager
from vgraph_lab.graphs.backends.base import GraphBackend

from .toy import WIDTH, toy_target

__all__ = ["LARGE", "SMALL", "MakeManager", "ManagerSuite", "settings"]

SMALL, LARGE = Descriptor(1, 4), Descriptor(2, 8)
MakeManager = Callable[..., VocoderCUDAGraphManager]


def settings(**fields: Any) -> VocoderGraphSettings:
    return VocoderGraphSettings.from_dict(fields)


class ManagerSuite:
    """Subclassed once per backend, which provides the ``backend`` fixture."""

    @pytest.fixture
    def make(self, backend: GraphBackend) -> Any:
        """Make Managers that are cleared at the end of the test."""
        made: list[VocoderCUDAGraphManager] = []

        def make(*targets: Target[Any], **fields: Any) -> VocoderCUDAGraphManager:
            made.append(VocoderCUDAGraphManager(backend, targets, settings(**fields)))
            return made[-1]

        yield make
        for manager in made:
            manager.clear()

    @pytest.fixture
    def target(self, backend: GraphBackend) -> Target[Any]:
        return toy_target(backend.device, SMALL, LARGE, is_capturing=backend.is_capturing)

    def x(self, backend: GraphBackend, batch: int = 1, frames: int = 4, seed: int = 0) -> Tensor:
        return torch.randn(batch, frames, WIDTH, generator=torch.Generator().manual_seed(seed)).to(backend.device)
