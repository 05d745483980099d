"""Checks of what callers pass to a decoder, before anything is copied or launched."""

from __future__ import annotations

import torch
from torch import Tensor

from vgraph_lab.errors import InputError
from vgraph_lab.graphs.backends import is_capturing

from .geometry import DecoderGeometry

__all__ = ["INTEGER_DTYPES", "problem_with_values", "validate_codes"]

INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)


def validate_codes(codes: Tensor, geometry: DecoderGeometry, *, device: torch.device | None = None, debug: bool = False) -> None:
    """Refuse codes that a decoder of this geometry cannot take.

    Values of host tensors are always checked. Values of device tensors are checked in debug mode only, because looking
    at them waits for the device. Inside a capture no values are looked at.

    Args:
        codes: expected integers [B, num_quantizers, T].
        geometry: the decoder's sizes.
        device: if given, the codes must be on this device or on the host.
        debug: check the values of device tensors too.

    Raises:
        InputError: with what came, what is accepted and what to try.
    """
    q, longest = geometry.num_quantizers, geometry.max_position_embeddings
    if not isinstance(codes, Tensor):
        raise InputError(f"codes must be a torch.Tensor of integers [B, {q}, T], got {type(codes).__name__}. Try torch.as_tensor(codes).")
    if codes.layout is not torch.strided or codes.is_nested:  # their shapes and values cannot be asked for below
        kind, way = ("nested", "torch.nested.to_padded_tensor(codes, 0)") if codes.is_nested else (str(codes.layout), "codes.to_dense()")
        raise InputError(f"codes must be a dense (strided) tensor of integers [B, {q}, T], got a {kind} one. Try {way}.")
    if codes.dtype not in INTEGER_DTYPES:
        raise InputError(
            f"codes must be integers (int64, int32, int16 or uint8), got {codes.dtype}. Codes are codebook indices, not features."
        )
    if codes.dim() != 3 or codes.shape[1] != q:
        raise InputError(f"codes must have the shape [B, {q}, T], got {list(codes.shape)}.{_shape_hint(codes, q)}")
    batch, _, frames = codes.shape
    if batch == 0 or frames == 0:
        raise InputError(
            f"codes have no {'rows' if batch == 0 else 'frames'} (shape {list(codes.shape)}). Accepted: at least one row of one frame."
        )
    if frames > longest:
        raise InputError(
            f"codes have {frames} frames, the decoder's max_position_embeddings is {longest}. "
            "Decode in windows (decode_chunk_frames) instead."
        )
    place = codes.device
    is_on_host = place.type == "cpu"
    if device is not None and not is_on_host and place != device:
        raise InputError(f"codes are on {place}, the decoder is on {device}. Pass host codes or codes.to('{device}').")
    problem = problem_with_values(codes, geometry) if (is_on_host or debug) and not is_capturing() else None
    if problem:
        raise InputError(problem)


def problem_with_values(codes: Tensor, geometry: DecoderGeometry) -> str | None:
    """What is wrong with the values of integer codes of any shape, or None. Waits for the device of codes that are on one."""
    low, high = (int(v) for v in torch.aminmax(codes))
    if low >= 0 and high < geometry.codebook_size:
        return None
    return (
        f"codes must be in [0, {geometry.codebook_size - 1}] (codebook_size {geometry.codebook_size}), got values from {low} to {high}. "
        "Remove padding and end-of-speech tokens before decoding."
    )


def _shape_hint(codes: Tensor, q: int) -> str:
    if codes.dim() == 2 and codes.shape[0] == q:
        return " For one utterance try codes[None]."
    if codes.dim() == 2 and codes.shape[1] == q:
        return " These look like [T, 16]: try codes.T[None]."
    if codes.dim() == 3 and codes.shape[2] == q:
        return " These look like [B, T, 16]: try codes.transpose(1, 2)."
    return ""
