"""Whether a form of the incremental step is as exact as the plain one: both against double precision, shape by shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy

import torch
from torch import Tensor

from vgraph_lab.errors import FormError
from vgraph_lab.graphs.backends.rules import capture_conditions

from .decoder import Code2WavDecoder
from .incremental import plain_step
from .incremental_state import StateArena

__all__ = ["RunStep", "check_exact", "on_device"]

RunStep = Callable[[StateArena, Tensor, Tensor], Tensor]
"""A step: arena, codes, places → samples."""

_MOST_ERROR = 2.0  # times the plain form's; the two are two roundings of the same thing


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton and CUDA graphs take the current device, whatever their tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def check_exact(name: str, step: RunStep, decoder: Code2WavDecoder, batch: int, frames: int, *, slots: int | None = None) -> float:
    """Hold a prepared shape to the plain form: streams that begin, and streams whose windows are full.

    Args:
        name: of the form.
        step: what it runs.
        decoder: the decoder.
        batch: rows of the shape.
        frames: frames of the shape.
        slots: of the arenas, if compiled programs know that number; by default as many as rows.

    Returns:
        The largest ratio of its error to the plain form's, over samples and state, both against double precision.

    Raises:
        FormError: that is more than two roundings of one thing may differ, or not finite.
    """
    exact = deepcopy(decoder).double()
    exact.refresh_tables()
    begins = (0, 3 * decoder.geometry.sliding_window)
    ratios = [ratio for first in begins for ratio in _ratios(step, decoder, exact, batch, frames, first, slots or batch)]
    worst = max(ratios) if all(math.isfinite(ratio) for ratio in ratios) else math.inf
    if worst > _MOST_ERROR:
        raise FormError(
            f"with {batch} × {frames} frames the error of form {name!r} is {worst:.3g} times the plain form's, at most {_MOST_ERROR} "
            "is accepted"
        )
    return worst


def _ratios(
    step: RunStep, decoder: Code2WavDecoder, exact: Code2WavDecoder, batch: int, frames: int, first: int, size: int
) -> Iterator[float]:
    """Of samples and of state; the truth is computed for the first and the last row only."""
    draw = torch.Generator().manual_seed(frames)
    codes = torch.randint(0, decoder.geometry.codebook_size, (batch, decoder.geometry.num_quantizers, frames), generator=draw)
    codes, slots, seen = codes.to(decoder.device), torch.arange(batch).flip(0), sorted({0, batch - 1})
    begins = torch.zeros(batch, dtype=torch.int64) if first == 0 else first + torch.arange(batch)
    places = torch.stack((slots, begins), dim=1).to(decoder.device)
    arenas = [StateArena(decoder, size), StateArena(decoder, size), StateArena(exact, len(seen))]
    noise = torch.Generator(decoder.device).manual_seed(frames)  # the caller's random numbers stay as they are
    arenas[0].rows.normal_(std=0.3, generator=noise)
    arenas[1].rows.copy_(arenas[0].rows)
    arenas[2].rows[: len(seen)] = arenas[0].rows[slots[seen]].double()
    places_seen = torch.stack((torch.arange(len(seen)), begins[seen]), dim=1).to(decoder.device)
    with capture_conditions(), on_device(decoder.device):
        plain = plain_step(decoder, arenas[0], codes, places)[seen]
        other = step(arenas[1], codes, places)[seen]
        truth = plain_step(exact, arenas[2], codes[seen], places_seen)
    kept = [arena.rows[slots[seen]] for arena in arenas[:2]]
    for right, rounded, found in ((truth, plain, other), (arenas[2].rows[: len(seen)], *kept)):
        floor = torch.finfo(decoder.dtype).eps * _rms(right)
        errors = [_rms(values.double() - right) for values in (rounded, found)]
        yield errors[1] / max(errors[0], floor) if max(errors[0], floor) else 1.0 + errors[1]


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())
