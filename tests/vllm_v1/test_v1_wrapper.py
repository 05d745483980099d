"""Wrappers against the plain callable: FULL, PIECEWISE, nested, first and later replays, and everything they refuse."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vgraph_lab.errors import (
    CaptureError,
    CaptureRefusedError,
    ConfigError,
    FallbackReason,
    ForkedProcessError,
    InputError,
    LifecycleError,
    ReplayError,
)
from vgraph_lab.graphs import GraphEntry
from vgraph_lab.graphs.backends.cpu import CpuGraphBackend
from vgraph_lab.graphs.capture import capture_underway
from vgraph_lab.vllm_v1 import (
    BatchDescriptor,
    CudagraphDispatcher,
    CUDAGraphMode,
    CUDAGraphOptions,
    CUDAGraphWrapper,
    ForwardContext,
    WrapperGraphs,
    cudagraph_capturing,
    get_forward_context,
    is_forward_context_available,
    override_forward_context,
    set_cudagraph_capturing_enabled,
    set_forward_context,
    validate_cudagraph_capturing_enabled,
)

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
WIDTH = 8


@dataclass
class Metadata:
    """What attention needs: here, only how many rows are real."""

    mask: Tensor


def attention(x: Tensor, out: Tensor) -> Tensor:
    """Stands for attention: mixes the real rows, leaves the others alone, and writes where it is told to."""
    mask: Tensor = get_forward_context().attn_metadata.mask[: len(x)]
    out = out[: len(x)]
    out.copy_(x + mask[:, None] * (x * mask[:, None]).cumsum(0))
    return out


class Piece(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return (x @ self.weight).tanh() * scale


class Model(nn.Module):
    """Piece, attention, piece, attention, piece; each piece may be wrapped."""

    def __init__(self, wrap: Callable[[str, nn.Module], Callable[..., Tensor]] = lambda _, piece: piece) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(Piece(seed) for seed in range(3))
        self.calls = [wrap(f"v1.piece{number}", piece) for number, piece in enumerate(self.pieces)]
        self.out: Tensor
        self.register_buffer("out", torch.zeros(2, 10, WIDTH))  # of the two attentions

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.calls
        return third(attention(second(attention(first(x), self.out[0])), self.out[1]))


class Bench:
    """A model with wrapped pieces inside a wrapped whole, its static buffers, and a dispatcher."""

    def __init__(self, mode: CUDAGraphMode, **options: Any) -> None:
        self.graphs = WrapperGraphs(CpuGraphBackend())
        self.options = CUDAGraphOptions(**options)
        self.dispatcher = CudagraphDispatcher(mode, [2, 4, 8], max_num_seqs=8)
        self.model = Model(
            lambda name, piece: CUDAGraphWrapper(piece, PIECEWISE, self.graphs, target_id=name, cudagraph_options=self.options)
        )
        self.whole = CUDAGraphWrapper(self.model, FULL, self.graphs, target_id="v1.whole", cudagraph_options=self.options)
        self.x, self.mask = torch.zeros(8, WIDTH), torch.zeros(8)
        self.eager = Model()

    def wrapped(self, name: str, piece: nn.Module) -> CUDAGraphWrapper:
        return CUDAGraphWrapper(piece, PIECEWISE, self.graphs, target_id=name, cudagraph_options=self.options)

    def capture(self) -> None:
        with cudagraph_capturing():
            for mode, batches in self.dispatcher.get_capture_descs():
                for batch in batches:
                    with set_forward_context(Metadata(self.mask), cudagraph_runtime_mode=mode, batch_descriptor=batch):
                        self.whole(self.x[: batch.num_tokens])

    def run(self, x: Tensor, uniform: bool = False) -> tuple[CUDAGraphMode, Tensor]:
        """A batch through the dispatcher and the wrappers; padding rows hold rubbish."""
        why = self.dispatcher.explain(len(x), uniform_decode=uniform)
        size = why.descriptor.num_tokens
        if why.mode:
            self.x.fill_(3.0)
            self.x[: len(x)].copy_(x)
            self.mask.zero_()
            self.mask[: len(x)] = 1
            given, metadata = self.x[:size], Metadata(self.mask)
        else:
            given, metadata = x, Metadata(torch.ones(len(x)))
        with (
            set_forward_context(
                metadata,
                cudagraph_runtime_mode=why.mode,
                batch_descriptor=why.descriptor,
                num_tokens=len(x),
                fallback_reason=why.fallback_reason,
            ),
            torch.no_grad(),
        ):
            return why.mode, self.whole(given)[: len(x)]

    def expected(self, x: Tensor) -> Tensor:
        with set_forward_context(Metadata(torch.ones(len(x)))), torch.no_grad():
            output: Tensor = self.eager(x)
            return output


@pytest.fixture(autouse=True)
def _captures_stay_disabled() -> Iterator[None]:
    yield
    with pytest.raises(LifecycleError), set_forward_context(cudagraph_runtime_mode=FULL, batch_descriptor=BatchDescriptor(1)):
        CUDAGraphWrapper(torch.relu, FULL, WrapperGraphs(CpuGraphBackend()))(torch.ones(1))


def batch_of(rows: int) -> dict[str, Any]:
    return {"cudagraph_runtime_mode": FULL, "batch_descriptor": BatchDescriptor(rows, rows)}


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(CUDAGraphMode),
    st.lists(st.tuples(st.integers(1, 10), st.booleans()), min_size=1, max_size=8),
)
def test_every_mode_equals_eager(mode: CUDAGraphMode, calls: list[tuple[int, bool]]) -> None:
    bench = Bench(mode, debug=True)
    bench.capture()
    seen = {NONE: 0, PIECEWISE: 0, FULL: 0}
    for seed, (rows, uniform) in enumerate(calls):
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
        ran, output = bench.run(x, uniform)
        assert torch.allclose(output, bench.expected(x), atol=1e-6)
        seen[ran] += 1
    stats = bench.graphs.sink.snapshot()
    assert stats.hits("v1.whole") == seen[FULL]
    assert [stats.hits(f"v1.piece{n}") for n in range(3)] == [seen[PIECEWISE]] * 3
    assert stats.fallbacks("v1.whole") == seen[NONE]
    assert stats.replay_errors() == 0


def test_capture_order_and_records() -> None:
    """PIECEWISE first, piece by piece, then FULL; the largest first; one entry per descriptor, as on the other path."""
    bench = Bench(CUDAGraphMode.FULL_AND_PIECEWISE)
    bench.capture()
    entries = bench.graphs.in_capture_order()
    pieces = [(f"v1.piece{n}", size) for size in (8, 4, 2) for n in range(3)]
    assert [(e.target_id, e.descriptor.work) for e in entries] == [*pieces, *(("v1.whole", size) for size in (8, 4, 2))]
    assert all(isinstance(e, GraphEntry) for e in entries)
    assert [e.cost.order for e in entries] == list(range(12))
    first, second, *_, last = entries
    assert first.cost.static_buffer_bytes == bench.x.nbytes  # the whole buffer, of which the piece reads the beginning
    assert second.cost.static_buffer_bytes == bench.model.out.nbytes  # where attention writes
    assert last.cost.static_buffer_bytes == 0  # input and mask are there already
    assert sum(last.cost.node_counts.values()) > sum(first.cost.node_counts.values())
    assert bench.graphs.pool.reserved_bytes >= max(e.cost.pool_reserved_after_bytes for e in entries)


def test_statistics_know_the_batch_without_padding() -> None:
    bench = Bench(FULL)
    bench.capture()
    for rows in (3, 3, 4, 9):
        bench.run(torch.ones(rows, WIDTH))
    counts = {
        (k.key.work, k.descriptor and k.descriptor.work, k.reason): n
        for k, n in bench.graphs.sink.snapshot().counts.items()
        if k.target_id == "v1.whole"
    }
    assert counts == {(3, 4, None): 2, (4, 4, None): 1, (9, None, FallbackReason.SHAPE_NOT_COVERED): 1}
    entry = bench.whole.concrete_cudagraph_entries[BatchDescriptor(4, 4)]
    assert entry.last_use_unix_s is not None


def test_first_second_and_third_call(graphs: WrapperGraphs) -> None:
    runs: list[int] = []

    def double(x: Tensor) -> Tensor:
        runs.append(1)
        return x * 2

    wrapper, x = CUDAGraphWrapper(double, FULL, graphs), torch.ones(4)
    with set_forward_context(**batch_of(4)):
        with cudagraph_capturing():
            first = wrapper(x)
        assert (first == 2).all()
        assert len(runs) == 2  # a warm-up and the capture
        for value in (5.0, 7.0):
            x.fill_(value)
            again = wrapper(x)
            assert (again == 2 * value).all()
            assert again.data_ptr() == first.data_ptr()
    assert len(runs) == 2
    assert graphs.sink.snapshot().hits() == 2  # the capturing call serves nobody


def test_work_in_place_happens_once_per_call(graphs: WrapperGraphs) -> None:
    cache = {"kv_cache": torch.zeros(4)}

    def append(x: Tensor) -> Tensor:
        cache["kv_cache"].add_(x)
        return cache["kv_cache"] * 1

    wrapper = CUDAGraphWrapper(append, FULL, graphs, static_tensors=cache, cudagraph_options=CUDAGraphOptions(num_warmups=0))
    x = torch.ones(4)
    with set_forward_context(**batch_of(4)), cudagraph_capturing():
        assert [wrapper(x)[0].item() for _ in range(4)] == [1, 2, 3, 4]
    assert wrapper.concrete_cudagraph_entries[BatchDescriptor(4, 4)].cost.static_buffer_bytes == 2 * x.nbytes


def test_clone_output_keeps_results(graphs: WrapperGraphs) -> None:
    kept = CUDAGraphWrapper(torch.neg, FULL, graphs, target_id="a", cudagraph_options=CUDAGraphOptions(clone_output=True))
    lent = CUDAGraphWrapper(torch.neg, FULL, graphs, target_id="b")
    x = torch.ones(4)
    with set_forward_context(**batch_of(4)), cudagraph_capturing():
        mine, theirs = kept(x), lent(x)
        x.fill_(9)
        kept(x), lent(x)
    assert (mine == -1).all()
    assert (theirs == -9).all()


def test_no_context_another_mode_and_an_outer_capture_are_plain_calls(graphs: WrapperGraphs) -> None:
    inner = CUDAGraphWrapper(torch.neg, FULL, graphs, target_id="inner")
    outer = CUDAGraphWrapper(lambda x: inner(x) + 1, FULL, graphs, target_id="outer")
    x = torch.ones(4)
    assert (outer(x) == 0).all()
    with set_forward_context(**batch_of(4)), cudagraph_capturing():
        assert (outer(x) == 0).all()
    assert [entry.target_id for entry in graphs.in_capture_order()] == ["outer"]
    assert graphs.sink.snapshot().calls() == 0
    with set_forward_context(cudagraph_runtime_mode=PIECEWISE, batch_descriptor=BatchDescriptor(4)):
        assert (outer(x) == 0).all()
    assert graphs.sink.snapshot().reasons("outer") == {FallbackReason.NO_GRAPH: 1}  # a mode that nobody serves
    CUDAGraphWrapper(torch.neg, PIECEWISE, graphs, target_id="a.piece")
    with set_forward_context(cudagraph_runtime_mode=PIECEWISE, batch_descriptor=BatchDescriptor(4)):
        assert (outer(x) == 0).all()  # somebody does, and counts if it is called
    with set_forward_context(cudagraph_runtime_mode=PIECEWISE, batch_descriptor=BatchDescriptor(4), is_counted=False):
        assert (outer(x) == 0).all()
    assert graphs.sink.snapshot().calls() == 1


@pytest.mark.parametrize("how", ["capture", "warm-up", "other wrappers"])
def test_a_capture_of_somebody_else_is_counted_once(graphs: WrapperGraphs, how: str) -> None:
    inner = CUDAGraphWrapper(torch.neg, FULL, graphs, target_id="inner")
    outer = CUDAGraphWrapper(lambda x: inner(x) + 1, FULL, graphs, target_id="outer")
    other = WrapperGraphs(CpuGraphBackend())
    around = CUDAGraphWrapper(lambda x: outer(x) * 2, FULL, other, target_id="around", cudagraph_options=CUDAGraphOptions(num_warmups=0))
    x = torch.ones(4)
    with set_forward_context(**batch_of(4)):
        with cudagraph_capturing():
            outer(x)
        outer(x)
        if how == "capture":
            graphs.backend.capture(lambda: outer(x), other.pool, static_inputs=(x,), owned=())
        elif how == "warm-up":
            with capture_underway():
                assert (outer(x) == 0).all()
        else:
            with cudagraph_capturing():
                around(x)
        stats = graphs.stats()
        assert (stats.hits(), stats.fallbacks()) == (1, 1)
        assert stats.reasons("outer") == {FallbackReason.NESTED_CAPTURE: 1}
        assert other.stats().calls() == 0
        outer(x)
        assert graphs.stats().hits() == 2


def test_a_graph_is_not_replayed_in_a_fork(graphs: WrapperGraphs) -> None:
    """Nothing but the check stands between a forked child and the parent's graph. (CUDA contexts do not survive a fork at all.)"""
    wrapper, x = CUDAGraphWrapper(torch.neg, FULL, graphs), torch.ones(4)
    with set_forward_context(**batch_of(4)), cudagraph_capturing():
        wrapper(x)
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()

    def replay() -> None:
        try:
            with set_forward_context(**batch_of(4)):
                wrapper(x)
            answers.put("answered")
        except ForkedProcessError as error:
            answers.put(f"refused: {error}")

    child = context.Process(target=replay)
    child.start()
    answer = answers.get(timeout=60)
    child.join(60)
    assert answer == f"refused: v1.model was captured in process {os.getpid()}; capture again in its fork."
    assert graphs.stats().calls() == 0
    with set_forward_context(**batch_of(4)):
        assert (wrapper(x) == -1).all()


