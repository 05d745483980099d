"""Each kernel against the same thing in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vgraph_lab.qwen3_tts.layers import CausalConv1d, CausalConvTranspose1d, SnakeBeta

TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def snake(channels: int, seed: int = 5) -> SnakeBeta:
    found = SnakeBeta(channels)
    with torch.no_grad():
        found.alpha.copy_(draw(channels, seed=seed) * 0.5)
        found.beta.copy_(draw(channels, seed=seed + 1) * 0.5)
    return found


def choose(tile: Any) -> Any:
    return lambda problem, run: run(tile)


@pytest.mark.parametrize("tile", [(16, 16, 16), (32, 32, 16, 3), (64, 16, 32), (16, 16, 16, 1, 4, 3, 2)], ids=str)
@pytest.mark.parametrize("dilation", [1, 3])
def test_a_causal_convolution_and_its_snake(kernels: Any, tile: tuple[int, ...], dilation: int) -> None:
    from vgraph_lab.qwen3_tts.fast.products import of_conv
    from vgraph_lab.qwen3_tts.fast.tiles import Tile

    layer, after = CausalConv1d(32, 48, 5, dilation=dilation), snake(48)
    x, left = draw(2, 32, 37), 4 * dilation
    product = of_conv(layer, snake=after)
    out, activated = torch.full((2, 37 - left, 48), torch.nan), torch.full((2, 37 - left, 48), torch.nan)
    with torch.no_grad():
        product(x.transpose(1, 2).contiguous(), 37 - left, choose=choose(Tile(*tile)), out=out, activated=activated)
        expected = F.conv1d(x.double(), layer.conv.weight.double(), layer.conv.bias.double(), dilation=dilation)
        torch.testing.assert_close(out.transpose(1, 2), expected.float(), **TOLERANCE)
        torch.testing.assert_close(activated.transpose(1, 2), after.double()(expected).float(), **TOLERANCE)
        assert not product._arrived.any(), "counters are as before, for the next launch"


@pytest.mark.parametrize("columns", [48, 96, 144])
@pytest.mark.parametrize("dilation", [1, 3])
def test_columns_beside_each_other(kernels: Any, columns: int, dilation: int) -> None:
    """48 of a program are 32 and 16; one tile of them, and several. Rows do not fill the last tile, and a tile has rows of two requests."""
    from vgraph_lab.qwen3_tts.fast.products import of_conv
    from vgraph_lab.qwen3_tts.fast.tiles import Tile

    layer, after = CausalConv1d(32, columns, 3, dilation=dilation), snake(columns)
    rows, left = 19, 2 * dilation
    x, residual = draw(2, 32, left + rows), draw(2, 5 + rows, columns, seed=6)
    out, activated = torch.full((3, 4 + rows, columns), torch.nan), torch.full((3, rows, columns), torch.nan)
    with torch.no_grad():
        of_conv(layer, snake=after)(
            x.transpose(1, 2).contiguous(),
            rows,
            choose=choose(Tile(16, 32, 16, more=16)),
            residual=residual[:, 5:],
            out=out[:2, 4:],
            activated=activated[:2],
        )
        expected = F.conv1d(x.double(), layer.conv.weight.double(), layer.conv.bias.double(), dilation=dilation).transpose(1, 2)
        expected = expected + residual[:, 5:]
        torch.testing.assert_close(out[:2, 4:], expected.float(), **TOLERANCE)
        after_snake = after.double()(expected.transpose(1, 2)).transpose(1, 2)
        torch.testing.assert_close(activated[:2], after_snake.float(), **TOLERANCE)
    untouched = [out[:2, :4], out[2:], activated[2:]]
    assert all(bool(part.isnan().all()) for part in untouched), "nothing is written outside"


@pytest.mark.parametrize("taps", [1, 2])
def test_a_transposed_convolution(kernels: Any, taps: int) -> None:
    """Five samples from each input; the first input is the one before."""
    from vgraph_lab.qwen3_tts.fast.products import of_transposed_conv
    from vgraph_lab.qwen3_tts.fast.tiles import Tile

    layer = CausalConvTranspose1d(32, 16, 5 * taps, 5)
    x = draw(2, 32, 7)
    out = torch.empty(2, 5 * (7 - taps + 1), 16)
    with torch.no_grad():
        of_transposed_conv(layer)(x.transpose(1, 2).contiguous(), 7 - taps + 1, choose=choose(Tile(16, 16, 16)), out=out)
        whole = F.conv_transpose1d(x.double(), layer.conv.weight.double(), layer.conv.bias.double(), stride=5)
        torch.testing.assert_close(out.transpose(1, 2), whole[..., 5 * (taps - 1) : 35].float(), **TOLERANCE)


@pytest.mark.parametrize("split", [1, 2])
def test_a_linear_layer_with_a_residual_behind_a_gap(kernels: Any, split: int) -> None:
    """Residual and output are parts of larger buffers."""
    from vgraph_lab.qwen3_tts.fast.products import of_linear
    from vgraph_lab.qwen3_tts.fast.tiles import Tile

    layer, scale, x = nn.Linear(64, 48), draw(48, seed=9), draw(2, 5, 64)
    residual, out = draw(2, 8, 48, seed=3), torch.zeros(2, 9, 48)
    with torch.no_grad():
        of_linear(layer, scale=scale)(x, 5, choose=choose(Tile(16, 32, 16, split)), residual=residual[:, 3:], out=out[:, 4:])
        expected = layer.double()(x.double()) * scale + residual[:, 3:]
    torch.testing.assert_close(out[:, 4:], expected.float(), **TOLERANCE)
    assert not out[:, :4].any(), "nothing is written outside"


def test_norm_and_gate(kernels: Any) -> None:
    from vgraph_lab.qwen3_tts.fast.products import of_matrix
    from vgraph_lab.qwen3_tts.fast.tiles import Tile

    norm, matrix, x = nn.RMSNorm(64, eps=1e-3), draw(64, 96, seed=2) / 8, draw(1, 19, 64) * 0.1
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        out = torch.empty(1, 19, 48)
        of_matrix(matrix, None, torch.float32, norm=norm, gate=True)(x, 19, choose=choose(Tile(16, 32, 32)), out=out)
        gate, up = (norm.double()(x.double()) @ matrix.double()).chunk(2, dim=-1)
    torch.testing.assert_close(out, (F.silu(gate) * up).float(), **TOLERANCE)


def test_gelu_is_the_exact_one(kernels: Any) -> None:
    from vgraph_lab.qwen3_tts.fast.products import of_linear
    from vgraph_lab.qwen3_tts.fast.tiles import Tile

    layer, x, out = nn.Linear(16, 32), draw(1, 16, 16) * 3, torch.empty(1, 16, 32)
    with torch.no_grad():
        of_linear(layer, gelu=True)(x, 16, choose=choose(Tile(16, 32, 16)), out=out)
        torch.testing.assert_close(out, F.gelu(layer.double()(x.double())).float(), **TOLERANCE)


@pytest.mark.parametrize("keeps_stream", [True, False])
def test_a_fused_residual_unit(kernels: Any, keeps_stream: bool) -> None:
    from vgraph_lab.qwen3_tts.fast.products import of_conv
    from vgraph_lab.qwen3_tts.fast.tiles import Tile
    from vgraph_lab.qwen3_tts.fast.units import FusedUnit

    wide, narrow = CausalConv1d(48, 48, 7, dilation=3), CausalConv1d(48, 48, 1)
    inner, after = snake(48), snake(48, seed=8)
    unit = FusedUnit(of_conv(wide, snake=inner), of_conv(narrow, snake=after))
    x, stream = draw(2, 48, 18 + 21), draw(2, 48, 21, seed=4)
    out, activated = (torch.empty(2, 21, 48) for _ in range(2))
    rows = [t.transpose(1, 2).contiguous() for t in (x, stream)]
    with torch.no_grad():
        kept = out if keeps_stream else None
        unit(rows[0], 21, choose=choose(Tile(16, 64, 16, 1, 4, 3, 3)), stream=rows[1], out=kept, activated=activated)
        hidden = inner.double()(F.conv1d(x.double(), wide.conv.weight.double(), wide.conv.bias.double(), dilation=3))
        expected = stream + F.conv1d(hidden, narrow.conv.weight.double(), narrow.conv.bias.double())
        if keeps_stream:
            torch.testing.assert_close(out.transpose(1, 2), expected.float(), **TOLERANCE)
        torch.testing.assert_close(activated.transpose(1, 2), after.double()(expected).float(), **TOLERANCE)


def test_sin_squared_for_large_arguments(kernels: Any) -> None:
    """A SnakeBeta whose input is far from zero; fp32 arguments are exact numbers, so the error is the kernel's alone."""
    from vgraph_lab.qwen3_tts.fast.products import of_linear
    from vgraph_lab.qwen3_tts.fast.tiles import Tile

    after, identity = SnakeBeta(16), nn.Linear(16, 16)
    x = torch.cat([torch.linspace(-4000, 4000, 16 * 40), torch.linspace(-7, 7, 16 * 40)]).view(1, 80, 16)
    activated = torch.empty(1, 80, 16)
    with torch.no_grad():
        identity.weight.copy_(torch.eye(16))
        identity.bias.zero_()
        product = of_linear(identity)
        product.has_snake, product.kind = True, "s"
        product.register_buffer("frequency", torch.ones(128))
        product.register_buffer("magnitude", torch.ones(128))
        product(x, 80, choose=choose(Tile(16, 16, 16)), activated=activated)
        error = (activated.double() - after.double()(x.double().transpose(1, 2)).transpose(1, 2)).abs()
    assert float((error / x.abs().clamp(min=1)).amax()) < 2e-7


