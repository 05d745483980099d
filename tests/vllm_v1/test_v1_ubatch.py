"""Micro-batch slices against the cases of the published code and against counting tokens one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from golden import CASES
from hypothesis import given
from hypothesis import strategies as st

from vgraph_lab.errors import ConfigError, InputError
from vgraph_lab.vllm_v1 import ParallelConfig, UBatchSlice, check_ubatch_thresholds, is_last_ubatch_empty, maybe_create_ubatch_slices


def as_lists(slices: list[UBatchSlice] | None) -> list[Any] | None:
    if slices is None:
        return None
    return [[[s.request_slice.start, s.request_slice.stop], [s.token_slice.start, s.token_slice.stop], s.is_empty()] for s in slices]


@pytest.mark.parametrize("number", range(len(CASES["ubatch"])))
def test_published_cases(number: int) -> None:
    case = CASES["ubatch"][number]
    tokens = case["num_scheduled_tokens"]
    arguments = (case["num_tokens_padded"], case["num_reqs_padded"], case["num_ubatches"])
    slices, padded = maybe_create_ubatch_slices(case["should_ubatch"], np.array(tokens, dtype=np.int32), *arguments)
    assert as_lists(slices) == case["slices"]
    assert as_lists(padded) == case["padded"]
    assert is_last_ubatch_empty(sum(tokens), case["num_tokens_padded"], case["num_ubatches"]) == case["last_empty"]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    tokens = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    parts = draw(st.integers(2, 5))
    padded = max(sum(tokens), parts) + draw(st.integers(0, 12))
    return tokens, padded, len(tokens) + draw(st.integers(0, 3)), parts


@given(batches())
def test_every_token_is_in_one_part_with_its_request(batch: tuple[list[int], int, int, int]) -> None:
    tokens, padded, reqs_padded, parts = batch
    owner = [request for request, count in enumerate(tokens) for _ in range(count)]
    slices, stretched = maybe_create_ubatch_slices(True, tokens, padded, reqs_padded, parts)
    assert slices is not None
    assert stretched is not None
    assert [s.num_tokens for s in stretched[:-1]] == [padded // parts] * (parts - 1)
    assert sum(s.num_tokens for s in stretched) == padded
    assert stretched[-1].request_slice.stop == reqs_padded
    if is_last_ubatch_empty(len(owner), padded, parts):
        assert slices[-1].num_tokens <= 0
        return
    assert [i for s in slices for i in range(s.token_slice.start, s.token_slice.stop)] == list(range(len(owner)))
    for part in slices:
        assert sorted(set(owner[part.token_slice])) == list(range(part.request_slice.start, part.request_slice.stop))
        assert not part.is_empty()
        assert part.num_reqs == len(set(owner[part.token_slice]))


@given(st.integers(1, 200), st.integers(0, 100), st.integers(2, 8))
def test_the_last_part_is_empty_exactly_if_no_token_reaches_it(real: int, padding: int, parts: int) -> None:
    padded = real + padding
    step = padded // parts
    reaches = any(token // step >= parts - 1 for token in range(real)) if step else True
    assert is_last_ubatch_empty(real, padded, parts) == (not reaches)


def test_a_request_on_the_cut_is_on_both_sides() -> None:
    slices, padded = maybe_create_ubatch_slices(True, [6, 4], 12, 3, 3)
    assert slices is not None
    assert padded is not None
    assert [str(s) for s in slices] == ["requests 0:1, tokens 0:4", "requests 0:2, tokens 4:8", "requests 1:2, tokens 8:10"]
    assert str(padded[-1]) == "requests 1:3, tokens 8:12"


def test_parts_beyond_the_last_real_token() -> None:
    """Each but the last keeps its range and names a request that only padding has; the last one stops before it starts."""
    real, padded = maybe_create_ubatch_slices(True, [2, 1], 12, 4, 4)
    assert real is not None
    assert padded is not None
    assert list(map(str, real)) == [
        "requests 0:2, tokens 0:3",
        "requests 2:3, tokens 3:6",
        "requests 2:3, tokens 6:9",
        "requests 2:2, tokens 9:3",
    ]
    assert [(part.num_tokens, part.num_reqs, part.is_empty()) for part in real[1:]] == [(3, 1, False), (3, 1, False), (-6, 0, True)]
    assert padded == [*real[:-1], UBatchSlice(slice(2, 4), slice(9, 12))]
    at_its_start, _ = maybe_create_ubatch_slices(True, [4, 4], 12, 4, 3)
    assert at_its_start is not None
    assert at_its_start[-1].num_tokens == 0


def test_a_split_point_of_ones_own() -> None:
    slices, _ = maybe_create_ubatch_slices(True, [6, 4], 12, 2, 2, split_point=2)
    assert slices is not None
    assert [s.num_tokens for s in slices] == [2, 8]


@pytest.mark.parametrize(("tokens", "uniform", "expected"), [(31, True, False), (32, True, True), (511, False, False), (512, False, True)])
def test_thresholds(tokens: int, uniform: bool, expected: bool) -> None:
    assert check_ubatch_thresholds(ParallelConfig(2, enable_dbo=True), tokens, uniform) is expected
    assert check_ubatch_thresholds(ParallelConfig(2), tokens, uniform) is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([4, 4], 8, 2, 1), "num_ubatches=1: a batch is cut into two parts or more"),
        (([4, 0], 8, 2, 2), r"one per request, got \[4, 0\]"),
        (([], 8, 2, 2), r"got \[\]"),
        (([4, 4], 7, 2, 2), "2 requests and 8 tokens was padded to 2 and 7: padding only adds"),
        (([4, 4], 8, 1, 2), "padding only adds"),
        (([1], 2, 1, 3), "3 micro-batches of 0 tokens each do not fit into 2"),
        (([4, 4], 8, 2, 2, 8), "2 micro-batches of 8 tokens each do not fit into 8"),
    ],
)
def test_impossible_batches_fail(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        maybe_create_ubatch_slices(True, *arguments)


def test_settings() -> None:
    assert [ParallelConfig(2, **given).num_ubatches for given in ({}, {"enable_dbo": True}, {"ubatch_size": 1}, {"ubatch_size": 3})] == [
        1,
        2,
        1,
        3,
    ]
    assert ParallelConfig(2, ubatch_size=3).use_ubatching
    assert not ParallelConfig(2, ubatch_size=1).use_ubatching


@pytest.mark.parametrize("changes", [{"enable_dbo": True}, {"ubatch_size": 3}])
def test_one_rank_has_nothing_to_overlap(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"one rank exchanges nothing\. Use two ranks or more"):
        ParallelConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size: must be a whole number from 1, got 0"),
        ({"ubatch_size": True}, "ubatch_size: must be a whole number from 0, got True"),
        ({"dbo_decode_token_threshold": -1}, "dbo_decode_token_threshold"),
        ({"data_parallel_size": 2, "data_parallel_rank": 2}, "2 is not one of the 2 ranks, which count from 0 to 1"),
        ({"data_parallel_size": 2, "enable_dbo": True, "ubatch_size": 3}, "Leave one of them out"),
    ],
)
def test_bad_settings_fail(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ParallelConfig(**changes)