def test_an_accidental_capture_fails(graphs: WrapperGraphs) -> None:
    wrapper = CUDAGraphWrapper(torch.neg, FULL, graphs)
    with set_forward_context(**batch_of(4)), pytest.raises(LifecycleError, match=r"v1\.model 4 tok×4 req .* capturing is disabled"):
        wrapper(torch.ones(4))
    assert graphs.in_capture_order() == []
    set_cudagraph_capturing_enabled(True)
    with cudagraph_capturing():
        pass
    with set_forward_context(**batch_of(4)):
        wrapper(torch.ones(4))  # still enabled
    set_cudagraph_capturing_enabled(False)
    assert len(graphs.in_capture_order()) == 1


def test_blocks_that_allow_captures_may_end_in_any_order() -> None:
    one, other = cudagraph_capturing(), cudagraph_capturing()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    validate_cudagraph_capturing_enabled()
    with suppress(KeyError):
        other.__exit__(KeyError, KeyError("its capture has failed"), None)
    with pytest.raises(LifecycleError):
        validate_cudagraph_capturing_enabled()


def test_a_block_allows_captures_to_its_own_thread() -> None:
    """Two threads that start and end in turns, as two runners may."""

    def is_allowed() -> bool:
        try:
            validate_cudagraph_capturing_enabled()
        except LifecycleError:
            return False
        return True

    one, other = (ThreadPoolExecutor(1) for _ in range(2))
    with one, other:
        blocks = cudagraph_capturing(), cudagraph_capturing()
        one.submit(blocks[0].__enter__).result()
        assert (one.submit(is_allowed).result(), other.submit(is_allowed).result(), is_allowed()) == (True, False, False)
        other.submit(blocks[1].__enter__).result()
        one.submit(blocks[0].__exit__, None, None, None).result()
        assert (one.submit(is_allowed).result(), other.submit(is_allowed).result()) == (False, True)
        other.submit(blocks[1].__exit__, None, None, None).result()
        assert (other.submit(is_allowed).result(), is_allowed()) == (False, False)


