"""One data-parallel rank behind a runner: runs its steps in several modes, whole and in micro-batches; it may be lost in one of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import torch.distributed as dist
from rank_processes import join, tell

from vgraph_lab.errors import FallbackReason, RankLostError, VGraphLabError
from vgraph_lab.inspect.v1_tables import batches_table
from vgraph_lab.vllm_v1 import GPUModelRunner, ParallelConfig, RunnerConfig, ScheduledRequest, WorkloadConfig, WorkloadModel
from vgraph_lab.vllm_v1.model_wrappers import FULL_TARGET, PIECEWISE_TARGET, UBATCH_TARGET

DECODE_THRESHOLD, PREFILL_THRESHOLD, SIZES = 2, 4, (1, 2, 4, 8)


def main(rank: int, folder: Path) -> None:
    """Be one rank."""
    plan = join(rank, folder)
    experts = dist.new_group(timeout=timedelta(seconds=plan.get("timeout_s", 60)))
    found = {name: run(rank, name, plan, experts, folder) for name in plan["runs"]}
    tell(rank, folder, found)
    if plan.get("lost_rank") is None:
        dist.barrier()
    os._exit(0)  # a group that lost a rank cannot be taken down in order


def meet(rank: int, folder: Path) -> None:
    """Be one rank that does something else than the others: plan.json says what as ``does``, and which settings are its ``own``."""
    plan = join(rank, folder)
    timeout = timedelta(seconds=plan["timeout_s"])
    found: list[str] = []
    runners: list[GPUModelRunner] = []

    def raising(*_: object) -> None:
        raise ValueError("boom")

    def do(what: str) -> None:
        if what == "load":
            runners.append(ready(rank, plan["run"], plan, dist.new_group(timeout=timeout), plan["own"][rank]))
            return
        if what == "die":
            tell(rank, folder, found)
            os._exit(3)
        runner, tokens = runners[0], [1, 2, 3, 4, 5, 6]
        layer = runner.get_model().layers[1]  # type: ignore[index]
        hook = layer.register_forward_pre_hook(raising) if what == "fail" else None  # type: ignore[union-attr]
        runner.finish_requests(["a"])
        try:
            if what == "explain":
                runner.explain([6])
            elif what == "parity":
                runner.check_parity([ScheduledRequest("a", tokens)])
            else:
                runner.execute_model([ScheduledRequest("a", tokens)])
        finally:
            if hook is not None:
                hook.remove()

    for what in plan["does"][rank]:
        try:
            do(what)
            found.append("")
        except (VGraphLabError, ValueError) as error:
            found.append(f"{type(error).__name__} {list(getattr(error, 'ranks', []))}: {error}")
    tell(rank, folder, found)
    while len(list(folder.glob("rank-*.json"))) < plan["size"]:
        time.sleep(0.02)
    os._exit(0)


def ready(
    rank: int, name: str, plan: dict[str, Any], experts: dist.ProcessGroup, own: dict[str, dict[str, Any]] | None = None
) -> GPUModelRunner:
    """The runner of a run called MODE×PARTS; with settings of its own in the sections ``runner``, ``parallel`` and ``model``."""
    own = {"runner": {}, "parallel": {}, "model": {}} | (own or {})
    mode, parts = name.split("×")
    thresholds = {"dbo_decode_token_threshold": DECODE_THRESHOLD, "dbo_prefill_token_threshold": PREFILL_THRESHOLD}
    settings = {"cudagraph_mode": mode, "cudagraph_capture_sizes": SIZES, "block_size": 4, "max_num_batched_tokens": 32, "debug": True}
    config = RunnerConfig(**settings | own["runner"])
    parallel = ParallelConfig(plan["size"], rank, **{"ubatch_size": int(parts)} | thresholds | own["parallel"])
    runner = GPUModelRunner(config, "cpu", parallel_config=parallel, timeout_s=plan.get("timeout_s", 60))
    runner.load_model(WorkloadModel(WorkloadConfig(**plan["model"] | own["model"]), expert_group=experts))
    runner.capture_model()
    return runner


def run(rank: int, name: str, plan: dict[str, Any], experts: dist.ProcessGroup, folder: Path) -> dict[str, Any]:
    """All steps of one run; what each was, and what was counted."""
    runner = ready(rank, name, plan, experts)
    steps: list[dict[str, Any]] = []
    found: dict[str, Any] = {"steps": steps, "lost": None}
    for number, step in enumerate(plan["steps"]):
        if number == plan.get("lost_in_step") and rank == plan["lost_rank"]:
            layer = runner.get_model().layers[1]  # type: ignore[index]
            layer.register_forward_pre_hook(lost(plan["how"], folder, plan["size"]))  # type: ignore[union-attr]
        try:
            if not step[rank]:
                explanation, logits = runner.execute_dummy_batch(), []
            else:
                output = runner.execute_model([ScheduledRequest(*request) for request in step[rank]])
                explanation, logits = output.explanation, output.logits.tolist()
        except RankLostError as error:
            live = sum(runner.num_computed_tokens(req_id) for req_id, _ in step[rank])
            found["lost"] = {"ranks": list(error.ranks), "message": str(error), "notes": getattr(error, "__notes__", []), "kept": live}
            return found
        done = explanation.execution
        lens = [len(tokens) for _, tokens in step[rank]] or [1]
        row = batches_table(runner, [lens]).iloc[0].to_dict() if plan.get("has_tables") else {}
        steps.append(
            {
                "table": [row["mode"], row["reason"], int(row["segments"]) if pd.notna(row["segments"]) else 0] if row else [],
                "mode": done.cudagraph_mode.name,
                "runs_as": [explanation.runs_as.name, done.cudagraph_stats.runtime_mode],
                "tokens": done.num_tokens_across_dp,
                "split": done.should_ubatch,
                "reason": explanation.fallback_reason,
                "words": str(explanation).splitlines()[-1],
                "logits": logits,
            }
        )
    counted = runner.graphs.stats()
    found["hits"] = {target: counted.hits(target) for target in (FULL_TARGET, PIECEWISE_TARGET, UBATCH_TARGET)}
    found["not_covered"] = counted.reasons().get(FallbackReason.STATE_NOT_COVERED, 0)
    found["graphs"] = [[entry.target_id, entry.descriptor.work] for entry in runner.graphs.entries()]
    runner.shutdown()
    return found


def lost(how: str, folder: Path, size: int) -> Callable[..., None]:
    """A hook in which this rank dies, or does nothing until the others have given up."""

    def hook(*_: object) -> None:
        while how == "hang" and len(list(folder.glob("rank-*.json"))) < size - 1:
            time.sleep(0.05)
        os._exit(3)

    return hook
