import pytest
import torch
from contracts.generation import GenerationContract
from contracts.suite import settings
from contracts.toy import WIDTH, toy_target
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from vgraph_lab.errors import FallbackReason as R
from vgraph_lab.graphs import Descriptor, VocoderCUDAGraphManager, create_backend
from vgraph_lab.graphs.backends.base import GraphBackend


class TestCpu(GenerationContract):
    @pytest.fixture
    def backend(self) -> GraphBackend:
        return create_backend("cpu")

    @hypothesis_settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        calls=st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(3, 9)), max_size=40),
        cap=st.integers(1, 3),
    )
    def test_captures_stay_within_the_calls_that_graphs_served(self, backend: GraphBackend, calls: list[tuple[int, int]], cap: int) -> None:
        targets = [toy_target(backend.device, Descriptor(1, 4), target_id=f"toy.t{i}") for i in range(2)]
        lazy = {f"toy.t{i}": {"enable_lazy_capture": True, "max_extra_graphs": cap} for i in range(2)}
        fields = {"eviction": "generation", "num_warmups": 1, "targets": lazy}
        with VocoderCUDAGraphManager(backend, targets, settings(**fields)) as manager:
            manager.capture()
            for index, frames in calls:
                x = torch.full((1, frames, WIDTH), 0.1 * frames, device=backend.device)
                assert torch.allclose(targets[index](x), targets[index].routine.eager_call(x), atol=1e-6)
            stats = manager.stats()
            assert stats.calls() == len(calls) == stats.hits() + stats.fallbacks()
            assert set(stats.reasons()) <= {R.CAPACITY}
            assert sum(r.recaptured for r in manager.retirements()) <= stats.hits()
            assert all(sum(e.lazy for e in manager.entries() if e.target_id == t.target_id) <= cap for t in targets)
            assert {e.descriptor for e in manager.entries() if not e.lazy} == {Descriptor(1, 4)}