def test_a_default_that_is_given_is_the_same_argument(graphs: WrapperGraphs) -> None:
    wrapper, x = CUDAGraphWrapper(Piece(0), FULL, graphs, cudagraph_options=CUDAGraphOptions(debug=True)), torch.ones(4, WIDTH)
    with set_forward_context(**batch_of(4)):
        with cudagraph_capturing():
            wrapper(x)
        wrapper(x, scale=1.0)
        wrapper(x, 1.0)
        with pytest.raises(ReplayError, match=r"scale was 1\.0, is 2\.0"):
            wrapper(x, scale=2.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, s, m: (x.clone(), s, m), r"x was float32\[4, 8\] at 0x\w+, is float32\[4, 8\] at 0x"),
        (lambda x, s, m: (x[:2], s, m), r"x was float32\[4, 8\] at 0x\w+, is float32\[2, 8\] at 0x"),
        (lambda x, s, m: (x.reshape(8, 4).T, s, m), r"is float32\[4, 8\] strides \[1, 4\] at"),
        (lambda x, s, m: (x, 2.0, m), "scale was 1.5, is 2.0"),
        (lambda x, s, m: (x, s, Metadata(m.mask.clone())), r"attn_metadata.mask was float32\[4\] at"),
        (lambda x, s, m: (x, s, None), r"attn_metadata.mask was float32\[4\] at 0x\w+, is not there"),
    ],
)
def test_debug_mode_names_the_argument(graphs: WrapperGraphs, change: Callable[..., Any], words: str) -> None:
    wrapper = CUDAGraphWrapper(Piece(0), FULL, graphs, cudagraph_options=CUDAGraphOptions(debug=True))
    x, metadata = torch.ones(4, WIDTH), Metadata(torch.ones(4))
    with set_forward_context(metadata, **batch_of(4)), cudagraph_capturing():
        wrapper(x, scale=1.5)
        wrapper(x, 1.5)  # by position or by name: the same argument
    x, scale, metadata = change(x, 1.5, metadata)
    with set_forward_context(metadata, **batch_of(4)), pytest.raises(ReplayError, match=words):
        wrapper(x, scale=scale)


