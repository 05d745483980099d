"""One data-parallel rank: agrees on each step it is given, then stays for the last one, dies, or hangs."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from vgraph_lab.errors import RankLostError
from vgraph_lab.vllm_v1 import CUDAGraphMode, ParallelConfig, coordinate_batch_across_dp


def main(rank: int, folder: Path) -> None:
    """Be one rank; ``folder`` holds plan.json and takes rank-N.json."""
    plan = json.loads((folder / "plan.json").read_text())
    size = plan["size"]
    store: dist.distributed_c10d.Store
    if plan["port"]:
        store = dist.TCPStore("127.0.0.1", plan["port"], size, is_master=rank == 0)  # type: ignore[attr-defined]  # torch names its stores in C++ only
    else:
        store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
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
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # a group that lost a rank cannot be taken down in order
