"""Agreement of ranks: the cases of the published code, the rule's properties, and real processes."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import dp_child
import pytest
from golden import CASES
from hypothesis import given
from hypothesis import strategies as st
from rank_processes import run_ranks

from vgraph_lab.errors import ConfigError, InputError
from vgraph_lab.vllm_v1 import (
    CUDAGraphMode,
    DPAgreement,
    DPProposal,
    ParallelConfig,
    coordinate_batch_across_dp,
    synchronize_dp_ranks,
)

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


@pytest.mark.parametrize("number", range(len(CASES["dp"])))
def test_published_cases(number: int) -> None:
    case = CASES["dp"][number]
    columns = zip(case["orig_num_tokens"], case["padded_num_tokens"], case["should_ubatch"], case["cudagraph_mode"], strict=True)
    proposals = [DPProposal(real, padded, bool(split), CUDAGraphMode(mode)) for real, padded, split, mode in columns]
    expected = DPAgreement(case["agreed_ubatch"], tuple(case["num_tokens_across_dp"]), CUDAGraphMode(case["agreed_mode"]))
    assert synchronize_dp_ranks(proposals, case["num_ubatches"]) == expected


PROPOSALS = st.builds(
    lambda real, padding, split, mode: DPProposal(real, real + padding, split, mode),
    st.integers(1, 60),
    st.integers(0, 20),
    st.booleans(),
    st.sampled_from([NONE, PIECEWISE, FULL]),
)


@given(st.lists(PROPOSALS, min_size=1, max_size=6), st.integers(2, 4))
def test_the_rule(proposals: list[DPProposal], parts: int) -> None:
    agreed = synchronize_dp_ranks(proposals, parts)
    tokens = agreed.num_tokens_across_dp
    assert tokens is not None
    # All or none, and a rank whose last part nothing reaches is a veto.
    largest = max(p.num_tokens_padded for p in proposals)
    fits = all(p.num_tokens_unpadded > (largest // parts) * (parts - 1) for p in proposals)
    assert agreed.should_ubatch == (all(p.should_ubatch for p in proposals) and fits and largest >= parts)
    if any(p.cudagraph_mode is NONE for p in proposals):
        assert agreed.cudagraph_mode is NONE
    else:
        assert agreed.cudagraph_mode is (FULL if all(p.cudagraph_mode is FULL for p in proposals) else PIECEWISE)
    if agreed.cudagraph_mode or agreed.should_ubatch:
        assert set(tokens) == {largest}
    else:
        assert list(tokens) == [p.num_tokens_padded for p in proposals]
    # The order of ranks decides nothing but the order of the answer.
    turned = synchronize_dp_ranks(proposals[::-1], parts)
    assert turned == (agreed.should_ubatch, tokens[::-1], agreed.cudagraph_mode)


def test_one_rank_agrees_with_itself() -> None:
    assert coordinate_batch_across_dp(5, False, ParallelConfig(), 8, cudagraph_mode=FULL) == (False, None, FULL)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((0, 4, False, NONE), "at least one token and no fewer with padding, got 0 and 4"),
        ((5, 4, False, NONE), "got 5 and 4"),
        ((4, 4, False, CUDAGraphMode.FULL_DECODE_ONLY), "proposes a runtime mode, got FULL_DECODE_ONLY"),
    ],
)
def test_impossible_proposals_fail(fields: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        DPProposal(*fields)


def test_wrong_calls_fail() -> None:
    with pytest.raises(InputError, match="there is no rank"):
        synchronize_dp_ranks([], 2)
    with pytest.raises(InputError, match="uniform_decode is None"):
        coordinate_batch_across_dp(5, True, ParallelConfig(2))
    with pytest.raises(ConfigError, match=r"no process group is there\. Start the ranks with torchrun"):
        coordinate_batch_across_dp(5, False, ParallelConfig(2))


# real, padded, uniform, mode; thresholds are 30 and 40 tokens, batches are split in 2.
STEPS = [
    [(40, 48, False, "FULL"), (44, 44, False, "PIECEWISE"), (60, 64, False, "FULL")],  # all split, to the largest
    [(39, 48, False, "FULL"), (44, 44, False, "FULL"), (60, 64, False, "FULL")],  # one is too small: none splits
    [(39, 48, True, "NONE"), (44, 44, False, "NONE"), (60, 64, False, "FULL")],  # decode has the lower threshold
    [(31, 48, True, "NONE"), (44, 44, False, "NONE"), (60, 64, False, "FULL")],  # its second half would be empty
]
AGREED = [[True, 64, "PIECEWISE"], [False, 64, "FULL"], [True, 64, "NONE"], [False, (48, 44, 64), "NONE"]]


@pytest.mark.parametrize(("size", "how"), [(3, "die"), (2, "hang")])
def test_processes_agree_and_name_the_rank_that_is_lost(tmp_path: Path, size: int, how: str) -> None:
    steps, last = [step[-size:] for step in STEPS] if size == 3 else [], STEPS[0][-size:]
    lost = size - 1
    plan = {"size": size, "num_ubatches": 2, "steps": steps, "last": last, "lost_rank": lost, "how": how, "timeout_s": 1.0, "port": 0}
    codes, found = run_ranks(tmp_path, dp_child.main, **plan)
    assert codes == [0] * lost + [3]
    assert len(found) == lost
    expected = [[split, list(tokens) if isinstance(tokens, tuple) else [tokens] * size, mode] for split, tokens, mode in AGREED]
    for survivor in found:
        assert survivor["steps"] == expected[: len(steps)]
        assert survivor["lost"] == [lost]
        assert survivor["message"].startswith(f"rank {lost} of {size} did not take part in step {len(steps)}")


def test_a_lost_rank_may_take_the_store_with_it(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plan = {"size": 2, "num_ubatches": 2, "steps": [], "last": STEPS[0][:2], "lost_rank": 0, "how": "die", "timeout_s": 1.0, "port": port}
    codes, found = run_ranks(tmp_path, dp_child.main, **plan)
    assert codes == [3, 0]
    assert found[0]["lost"] == [0]
    assert "the store that rank 0 keeps is gone" in found[0]["message"]