def test_failures_are_recorded_and_leave_nothing(graphs: WrapperGraphs) -> None:
    def looks(x: Tensor) -> Tensor:
        return x * x.sum().item()

    wrapper = CUDAGraphWrapper(looks, FULL, graphs)
    with set_forward_context(**batch_of(4)), cudagraph_capturing(), pytest.raises(CaptureRefusedError):
        wrapper(torch.ones(4))
    assert graphs.pool.reserved_bytes == 0
    assert wrapper.concrete_cudagraph_entries == {}
    good = CUDAGraphWrapper(torch.neg, FULL, graphs, target_id="good")
    with set_forward_context(**batch_of(4)):
        with cudagraph_capturing():
            good(torch.ones(4))
        good.concrete_cudagraph_entries[BatchDescriptor(4, 4)].graph.reset()
        with pytest.raises(ReplayError, match="was reset"):
            good(torch.ones(4))
    assert graphs.sink.snapshot().replay_errors("good") == 1


def test_a_tensor_from_outside_is_refused(graphs: WrapperGraphs) -> None:
    outside = torch.ones(4)
    wrapper = CUDAGraphWrapper(lambda x: x + outside, FULL, graphs)
    with set_forward_context(**batch_of(4)), cudagraph_capturing(), pytest.raises(CaptureError):
        wrapper(torch.ones(4))


