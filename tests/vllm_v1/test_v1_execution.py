"""How a batch is executed: the published dispatch cases through the whole function, closed forms, agreement, explanations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from golden import CASES, descriptor, dispatcher
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab.errors import ConfigError, FallbackReason, InputError
from vgraph_lab.vllm_v1 import (
    BatchDescriptor,
    CudagraphDispatcher,
    CUDAGraphMode,
    DPAgreement,
    DPProposal,
    ExecutionExplanation,
    ParallelConfig,
    determine_batch_execution_and_padding,
    execution,
    explain_batch_execution,
    synchronize_dp_ranks,
)

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
ALONE = ParallelConfig()


def explained(found: CudagraphDispatcher, lens: list[int], config: ParallelConfig = ALONE, **arguments: Any) -> ExecutionExplanation:
    tokens = np.asarray(lens)
    given = (found, config, sum(lens), len(lens), tokens, max(lens))
    why = explain_batch_execution(*given, **arguments)
    assert determine_batch_execution_and_padding(*given, **arguments) == why.execution
    return why


@pytest.mark.parametrize("case", CASES["dispatch"], ids=lambda c: f"{c['cudagraph_mode']}-{c['cudagraph_capture_sizes'][-1]}")
def test_published_dispatch_cases(case: dict[str, Any]) -> None:
    """A batch of the case's kind, with whatever the case excludes expressed as cascade attention or as force_eager."""
    found, query_len = dispatcher(case), case["uniform_decode_query_len"]
    for call in case["calls"]:
        invalid, count = set(call["invalid_modes"] or ()), call["num_tokens"]
        if invalid not in (set(), {"FULL"}, {"FULL", "PIECEWISE"}):
            continue
        whole = call["uniform_decode"] and count % query_len == 0
        lens = [query_len] * (count // query_len) if whole else [count]
        forced = None if whole == call["uniform_decode"] and (whole or count != query_len) else call["uniform_decode"]
        done = explained(
            found,
            lens,
            use_cascade_attn=invalid == {"FULL"},
            force_eager=invalid == {"FULL", "PIECEWISE"},
            force_uniform_decode=forced,
            num_active_loras=call["num_active_loras"],
        ).execution
        assert (done.cudagraph_mode.name, done.batch_descriptor) == (call["mode"], descriptor(call["descriptor"])), call
        assert (done.should_ubatch, done.num_tokens_across_dp) == (False, None)


@st.composite
def settings(draw: st.DrawFn) -> tuple[CudagraphDispatcher, list[int], int]:
    query_len = draw(st.integers(1, 3))
    sizes = draw(st.sets(st.integers(1, 20).map(lambda n: n * query_len), min_size=1, max_size=6))
    found = CudagraphDispatcher(
        draw(st.sampled_from(CUDAGraphMode)), sizes, max_num_seqs=draw(st.integers(1, 20)), uniform_decode_query_len=query_len
    )
    lens = draw(st.one_of(st.lists(st.just(query_len), min_size=1, max_size=30), st.lists(st.integers(1, 6), min_size=1, max_size=12)))
    return found, lens, query_len


@given(settings(), st.booleans(), st.booleans())
def test_closed_form_of_one_rank(given: tuple[CudagraphDispatcher, list[int], int], cascade: bool, eager: bool) -> None:
    found, lens, query_len = given
    why = explained(found, lens, use_cascade_attn=cascade, force_eager=eager)
    done, uniform = why.execution, all(count == query_len for count in lens)
    assert why.uniform_decode == uniform
    expected = (
        (NONE, BatchDescriptor(sum(lens)))
        if eager
        else found.dispatch(sum(lens), uniform_decode=uniform, invalid_modes={FULL} if cascade else None)
    )
    assert (done.cudagraph_mode, done.batch_descriptor) == expected
    assert not (cascade and done.cudagraph_mode is FULL)
    stat = done.cudagraph_stats
    assert (stat.num_unpadded_tokens, stat.num_padded_tokens) == (sum(lens), done.batch_descriptor.num_tokens)
    assert stat.num_paddings == stat.num_padded_tokens - stat.num_unpadded_tokens >= 0
    assert stat.runtime_mode == done.cudagraph_mode.name
    assert (why.fallback_reason is None) == (done.cudagraph_mode is not NONE)
    if done.batch_descriptor.num_reqs is not None:
        assert done.batch_descriptor.num_reqs >= min(len(lens), found.max_num_seqs)


def ranks(monkeypatch: pytest.MonkeyPatch, others: list[DPProposal], config: ParallelConfig) -> list[DPProposal]:
    """Other ranks that propose so; returns what this one proposes."""
    mine: list[DPProposal] = []

    def coordinate(
        real: int, allowed: bool, given: ParallelConfig, padded: int, uniform: bool, mode: CUDAGraphMode, **_: Any
    ) -> DPAgreement:
        assert given is config
        split = allowed and execution.check_ubatch_thresholds(config, real, uniform)
        mine.append(DPProposal(real, padded, split, mode))
        proposals = [*others[: config.data_parallel_rank], mine[-1], *others[config.data_parallel_rank :]]
        return synchronize_dp_ranks(proposals, config.num_ubatches)

    monkeypatch.setattr(execution, "coordinate_batch_across_dp", coordinate)
    return mine


SIZES = [2, 4, 8, 16]
BOTH = CUDAGraphMode.FULL_AND_PIECEWISE


@pytest.mark.parametrize(
    ("lens", "other", "expected"),
    [
        # Both have FULL graphs: the smaller one grows.
        ([1, 1], DPProposal(7, 8, False, FULL), (FULL, BatchDescriptor(8, 8, True), False, (8, 8))),
        # The other one has a PIECEWISE graph only: both run that, of the larger size.
        ([1, 1], DPProposal(9, 16, False, PIECEWISE), (PIECEWISE, BatchDescriptor(16), False, (16, 16))),
        # The other one has none: both run eager, each in its own size.
        ([1, 1, 1], DPProposal(40, 40, False, NONE), (NONE, BatchDescriptor(4), False, (4, 40))),
        # Both split: eager, but padded to the larger one nevertheless.
        ([9, 8], DPProposal(20, 20, True, NONE), (NONE, BatchDescriptor(20), True, (20, 20))),
        # The other one is too small to split.
        ([9, 8], DPProposal(3, 4, False, NONE), (NONE, BatchDescriptor(17), False, (17, 4))),
        # Split, with graphs.
        ([9, 5], DPProposal(15, 16, True, PIECEWISE), (PIECEWISE, BatchDescriptor(16), True, (16, 16))),
    ],
)
def test_agreement_of_two_ranks(monkeypatch: pytest.MonkeyPatch, lens: list[int], other: DPProposal, expected: tuple[Any, ...]) -> None:
    config = ParallelConfig(2, 0, enable_dbo=True, dbo_decode_token_threshold=4, dbo_prefill_token_threshold=12)
    ranks(monkeypatch, [other], config)
    why = explained(CudagraphDispatcher(BOTH, SIZES, max_num_seqs=8), lens, config)
    assert why.execution[:4] == expected
    assert why.agreement is not None
    assert "all ranks: " in str(why)
    if why.execution.cudagraph_mode is NONE:
        assert why.fallback_reason is not None


def test_a_rank_with_other_graphs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ParallelConfig(2, 0)
    found = CudagraphDispatcher(FULL, SIZES, max_num_seqs=8)
    ranks(monkeypatch, [DPProposal(3, 4, False, PIECEWISE)], config)
    with pytest.raises(ConfigError, match="agreed on PIECEWISE with 4 tokens, for which this rank has no graph"):
        explained(found, [1], config)
    ranks(monkeypatch, [DPProposal(3, 6, False, FULL)], config)
    with pytest.raises(ConfigError, match="agreed on 6 tokens, this rank would pad them to 8"):
        explained(found, [1], config)


@pytest.mark.parametrize(
    ("config", "lens", "arguments", "words"),
    [
        ({}, [1, 1], {}, ["uniform decode: each request has 1 token", "micro-batches: off", "runs as FULL 2 tok×2 req·uniform"]),
        ({}, [1, 3, 1], {}, ["mixed: request 1 has 3 tokens, a decode step 1", "5 tokens (+3 padding) → PIECEWISE"]),
        ({}, [5], {"force_eager": True}, ["FULL: the caller forces eager", "runs as NONE 5 tok"]),
        ({}, [2], {"force_uniform_decode": True}, ["uniform decode: the caller says so"]),
        ({"enable_dbo": True}, [16], {"allow_microbatching": False}, ["micro-batches: the caller excludes them"]),
        ({"enable_dbo": True}, [3], {}, ["micro-batches: 3 tokens are fewer than the threshold, 12"]),
        ({"enable_dbo": True}, [16], {}, ["micro-batches: another rank's batch is too small, or its last part would be all padding"]),
    ],
)
def test_explanations(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], lens: list[int], arguments: dict[str, Any], words: list[str]
) -> None:
    parallel = ParallelConfig(2, 1, dbo_prefill_token_threshold=12, **config) if config else ALONE
    ranks(monkeypatch, [DPProposal(3, 4, False, PIECEWISE)], parallel)
    told = str(explained(CudagraphDispatcher(BOTH, SIZES, max_num_seqs=8), lens, parallel, **arguments))
    for each in words:
        assert each in told


