"""The eager decoder against the published implementation and against closed forms."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from vgraph_lab.errors import InputError
from vgraph_lab.qwen3_tts.checkpoint import random_decoder
from vgraph_lab.qwen3_tts.decoder import Code2WavDecoder
from vgraph_lab.qwen3_tts.geometry import DecoderGeometry, published_geometry
from vgraph_lab.qwen3_tts.layers import CausalConv1d, CausalConvTranspose1d, SnakeBeta
from vgraph_lab.qwen3_tts.transformer import KeyValue, PreTransformer, sliding_window_mask

GOLDEN_KERNELS = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "4"}
SMALL = DecoderGeometry(
    codebook_size=32,
    codebook_dim=8,
    latent_dim=16,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    sliding_window=6,
    max_position_embeddings=64,
    decoder_dim=16,
    upsample_rates=(2, 2),
    upsampling_ratios=(2,),
)


def codes(batch: int, frames: int, size: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, size, (batch, 16, frames), generator=torch.Generator().manual_seed(seed))


def test_golden_vectors_to_1e_5(tiny_folder: Path) -> None:
    """With the kernels that the golden vectors were made with, all but the one-frame vector are equal to the last bit."""
    child = Path(__file__).with_name("golden_child.py")
    run = subprocess.run(
        [sys.executable, str(child), str(tiny_folder)], env={**os.environ, **GOLDEN_KERNELS}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    distances = json.loads(run.stdout)
    assert len(distances) == 9
    assert max(distances.values()) < 1e-5, distances


def test_golden_vectors_with_this_machines_kernels(tiny_folder: Path, tiny_decoder: Code2WavDecoder) -> None:
    """Other kernels round differently, and this random network amplifies that.

    The yardstick is the same mathematics in fp64: the golden fp32 vectors are up to 7e-5 away from it, and so may we be.
    """
    golden = np.load(tiny_folder / "stateless.npz")
    exact = random_decoder(tiny_decoder.geometry).double()
    exact.load_state_dict({k: v.double() for k, v in tiny_decoder.state_dict().items()})
    exact.quantizer.rvq_first.table = torch.stack([_quotient(b) for b in exact.quantizer.rvq_first.codebooks])
    exact.quantizer.rvq_rest.table = torch.stack([_quotient(b) for b in exact.quantizer.rvq_rest.codebooks])
    for name in ("1", "5", "40", "b3_33"):
        c, published = torch.from_numpy(golden[f"codes_{name}"]), torch.from_numpy(golden[f"wav_{name}"])
        truth = exact.decode(c)
        assert (published - truth).abs().max() < 1e-4
        assert (tiny_decoder(c) - truth).abs().max() < 1e-4
        assert (tiny_decoder(c) - published).abs().max() < 1e-4


def _quotient(book: torch.nn.Module) -> torch.Tensor:
    return book.embedding_sum / book.cluster_usage.clamp(min=1e-5)[:, None]


def test_every_published_tensor_has_its_place() -> None:
    """Names and shapes of all 271 tensors of the published decoder."""
    with torch.device("meta"):
        decoder = Code2WavDecoder(published_geometry())
    ours = {f"decoder.{name}": "x".join(map(str, t.shape)) for name, t in decoder.state_dict().items()}
    table = Path(__file__).parents[1] / "data" / "published_decoder_keys.tsv"
    with table.open() as file:
        published = {row["name"]: row["shape"] for row in csv.DictReader(file, delimiter="\t")}
    assert ours == published
    assert sum(p.numel() for p in decoder.state_dict().values()) == 114_323_137


def test_causality(tiny_decoder: Code2WavDecoder) -> None:
    """A frame changes its own samples and later ones, never earlier ones."""
    c = codes(1, 30)
    changed = c.clone()
    changed[..., 20] = (changed[..., 20] + 1) % 64
    before, after = tiny_decoder(c), tiny_decoder(changed)
    cut = 20 * 1920
    assert torch.equal(before[..., :cut], after[..., :cut])
    assert not torch.equal(before[..., cut : cut + 1920], after[..., cut : cut + 1920])


@settings(max_examples=20)
@given(frames=st.integers(1, 24), extra=st.integers(1, 24), batch=st.integers(1, 3), seed=st.integers(0, 99))
def test_padding_on_the_right_changes_nothing(frames: int, extra: int, batch: int, seed: int) -> None:
    decoder = random_decoder(SMALL, seed=3)
    c = codes(batch, frames + extra, 32, seed)
    short, long = decoder(c[..., :frames]), decoder(c)
    assert short.shape == (batch, 1, frames * 8)
    assert torch.allclose(short, long[..., : short.shape[-1]], atol=1e-5)


def test_rows_are_independent(tiny_decoder: Code2WavDecoder) -> None:
    c = codes(3, 12)
    together = tiny_decoder(c)
    assert torch.allclose(together[1:2], tiny_decoder(c[1:2]), atol=2e-4)  # another batch size, other kernels
    c[0], c[2] = 0, 63
    assert torch.equal(tiny_decoder(c)[1], together[1])


@pytest.mark.parametrize(("dtype", "largest_error"), [(torch.bfloat16, 0.08), (torch.float16, 0.008)], ids=str)
def test_half_precision_stays_near(dtype: torch.dtype, largest_error: float) -> None:
    """Eight times between the two: bf16 has three fewer bits."""
    exact, half = random_decoder(SMALL, seed=5), random_decoder(SMALL, dtype=dtype, seed=5)
    assert half.dtype is dtype
    c = codes(2, 20, 32)
    wave, truth = half(c), exact(c)
    assert wave.dtype is dtype
    assert (wave.float() - truth).norm() / truth.norm() < largest_error


def test_grouped_query_attention_equals_repeated_heads() -> None:
    """2 key heads for 4 query heads is the same as 4 key heads with equal pairs."""
    grouped = PreTransformer(SMALL)
    full = PreTransformer(SMALL.model_copy(update={"num_key_value_heads": 4}))
    state = grouped.state_dict()
    for name, tensor in state.items():
        if "k_proj" in name or "v_proj" in name:
            state[name] = tensor.unflatten(0, (2, 1, 4)).expand(-1, 2, -1, -1).reshape(16, -1)
    full.load_state_dict(state)
    x = torch.randn(2, 9, 16)
    assert torch.allclose(grouped(x)[0], full(x)[0], atol=1e-6)


def test_attention_equals_its_formula() -> None:
    """Against softmax(QKᵀ/√d + window) V written out with loops over positions."""
    g = SMALL.model_copy(update={"num_key_value_heads": 4})
    layer = PreTransformer(g).layers[0].self_attn
    x, frames = torch.randn(1, 10, 16), 10
    cos, sin = PreTransformer(g).cos[:frames], PreTransformer(g).sin[:frames]
    positions = torch.arange(frames)
    out, _ = layer(x, cos, sin, sliding_window_mask(positions, positions, 6), None)
    heads = [p(x)[0].unflatten(-1, (4, 4)) for p in (layer.q_proj, layer.k_proj, layer.v_proj)]
    angle = positions[:, None] * 10000.0 ** (-torch.arange(2) / 2)
    rotation = torch.polar(torch.ones_like(angle), angle)

    def rotate(h: torch.Tensor) -> torch.Tensor:  # first and second half are real and imaginary part
        z = torch.complex(h[..., :2], h[..., 2:]) * rotation[:, None]
        return torch.cat((z.real, z.imag), -1)

    q, k, v = rotate(heads[0]), rotate(heads[1]), heads[2]
    rows = []
    for t in range(frames):
        seen = range(max(0, t - 5), t + 1)
        row = []
        for h in range(4):
            weights = torch.stack([q[t, h] @ k[j, h] for j in seen]).div(2).softmax(0)
            row.append(sum(w * v[j, h] for w, j in zip(weights, seen, strict=True)))
        rows.append(torch.cat(row))
    assert torch.allclose(out[0], layer.o_proj(torch.stack(rows)), atol=1e-5)


@settings(max_examples=25)
@given(frames=st.integers(2, 20), split=st.data())
def test_cached_keys_continue_a_sequence(frames: int, split: st.DataObject) -> None:
    """Prefix, then suffix with the prefix's keys and values, equals the whole; the cache is not modified."""
    cut = split.draw(st.integers(1, frames - 1))
    model = PreTransformer(SMALL).eval()
    x, positions = torch.randn(1, frames, 16), torch.arange(frames)
    whole, whole_cache = model(x)
    _, cache = model(x[:, :cut])
    kept = [KeyValue(c.key.clone(), c.value.clone()) for c in cache]
    suffix, grown = model(x[:, cut:], first_position=cut, mask=sliding_window_mask(positions[cut:], positions, 6), past=cache)
    assert torch.allclose(suffix, whole[:, cut:], atol=1e-5)
    assert all(torch.equal(a.key, b.key) and torch.equal(a.value, b.value) for a, b in zip(cache, kept, strict=True))
    assert all(torch.allclose(a.key, b.key, atol=1e-5) for a, b in zip(grown, whole_cache, strict=True))


