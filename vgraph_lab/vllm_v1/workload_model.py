"""A small decoder-only transformer, the model of this path: RMSNorm, rotary positions, grouped-query attention over a paged
KV cache, gated MLPs or experts. It takes the flat batches of vLLM, prefill and decode in one."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.distributed as dist
from annotated_types import Ge
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from vgraph_lab.config.validation import Settings
from vgraph_lab.errors import ConfigError, LifecycleError

from .moe import ExpertExchange, MoELayer
from .paged_kv import unified_attention_with_output
from .ubatching import dbo_span
from .workspace import WorkspaceManager

__all__ = ["WorkloadConfig", "WorkloadModel"]


class WorkloadConfig(Settings):
    """Sizes of a :class:`WorkloadModel`. The default is for tests; :meth:`gpu` fills one.

    Attributes:
        vocab_size: tokens that there are.
        hidden_size: of each token.
        num_layers: decoder layers.
        num_heads: of queries.
        num_kv_heads: of keys and values; divides ``num_heads``.
        head_dim: even.
        intermediate_size: of the MLP, or of each expert.
        max_model_len: tokens of one request at most.
        num_experts: experts of each layer; 0 for an MLP.
        top_k: experts of each token.
        rope_theta: base of the rotary positions.
        seed: of the weights.
    """

    vocab_size: PositiveInt = 64
    hidden_size: PositiveInt = 32
    num_layers: PositiveInt = 2
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 8
    intermediate_size: PositiveInt = 48
    max_model_len: PositiveInt = 64
    num_experts: Annotated[int, Ge(0)] = 0
    top_k: PositiveInt = 2
    rope_theta: PositiveFloat = 10_000.0
    seed: int = 0

    @classmethod
    def gpu(cls, *, num_experts: int = 0) -> WorkloadConfig:
        """About 1.3 G parameters with MLPs, for bfloat16 on a large GPU; each layer's experts take 8.7 M apiece.

        Requests are short: attention in a FULL graph reads ``max_model_len`` tokens for each token of the batch.
        """
        return cls(
            vocab_size=32_000,
            hidden_size=2048,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=4864 if not num_experts else 1408,
            max_model_len=1024,
            num_experts=num_experts,
        )


class _Attention(nn.Module):
    def __init__(self, config: WorkloadConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = nn.Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.kv_cache: Tensor | None = None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.kv_cache is None:
            raise LifecycleError("the model has no KV cache yet. Call bind_kv_cache(); a runner does so when it loads the model.")
        qkv: Tensor = self.qkv(x)
        query, key, value = qkv.unflatten(1, (-1, self.head_dim)).split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        output = torch.empty_like(query)  # in a graph, its own memory, which the break between two segments writes into
        unified_attention_with_output(query, key, value, output, self.kv_cache)
        projected: Tensor = self.out(output.flatten(1))
        return projected


class _MLP(nn.Module):
    def __init__(self, config: WorkloadConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        projected: Tensor = self.down(F.silu(gate) * up)
        return projected


class DecoderLayer(nn.Module):
    """Attention, then an MLP or experts, each on the normalised stream and added to it."""

    def __init__(self, config: WorkloadConfig, number: int, exchange: ExpertExchange, workspace: WorkspaceManager) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=1e-6), nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.attention = _Attention(config)
        self.mlp: nn.Module = _MLP(config)
        self.has_experts = config.num_experts > 0
        if config.num_experts:
            self.mlp = MoELayer(
                config.hidden_size,
                config.intermediate_size,
                exchange,
                num_experts=config.num_experts,
                top_k=config.top_k,
                workspace=workspace,
                seed=config.seed + 1000 * (number + 1),
            )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[num_tokens, hidden] and the rotary tables of its positions → [num_tokens, hidden]."""
        with dbo_span("attention"):
            x = x + self.attention(self.attention_norm(x), cos, sin)
        with dbo_span("experts" if self.has_experts else "MLP"):
            added: Tensor = x + self.mlp(self.mlp_norm(x))
        return added


class WorkloadModel(nn.Module):
    """The transformer. Its weights depend on the configuration alone, so that all ranks have the same.

    Args:
        config: sizes.
        device: where.
        dtype: of weights and activations.
        expert_group: ranks among which experts are divided; None for one process.
        workspace: scratch memory of the experts; by default one of its own.

    Raises:
        ConfigError: sizes do not fit together.
    """

    supports_vllm_v1 = True
    rope: Tensor  # cosine and sine [2, max_model_len, head_dim / 2]

    def __init__(
        self,
        config: WorkloadConfig,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        expert_group: dist.ProcessGroup | None = None,
        workspace: WorkspaceManager | None = None,
    ) -> None:
        super().__init__()
        _check(config)
        with torch.inference_mode(mode=False):  # weights may change in place, in and outside of that mode
            self._make(config, torch.device(device), dtype, expert_group, workspace)

    def _make(
        self,
        config: WorkloadConfig,
        device: torch.device,
        dtype: torch.dtype,
        expert_group: dist.ProcessGroup | None,
        workspace: WorkspaceManager | None,
    ) -> None:
        self.config, self.workspace = config, workspace or WorkspaceManager(device)
        self.exchange = ExpertExchange(config.num_experts, expert_group)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(config.seed)  # all but the experts, which have seeds of their own
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(DecoderLayer(config, n, self.exchange, self.workspace) for n in range(config.num_layers))
            self.norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        frequencies = config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.arange(config.max_model_len)[:, None] * frequencies
        self.register_buffer("rope", torch.stack((angles.cos(), angles.sin())), persistent=False)
        self.requires_grad_(requires_grad=False).to(device=device, dtype=dtype)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.rope.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.rope.dtype

    def bind_kv_cache(self, kv_caches: list[Tensor] | None) -> None:
        """Give each layer its cache (:meth:`~vgraph_lab.vllm_v1.paged_kv.KVCache.layers`), or take all away.

        Raises:
            ConfigError: there are not as many as layers.
        """
        if kv_caches is not None and len(kv_caches) != len(self.layers):
            raise ConfigError(f"{len(kv_caches)} KV caches for {len(self.layers)} layers; each layer has its own.")
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            layer.attention.kv_cache = None if kv_caches is None else kv_caches[number]

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states of a flat batch, within a forward context that holds its attention metadata.

        Args:
            input_ids: int64 [num_tokens].
            positions: of each token in its request, int64 [num_tokens].

        Returns:
            [num_tokens, hidden_size]; rows of padding tokens mean nothing.
        """
        x = self.embedding(input_ids)
        cos, sin = self.rope.index_select(1, positions)
        for layer in self.layers:
            x = layer(x, cos, sin)
        normalised: Tensor = self.norm(x)
        return normalised

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[rows, hidden_size] → [rows, vocab_size]."""
        logits: Tensor = self.head(hidden_states)
        return logits


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head against each other; ``cos`` and ``sin`` are [num_tokens, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _check(config: WorkloadConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(f"num_kv_heads: {config.num_kv_heads} must divide num_heads, which is {config.num_heads}.")
    if config.head_dim % 2:
        raise ConfigError(f"head_dim: must be even for rotary positions, got {config.head_dim}.")
    if 0 < config.num_experts < config.top_k:
        raise ConfigError(f"top_k: {config.top_k} experts per token, but there are {config.num_experts}.")
