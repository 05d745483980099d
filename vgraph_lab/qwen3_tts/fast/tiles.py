"""How a matrix product is cut into programs: by rule, or by what was fastest on this device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["MOST_TILES", "RESIDENT", "RESIDENT_CHANNELS", "WIDEST", "Problem", "Tile", "candidates", "fits", "padded", "tile_by_rule"]

MOST_TILES = 8192
"""Tiles of one product whose sums may be split: each has a counter."""

WIDEST = 256
"""Columns of the widest tile."""

RESIDENT_CHANNELS = 96
"""Channels of the residual unit whose weights can stay in shared memory."""

_FULL_GPU = 132  # programs that fill a large GPU once
_MANY_ROWS = 12_000  # from which on tiles of two widths pay, found on an H200

# Of a tile that sums squares beside its products. With more, Triton takes Hopper's asynchronous matrix instructions for the products,
# and with 3.6.0 the sums then came out wrong by a tenth and more, seen on an H200.
_MOST_NORM_ROWS = 32


class Tile(NamedTuple):
    """Rows, columns and depth of a program, parts of its sum, warps and stages, depths per step, and columns beside the others."""

    rows: int
    columns: int
    depth: int
    split: int = 1
    warps: int = 4
    stages: int = 3
    parts: int = 1
    more: int = 0

    @property
    def width(self) -> int:
        """All columns of a program."""
        return self.columns + self.more


RESIDENT = Tile(64, 64, 32, 1, 4, 3, 3, 32)
"""Stands for the kernel of :mod:`.resident_kernels`."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One matrix product: what decides which tile is fastest.

    Attributes:
        rows: B · T.
        columns: of the result.
        channels: of one tap; what a tile takes in one step divides it.
        taps: of the convolution.
        kind: what follows the product, as a short text.
        may_split: whether the sum may be made in parts.
        dtype: of the inputs.
        may_stay: whether there is a kernel that keeps all weights in shared memory.
    """

    rows: int
    columns: int
    channels: int
    taps: int
    kind: str
    may_split: bool
    dtype: torch.dtype
    may_stay: bool = False

    @property
    def key(self) -> str:
        """The problem in one word, for tables of tuned tiles."""
        return f"{str(self.dtype).removeprefix('torch.')}:{self.rows}x{self.columns}x{self.taps}x{self.channels}{self.kind}"


def fits(problem: Problem, tile: Tile) -> bool:
    """Whether the kernels can run a tile: they check nothing."""
    if tile == RESIDENT:
        return problem.may_stay
    sizes = (tile.rows, tile.columns, tile.depth, *([tile.more] if tile.more else []))
    return (
        min(tile[:-1]) >= 1
        and all(size >= 16 and size & (size - 1) == 0 for size in sizes)
        and problem.channels % (tile.depth * tile.parts) == 0
        and -(-problem.columns // tile.width) * tile.width <= padded(problem.columns)
        and (tile.width >= problem.columns or problem.kind != "u")
        and (tile.more == 0 or (tile.split == 1 and not {*"ngu"} & {*problem.kind}))
        and ("n" not in problem.kind or tile.rows <= _MOST_NORM_ROWS)
        and (tile.split == 1 or (problem.may_split and _programs(problem, tile.rows, tile.width) <= MOST_TILES))
        and tile.split <= problem.taps * problem.channels // (tile.depth * tile.parts)
        and tile.warps in (1, 2, 4, 8, 16)
        and tile.rows * tile.width <= 1 << 16
    )


def padded(columns: int) -> int:
    """Columns of a matrix in memory: whole tiles, so that loads need no mask."""
    unit = WIDEST if columns > WIDEST // 2 else WIDEST // 2
    return -(-columns // unit) * unit


def tile_by_rule(problem: Problem) -> Tile:
    """A tile that is never far off."""
    return candidates(problem)[0]


def candidates(problem: Problem) -> list[Tile]:
    """Tiles worth timing, the one by rule first."""
    if problem.dtype == torch.float32:  # no matrix unit keeps full precision: small tiles, which also compile in no time
        return [Tile(32, 32, _depth(problem, 32)[0]) if problem.kind != "u" else Tile(16, _power_of_two(problem.columns), 16)]
    if problem.kind == "u":
        return _of_unit(problem)
    if problem.columns <= 16:
        depth, parts = _depth(problem, 64)
        rows_of_tiles = (_MOST_NORM_ROWS,) if "n" in problem.kind else (128, 64)
        return [Tile(rows, 16, depth, 1, 4, 3, parts) for rows in rows_of_tiles]
    if problem.rows <= 64:
        return _of_few_rows(problem)
    return _of_norm(problem) if "n" in problem.kind else _of_many_rows(problem)


def _of_unit(problem: Problem) -> list[Tile]:
    depth, parts = _depth(problem, 64)
    columns = _power_of_two(problem.columns)
    shapes = ((64, 4, 3), (64, 4, 2), (128, 8, 2), (64, 8, 2), (32, 4, 3), (64, 4, 1), (128, 8, 1))
    staying = [RESIDENT] if problem.may_stay else []
    return [*staying, *(Tile(rows, columns, depth, 1, warps, stages, parts) for rows, warps, stages in shapes)]


def _of_few_rows(problem: Problem) -> list[Tile]:
    """Weights are read once, and that is all that counts: many programs, each with much under way."""
    rows = 16 if problem.rows <= 16 else 32 if problem.rows <= 32 or "n" in problem.kind else 64
    depth, _ = _depth(problem, 128)
    found = [
        Tile(rows, columns, depth, _split(problem, rows, columns), warps, stages)
        for columns, warps, stages in ((32, 4, 4), (16, 2, 3), (64, 4, 4))
    ]
    # A sum that cannot be split has too few programs with the wider tile.
    return found if found[0].split > 1 or _programs(problem, rows, 32) >= _FULL_GPU // 2 else [found[1], found[0], found[2]]


def _of_norm(problem: Problem) -> list[Tile]:
    """As wide as fills the GPU in the main; the order was found on an H200."""
    depth, deep = _depth(problem, 64)[0], _depth(problem, 128)[0]
    found = [
        Tile(_MOST_NORM_ROWS, 128, depth, 1, 4, 4),
        Tile(_MOST_NORM_ROWS, 128, deep, 1, 4, 3),
        Tile(_MOST_NORM_ROWS, 64, deep, 1, 4, 3),
        Tile(_MOST_NORM_ROWS, 32, deep, 1, 4, 3),
    ]
    found = [tile for tile in dict.fromkeys(found) if tile.width <= padded(problem.columns)]
    filling = [tile for tile in found if _programs(problem, tile.rows, tile.width) >= _FULL_GPU * 2 // 3]
    first = (filling or found[-1:])[0]
    return [first, *(tile for tile in found if tile != first)]


def _of_many_rows(problem: Problem) -> list[Tile]:
    """The order was found on an H200: large tiles once they fill it, and before that smaller ones with split sums."""
    depth, parts = _depth(problem, 64)
    deep, deep_parts = _depth(problem, 128)
    small = Tile(64, 64, deep, _split(problem, 64, 64), 4, 3, deep_parts)
    flat = Tile(64, 128, depth, _split(problem, 64, 128), 4, 4, parts)
    tall = Tile(128, 64, depth, 1, 4, 4, parts)
    flatter = [Tile(32, 128, depth, 1, 4, 4, parts), Tile(64, 128, deep, min(flat.split, 2), 4, 3, deep_parts)]
    large = Tile(128, 128, depth, 1, 4, 3, parts)
    widest = Tile(128, 256, depth, 1, 8, 3, parts)
    shared = widest._replace(split=_split(problem, 128, 256))  # fewer programs than fill the GPU, or some more
    inputs, filled = problem.taps * problem.channels, _programs(problem, 128, 128)
    if problem.taps == 1 and problem.columns % 128 and filled >= _FULL_GPU:
        found = [tall, tall._replace(stages=2), small, flat, large]
    elif filled >= 3 * _FULL_GPU or (filled >= 150 and inputs >= 1280):
        found = [large, large._replace(stages=2) if problem.taps == 1 else widest, tall, flat, shared]
    elif _programs(problem, 64, 64) < 160 and (inputs <= 4096 or _programs(problem, 64, 64) <= 64):
        found = [small, flat, large, *flatter]
    else:
        found = [flat, small, large, widest, shared, *flatter]
    found = [tile for tile in dict.fromkeys(found) if tile.columns // 2 < max(problem.columns, 33)]
    before, after = _parted(problem, depth, parts)
    return [*before, *found, *after]


def _parted(problem: Problem, depth: int, parts: int) -> tuple[list[Tile], list[Tile]]:
    """Tiles of two widths, which read their inputs once for columns that are no power of two: those to prefer, and others."""
    low = Tile(64, 128, depth, 1, 4, 3, parts, 64)
    if problem.taps == 1 or problem.kind not in ("", "s", "e"):
        return [], []
    if problem.rows < _MANY_ROWS:
        return [], [low] if problem.columns % low.width == 0 else []
    if problem.columns == low.width:
        return [Tile(256, 128, depth, 1, 8, 3, parts, 64), low], []
    if problem.columns == 384:  # faster than the others at 16,000 rows, slower at 64,000
        return [], [Tile(128, 256, depth, 1, 8, 3, parts, 128)]
    return [Tile(128, 64, depth, 1, 4, 3, parts, 32)] if problem.columns % 96 == 0 and problem.columns % 128 else [], []


def _depth(problem: Problem, most: int) -> tuple[int, int]:
    """Channels of one product, and products of one step: whole taps where they are short and not powers of two."""
    channels = problem.channels
    depth = next(depth for depth in (128, 64, 32, 16) if depth <= most and channels % depth == 0)
    return depth, channels // depth if depth < most and channels // depth <= 4 and channels % most else 1


def _programs(problem: Problem, rows: int, columns: int) -> int:
    return -(-problem.rows // rows) * -(-problem.columns // columns)


def _split(problem: Problem, rows: int, columns: int) -> int:
    """Parts that fill the GPU up to twice, each with a few hundred inputs."""
    programs, inputs = _programs(problem, rows, columns), problem.taps * problem.channels
    if not problem.may_split or programs > MOST_TILES:
        return 1
    return max([split for split in (1, 2, 3, 4) if programs * split <= 2 * _FULL_GPU and inputs // split >= 384], default=1)


def _power_of_two(count: int) -> int:
    return max(16, 1 << (count - 1).bit_length())
