"""The kernels of matrix products on a CUDA device, with every tile that a product may get, against double precision.

What only a device shows: asynchronous matrix instructions, copies that run ahead, and programs that begin before the kernel ahead ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vgraph_lab.graphs.backends.base import GraphBackend
from vgraph_lab.qwen3_tts.checkpoint import random_decoder
from vgraph_lab.qwen3_tts.geometry import published_geometry
from vgraph_lab.qwen3_tts.incremental_forms import FastForm
from vgraph_lab.qwen3_tts.incremental_state import StateArena
from vgraph_lab.qwen3_tts.layers import CausalConv1d, SnakeBeta

MOST_ERROR = 0.01  # relative to the root mean square; one rounding of half precision is 0.002
CHANNELS, TAPS = 96, 7


@pytest.fixture
def device(backend: GraphBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return backend.device


@pytest.fixture
def hopper(device: torch.device) -> torch.device:
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        pytest.skip(f"the resident kernel is written for the matrix unit of capability 9, and this device has {major}.{minor}")
    return device


def draw(*shape: int, seed: int) -> Tensor:
    """Of half precision, so that the truth has the same numbers."""
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(torch.bfloat16)


def snake(channels: int, seed: int) -> SnakeBeta:
    found = SnakeBeta(channels).cuda()
    with torch.no_grad():
        for number, parameter in enumerate((found.alpha, found.beta)):
            parameter.copy_(draw(channels, seed=seed + number).float() * 0.3)
    return found


def after_snake(found: SnakeBeta, x: Tensor) -> Tensor:
    """Of fp64 [B, T, C]."""
    frequency, magnitude = found.alpha.double().exp(), 1 / (found.beta.double().exp() + 1e-9)
    return x + magnitude * torch.sin(x * frequency).square()


def convolved(x: Tensor, taps: Tensor, dilation: int, bias: Tensor) -> Tensor:
    """x [B, T + left, C], taps [taps, C, N] → fp64 [B, T, N]."""
    rows = x.shape[1] - (taps.shape[0] - 1) * dilation
    wide = x.double()
    return sum((wide[:, n * dilation : n * dilation + rows] @ tap for n, tap in enumerate(taps.double())), bias.double())


def error(found: Tensor, truth: Tensor) -> float:
    """Infinite if anything is no number."""
    value = (found.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()
    return float(value) if bool(value.isfinite()) else float("inf")


def with_each_tile(check: Callable[[Any], None]) -> Any:
    """A choice of tiles: all of them, each followed by a check. They are compiled beforehand, side by side."""
    import triton
    from triton.runtime.errors import OutOfResources

    from vgraph_lab.qwen3_tts.fast.tiles import candidates

    def choose(problem: Any, run: Any) -> None:
        tiles = candidates(problem)
        with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for tile in tiles:
                run(tile, compile_only=True)
        for number, tile in enumerate(tiles):
            try:
                run(tile)
            except OutOfResources:  # smaller GPUs have no room for the larger tiles
                assert number > 0
                assert torch.cuda.get_device_capability() < (9, 0)
            else:
                check(tile)

    return choose


@pytest.mark.parametrize("kind", ["n", "ng"])
@torch.no_grad()
def test_products_behind_a_norm(device: torch.device, kind: str) -> None:
    """Sums of squares are made beside the products: a scale that is off shows in all columns of a row."""
    from vgraph_lab.qwen3_tts.fast.products import Product

    channels, columns = 512, 1536
    gate = "g" in kind
    matrix = draw(channels, columns * (2 if gate else 1), seed=1) / 16
    product = Product(matrix, None, norm_eps=1e-5, gate=gate)
    for frames in (25, 100, 250):
        x = draw(4, frames, channels, seed=frames) * torch.linspace(0.1, 3, frames, device=device).to(torch.bfloat16)[:, None]
        wide = x.double()
        truth = (wide * (wide.square().mean(2, keepdim=True) + 1e-5).rsqrt()) @ matrix.double()
        if gate:
            first, second = truth.chunk(2, dim=2)
            truth = F.silu(first) * second
        out = torch.empty(4, frames, columns, device=device, dtype=torch.bfloat16)
        tried = []

        def check(tile: Any, out: Tensor = out, truth: Tensor = truth, tried: list[Any] = tried) -> None:
            found = error(out, truth)
            assert found < MOST_ERROR, f"{tuple(tile)}: {found:.3g}"
            assert error(out[:, -1], truth[:, -1]) < MOST_ERROR
            out.fill_(torch.nan)
            tried.append(tile)

        product(x, frames, choose=with_each_tile(check), out=out)
        assert len(tried) > 1


@pytest.mark.parametrize(("columns", "channels", "taps", "dilation", "kind"), [
    (192, 192, 7, 3, "s"),
    (384, 384, 7, 1, "s"),
    (288, 192, 2, 1, ""),
])  # fmt: skip
@torch.no_grad()
def test_columns_beside_each_other(device: torch.device, columns: int, channels: int, taps: int, dilation: int, kind: str) -> None:
    """Many rows that end within a tile, behind a gap, and nothing outside of them is written."""
    from vgraph_lab.qwen3_tts.fast.products import Product

    batch, rows, gap = 3, 5003, 5
    matrix, bias = draw(taps * channels, columns, seed=1) / 32, draw(columns, seed=2)
    after = snake(columns, seed=3) if kind else None
    product = Product(matrix, bias, taps=taps, dilation=dilation, snake=after)
    x, residual = draw(batch, rows + (taps - 1) * dilation, channels, seed=4), draw(batch, rows, columns, seed=5)
    outs = [torch.full((batch + 1, gap + rows, columns), torch.nan, device=device, dtype=torch.bfloat16) for _ in range(2)]
    truths = [convolved(x, matrix.unflatten(0, (taps, channels)), dilation, bias) + residual.double()]
    truths += [after_snake(after, truths[0])] if after else []
    tried = []

    def check(tile: Any) -> None:
        for memory, truth in zip(outs, truths, strict=False):
            found = error(memory[:batch, gap:], truth)
            assert found < MOST_ERROR, f"{tuple(tile)}: {found:.3g}"
            assert bool(memory[:batch, :gap].isnan().all() & memory[batch:].isnan().all()), tuple(tile)
            memory.fill_(torch.nan)
        tried.append(tile)

    out, activated = (memory[:batch, gap:] for memory in outs)
    product(x, rows, choose=with_each_tile(check), residual=residual, out=out, activated=activated if kind else None)
    assert any(tile.more for tile in tried) or torch.cuda.get_device_capability(device) < (9, 0)


class Unit:
    """A residual unit of 96 channels, and its truth."""

    def __init__(self, dilation: int) -> None:
        from vgraph_lab.qwen3_tts.fast.products import of_conv
        from vgraph_lab.qwen3_tts.fast.units import FusedUnit

        self.left = (TAPS - 1) * dilation
        self.wide, self.narrow = CausalConv1d(CHANNELS, CHANNELS, TAPS, dilation=dilation), CausalConv1d(CHANNELS, CHANNELS, 1)
        self.inner, self.after = snake(CHANNELS, seed=11), snake(CHANNELS, seed=13)
        for seed, layer in enumerate((self.wide, self.narrow), start=21):
            layer.to("cuda", torch.bfloat16)
            for parameter in layer.parameters():
                parameter.copy_(draw(*parameter.shape, seed=seed) / (1 if parameter.dim() == 1 else parameter[0].numel() ** 0.5))
        self.fused = FusedUnit(of_conv(self.wide, snake=self.inner), of_conv(self.narrow, snake=self.after))

    def truth(self, x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        """The next stream, and its SnakeBeta."""

        def through(layer: CausalConv1d, value: Tensor) -> Tensor:
            conv: nn.Conv1d = layer.conv
            assert conv.bias is not None
            return convolved(value, conv.weight.permute(2, 1, 0), conv.dilation[0], conv.bias)

        longer = stream.double() + through(self.narrow, after_snake(self.inner, through(self.wide, x)))
        return longer, after_snake(self.after, longer)

    def check(self, batch: int, rows: int, *, keeps_stream: bool, choose: Callable[[Callable[[Any], None]], Any]) -> None:
        """Inputs and outputs lie between others: earlier samples in front of each row, other layers' memory around them all."""
        x, stream = draw(batch, rows + self.left, CHANNELS, seed=1), draw(batch, rows, CHANNELS, seed=2)
        truths = self.truth(x, stream)
        kept = torch.full((batch + 2, rows, CHANNELS), torch.nan, device="cuda", dtype=torch.bfloat16)
        memory = torch.full((batch + 2, 54 + rows, CHANNELS), torch.nan, device="cuda", dtype=torch.bfloat16)
        out, activated = kept[1:-1], memory[1:-1, 54:]

        def check(tile: Any) -> None:
            for found, truth in ((out, truths[0]), (activated, truths[1]))[0 if keeps_stream else 1 :]:
                off = error(found, truth)
                assert off < MOST_ERROR, f"{tuple(tile)}: {off:.3g}"
                assert error(found[:, -1], truth[:, -1]) < 2 * MOST_ERROR, "the last row of each request, where a tile ends early"
            outside = [kept[0], kept[-1], memory[0], memory[-1], memory[1:-1, :54], *([] if keeps_stream else [kept])]
            assert all(bool(part.isnan().all()) for part in outside), "nothing is written outside"
            kept.fill_(torch.nan)
            memory.fill_(torch.nan)

        self.fused(x, rows, choose=choose(check), stream=stream, out=out if keeps_stream else None, activated=activated)


