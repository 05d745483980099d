"""Ranks as processes. They share a folder: plan.json says what to do, rank-N.json what came of it."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(
    folder: Path, main: Callable[[int, Path], None], *, at_most_s: float = 60, **plan: Any
) -> tuple[list[int | None], list[dict[str, Any]]]:
    """Exit codes of all ranks, and what those wrote that are left; ``plan`` has their number as ``size``."""
    (folder / "plan.json").write_text(json.dumps(plan))
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["vgraph_lab.vllm_v1"])  # imports torch once, not once per rank
    ranks = [server.Process(target=main, args=(rank, folder)) for rank in range(plan["size"])]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(timeout=at_most_s)
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.exitcode for rank in ranks], [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


def join(rank: int, folder: Path) -> dict[str, Any]:
    """In the process of a rank: join the others (through a server with ``port``, else through a file), and read the plan."""
    torch.set_num_threads(1)
    plan: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    store: dist.distributed_c10d.Store
    if plan.get("port"):
        store = dist.TCPStore("127.0.0.1", plan["port"], plan["size"], is_master=rank == 0)  # type: ignore[attr-defined]  # named in C++ only
    else:
        store = dist.FileStore(str(folder / "store"), plan["size"])  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan["size"], timeout=timedelta(seconds=60))
    return plan


def tell(rank: int, folder: Path, found: object) -> None:
    """In the process of a rank: write what came of it."""
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
