"""One rank of the bench of micro-batches, as torchrun would start it: the command itself, with what it prints in a file."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import torch

from vgraph_lab import cli
from vgraph_lab.bench.ranks import Watchdog
from vgraph_lab.vllm_v1 import CUDAGraphMode, GPUModelRunner


def main(rank: int, size: int, port: int, folder: Path, options: list[str], broken: str) -> None:
    """Be one rank; ``folder`` takes rank-N.txt."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{rank}",
        "WORLD_SIZE": f"{size}",
        "LOCAL_WORLD_SIZE": f"{size}",
        "TORCHELASTIC_RUN_ID": "none",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "COLUMNS": "120"}
    if broken and rank == 1:
        break_captures(CUDAGraphMode[broken])
    sys.argv = ["cli.py", "bench", "ubatch", *options]
    with (folder / f"rank-{rank}.txt").open("w") as told, contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        cli.main()


def break_captures(mode: CUDAGraphMode) -> None:
    """Let the captures of runners of this mode fail on this rank."""
    capture = GPUModelRunner.capture_model

    def failing(runner: GPUModelRunner, *args: object) -> object:
        if runner.config.mode is mode:
            raise RuntimeError("no room for graphs")
        return capture(runner, *args)  # type: ignore[arg-type]

    GPUModelRunner.capture_model = failing  # type: ignore[method-assign, assignment]


def stuck(folder: Path) -> None:
    """A rank that waits longer than it may; ``folder`` takes stuck.txt."""
    with (folder / "stuck.txt").open("w") as told:
        os.dup2(told.fileno(), 2)
        sys.stderr = told
        dog = Watchdog(1, limit_s=60)
        dog.stage("quick")
        dog.limit_s = 0.1
        dog.stage("waiting for nobody")
        time.sleep(60)
