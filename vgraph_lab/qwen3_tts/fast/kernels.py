"""Triton kernels of the fast form between its matrix products. Importing this module needs Triton; calling them needs a GPU, or
TRITON_INTERPRET=1.

All activations are channels-last: [rows, time, channels]. What looks back has its earlier samples in front, in the same buffer.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["attend", "depthwise_norm", "embed", "move_histories", "sum_taps", "take_turn"]


@triton.jit
def take_turn(EARLY: tl.constexpr):
    """With EARLY (programmatic dependent launch): wait for the kernel before, then let the next one's programs start.

    What a kernel does ahead of this call overlaps with the one before it, so it may touch constants only. The other way round, waiting
    programs of several kernels to come would crowd out the one at work.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["T"])
def embed(codes, table, out, out_batch, T, K, C: tl.constexpr, Q: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr = False):
    """out[b, t] = Σ_q table[q, codes[b, q, t]]; one program for each frame."""
    take_turn(EARLY)
    b = (tl.program_id(0) // T).to(tl.int64)
    t = tl.program_id(0) % T
    c = tl.arange(0, BC)
    total = tl.zeros((BC,), tl.float32)
    for q in range(Q):
        code = tl.load(codes + (b * Q + q) * T + t)
        total += tl.load(table + (q * K + code) * C + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(out + b * out_batch + t * C + c, total.to(out.dtype.element_ty), mask=c < C)


@triton.jit(do_not_specialize=["T"])
def depthwise_norm(x, w, bias, gain, shift, out, x_batch, T, C, eps, TAPS: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr = False):
    """Depthwise convolution over the rows in front, then LayerNorm over the channels; one program for each sample."""
    take_turn(EARLY)
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
    EARLY: tl.constexpr = False,
):
    """Attention of new frames over the ring of W − 1 earlier ones and themselves, and the new keys and values into the ring.

    One program for each row and head, so that what it overwrites is read by nobody else. Keys lie there before their rotation;
    the key at place j of the window is turned by angle j, the query at place RING + i by that angle.

    ``frames_kept`` points at frame 0 of slot 0, at this layer's keys; ``places`` is [B, 2]: slot, and number of the first frame.
    """
    take_turn(EARLY)
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
def sum_taps(x, bias, out, T, left, TAPS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False):
    """out[b, t] = clamp(Σ_tap x[b, t + tap, tap] + bias): a convolution to one channel, whose products are there for each sample and tap.

    A matrix product with one column would read its input once for each tap; so each sample is multiplied with all taps at once, and
    what belongs together is added here.
    """
    take_turn(EARLY)
    b = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = t < T
    total = tl.zeros((BLOCK,), tl.float32) + tl.load(bias)
    for tap in tl.static_range(TAPS):
        total += tl.load(x + (b * (T + left) + t + tap) * TAPS + tap, mask=mask, other=0.0)
    total = tl.maximum(total, -1.0, propagate_nan=tl.PropagateNan.ALL)  # a sample that is no number stays none
    tl.store(out + b * T + t, tl.minimum(total, 1.0, propagate_nan=tl.PropagateNan.ALL), mask=mask)


@triton.jit
def move_histories(
    arena, buffers, places, programs, layers, slot_stride, SAVE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = False
):
    """Copy what all convolutions look back at: from the arena in front of each buffer, or (SAVE) from each buffer's end back.

    A stream that begins has zeros there.

    ``programs`` is int64 [P, 2]: layer, and the first of the BLOCK elements that a program copies. ``layers`` is int64 [L, 6]:
    place in the arena's row, channels C, samples S, new samples T, place in the buffers, and elements from one row to the next.
    The arena holds [C, S], a buffer [S + T, C].
    """
    take_turn(EARLY)
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