def test_depthwise_and_norm(kernels: Any) -> None:
    x, weight, bias, gain, shift = draw(2, 9, 24), draw(4, 24, seed=1), draw(24, seed=2), draw(24, seed=3), draw(24, seed=4)
    out = torch.empty(2, 6, 24)
    kernels.depthwise_norm[(12,)](x, weight, bias, gain, shift, out, x.stride(0), 6, 24, 1e-3, TAPS=4, BC=32)
    convolved = F.conv1d(x.double().transpose(1, 2), weight.double().T[:, None], bias.double(), groups=24).transpose(1, 2)
    expected = F.layer_norm(convolved, (24,), gain.double(), shift.double(), eps=1e-3)
    torch.testing.assert_close(out, expected.float(), **TOLERANCE)


def test_embedded_codes_add_up(kernels: Any) -> None:
    table, codes = draw(3, 7, 24), torch.randint(0, 7, (2, 3, 5), generator=torch.Generator().manual_seed(1))
    out = torch.zeros(2, 6, 24)
    kernels.embed[(10,)](codes, table, out[:, 1:], out.stride(0), 5, 7, C=24, Q=3, BC=32)
    expected = sum(table[level][codes[:, level]] for level in range(3))
    torch.testing.assert_close(out[:, 1:], expected)
    assert not out[:, 0].any()


def test_taps_are_summed_and_clamped(kernels: Any) -> None:
    products, bias, out = draw(2, 13, 4) * 0.6, torch.tensor([0.1]), torch.empty(2, 10)
    kernels.sum_taps[(1, 2)](products, bias, out, 10, 3, TAPS=4, BLOCK=16)
    expected = sum(products[:, tap : tap + 10, tap] for tap in range(4)) + 0.1
    assert bool((expected.abs() > 1).any())
    torch.testing.assert_close(out, expected.clamp(-1, 1))
