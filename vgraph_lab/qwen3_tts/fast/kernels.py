"""Triton kernels of the fast form. Importing this module needs Triton; calling them needs a GPU, or TRITON_INTERPRET=1.

All activations are channels-last: [rows, time, channels]. What looks back has its earlier samples in front, in the same buffer.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

__all__ = ["attend", "convolve", "depthwise_norm", "embed", "move_histories", "residual_unit", "sum_taps"]


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
):
    """Matrix product over the taps of a causal convolution, and all that follows it per element.

    out[b, t, n] = f(Σ_tap Σ_c x[b, t + tap · dilation, c] · w[tap · C + c, n] + bias[n]). A linear layer has one tap; a transposed
    convolution has one or two, and stride · channels columns, which are the next ``stride`` samples one after the other.

    Program axes: tiles (columns first, then rows, which are all B · T in one line), parts of the sum. With SPLIT parts, the last one to
    arrive adds them all, in their order, so that results do not depend on which one that is.
    """
    tile = tl.program_id(0)
    across = tl.cdiv(N, BN)
    column = (tile % across) * BN + tl.arange(0, BN)
    row = (tile // across) * BM + tl.arange(0, BM)
    part = tl.program_id(1)
    m = tl.minimum(row, M - 1)
    batch = (m // T).to(tl.int64)
    t = m % T
    kk = tl.arange(0, BK)
    x_pointer = x + (batch * x_batch + t * C)[:, None] + kk[None, :]
    w_pointer = w + kk[:, None] * w_row + column[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    if GATE:
        up = tl.zeros((BM, BN), tl.float32)
    if NORM:
        squares = tl.zeros((BM,), tl.float32)
    for k in range(part * blocks // SPLIT, (part + 1) * blocks // SPLIT):
        for p in tl.static_range(PARTS):
            a = tl.load(x_pointer + ((k // blocks_per_tap) * tap_step + ((k % blocks_per_tap) * PARTS + p) * BK))
            acc = tl.dot(a, tl.load(w_pointer + (k * PARTS + p) * BK * w_row), acc, input_precision=PRECISION)
            if GATE:
                up = tl.dot(a, tl.load(w_pointer + ((k * PARTS + p) * BK * w_row + N)), up, input_precision=PRECISION)
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
    if GELU:
        v = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    place = t[:, None] * N + column[None, :]
    inside_mask = (row < M)[:, None] & (column < N)[None, :]
    if RESIDUAL:
        v += tl.load(residual + (batch * residual_batch)[:, None] + place, mask=inside_mask, other=0.0).to(tl.float32)
    if STORE:
        tl.store(out + (batch * out_batch)[:, None] + place, v.to(out.dtype.element_ty), mask=inside_mask)
    if SNAKE:
        s = v + tl.load(magnitude + column)[None, :] * _sin_squared(v * tl.load(frequency + column)[None, :], FAST)
        tl.store(activated + (batch * activated_batch)[:, None] + place, s.to(activated.dtype.element_ty), mask=inside_mask)


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
):
    """A whole residual unit of at most BN channels: dilated convolution, SnakeBeta, pointwise convolution, sum, next SnakeBeta.

    What lies between the convolutions never leaves the program. ``residual`` and ``out`` have the same strides.
    """
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
    place = t[:, None] * C + column[None, :]
    mask = (row < M)[:, None] & (column < C)[None, :]
    v += tl.load(residual + (batch * stream_batch)[:, None] + place, mask=mask, other=0.0).to(tl.float32)
    if STORE:
        tl.store(out + (batch * stream_batch)[:, None] + place, v.to(out.dtype.element_ty), mask=mask)
    v = v + tl.load(next_magnitude + column)[None, :] * _sin_squared(v * tl.load(next_frequency + column)[None, :], FAST)
    tl.store(activated + (batch * activated_batch)[:, None] + place, v.to(activated.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T"])
def embed(codes, table, out, out_batch, T, K, C: tl.constexpr, Q: tl.constexpr, BC: tl.constexpr):
    """out[b, t] = Σ_q table[q, codes[b, q, t]]; one program for each frame."""
    b = (tl.program_id(0) // T).to(tl.int64)
    t = tl.program_id(0) % T
    c = tl.arange(0, BC)
    total = tl.zeros((BC,), tl.float32)
    for q in range(Q):
        code = tl.load(codes + (b * Q + q) * T + t)
        total += tl.load(table + (q * K + code) * C + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(out + b * out_batch + t * C + c, total.to(out.dtype.element_ty), mask=c < C)


@triton.jit(do_not_specialize=["T"])
def depthwise_norm(x, w, bias, gain, shift, out, x_batch, T, C, eps, TAPS: tl.constexpr, BC: tl.constexpr):
    """Depthwise convolution over the rows in front, then LayerNorm over the channels; one program for each sample."""
    b = (tl.program_id(0) // T).to(tl.int64)
    t = tl.program_id(0) % T
    c = tl.arange(0, BC)
    is_channel = c < C
    total = tl.load(bias + c, mask=is_channel, other=0.0)
    for tap in range(TAPS):
        value = tl.load(x + b * x_batch + (t + tap) * C + c, mask=is_channel, other=0.0).to(tl.float32)
        total += value * tl.load(w + tap * C + c, mask=is_channel, other=0.0)
    mean = tl.sum(total, axis=0) / C
    centred = tl.where(is_channel, total - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / C + eps)
    y = centred * scale * tl.load(gain + c, mask=is_channel, other=0.0) + tl.load(shift + c, mask=is_channel, other=0.0)
    tl.store(out + (b * T + t) * C + c, y.to(out.dtype.element_ty), mask=is_channel)


@triton.jit(do_not_specialize=["T"])
def attend(
    qkv,
    frames_kept,
    places,
    cos,
    sin,
    out,
    slot_stride,
    T,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    scale,
    PRECISION: tl.constexpr,
    BQ: tl.constexpr,
    BKEY: tl.constexpr,
):
    """Attention of new frames over the ring of W − 1 earlier ones and themselves, and the new keys and values into the ring.

    One program for each row and head, so that what it overwrites is read by nobody else. Keys lie there before their rotation;
    the key at place j of the window is turned by angle j, the query at place RING + i by that angle.

    ``frames_kept`` points at frame 0 of slot 0, at this layer's keys; ``places`` is [B, 2]: slot, and number of the first frame.
    """
    b = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    slot = tl.load(places + 2 * b)
    first = tl.load(places + 2 * b + 1)
    d = tl.arange(0, D)
    turned = (d + D // 2) % D
    sign = tl.where(d < D // 2, -1.0, 1.0)
    new = qkv + b * T * (3 * HEADS * D) + head * D  # row stride 3 · HEADS · D: queries, keys, values
    kept = frames_kept + slot * slot_stride + head * D
    ROW: tl.constexpr = 3 * HEADS * D
    for start in range(0, T, BQ):
        i = start + tl.arange(0, BQ)
        is_query = (i < T)[:, None]
        q = tl.load(new + i[:, None] * ROW + d[None, :], mask=is_query, other=0.0).to(tl.float32)
        q_turned = tl.load(new + i[:, None] * ROW + turned[None, :], mask=is_query, other=0.0).to(tl.float32)
        q_angle = (RING + i)[:, None] * D + d[None, :]
        q = q * tl.load(cos + q_angle, mask=is_query, other=0.0) + q_turned * sign[None, :] * tl.load(
            sin + q_angle, mask=is_query, other=0.0
        )
        q = (q * scale).to(qkv.dtype.element_ty)
        best = tl.full((BQ,), -1.0e30, tl.float32)
        weight = tl.zeros((BQ,), tl.float32)
        acc = tl.zeros((BQ, D), tl.float32)
        for key_start in range(start, start + BQ + RING, BKEY):  # a query at i sees the places i … i + RING
            j = key_start + tl.arange(0, BKEY)
            frame = first + j - RING
            is_kept = (j < RING) & (frame >= 0)
            is_new = (j >= RING) & (j < RING + T)
            page = kept + (((frame + RING) % RING) * PAGE)[:, None]
            fresh = new + (tl.maximum(j - RING, 0) * ROW + HEADS * D)[:, None]
            k = tl.load(page + d[None, :], mask=is_kept[:, None], other=0.0).to(tl.float32)
            k += tl.load(fresh + d[None, :], mask=is_new[:, None], other=0.0).to(tl.float32)
            k_turned = tl.load(page + turned[None, :], mask=is_kept[:, None], other=0.0).to(tl.float32)
            k_turned += tl.load(fresh + turned[None, :], mask=is_new[:, None], other=0.0).to(tl.float32)
            is_key = is_kept | is_new
            angle = j[:, None] * D + d[None, :]
            k = k * tl.load(cos + angle, mask=is_key[:, None], other=0.0)
            k += k_turned * sign[None, :] * tl.load(sin + angle, mask=is_key[:, None], other=0.0)
            v = tl.load(page + HEADS * D + d[None, :], mask=is_kept[:, None], other=0.0)
            v += tl.load(fresh + HEADS * D + d[None, :], mask=is_new[:, None], other=0.0)
            score = tl.dot(q, tl.trans(k.to(qkv.dtype.element_ty)), input_precision=PRECISION)
            distance = RING + i[:, None] - j[None, :]
            score = tl.where((distance >= 0) & (distance <= RING) & is_key[None, :], score, -1.0e30)
            higher = tl.maximum(best, tl.max(score, axis=1))
            p = tl.where(score <= -1.0e29, 0.0, tl.exp(score - higher[:, None]))
            shrink = tl.exp(best - higher)
            weight = weight * shrink + tl.sum(p, axis=1)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
            best = higher
        acc = acc / tl.where(weight > 0, weight, 1.0)[:, None]
        tl.store(out + (b * T + i)[:, None] * (HEADS * D) + head * D + d[None, :], acc.to(out.dtype.element_ty), mask=is_query)

    tl.debug_barrier()  # all reads of the ring come before the writes
    for begin in range(tl.maximum(T - RING, 0), T, BQ):
        frame_i = begin + tl.arange(0, BQ)
        is_frame = (frame_i < T)[:, None]
        into = kept + (((first + frame_i + RING) % RING) * PAGE)[:, None] + d[None, :]
        moved = new + frame_i[:, None] * ROW + HEADS * D + d[None, :]
        tl.store(into, tl.load(moved, mask=is_frame, other=0.0), mask=is_frame)
        tl.store(into + HEADS * D, tl.load(moved + HEADS * D, mask=is_frame, other=0.0), mask=is_frame)


@triton.jit(do_not_specialize=["T"])
def sum_taps(x, bias, out, T, left, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    """out[b, t] = clamp(Σ_tap x[b, t + tap, tap] + bias): a convolution to one channel, whose products are there for each sample and tap.

    A matrix product with one column would read its input once for each tap; so each sample is multiplied with all taps at once, and
    what belongs together is added here.
    """
    b = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = t < T
    total = tl.zeros((BLOCK,), tl.float32) + tl.load(bias)
    for tap in tl.static_range(TAPS):
        total += tl.load(x + (b * (T + left) + t + tap) * TAPS + tap, mask=mask, other=0.0)
    total = tl.maximum(total, -1.0, propagate_nan=tl.PropagateNan.ALL)  # a sample that is no number stays none
    tl.store(out + b * T + t, tl.minimum(total, 1.0, propagate_nan=tl.PropagateNan.ALL), mask=mask)


@triton.jit
def move_histories(arena, buffers, places, programs, layers, slot_stride, SAVE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy what all convolutions look back at: from the arena in front of each buffer, or (SAVE) from each buffer's end back.

    A stream that begins has zeros there.

    ``programs`` is int64 [P, 2]: layer, and the first of the BLOCK elements that a program copies. ``layers`` is int64 [L, 6]:
    place in the arena's row, channels C, samples S, new samples T, place in the buffers, and elements from one row to the next.
    The arena holds [C, S], a buffer [S + T, C].
    """
    program = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    layer = layers + tl.load(programs + 2 * program) * 6
    element = tl.load(programs + 2 * program + 1) + tl.arange(0, BLOCK)
    channels = tl.load(layer + 1)
    samples = tl.load(layer + 2)
    mask = element < channels * samples
    sample = element // channels
    channel = element % channels
    kept = arena + tl.load(places + 2 * b) * slot_stride + tl.load(layer) + channel * samples + sample
    buffer = buffers + tl.load(layer + 4) + b * tl.load(layer + 5) + element
    if SAVE:
        tl.store(kept, tl.load(buffer + tl.load(layer + 3) * channels, mask=mask), mask=mask)
    else:
        has_begun = tl.load(places + 2 * b + 1) != 0
        tl.store(buffer, tl.load(kept, mask=mask & has_begun, other=0.0), mask=mask)
