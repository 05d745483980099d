"""Where layers' inputs lie, and how their earlier samples come from the arena and go back to it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vgraph_lab.qwen3_tts.checkpoint import random_decoder
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry
from vgraph_lab.qwen3_tts.incremental_state import StateArena

GEOMETRY = DecoderGeometry(
    codebook_size=8,
    codebook_dim=4,
    num_quantizers=2,
    latent_dim=6,
    hidden_size=4,
    intermediate_size=4,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=4,
    sliding_window=4,
    max_position_embeddings=16,
    upsampling_ratios=(2,),
    upsample_rates=(3,),
    decoder_dim=10,
)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("batch", "frames"), [(1, 1), (3, 1), (2, 7)])
def test_buffers_are_one_piece_of_memory(kernels: Any, batch: int, frames: int) -> None:
    """Each begins on a multiple of 16 elements, none reaches into the next; the table says where they are."""
    from vgraph_lab.qwen3_tts.fast.buffers import LookBacks

    look_backs = LookBacks(random_decoder(GEOMETRY))
    memory, buffers = look_backs.allocate(batch, frames, torch.empty(0, dtype=torch.float16))
    assert memory.dtype is torch.float16
    places = [buffer.storage_offset() for buffer in buffers]
    assert all(place % 16 == 0 for place in places)
    assert all(begin + buffer.numel() <= end for (begin, end), buffer in zip(pairwise([*places, memory.numel()]), buffers, strict=True))
    for layer, buffer, row, place in zip(look_backs.layers, buffers, look_backs.table(batch, frames).tolist(), places, strict=True):
        assert buffer.shape == (batch, layer.samples + layer.per_frame * frames, layer.channels)
        assert buffer.is_contiguous()
        assert row == [layer.place, layer.channels, layer.samples, layer.per_frame * frames, place, buffer.stride(0)]
    assert look_backs.table(batch, frames) is look_backs.table(batch, frames), "captures find it where it was"


def test_histories_come_and_go(kernels: Any) -> None:
    """Earlier samples in front of each buffer, its last ones back; zeros for a stream that begins, and nobody else's row."""
    from vgraph_lab.qwen3_tts.fast.buffers import LookBacks

    decoder = random_decoder(GEOMETRY)
    look_backs = LookBacks(decoder)

    @settings(max_examples=10, suppress_health_check=list(HealthCheck))
    @given(slots=st.permutations(range(3)), first=st.lists(st.integers(0, 2), min_size=2, max_size=2), frames=st.integers(1, 7))
    def check(slots: list[int], first: list[int], frames: int) -> None:
        arena = StateArena(decoder, 3)
        arena.rows.copy_(drawn(*arena.rows.shape, seed=frames))
        before, places = arena.rows.clone(), torch.tensor([slots[:2], first]).T.contiguous()
        memory, buffers = look_backs.allocate(2, frames, arena.rows)
        memory.copy_(drawn(*memory.shape, seed=99))
        given_samples = [buffer.clone() for buffer in buffers]
        look_backs.load(arena, memory, places, frames)
        kept = arena.histories(places[:, 0], places[:, 1])
        assert torch.equal(arena.rows, before)
        for layer, buffer, untouched in zip(look_backs.layers, buffers, given_samples, strict=True):
            expected = kept[:, layer.place : layer.end].unflatten(1, (layer.channels, layer.samples)).transpose(1, 2)
            assert torch.equal(buffer[:, : layer.samples], expected)
            assert torch.equal(buffer[:, layer.samples :], untouched[:, layer.samples :])
        look_backs.save(arena, memory, places, frames)
        histories, _ = arena.parts_of(slots[:2])
        for layer, buffer, history in zip(look_backs.layers, buffers, histories, strict=True):
            assert torch.equal(history.unflatten(1, (layer.channels, layer.samples)).transpose(1, 2), buffer[:, -layer.samples :])
        for slot in (slots[2], arena.spare_slot):
            assert torch.equal(arena.rows[slot], before[slot])
        assert torch.equal(arena.parts_of(slots)[1], before[slots][:, -arena.ring :]), "keys and values are not touched"

    check()
