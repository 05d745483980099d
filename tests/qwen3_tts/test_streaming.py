"""Streaming steps against the published implementation, chunk by chunk, state included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen3_tts.streams import NAMES, golden_requests
from torch import Tensor

from vgraph_lab.graphs import create_backend
from vgraph_lab.qwen3_tts.checkpoint import random_decoder
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry
from vgraph_lab.qwen3_tts.streaming import SuffixState, run_prefix, suffix_step

SMALL = DecoderGeometry(codebook_size=32, codebook_dim=8, latent_dim=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=2, head_dim=4, sliding_window=6, max_position_embeddings=64,
                        decoder_dim=16)  # fmt: skip


def largest_distances(folder: Path, decoder: Code2WavDecoder) -> dict[str, float]:
    """Play every golden stream through the eager steps; the largest waveform and state distance of each request."""
    window = decoder.geometry.sliding_window
    found: dict[str, float] = {}
    with torch.no_grad():
        for name in NAMES:
            for request in golden_requests(folder, name):
                worst, prefix, suffix = 0.0, None, None
                for i, chunk in enumerate(request.chunks):
                    if i == 0 and request.prefix_frames:
                        pad = max(window - request.prefix_frames, 0)
                        reference = torch.nn.functional.pad(chunk[..., : request.prefix_frames], (pad, 0))
                        prefix = run_prefix(decoder, reference, torch.tensor([pad]))
                        chunk = chunk[..., request.prefix_frames :]
                        assert request.states[0]["prefix_pad"] == pad
                        assert request.states[0]["decoder_prefix"] == prefix.keys_values.shape[4]
                    wave, after = suffix_step(decoder, chunk, prefix=prefix, suffix=suffix)
                    worst = max(worst, float(np.abs(wave[0].numpy() - request.waveforms[i]).max()))
                    is_short_tail = i == len(request.chunks) - 1 and i > 0 and chunk.shape[-1] < request.chunk_frames
                    suffix = suffix if is_short_tail else after
                    assert suffix is not None
                    for field, ours in (("suffix_quantized", suffix.quantized), ("suffix_conv", suffix.conv)):
                        golden = request.states[i][field]
                        assert ours.shape == golden.shape, (request.name, i, field)
                        worst = max(worst, float(np.abs(ours.numpy() - golden).max()))
                found[request.name] = worst
    return found


def test_golden_streams_with_this_machines_kernels(tiny_folder: Path, tiny_decoder: Code2WavDecoder) -> None:
    distances = largest_distances(tiny_folder, tiny_decoder)
    assert len(distances) == 8
    assert max(distances.values()) < 2e-4, distances


def codes(batch: int, frames: int, seed: int) -> Tensor:
    return torch.randint(0, 32, (batch, 16, frames), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def small() -> Code2WavDecoder:
    return random_decoder(SMALL, seed=4)


@settings(max_examples=40)
@given(data=st.data(), reference=st.sampled_from([0, 12]), seed=st.integers(0, 99))
def test_chunks_equal_the_whole_until_the_window_rolls(small: Code2WavDecoder, data: st.DataObject, reference: int, seed: int) -> None:
    """While at most W − 2 frames are kept nothing is forgotten, so every chunking gives the whole utterance's samples."""
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    while sum(sizes[:-1]) > SMALL.sliding_window - 2:
        sizes.pop()
    whole = codes(1, reference + sum(sizes), seed)
    expected = small(whole)[..., reference * 1920 :]
    prefix = run_prefix(small, whole[..., :reference], torch.tensor([0])) if reference else None
    pieces, suffix = [], None
    for chunk in whole[..., reference:].split(sizes, dim=-1):
        wave, suffix = suffix_step(small, chunk, prefix=prefix, suffix=suffix)
        pieces.append(wave)
    assert torch.allclose(torch.cat(pieces, dim=-1), expected, atol=1e-4)


