"""Shared scratch memory, weights on the host, and tensors that do not keep their memory."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any

import pytest
import torch
from contracts.v1 import ready_runner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vgraph_lab.errors import ConfigError, InputError, LifecycleError
from vgraph_lab.graphs.backends.cpu import CpuGraph, CpuGraphBackend
from vgraph_lab.vllm_v1 import (
    BatchDescriptor,
    BreakableCUDAGraphWrapper,
    CUDAGraphMode,
    CUDAGraphOptions,
    CUDAGraphWrapper,
    PrefetchOffloader,
    RunnerConfig,
    ScheduledRequest,
    WorkloadConfig,
    WorkloadModel,
    WorkspaceManager,
    WrapperGraphs,
    cudagraph_capturing,
    eager_break_during_capture,
    set_forward_context,
    weak_ref_tensor,
    weak_ref_tensors,
)

PIECEWISE, FULL = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
CPU = torch.device("cpu")


def batch_of(rows: int, mode: CUDAGraphMode = FULL) -> dict[str, Any]:
    return {"cudagraph_runtime_mode": mode, "batch_descriptor": BatchDescriptor(rows, rows if mode is FULL else None)}


# ----------------------------------------------------------------------------------------------- workspace

SHAPES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
    ),
    min_size=1,
    max_size=5,
)


@given(SHAPES, SHAPES)
def test_tensors_do_not_overlap_and_memory_is_shared(one: list[Any], other: list[Any]) -> None:
    manager = WorkspaceManager(CPU)
    for wanted in (one, other):
        found = manager.get_simultaneous(*wanted)
        assert [(t.shape, t.dtype) for t in found] == [(torch.Size(shape), dtype) for shape, dtype in wanted]
        ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in found if t.nbytes)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
        assert all((t.data_ptr() - manager._buffers[0].data_ptr()) % 256 == 0 for t in found if t.nbytes)
    size = manager.nbytes
    manager.lock()
    manager.get_simultaneous(*one), manager.get_simultaneous(*other)
    assert manager.nbytes == size


def test_growing_after_the_lock_fails_with_both_sizes() -> None:
    manager = WorkspaceManager(CPU)
    manager.get_simultaneous(((1000,), torch.uint8))
    manager.lock()
    assert manager.is_locked()
    with pytest.raises(LifecycleError, match=r"2,304 bytes .* asked for, 1,024 are reserved, and it is locked"):
        manager.get_simultaneous(((2300,), torch.uint8))
    manager.unlock()
    manager.get_simultaneous(((2300,), torch.uint8))
    with pytest.raises(InputError, match="sizes of a workspace are 0 or more"):
        manager.get_simultaneous(((-1,), torch.uint8))


def test_growing_inside_a_capture_fails(graphs: WrapperGraphs) -> None:
    manager = WorkspaceManager(CPU)

    def model(x: Tensor) -> Tensor:
        (scratch,) = manager.get_simultaneous(((len(x),), torch.float32))
        return torch.add(x, 1, out=scratch) * 2

    options, x = CUDAGraphOptions(num_warmups=0), torch.ones(4)
    wrapper = CUDAGraphWrapper(model, FULL, graphs, target_id="a", cudagraph_options=options)
    with cudagraph_capturing(), set_forward_context(**batch_of(4)):
        with pytest.raises(LifecycleError, match="cannot grow inside a capture"):
            wrapper(x)
        assert graphs.pool.reserved_bytes == 0
        model(x)
        good = CUDAGraphWrapper(model, FULL, graphs, target_id="b", cudagraph_options=options, static_tensors=manager.tensors())
        assert (good(x) == 4).all()
    assert list(manager.tensors()) == ["workspace[0]"]


def test_micro_batches_have_memory_of_their_own() -> None:
    current = [0]
    manager = WorkspaceManager(CPU, num_ubatches=2, current_ubatch=lambda: current[0])
    (one,) = manager.get_simultaneous(((4,), torch.float32))
    size = manager.nbytes
    current[0] = 1
    (other,) = manager.get_simultaneous(((8,), torch.float32))
    assert manager.nbytes == size  # both have grown with the first
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    assert list(manager.tensors()) == ["workspace[0]", "workspace[1]"]
    manager.divide(3, lambda: 2)
    assert manager.nbytes == 3 * size / 2
    manager.lock()
    with pytest.raises(LifecycleError, match="Divide it before the captures"):
        manager.divide(2, lambda: 0)


# ----------------------------------------------------------------------------------------------- offloader


class Recording(PrefetchOffloader):
    """Notes what happens, in order."""

    def __init__(self, *args: int, events: list[str], backend: CpuGraphBackend | None = None) -> None:
        super().__init__(*args)
        self.events, self.backend = events, backend or CpuGraphBackend()

    def note(self, what: str) -> None:
        self.events.append(what + " (in capture)" * self.backend.is_capturing())

    def sync_prev_onload(self) -> None:
        self.note("sync")
        super().sync_prev_onload()

    def join_after_forward(self) -> None:
        self.note(f"join {sorted(self._in_flight)}")
        super().join_after_forward()

    def wait_prefetch(self, number: int) -> None:
        self.note(f"wait {number}")
        super().wait_prefetch(number)

    def start_prefetch(self, number: int) -> None:
        self.note(f"fetch {number}")
        super().start_prefetch(number)


class Layer(nn.Module):
    def __init__(self, number: int, events: list[str]) -> None:
        super().__init__()
        self.number, self.events = number, events
        self.weight = nn.Parameter(torch.full((1,), float(number + 1)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.events.append(f"layer {self.number}")
        return x * self.weight


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_every_layer_finds_its_weights(count: int, group: int, in_group: int, step: int) -> None:
    """Whatever is offloaded, and however far ahead: each layer multiplies by its own number."""
    events: list[str] = []
    layers = [Layer(n, events) for n in range(count)]
    offloader = PrefetchOffloader(group, min(in_group, group), step)
    offloader.wrap_modules(layers)
    assert offloader.num_offloaded == sum(n % group >= group - min(in_group, group) for n in range(count))
    assert offloader.host_bytes == 4 * offloader.num_offloaded
    buffers = {layer.weight.data_ptr() for layer in offloader._layers}
    assert len(buffers) == min(step, offloader.num_offloaded)  # of the weights that are on the host, so many on the device
    for _ in range(3):
        x = torch.ones(1)
        for number, layer in enumerate(layers):
            before = x
            x = layer(x)
            assert float(x) == float(before) * (number + 1)


def test_order_of_events_in_eager_passes() -> None:
    events: list[str] = []
    offloader = Recording(2, 1, 1, events=events)  # layers 1 and 3 of four
    layers = [Layer(n, events) for n in range(4)]
    offloader.wrap_modules(layers)
    assert events == ["fetch 0"]
    for _ in range(2):
        events.clear()
        for layer in layers:
            layer(torch.ones(1))
        assert events == ["layer 0", "wait 0", "layer 1", "fetch 1", "layer 2", "wait 1", "layer 3", "fetch 0"]


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
def test_order_of_events_around_graphs(graphs: WrapperGraphs, mode: CUDAGraphMode) -> None:
    """Sync before the capture and each replay; no graph, and no segment of one, ends with a copy that nobody has joined."""
    events: list[str] = []
    offloader = Recording(2, 1, 1, events=events)
    layers = nn.ModuleList(Layer(n, events) for n in range(4))
    offloader.wrap_modules(list(layers))

    @eager_break_during_capture
    def attention(x: Tensor) -> None:
        events.append("break")
        x.add_(1)

    def model(x: Tensor) -> Tensor:
        for number, layer in enumerate(layers):
            x = layer(x)
            if number == 1:
                attention(x)
        return x

    arguments: dict[str, Any] = {"offloader": offloader, "modules": (layers, offloader.host)}
    options = CUDAGraphOptions(num_warmups=0)
    wrapper = (
        BreakableCUDAGraphWrapper(model, graphs, PIECEWISE, cudagraph_options=options, **arguments)
        if mode is PIECEWISE
        else CUDAGraphWrapper(model, FULL, graphs, cudagraph_options=options, **arguments)
    )
    events.clear()
    x = torch.ones(2)
    with set_forward_context(**batch_of(2, mode)):
        with cudagraph_capturing():
            first = wrapper(x).clone()
        inside = [event.removesuffix(" (in capture)") for event in events]
        assert all(event.endswith(" (in capture)") for event in events if event.startswith(("fetch", "join")))
        whole = ["layer 0", "wait 0", "layer 1", "fetch 1", "break", "layer 2", "wait 1", "layer 3", "fetch 0", "join [0]", "wait 0"]
        if mode is PIECEWISE:  # the copy to layer 3 is joined before the break, and not waited for in vain behind it
            at = whole.index("break")
            whole = [*whole[:at], "join [1]", "wait 1", *whole[at:], "join []"]
            whole.append("break")  # the replay that answers the capturing call
        assert inside == ["sync", "wait 0", *whole]
        for value in (3.0, 5.0):
            events.clear()
            x.fill_(value)
            assert (wrapper(x) == ((value * 2) + 1) * 12).all()
            assert events == ["sync", *(["break"] if mode is PIECEWISE else [])]
    assert (first == 36).all()
    assert (model(torch.ones(2)) == 36).all()  # and eager passes in between


@settings(max_examples=5, deadline=None)
@given(
    st.sampled_from([CUDAGraphMode.NONE, PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE]), st.integers(1, 3), st.integers(1, 2), st.booleans()
)
def test_an_offloaded_model_is_the_same_model(mode: CUDAGraphMode, group: int, step: int, experts: bool) -> None:
    config = WorkloadConfig(num_layers=4, num_experts=4 * experts, max_model_len=32)
    settings = RunnerConfig(cudagraph_mode=mode, cudagraph_capture_sizes=(1, 4), max_num_batched_tokens=16, block_size=4)
    runners = [ready_runner(WorkloadModel(config), settings, offloader=each) for each in (None, PrefetchOffloader(group, 1, step))]
    for batch in ([("a", [1, 2, 3])], [("a", [4])], [("a", [5]), ("b", list(range(9)))], [("a", [6])]):
        scheduled = [ScheduledRequest(*item) for item in batch]
        plain, offloaded = (runner.execute_model(scheduled) for runner in runners)
        assert torch.equal(plain.logits, offloaded.logits)


def test_a_pass_that_fails_half_way_does_not_leave_the_weights_of_others() -> None:
    offloader, model = PrefetchOffloader(1), WorkloadModel(WorkloadConfig(num_layers=3))
    runner = ready_runner(model, RunnerConfig(cudagraph_mode=CUDAGraphMode.NONE), offloader=offloader)
    expected = runner.execute_model([ScheduledRequest("a", [1, 2])]).logits
    norm, model.layers[2].mlp_norm = model.layers[2].mlp_norm, nn.RMSNorm(7)
    with pytest.raises(RuntimeError):
        runner.execute_model([ScheduledRequest("b", [1, 2])])
    model.layers[2].mlp_norm = norm
    assert torch.equal(runner.execute_model([ScheduledRequest("c", [1, 2])]).logits, expected)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (2, 3, 1), (2, 0, 1), (2, 1, 0)])
def test_wrong_offloaders_fail(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="1 ≤ num_in_group ≤ group_size"):
        PrefetchOffloader(*numbers)


def test_wrong_layers_fail() -> None:
    offloader = PrefetchOffloader(1)
    with pytest.raises(ConfigError, match="need the same parameters"):
        offloader.wrap_modules([nn.Linear(2, 2), nn.Linear(2, 3)])
    offloader.wrap_modules([nn.Linear(2, 2)])
    with pytest.raises(LifecycleError, match="has a model's layers already"):
        offloader.wrap_modules([nn.Linear(2, 2)])


# --------------------------------------------------------------------------------------------- weak references


def test_a_weak_reference_is_the_same_memory() -> None:
    x = torch.arange(24.0).view(4, 6)[1:, ::2]
    weak = weak_ref_tensor(x)
    assert (weak.data_ptr(), weak.shape, weak.stride(), weak.dtype) == (x.data_ptr(), x.shape, x.stride(), x.dtype)
    weak[0, 0] = 99
    assert x[0, 0] == 99
    assert weak.untyped_storage()._cdata != x.untyped_storage()._cdata
    empty = torch.empty(0)
    assert weak_ref_tensor(empty) is empty
    assert [t.data_ptr() for t in weak_ref_tensors({"a": (x, 1)})["a"][:1]] == [x.data_ptr()]


def test_a_weak_output_is_good_until_the_next_graph(graphs: WrapperGraphs) -> None:
    options = CUDAGraphOptions(weak_ref_output=True, num_warmups=0)
    one, other = (
        CUDAGraphWrapper(f, FULL, graphs, target_id=n, cudagraph_options=options) for n, f in (("a", torch.neg), ("b", torch.exp))
    )
    x, y = torch.ones(64), torch.zeros(64)
    with set_forward_context(**batch_of(64)):
        with cudagraph_capturing():
            first = one(x)
            assert (first == -1).all()
            del first
            other(y)
        assert graphs.pool.live_bytes == 0
        result = one(x)
        assert (result == -1).all()
        other(y)
        assert (result == 1).all()  # the other graph has the same memory for its own output
        kept = one(x).clone()
        other(y)
        assert (kept == -1).all()


def test_pieces_read_the_weak_output_of_the_piece_before(graphs: WrapperGraphs) -> None:
    """What the next piece reads is a local variable while that is captured, so no capture gets its memory before."""
    options = CUDAGraphOptions(weak_ref_output=True, num_warmups=0)
    pieces = [
        CUDAGraphWrapper(lambda x, n=n: (x + n).exp().log() * 2, PIECEWISE, graphs, target_id=f"p{n}", cudagraph_options=options)
        for n in range(4)
    ]

    def model(x: Tensor) -> Tensor:
        first = x
        for piece in pieces:
            x = piece(x)
        return x + first

    x = torch.linspace(0, 1, 32)
    with set_forward_context(**batch_of(32, PIECEWISE)):
        with cudagraph_capturing():
            model(x)
        for value in (0.5, 0.1):
            x.fill_(value)
            expected = value
            for n in range(4):
                expected = (expected + n) * 2
            assert torch.allclose(model(x), torch.full((32,), expected + value), rtol=1e-4)


def test_what_breaks_are_given_is_held_weakly() -> None:
    """Later segments have the memory of earlier ones: more layers take no more of it."""
    live = []
    for layers in (2, 8):
        settings = RunnerConfig(cudagraph_mode=PIECEWISE, cudagraph_capture_sizes=(16,), max_num_batched_tokens=16)
        runner = ready_runner(WorkloadModel(WorkloadConfig(num_layers=layers)), settings)
        gc.collect()
        (entry,) = runner.graphs.entries()
        touched = {record.writes[0].data_ptr() for _, step in entry.graph.segments if isinstance(step, CpuGraph) for record in step.records}
        live.append((runner.graphs.pool.live_bytes, len(touched)))
    assert live[0][0] == live[1][0] == 0
    assert live[1][1] < 2 * live[0][1]
