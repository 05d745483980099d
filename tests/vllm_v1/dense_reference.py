"""The workload model once more, in float64 and without a cache: whole sequences, loops over heads, tokens and experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vgraph_lab.vllm_v1 import WorkloadConfig

Weights = Mapping[str, Tensor]


def dense_logits(weights: Weights, config: WorkloadConfig, tokens: Sequence[int]) -> Tensor:
    """Logits after each token of one request [len(tokens), vocab_size]."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = w["embedding.weight"][torch.tensor(tokens)]
    for number in range(config.num_layers):
        prefix = f"layers.{number}."
        x = x + attention(w, prefix, config, norm(x, w[prefix + "attention_norm.weight"]))
        y = norm(x, w[prefix + "mlp_norm.weight"])
        if config.num_experts:
            x = x + torch.stack([experts(w, prefix + "mlp.", config.top_k, row) for row in y])
        else:
            x = x + swiglu(y @ w[prefix + "mlp.gate_up.weight"].T) @ w[prefix + "mlp.down.weight"].T
    return norm(x, w["norm.weight"]) @ w["head.weight"].T


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return gate / (1 + (-gate).exp()) * up


def attention(w: Weights, prefix: str, config: WorkloadConfig, x: Tensor) -> Tensor:
    dim, share = config.head_dim, config.num_heads // config.num_kv_heads
    heads = (x @ w[prefix + "attention.qkv.weight"].T).split(dim, dim=-1)
    queries, keys = heads[: config.num_heads], heads[config.num_heads : config.num_heads + config.num_kv_heads]
    values = heads[config.num_heads + config.num_kv_heads :]
    attended = []
    for number, query in enumerate(queries):
        scores = rotated(query, config) @ rotated(keys[number // share], config).T / math.sqrt(dim)
        future = torch.ones_like(scores).triu(1).bool()
        attended.append(scores.masked_fill(future, -math.inf).softmax(-1) @ values[number // share])
    return torch.cat(attended, -1) @ w[prefix + "attention.out.weight"].T


def rotated(x: Tensor, config: WorkloadConfig) -> Tensor:
    """Each pair (i, i + dim/2) as a complex number, turned by position times frequency."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(
        torch.ones(len(x), half, dtype=torch.float64), torch.arange(len(x))[:, None] * frequencies
    )
    return torch.cat((turned.real, turned.imag), -1)


def experts(w: Weights, prefix: str, top_k: int, row: Tensor) -> Tensor:
    """One token through its best experts, one after the other."""
    shares = (row @ w[prefix + "router"]).softmax(-1)
    best = shares.argsort(descending=True)[:top_k].tolist()
    total = sum(float(shares[e]) for e in best)
    parts = [float(shares[e]) / total * (swiglu(row @ w[prefix + "gate_up"][e]) @ w[prefix + "down"][e]) for e in best]
    return torch.stack(parts).sum(0)