def test_the_state_stays_bounded(small: Code2WavDecoder) -> None:
    suffix = None
    for seed in range(6):
        _, suffix = suffix_step(small, codes(2, 3, seed), prefix=None, suffix=suffix)
    assert suffix is not None
    assert suffix.quantized.shape == (2, 8, SMALL.sliding_window)
    assert suffix.conv.shape == (2, SMALL.sliding_window - 2, 16)


@settings(max_examples=20)
@given(reference=st.integers(10, 15), seed=st.integers(0, 99))
def test_left_padding_does_not_reach_new_samples(small: Code2WavDecoder, reference: int, seed: int) -> None:
    """Masked, zeroed, and only shifted for the rotary angles. (Ten hidden frames are what a sample depends on at most.)"""
    whole, pad = codes(1, reference + 3, seed), 16 - reference
    bare = run_prefix(small, whole[..., :reference], torch.tensor([0]))
    padded_codes = torch.nn.functional.pad(whole[..., :reference], (pad, 0), value=seed % 32)
    padded = run_prefix(small, padded_codes, torch.tensor([pad]))
    expected, _ = suffix_step(small, whole[..., reference:], prefix=bare, suffix=None)
    found, _ = suffix_step(small, whole[..., reference:], prefix=padded, suffix=None)
    assert torch.allclose(found, expected, atol=1e-4)


def test_rows_with_different_padding_do_not_meet(small: Code2WavDecoder) -> None:
    references, new = codes(3, 14, 1), codes(3, 4, 2)
    pads = torch.tensor([0, 2, 5])
    together = run_prefix(small, references, pads)
    waves, state = suffix_step(small, new, prefix=together, suffix=None)
    more, _ = suffix_step(small, new, prefix=together, suffix=state)
    for row in range(3):
        alone = run_prefix(small, references[row : row + 1], pads[row : row + 1])
        wave, own = suffix_step(small, new[row : row + 1], prefix=alone, suffix=None)
        again, _ = suffix_step(small, new[row : row + 1], prefix=alone, suffix=own)
        assert torch.allclose(waves[row], wave[0], atol=1e-4)
        assert torch.allclose(more[row], again[0], atol=1e-4)


def test_padding_on_the_right_does_not_reach_real_samples(small: Code2WavDecoder) -> None:
    start, short = codes(1, 4, 1), codes(1, 2, 2)
    _, state = suffix_step(small, start, prefix=None, suffix=None)
    exact, _ = suffix_step(small, short, prefix=None, suffix=state)
    for fill in (0, 31):
        padded = torch.nn.functional.pad(short, (0, 3), value=fill)
        wave, _ = suffix_step(small, padded, prefix=None, suffix=state)
        assert torch.allclose(wave[..., : 2 * 1920], exact, atol=1e-4)


def test_states_are_not_changed_in_place(small: Code2WavDecoder) -> None:
    prefix = run_prefix(small, codes(1, 12, 1), torch.tensor([3]))
    _, state = suffix_step(small, codes(1, 4, 2), prefix=prefix, suffix=None)
    before = [t.clone() for t in (*prefix, *state)]
    suffix_step(small, codes(1, 4, 3), prefix=prefix, suffix=state)
    assert all(torch.equal(a, b) for a, b in zip((*prefix, *state), before, strict=True))


def test_both_steps_can_be_captured(small: Code2WavDecoder) -> None:
    """Graphs on the CPU backend: fixed shapes, no look at the data, the same result bit for bit."""
    backend = create_backend("cpu")
    reference, new, pads = codes(2, 14, 1), codes(2, 4, 2), torch.tensor([0, 3])

    def first_chunk() -> tuple[Tensor, SuffixState]:
        return suffix_step(small, new, prefix=run_prefix(small, reference, pads), suffix=None)

    static = [reference, new, pads]
    owned = [*small.parameters(), *small.buffers()]
    backend.warm_up(first_chunk, static_inputs=static, owned=owned, audit=True)
    graph, (wave, _) = backend.capture(first_chunk, backend.create_pool(), static_inputs=static, owned=owned)
    reference.copy_(codes(2, 14, 5))
    pads.copy_(torch.tensor([6, 1]))
    graph.replay()
    with torch.no_grad():
        assert torch.equal(wave, first_chunk()[0])
