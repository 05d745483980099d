"""What the vLLM v1 path must do on every backend: wrappers, breakable graphs, runner, offloader, parity.

Subclassed once per backend, which provides the ``backend`` fixture. The truth is eager: the same callable without a wrapper, a
runner without graphs, and a model written once more in float64.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm_v1.dense_reference import dense_logits

from vgraph_lab import GPUGenerationModelRunner, StageConfig
from vgraph_lab.errors import CaptureError, FallbackReason, LifecycleError, ReplayError
from vgraph_lab.graphs.backends.base import CapturedGraph, GraphBackend
from vgraph_lab.graphs.table import MIB
from vgraph_lab.inspect import entries_table
from vgraph_lab.vllm_v1 import (
    BatchDescriptor,
    BreakableCUDAGraphCapture,
    BreakableCUDAGraphWrapper,
    CUDAGraphMode,
    CUDAGraphOptions,
    CUDAGraphWrapper,
    GPUModelRunner,
    PrefetchOffloader,
    RunnerConfig,
    ScheduledRequest,
    WorkloadConfig,
    WorkloadModel,
    WrapperGraphs,
    check_parity,
    cudagraph_capturing,
    eager_break_during_capture,
    get_forward_context,
    set_forward_context,
    validate_cudagraph_capturing_enabled,
    workload_model,
)
from vgraph_lab.vllm_v1.model_wrappers import EAGER_TARGET, FULL_TARGET, PIECEWISE_TARGET
from vgraph_lab.vllm_v1.paged_kv import NULL_BLOCK

__all__ = [
    "FULL",
    "PIECEWISE",
    "Around",
    "BreakableContract",
    "Metadata",
    "Mixer",
    "OffloaderContract",
    "RunnerContract",
    "WrapperContract",
    "fresh",
    "layers_of",
    "mix",
    "passing",
    "ready_runner",
    "runner_of",
]

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
BOTH = CUDAGraphMode.FULL_AND_PIECEWISE
WIDTH = 64


@dataclass
class Metadata:
    """What the models here find in the forward context: numbers on the host and on the device."""

    rows: int
    shift: Tensor | None = None


def passing(mode: CUDAGraphMode, size: int, metadata: Metadata | None = None) -> AbstractContextManager[Any]:
    """The forward context of a batch that is padded to ``size``."""
    batch = BatchDescriptor(size, size if mode is FULL else None)
    return set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=batch if mode else None)


def fresh(x: Tensor, seed: int) -> Tensor:
    """New values at the old address."""
    return x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))


class V1Contract:
    """What all parts use."""

    @pytest.fixture
    def graphs(self, backend: GraphBackend) -> Iterator[WrapperGraphs]:
        """An empty collection; whatever a test leaves in it is released, and nothing stays."""
        graphs = WrapperGraphs(backend)
        yield graphs
        graphs.clear()
        with pytest.raises(LifecycleError, match="capturing is disabled"):
            validate_cudagraph_capturing_enabled()
        assert BreakableCUDAGraphCapture.current() is None
        assert not backend.is_capturing()

    @pytest.fixture
    def x(self, backend: GraphBackend) -> Tensor:
        return torch.ones(8, WIDTH, device=backend.device)

    def assert_empty(self, graphs: WrapperGraphs) -> None:
        gc.collect()  # a test's error keeps the frames of the failed pass
        graphs.backend.release_cached_memory()
        assert graphs.entries() == []
        assert (graphs.pool.live_bytes, graphs.pool.reserved_bytes) == (0, 0)

    def assert_captures_again(self, graphs: WrapperGraphs, x: Tensor) -> None:
        """After a failed capture: another one works, and so does the generator, which captures share with eager work."""
        torch.rand(3, device=x.device)
        wrapper = CUDAGraphWrapper(torch.neg, FULL, graphs, target_id="v1.again")
        with passing(FULL, 8), cudagraph_capturing():
            assert torch.equal(wrapper(x), -x)
        with passing(FULL, 8):
            assert torch.equal(wrapper(fresh(x, 9)), -x)


class Piece(nn.Module):
    """A piece of a model; counts how often its Python runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)) / 8)
        self.runs = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.runs += 1
        metadata = get_forward_context().attn_metadata
        result = (x @ self.weight).tanh() * scale
        return result if metadata is None or metadata.shift is None else result + metadata.shift


