"""The residual unit of 96 channels for Hopper: all its weights stay in shared memory, and rows stream past them.

Tile by tile, weights would be read from the L2 cache again for every 64 rows, and they are twice as many bytes as the rows. Here one
program per multiprocessor keeps the 147 KB for good. Its two groups of four warps go through tiles of their own: while one computes
SnakeBetas, the other has the matrix unit. Rows are copied by the tensor memory accelerator, a few taps ahead.

96 columns are 64 and 32, since shapes are powers of two. This is written in Gluon, which names layouts and shared memory where Triton
chooses them. Importing it needs Triton; calling it, a Hopper GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .tiles import RESIDENT_CHANNELS

__all__ = ["ROWS", "arranged", "descriptors", "resident_unit"]

ROWS = 64
"""Of a tile: what a group of four warps multiplies at once."""

_C = gl.constexpr(RESIDENT_CHANNELS)
_ROWS = gl.constexpr(ROWS)
_ROUND = gl.constexpr(12582912.0)  # see matrix_kernels.py

# Of [64, 64] and [64, 32] values. The matrix unit leaves a thread 2 neighbouring columns of every 8; with the pointwise convolution's
# columns in another order (see arranged), its 8 columns of every 32 are neighbours, and one access of 16 bytes.
_MMA_64 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_MMA_32 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
_SHARED_64 = gl.constexpr(gl.NVMMASharedLayout(128, 16))
_SHARED_32 = gl.constexpr(gl.NVMMASharedLayout(64, 16))
_COPY_64 = gl.constexpr(gl.BlockedLayout([4, 8], [4, 8], [4, 1], [1, 0]))
_COPY_32 = gl.constexpr(gl.BlockedLayout([2, 8], [8, 4], [4, 1], [1, 0]))
_LANES = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
_WARPS = [[16, 0], [32, 0]]
_OUT_64 = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]], _LANES, _WARPS, [], [64, 64]))
_OUT_32 = gl.constexpr(gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [8, 0]], _LANES, _WARPS, [], [64, 32]))


def arranged(taps: Tensor, point: Tensor) -> Tensor:
    """Weights as the kernel reads them: [taps + 1, C, C].

    Args:
        taps: the dilated convolution, [taps, C, C].
        point: the pointwise one, [C, C]. Column 8j + 2q + i of 32 becomes 8q + 2j + i.
    """
    place = torch.arange(point.shape[1], device=point.device)
    inside = place % 32
    column = place - inside + 8 * (inside // 2 % 4) + 2 * (inside // 8) + inside % 2
    return torch.cat((taps, point[None, :, column])).contiguous()


def descriptors(x: Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Of a dense [B, rows, C] input, for boxes of :data:`ROWS` rows: its first 64 columns, and 32."""
    lines = x.view(-1, RESIDENT_CHANNELS)
    wide, narrow = (gl.NVMMASharedLayout(bytes_, 16) for bytes_ in (128, 64))
    return TensorDescriptor.from_tensor(lines, [ROWS, 64], wide), TensorDescriptor.from_tensor(lines, [ROWS, 32], narrow)


@gluon.jit
def _snake(v, frequency, magnitude):
    """SnakeBeta with the sine unit of the GPU, as in matrix_kernels.py."""
    x = v * frequency
    n = (x * 0.3183098861837907 + _ROUND) - _ROUND
    s = libdevice.fast_sinf(x - n * 3.14159265358979)
    return v + magnitude * (s * s)


@gluon.jit
def _fetch(x_64, x_32, row, ready, wide, narrow):
    """Begin to copy one tap of a tile."""
    mbarrier.expect(ready, _ROWS * _C * 2)
    tma.async_copy_global_to_shared(x_64, [row, 0], ready, wide)
    tma.async_copy_global_to_shared(x_32, [row, 64], ready, narrow)


@gluon.jit
def _inner(sums, bias, frequency, magnitude, START: gl.constexpr, COLUMNS: gl.constexpr, dtype: gl.constexpr):
    """Bias and SnakeBeta between the convolutions; the result stays in registers, as the next one's input."""
    column = START + gl.arange(0, COLUMNS, gl.SliceLayout(0, sums.type.layout))
    v = _snake(sums + gl.load(bias + column)[None, :], gl.load(frequency + column)[None, :], gl.load(magnitude + column)[None, :])
    return v.to(dtype)


