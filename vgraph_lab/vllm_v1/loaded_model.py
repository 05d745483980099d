"""What a runner keeps of one model, and what it asks of it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from vgraph_lab.errors import ConfigError, LifecycleError

from .descriptor import BatchDescriptor
from .input_batch import InputBatch, InputBuffers, RequestTable
from .modes import CUDAGraphMode
from .moe import ExpertExchange
from .offloader import offloader_of
from .paged_kv import AttentionMetadata, BlockPool, KVCache, split_attn_metadata
from .parallel import ParallelConfig
from .runner_config import RunnerConfig
from .ubatch import UBatchSlices
from .ubatch_wrapper import UBatchWrapper
from .workload_model import WorkloadConfig
from .workspace import WorkspaceManager

if TYPE_CHECKING:
    from .model_runner import GPUModelRunner

__all__ = ["LoadedModel", "SupportsVllmV1", "check_model", "lacks_of_vllm_v1", "supports_vllm_v1"]


class SupportsVllmV1(Protocol):
    """What this runner needs of a model; :class:`~vgraph_lab.vllm_v1.WorkloadModel` has it.

    :func:`supports_vllm_v1` tells whether an object has it. ``isinstance`` would not: from Python 3.12 on it looks past
    ``__getattr__``, through which a module gives its submodules.
    """

    supports_vllm_v1: bool
    config: WorkloadConfig
    layers: nn.ModuleList
    exchange: ExpertExchange
    workspace: WorkspaceManager

    def bind_kv_cache(self, kv_caches: list[Tensor] | None) -> None:
        """Give each layer its cache."""

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab]."""


_MEMBERS = (*SupportsVllmV1.__annotations__, "bind_kv_cache", "compute_logits")


def lacks_of_vllm_v1(model: object) -> list[str]:
    """What of :class:`SupportsVllmV1` a model has not got."""
    return [name for name in _MEMBERS if not hasattr(model, name)]


def supports_vllm_v1(model: object) -> TypeGuard[SupportsVllmV1]:
    """Whether a model has all of :class:`SupportsVllmV1`."""
    return not lacks_of_vllm_v1(model)


def check_model(model: nn.Module, config: RunnerConfig, parallel_config: ParallelConfig, device: torch.device) -> SupportsVllmV1:
    """The model, if a runner with these settings can take it.

    Raises:
        ConfigError: it lacks what :class:`SupportsVllmV1` names, is elsewhere, or does not go with the settings.
    """
    if not supports_vllm_v1(model):
        lacks = ", ".join(lacks_of_vllm_v1(model))
        raise ConfigError(f"{type(model).__name__} cannot run here, it lacks: {lacks}. See SupportsVllmV1; WorkloadModel has all of it.")
    place = next(iter(model.layers.parameters())).device
    if place != device:
        raise ConfigError(f"the model is on {place}, the runner on {device}. Make the model with device='{device}'.")
    config.check(model.config.max_model_len)
    ranks, exchange = parallel_config.data_parallel_size, model.exchange
    if not model.config.num_experts:
        return model
    if exchange.world_size > 1 and exchange.world_size != ranks:
        raise ConfigError(f"experts are divided among {exchange.world_size} ranks, data_parallel_size is {ranks}. Let them be the same.")
    if config.mode.has_full_cudagraphs() and not exchange.is_capturable:
        raise ConfigError(
            f"cudagraph_mode: {config.mode} has FULL graphs, which cannot hold the exchange of experts over gloo: the host does "
            "that work. Use PIECEWISE or NONE here, or NCCL on CUDA devices."
        )
    return model


_owners: WeakKeyDictionary[nn.Module, ref[GPUModelRunner | LoadedModel]] = WeakKeyDictionary()
"""Which runner has a model, by its layers, since these hold the runner's cache; wrappers around a model have the same ones."""


class LoadedModel:
    """A model with its KV cache, its requests and its input buffers. It belongs to one runner until :meth:`release`.

    Args:
        model: a :class:`SupportsVllmV1`.
        config: of the runner.
        device: where both are.
        owner: the runner; by default this object itself. One that is dropped without a release has its model no longer.

    Raises:
        LifecycleError: another runner has the model, or an offloader.
    """

    def __init__(self, model: Any, config: RunnerConfig, device: torch.device, owner: GPUModelRunner | None = None) -> None:
        _check_free(model)
        sizes: WorkloadConfig = model.config
        self.model: Any = model  # with what SupportsVllmV1 says
        self.module: nn.Module = model
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
        self._owner: ref[GPUModelRunner | LoadedModel] = ref(owner or self)
        _owners[model.layers] = self._owner

    def release(self) -> None:
        """Give the model back as it was: without cache, with its own weights, ready for another runner. Graphs must be gone.

        If the model is another owner's by now, that one's stays.
        """
        if isinstance(self.callable, UBatchWrapper):
            self.callable.shutdown()
        if _owners.get(self.model.layers) is self._owner:
            del _owners[self.model.layers]
            _give_back(self.model)

    def metadata(
        self, batch: InputBatch, mode: CUDAGraphMode, descriptor: BatchDescriptor, slices: UBatchSlices | None
    ) -> AttentionMetadata | list[AttentionMetadata]:
        """Padded where a graph holds attention, real where it is eager; one per micro-batch where there are some."""
        if mode is CUDAGraphMode.FULL:
            assert descriptor.num_reqs is not None  # FULL keys have it
            return self.buffers.padded_metadata(descriptor.num_tokens, descriptor.num_reqs, self._max_model_len)
        real = self.buffers.real_metadata(batch)
        return real if slices is None else split_attn_metadata(slices, real)


def _check_free(model: Any) -> None:
    mark = _owners.get(model.layers)
    if mark is not None and mark() is not None:
        gc.collect()  # a dropped runner may linger in a cycle, such as that of an error and its frames
    owner = None if mark is None else mark()
    if owner is not None:
        state = "a LoadedModel" if isinstance(owner, LoadedModel) else owner.graphs.state.value
        raise LifecycleError(
            f"this {type(model).__name__} serves another runner, which is {state}: its layers have that one's KV cache. "
            "Call shutdown() there first, or make another model."
        )
    if mark is not None:
        del _owners[model.layers]
        _give_back(model)
    if offloader_of(model.layers) is not None:
        raise LifecycleError(
            f"an offloader has weights of this {type(model).__name__}. Call its unwrap_modules(), and give it to the runner instead."
        )


def _give_back(model: Any) -> None:
    model.workspace.unlock()
    model.bind_kv_cache(None)
    offloader = offloader_of(model.layers)
    if offloader is not None:
        offloader.unwrap_modules()
