"""The workload model with its cache, filled with whatever a test wants to run, whole or in micro-batches."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vgraph_lab.graphs.backends.cpu import CpuGraphBackend
from vgraph_lab.vllm_v1 import (
    AttentionMetadata,
    BatchDescriptor,
    CUDAGraphMode,
    CUDAGraphOptions,
    KVCache,
    ParallelConfig,
    UBatchWrapper,
    WorkloadConfig,
    WorkloadModel,
    WorkspaceManager,
    WrapperGraphs,
    dbo_current_ubatch_id,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
    maybe_create_ubatch_slices,
    set_forward_context,
)

NONE = CUDAGraphMode.NONE
CONFIG = WorkloadConfig(num_experts=4, num_layers=2, max_model_len=32)
CPU = torch.device("cpu")
BLOCK, MOST_TOKENS, MOST_REQS = 4, 24, 8

Lens = list[tuple[int, int]]
"""New and all tokens of each request."""


class Workload:
    """The model; its micro-batches hand over where experts exchange, or would with several ranks.

    Args:
        parts: micro-batches.
        mode: of the wrapper.
        group: ranks that have the experts; None for this process alone.
    """

    def __init__(self, parts: int, mode: CUDAGraphMode = CUDAGraphMode.FULL, group: dist.ProcessGroup | None = None) -> None:
        self.ranks = 1 if group is None else dist.get_world_size(group)
        workspace = WorkspaceManager(CPU, num_ubatches=parts, current_ubatch=dbo_current_ubatch_id)
        self.model = WorkloadModel(CONFIG, workspace=workspace, expert_group=group)
        for number in range(parts):  # the scratch memory of each micro-batch gets its size
            workspace.current_ubatch = partial(int, number)
            with set_forward_context(num_tokens_across_dp=(MOST_TOKENS,) * self.ranks):
                self.model.layers[0].mlp(torch.zeros(MOST_TOKENS, CONFIG.hidden_size))
        workspace.current_ubatch = dbo_current_ubatch_id
        for layer in self.model.layers if group is None else ():  # with ranks, the layers hand over themselves, where they exchange
            layer.mlp.register_forward_pre_hook(lambda *_: dbo_yield_and_switch_from_compute_to_comm())
            layer.mlp.register_forward_hook(lambda *_: dbo_yield_and_switch_from_comm_to_compute())
        shape = (CONFIG.num_layers, 1 + MOST_REQS * CONFIG.max_model_len // BLOCK, BLOCK, CONFIG.num_kv_heads, CONFIG.head_dim)
        self.cache = KVCache(*shape, device=CPU, dtype=torch.float32)
        self.model.bind_kv_cache(self.cache.layers())
        self.graphs = WrapperGraphs(CpuGraphBackend())
        self.wrapper = UBatchWrapper(
            self.model,
            ParallelConfig(2, ubatch_size=parts),
            mode,
            self.graphs,
            modules=(self.cache,),
            static_tensors=workspace.tensors(),
            cudagraph_options=CUDAGraphOptions(debug=True),
        )
        self.parts = parts
        self.across: tuple[int, ...] | None = None  # tokens of each rank; by default all have as many
        self.ids, self.positions, self.slots = (torch.zeros(MOST_TOKENS, dtype=torch.int64) for _ in range(3))
        self.starts, self.lens = torch.zeros(MOST_REQS + 1, dtype=torch.int64), torch.zeros(MOST_REQS, dtype=torch.int64)
        self.table = 1 + torch.arange(MOST_REQS * CONFIG.max_model_len // BLOCK).view(MOST_REQS, -1)

    def run(self, lens: Lens, tokens: int, seed: int, mode: CUDAGraphMode = NONE, split: bool = True) -> tuple[Tensor, Tensor]:
        """Hidden states of the real tokens, and the cache afterwards; tokens and what the cache holds before come from ``seed``."""
        real = sum(new for new, _ in lens)
        reqs = MOST_REQS if mode else len(lens)
        self._fill(lens, seed)
        slices = maybe_create_ubatch_slices(split, [new for new, _ in lens], tokens, reqs, self.parts)[1]
        with (
            set_forward_context(
                self._metadata(lens, (tokens, reqs) if mode else None),
                ubatch_slices=slices,
                num_tokens_across_dp=self.across or (tokens,) * max(self.ranks, 2),
                cudagraph_runtime_mode=mode,
                batch_descriptor=BatchDescriptor(tokens, reqs) if mode else None,
            ),
            torch.no_grad(),
        ):
            hidden: Tensor = self.wrapper(self.ids[:tokens], self.positions[:tokens])
        return hidden[:real].clone(), self.cache.blocks[:, :, 1:].clone()

    def _fill(self, lens: Lens, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.cache.blocks.copy_(torch.randn(self.cache.blocks.shape, generator=generator))
            self.cache.blocks[:, :, 0] = 0
        self.ids.copy_(torch.randint(CONFIG.vocab_size, self.ids.shape, generator=generator))
        self.positions.zero_()
        self.slots.fill_(-1)
        places = [(row, position) for row, (new, total) in enumerate(lens) for position in range(total - new, total)]
        for token, (row, position) in enumerate(places):
            self.positions[token] = position
            self.slots[token] = self.table[row, position // BLOCK] * BLOCK + position % BLOCK
        ends = np.cumsum([0, *(new for new, _ in lens)])
        self.starts.fill_(int(ends[-1]))
        self.starts[: len(ends)] = torch.from_numpy(ends)
        self.lens.zero_()
        self.lens[: len(lens)] = torch.tensor([total for _, total in lens])

    def _metadata(self, lens: Lens, padded: tuple[int, int] | None) -> AttentionMetadata:
        tokens, reqs = padded or (sum(new for new, _ in lens), len(lens))
        most = CONFIG.max_model_len if padded else max(total for _, total in lens)
        tensors = self.starts[: reqs + 1], self.lens[:reqs], self.table[:reqs], self.slots[:tokens]
        return AttentionMetadata(*tensors, tokens, most, None if padded else tuple(lens))