def resident(check: Callable[[Any], None]) -> Any:
    from vgraph_lab.qwen3_tts.fast.tiles import RESIDENT

    def choose(problem: Any, run: Any) -> None:
        assert problem.may_stay
        run(RESIDENT)
        check(RESIDENT)

    return choose


@pytest.mark.parametrize("keeps_stream", [True, False], ids=["stream", "no stream"])
@pytest.mark.parametrize("dilation", [1, 3, 9])
@torch.no_grad()
def test_the_resident_unit(hopper: torch.device, dilation: int, keeps_stream: bool) -> None:
    """More tiles than programs, fewer, one; rows that fill the last tile and such that do not."""
    unit = Unit(dilation)
    for batch, rows in ((1, 48_000), (3, 4801), (2, 65), (2, 64), (2, 63), (2, 1)):
        unit.check(batch, rows, keeps_stream=keeps_stream, choose=resident)


@torch.no_grad()
def test_a_unit_with_each_tile(device: torch.device) -> None:
    Unit(3).check(2, 701, keeps_stream=True, choose=with_each_tile)


@torch.no_grad()
def test_the_published_geometry(device: torch.device) -> None:
    """At the shape at which it once came out wrong; and again and again alike, or kernels that overlap would not wait for each other."""
    decoder = random_decoder(published_geometry(), "cuda", torch.bfloat16, seed=1)
    form, arena = FastForm(decoder, autotune=False), StateArena(decoder, 4)
    form.prepare(arena, 4, 25)
    form.notes()  # lets go of the twin in double precision
    assert form.error_ratio is not None
    assert form.error_ratio < 1.5
    arena.rows.normal_(std=0.3, generator=torch.Generator(device).manual_seed(1))
    before = arena.rows.clone()
    codes = torch.randint(0, 2048, (4, 16, 25), generator=torch.Generator().manual_seed(2)).to(device)
    places = torch.tensor([[2, 200], [0, 0], [3, 77], [1, 1000]], device=device)
    expected, kept = form.continue_stream(arena, codes, places), arena.rows.clone()
    assert bool(expected.isfinite().all())
    for _ in range(20):
        arena.rows.copy_(before)
        assert torch.equal(form.continue_stream(arena, codes, places), expected)
        assert torch.equal(arena.rows, kept)
