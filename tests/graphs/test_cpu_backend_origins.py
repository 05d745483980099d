"""Every tensor of a graph is a static input, owned by the model, or made inside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vgraph_lab.errors import CaptureRefusedError
from vgraph_lab.graphs.backends.cpu import CpuGraphBackend

OUTSIDE = torch.full((3,), 2.0)
OUTSIDE_NUMBER = torch.tensor(2.0)
OUTSIDE_ARRAY = bytearray(np.ones(3, dtype=np.float32).tobytes())


def in_thread(function: Callable[[], Any]) -> Any:
    """Result of ``function`` in another thread."""
    results: list[Any] = []
    thread = Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


USES: dict[str, Callable[[Tensor], Any]] = {
    "global": lambda x: x + OUTSIDE,
    "global_number": lambda x: x * OUTSIDE_NUMBER,
    "view_of_global": lambda x: x + OUTSIDE.flip(0)[:3],
    "written": lambda x: OUTSIDE.add_(x),
    "in_a_list": lambda x: torch.cat([x, OUTSIDE]),
    "frombuffer": lambda x: x + torch.frombuffer(OUTSIDE_ARRAY, dtype=torch.float32),
    "made_by_another_thread": lambda x: x + in_thread(lambda: torch.ones(3)),
    "computed_by_another_thread": lambda x: x + in_thread(lambda: x * 2),
    "returned": lambda x: (x + 1, OUTSIDE),
    "returned_alone": lambda x: {"deep": [OUTSIDE]},
}


@pytest.mark.parametrize("audited", [False, True])
@pytest.mark.parametrize("name", USES)
def test_tensors_from_outside_are_refused(name: str, audited: bool, cpu_backend: CpuGraphBackend) -> None:
    x = torch.ones(3)

    def function() -> Any:
        return USES[name](x)

    pool = cpu_backend.create_pool()
    run = partial(cpu_backend.warm_up, audit=True) if audited else partial(cpu_backend.capture, pool=pool)
    with pytest.raises(CaptureRefusedError, match="outside the captured function") as caught:
        run(function, static_inputs=[x], owned=[])
    assert "allocate_buffers" in caught.value.hint
    assert f"{__file__}:" in caught.value.where
    assert OUTSIDE.tolist() == [2, 2, 2], "refused before anything is written"
    assert (pool.reserved_bytes, pool.live_bytes) == (0, 0)


def test_what_is_declared_is_accepted(cpu_backend: CpuGraphBackend) -> None:
    net = nn.Linear(3, 3)
    net.register_buffer("table", torch.arange(3.0))
    x, inference = torch.ones(3), torch.inference_mode()(lambda: torch.ones(3))()

    def function() -> tuple[Tensor, Tensor]:
        return net(x.view(1, 3)).squeeze(0)[1:] + net.get_buffer("table").detach()[:2] + inference[1:], x

    pool, owned = cpu_backend.create_pool(), [*net.parameters(), *net.buffers()]
    graph, (output, same) = cpu_backend.capture(function, pool, static_inputs=[x, inference], owned=owned)
    assert same is x, "a static input may be an output"
    x.fill_(2)
    graph.replay()
    with torch.no_grad():
        assert torch.equal(output, function()[0])


def test_the_output_of_another_graph_has_to_be_declared(cpu_backend: CpuGraphBackend) -> None:
    x, pool = torch.ones(3), cpu_backend.create_pool()
    first, middle = cpu_backend.capture(lambda: x + 1, pool, static_inputs=[x], owned=[])
    with pytest.raises(CaptureRefusedError, match="outside the captured function"):
        cpu_backend.capture(lambda: middle * 2, pool, static_inputs=[], owned=[])
    second, output = cpu_backend.capture(lambda: middle * 2, pool, static_inputs=[middle], owned=[])
    x.fill_(4)
    first.replay()
    second.replay()
    assert output.tolist() == [10, 10, 10]


def test_a_tensor_type_with_a_dispatch_of_its_own_is_refused(cpu_backend: CpuGraphBackend) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    both = TwoTensor(torch.ones(3), torch.ones(3))
    with pytest.raises(CaptureRefusedError, match="TwoTensor"):
        cpu_backend.capture(lambda: both + 1, cpu_backend.create_pool(), static_inputs=[both], owned=[])
