"""Prepared weights: every layer that multiplies by a matrix, as one matrix product with what follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import triton
from torch import Tensor, nn

from vgraph_lab.qwen3_tts.layers import CausalConv1d, CausalConvTranspose1d, SnakeBeta

from . import matrix_kernels
from .launch import launch
from .tiles import MOST_TILES, Problem, Tile, padded

__all__ = ["Product", "Run", "TileChoice", "check_input", "of_conv", "of_linear", "of_matrix", "of_transposed_conv"]

_FEW_ROWS = 128
"""Up to these, a product waits for its weights more than for anything else."""


class Run(Protocol):
    """Launches one product with a tile."""

    def __call__(self, tile: Tile, *, compile_only: bool = False) -> None:
        """Launch, or only compile."""


TileChoice = Callable[[Problem, Run], None]
"""Runs a product with the tile that it chooses."""


class Product(nn.Module):
    """x [B, T + left, C] → [B, T, N]: taps · C inputs times a matrix, and everything that follows element by element.

    Args:
        matrix: [taps · C, N]; with ``gate``, [C, 2 · N].
        bias: [N], or None.
        taps: rows of x that one output sees.
        dilation: rows from one tap to the next.
        norm_eps: divide by the root mean square of x over its channels; its gain belongs into the matrix.
        gate: silu(first half) · second half.
        gelu: apply GELU.
        snake: give its SnakeBeta, too (or alone).
        repeat: samples that one row of the output is, for the parameters of ``snake``.
    """

    matrix: Tensor
    bias: Tensor
    frequency: Tensor
    magnitude: Tensor

    def __init__(
        self,
        matrix: Tensor,
        bias: Tensor | None,
        *,
        taps: int = 1,
        dilation: int = 1,
        norm_eps: float | None = None,
        gate: bool = False,
        gelu: bool = False,
        snake: SnakeBeta | None = None,
        repeat: int = 1,
    ) -> None:
        super().__init__()
        self.taps, self.dilation = taps, dilation
        self.channels, columns = matrix.shape[0] // taps, matrix.shape[1]
        self.columns = columns // 2 if gate else columns
        self.norm_eps, self.gate, self.gelu = norm_eps, gate, gelu
        self.has_snake = snake is not None
        width = padded(self.columns) + (self.columns if gate else 0)

        def filled(values: Tensor, dtype: torch.dtype) -> Tensor:
            wide = values.new_zeros((*values.shape[:-1], width), dtype=dtype)
            wide[..., :columns] = values
            return wide

        zeros = matrix.new_zeros(columns)
        self.register_buffer("matrix", filled(matrix, matrix.dtype), persistent=False)
        self.register_buffer("bias", filled(zeros if bias is None else bias, torch.float32), persistent=False)
        if snake is not None:
            self.register_buffer("frequency", filled(snake.alpha.float().exp().repeat(repeat), torch.float32), persistent=False)
            magnitude = (snake.beta.float().exp() + 1e-9).reciprocal().repeat(repeat)
            self.register_buffer("magnitude", filled(magnitude, torch.float32), persistent=False)
        self.register_buffer("_arrived", torch.zeros(MOST_TILES, dtype=torch.int32, device=matrix.device), persistent=False)
        self.kind = "".join(
            letter for letter, is_on in zip("nges", (norm_eps is not None, gate, gelu, snake is not None), strict=True) if is_on
        )

    def forward(
        self,
        x: Tensor,
        rows: int,
        *,
        choose: TileChoice,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        activated: Tensor | None = None,
    ) -> None:
        """Write into ``out`` and ``activated`` ([B, rows, N], any stride of B), whichever are given. Each row of x is dense."""
        batch = x.shape[0]
        check_input(x, rows, self)
        assert (activated is not None) is self.has_snake
        can_split = not (self.gate or self.norm_eps) and x.dtype != torch.float32
        problem = Problem(batch * rows, self.columns, self.channels, self.taps, self.kind, can_split, x.dtype)

        def run(tile: Tile, *, compile_only: bool = False) -> None:
            grid = (triton.cdiv(self.columns, tile.width) * triton.cdiv(problem.rows, tile.rows), tile.split)
            sums = grid[0] * tile.split * tile.rows * tile.columns if tile.split > 1 else 1
            launch(
                matrix_kernels.convolve,
                grid,
                x,
                self.matrix,
                self.bias,
                x if residual is None else residual,
                x if out is None else out,
                x if activated is None else activated,
                self.frequency if self.has_snake else self.bias,
                self.magnitude if self.has_snake else self.bias,
                x.new_empty(sums, dtype=torch.float32),
                self._arrived,
                problem.rows,
                rows,
                self.columns,
                self.matrix.stride(0),
                x.stride(0),
                0 if residual is None else residual.stride(0),
                0 if out is None else out.stride(0),
                0 if activated is None else activated.stride(0),
                self.channels,
                self.dilation * self.channels,
                self.channels // (tile.depth * tile.parts),
                self.taps * self.channels // (tile.depth * tile.parts),
                self.norm_eps or 0.0,
                NORM=self.norm_eps is not None,
                GATE=self.gate,
                GELU=self.gelu,
                RESIDUAL=residual is not None,
                STORE=out is not None,
                SNAKE=self.has_snake,
                SPLIT=tile.split,
                PRECISION="ieee",
                FAST=x.dtype != torch.float32,
                BM=tile.rows,
                BN=tile.columns,
                BK=tile.depth,
                PARTS=tile.parts,
                MORE=tile.more,
                PREFETCH=problem.rows <= _FEW_ROWS,
                num_warps=tile.warps,
                num_stages=tile.stages,
                compile_only=compile_only,
            )

        choose(problem, run)


def check_input(x: Tensor, rows: int, product: Product) -> None:
    """What kernels rely on, since they check nothing."""
    wanted = (x.shape[0], rows + (product.taps - 1) * product.dilation, product.channels)
    assert x.shape == wanted, f"{tuple(x.shape)} is not {wanted}"
    assert x.stride()[1:] == (product.channels, 1)


def of_linear(layer: nn.Linear, *, norm: nn.RMSNorm | None = None, scale: Tensor | None = None, gelu: bool = False) -> Product:
    """A linear layer, behind an RMSNorm, and times ``scale`` per output channel."""
    return of_matrix(layer.weight.T.float(), layer.bias, layer.weight.dtype, norm=norm, scale=scale, gelu=gelu)


def of_matrix(
    matrix: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    norm: nn.RMSNorm | None = None,
    scale: Tensor | None = None,
    gelu: bool = False,
    gate: bool = False,
) -> Product:
    """The same of an fp32 matrix [C, N]."""
    if norm is not None:
        matrix = matrix * norm.weight.float()[:, None]
    if scale is not None:
        matrix = matrix * scale.float()
        bias = None if bias is None else bias.float() * scale.float()
    eps = None if norm is None else norm.eps
    return Product(matrix.to(dtype), bias, norm_eps=eps, gelu=gelu, gate=gate)


def of_conv(layer: CausalConv1d, *, snake: SnakeBeta | None = None) -> Product:
    """A causal convolution [N, C, taps]."""
    weight = layer.conv.weight
    taps, dilation = weight.shape[2], layer.conv.dilation[0]
    return Product(weight.permute(2, 1, 0).flatten(0, 1), layer.conv.bias, taps=taps, dilation=dilation, snake=snake)


def of_transposed_conv(layer: CausalConvTranspose1d, *, snake: SnakeBeta | None = None) -> Product:
    """A transposed convolution [C, N, taps · stride]: ``stride`` samples at a time, each from the same ``taps`` inputs."""
    weight, stride = layer.conv.weight, layer.stride
    taps = weight.shape[2] // stride
    # An input rings on: what it adds to the samples of a later one is in the later part of the kernel.
    matrix = weight.unflatten(2, (taps, stride)).flip(2).permute(2, 0, 3, 1).flatten(2).flatten(0, 1)
    bias = None if layer.conv.bias is None else layer.conv.bias.repeat(stride)
    return Product(matrix, bias, taps=taps, snake=snake, repeat=stride)
