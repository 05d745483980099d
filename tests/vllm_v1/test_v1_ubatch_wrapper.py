"""Micro-batches against the whole batch: eager, captured, first and later replays, which graph has precedence, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from ubatch_workload import Workload

from vgraph_lab.errors import CaptureError, CaptureRefusedError, ConfigError, FallbackReason, InputError, LifecycleError, UBatchError
from vgraph_lab.graphs.backends.cpu import CpuGraphBackend
from vgraph_lab.graphs.capture import capture_underway
from vgraph_lab.vllm_v1 import (
    BatchDescriptor,
    BreakableCUDAGraphWrapper,
    CUDAGraphMode,
    CUDAGraphOptions,
    CUDAGraphWrapper,
    ParallelConfig,
    SMControlContextManager,
    UBatchSlice,
    UBatchTrace,
    UBatchWrapper,
    WrapperGraphs,
    cudagraph_capturing,
    dbo_current_ubatch_id,
    dbo_enabled,
    dbo_register_recv_hook,
    dbo_yield,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
    get_forward_context,
    is_last_ubatch_empty,
    maybe_create_ubatch_slices,
    set_forward_context,
)
from vgraph_lab.vllm_v1.ubatch_threads import UBatchThreads

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
WIDTH = 6


class Model(nn.Module):
    """Computes, "communicates", computes; calls ``at`` with the name of each place that it comes to."""

    def __init__(self, at: Callable[[str], None] = lambda place: None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.at = at
        self.calls = 0

    def forward(self, x: Tensor, positions: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        self.at("begin")
        x = self.first(x).tanh() + positions.sum(0)[:, None]
        dbo_yield_and_switch_from_compute_to_comm()
        self.at("comm")
        received = torch.empty_like(x)
        dbo_register_recv_hook(partial(torch.mul, x, 2.0, out=received))
        dbo_yield_and_switch_from_comm_to_compute()
        if dbo_enabled():
            dbo_yield()  # the next micro-batch has received by the end of its turn at the latest
        self.at("end")
        return {"hidden": self.second(x) * x.sigmoid(), "positions": positions.sum(0)}


class Rig:
    """A model in a wrapper, and how to call it."""

    def __init__(
        self, parts: int = 2, mode: CUDAGraphMode = FULL, model: nn.Module | None = None, wrap: Any = None, **arguments: Any
    ) -> None:
        self.graphs = WrapperGraphs(CpuGraphBackend())
        self.model = Model() if model is None else model
        inner = self.model if wrap is None else wrap(self.model, graphs=self.graphs)
        self.config = ParallelConfig(2, ubatch_size=parts)
        arguments.setdefault("cudagraph_options", CUDAGraphOptions(num_warmups=1, debug=True))
        self.wrapper = UBatchWrapper(inner, self.config, mode, self.graphs, **arguments)
        self.x, self.positions = torch.zeros(16, WIDTH), torch.zeros(3, 16)

    def slices(self, tokens: int) -> list[UBatchSlice]:
        slices = maybe_create_ubatch_slices(True, [tokens], tokens, 1, self.config.num_ubatches)[1]
        assert slices is not None
        return slices

    def __call__(self, x: Tensor, mode: CUDAGraphMode = NONE, split: bool = True, **fields: Any) -> dict[str, Tensor]:
        """Fill the static buffers and run; the result is a copy."""
        count = len(x)
        self.x[:count].copy_(x)
        self.positions[:, :count].copy_(torch.arange(count) * 0.1)
        context: dict[str, Any] = {
            "ubatch_slices": self.slices(count) if split else None,
            "num_tokens_across_dp": (count, count),
            "cudagraph_runtime_mode": mode,
            "batch_descriptor": BatchDescriptor(count) if mode else None,
        }
        with set_forward_context(**{**context, **fields}), torch.no_grad():
            found: dict[str, Tensor] = self.wrapper(self.x[:count], positions=self.positions[:, :count])
        return {name: value.clone() for name, value in found.items()}

    def expected(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            found: dict[str, Tensor] = Model()(x, torch.arange(len(x)).expand(3, -1) * 0.1)
        return found


def random(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def check(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


# ----------------------------------------------------------------------------------------------------------------- eager


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("tokens", [4, 7, 16])
def test_micro_batches_equal_the_whole_batch(parts: int, tokens: int) -> None:
    rig = Rig(parts)
    check(rig(random(tokens)), rig.expected(random(tokens)))
    assert rig.model.calls == parts
    check(rig(random(tokens), split=False), rig.expected(random(tokens)))


@given(st.integers(2, 4), st.integers(4, 12), st.data())
@settings(max_examples=15)
def test_delays_change_nothing(parts: int, tokens: int, data: st.DataObject) -> None:
    delays = data.draw(st.lists(st.sampled_from([0, 0.0005, 0.002]), min_size=3 * parts, max_size=3 * parts))
    rig = Rig(parts, model=Model(lambda place: time.sleep(delays.pop())))
    delays *= 4  # eager, warm-up, capture; and one to spare
    check(rig(random(tokens)), rig.expected(random(tokens)))
    with cudagraph_capturing():
        check(rig(random(tokens, 1), FULL), rig.expected(random(tokens, 1)))
    check(rig(random(tokens, 2), FULL), rig.expected(random(tokens, 2)))


def test_each_micro_batch_has_a_context_of_its_own() -> None:
    seen: dict[int, Any] = {}
    rig = Rig(model=Model(lambda place: seen.__setitem__(dbo_current_ubatch_id(), get_forward_context())))
    rig(random(9), attn_metadata=["a", "b"], num_tokens=9, additional_kwargs={"shared": 1}, fallback_reason=FallbackReason.NO_GRAPH)
    assert [seen[number].attn_metadata for number in range(2)] == ["a", "b"]
    assert [seen[number].num_tokens_across_dp for number in range(2)] == [(4, 4), (5, 5)]
    for context in seen.values():
        assert (context.cudagraph_runtime_mode, context.batch_descriptor, context.ubatch_slices) == (NONE, None, None)
        assert context.additional_kwargs == {"shared": 1}
        assert context.fallback_reason is None
    assert seen[0].additional_kwargs is not seen[1].additional_kwargs


def test_the_share_of_sms_is_set_around_eager_steps_and_captures() -> None:
    control = SMControlContextManager(20, device="cpu")
    rig = Rig(sm_control=control)
    rig(random(4))
    assert control.num_uses == 1
    with cudagraph_capturing():
        rig(random(4), FULL)
    assert control.num_uses == 3  # warm-up and capture
    rig(random(4), FULL)
    assert control.num_uses == 3


def test_eager_steps_are_traced_and_graphs_are_not() -> None:
    trace = UBatchTrace()
    rig = Rig(trace=trace)
    with cudagraph_capturing():
        rig(random(4), FULL)
    rig(random(4), FULL)
    assert trace.spans() == []
    rig(random(4))
    assert [(span.ubatch, span.stream) for span in trace.spans() if span.stream == "comm"] == [(0, "comm"), (1, "comm")]


# ---------------------------------------------------------------------------------------------------------------- graphs


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_one_capture_holds_all_threads(parts: int) -> None:
    rig = Rig(parts)
    with cudagraph_capturing():
        check(rig(random(8, 1), FULL), rig.expected(random(8, 1)))
    assert rig.model.calls == 2 * parts  # warm-up and capture
    (entry,) = rig.wrapper.cudagraphs.values()
    assert entry.target_id == "v1.full.ubatch"
    # Per micro-batch two linear layers, tanh, two sums, adding, the hook's product, sigmoid, product; and two concatenations.
    assert sum(entry.cost.node_counts.values()) == 9 * parts + 2
    for seed in range(2, 6):
        check(rig(random(8, seed), FULL), rig.expected(random(8, seed)))
    assert rig.model.calls == 2 * parts
    assert rig.graphs.stats().hits("v1.full.ubatch") == 4


def test_graphs_are_kept_by_shape_and_share_a_pool() -> None:
    rig = Rig(3)
    with cudagraph_capturing():
        for tokens in (12, 8, 4):
            check(rig(random(tokens), FULL), rig.expected(random(tokens)))
    assert [batch.num_tokens for batch in rig.wrapper.cudagraphs] == [12, 8, 4]
    for tokens, seed in product((4, 12, 8), (7, 8)):
        check(rig(random(tokens, seed), FULL), rig.expected(random(tokens, seed)))
    rig.graphs.clear()
    assert not rig.wrapper.cudagraphs
    assert rig.graphs.pool.reserved_bytes == 0


def test_weights_changed_in_place_are_seen_by_replays() -> None:
    rig = Rig()
    with cudagraph_capturing():
        rig(random(8), FULL)
    with torch.no_grad():
        rig.model.second.weight.zero_()
        rig.model.second.bias.fill_(2.0)
    found = rig(random(8), FULL)["hidden"]
    assert torch.equal(found, rig(random(8))["hidden"])


def test_without_warm_up_the_capture_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(cudagraph_options=CUDAGraphOptions(num_warmups=0))
    prepare, in_capture = UBatchThreads.prepare, []

    def noting(threads: UBatchThreads) -> None:
        in_capture.append(rig.graphs.backend.is_capturing())
        prepare(threads)

    monkeypatch.setattr(UBatchThreads, "prepare", noting)
    with cudagraph_capturing():
        check(rig(random(8), FULL), rig.expected(random(8)))
    assert rig.model.calls == 2
    assert in_capture[0] is False  # threads find their way to the device before


def test_a_replay_needs_no_threads() -> None:
    rig = Rig()
    with cudagraph_capturing():
        rig(random(8), FULL)
    rig.wrapper.shutdown()
    check(rig(random(8, 5), FULL), rig.expected(random(8, 5)))


def test_capturing_must_be_enabled() -> None:
    with pytest.raises(LifecycleError, match=r"v1\.full\.ubatch 8 tok \(FULL\) would be captured now, while capturing is disabled"):
        Rig()(random(8), FULL)


def test_an_argument_elsewhere_is_named() -> None:
    rig = Rig()
    with cudagraph_capturing():
        rig(random(8), FULL)
    rig.x = rig.x.clone()
    with pytest.raises(Exception, match=r"v1\.full\.ubatch 8 tok: .* x was float32\[8, 6\] at"):
        rig(random(8), FULL)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("warmups", [0, 1])
def test_what_no_graph_can_hold_is_refused_in_every_thread(number: int, swallows: bool, warmups: int) -> None:
    def at(place: str) -> None:
        if dbo_enabled() and dbo_current_ubatch_id() == number and place == "comm":
            try:
                torch.ones(2).sum().item()  # the user's line
            except CaptureRefusedError:
                if not swallows:
                    raise

    rig = Rig(3, model=Model(at), cudagraph_options=CUDAGraphOptions(num_warmups=warmups))
    with cudagraph_capturing(), pytest.raises(CaptureRefusedError, match=r"Tensor\.item\(\)") as caught:
        rig(random(9), FULL)
    assert "the user's line" in str(caught.value)
    assert f"raised in micro-batch {number} of 3 (requests 0:1, tokens {3 * number}:{3 * number + 3})" in caught.value.__notes__[0]
    assert not rig.wrapper.cudagraphs
    assert rig.graphs.pool.live_bytes == 0


def test_memory_from_outside_is_refused_in_every_thread() -> None:
    outside = torch.ones(WIDTH)
    rig = Rig(model=Model(lambda place: outside + 1 if dbo_enabled() and dbo_current_ubatch_id() == 1 else None))
    with cudagraph_capturing(), pytest.raises(CaptureRefusedError, match="a tensor made outside the captured function"):
        rig(random(8), FULL)


@pytest.mark.parametrize("parts", [2, 3])
def test_an_error_at_any_place_of_any_thread_leaves_all_as_it_was(parts: int) -> None:
    rig = Rig(parts)
    with cudagraph_capturing():
        rig(random(12), FULL)
    live = rig.graphs.pool.live_bytes
    for number, place, mode in product(range(parts), ("begin", "comm", "end"), (NONE, FULL)):
        rig.model.at = partial(_fail_at, number, place)
        with cudagraph_capturing(), pytest.raises(ValueError, match=f"at {place}") as caught:
            rig(random(8), mode)
        assert f"raised in micro-batch {number} of {parts}" in caught.value.__notes__[0]
    del caught
    rig.model.at = lambda place: None
    assert rig.graphs.pool.live_bytes == live
    check(rig(random(12, 3), FULL), rig.expected(random(12, 3)))
    with cudagraph_capturing():
        check(rig(random(8), FULL), rig.expected(random(8)))


def _fail_at(number: int, wanted: str, place: str) -> None:
    if (dbo_current_ubatch_id(), place) == (number, wanted):
        raise ValueError(f"at {place}")


def test_a_stuck_micro_batch_ends_a_capture_too() -> None:
    rig = Rig(timeout_s=0.1)
    release = [False]

    def at(place: str) -> None:
        while place == "comm" and dbo_current_ubatch_id() == 1 and not release[0]:
            time.sleep(0.005)

    rig.model.at = at
    with cudagraph_capturing(), pytest.raises(UBatchError, match=r"waits for micro-batch 1, which has had its turn for 0\.1 s"):
        rig(random(8), FULL)
    with pytest.raises(LifecycleError, match="is still running"):
        rig(random(8))
    release[0] = True
    for _ in range(1000):
        try:
            check(rig(random(8)), rig.expected(random(8)))
            return
        except LifecycleError:
            time.sleep(0.005)
    raise AssertionError("the thread did not end at its next hand-over")


# ------------------------------------------------------------------------------------------------------------ precedence

# What is captured before; mode and slices of the call; the target that is counted with what, and how often the model ran.
WHOLE, PARTS = "v1.full", "v1.full.ubatch"
PRECEDENCE = [
    (None, NONE, False, None, None, 1),
    (None, NONE, True, None, None, 2),
    (None, PIECEWISE, False, WHOLE, FallbackReason.NO_GRAPH, 1),
    (None, PIECEWISE, True, PARTS, FallbackReason.STATE_NOT_COVERED, 2),
    (WHOLE, FULL, False, WHOLE, "hit", 0),
    (WHOLE, FULL, True, PARTS, FallbackReason.STATE_NOT_COVERED, 2),
    (WHOLE, PIECEWISE, True, PARTS, FallbackReason.STATE_NOT_COVERED, 2),
    (WHOLE, NONE, True, None, None, 2),
    (PARTS, FULL, True, PARTS, "hit", 0),
    (PARTS, FULL, False, WHOLE, FallbackReason.STATE_NOT_COVERED, 1),
    (PARTS, PIECEWISE, False, WHOLE, FallbackReason.NO_GRAPH, 1),
    (PARTS, NONE, False, None, None, 1),
]


@pytest.mark.parametrize(("captured", "mode", "split", "target", "counted", "calls"), PRECEDENCE)
def test_precedence(captured: str | None, mode: CUDAGraphMode, split: bool, target: str | None, counted: Any, calls: int) -> None:
    rig = Rig()
    if captured:
        with cudagraph_capturing():
            rig(random(8), FULL, split=captured == PARTS)
    rig.model.calls = 0
    with cudagraph_capturing():  # nothing is captured a second time, although it might be
        check(rig(random(8, 1), mode, split), rig.expected(random(8, 1)))
    assert rig.model.calls == calls
    assert [entry.target_id for entry in rig.graphs.entries()] == [captured] * (captured is not None)
    stats = rig.graphs.stats()
    assert stats.calls() == (target is not None)
    if target is not None:
        assert (stats.hits(target), stats.reasons(target)) == ((1, {}) if counted == "hit" else (0, {counted: 1}))


def test_no_graphs_here() -> None:
    rig = Rig(mode=NONE)
    check(rig(random(8), num_tokens=8, fallback_reason=FallbackReason.DISABLED), rig.expected(random(8)))
    assert rig.graphs.wrappers == {}
    assert rig.graphs.stats().calls() == 0  # there is no wrapper to count it; its runner does
    for split in (False, True):
        with pytest.raises(InputError, match="the forward context says FULL, and this wrapper was made without graphs"):
            rig(random(8), FULL, split)


def test_split_batches_pass_by_the_wrappers_inside_and_are_counted_in_their_place() -> None:
    rig = Rig(mode=NONE, wrap=partial(CUDAGraphWrapper, runtime_mode=PIECEWISE, target_id="v1.piecewise"))
    with cudagraph_capturing():
        check(rig(random(8), PIECEWISE, split=False), rig.expected(random(8)))
    for split in (False, True):
        check(rig(random(8), PIECEWISE, split), rig.expected(random(8)))
        check(rig(random(8), NONE, split, num_tokens=8, fallback_reason=FallbackReason.SHAPE_NOT_COVERED), rig.expected(random(8)))
    rig(random(8), PIECEWISE, is_counted=False)
    stats = rig.graphs.stats()
    assert (stats.hits("v1.piecewise"), stats.reasons("v1.piecewise")) == (1, {FallbackReason.SHAPE_NOT_COVERED: 1})
    expected = {FallbackReason.STATE_NOT_COVERED: 1, FallbackReason.SHAPE_NOT_COVERED: 1}
    assert (stats.hits(PARTS), stats.reasons(PARTS)) == (0, expected)


# --------------------------------------------------------------------------------------------------------------- refused


def test_settings_that_are_refused() -> None:
    graphs = WrapperGraphs(CpuGraphBackend())
    with pytest.raises(ConfigError, match=r"2 micro-batches with data_parallel_size=1: .* one rank exchanges nothing"):
        ParallelConfig(1, enable_dbo=True)
    with pytest.raises(ConfigError, match="UBatchWrapper without micro-batches"):
        UBatchWrapper(Model(), ParallelConfig(2), FULL, graphs)
    with pytest.raises(ConfigError, match=r"FULL or not at all \(NONE\), got PIECEWISE"):
        UBatchWrapper(Model(), ParallelConfig(2, enable_dbo=True), PIECEWISE, graphs)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_tokens_across_dp": None}, "8 tokens with num_tokens_across_dp=None: they hide the exchange"),
        ({"num_tokens_across_dp": (8,)}, r"num_tokens_across_dp=\(8,\)"),
        ({"num_tokens_across_dp": (8, 6)}, r"num_tokens_across_dp=\(8, 6\).* all padded to one size"),
        ({"num_tokens_across_dp": (9, 9)}, r"8 tokens with num_tokens_across_dp=\(9, 9\)"),
        ({"attn_metadata": ["one"]}, "attn_metadata has 1 items for 2 micro-batches"),
        ({"attn_metadata": "text"}, "attn_metadata of type str cannot be split"),
        ({"ubatch_slices": [UBatchSlice(slice(0, 1), slice(0, 8))]}, "cut into 1 micro-batches, the settings say 2"),
        (
            {"ubatch_slices": [UBatchSlice(slice(0, 1), slice(0, 4)), UBatchSlice(slice(0, 1), slice(5, 8))]},
            "must follow each other from token 0 and have tokens",
        ),
        (
            {"ubatch_slices": [UBatchSlice(slice(0, 1), slice(0, 8)), UBatchSlice(slice(1, 1), slice(8, 8))]},
            r"have tokens, got requests 0:1, tokens 0:8; requests 1:1, tokens 8:8\. See is_last_ubatch_empty\(\)",
        ),
    ],
)
@pytest.mark.parametrize("mode", [NONE, FULL])
def test_slices_that_are_refused(fields: dict[str, Any], words: str, mode: CUDAGraphMode) -> None:
    rig = Rig()
    with cudagraph_capturing(), pytest.raises(InputError, match=words):
        rig(random(8), mode, **fields)
    assert rig.model.calls == 0
    check(rig(random(8)), rig.expected(random(8)))


class Odd(nn.Module):
    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: Tensor, positions: Tensor) -> Any:
        return self.result(x)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda x: x.sum(), r"of 4, 4 tokens returned tensors of shapes \[\], \[\]"),
        (lambda x: x[:3], r"returned tensors of shapes \[3, 6\], \[3, 6\]"),
        (lambda x: {dbo_current_ubatch_id(): x}, "returned different structures"),
        (lambda x: (x, dbo_current_ubatch_id()), r"returned different constants, \(0, 1\)"),
    ],
)
def test_results_that_cannot_be_put_together(result: Callable[[Tensor], Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Rig(model=Odd(result))(random(8))


def test_results_of_any_structure() -> None:
    rig = Rig(model=Odd(lambda x: {"a": (x, x[:, 0] * 2), "n": 7}))
    with set_forward_context(ubatch_slices=rig.slices(8), num_tokens_across_dp=(8, 8)):
        found = rig.wrapper(random(8), rig.positions[:, :8])
    assert torch.equal(found["a"][0], random(8))
    assert torch.equal(found["a"][1], random(8)[:, 0] * 2)
    assert found["n"] == 7


def test_arguments_along_no_token_are_refused() -> None:
    rig = Rig()
    with (
        set_forward_context(ubatch_slices=rig.slices(8), num_tokens_across_dp=(8, 8)),
        pytest.raises(InputError, match=r"a tensor of shape \[5, 6\] cannot be cut along 8 tokens"),
    ):
        rig.wrapper(torch.zeros(5, WIDTH), positions=None)


def test_it_is_the_model_but_for_its_calls() -> None:
    rig = Rig()
    assert rig.wrapper.unwrap() is rig.model
    assert rig.wrapper.calls == 0
    with pytest.raises(AttributeError, match="neither UBatchWrapper nor its runnable"):
        _ = rig.wrapper.nothing


def test_captures_of_other_threads_are_none_of_theirs() -> None:
    """A capture cannot begin in a thread that takes part in one."""
    rig = Rig(model=Model(lambda place: CpuGraphBackend().capture(lambda: None, rig.graphs.pool, static_inputs=(), owned=())))
    rig.wrapper._ubatch_graphs.cudagraph_options = CUDAGraphOptions(num_warmups=0)  # type: ignore[union-attr, assignment]
    with cudagraph_capturing(), pytest.raises(CaptureError, match="cannot begin inside another one"):
        rig(random(8), FULL)


# -------------------------------------------------------------------------------------------------------- workload model


def lens_of(draw: st.DrawFn, parts: int) -> tuple[list[tuple[int, int]], int]:
    """Requests with 1 to 6 new tokens and as many before, and the padded number of tokens; the last part is not empty."""
    lens = draw(
        st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=4).filter(
            lambda found: sum(new for new, _ in found) >= parts
        )
    )
    real = sum(new for new, _ in lens)
    padded = draw(st.integers(real, 24).filter(lambda n: n // parts * (parts - 1) < real))
    return [(new, new + before) for new, before in lens], padded


@given(st.integers(2, 4), st.data())
@settings(max_examples=25)
def test_the_workload_model_in_micro_batches(parts: int, data: st.DataObject) -> None:
    """Prefills, chunks and decode in one batch, cut anywhere: hidden states and caches are those of the whole batch."""
    lens, padded = data.draw(st.composite(lambda draw: lens_of(draw, parts))())
    workload = Workload(parts, NONE)
    whole = workload.run(lens, sum(new for new, _ in lens), 0, split=False)
    torch.testing.assert_close(workload.run(lens, padded, 0), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parts", [2, 3])
def test_one_graph_serves_every_cut(parts: int) -> None:
    """The graph of a number of tokens is replayed for batches whose requests are cut elsewhere, or are fewer."""
    workload = Workload(parts)
    with cudagraph_capturing():
        workload.run([(3, 3)] * 4, 12, 0, FULL)
    for seed, lens in enumerate([[(3, 3)] * 4, [(12, 12)], [(1, 9), (5, 5), (4, 8), (1, 1)], [(2, 20), (7, 7)], [(1, 5)] * 8], start=1):
        found = workload.run(lens, 12, seed, FULL)
        whole = workload.run(lens, sum(new for new, _ in lens), seed, split=False)
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)
    assert len(workload.graphs.entries()) == 1


def test_a_part_that_is_all_padding_is_refused() -> None:
    assert is_last_ubatch_empty(5, 12, 2)  # so no rank would propose it
    with pytest.raises(InputError, match=r"the micro-batch of requests \d:\d, tokens 6:12 is all padding: the batch has 5 tokens"):
        Workload(2, NONE).run([(5, 5)], 12, 0)


@pytest.fixture(autouse=True)
def _no_thread_is_left_in_a_step() -> Iterator[None]:
    yield
    assert not dbo_enabled()


# ------------------------------------------------------------------------------------------------- what is its own


def test_a_wrapper_owns_its_graphs_and_leaves_those_inside() -> None:
    rig = Rig(wrap=partial(BreakableCUDAGraphWrapper, runtime_mode=PIECEWISE, target_id="v1.piecewise"))
    with cudagraph_capturing():
        rig(random(8), FULL)
        rig(random(6), FULL, split=False)
        rig(random(4), PIECEWISE, split=False)
    wrapper, inner = rig.wrapper, cast("BreakableCUDAGraphWrapper", rig.wrapper.runnable)
    assert (wrapper.runtime_mode, wrapper.target_id, inner.runtime_mode) == (FULL, "v1.full", PIECEWISE)
    assert wrapper.cudagraph_options.debug
    assert wrapper.cudagraph_options is not inner.cudagraph_options
    assert wrapper.modules == (rig.model,)
    assert {batch.num_tokens for batch in wrapper.concrete_cudagraph_entries} == {8, 6}
    assert {batch.num_tokens for batch in wrapper.cudagraphs} == {8}
    for _ in range(2):
        wrapper.clear_graphs()
        assert not wrapper.concrete_cudagraph_entries
        assert [entry.target_id for entry in rig.graphs.entries()] == ["v1.piecewise"]
    check(rig(random(4, 1), PIECEWISE, split=False), rig.expected(random(4, 1)))
    with cudagraph_capturing():
        check(rig(random(8, 1), FULL), rig.expected(random(8, 1)))
    without = Rig(mode=NONE, wrap=partial(BreakableCUDAGraphWrapper, runtime_mode=PIECEWISE, target_id="v1.piecewise")).wrapper
    assert (without.runtime_mode, dict(without.concrete_cudagraph_entries), without.modules) == (NONE, {}, ())
    without.clear_graphs()


def test_micro_batches_inside_of_anothers_capture_are_counted() -> None:
    rig = Rig()
    with cudagraph_capturing():
        rig(random(8), FULL)
    assert rig.graphs.stats().calls() == 0
    with capture_underway():
        check(rig(random(8, 1), FULL), rig.expected(random(8, 1)))
    assert rig.graphs.stats().reasons(PARTS) == {FallbackReason.NESTED_CAPTURE: 1}
    assert rig.graphs.stats().calls() == 1
