"""Checks of one chunk by itself, before anything is known of its request. What is wrong comes back in words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vgraph_lab.requests import ChunkRequest

from .geometry import DecoderGeometry
from .inputs import INTEGER_DTYPES, problem_with_values

__all__ = ["problem_with_chunk", "values_in_range"]


def problem_with_chunk(chunk: ChunkRequest, geometry: DecoderGeometry, device: torch.device) -> str | None:
    """What makes a chunk unacceptable whatever came before it (types, layout, shape, device), or None.

    Values are not looked at: see :func:`values_in_range`.
    """
    codes, q = chunk.codes, geometry.num_quantizers
    ref_frames: object = chunk.ref_frames  # callers may pass anything
    finished: object = chunk.finished
    if not isinstance(ref_frames, int) or isinstance(ref_frames, bool) or ref_frames < 0:
        return f"ref_frames must be a whole number from 0, got {ref_frames!r}."
    if not isinstance(finished, bool):
        return f"finished must be True or False, got {finished!r}."
    if not isinstance(codes, Tensor) or codes.is_nested or codes.layout is not torch.strided:
        return f"codes must be a dense tensor of integers [{q}, F], got {type(codes).__name__}. Try torch.as_tensor(codes)."
    if codes.dtype not in INTEGER_DTYPES:
        return f"codes must be integers (int64, int32, int16 or uint8), got {codes.dtype}. Codes are codebook indices."
    if codes.dim() != 2 or codes.shape[0] != q:
        hint = " These look like [F, 16]: try codes.T." if codes.dim() == 2 and codes.shape[1] == q else ""
        if codes.dim() == 3 and codes.shape[:2] == (1, q):
            hint = " Leave out the batch dimension: codes[0]."
        return f"codes must be [{q}, F] ({q} quantisers), got {list(codes.shape)}.{hint}"
    if codes.device.type != "cpu" and codes.device != device:
        return f"codes are on {codes.device}, the model is on {device}. Pass host codes or codes.to('{device}')."
    if codes.shape[1] == 0 and not chunk.finished:
        return "the chunk is empty. Send at least one frame, or finished=True to end the request."
    return None


def values_in_range(codes: Sequence[Tensor], geometry: DecoderGeometry, *, debug: bool) -> list[str | None]:
    """For each tensor of integer codes, what is wrong with its values, or None.

    Host codes are looked at together, one by one only if something is found. Device codes are looked at in debug mode, since
    it waits for the device.
    """
    looked_at = [c for c in codes if c.numel() and (debug or c.device.type == "cpu")]
    on_host = [c for c in looked_at if c.device.type == "cpu"]
    if len(on_host) == len(looked_at):
        together = torch.cat([c.reshape(-1) for c in on_host]) if on_host else None
        if together is None or problem_with_values(together, geometry) is None:
            return [None] * len(codes)
    return [problem_with_values(c, geometry) if any(c is x for x in looked_at) else None for c in codes]