@pytest.mark.parametrize(("kernel", "dilation"), [(1, 1), (3, 1), (7, 1), (7, 3), (7, 9)])
def test_causal_convolution_is_a_sum_over_the_past(kernel: int, dilation: int) -> None:
    layer = CausalConv1d(1, 1, kernel, dilation=dilation)
    x = torch.randn(1, 1, 40)
    weight, bias = layer.conv.weight[0, 0], layer.conv.bias
    expected = [
        sum((weight[kernel - 1 - i] * x[0, 0, t - i * dilation] for i in range(kernel) if t - i * dilation >= 0), torch.tensor(0.0))
        + bias[0]
        for t in range(40)
    ]
    assert torch.allclose(layer(x)[0, 0], torch.stack(expected), atol=1e-5)


def test_transposed_convolution_spreads_forward() -> None:
    """An impulse at t reaches [t·s, t·s + kernel) and the output has T·s samples."""
    layer = CausalConvTranspose1d(1, 1, 6, 3)
    x = torch.zeros(1, 1, 5)
    x[..., 2] = 1.0
    y = layer(x) - layer.conv.bias
    expected = torch.zeros(15)
    expected[6:12] = layer.conv.weight[0, 0]
    assert y.shape == (1, 1, 15)
    assert torch.allclose(y[0, 0], expected, atol=1e-6)