class WrapperContract(V1Contract):
    """``CUDAGraphWrapper``: an entry per descriptor, captured on purpose only."""

    @pytest.fixture
    def piece(self, backend: GraphBackend) -> Piece:
        return Piece().to(backend.device)

    def captured(self, wrapper: CUDAGraphWrapper, x: Tensor, *sizes: int, mode: CUDAGraphMode = FULL) -> None:
        for size in sizes:
            with passing(mode, size), cudagraph_capturing(), torch.no_grad():
                wrapper(x[:size])

    def test_one_entry_per_descriptor_and_every_replay_equals_eager(
        self, backend: GraphBackend, graphs: WrapperGraphs, piece: Piece, x: Tensor
    ) -> None:
        wrapper = CUDAGraphWrapper(piece, FULL, graphs, cudagraph_options=CUDAGraphOptions(debug=True))
        reference = copy.deepcopy(piece)
        addresses = {}
        for size in (8, 4, 2):
            with passing(FULL, size), cudagraph_capturing(), torch.no_grad():
                first = wrapper(fresh(x, size)[:size])
                assert torch.equal(first, reference(x[:size]))  # the capturing call answers, too
                addresses[size] = first.data_ptr()
        runs = piece.runs
        assert runs == 6  # a warm-up and a capture each
        for seed in range(4):  # first, second, … replay, in changing order
            for size in (2, 8, 4) if seed % 2 else (4, 2, 8):
                with passing(FULL, size), torch.no_grad():
                    found = wrapper(fresh(x, 10 * seed + size)[:size])
                    assert torch.equal(found, reference(x[:size]))
                assert found.data_ptr() == addresses[size]
        assert piece.runs == runs  # no model Python at replays
        assert list(wrapper.concrete_cudagraph_entries) == [BatchDescriptor(size, size) for size in (8, 4, 2)]
        assert graphs.stats().hits() == 12
        for order, entry in enumerate(graphs.in_capture_order()):
            assert entry.cost.order == order
            assert entry.cost.pool_reserved_after_bytes > 0
            assert entry.cost.node_counts.get("kernel", 0) >= 2
            assert (entry.cost.device_delta_bytes is None) == (backend.device.type == "cpu")
        assert graphs.in_capture_order()[0].cost.pool_delta_bytes > 0

    def test_an_accidental_capture_raises_and_harms_nothing(self, graphs: WrapperGraphs, piece: Piece, x: Tensor) -> None:
        wrapper = CUDAGraphWrapper(piece, FULL, graphs)
        self.captured(wrapper, x, 4)
        entries, before = graphs.in_capture_order(), (graphs.pool.reserved_bytes, graphs.pool.live_bytes)
        for _ in range(2):
            with passing(FULL, 8), pytest.raises(LifecycleError, match=r"v1\.model 8 tok×8 req \(FULL\) would be captured now"):
                wrapper(x)
        assert graphs.in_capture_order() == entries
        assert (graphs.pool.reserved_bytes, graphs.pool.live_bytes) == before
        with passing(FULL, 4), torch.no_grad():
            assert torch.equal(wrapper(fresh(x, 1)[:4]), piece(x[:4]))
        self.captured(wrapper, x, 8)  # on purpose
        with passing(FULL, 8), torch.no_grad():
            assert torch.equal(wrapper(fresh(x, 2)), piece(x))

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda x, s, m: (x.clone(), s, m), r"x was float32\[8, 64\] at 0x\w+, is float32\[8, 64\] at 0x"),
            (lambda x, s, m: (x[:2], s, m), r"x was float32\[8, 64\] at 0x\w+, is float32\[2, 64\] at 0x"),
            (lambda x, s, m: (x, 2.0, m), "scale was 1.5, is 2.0"),
            (lambda x, s, m: (x, s, Metadata(8, m.shift.clone())), r"attn_metadata.shift was float32\[8, 64\] at"),
            (lambda x, s, m: (x, s, None), r"attn_metadata.shift was float32\[8, 64\] at 0x\w+, is not there"),
        ],
        ids=["moved", "cut", "constant", "metadata", "without"],
    )
    def test_debug_mode_names_the_argument(
        self, graphs: WrapperGraphs, piece: Piece, x: Tensor, change: Callable[..., Any], words: str
    ) -> None:
        wrapper = CUDAGraphWrapper(piece, FULL, graphs, cudagraph_options=CUDAGraphOptions(debug=True))
        metadata = Metadata(8, torch.ones_like(x))
        with passing(FULL, 8, metadata), cudagraph_capturing(), torch.no_grad():
            wrapper(x, scale=1.5)
        moved, scale, given = change(x, 1.5, metadata)
        with passing(FULL, 8, given), pytest.raises(ReplayError, match=words):
            wrapper(moved, scale=scale)
        with passing(FULL, 8, metadata), torch.no_grad():  # and the graph is as good as before
            assert torch.equal(wrapper(fresh(x, 3), scale=1.5), piece(x, 1.5))

    def test_weak_outputs_keep_no_memory_and_die_with_their_graph(self, backend: GraphBackend, graphs: WrapperGraphs, x: Tensor) -> None:
        weak = CUDAGraphOptions(weak_ref_output=True)
        one, other = (
            CUDAGraphWrapper(function, FULL, graphs, target_id=f"v1.{number}", cudagraph_options=weak)
            for number, function in enumerate((torch.neg, torch.exp))
        )
        self.captured(one, x, 8)
        assert graphs.pool.live_bytes == 0
        self.captured(other, x, 8)
        assert graphs.pool.live_bytes == 0
        with passing(FULL, 8):
            kept = one(fresh(x, 1))
            assert torch.equal(kept, -x)
            assert other(x).data_ptr() == kept.data_ptr()  # the later graph has the memory of the earlier one's output
            assert torch.equal(kept, x.exp())
            assert torch.equal(one(x), -x)
        graphs.clear()
        assert graphs.pool.reserved_bytes == 0  # though `kept` refers to it; nobody may read that now

        strong = CUDAGraphWrapper(torch.neg, FULL, graphs, target_id="v1.strong")
        self.captured(strong, x, 8)
        with passing(FULL, 8):
            owner = strong(x)
        graphs.clear()
        assert graphs.pool.reserved_bytes > 0
        assert torch.equal(owner, -x)
        del owner
        backend.release_cached_memory()
        assert graphs.pool.reserved_bytes == 0

    def test_a_closed_collection_lets_go_of_everything_but_its_statistics(self, graphs: WrapperGraphs, piece: Piece, x: Tensor) -> None:
        cache = torch.zeros_like(x)
        wrapper, held = CUDAGraphWrapper(piece, FULL, graphs, static_tensors={"kv_cache": cache}), weakref.ref(cache)
        self.captured(wrapper, x, 8)
        with passing(FULL, 8):
            wrapper(x)
        del wrapper, cache
        for _ in range(2):
            graphs.close()
        gc.collect()
        assert held() is None
        assert (graphs.entries(), graphs.targets, graphs.pool.reserved_bytes) == ([], {}, 0)
        assert graphs.stats().hits() == 1

    def test_work_in_place_happens_once_per_call(self, graphs: WrapperGraphs, x: Tensor) -> None:
        cache = {"kv_cache": torch.zeros_like(x)}

        def append(x: Tensor) -> Tensor:
            cache["kv_cache"].add_(x)
            return cache["kv_cache"] * 1

        options = CUDAGraphOptions(num_warmups=0)
        wrapper = CUDAGraphWrapper(append, FULL, graphs, static_tensors=cache, cudagraph_options=options)
        with passing(FULL, 8), cudagraph_capturing():
            assert [float(wrapper(x)[0, 0]) for _ in range(4)] == [1, 2, 3, 4]

    def test_pieces_read_each_others_outputs(self, backend: GraphBackend, graphs: WrapperGraphs, x: Tensor) -> None:
        """PIECEWISE: graph, eager, graph; the eager work between them writes where the next graph reads."""
        pieces = [Piece().to(backend.device) for _ in range(3)]
        wrapped = [
            CUDAGraphWrapper(piece, PIECEWISE, graphs, target_id=f"v1.piece{number}", cudagraph_options=CUDAGraphOptions(debug=True))
            for number, piece in enumerate(pieces)
        ]

        def model(calls: list[Any], x: Tensor) -> Tensor:
            for call in calls:
                x = call(x)
                x.mul_(get_forward_context().attn_metadata.rows)  # a number that no graph has
            return x

        with passing(PIECEWISE, 8, Metadata(1)), cudagraph_capturing(), torch.no_grad():
            model(wrapped, x)
        for seed, rows in enumerate((2, 3, 1)):
            with passing(PIECEWISE, 8, Metadata(rows)), torch.no_grad():
                assert torch.equal(model(wrapped, fresh(x, seed)), model(pieces, x))
        assert graphs.stats().hits("v1.piece2") == 3


