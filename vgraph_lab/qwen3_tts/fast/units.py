"""Residual units as one kernel: both convolutions, and everything between them and after them."""

from __future__ import annotations

import torch
import triton
from torch import Tensor, nn

from . import matrix_kernels
from .launch import can_be_resident, launch, multiprocessors
from .products import Product, TileChoice, check_input
from .tiles import RESIDENT, RESIDENT_CHANNELS, Problem, Tile

__all__ = ["MOST_FUSED_CHANNELS", "FusedUnit"]

MOST_FUSED_CHANNELS = 128
"""Channels of the widest residual unit that is one kernel: a program holds all of them."""


class FusedUnit(nn.Module):
    """A residual unit in one kernel, for at most :data:`MOST_FUSED_CHANNELS` channels: its first product, then its second.

    On Hopper, 96 channels in half precision have a kernel of their own as well.
    """

    resident: Tensor

    def __init__(self, wide: Product, narrow: Product) -> None:
        super().__init__()
        self.wide, self.narrow = wide, narrow
        self._can_stay = wide.channels == wide.columns == RESIDENT_CHANNELS and can_be_resident(wide.matrix)
        if self._can_stay:
            from .resident_kernels import arranged

            taps = wide.matrix[:, : wide.columns].unflatten(0, (wide.taps, wide.channels))
            self.register_buffer("resident", arranged(taps, narrow.matrix[:, : narrow.columns]), persistent=False)

    def forward(self, x: Tensor, rows: int, *, choose: TileChoice, stream: Tensor, out: Tensor | None, activated: Tensor) -> None:
        """x [B, rows + left, C], stream [B, rows, C] → the next stream, if wanted, and its SnakeBeta."""
        wide = self.wide
        check_input(x, rows, wide)
        batch = x.shape[0]
        stays = self._can_stay and x.is_contiguous()
        problem = Problem(batch * rows, wide.columns, wide.channels, wide.taps, "u", may_split=False, dtype=x.dtype, may_stay=stays)

        def run(tile: Tile, *, compile_only: bool = False) -> None:
            if tile == RESIDENT:
                self._run_resident(x, rows, tile, stream, out, activated, compile_only)
            else:
                self._run(x, rows, problem, tile, stream, out, activated, compile_only)

        choose(problem, run)

    def _run(
        self, x: Tensor, rows: int, problem: Problem, tile: Tile, stream: Tensor, out: Tensor | None, activated: Tensor, compile_only: bool
    ) -> None:
        wide, narrow = self.wide, self.narrow
        launch(
            matrix_kernels.residual_unit,
            (triton.cdiv(problem.rows, tile.rows),),
            x,
            wide.matrix,
            wide.bias,
            wide.frequency,
            wide.magnitude,
            narrow.matrix,
            narrow.bias,
            stream,
            stream if out is None else out,
            activated,
            narrow.frequency,
            narrow.magnitude,
            problem.rows,
            rows,
            wide.channels,
            wide.matrix.stride(0),
            x.stride(0),
            stream.stride(0),
            activated.stride(0),
            wide.dilation * wide.channels,
            wide.channels // (tile.depth * tile.parts),
            wide.taps * wide.channels // (tile.depth * tile.parts),
            STORE=out is not None,
            PRECISION="ieee",
            FAST=x.dtype != torch.float32,
            BM=tile.rows,
            BN=tile.columns,
            BK=tile.depth,
            PARTS=tile.parts,
            num_warps=tile.warps,
            num_stages=tile.stages,
            compile_only=compile_only,
        )

    def _run_resident(
        self, x: Tensor, rows: int, tile: Tile, stream: Tensor, out: Tensor | None, activated: Tensor, compile_only: bool
    ) -> None:
        from .resident_kernels import ROWS, descriptors, resident_unit

        wide, narrow = self.wide, self.narrow
        across = triton.cdiv(rows, ROWS)
        tiles = x.shape[0] * across
        launch(
            resident_unit,
            (min(multiprocessors(x.device), triton.cdiv(tiles, 2)),),
            *descriptors(x),
            self.resident,
            wide.bias,
            wide.frequency,
            wide.magnitude,
            narrow.bias,
            stream,
            stream if out is None else out,
            activated,
            narrow.frequency,
            narrow.magnitude,
            tiles,
            across,
            rows,
            x.shape[1],
            stream.stride(0),
            activated.stride(0),
            wide.dilation,
            TAPS=wide.taps,
            STAGES=tile.stages,
            STORE=out is not None,
            num_warps=tile.warps,
            compile_only=compile_only,
        )