def test_snake_beta_formula() -> None:
    layer = SnakeBeta(2)
    with torch.no_grad():
        layer.alpha.copy_(torch.tensor([0.3, -1.0]))
        layer.beta.copy_(torch.tensor([0.7, 0.2]))
    x = torch.linspace(-3, 3, 11).repeat(1, 2, 1)
    for c, (alpha, beta) in enumerate(((0.3, 0.7), (-1.0, 0.2))):
        expected = x[0, c] + torch.sin(x[0, c] * np.exp(alpha)) ** 2 / np.exp(beta)
        assert torch.allclose(layer(x)[0, c], expected.float(), atol=1e-6)


def test_output_is_clamped(tiny_decoder: Code2WavDecoder) -> None:
    assert tiny_decoder(codes(1, 40)).abs().max() <= 1.0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("hello", "must be a torch.Tensor"),
        (torch.zeros(1, 16, 4), "must be integers"),
        (torch.zeros(1, 16, 4, dtype=torch.bool), "must be integers"),
        (codes(1, 4)[0], r"codes\[None\]"),
        (codes(1, 4)[0].T, r"codes\.T\[None\]"),
        (codes(1, 4).transpose(1, 2), r"codes\.transpose\(1, 2\)"),
        (codes(1, 4)[:, :8], r"shape \[B, 16, T\]"),
        (codes(1, 0), "no frames"),
        (codes(0, 4), "no rows"),
        (codes(1, 4) - 64, r"\[0, 63\].*from -"),
        (codes(1, 4) + 64, r"\[0, 63\]"),
        (torch.zeros(1, 16, 8001, dtype=torch.int64), "8001 frames.*max_position_embeddings is 8000"),
    ],
)
def test_bad_codes_are_explained(tiny_decoder: Code2WavDecoder, bad: object, message: str) -> None:
    good = codes(1, 4)
    before = tiny_decoder(good)
    with pytest.raises(InputError, match=message):
        tiny_decoder(bad)
    assert torch.equal(tiny_decoder(good), before)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_other_integer_dtypes_are_codes_too(tiny_decoder: Code2WavDecoder, dtype: torch.dtype) -> None:
    assert torch.equal(tiny_decoder(codes(1, 4).to(dtype)), tiny_decoder(codes(1, 4)))


def test_random_decoder_is_reproducible_and_not_silent() -> None:
    a, b, c = (random_decoder(SMALL, seed=s) for s in (1, 1, 2))
    x = codes(1, 10, 32)
    assert torch.equal(a(x), b(x))
    assert not torch.equal(a(x), c(x))
    assert 0.01 < a(x).std() < 0.5


def test_embedding_is_the_sum_of_the_levels(tiny_decoder: Code2WavDecoder) -> None:
    c = codes(1, 3)
    rvq = tiny_decoder.quantizer.rvq_rest
    total = sum(F.embedding(c[:, 1 + q], _quotient(book)) for q, book in enumerate(rvq.codebooks))
    assert torch.allclose(rvq.decode(c[:, 1:]), rvq.output_proj(total.transpose(1, 2)), atol=1e-5)
