"""The decoder's transformer: RMSNorm, rotary attention over a sliding window, SwiGLU, layer scale.

Positions, masks and cached keys are arguments, so that one class serves whole utterances, streamed suffixes (keys of
the prefix are passed in) and incremental steps (keys of the window are passed in).

    frame:   0  1  2  3  4  5            mask of frame 4 with W = 3:   . . x x x .
    a query at frame t sees the keys t - W < k ≤ t
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .geometry import DecoderGeometry
from .layers import LayerScale, rewritten

__all__ = ["KeyValue", "PreTransformer", "sliding_window_mask"]


class KeyValue(NamedTuple):
    """Keys (rotated, unless asked for otherwise) and values of one layer, each [B, kv_heads, frames, head_dim]."""

    key: Tensor
    value: Tensor


def sliding_window_mask(query_positions: Tensor, key_positions: Tensor, window: int) -> Tensor:
    """True where a query may see a key: not in its future, and at most ``window - 1`` frames back.

    Args:
        query_positions: [Q] or [B, Q] frame numbers.
        key_positions: [K] or [B, K] frame numbers.
        window: W, in frames.

    Returns:
        bool [Q, K] or [B, Q, K].
    """
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    return (distance >= 0) & (distance < window)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _Attention(nn.Module):
    def __init__(self, g: DecoderGeometry) -> None:
        super().__init__()
        self.head_dim, self.groups = g.head_dim, g.num_attention_heads // g.num_key_value_heads
        self.q_proj = nn.Linear(g.hidden_size, g.num_attention_heads * g.head_dim, bias=g.attention_bias)
        self.k_proj = nn.Linear(g.hidden_size, g.num_key_value_heads * g.head_dim, bias=g.attention_bias)
        self.v_proj = nn.Linear(g.hidden_size, g.num_key_value_heads * g.head_dim, bias=g.attention_bias)
        self.o_proj = nn.Linear(g.num_attention_heads * g.head_dim, g.hidden_size, bias=g.attention_bias)

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, past: KeyValue | None, *, cache_plain_keys: bool = False
    ) -> tuple[Tensor, KeyValue]:
        frames = x.shape[1]
        query = _rotate(self._heads(self.q_proj(x)), cos[-frames:], sin[-frames:])
        key, value = self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        if not cache_plain_keys:
            key = _rotate(key, cos[-frames:], sin[-frames:])
        if past is not None:
            key, value = torch.cat((past.key, key), dim=2), torch.cat((past.value, value), dim=2)
        current = KeyValue(key, value)
        if cache_plain_keys:
            key = _rotate(key, cos, sin)
        if self.groups > 1:  # grouped-query attention: each key head serves `groups` query heads
            key, value = (t[:, :, None].expand(-1, -1, self.groups, -1, -1).flatten(1, 2) for t in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2)), current


class _SwiGLU(nn.Module):
    def __init__(self, g: DecoderGeometry) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(g.hidden_size, g.intermediate_size, bias=False)
        self.up_proj = nn.Linear(g.hidden_size, g.intermediate_size, bias=False)
        self.down_proj = nn.Linear(g.intermediate_size, g.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, g: DecoderGeometry) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(g.hidden_size, eps=g.rms_norm_eps)
        self.self_attn = _Attention(g)
        self.self_attn_layer_scale = LayerScale(g.hidden_size, g.layer_scale_initial_scale)
        self.post_attention_layernorm = nn.RMSNorm(g.hidden_size, eps=g.rms_norm_eps)
        self.mlp = _SwiGLU(g)
        self.mlp_layer_scale = LayerScale(g.hidden_size, g.layer_scale_initial_scale)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, past: KeyValue | None, *, cache_plain_keys: bool = False
    ) -> tuple[Tensor, KeyValue]:
        attended, cache = self.self_attn(self.input_layernorm(x), cos, sin, mask, past, cache_plain_keys=cache_plain_keys)
        x = x + self.self_attn_layer_scale(attended)
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x))), cache


class PreTransformer(nn.Module):
    """[B, T, latent_dim] → [B, T, latent_dim], with a rotary table of ``max_position_embeddings`` frames."""

    cos: Tensor  # [max_position_embeddings, head_dim], in the module's dtype
    sin: Tensor

    def __init__(self, geometry: DecoderGeometry) -> None:
        super().__init__()
        self.geometry = geometry
        self.input_proj = nn.Linear(geometry.latent_dim, geometry.hidden_size)
        self.layers = nn.ModuleList(_Layer(geometry) for _ in range(geometry.num_hidden_layers))
        self.norm = nn.RMSNorm(geometry.hidden_size, eps=geometry.rms_norm_eps)
        self.output_proj = nn.Linear(geometry.hidden_size, geometry.latent_dim)
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.refresh_rotary_table()

    def refresh_rotary_table(self) -> None:
        """Rebuild the rotary table: angles in fp32, then rounded to the module's dtype."""
        g, weight = self.geometry, self.input_proj.weight
        inverse_frequency = 1.0 / g.rope_theta ** (torch.arange(0, g.head_dim, 2, device=weight.device, dtype=torch.float32) / g.head_dim)
        angles = torch.arange(g.max_position_embeddings, device=weight.device, dtype=torch.float32)[:, None] * inverse_frequency
        angles = torch.cat((angles, angles), dim=-1)
        self.cos = rewritten(self.cos, angles.cos().to(weight.dtype))
        self.sin = rewritten(self.sin, angles.sin().to(weight.dtype))

    def forward(
        self,
        x: Tensor,
        *,
        first_position: int = 0,
        mask: Tensor | None = None,
        past: Sequence[KeyValue] | None = None,
        cache_plain_keys: bool = False,
    ) -> tuple[Tensor, list[KeyValue]]:
        """Run all layers.

        Args:
            x: [B, T, latent_dim].
            first_position: frame number of the first column, for the rotary angles.
            mask: bool, broadcastable to [B, heads, T, K] with K = cached + T keys; by default the sliding window over
                the T frames of ``x`` alone.
            past: one :class:`KeyValue` per layer whose frames come before those of ``x``; not modified.
            cache_plain_keys: take and return keys before their rotation, which then happens on every use, at the positions
                just before ``first_position``. Such keys can be used again at other positions, so that positions stay small
                however long a stream runs.

        Returns:
            The output [B, T, latent_dim] and per layer the keys and values of all K frames.
        """
        frames = x.shape[1]
        if mask is None:
            positions = torch.arange(frames, device=x.device)
            mask = sliding_window_mask(positions, positions, self.geometry.sliding_window)
        first_angle = first_position - (past[0].key.shape[2] if past and cache_plain_keys else 0)
        cos = self.cos[first_angle : first_position + frames]
        sin = self.sin[first_angle : first_position + frames]
        x = self.input_proj(x)
        caches: list[KeyValue] = []
        for index, layer in enumerate(self.layers):
            x, cache = layer(x, cos, sin, mask, None if past is None else past[index], cache_plain_keys=cache_plain_keys)
            caches.append(cache)
        return self.output_proj(self.norm(x)), caches
