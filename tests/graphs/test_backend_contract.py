import pytest
from contracts.backend import BackendContract

from vgraph_lab.graphs import create_backend
from vgraph_lab.graphs.backends.base import GraphBackend


class TestCpu(BackendContract):
    @pytest.fixture
    def backend(self) -> GraphBackend:
        return create_backend("cpu")
