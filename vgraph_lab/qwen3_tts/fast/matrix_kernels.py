"""Triton kernels of the fast form's matrix products, with all that follows a product element by element."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from .kernels import take_turn

__all__ = ["convolve", "residual_unit"]


_ROUND = tl.constexpr(12582912.0)  # 1.5 · 2²³: added and taken away again, it rounds to the nearest whole number


@triton.jit
def _sin_squared(x, FAST: tl.constexpr):
    """sin² of fp32 arguments below 10⁷, reduced to ±π/2.

    In full precision by the series to r¹¹ (error below 6e-8) after a reduction in three parts (Cody and Waite). FAST takes the sine
    unit of the GPU instead (absolute error about 5e-7, and 9e-8 more for each multiple of π), far below what half precision keeps.
    """
    n = (x * 0.3183098861837907 + _ROUND) - _ROUND
    if FAST:
        s = libdevice.fast_sinf(x - n * 3.14159265358979)
        return s * s
    r = x - n * 3.140625
    r = r - n * 9.67502593994140625e-4
    r = r - n * 1.509957990978376432e-7
    q = r * r
    s = 1.0 + q * (-1 / 6 + q * (1 / 120 + q * (-1 / 5040 + q * (1 / 362880 - q * (1 / 39916800)))))
    return q * s * s


@triton.jit
def _prefetch(pointer):
    """Bring lines into the L2 cache; nothing waits for them."""
    address = pointer.to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _put(
    v,
    column,
    row,
    batch,
    t,
    residual,
    out,
    activated,
    frequency,
    magnitude,
    M,
    N,
    residual_batch,
    out_batch,
    activated_batch,
    GELU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    STORE: tl.constexpr,
    SNAKE: tl.constexpr,
    FAST: tl.constexpr,
):
    """What follows a product per element, and its way to memory: the columns ``column`` of the rows ``row``, at [batch, t]."""
    if GELU:
        v = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    place = t[:, None] * N + column[None, :]
    inside = (row < M)[:, None] & (column < N)[None, :]
    if RESIDUAL:
        v += tl.load(residual + (batch * residual_batch)[:, None] + place, mask=inside, other=0.0).to(tl.float32)
    if STORE:
        tl.store(out + (batch * out_batch)[:, None] + place, v.to(out.dtype.element_ty), mask=inside)
    if SNAKE:
        s = v + tl.load(magnitude + column)[None, :] * _sin_squared(v * tl.load(frequency + column)[None, :], FAST)
        tl.store(activated + (batch * activated_batch)[:, None] + place, s.to(activated.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "T", "blocks", "blocks_per_tap"])  # or each number of samples would be compiled for itself
def convolve(
    x,
    w,
    bias,
    residual,
    out,
    activated,
    frequency,
    magnitude,
    partial,
    arrived,
    M,
    T,
    N,
    w_row,
    x_batch,
    residual_batch,
    out_batch,
    activated_batch,
    C,
    tap_step,
    blocks_per_tap,
    blocks,
    eps,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    GELU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    STORE: tl.constexpr,
    SNAKE: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    MORE: tl.constexpr = 0,
    PREFETCH: tl.constexpr = False,
    EARLY: tl.constexpr = False,
):
    """Matrix product over the taps of a causal convolution, and all that follows it per element.

    out[b, t, n] = f(Σ_tap Σ_c x[b, t + tap · dilation, c] · w[tap · C + c, n] + bias[n]). A linear layer has one tap; a transposed
    convolution has one or two, and stride · channels columns, which are the next ``stride`` samples one after the other.

    Program axes: tiles (columns first, then rows, which are all B · T in one line), parts of the sum. A program has BN columns, and MORE
    beside them where their number is no power of two. With SPLIT parts, the last one to arrive adds them all, in their order, so that
    results do not depend on which one that is.
    """
    LINES: tl.constexpr = (BN + 63) // 64  # of 128 bytes, in half precision
    tile = tl.program_id(0)
    across = tl.cdiv(N, BN + MORE)
    column = (tile % across) * (BN + MORE) + tl.arange(0, BN)
    row = (tile // across) * BM + tl.arange(0, BM)
    part = tl.program_id(1)
    m = tl.minimum(row, M - 1)
    batch = (m // T).to(tl.int64)
    t = m % T
    kk = tl.arange(0, BK)
    x_pointer = x + (batch * x_batch + t * C)[:, None] + kk[None, :]
    w_pointer = w + kk[:, None] * w_row + column[None, :]
    if EARLY and PREFETCH:  # weights come from memory while the kernel before is still at work
        depth = tl.arange(0, BK * LINES)
        line = w + (depth // LINES) * w_row + (tile % across) * (BN + MORE) + (depth % LINES) * 64
        for k in range((part * blocks // SPLIT) * PARTS, ((part + 1) * blocks // SPLIT) * PARTS):
            _prefetch(line + k * BK * w_row)
            if GATE:
                _prefetch(line + (k * BK * w_row + N))
    take_turn(EARLY)
    acc = tl.zeros((BM, BN), tl.float32)
    if GATE:
        up = tl.zeros((BM, BN), tl.float32)
    if MORE:
        beside = tl.zeros((BM, MORE), tl.float32)
        more_pointer = w + kk[:, None] * w_row + ((tile % across) * (BN + MORE) + BN + tl.arange(0, MORE))[None, :]
    if NORM:
        squares = tl.zeros((BM,), tl.float32)
    for k in range(part * blocks // SPLIT, (part + 1) * blocks // SPLIT):
        for p in tl.static_range(PARTS):
            a = tl.load(x_pointer + ((k // blocks_per_tap) * tap_step + ((k % blocks_per_tap) * PARTS + p) * BK))
            acc = tl.dot(a, tl.load(w_pointer + (k * PARTS + p) * BK * w_row), acc, input_precision=PRECISION)
            if GATE:
                up = tl.dot(a, tl.load(w_pointer + ((k * PARTS + p) * BK * w_row + N)), up, input_precision=PRECISION)
            if MORE:
                beside = tl.dot(a, tl.load(more_pointer + (k * PARTS + p) * BK * w_row), beside, input_precision=PRECISION)
            if NORM:
                wide = a.to(tl.float32)
                squares += tl.sum(wide * wide, axis=1)

    if SPLIT > 1:
        inside = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        own = partial + tile.to(tl.int64) * (SPLIT * BM * BN) + inside
        tl.store(own + part * (BM * BN), acc)
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") != SPLIT - 1:
            return
        tl.debug_barrier()
        acc = tl.zeros((BM, BN), tl.float32)
        for other in tl.static_range(SPLIT):
            acc += tl.load(own + other * (BM * BN), cache_modifier=".cg")
        tl.atomic_xchg(arrived + tile, 0)  # as it was, for the next launch

    if NORM:
        acc = acc * tl.rsqrt(squares / (blocks * (BK * PARTS)) + eps)[:, None]
    v = acc + tl.load(bias + column)[None, :]
    if GATE:
        if NORM:
            up = up * tl.rsqrt(squares / (blocks * (BK * PARTS)) + eps)[:, None]
        v = v * tl.sigmoid(v) * up
    _put(
        v, column, row, batch, t, residual, out, activated, frequency, magnitude, M, N, residual_batch, out_batch, activated_batch,
        GELU, RESIDUAL, STORE, SNAKE, FAST,
    )  # fmt: skip
    if MORE:
        column = (tile % across) * (BN + MORE) + BN + tl.arange(0, MORE)
        v = beside + tl.load(bias + column)[None, :]
        _put(
            v, column, row, batch, t, residual, out, activated, frequency, magnitude, M, N, residual_batch, out_batch, activated_batch,
            GELU, RESIDUAL, STORE, SNAKE, FAST,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M", "T", "blocks", "blocks_per_tap"])
def residual_unit(
    x,
    w,
    bias,
    frequency,
    magnitude,
    point_w,
    point_bias,
    residual,
    out,
    activated,
    next_frequency,
    next_magnitude,
    M,
    T,
    C,
    w_row,
    x_batch,
    stream_batch,
    activated_batch,
    tap_step,
    blocks_per_tap,
    blocks,
    STORE: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """A whole residual unit of at most BN channels: dilated convolution, SnakeBeta, pointwise convolution, sum, next SnakeBeta.

    What lies between the convolutions never leaves the program. ``residual`` and ``out`` have the same strides.
    """
    take_turn(EARLY)
    column = tl.arange(0, BN)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    m = tl.minimum(row, M - 1)
    batch = (m // T).to(tl.int64)
    t = m % T
    kk = tl.arange(0, BK)
    x_pointer = x + (batch * x_batch + t * C)[:, None] + kk[None, :]
    w_pointer = w + kk[:, None] * w_row + column[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(blocks):
        for p in tl.static_range(PARTS):
            a = tl.load(x_pointer + ((k // blocks_per_tap) * tap_step + ((k % blocks_per_tap) * PARTS + p) * BK))
            acc = tl.dot(a, tl.load(w_pointer + (k * PARTS + p) * BK * w_row), acc, input_precision=PRECISION)
    v = acc + tl.load(bias + column)[None, :]
    v = v + tl.load(magnitude + column)[None, :] * _sin_squared(v * tl.load(frequency + column)[None, :], FAST)
    inner = tl.arange(0, BN)
    point = tl.load(point_w + inner[:, None] * w_row + column[None, :], mask=(inner < C)[:, None], other=0.0)
    v = tl.dot(v.to(x.dtype.element_ty), point, input_precision=PRECISION) + tl.load(point_bias + column)[None, :]
    _put(
        v, column, row, batch, t, residual, out, activated, next_frequency, next_magnitude, M, C, stream_batch, stream_batch,
        activated_batch, False, True, STORE, True, FAST,
    )  # fmt: skip
