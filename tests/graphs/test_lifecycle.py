import pytest
from contracts.lifecycle import LifecycleContract, check_fork_is_refused

from vgraph_lab.graphs import create_backend
from vgraph_lab.graphs.backends.base import GraphBackend


class TestCpu(LifecycleContract):
    @pytest.fixture
    def backend(self) -> GraphBackend:
        return create_backend("cpu")

    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_forked_child_refuses(self, backend: GraphBackend) -> None:
        check_fork_is_refused(backend)
