"""The incremental contract on a CUDA device, and what only a device shows."""

from __future__ import annotations

import pytest
import torch
from chunks_on_device import OnDevice
from contracts.incremental import IncrementalContract, running, stage
from contracts.streaming import MIXED, Stream, play

from vgraph_lab.graphs.backends.base import GraphBackend


class TestIncremental(OnDevice, IncrementalContract):
    """On the device."""

    most_copies = 5  # slots in and rows copied, codes and places in, the samples cloned


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_graphs_equal_eager(backend: GraphBackend, dtype: torch.dtype) -> None:
    device, found = str(backend.device), []
    for graphs in (True, False):
        with running(device, stage([2], enforce_eager=not graphs, decode_batch_max_size=2), dtype=dtype) as runner:
            found.append(play(runner, [Stream(s.name, s.reference, [1, 3, 3, 3], seed=1) for s in MIXED[:2]]))
    for name, pieces in found[0].items():
        assert torch.allclose(torch.cat(pieces), torch.cat(found[1][name]), atol=0.05)
