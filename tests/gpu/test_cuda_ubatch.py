"""Micro-batches on a GPU: two streams, one capture for all threads, replays, and times that the device tells."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vgraph_lab.graphs.backends.base import GraphBackend
from vgraph_lab.vllm_v1 import (
    BatchDescriptor,
    CUDAGraphMode,
    CUDAGraphOptions,
    ParallelConfig,
    SMControlContextManager,
    UBatchTrace,
    UBatchWrapper,
    WrapperGraphs,
    cudagraph_capturing,
    dbo_current_ubatch_id,
    dbo_enabled,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
    maybe_create_ubatch_slices,
    set_forward_context,
    torch_compute_sms,
)

NONE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.FULL
WIDTH = 512


class Model(nn.Module):
    """Matrix products on the compute stream, copies on the communication stream, several times over."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fails_in: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, linear in enumerate(self.linears):
            x = linear(x).tanh()
            dbo_yield_and_switch_from_compute_to_comm()
            received = x.clone()
            for _ in range(20):  # slow enough to be overtaken, if nobody waits for it
                received = received.flip(0)
            if dbo_enabled() and (self.fails_in, number) == (dbo_current_ubatch_id(), 2):
                raise ValueError("lost")
            dbo_yield_and_switch_from_comm_to_compute()
            x = x + received
        return x


class Rig:
    def __init__(self, backend: GraphBackend, parts: int, **arguments: Any) -> None:
        torch.manual_seed(0)
        self.model, self.parts = Model().to(backend.device), parts
        self.graphs = WrapperGraphs(backend)
        arguments.setdefault("cudagraph_options", CUDAGraphOptions(debug=True))
        self.wrapper = UBatchWrapper(self.model, ParallelConfig(2, ubatch_size=parts), FULL, self.graphs, **arguments)
        self.x = torch.zeros(96, WIDTH, device=backend.device)

    def __call__(self, tokens: int, seed: int, mode: CUDAGraphMode = NONE) -> Tensor:
        self.x.normal_(generator=torch.Generator(self.x.device).manual_seed(seed))
        slices = maybe_create_ubatch_slices(True, [tokens], tokens, 1, self.parts)[1]
        context = {"cudagraph_runtime_mode": mode, "batch_descriptor": BatchDescriptor(tokens) if mode else None}
        with set_forward_context(ubatch_slices=slices, num_tokens_across_dp=(tokens, tokens), **context), torch.no_grad():
            found: Tensor = self.wrapper(self.x[:tokens])
        return found.clone()

    def check(self, found: Tensor) -> None:
        with torch.no_grad():
            torch.testing.assert_close(found, self.model(self.x[: len(found)]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_eager_captured_and_replayed(backend: GraphBackend, parts: int) -> None:
    rig = Rig(backend, parts)
    for seed in range(3):
        rig.check(rig(96, seed))
    with cudagraph_capturing():
        for tokens in (96, 48):
            rig.check(rig(tokens, 3, FULL))
    for seed in range(4, 8):
        for tokens in (48, 96):
            rig.check(rig(tokens, seed, FULL))
    assert rig.graphs.stats().hits("v1.full.ubatch") == 8
    rig.check(rig(96, 9))
    rig.graphs.clear()


def test_without_warm_up(backend: GraphBackend) -> None:
    rig = Rig(backend, 2, cudagraph_options=CUDAGraphOptions(num_warmups=0))
    with cudagraph_capturing():
        rig.check(rig(96, 0, FULL))
    rig.check(rig(96, 1, FULL))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("warmups", [0, 1])
def test_an_error_in_a_capture_leaves_all_as_it_was(backend: GraphBackend, number: int, warmups: int) -> None:
    rig = Rig(backend, 2, cudagraph_options=CUDAGraphOptions(num_warmups=warmups))
    with cudagraph_capturing():
        rig(48, 0, FULL)
        rig.model.fails_in = number
        with pytest.raises(ValueError, match="lost"):
            rig(96, 0, FULL)
        rig.model.fails_in = None
        rig.check(rig(96, 1, FULL))
    rig.check(rig(48, 2, FULL))
    rig.check(rig(96, 3, FULL))


def test_the_device_tells_when_streams_were_busy(backend: GraphBackend) -> None:
    trace = UBatchTrace(backend.device)
    rig = Rig(backend, 2, trace=trace)
    rig(96, 0)
    trace.clear()
    rig(96, 1)
    spans = [span for span in trace.spans() if span.stream != "host"]
    assert {span.stream for span in spans} == {"compute", "comm"}
    for ubatch in (0, 1):  # of one micro-batch, all follows each other
        own = [span for span in spans if span.ubatch == ubatch]
        gaps = [second.start_s - first.end_s for first, second in pairwise(own)]
        assert min(gaps) > -10e-6, gaps  # stamps of two streams, on a GPU that other tests may use as well
        assert [span.stream for span in own] == ["compute", "comm"] * 4 + ["compute"]


def test_a_share_of_the_sms(backend: GraphBackend) -> None:
    total = torch.cuda.get_device_properties(backend.device).multi_processor_count
    control = SMControlContextManager(8, None, torch_compute_sms(total), device=backend.device)
    rig = Rig(backend, 2, sm_control=control)
    assert control.is_active
    rig.check(rig(96, 0))
    assert torch._C._get_sm_carveout_experimental() is None
