"""One of several ranks that share the experts of a model: runs its steps and writes the logits."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from rank_processes import join, tell

from vgraph_lab.errors import CaptureError, ConfigError, InputError
from vgraph_lab.graphs.backends.cpu import CpuGraphBackend
from vgraph_lab.vllm_v1 import (
    GPUModelRunner,
    ParallelConfig,
    RunnerConfig,
    ScheduledRequest,
    WorkloadConfig,
    WorkloadModel,
    set_forward_context,
)
from vgraph_lab.vllm_v1.model_wrappers import UBATCH_TARGET
from vgraph_lab.vllm_v1.moe import moe_all_to_all


def main(rank: int, folder: Path) -> None:
    """Be one rank."""
    plan = join(rank, folder)
    size = plan["size"]
    config = WorkloadConfig(**plan["model"])
    found: dict[str, object] = {"refused": refusals(config, ParallelConfig(size, rank)) if config.num_experts else []}
    for name in plan["modes"]:
        mode, _, split = name.partition("+")
        parallel = ParallelConfig(size, rank, enable_dbo=bool(split), dbo_decode_token_threshold=2, dbo_prefill_token_threshold=4)
        settings = RunnerConfig(
            cudagraph_mode=mode,  # type: ignore[arg-type]  # names are read
            cudagraph_capture_sizes=(1, 2, 4, 8),
            block_size=4,
            max_num_batched_tokens=32,
            debug=True,
        )
        runner = GPUModelRunner(settings, "cpu", parallel_config=parallel)
        runner.load_model(WorkloadModel(config, expert_group=dist.group.WORLD))
        runner.capture_model()
        steps = []
        for step in plan["steps"]:
            if not step[rank]:
                done, logits = runner.execute_dummy_batch().execution, []
            else:
                output = runner.execute_model([ScheduledRequest(*request) for request in step[rank]])
                done, logits = output.execution, output.logits.tolist()
            steps.append(
                [done.cudagraph_mode.name, done.batch_descriptor.num_tokens, done.num_tokens_across_dp, done.should_ubatch, logits]
            )
        model = runner.get_model()
        assert isinstance(model, WorkloadModel)
        experts = len(model.layers[0].mlp.gate_up) if config.num_experts else 0
        counted = runner.graphs.stats()
        found[name] = {
            "steps": steps,
            "experts": experts,
            "hits": counted.hits(),
            "split_hits": counted.hits(UBATCH_TARGET),
            "graphs": [[entry.target_id, entry.descriptor.work] for entry in runner.graphs.entries()],
        }
        runner.shutdown()
    tell(rank, folder, found)
    dist.barrier()
    os._exit(0)


def refusals(config: WorkloadConfig, parallel: ParallelConfig) -> list[str]:
    """What must not work; the same on every rank, so that none waits for another."""
    told = []
    model = WorkloadModel(config, expert_group=dist.group.WORLD)
    for runner in (
        GPUModelRunner(RunnerConfig(cudagraph_mode="FULL"), "cpu", parallel_config=parallel),  # type: ignore[arg-type]  # names are read
        GPUModelRunner(RunnerConfig(cudagraph_mode="NONE"), "cpu"),  # type: ignore[arg-type]
    ):
        try:
            runner.load_model(model)
        except ConfigError as error:
            told.append(str(error))
    try:
        model.exchange.tokens_of_ranks(3)
    except InputError as error:
        told.append(str(error))
    backend, x, out = CpuGraphBackend(), torch.ones(4, 2), torch.empty(4, 2)
    with set_forward_context():  # the rules of a capture have nothing against it: on a GPU, NCCL's kernels can be captured
        backend.warm_up(lambda: moe_all_to_all(out, x, [2, 2], [2, 2], model.exchange), static_inputs=[x, out], owned=[], audit=True)
    assert (out == 1).all()
    try:
        with set_forward_context():
            backend.capture(
                lambda: moe_all_to_all(out, x, [2, 2], [2, 2], model.exchange), backend.create_pool(), static_inputs=[x, out], owned=[]
            )
    except CaptureError as error:
        told.append(str(error))
    return told