def test_the_offloader_is_joined_in_order(graphs: WrapperGraphs) -> None:
    events: list[str] = []

    class Recording:
        def sync_prev_onload(self) -> None:
            events.append("sync")

        def join_after_forward(self) -> None:
            events.append("join in capture" if graphs.backend.is_capturing() else "join")

    def forward(x: Tensor) -> Tensor:
        events.append("forward")
        return -x

    wrapper, x = CUDAGraphWrapper(forward, FULL, graphs, offloader=Recording()), torch.ones(4)
    with set_forward_context(**batch_of(4)):
        with cudagraph_capturing():
            wrapper(x)
        assert events == ["sync", "forward", "join", "forward", "join in capture"]
        wrapper(x)
    assert events[5:] == ["sync"]


def test_clear_gives_everything_back() -> None:
    bench = Bench(CUDAGraphMode.FULL_AND_PIECEWISE)
    bench.capture()
    assert bench.graphs.pool.reserved_bytes > 0
    for _ in range(2):
        bench.graphs.clear()
        assert bench.graphs.in_capture_order() == []
        assert bench.graphs.pool.reserved_bytes == 0
    bench.capture()
    assert [e.cost.order for e in bench.graphs.in_capture_order()] == list(range(12))


def test_attributes_of_the_runnable(graphs: WrapperGraphs) -> None:
    piece = Piece(0)
    wrapper = CUDAGraphWrapper(piece, PIECEWISE, graphs)
    assert wrapper.weight is piece.weight
    assert wrapper.unwrap() is piece
    with pytest.raises(AttributeError, match="has an attribute 'absent'"):
        wrapper.absent  # noqa: B018


def test_wrong_wrappers_fail(graphs: WrapperGraphs) -> None:
    with pytest.raises(ConfigError, match="Mode NONE needs no wrapper"):
        CUDAGraphWrapper(torch.neg, NONE, graphs)
    CUDAGraphWrapper(torch.neg, FULL, graphs)
    with pytest.raises(ConfigError, match=r"two wrappers are called 'v1\.model'"):
        CUDAGraphWrapper(torch.neg, FULL, graphs)


def test_contexts_nest_and_end() -> None:
    assert not is_forward_context_available()
    with pytest.raises(LifecycleError, match="no forward pass is under way"):
        get_forward_context()
    with set_forward_context(num_tokens=3) as outer:
        assert get_forward_context() is outer
        with override_forward_context(ForwardContext(num_tokens=4)):
            assert get_forward_context().num_tokens == 4
        assert get_forward_context() is outer
        with override_forward_context(None):
            assert not is_forward_context_available()
    assert not is_forward_context_available()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cudagraph_runtime_mode": CUDAGraphMode.FULL_DECODE_ONLY}, "not in the pair FULL_DECODE_ONLY"),
        ({"cudagraph_runtime_mode": FULL}, "needs a batch_descriptor"),
        ({"batch_descriptor": BatchDescriptor(4), "num_tokens": 5}, "a batch of 5 tokens does not fit into 4 tok"),
    ],
)
def test_impossible_contexts_fail(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words), set_forward_context(**fields):
        pass