@eager_break_during_capture
def mix(x: Tensor, out: Tensor) -> None:
    """Stands for attention: adds up the real rows, and looks at data on the host, which no graph may."""
    rows = get_forward_context().attn_metadata.rows
    assert not x[:rows].isnan().any().item()
    out.copy_(x)
    out[:rows] += x[:rows].sum(0)


def mix_that_is_captured(x: Tensor, out: Tensor) -> None:
    """Not marked: the graph keeps the number of rows of its capture."""
    rows = get_forward_context().attn_metadata.rows
    out.copy_(x)
    out[:rows] += x[:rows].sum(0)


class Mixer(nn.Module):
    """A product, a break, a sum, several times over."""

    def __init__(self, second: Callable[[Tensor, Tensor], None] = mix) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH, generator=generator) / 8 for _ in range(4))
        self.breaks = (mix, second, mix)

    def forward(self, x: Tensor) -> Tensor:
        *layers, last = self.weights
        for weight, attend in zip(layers, self.breaks, strict=True):
            x = (x @ weight).tanh()
            out = torch.empty_like(x)  # the graph's own memory, which the break writes into
            attend(x, out)
            x = out + x
        result: Tensor = x @ last
        return result


class BreakableContract(V1Contract):
    """``BreakableCUDAGraphWrapper`` and the parity check."""

    def test_segments_are_captured_and_breaks_are_eager(self, backend: GraphBackend, graphs: WrapperGraphs, x: Tensor) -> None:
        seen: list[tuple[int, bool]] = []

        @eager_break_during_capture
        def negate_real_rows(x: Tensor, out: Tensor) -> None:
            rows = get_forward_context().attn_metadata.rows
            seen.append((rows, backend.is_capturing() and backend.name == "cuda"))
            out.copy_(x)
            out[:rows].neg_()

        def model(x: Tensor) -> Tensor:
            x = (x + 1) * 2
            out = torch.empty_like(x)
            negate_real_rows(x, out)
            return (out - 3).abs().sqrt()

        wrapper = BreakableCUDAGraphWrapper(model, graphs)
        with passing(PIECEWISE, 8, Metadata(8)), cudagraph_capturing():
            wrapper(x)
        assert seen == [(8, False)] * 3  # warm-up, capture, and the replay that answers the call
        (entry,) = graphs.in_capture_order()
        capture = entry.graph
        assert isinstance(capture, BreakableCUDAGraphCapture)
        assert (capture.num_graphs, capture.num_eager_breaks) == (2, 1)
        nodes = [len(step.nodes()) if isinstance(step, CapturedGraph) else "eager" for _, step in capture.segments]
        assert nodes == [2, "eager", 3]
        assert entry.cost.node_counts == {"kernel": 5, "host": 1}
        listing = capture.nodes()
        assert [node.index for node in listing] == list(range(6))
        assert listing[2].dependencies == (0, 1)
        assert listing[3].dependencies == (2,)  # nothing of the second segment begins before the break is over
        for rows in (5, 2, 8):
            with passing(PIECEWISE, 8, Metadata(rows)):
                found = wrapper(fresh(x, rows))
            sign = torch.ones(8, 1, device=x.device)
            sign[:rows] = -1
            assert torch.equal(found, ((x + 1) * 2 * sign - 3).abs().sqrt())
        assert seen[3:] == [(5, False), (2, False), (8, False)]  # what the batch has, not what the graph has

    def test_replays_equal_eager_with_real_metadata(self, backend: GraphBackend, graphs: WrapperGraphs, x: Tensor) -> None:
        model = Mixer().to(backend.device)
        wrapper = BreakableCUDAGraphWrapper(model, graphs, PIECEWISE, cudagraph_options=CUDAGraphOptions(debug=True))
        for size in (8, 4):
            with passing(PIECEWISE, size, Metadata(size)), cudagraph_capturing(), torch.no_grad():
                wrapper(x[:size])
        for seed, (size, rows) in enumerate([(8, 8), (8, 5), (4, 4), (8, 1), (4, 3), (8, 8)]):
            with torch.no_grad(), passing(PIECEWISE, size, Metadata(rows)):
                found = wrapper(fresh(x, seed)[:size])
            with torch.no_grad(), passing(NONE, size, Metadata(rows)):
                assert torch.equal(found, model(x[:size]))
        assert graphs.stats().hits() == 6
        del found
        graphs.clear()
        self.assert_empty(graphs)

    def test_full_leaves_nothing_eager(self, graphs: WrapperGraphs, x: Tensor) -> None:
        runs: list[int] = []

        @eager_break_during_capture
        def double(x: Tensor, out: Tensor) -> None:
            runs.append(1)
            torch.mul(x, 2, out=out)

        def model(x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            double(x + 1, out)
            return out + 1

        wrapper = BreakableCUDAGraphWrapper(model, graphs)
        for mode in (PIECEWISE, FULL):
            with passing(mode, 8), cudagraph_capturing():
                assert torch.equal(wrapper(fresh(x, 1)), (x + 1) * 2 + 1)
        broken, whole = graphs.in_capture_order()
        assert broken.cost.node_counts == {"kernel": 2, "host": 1}
        assert whole.cost.node_counts == {"kernel": 3}
        runs.clear()
        with passing(FULL, 8):
            assert torch.equal(wrapper(fresh(x, 2)), (x + 1) * 2 + 1)
        assert runs == []

    def test_sessions_do_not_nest(self, backend: GraphBackend) -> None:
        pool = backend.create_pool()
        with BreakableCUDAGraphCapture(backend, pool) as outer:
            with (
                pytest.raises(CaptureError, match="a breakable capture cannot begin inside another one"),
                BreakableCUDAGraphCapture(backend, backend.create_pool()),
            ):
                pass
            assert BreakableCUDAGraphCapture.current() is outer
        assert BreakableCUDAGraphCapture.current() is None
        assert outer.num_graphs == 0
        outer.reset()

    def test_a_break_that_returns_a_fresh_tensor_is_refused(self, graphs: WrapperGraphs, x: Tensor) -> None:
        @eager_break_during_capture
        def double(x: Tensor) -> Tensor:
            return x * 2

        wrapper = BreakableCUDAGraphWrapper(lambda x: double(x + 1) + 1, graphs)
        with (
            passing(PIECEWISE, 8),
            cudagraph_capturing(),
            pytest.raises(CaptureError, match=r"double runs eagerly .* returned a fresh tensor \(float32\[8, 64\]\)"),
        ):
            wrapper(x)
        self.assert_empty(graphs)
        self.assert_captures_again(graphs, x)

    def test_a_break_may_return_what_it_was_given(self, graphs: WrapperGraphs, x: Tensor) -> None:
        @eager_break_during_capture
        def negate(x: Tensor) -> Tensor:
            return x.neg_()[:2]

        wrapper = BreakableCUDAGraphWrapper(lambda x: negate(x + 1) + 1, graphs)
        for seed in range(3):
            with passing(PIECEWISE, 8), cudagraph_capturing():
                assert torch.equal(wrapper(fresh(x, seed)), 1 - (x[:2] + 1))

    def test_host_access_outside_of_a_break_is_refused(self, backend: GraphBackend, graphs: WrapperGraphs, x: Tensor) -> None:
        """The graph that was there goes on, and so does everything else."""
        good = BreakableCUDAGraphWrapper(Mixer().to(backend.device), graphs, target_id="v1.good")
        with passing(PIECEWISE, 8, Metadata(8)), cudagraph_capturing(), torch.no_grad():
            expected = good(x).clone()

        def looks(x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            mix(x + 1, out)
            return out * float(out.sum().item())

        wrapper = BreakableCUDAGraphWrapper(looks, graphs, target_id="v1.looks")
        live = graphs.pool.live_bytes
        with passing(PIECEWISE, 8, Metadata(8)), cudagraph_capturing(), pytest.raises(CaptureError) as caught:
            wrapper(x)
        assert "contracts/v1.py" in str(caught.value)
        del caught
        gc.collect()
        assert graphs.pool.live_bytes == live
        with passing(PIECEWISE, 8, Metadata(8)), torch.no_grad():
            assert torch.equal(good(x), expected)
        self.assert_captures_again(graphs, x)

    def test_an_error_in_a_break_leaves_nothing(self, graphs: WrapperGraphs, x: Tensor) -> None:
        @eager_break_during_capture
        def breaks(x: Tensor) -> None:
            raise ZeroDivisionError

        def model(x: Tensor) -> Tensor:
            y = x + 1
            breaks(y)
            return y

        wrapper = BreakableCUDAGraphWrapper(model, graphs, cudagraph_options=CUDAGraphOptions(num_warmups=0))
        with passing(PIECEWISE, 8), cudagraph_capturing(), pytest.raises(ZeroDivisionError):
            wrapper(x)
        assert torch.is_grad_enabled()
        self.assert_empty(graphs)
        self.assert_captures_again(graphs, x)

    def test_an_error_of_the_driver_is_a_refusal_and_keeps_no_memory(self, graphs: WrapperGraphs, x: Tensor) -> None:
        def model(x: Tensor) -> Tensor:
            y = x + 1
            out = torch.empty_like(y)
            mix(y, out)
            z = out * 2
            raise torch.OutOfMemoryError(f"CUDA out of memory, with {len(z)} rows")

        wrapper = BreakableCUDAGraphWrapper(model, graphs, cudagraph_options=CUDAGraphOptions(num_warmups=0))
        with (
            passing(PIECEWISE, 8, Metadata(8)),
            cudagraph_capturing(),
            pytest.raises(CaptureError, match="CUDA refused the capture: CUDA out of memory, with 8 rows") as caught,
        ):
            wrapper(x)
        assert "contracts/v1.py" in str(caught.value)
        assert graphs.pool.live_bytes == 0  # although the error is still there
        del caught
        self.assert_empty(graphs)
        self.assert_captures_again(graphs, x)

    def test_what_a_segment_without_work_has_allocated_stays(self, backend: GraphBackend, graphs: WrapperGraphs) -> None:
        """The pass begins with a break: the segment before it launches nothing, and owns what the break writes into."""
        x = torch.ones(1 << 20, device=backend.device)

        @eager_break_during_capture
        def double(x: Tensor, out: Tensor) -> None:
            torch.mul(x, 2, out=out)

        def model(x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            double(x, out)
            return out[:4] + 1

        wrapper = BreakableCUDAGraphWrapper(model, graphs)
        with passing(PIECEWISE, 8), cudagraph_capturing():
            wrapper(x)
        (entry,) = graphs.in_capture_order()
        assert isinstance(entry.graph, BreakableCUDAGraphCapture)
        assert entry.graph.num_graphs == 1
        backend.release_cached_memory()
        assert graphs.pool.reserved_bytes >= x.nbytes
        junk = [torch.full_like(x, 5.0) for _ in range(4)]
        with passing(PIECEWISE, 8):
            assert wrapper(x.fill_(3)).tolist() == [7, 7, 7, 7]
        assert all(bool((each == 5).all()) for each in junk), "a replay wrote into memory that is not its pool's"
        graphs.clear()
        assert graphs.pool.reserved_bytes == 0

    def test_a_captured_operation_that_should_have_been_a_break_is_found(
        self, backend: GraphBackend, graphs: WrapperGraphs, x: Tensor
    ) -> None:
        for second, is_right in ((mix, True), (mix_that_is_captured, False)):
            model = Mixer(second).to(backend.device)
            wrapper = BreakableCUDAGraphWrapper(model, graphs, PIECEWISE, target_id=f"v1.{second.__name__}")
            with passing(PIECEWISE, 8, Metadata(8)), cudagraph_capturing(), torch.no_grad():
                wrapper(x)
            fresh(x, 1)
            with passing(PIECEWISE, 8, Metadata(8)):
                assert check_parity(wrapper, x).is_equal  # the batch of the capture tells nothing
            with passing(PIECEWISE, 8, Metadata(5)):
                before = x.clone()
                report = check_parity(wrapper, x)
                assert torch.equal(x, before)
            assert report.is_equal == is_right, str(report)
            found = report.first_difference
            if found is not None:
                assert found.name == "segment 1"  # between the first break and the third
                assert found.max_difference > 0.01
                assert (found.operation == "") == (backend.name == "cuda")  # there, a node is no operation
                assert "mark it with eager_break_during_capture" in str(report)
        assert graphs.stats().calls() == 0


CONFIG = WorkloadConfig(max_model_len=48, num_layers=2)
SIZES = (1, 2, 4, 8)
# Steps of new tokens per request: prefills, decode, both in one, a prefill in two chunks, more than any graph holds, one that ended.
HISTORY: tuple[dict[str, int], ...] = (
    {"a": 5, "b": 2},
    {"a": 1, "b": 1},
    {"a": 1, "b": 1, "c": 3},
    {"c": 1},
    {"b": 1, "a": 1, "c": 1},
    {"d": 6},
    {"d": 5, "a": 1},
    {"a": 1, "b": 1, "c": 1, "d": 1},
    {"c": 12, "a": 1},
    {"c": 1, "d": 1},
)
ENDS = {8: ["b"]}


class Around(nn.Module):
    """A wrapper that gives what its model has, as torch.compile's does."""

    def __init__(self, inner: WorkloadModel) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, key: str) -> Any:
        try:
            return super().__getattr__(key)
        except AttributeError:
            return getattr(super().__getattr__("inner"), key)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self.inner(input_ids, positions)
        return hidden


def ready_runner(model: nn.Module, config: RunnerConfig, backend: GraphBackend | str = "cpu", **options: Any) -> GPUModelRunner:
    """Loaded and captured."""
    runner = GPUModelRunner(config, backend, **options)
    runner.load_model(model)
    runner.capture_model()
    return runner


def runner_of(backend: GraphBackend, mode: CUDAGraphMode, config: WorkloadConfig = CONFIG, **fields: Any) -> GPUModelRunner:
    settings = {"cudagraph_capture_sizes": SIZES, "block_size": 4, "max_num_batched_tokens": 48, "max_num_seqs": 4, "debug": True}
    return ready_runner(WorkloadModel(config, device=backend.device), RunnerConfig(cudagraph_mode=mode, **(settings | fields)), backend)


def tokens_of(name: str, start: int, count: int) -> list[int]:
    return [(ord(name) + 7 * position) % 64 for position in range(start, start + count)]


class RunnerContract(V1Contract):
    """``GPUModelRunner`` with the workload model."""

    @pytest.mark.parametrize("num_experts", [0, 4], ids=["mlp", "experts"])
    def test_eager_piecewise_and_full_give_the_same_logits(self, backend: GraphBackend, num_experts: int) -> None:
        config = CONFIG.model_copy(update={"num_experts": num_experts})
        runners = {mode: runner_of(backend, mode, config) for mode in (NONE, PIECEWISE, FULL, BOTH)}
        model = runners[NONE].get_model()
        weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        history: dict[str, list[int]] = {}
        for number, step in enumerate(HISTORY):
            ended = ENDS.get(number, [])
            for name in ended:
                history.pop(name)
            batch = []
            for name, count in step.items():
                new = tokens_of(name, len(history.setdefault(name, [])), count)
                history[name] += new
                batch.append(ScheduledRequest(name, new))
            outputs = {mode: runner.execute_model(batch, finished_req_ids=ended) for mode, runner in runners.items()}
            eager, total, is_decode = outputs[NONE].logits, sum(step.values()), set(step.values()) == {1}
            for mode, output in outputs.items():
                served = NONE if total > max(SIZES) else (FULL if is_decode else PIECEWISE) if mode is BOTH else mode
                assert output.execution.cudagraph_mode is served, (number, mode)
                assert torch.allclose(output.logits, eager, atol=1e-4), (number, mode)
            for row, name in enumerate(step):
                truth = dense_logits(weights, config, history[name])[-1]
                assert torch.allclose(eager[row].double().cpu(), truth, atol=3e-4), (number, name)
        expected = runners[NONE]._need().kv_cache.blocks
        for mode, runner in runners.items():
            stats = runner.graphs.stats()
            assert stats.replay_errors() == 0
            assert stats.hits() == (len(HISTORY) - 1 if mode else 0)
            blocks = runner._need().kv_cache.blocks
            assert not blocks[:, :, NULL_BLOCK].any(), mode  # padding tokens kept nothing
            assert torch.allclose(blocks, expected, atol=1e-4), mode
            runner.shutdown()

    def test_padding_rows_change_nothing(self, backend: GraphBackend) -> None:
        """The same step in its own size and padded to a larger one, with whatever the step before has left in the buffers."""
        for mode in (PIECEWISE, FULL):
            exact, padded = (runner_of(backend, mode, cudagraph_capture_sizes=sizes) for sizes in ((3, 8), (8,)))
            for number, step in enumerate(({"a": 8}, {"b": 3}, {"a": 1, "b": 1, "c": 1})):
                batch = [ScheduledRequest(name, tokens_of(name, 0, count)) for name, count in step.items()]
                outputs = [runner.execute_model(batch) for runner in (exact, padded)]
                assert [o.execution.batch_descriptor.num_tokens for o in outputs] == [8 if not number else 3, 8]
                assert torch.allclose(outputs[0].logits, outputs[1].logits, atol=1e-4), (mode, number)
            one, other = (runner._need().kv_cache.blocks for runner in (exact, padded))
            assert torch.allclose(one, other, atol=1e-4)
            assert not other[:, :, NULL_BLOCK].any()
            exact.shutdown()
            padded.shutdown()

    def test_what_an_earlier_request_left_changes_nothing(self, backend: GraphBackend) -> None:
        """A request that ran into NaN leaves it in its blocks; the next one that gets these has nothing of it."""
        for mode in (NONE, PIECEWISE, FULL, BOTH):
            clean, runner = runner_of(backend, mode), runner_of(backend, mode)
            runner._need().kv_cache.blocks[:, :, NULL_BLOCK + 1 :] = float("nan")
            for number, step in enumerate(({"a": 3, "b": 1}, {"a": 1, "b": 1}, {"a": 2, "b": 1, "c": 1}, {"c": 1}, {"d": 13})):
                batch = [ScheduledRequest(name, tokens_of(name, number, count)) for name, count in step.items()]
                found, expected = (each.execute_model(batch, return_hidden_states=True) for each in (runner, clean))
                assert torch.allclose(found.logits, expected.logits, atol=1e-5), (mode, number)
                assert found.hidden_states is not None
                assert not found.hidden_states.isnan().any(), (mode, number)
            clean.shutdown()
            runner.shutdown()

    def test_capture_order_and_the_entries_table(self, backend: GraphBackend) -> None:
        cfg = StageConfig(cudagraph_mode="FULL_AND_PIECEWISE", max_num_seqs=4)
        with GPUGenerationModelRunner(cfg, str(backend.device), v1_config=RunnerConfig(cudagraph_capture_sizes=(1, 2, 8))) as runner:
            runner.load_model(WorkloadModel(CONFIG, device=backend.device))
            report = runner.capture_model()
            assert (report.requested, report.captured, report.failed) == (5, 5, 0)
            table = entries_table(runner)
            assert table["target"].tolist() == [PIECEWISE_TARGET] * 3 + [FULL_TARGET] * 2
            assert table["descriptor"].tolist() == ["8 tok", "2 tok", "1 tok", "2 tok×2 req·uniform", "1 tok×1 req·uniform"]
            assert (table["pool_after_mib"] > 0).all()
            assert table["pool_delta_mib"].iloc[0] > 0
            assert table["pool_delta_mib"].sum() * MIB == report.pool_reserved_bytes > 0
            assert table["pool_after_mib"].is_monotonic_increasing
            assert table["device_delta_mib"].isna().all() == (backend.device.type == "cpu")
            assert (table["warmup_s"] > 0).all()
            assert (table["capture_s"] > 0).all()
            assert (table["nodes"] > 2).all()
            runner.execute_model([ScheduledRequest("a", [1, 2, 3]), ScheduledRequest("b", [4])])
            runner.execute_model([ScheduledRequest("a", [5]), ScheduledRequest("b", [6])])
            runner.execute_model([ScheduledRequest("c", list(range(20)))])
            assert entries_table(runner)["hits"].tolist() == [1, 0, 0, 1, 0]
            assert runner.stats().reasons() == {FallbackReason.SHAPE_NOT_COVERED: 1}

    def test_nothing_is_captured_afterwards_and_the_workspace_is_locked(self, backend: GraphBackend) -> None:
        runner = runner_of(backend, BOTH, CONFIG.model_copy(update={"num_experts": 4}))
        with pytest.raises(LifecycleError, match="capturing is disabled"):
            validate_cudagraph_capturing_enabled()
        model = runner.get_model()
        assert isinstance(model, WorkloadModel)
        size, reserved = model.workspace.nbytes, runner.graphs.pool.reserved_bytes
        assert model.workspace.is_locked()
        runner.execute_model([ScheduledRequest("a", [1] * 40), ScheduledRequest("b", [2] * 8)])  # the largest batch there may be
        assert model.workspace.nbytes == size
        with pytest.raises(LifecycleError, match="locked"):
            model.workspace.get_simultaneous(((size + 1,), torch.uint8))
        runner.graphs.wrappers[FULL_TARGET].clear_graphs()  # as if the start-up had not captured them
        with pytest.raises(LifecycleError, match=r"v1\.full 1 tok×1 req·uniform \(FULL\) would be captured now"):
            runner.execute_model([ScheduledRequest("a", [1])])
        assert runner.num_computed_tokens("a") == 40  # the step never was
        assert runner.graphs.pool.reserved_bytes <= reserved
        runner.execute_model([ScheduledRequest("a", [1, 2])])  # PIECEWISE graphs are there still
        assert runner.graphs.stats().hits(PIECEWISE_TARGET) == 1
        runner.shutdown()

    def test_shutdown_returns_all_memory(self, backend: GraphBackend) -> None:
        def once() -> tuple[int, ...]:
            runner = runner_of(backend, BOTH)
            runner.execute_model([ScheduledRequest("a", [1, 2, 3])])
            runner.execute_model([ScheduledRequest("a", [4])])
            assert runner.graphs.pool.reserved_bytes > 0
            for _ in range(2):
                runner.shutdown()
            return runner.graphs.pool.reserved_bytes, runner.graphs.pool.live_bytes

        def held() -> tuple[int, int]:
            gc.collect()
            backend.release_cached_memory()
            memory = backend.memory()
            return memory.allocated_bytes, memory.reserved_bytes

        once()  # what stays for good: contexts, handles
        before = held()
        assert once() == (0, 0)
        assert held() == before

    def test_without_graphs_there_are_none(self, backend: GraphBackend) -> None:
        runner = runner_of(backend, FULL, enforce_eager=True)
        runner.execute_model([ScheduledRequest("a", [1])])
        assert runner.graphs.entries() == []
        assert runner.graphs.pool.reserved_bytes == 0
        assert runner.graphs.stats().fallbacks(EAGER_TARGET) == 1
        runner.shutdown()

    def test_parity_of_the_workload_model(self, backend: GraphBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        batch = [ScheduledRequest("a", [1, 2, 3, 4, 5, 6]), ScheduledRequest("b", [7, 8])]  # captured with four requests of two tokens
        runner = runner_of(backend, PIECEWISE)
        report = runner.check_parity(batch)
        assert report.is_equal, str(report)
        assert [s.name for s in report.steps if not s.name.startswith("segment")] == ["unified_attention_with_output"] * 2
        assert not runner._need().kv_cache.blocks.any()
        runner.shutdown()
        plain = workload_model.unified_attention_with_output.__wrapped__
        monkeypatch.setattr(workload_model, "unified_attention_with_output", plain)  # a model whose author forgot to mark it
        runner = runner_of(backend, PIECEWISE)
        found = runner.check_parity(batch).first_difference
        assert found is not None
        assert found.name == "segment 0"
        runner.shutdown()


class Layer(nn.Module):
    """One layer of a model whose weights are to be somewhere else."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        weight = torch.randn(width, width, generator=torch.Generator().manual_seed(seed)) / width**0.5
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh()


def layers_of(backend: GraphBackend, count: int, width: int = WIDTH) -> nn.ModuleList:
    """Layers that differ in their weights only."""
    return nn.ModuleList(Layer(width, seed) for seed in range(count)).to(backend.device)


class OffloaderContract(V1Contract):
    """``PrefetchOffloader``: the same model, wherever its weights are."""

    width = WIDTH

    @pytest.mark.parametrize(("group", "in_group", "step"), [(2, 1, 1), (3, 2, 2), (1, 1, 1)])
    def test_an_offloaded_model_is_the_same_model_in_every_mode(
        self, backend: GraphBackend, graphs: WrapperGraphs, group: int, in_group: int, step: int
    ) -> None:
        layers = layers_of(backend, 6, self.width)
        reference = copy.deepcopy(layers)
        offloader = PrefetchOffloader(group, in_group, step)
        offloader.wrap_modules(list(layers))
        assert offloader.num_offloaded == 6 * in_group // group

        def model(layers: Any, x: Tensor) -> Tensor:
            for number, layer in enumerate(layers):
                x = layer(x)
                if number % 2:
                    out = torch.empty_like(x)
                    mix(x, out)
                    x = out
            return x

        def whole(layers: Any, x: Tensor) -> Tensor:
            for layer in layers:
                x = layer(x)
            return x

        arguments: dict[str, Any] = {"offloader": offloader, "modules": (layers, offloader.host)}
        options = CUDAGraphOptions(debug=True)
        broken = BreakableCUDAGraphWrapper(
            lambda x: model(layers, x), graphs, PIECEWISE, target_id="v1.broken", cudagraph_options=options, **arguments
        )
        full = CUDAGraphWrapper(lambda x: whole(layers, x), FULL, graphs, target_id="v1.full", cudagraph_options=options, **arguments)
        x = torch.ones(8, self.width, device=backend.device)
        calls: dict[CUDAGraphMode, tuple[Callable[[Tensor], Tensor], Callable[[Any, Tensor], Tensor]]] = {
            NONE: (broken, model),
            PIECEWISE: (broken, model),
            FULL: (full, whole),
        }
        for mode in (PIECEWISE, FULL):
            with passing(mode, 8, Metadata(8)), cudagraph_capturing(), torch.no_grad():
                calls[mode][0](x)
        for seed, mode in enumerate((NONE, FULL, PIECEWISE, FULL, FULL, NONE, PIECEWISE, PIECEWISE, NONE, NONE, FULL)):
            wrapped, plain = calls[mode]
            with passing(mode, 8, Metadata(8 if mode is FULL else 5)), torch.no_grad():
                found = wrapped(fresh(x, seed)).clone()
                assert torch.equal(found, plain(reference, x)), (seed, mode)

    def test_an_offloaded_runner_gives_the_same_logits(self, backend: GraphBackend) -> None:
        config = WorkloadConfig(num_layers=5, max_model_len=32)
        settings = RunnerConfig(cudagraph_mode=BOTH, cudagraph_capture_sizes=(1, 2, 8), block_size=4)
        runners = [
            ready_runner(WorkloadModel(config, device=backend.device), settings, backend, offloader=offloader)
            for offloader in (None, PrefetchOffloader(2, 1, 2))
        ]
        for step in (
            {"a": 5},
            {"a": 1},
            {"a": 1, "b": 6},
            {"a": 1, "b": 1},
            {"b": 9},
            {"a": 1},
        ):  # the last but one is too large for a graph
            batch = [ScheduledRequest(name, tokens_of(name, 0, count)) for name, count in step.items()]
            plain, offloaded = (runner.execute_model(batch) for runner in runners)
            assert torch.equal(plain.logits, offloaded.logits), step
        for _ in range(2):
            report = runners[1].check_parity([ScheduledRequest("a", [1, 2, 3])])
            assert report.is_equal, str(report)
        for runner in runners:
            runner.shutdown()
