"""What a runner keeps of one model, and what it asks of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .descriptor import BatchDescriptor
from .input_batch import InputBatch, InputBuffers, RequestTable
from .modes import CUDAGraphMode
from .moe import ExpertExchange
from .paged_kv import AttentionMetadata, BlockPool, KVCache, split_attn_metadata
from .runner_config import RunnerConfig
from .ubatch import UBatchSlices
from .workload_model import WorkloadConfig
from .workspace import WorkspaceManager

__all__ = ["LoadedModel", "SupportsVllmV1"]


@runtime_checkable
class SupportsVllmV1(Protocol):
    """What this runner needs of a model; :class:`~vgraph_lab.vllm_v1.WorkloadModel` has it."""

    supports_vllm_v1: bool
    config: WorkloadConfig
    layers: nn.ModuleList
    exchange: ExpertExchange
    workspace: WorkspaceManager

    def bind_kv_cache(self, kv_caches: list[Tensor] | None) -> None:
        """Give each layer its cache."""

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab]."""


class LoadedModel:
    """A model with its KV cache, its requests and its input buffers.

    Args:
        model: a :class:`SupportsVllmV1`.
        config: of the runner.
        device: where both are.
    """

    def __init__(self, model: Any, config: RunnerConfig, device: torch.device) -> None:
        sizes: WorkloadConfig = model.config
        self.model: Any = model
        self.callable: Callable[..., Any] = model  # wrapped, once it is
        blocks_per_request = -(-sizes.max_model_len // config.block_size)
        num_blocks = config.num_blocks or 1 + config.max_num_seqs * blocks_per_request
        dtype = next(model.parameters()).dtype
        self.kv_cache = KVCache(
            sizes.num_layers, num_blocks, config.block_size, sizes.num_kv_heads, sizes.head_dim, device=device, dtype=dtype
        )
        self.requests = RequestTable(
            BlockPool(num_blocks), block_size=config.block_size, max_model_len=sizes.max_model_len, vocab_size=sizes.vocab_size
        )
        self.buffers = InputBuffers(config.max_num_batched_tokens, config.max_num_seqs, self.requests.max_blocks, device)
        self._max_model_len = sizes.max_model_len
        model.bind_kv_cache(self.kv_cache.layers())

    def metadata(
        self, batch: InputBatch, mode: CUDAGraphMode, descriptor: BatchDescriptor, slices: UBatchSlices | None
    ) -> AttentionMetadata | list[AttentionMetadata]:
        """Padded where a graph holds attention, real where it is eager; one per micro-batch where there are some."""
        if mode is CUDAGraphMode.FULL:
            assert descriptor.num_reqs is not None  # FULL keys have it
            return self.buffers.padded_metadata(descriptor.num_tokens, descriptor.num_reqs, self._max_model_len)
        real = self.buffers.real_metadata(batch)
        return real if slices is None else split_attn_metadata(slices, real)
