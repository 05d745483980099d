"""The fast step against the plain one: both roundings of the same sums, held to them in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vgraph_lab.qwen3_tts.checkpoint import random_decoder
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry
from vgraph_lab.qwen3_tts.incremental import continue_stream
from vgraph_lab.qwen3_tts.incremental_forms import FastForm, choose_form
from vgraph_lab.qwen3_tts.incremental_state import StateArena

GEOMETRY = DecoderGeometry(
    codebook_size=32,
    codebook_dim=32,
    num_quantizers=4,
    latent_dim=32,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    sliding_window=6,
    max_position_embeddings=64,
    upsampling_ratios=(2,),
    upsample_rates=(3,),
    decoder_dim=64,
)
# Residual units of more channels than one program holds, and two upsampling stages before them.
WIDE = GEOMETRY.model_copy(update={"upsampling_ratios": (2, 2), "upsample_rates": (2,), "decoder_dim": 288})


@pytest.mark.parametrize(("geometry", "examples"), [(GEOMETRY, 3), (WIDE, 1)], ids=["fused", "wide"])
def test_streams_equal_the_plain_form(kernels: Any, geometry: DecoderGeometry, examples: int) -> None:
    """Chunks shorter and longer than the window, rows at positions of their own, slots in any order; and so is the state."""
    decoder, exact = random_decoder(geometry, seed=4), random_decoder(geometry, dtype=torch.float64, seed=4)
    form = FastForm(decoder)

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(
        sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3) if examples > 1 else st.just([2]),
        slots=st.permutations(range(3)),
        ahead=st.integers(0, 5),
        seed=st.integers(0, 99),
    )
    def check(sizes: list[int], slots: list[int], ahead: int, seed: int) -> None:
        arenas = [StateArena(decoder, 3), StateArena(decoder, 3), StateArena(exact, 3)]
        draw = torch.Generator().manual_seed(seed)
        rows, first = torch.tensor(slots[:2]), torch.zeros(2, dtype=torch.int64)
        if ahead:  # one row has begun before
            codes = torch.randint(0, 32, (1, 4, ahead), generator=draw)
            for arena, model in zip(arenas, (decoder, decoder, exact), strict=True):
                continue_stream(model, arena, codes, rows[:1], first[:1])
            first[0] = ahead
        for size in sizes:
            codes = torch.randint(0, 32, (2, 4, size), generator=draw)
            fast = form.continue_stream(arenas[0], codes, torch.stack((rows, first), dim=1))
            plain = continue_stream(decoder, arenas[1], codes, rows, first)[:, 0]
            truth = continue_stream(exact, arenas[2], codes, rows, first)[:, 0]
            first += size
            for found, expected in ((fast, truth), (arenas[0].rows[:3], arenas[2].rows[:3])):
                reference = plain if found is fast else arenas[1].rows[:3]
                allowed = 4 * (reference - expected).abs().amax() + 1e-6
                assert (found - expected).abs().amax() <= allowed
            unused = slots[2]
            assert torch.equal(arenas[0].rows[unused], arenas[1].rows[unused]), "a row that was not asked for is untouched"

    with torch.no_grad():
        check()


def test_it_is_chosen_and_said_to_be_exact(kernels: Any) -> None:
    form, report = choose_form("fast", random_decoder(GEOMETRY, seed=1))
    assert (form.name, report.form, report.reason) == ("fast", "fast", None)
    assert report.error_ratio is not None
    assert 0 < report.error_ratio < 2
    assert "form fast, its error" in str(report)


@pytest.mark.parametrize("in_inference_mode", [False, True])
def test_changed_weights_are_taken_over_once_tables_are_refreshed(kernels: Any, in_inference_mode: bool) -> None:
    """Into the same memory, which graphs read; and only then is anything done. torch counts no writes in inference mode."""
    with torch.inference_mode(in_inference_mode):
        decoder = random_decoder(GEOMETRY, seed=4)
    form, places = FastForm(decoder), torch.tensor([[0, 0]])
    codes = torch.ones(1, 4, 2, dtype=torch.int64)
    addresses = [buffer.data_ptr() for buffer in form.step.buffers()]
    with torch.no_grad():
        before = form.continue_stream(StateArena(decoder, 1), codes, places)
        with torch.inference_mode(in_inference_mode):
            decoder.load_state_dict(random_decoder(GEOMETRY, seed=5).state_dict())
        form.keep_up()
        assert torch.equal(form.continue_stream(StateArena(decoder, 1), codes, places), before)
        with torch.inference_mode(in_inference_mode):
            decoder.refresh_tables()
        form.keep_up()
        found = form.continue_stream(StateArena(decoder, 1), codes, places)
        assert torch.equal(found, FastForm(decoder).continue_stream(StateArena(decoder, 1), codes, places))
    assert (found - before).abs().amax() > 0.01
    assert [buffer.data_ptr() for buffer in form.step.buffers()] == addresses
