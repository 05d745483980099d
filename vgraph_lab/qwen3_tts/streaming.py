"""Streaming decode: what a request carries from chunk to chunk, and the two steps that use it.

A request may begin with reference frames (in-context learning, ``icl``) or without (x-vector, ``xvec``). Its reference
is run once (:func:`run_prefix`); every chunk of new frames, the first one included, is one :func:`suffix_step`::

    keys seen     [ prefix keys and values, kept | kept frames, run again | new frames ]
    hidden        [        last 12 of all of them       | new ]  ──render──▶  new samples

The kept frames are run again on every chunk, with a copy of the prefix's keys and values. Once W of them have come, the
window rolls: the two oldest lose their convolution context and get the end of the prefix in its place.

Both steps take batches of requests in the same state and launch the same operations for every batch of one shape, so
eager and graphs share them. Source of the algorithm: the segmented Code2Wav path of vLLM-Omni for Qwen3-TTS; the
golden streams under ``tests/data`` were made with it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .decoder import Code2WavDecoder
from .transformer import KeyValue, sliding_window_mask

__all__ = ["CONV_CONTEXT_FRAMES", "RENDER_CONTEXT_FRAMES", "PrefixState", "SuffixState", "run_prefix", "suffix_step"]

CONV_CONTEXT_FRAMES = 2  # what pre_conv (kernel 3) reads before a frame
RENDER_CONTEXT_FRAMES = 12  # hidden frames before a chunk that its samples depend on; the receptive field is below 10


class PrefixState(NamedTuple):
    """What a reference leaves behind. Constant for the life of a request.

    Attributes:
        keys_values: [B, layers, 2, kv_heads, P, head_dim]; P counts padding.
        quantized_tail: last two quantised frames [B, codebook_dim, 2].
        hidden_tail: last hidden frames [B, latent_dim, min(P, 12)], zero where they are padding.
        pad_frames: how many of the P frames are padding, on the left; int64 [B].
    """

    keys_values: Tensor
    quantized_tail: Tensor
    hidden_tail: Tensor
    pad_frames: Tensor


class SuffixState(NamedTuple):
    """What the new frames so far leave behind; replaced by every step.

    Attributes:
        quantized: last min(frames, W) quantised frames [B, codebook_dim, ·].
        conv: last min(frames, W − 2) outputs of pre_conv [B, ·, latent_dim].
    """

    quantized: Tensor
    conv: Tensor


def run_prefix(decoder: Code2WavDecoder, codes: Tensor, pad_frames: Tensor) -> PrefixState:
    """Run references of one physical length.

    Args:
        decoder: the decoder.
        codes: int64 [B, num_quantizers, P], P ≥ 2, left-padded with any valid code.
        pad_frames: int64 [B], frames of padding in each row, less than P.
    """
    frames = codes.shape[-1]
    positions = torch.arange(frames, device=codes.device)
    is_real = positions >= pad_frames[:, None]  # [B, P]
    quantized = decoder.quantize(codes) * is_real[:, None]
    window = sliding_window_mask(positions, positions, decoder.geometry.sliding_window)
    # Padded queries see themselves, so that no row of the softmax is empty; what comes of them is zeroed below.
    mask = (window & is_real[:, None]) | torch.eye(frames, dtype=torch.bool, device=codes.device)
    hidden, caches = decoder.pre_transformer(decoder.pre_conv(quantized).transpose(1, 2), mask=mask[:, None])
    hidden = (hidden * is_real[..., None]).transpose(1, 2)
    return PrefixState(
        keys_values=torch.stack([torch.stack(cache, dim=1) for cache in caches], dim=1),
        quantized_tail=quantized[..., -CONV_CONTEXT_FRAMES:],
        hidden_tail=hidden[..., -RENDER_CONTEXT_FRAMES:],
        pad_frames=pad_frames,
    )


def suffix_step(
    decoder: Code2WavDecoder, codes: Tensor, *, prefix: PrefixState | None, suffix: SuffixState | None
) -> tuple[Tensor, SuffixState]:
    """Decode one chunk of new frames for requests in one state.

    Args:
        decoder: the decoder.
        codes: the new frames, int64 [B, num_quantizers, n]; frames beyond a request's own are padding on the right.
        prefix: the references, or None for requests without.
        suffix: the frames kept so far, or None on the first chunk. W of them make the window roll.

    Returns:
        Waveform of the new frames [B, 1, n * samples_per_frame], and the next state (right only without padding).
    """
    window = decoder.geometry.sliding_window
    new = decoder.quantize(codes)
    kept = new[..., :0] if suffix is None else suffix.quantized
    tail = new[..., :0] if prefix is None else prefix.quantized_tail
    conv = _convolve_after(decoder, torch.cat((tail, kept), dim=-1)[..., -CONV_CONTEXT_FRAMES:], new)
    if suffix is not None:
        pieces = [suffix.conv, conv]
        if kept.shape[-1] >= window:
            pieces.insert(0, _convolve_after(decoder, tail, kept[..., :CONV_CONTEXT_FRAMES]))
        conv = torch.cat(pieces, dim=1)

    hidden = _run_suffix(decoder, conv, prefix)
    if prefix is not None:
        hidden = torch.cat((prefix.hidden_tail, hidden), dim=-1)
    frames = new.shape[-1]
    waveform = decoder.render(hidden[..., -(frames + RENDER_CONTEXT_FRAMES) :])[..., -frames * decoder.samples_per_frame :]
    quantized = torch.cat((kept, new), dim=-1)[..., -window:]
    return waveform, SuffixState(quantized, conv[:, -(window - CONV_CONTEXT_FRAMES) :])


def _convolve_after(decoder: Code2WavDecoder, context: Tensor, frames: Tensor) -> Tensor:
    """pre_conv of ``frames`` with what came before them; [B, C, ·] → [B, frames, latent_dim]."""
    out: Tensor = decoder.pre_conv(torch.cat((context, frames), dim=-1))
    return out.transpose(1, 2)[:, context.shape[-1] :]


def _run_suffix(decoder: Code2WavDecoder, conv: Tensor, prefix: PrefixState | None) -> Tensor:
    """The transformer over kept and new frames behind the prefix's keys; [B, S, latent_dim] → [B, latent_dim, S]."""
    past_frames = 0 if prefix is None else prefix.keys_values.shape[4]
    keys = torch.arange(past_frames + conv.shape[1], device=conv.device)
    mask = sliding_window_mask(keys[past_frames:], keys, decoder.geometry.sliding_window)
    past = None
    if prefix is not None:
        mask = (mask & (keys >= prefix.pad_frames[:, None])[:, None])[:, None]  # [B, 1, S, P + S]
        past = [KeyValue(*layer.unbind(1)) for layer in prefix.keys_values.unbind(1)]
    hidden: Tensor = decoder.pre_transformer(conv, first_position=past_frames, mask=mask, past=past)[0]
    return hidden.transpose(1, 2)
