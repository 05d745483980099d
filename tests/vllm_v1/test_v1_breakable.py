"""Breakable graphs: what runs eagerly, what it sees, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vgraph_lab.errors import BackendError, CaptureError, CaptureRefusedError, ReplayError
from vgraph_lab.graphs.backends.base import CapturedGraph
from vgraph_lab.graphs.backends.cpu import CpuGraphBackend
from vgraph_lab.vllm_v1 import (
    BatchDescriptor,
    BreakableCUDAGraphCapture,
    BreakableCUDAGraphWrapper,
    CUDAGraphMode,
    CUDAGraphOptions,
    WrapperGraphs,
    cudagraph_capturing,
    eager_break_during_capture,
    get_forward_context,
    set_forward_context,
)

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
WIDTH = 4


@eager_break_during_capture
def attention(x: Tensor, out: Tensor) -> None:
    """Adds up the real rows; looks at data on the host, which no graph may."""
    rows = get_forward_context().attn_metadata["num_tokens"]
    assert not x[:rows].isnan().any().item()
    out.copy_(x)
    out[:rows] += x[:rows].sum(0)


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(layers + 1))

    def forward(self, x: Tensor) -> Tensor:
        *layers, last = self.weights
        for weight in layers:
            x = (x @ weight).tanh()
            out = torch.empty_like(x)  # the graph's own memory, which the break writes into
            attention(x, out)
            x = out + x
        result: Tensor = x @ last
        return result


def passed(mode: CUDAGraphMode, size: int, rows: int) -> dict[str, Any]:
    batch = BatchDescriptor(size, size if mode is FULL else None)
    return {"attn_metadata": {"num_tokens": rows}, "cudagraph_runtime_mode": mode, "batch_descriptor": batch, "num_tokens": rows}


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from([4, 8]), st.integers(1, 4)), min_size=1, max_size=6))
def test_replays_equal_eager_with_real_metadata(layers: int, calls: list[tuple[int, int]]) -> None:
    graphs, model, x = WrapperGraphs(CpuGraphBackend()), Model(layers), torch.zeros(8, WIDTH)
    wrapper = BreakableCUDAGraphWrapper(model, graphs, cudagraph_options=CUDAGraphOptions(debug=True))
    with cudagraph_capturing():
        for size in (8, 4):
            with set_forward_context(**passed(PIECEWISE, size, size)):
                wrapper(x[:size])
    for seed, (size, rows) in enumerate(calls):
        x.copy_(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)))
        with set_forward_context(**passed(PIECEWISE, size, rows)):
            output = wrapper(x[:size])
        with torch.no_grad(), set_forward_context(**passed(NONE, size, rows)):
            assert torch.allclose(output, model(x[:size]), atol=1e-6)
    assert graphs.sink.snapshot().hits() == len(calls)
    del output
    graphs.clear()
    assert graphs.pool.reserved_bytes == 0


def test_what_is_left_out(graphs: WrapperGraphs) -> None:
    wrapper = BreakableCUDAGraphWrapper(Model(3), graphs)
    with cudagraph_capturing(), set_forward_context(**passed(PIECEWISE, 4, 4)):
        first = wrapper(torch.ones(4, WIDTH))
    (entry,) = graphs.in_capture_order()
    capture = entry.graph
    assert isinstance(capture, BreakableCUDAGraphCapture)
    assert isinstance(capture, CapturedGraph)
    assert repr(capture) == "BreakableCUDAGraphCapture(graphs=4, eager_breaks=3)"
    assert [name for name, _ in capture.segments][:3] == ["segment 0", "attention", "segment 1"]
    nodes = capture.nodes()
    assert [n.name for n in nodes if n.kind == "host"] == ["attention"] * 3
    assert [n.index for n in nodes] == list(range(len(nodes)))
    assert all(d < n.index for n in nodes for d in n.dependencies)
    assert entry.cost.node_counts["host"] == 3
    assert entry.cost.output_bytes == first.nbytes


def test_full_leaves_nothing_eager(graphs: WrapperGraphs) -> None:
    @eager_break_during_capture
    def double(x: Tensor, out: Tensor) -> None:
        out.copy_(x * 2)

    def model(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        double(x + 1, out)
        return out + 1

    wrapper, x = BreakableCUDAGraphWrapper(model, graphs), torch.ones(4)
    with cudagraph_capturing():
        for mode in (PIECEWISE, FULL):
            with set_forward_context(**passed(mode, 4, 4)):
                assert (wrapper(x) == 5).all()
    broken, whole = graphs.in_capture_order()
    assert broken.cost.node_counts["host"] == 1
    assert "host" not in whole.cost.node_counts
    wrong = passed(FULL, 4, 4) | {"batch_descriptor": BatchDescriptor(4)}
    with set_forward_context(**wrong), pytest.raises(ReplayError, match="in mode PIECEWISE"):
        wrapper(x)


def test_a_host_access_outside_of_a_break_is_refused(graphs: WrapperGraphs) -> None:
    """As in FULL mode, where the same attention has to be capturable."""
    wrapper = BreakableCUDAGraphWrapper(Model(2), graphs)
    with cudagraph_capturing(), set_forward_context(**passed(FULL, 4, 4)), pytest.raises(CaptureRefusedError, match="item"):
        wrapper(torch.ones(4, WIDTH))
    assert graphs.pool.reserved_bytes == 0
    assert BreakableCUDAGraphCapture.current() is None
    with cudagraph_capturing(), set_forward_context(**passed(PIECEWISE, 4, 4)):
        wrapper(torch.ones(4, WIDTH))


def test_a_break_that_returns_a_fresh_tensor_fails(graphs: WrapperGraphs) -> None:
    @eager_break_during_capture
    def fresh(x: Tensor) -> Tensor:
        return x * 2

    wrapper = BreakableCUDAGraphWrapper(lambda x: fresh(x + 1) + 1, graphs)
    with (
        cudagraph_capturing(),
        set_forward_context(**passed(PIECEWISE, 4, 4)),
        pytest.raises(CaptureError, match=r"fresh runs eagerly .* returned a fresh tensor \(float32\[4\]\)"),
    ):
        wrapper(torch.ones(4))
    assert graphs.pool.reserved_bytes == 0


def test_a_break_may_return_what_it_was_given(graphs: WrapperGraphs) -> None:
    @eager_break_during_capture
    def negate(x: Tensor) -> Tensor:
        return x.neg_()[:2]

    wrapper, x = BreakableCUDAGraphWrapper(lambda x: negate(x + 1) + 1, graphs), torch.ones(4)
    with cudagraph_capturing(), set_forward_context(**passed(PIECEWISE, 4, 4)):
        assert wrapper(x).tolist() == [-1, -1]
        x.fill_(4)
        assert wrapper(x).tolist() == [-4, -4]


def test_an_error_in_a_break_leaves_nothing(graphs: WrapperGraphs) -> None:
    @eager_break_during_capture
    def breaks(x: Tensor) -> None:
        raise ZeroDivisionError

    def model(x: Tensor) -> Tensor:
        y = x + 1
        breaks(y)
        return y

    options = CUDAGraphOptions(num_warmups=0)
    wrapper = BreakableCUDAGraphWrapper(model, graphs, cudagraph_options=options)
    state = torch.get_rng_state()
    with cudagraph_capturing(), set_forward_context(**passed(PIECEWISE, 4, 4)), pytest.raises(ZeroDivisionError) as caught:
        wrapper(torch.ones(4))
    assert caught.tb is not None  # and with it all frames of the failed capture
    assert graphs.in_capture_order() == []
    assert graphs.pool.reserved_bytes == 0
    assert torch.equal(state, torch.get_rng_state())
    assert torch.is_grad_enabled()


def test_sessions_do_not_nest() -> None:
    backend = CpuGraphBackend()
    with BreakableCUDAGraphCapture(backend, backend.create_pool()) as outer:
        assert BreakableCUDAGraphCapture.current() is outer
        with (
            pytest.raises(CaptureError, match="a breakable capture cannot begin inside another one"),
            BreakableCUDAGraphCapture(backend, backend.create_pool()),
        ):
            pass
        assert BreakableCUDAGraphCapture.current() is outer
    assert BreakableCUDAGraphCapture.current() is None
    assert outer.num_graphs == 0


def test_an_output_from_outside_is_refused_and_nothing_stays(graphs: WrapperGraphs) -> None:
    outside = torch.ones(4)

    @eager_break_during_capture
    def negate(x: Tensor) -> None:
        x.neg_()

    def model(x: Tensor) -> Tensor:
        negate(x + 1)
        return outside

    wrapper = BreakableCUDAGraphWrapper(model, graphs)
    with (
        cudagraph_capturing(),
        set_forward_context(**passed(PIECEWISE, 4, 4)),
        pytest.raises(CaptureRefusedError, match="the output") as caught,
    ):
        wrapper(torch.ones(4))
    assert caught.tb is not None
    assert graphs.pool.reserved_bytes == 0
    assert BreakableCUDAGraphCapture.current() is None


def test_a_model_of_breaks_only_fails(graphs: WrapperGraphs) -> None:
    @eager_break_during_capture
    def negate(x: Tensor) -> Tensor:
        return x.neg_()

    wrapper = BreakableCUDAGraphWrapper(negate, graphs)
    with cudagraph_capturing(), set_forward_context(**passed(PIECEWISE, 4, 4)), pytest.raises(CaptureError, match="is empty"):
        wrapper(torch.ones(4))


def test_another_backend_is_refused() -> None:
    class Elsewhere(CpuGraphBackend):
        pass

    class NotCpu:
        name = "cuda"

    with pytest.raises(BackendError, match="each into its own pools, not by a NotCpu"):
        BreakableCUDAGraphCapture(NotCpu(), Elsewhere().create_pool())  # type: ignore[arg-type]


def test_reset_ends_it() -> None:
    backend, x = CpuGraphBackend(), torch.ones(4)
    pool = backend.create_pool()
    with BreakableCUDAGraphCapture(backend, pool, static_inputs=[x]) as capture:
        output = x * 2
    x.fill_(3)
    capture.replay()
    assert (output == 6).all()
    del output
    for _ in range(2):
        capture.reset()
    assert pool.reserved_bytes == 0
    with pytest.raises(ReplayError, match="was reset"):
        capture.replay()