@gluon.jit
def _finish(
    sums,
    kept,
    out,
    activated,
    bias,
    frequency,
    magnitude,
    place,
    inside,
    START: gl.constexpr,
    COLUMNS: gl.constexpr,
    layout: gl.constexpr,
    STORE: gl.constexpr,
):
    """Bias, the stream, and the next SnakeBeta, on their way to memory."""
    parted = gl.reshape(sums, [_ROWS, COLUMNS // 32, 4, 4, 2])
    v = gl.convert_layout(gl.reshape(gl.permute(parted, [0, 1, 3, 2, 4]), [_ROWS, COLUMNS]), layout)  # nothing leaves its thread
    column = START + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    v += gl.load(bias + column)[None, :] + kept.to(gl.float32)
    if STORE:
        gl.store(out + place, v.to(out.dtype.element_ty), mask=inside)
    v = _snake(v, gl.load(frequency + column)[None, :], gl.load(magnitude + column)[None, :])
    gl.store(activated + place, v.to(activated.dtype.element_ty), mask=inside)


@gluon.jit
def _group(
    x_64, x_32, bias, frequency, magnitude, point_bias, residual, out, activated, next_frequency, next_magnitude,
    w_64_64, w_64_32, w_32_64, w_32_32, a_64, a_32, ready, first, step, tiles, across, T,
    x_rows, stream_batch, activated_batch, dilation, TAPS: gl.constexpr, STAGES: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """Every ``step``-th tile from ``first`` on. Copies run STAGES - 1 taps ahead, into the next tile, too."""
    dtype: gl.constexpr = residual.dtype.element_ty
    begin = (first // across) * x_rows + (first % across) * _ROWS
    for early in gl.static_range(STAGES - 1):
        _fetch(x_64, x_32, begin + early * dilation, ready.index(early), a_64.index(early), a_32.index(early))
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(first, tiles, step):
        after = gl.minimum(tile + step, tiles - 1)
        next_begin = (after // across) * x_rows + (after % across) * _ROWS
        sums_64 = gl.zeros([_ROWS, 64], gl.float32, _MMA_64)
        sums_32 = gl.zeros([_ROWS, 32], gl.float32, _MMA_32)
        for tap in gl.static_range(TAPS):
            mbarrier.wait(ready.index(stage), phase)
            wide = a_64.index(stage)
            narrow = a_32.index(stage)
            sums_64 = warpgroup_mma(wide, w_64_64.index(tap), sums_64, is_async=True)
            sums_64 = warpgroup_mma(narrow, w_32_64.index(tap), sums_64, is_async=True)
            sums_32 = warpgroup_mma(wide, w_64_32.index(tap), sums_32, is_async=True)
            sums_32 = warpgroup_mma(narrow, w_32_32.index(tap), sums_32, is_async=True)
            if tap == TAPS - 1:
                sums_64, sums_32 = warpgroup_mma_wait(0, deps=[sums_64, sums_32])
            else:  # the tap before is through
                sums_64, sums_32 = warpgroup_mma_wait(4, deps=[sums_64, sums_32])
            gl.thread_barrier()  # in all four warps: its stage is free
            free = gl.where(stage == 0, STAGES - 1, stage - 1)
            ahead = tap + STAGES - 1
            row = begin + ahead * dilation if ahead < TAPS else next_begin + (ahead - TAPS) * dilation
            _fetch(x_64, x_32, row, ready.index(free), a_64.index(free), a_32.index(free))
            phase = gl.where(stage == STAGES - 1, 1 - phase, phase)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        begin = next_begin
        # What is added comes from memory while the first SnakeBeta is computed.
        batch = (tile // across).to(gl.int64)
        t_64 = (tile % across) * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, _OUT_64))
        t_32 = (tile % across) * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, _OUT_32))
        inside_64 = (t_64 < T)[:, None]
        inside_32 = (t_32 < T)[:, None]
        place_64 = t_64[:, None] * _C + gl.arange(0, 64, gl.SliceLayout(0, _OUT_64))[None, :]
        place_32 = t_32[:, None] * _C + (gl.arange(0, 32, gl.SliceLayout(0, _OUT_32)) + 64)[None, :]
        stream = batch * stream_batch
        kept_64 = gl.load(residual + stream + place_64, mask=inside_64, other=0.0)
        kept_32 = gl.load(residual + stream + place_32, mask=inside_32, other=0.0)

        inner_64 = gl.convert_layout(_inner(sums_64, bias, frequency, magnitude, 0, 64, dtype), gl.DotOperandLayout(0, _MMA_64, 2))
        inner_32 = gl.convert_layout(_inner(sums_32, bias, frequency, magnitude, 64, 32, dtype), gl.DotOperandLayout(0, _MMA_64, 2))
        zeros_64 = gl.zeros([_ROWS, 64], gl.float32, _MMA_64)
        zeros_32 = gl.zeros([_ROWS, 32], gl.float32, _MMA_32)
        sums_64 = warpgroup_mma(inner_64, w_64_64.index(TAPS), zeros_64, is_async=True)
        sums_64 = warpgroup_mma(inner_32, w_32_64.index(TAPS), sums_64, is_async=True)
        inner_64 = gl.convert_layout(inner_64, gl.DotOperandLayout(0, _MMA_32, 2))
        inner_32 = gl.convert_layout(inner_32, gl.DotOperandLayout(0, _MMA_32, 2))
        sums_32 = warpgroup_mma(inner_64, w_64_32.index(TAPS), zeros_32, is_async=True)
        sums_32 = warpgroup_mma(inner_32, w_32_32.index(TAPS), sums_32, is_async=True)
        sums_64, sums_32 = warpgroup_mma_wait(0, deps=[sums_64, sums_32])

        into, onto = out + stream, activated + batch * activated_batch
        _finish(
            sums_64, kept_64, into, onto, point_bias, next_frequency, next_magnitude, place_64, inside_64, 0, 64, _OUT_64, STORE
        )  # fmt: skip
        _finish(
            sums_32, kept_32, into, onto, point_bias, next_frequency, next_magnitude, place_32, inside_32, 64, 32, _OUT_32, STORE
        )  # fmt: skip
    for _ in gl.static_range(STAGES - 1):  # what was copied for a tile that does not come
        mbarrier.wait(ready.index(stage), phase)
        phase = gl.where(stage == STAGES - 1, 1 - phase, phase)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)


@gluon.jit(do_not_specialize=["T", "tiles", "across", "x_rows"])
def resident_unit(
    x_64, x_32, w, bias, frequency, magnitude, point_bias, residual, out, activated, next_frequency, next_magnitude,
    tiles, across, T, x_rows, stream_batch, activated_batch, dilation,
    TAPS: gl.constexpr, STAGES: gl.constexpr, STORE: gl.constexpr, EARLY: gl.constexpr = False,
):  # fmt: skip
    """What ``residual_unit`` of matrix_kernels.py computes, by one program per multiprocessor.

    ``x_64`` and ``x_32`` describe the input as [B · x_rows, 96], in boxes of 64 rows and so many columns; ``w`` is what
    :func:`arranged` returns. Each of the B requests has T rows in ``across`` tiles, ``tiles`` together.
    """
    dtype: gl.constexpr = residual.dtype.element_ty
    w_64_64 = gl.allocate_shared_memory(dtype, [TAPS + 1, 64, 64], _SHARED_64)
    w_64_32 = gl.allocate_shared_memory(dtype, [TAPS + 1, 64, 32], _SHARED_32)
    w_32_64 = gl.allocate_shared_memory(dtype, [TAPS + 1, 32, 64], _SHARED_64)
    w_32_32 = gl.allocate_shared_memory(dtype, [TAPS + 1, 32, 32], _SHARED_32)
    a_64 = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, 64], _SHARED_64)
    a_32 = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, 32], _SHARED_32)
    b_64 = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, 64], _SHARED_64)
    b_32 = gl.allocate_shared_memory(dtype, [STAGES, _ROWS, 32], _SHARED_32)
    a_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    b_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(a_ready.index(stage), count=1)
        mbarrier.init(b_ready.index(stage), count=1)
    upper_64 = gl.arange(0, 64, gl.SliceLayout(1, _COPY_64))[:, None] * _C + gl.arange(0, 64, gl.SliceLayout(0, _COPY_64))[None, :]
    upper_32 = gl.arange(0, 64, gl.SliceLayout(1, _COPY_32))[:, None] * _C + gl.arange(0, 32, gl.SliceLayout(0, _COPY_32))[None, :] + 64
    for part in range(TAPS + 1):
        matrix = w + part * (_C * _C)
        async_copy.async_copy_global_to_shared(w_64_64.index(part), matrix + upper_64)
        async_copy.async_copy_global_to_shared(w_64_32.index(part), matrix + upper_32)
        lower_64 = 64 * _C + gl.arange(0, 32, gl.SliceLayout(1, _COPY_64))[:, None] * _C
        lower_32 = 64 * _C + 64 + gl.arange(0, 32, gl.SliceLayout(1, _COPY_32))[:, None] * _C
        async_copy.async_copy_global_to_shared(
            w_32_64.index(part), matrix + lower_64 + gl.arange(0, 64, gl.SliceLayout(0, _COPY_64))[None, :]
        )
        async_copy.async_copy_global_to_shared(
            w_32_32.index(part), matrix + lower_32 + gl.arange(0, 32, gl.SliceLayout(0, _COPY_32))[None, :]
        )
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.thread_barrier()
    fence_async_shared()
    if EARLY:  # weights came while the kernel before was still at work
        gdc_wait()
        gdc_launch_dependents()
    first = gl.program_id(0) * 2
    step = gl.num_programs(0) * 2
    gl.warp_specialize(
        [
            (
                _group,
                (
                    x_64, x_32, bias, frequency, magnitude, point_bias, residual, out, activated, next_frequency, next_magnitude,
                    w_64_64, w_64_32, w_32_64, w_32_32, a_64, a_32, a_ready, first, step, tiles, across, T,
                    x_rows, stream_batch, activated_batch, dilation, TAPS, STAGES, STORE,
                ),
            ),
            (
                _group,
                (
                    x_64, x_32, bias, frequency, magnitude, point_bias, residual, out, activated, next_frequency, next_magnitude,
                    w_64_64, w_64_32, w_32_64, w_32_32, b_64, b_32, b_ready, first + 1, step, tiles, across, T,
                    x_rows, stream_batch, activated_batch, dilation, TAPS, STAGES, STORE,
                ),
            ),
        ],
        [4],
        [240],
    )  # fmt: skip
