"""One data-parallel rank with a part of the experts: agrees on each step, runs it whole or in micro-batches, and may die in one."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rank_processes import join, tell
from ubatch_workload import Workload

from vgraph_lab.errors import RankLostError
from vgraph_lab.vllm_v1 import CUDAGraphMode, ParallelConfig, coordinate_batch_across_dp, dbo_current_ubatch_id

NONE = CUDAGraphMode.NONE
THRESHOLD = 8


def main(rank: int, folder: Path) -> None:
    """Be one rank."""
    plan = join(rank, folder)
    size, parts = plan["size"], plan["num_ubatches"]
    config = ParallelConfig(size, rank, ubatch_size=parts, dbo_decode_token_threshold=THRESHOLD, dbo_prefill_token_threshold=THRESHOLD)
    experts = dist.new_group(timeout=timedelta(seconds=20))
    workload, alone = Workload(parts, NONE, experts), Workload(parts, NONE)
    found: dict[str, list[object]] = {"split": [], "tokens": [], "error": [], "lost": []}
    for seed, step in enumerate(plan["steps"]):
        lens = [(new, new) for new in step[rank]]
        real = sum(step[rank])
        agreed = coordinate_batch_across_dp(real, True, config, uniform_decode=False)
        assert agreed.num_tokens_across_dp is not None
        tokens = agreed.num_tokens_across_dp[rank]
        found["split"].append(agreed.should_ubatch)
        found["tokens"].append(agreed.num_tokens_across_dp)
        workload.across = agreed.num_tokens_across_dp
        measured = workload.run(lens, tokens, seed, split=agreed.should_ubatch)
        torch.testing.assert_close(measured, alone.run(lens, real, seed, split=False), rtol=1e-4, atol=1e-5)
    if plan["lost_rank"] is not None:
        workload.across = (12,) * size
        if rank == plan["lost_rank"]:
            workload.model.layers[1].register_forward_pre_hook(_die)
        try:
            workload.run([(12, 12)], 12, 0)
        except RuntimeError as error:
            found["error"] = [type(error).__name__, *error.__notes__]
        try:
            coordinate_batch_across_dp(12, True, config, uniform_decode=False, timeout_s=1.0)
        except RankLostError as error:
            found["lost"] = list(error.ranks)
    tell(rank, folder, found)
    os._exit(0)  # a group that lost a rank cannot be taken down in order


def _die(*_: object) -> None:
    if dbo_current_ubatch_id() == 1:
        os._exit(3)
