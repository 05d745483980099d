"""Ranks that divide experts among them, in micro-batches: real processes with gloo against one process with all experts."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import ubatch_child
from rank_processes import run_ranks
from ubatch_child import THRESHOLD

from vgraph_lab.vllm_v1 import CUDAGraphMode, DPProposal, maybe_create_ubatch_slices, synchronize_dp_ranks

# New tokens of each request, per rank; batches are split from THRESHOLD tokens.
STEPS_OF_2 = [
    [[8], [3, 5]],  # all split
    [[9], [12]],  # all split, padded to the largest
    [[7], [12]],  # one is too small: none splits, and each keeps its size
    [[8], [20]],  # the small one's second half would be empty
]
STEPS_OF_4 = [
    [[12], [5, 5, 2], [10], [1, 11]],
    [[12], [12], [12], [7]],
]


@pytest.mark.parametrize(
    ("parts", "steps", "split", "tokens"),
    [
        (2, STEPS_OF_2, [True, True, False, False], [[8, 8], [12, 12], [7, 12], [8, 20]]),
        (3, STEPS_OF_4, [True, False], [[12, 12, 12, 12], [12, 12, 12, 7]]),
    ],
)
def test_ranks_run_micro_batches_together(tmp_path: Path, parts: int, steps: list[Any], split: list[bool], tokens: list[Any]) -> None:
    size = len(steps[0])
    for step, agreed in zip(steps, split, strict=True):  # what the rule says of this step
        proposals = [DPProposal(sum(batch), sum(batch), sum(batch) >= THRESHOLD, CUDAGraphMode.NONE) for batch in step]
        assert synchronize_dp_ranks(proposals, parts).should_ubatch == agreed
    codes, found = run_ranks(tmp_path, ubatch_child.main, at_most_s=90, size=size, num_ubatches=parts, steps=steps, lost_rank=None)
    assert codes == [0] * size  # each has compared its results
    assert [rank["split"] for rank in found] == [split] * size
    assert [rank["tokens"] for rank in found] == [tokens] * size


def test_a_rank_that_dies_in_a_step_ends_it_everywhere(tmp_path: Path) -> None:
    size, lost = 4, 2
    codes, found = run_ranks(tmp_path, ubatch_child.main, at_most_s=90, size=size, num_ubatches=2, steps=STEPS_OF_4[:1], lost_rank=lost)
    assert codes == [0, 0, 3, 0]
    assert len(found) == size - 1
    for survivor in found:
        _, note = survivor["error"]
        assert note.startswith("raised in micro-batch")
        assert survivor["lost"] == [lost]  # the next agreement names it


def test_what_ranks_agree_on_can_be_cut() -> None:
    """Whatever they propose: if all are to split, each finds a part of its own with tokens for every micro-batch."""
    for real, other, parts in product(range(1, 14), range(1, 14), (2, 3, 4)):
        proposals = [DPProposal(tokens, tokens, True, CUDAGraphMode.NONE) for tokens in (real, other)]
        agreed = synchronize_dp_ranks(proposals, parts)
        if not agreed.should_ubatch:
            continue
        assert agreed.num_tokens_across_dp is not None
        for tokens, padded in zip((real, other), agreed.num_tokens_across_dp, strict=True):
            slices, stretched = maybe_create_ubatch_slices(True, [tokens], padded, 1, parts)
            assert slices is not None
            assert stretched is not None
            assert all(each.num_tokens >= 1 for each in (*slices, *stretched))