def test_split_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ParallelConfig(2, 0, enable_dbo=True, dbo_prefill_token_threshold=12)
    ranks(monkeypatch, [DPProposal(15, 16, True, PIECEWISE)], config)
    why = explained(CudagraphDispatcher(BOTH, SIZES, max_num_seqs=8), [14], config)
    assert "split in 2: 14 tokens reach the threshold, 12, and all ranks agree" in str(why)


def test_eager_because_of_others_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank has a graph for its batch, and runs eager with the other one."""
    config = ParallelConfig(2, 0)
    ranks(monkeypatch, [DPProposal(40, 40, False, NONE)], config)
    why = explained(CudagraphDispatcher(BOTH, SIZES, max_num_seqs=8), [2], config)
    assert why.dispatch.mode is PIECEWISE
    assert why.fallback_reason is FallbackReason.STATE_NOT_COVERED


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((5, 2, np.array([5]), 5), "a number from 1 for each of 2 requests"),
        ((5, 2, np.array([5, 0]), 5), r"got \[5, 0\]"),
        ((6, 2, np.array([4, 1]), 4), "has 5 tokens and 4 at most, the call says 6 and 4"),
        ((5, 2, np.array([4, 1]), 3), "the call says 5 and 3"),
    ],
)
def test_numbers_that_contradict_each_other_fail(given: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        determine_batch_execution_and_padding(CudagraphDispatcher(FULL, SIZES, max_num_seqs=8), ALONE, *given)
