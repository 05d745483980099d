"""One data-parallel rank: agrees on each step it is given, then stays for the last one, dies, or hangs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist
from rank_processes import join, tell

from vgraph_lab.errors import RankLostError
from vgraph_lab.vllm_v1 import CUDAGraphMode, ParallelConfig, coordinate_batch_across_dp


def main(rank: int, folder: Path) -> None:
    """Be one rank."""
    plan = join(rank, folder)
    size = plan["size"]
    config = ParallelConfig(size, rank, ubatch_size=plan["num_ubatches"], dbo_decode_token_threshold=30, dbo_prefill_token_threshold=40)
    found: dict[str, object] = {"steps": []}
    for number, step in enumerate([*plan["steps"], plan["last"]]):
        if number == len(plan["steps"]):
            dist.barrier()
            if rank == plan["lost_rank"]:
                while plan["how"] == "hang" and len(list(folder.glob("rank-*.json"))) < size - 1:
                    time.sleep(0.05)
                os._exit(3)
        real, padded, uniform, mode = step[rank]
        try:
            agreed = coordinate_batch_across_dp(
                real, True, config, padded, uniform, CUDAGraphMode[mode], timeout_s=plan["timeout_s"] if plan["last"] is step else 60
            )
        except RankLostError as error:
            found["lost"], found["message"] = error.ranks, str(error)
        else:
            found["steps"].append([agreed.should_ubatch, agreed.num_tokens_across_dp, agreed.cudagraph_mode.name])  # type: ignore[attr-defined]
    tell(rank, folder, found)
    os._exit(0)  # a group that lost a rank cannot be taken down in order
