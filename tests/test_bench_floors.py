"""Floors. Truth: torch's own count of operations, the arena's own size, the stored tensors, and the published figures."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from vgraph_lab.bench import floors
from vgraph_lab.bench.floors import FLOOR_COLUMNS, Ceilings, chunk_work, decoder_parts, floor_table, measure_ceilings
from vgraph_lab.errors import InputError
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry, published_geometry
from vgraph_lab.qwen3_tts.incremental_state import StateArena, history_size

ONE = Ceilings(1e3, 1e3, "float32")  # so that milliseconds are operations and bytes


def counted_by_torch(geometry: DecoderGeometry, frames: int) -> int:
    """Operations of one whole utterance of ``frames``, whose queries see that many keys."""
    with torch.device("meta"):
        decoder = Code2WavDecoder(geometry)
    codes = torch.zeros(1, geometry.num_quantizers, frames, dtype=torch.int64, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        decoder.decode(codes)
    return int(counter.get_total_flops())


def counted_here(geometry: DecoderGeometry, frames: int) -> int:
    """The same of a chunk, with the attention of an utterance as long as the chunk."""
    work = chunk_work(geometry, frames)
    heads = geometry.num_attention_heads * geometry.head_dim
    attention = geometry.num_hidden_layers * 4 * frames * frames * heads
    return sum(layer.flop for layer in work if not layer.name.endswith("attention")) + attention


@pytest.mark.parametrize("frames", [1, 25])
def test_operations_of_the_published_geometry(frames: int) -> None:
    assert counted_here(published_geometry(), frames) == counted_by_torch(published_geometry(), frames)


@settings(max_examples=20)
@given(
    st.builds(
        DecoderGeometry,
        codebook_size=st.just(8),
        codebook_dim=st.sampled_from([4, 8]),
        num_quantizers=st.integers(2, 4),
        latent_dim=st.integers(3, 9),
        hidden_size=st.integers(3, 9),
        intermediate_size=st.integers(3, 9),
        num_hidden_layers=st.integers(1, 3),
        num_attention_heads=st.just(4),
        num_key_value_heads=st.sampled_from([1, 2, 4]),
        head_dim=st.sampled_from([2, 4]),
        attention_bias=st.booleans(),
        sliding_window=st.integers(3, 9),
        max_position_embeddings=st.just(64),
        upsampling_ratios=st.lists(st.integers(1, 3), max_size=2).map(tuple),
        upsample_rates=st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple),
        decoder_dim=st.sampled_from([4, 8, 12]),
    ),
    st.integers(1, 12),
)
def test_operations_of_any_geometry(geometry: DecoderGeometry, frames: int) -> None:
    assert counted_here(geometry, frames) == counted_by_torch(geometry, frames)


def test_published_figures() -> None:
    """124 GFLOP for a row of 25 frames, 229 MB of tensors in bf16 and about 285 MB of results moved."""
    g = published_geometry()
    with torch.device("meta"):
        decoder = Code2WavDecoder(g)
    stored = sum(tensor.numel() for tensor in decoder.state_dict().values())
    assert 2 * stored == pytest.approx(229e6, rel=0.003)
    codebooks = sum(buffer.numel() for name, buffer in decoder.state_dict().items() if "_codebook" in name)
    small = ("alpha", "beta", "gamma", "scale", "norm.weight", "norm.bias", "layernorm.weight")
    unread = sum(t.numel() for name, t in decoder.state_dict().items() if name.endswith(small) or ("input_proj" in name and "rvq" in name))
    (*_, total) = floor_table(g, 25, 1, torch.bfloat16, ONE).to_dict("records")
    assert total["gflop"] == pytest.approx(124, abs=0.1)
    assert total["weight_mb"] == pytest.approx(2 * (stored - codebooks - unread) / 1e6), "only rows of the codebooks are read"
    assert total["activation_mb"] == pytest.approx(285, rel=0.01)


def test_state_is_the_arenas(tiny_decoder: Code2WavDecoder) -> None:
    """A chunk longer than the window reads and writes a whole row, but for the filling of its last page."""
    arena = StateArena(tiny_decoder, 1)
    frame = arena.rows.shape[2]
    work = chunk_work(tiny_decoder.geometry, 64)
    assert sum(layer.state for layer in work if layer.part != "quantizer") == 2 * (history_size(tiny_decoder) + arena.ring * frame)
    short = chunk_work(tiny_decoder.geometry, 1)
    written = sum(layer.state for layer in short if layer.name.endswith("attention")) - arena.ring * frame
    assert written == frame, "one frame writes one page"


def test_table(tiny_decoder: Code2WavDecoder) -> None:
    g = tiny_decoder.geometry
    table = floor_table(g, 25, 3, torch.float32, ONE)
    assert list(table.columns) == list(FLOOR_COLUMNS)
    assert table["part"].tolist() == ["quantizer", *decoder_parts(tiny_decoder), "total"]
    *parts, total = table.to_dict("records")
    for name in list(FLOOR_COLUMNS)[1:]:
        assert total[name] == pytest.approx(sum(part[name] for part in parts))
    assert total["arithmetic_ms"] == pytest.approx(total["gflop"] * 1e9)
    assert total["bytes_ms"] == pytest.approx((total["weight_mb"] + total["activation_mb"] + total["state_mb"]) * 1e6)
    assert max(total["arithmetic_ms"], total["bytes_ms"]) <= total["floor_ms"] <= total["arithmetic_ms"] + total["bytes_ms"]
    one = floor_table(g, 25, 1, torch.float32, ONE).iloc[-1]
    assert total["weight_mb"] == pytest.approx(one["weight_mb"]), "weights are read once for all rows"
    assert total["activation_mb"] == pytest.approx(3 * one["activation_mb"])
    half = floor_table(g, 25, 3, torch.bfloat16, ONE).iloc[-1]
    assert half["bytes_ms"] == pytest.approx(total["bytes_ms"] / 2)
    assert half["arithmetic_ms"] == total["arithmetic_ms"]


def test_parts_are_all_that_runs_but_the_quantizer(tiny_decoder: Code2WavDecoder) -> None:
    inside = {id(module) for modules in decoder_parts(tiny_decoder).values() for each in modules for module in each.modules()}
    outside = {name for name, module in tiny_decoder.named_modules() if id(module) not in inside and not list(module.children())}
    assert all(name.startswith("quantizer.") for name in outside)


def test_ceilings_are_reached() -> None:
    found = measure_ceilings(torch.device("cpu"), torch.float32, runs=2)
    assert found.flop_per_s > 1e8
    assert found.bytes_per_s > 1e8
    assert found.arithmetic == "float32"


@pytest.mark.parametrize(
    ("dtype", "allowed", "capability", "arithmetic"),
    [
        (torch.float32, (True, False), (9, 0), "tf32"),  # torch's default
        (torch.float32, (False, True), (9, 0), "tf32"),
        (torch.float32, (False, False), (9, 0), "float32"),
        (torch.float32, (True, True), (7, 5), "float32"),
        (torch.bfloat16, (True, False), (9, 0), "bfloat16"),
    ],
)
def test_the_ceiling_is_that_of_the_fastest_arithmetic_a_layer_may_use(
    dtype: torch.dtype, allowed: tuple[bool, bool], capability: tuple[int, int], arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: what is timed is replaced, and says in which mode it ran."""
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    modes: list[bool] = []

    def product_s(*_: object) -> float:
        modes.append(products.allow_tf32)
        return 1.0

    before = convolutions.allow_tf32, products.allow_tf32
    monkeypatch.setattr(floors, "_product_s", product_s)
    monkeypatch.setattr(floors, "_copy_s", lambda *_: 1.0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    try:
        convolutions.allow_tf32, products.allow_tf32 = allowed
        assert measure_ceilings(torch.device("cuda"), dtype).arithmetic == arithmetic
        assert modes == [arithmetic == "tf32" or allowed[1]]
        assert products.allow_tf32 is allowed[1], "as it was"
    finally:
        convolutions.allow_tf32, products.allow_tf32 = before


def test_nothing_has_no_floor() -> None:
    with pytest.raises(InputError, match="at least 1 frame, got 0"):
        chunk_work(published_geometry(), 0)
    with pytest.raises(InputError, match="at least 1 row, got 0"):
        floor_table(published_geometry(), 1, 0, torch.float32, ONE)
