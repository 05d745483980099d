"""Whether a form of the incremental step is as exact as the plain one: both against double precision, shape by shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy

import torch
from torch import Tensor

from vgraph_lab.errors import FormError
from vgraph_lab.graphs.backends.rules import capture_conditions

from .decoder import Code2WavDecoder
from .incremental import plain_step
from .incremental_state import StateArena

__all__ = ["ExactTwin", "RunStep", "check_exact", "on_device"]

RunStep = Callable[[StateArena, Tensor, Tensor], Tensor]
"""A step: arena, codes, places → samples."""

_MOST_ERROR = 2.0  # times the plain form's; the two are two roundings of the same thing


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton and CUDA graphs take the current device, whatever their tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class ExactTwin:
    """A decoder in double precision, the truth of its forms.

    It takes four times the memory of half precision: it is made when it is first asked for, and whoever has it gives it up once the
    checks are through. It is made again if the decoder's tensors were written since.

    Args:
        decoder: the decoder.
    """

    def __init__(self, decoder: Code2WavDecoder) -> None:
        self.decoder = decoder
        self._twin: Code2WavDecoder | None = None
        self._made_from: list[tuple[int, int]] | None = None

    def get(self) -> Code2WavDecoder:
        """The twin of the decoder as it is now."""
        written = self._written()
        twin = self._twin
        if twin is None or written is None or written != self._made_from:
            self._twin = twin = None  # there are never two
            twin = deepcopy(self.decoder).double()
            twin.refresh_tables()
            self._twin, self._made_from = twin, written
        return twin

    def give_up(self) -> None:
        """Let go of its memory. A check that is under way keeps it until it is through."""
        self._twin = None

    def _written(self) -> list[tuple[int, int]] | None:
        """Where the decoder's tensors lie, and how often each was written; None where torch does not count that (inference mode)."""
        tensors = [*self.decoder.parameters(), *self.decoder.buffers()]
        if any(t.is_inference() for t in tensors):
            return None
        return [(self.decoder.revision, 0), *((t.data_ptr(), t._version) for t in tensors)]


def check_exact(name: str, step: RunStep, exact: ExactTwin, batch: int, frames: int, *, slots: int | None = None) -> float:
    """Hold a prepared shape to the plain form: streams that begin, and streams whose windows are full.

    Samples, the history of each convolution, and keys and values of each frame are judged by themselves: what is small, or wrong in
    one place, is not lost in the sum of all. Of a batch, the first, the middle and the last row are judged; rows of the arena that the
    step was not given must stay as they were, to the last bit.

    Args:
        name: of the form.
        step: what it runs.
        exact: of the decoder.
        batch: rows of the shape.
        frames: frames of the shape.
        slots: of the arenas, if compiled programs know that number; by default as many as rows.

    Returns:
        The largest ratio of its error to the plain form's, both against double precision.

    Raises:
        FormError: that is more than two roundings of one thing may differ, or not finite; it names what is wrong, and when.
    """
    decoder, twin = exact.decoder, exact.get()
    begins = {"streams that begin": 0, "streams with full windows": 3 * decoder.geometry.sliding_window}
    ratios = {
        f"{quantity} of {streams}": ratio
        for streams, first in begins.items()
        for quantity, ratio in _ratios(step, decoder, twin, batch, frames, first, slots or batch).items()
    }
    wrong = [f"{ratio:.3g} times in {where}" for where, ratio in ratios.items() if ratio > _MOST_ERROR]
    if wrong:
        raise FormError(
            f"with {batch} × {frames} frames the error of form {name!r} is more than {_MOST_ERROR} times the plain form's: "
            f"{', '.join(wrong)}"
        )
    return max(ratios.values())


def _ratios(
    step: RunStep, decoder: Code2WavDecoder, twin: Code2WavDecoder, batch: int, frames: int, first: int, size: int
) -> dict[str, float]:
    """By quantity; the truth is computed for three rows at most."""
    draw = torch.Generator().manual_seed(frames)
    codes = torch.randint(0, decoder.geometry.codebook_size, (batch, decoder.geometry.num_quantizers, frames), generator=draw)
    codes, slots, seen = codes.to(decoder.device), torch.arange(batch).flip(0), sorted({0, batch // 2, batch - 1})
    begins = torch.zeros(batch, dtype=torch.int64) if first == 0 else first + torch.arange(batch)
    places = torch.stack((slots, begins), dim=1).to(decoder.device)
    arenas = [StateArena(decoder, size), StateArena(decoder, size), StateArena(twin, len(seen))]
    noise = torch.Generator(decoder.device).manual_seed(frames)  # the caller's random numbers stay as they are
    arenas[0].rows.normal_(std=0.3, generator=noise)
    arenas[1].rows.copy_(arenas[0].rows)
    arenas[2].rows[: len(seen)] = arenas[0].rows[slots[seen]].double()
    places_seen = torch.stack((torch.arange(len(seen)), begins[seen]), dim=1).to(decoder.device)
    with capture_conditions(), on_device(decoder.device):
        plain = plain_step(decoder, arenas[0], codes, places)[seen]
        other = step(arenas[1], codes, places)[seen]
        truth = plain_step(twin, arenas[2], codes[seen], places_seen)
    others = slice(batch, None)  # slots that were not named, and the spare one
    if not torch.equal(arenas[1].rows[others].view(torch.uint8), arenas[0].rows[others].view(torch.uint8)):
        raise FormError(f"with {batch} × {frames} frames it wrote into rows of streams that it was not given")
    judged = slots[seen].tolist()
    rounded, found = _parts(plain, arenas[0], judged), _parts(other, arenas[1], judged)
    right, eps = _parts(truth, arenas[2], range(len(seen))), torch.finfo(decoder.dtype).eps
    return {quantity: _worst(right[quantity], rounded[quantity], found[quantity], eps) for quantity in right}


def _parts(samples: Tensor, arena: StateArena, slots: Sequence[int]) -> dict[str, list[Tensor]]:
    """What a step has made, by quantity: tensors [rows, parts, numbers]."""
    histories, ring = arena.parts_of(slots)
    return {
        "samples": [samples[:, None]],
        "convolution histories": [history[:, None] for history in histories],
        "keys and values": [ring],
    }


def _worst(right: Sequence[Tensor], rounded: Sequence[Tensor], found: Sequence[Tensor], eps: float) -> float:
    """The largest error of a part over the plain form's, or over one rounding where that one happens to be smaller."""
    ratios = []
    for truth, plain, other in zip(right, rounded, found, strict=True):
        error = _rms(other - truth)
        allowed = torch.maximum(_rms(plain - truth), eps * _rms(truth))
        ratios.append(torch.where(error == 0, 0.0, error / allowed))
    worst = float(torch.cat(ratios).max())
    return worst if math.isfinite(worst) else math.inf


def _rms(parts: Tensor) -> Tensor:
    return parts.double().square().mean((0, 2)).sqrt()
