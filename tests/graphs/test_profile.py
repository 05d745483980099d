import pytest
from contracts.profile import ProfileContract

from vgraph_lab.graphs import create_backend
from vgraph_lab.graphs.backends.base import GraphBackend


class TestCpu(ProfileContract):
    @pytest.fixture
    def backend(self) -> GraphBackend:
        return create_backend("cpu")
