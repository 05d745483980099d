"""The Routine of incremental decoding: codes and places in, samples out. Request state stays in the arena.

The graph itself gathers and scatters rows of the arena by slot, so one graph of a width serves requests at all positions,
with and without a reference behind them. A batch needs nothing in common but its width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from vgraph_lab.errors import FormError, InputError
from vgraph_lab.graphs.descriptor import Descriptor
from vgraph_lab.graphs.routine import Buffers, Resolution, Routine

from .decoder import Code2WavDecoder
from .incremental import begin_with_reference
from .incremental_forms import FormReport, PlainForm, StepForm
from .incremental_state import StateArena
from .inputs import validate_codes

__all__ = ["WITH_REFERENCE", "IncrementalRoutine"]

WITH_REFERENCE = "icl"  # Descriptor.state of first chunks behind a reference; empty for all other chunks
_PAD_CODE = 0

logger = logging.getLogger(__name__)


class IncrementalRoutine(Routine[Tensor]):
    """Steps of streams: ``(codes, places, has_reference, is_last)`` → float32 [B, n * samples_per_frame].

    * ``codes``: integers [B, Q, n]; with a reference, [B, Q, W + n], the reference left-padded to W frames.
    * ``places``: int64 [B, 2], on the host or the device: the slot of each row, and the frame number of its first column
      (minus the padding, with a reference). No slot may occur twice.
    * ``has_reference``: whether the rows begin with a reference.
    * ``is_last``: whether no row will be continued, so that its frames may be padded on the right.

    Widths are exact otherwise. A padded frame must not move a row's state on, and masking every write of every layer would
    cost each chunk; a chunk of another width is cut into captured ones by the caller, at no loss, since steps are exact.

    Args:
        decoder: the eager decoder.
        arena: the request state, written by every call.
        descriptors: the graphs that may exist; ``frames`` are the new ones.
        form: of the captured step, without a reference; by default the plain one, which everything else takes anyway.
        form_report: how it was chosen.
        debug: check the values of device tensors too.
    """

    def __init__(
        self,
        decoder: Code2WavDecoder,
        arena: StateArena,
        descriptors: Sequence[Descriptor],
        *,
        form: StepForm | None = None,
        form_report: FormReport | None = None,
        debug: bool = False,
    ) -> None:
        self.decoder, self.debug, self._arena = decoder, debug, arena
        self._plain = PlainForm(decoder)
        self._form, self._form_report = form or self._plain, form_report or FormReport("plain", "plain")
        self.not_in_form: dict[Descriptor, str] = {}  # captured in the plain form, with the reason
        self._device, self._samples_per_frame = decoder.device, decoder.samples_per_frame
        self._window = decoder.geometry.sliding_window
        by_work = sorted(descriptors, key=lambda d: (d.work, d.frames))

        @lru_cache(maxsize=4096)
        def covering(batch_size: int, frames: int, state: str, is_last: bool) -> Resolution:
            fitting = tuple(
                d
                for d in by_work
                if d.state == state and d.batch_size >= batch_size and (d.frames >= frames if is_last else d.frames == frames)
            )
            return Resolution(Descriptor(batch_size, frames, state), fitting)

        self._covering: Callable[[int, int, str, bool], Resolution] = covering

    def captured_modules(self) -> Iterable[nn.Module]:
        """Weights are read in place, request state is read and written."""
        return (self.decoder, self._arena, *self._form.modules())

    @property
    def form_report(self) -> FormReport:
        """Which form the graphs have; the plain one is named as soon as one of them has it, with the reason."""
        chosen, plain = self._chosen_form, self.not_in_form
        if not plain:
            return chosen
        descriptor, why = next(iter(plain.items()))
        return replace(chosen, form="plain", reason=f"{len(plain)} shapes have the plain form, {descriptor} because {why}")

    @property
    def _chosen_form(self) -> FormReport:
        """With the largest error of the shapes that were checked since."""
        return replace(self._form_report, error_ratio=self._form.error_ratio)

    def notes(self) -> list[str]:
        """Which form the graphs have, and why some have another one."""
        chosen = [] if self._form_report.asked == "plain" else [str(self._chosen_form)]
        others = [f"{descriptor} has the plain form: {why}" for descriptor, why in self.not_in_form.items()]
        return [*chosen, *self._form.notes(), *others]

    def validate_runtime_inputs(self, codes: Tensor, places: Tensor, has_reference: bool = False, is_last: bool = False) -> None:
        """Codes of at least one new frame, and a place for each row."""
        validate_codes(codes, self.decoder.geometry, device=self._device, debug=self.debug)
        if places.shape != (codes.shape[0], 2) or places.dtype is not torch.int64:
            raise InputError(
                f"places must be int64 [B, 2] (slot, first frame) for codes [B, Q, n], got {places.dtype} {list(places.shape)} and "
                f"{list(codes.shape)}."
            )
        if not places.is_cuda or self.debug:  # a kernel that is told of another slot writes into other memory
            slots, first = zip(*places.tolist(), strict=True)
            if min(slots) < 0 or max(slots) > self._arena.spare_slot:
                raise InputError(f"slots must be 0 … {self._arena.spare_slot}, got {min(slots)} to {max(slots)}.")
            if min(first) < (-self._window if has_reference else 0):
                raise InputError(
                    f"the first frame of a row must be 0 or more, got {min(first)}. Only the padding of a reference lies before."
                )
        if has_reference and codes.shape[2] <= self._window:
            raise InputError(
                f"codes with a reference must be [B, Q, {self._window} + n], n ≥ 1, got {list(codes.shape)}. Pad the reference on the left."
            )

    def resolve(self, codes: Tensor, places: Tensor, has_reference: bool = False, is_last: bool = False) -> Resolution:
        """Graphs for at least these rows and exactly these new frames (at least these, if nothing follows)."""
        return self._covering(codes.shape[0], self._new_frames(codes, has_reference), WITH_REFERENCE if has_reference else "", is_last)

    def _new_frames(self, codes: Tensor, has_reference: bool) -> int:
        return codes.shape[2] - self._window if has_reference else codes.shape[2]

    def make_descriptor(self, key: Descriptor) -> Descriptor:
        """Capture exactly the shape that came."""
        return key

    def allocate_buffers(self, descriptor: Descriptor) -> Buffers:
        """``inputs``, int64 in one piece, so that one copy brings them: places [B, 2], then codes [B, Q, columns]."""
        rows, columns = descriptor.batch_size, self._columns(descriptor)
        count = rows * (2 + self.decoder.geometry.num_quantizers * columns)
        return {"inputs": torch.zeros(count, dtype=torch.int64, device=self._device)}

    def _columns(self, descriptor: Descriptor) -> int:
        return descriptor.frames + (self._window if descriptor.state == WITH_REFERENCE else 0)

    def _parts(self, descriptor: Descriptor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and places in ``inputs``."""
        rows = descriptor.batch_size
        return inputs[2 * rows :].view(rows, -1, self._columns(descriptor)), inputs[: 2 * rows].view(rows, 2)

    def prepare_for_capture(self, descriptor: Descriptor, buffers: Buffers) -> None:
        """Let all rows work in the spare slot, so that no request's state moves."""
        self._get_form_ready(descriptor)
        self._fill(*self._parts(descriptor, buffers["inputs"]), None, None)

    def forward_for_capture(self, descriptor: Descriptor, buffers: Buffers) -> Tensor:
        """The form's mathematics on the static inputs and the arena's rows."""
        form = self._plain if descriptor in self.not_in_form else self._form
        return self._forward(form, *self._parts(descriptor, buffers["inputs"]), has_reference=descriptor.state == WITH_REFERENCE)

    def captures_are_over(self) -> None:
        """The form has been held to the plain one for all shapes that came."""
        self._form.checks_are_over()

    def _get_form_ready(self, descriptor: Descriptor) -> None:
        if descriptor.state == WITH_REFERENCE or descriptor in self.not_in_form:
            return
        try:
            self._form.prepare(self._arena, descriptor.batch_size, descriptor.frames)
        except FormError as error:
            logger.warning("%s is captured in the plain form: %s", descriptor, error)
            self.not_in_form[descriptor] = str(error)

    def _forward(self, form: StepForm, codes: Tensor, places: Tensor, *, has_reference: bool) -> Tensor:
        if not has_reference:
            return form.continue_stream(self._arena, codes, places)
        slots, first = places.unbind(1)
        new_frames = self._new_frames(codes, has_reference)
        return begin_with_reference(self.decoder, self._arena, codes, slots, first, new_frames=new_frames)[:, 0].float()

    def copy_runtime_inputs(
        self, descriptor: Descriptor, buffers: Buffers, codes: Tensor, places: Tensor, has_reference: bool = False, is_last: bool = False
    ) -> None:
        """One copy to the device. Rows that a call does not cover get the spare slot.

        Host inputs go through pinned memory: a copy from pageable memory waits once the driver has no room left to put it by. torch
        keeps pinned blocks, and hands one out again when its copy is done.
        """
        self._form.keep_up()
        inputs = buffers["inputs"]
        on_host = not codes.is_cuda and not places.is_cuda
        is_staged = inputs.is_cuda and on_host
        staged = torch.empty(inputs.shape, dtype=torch.int64, pin_memory=True) if is_staged else inputs
        is_exact = codes.shape[0] == descriptor.batch_size and codes.shape[2] == self._columns(descriptor)
        if is_exact and on_host and codes.dtype is torch.int64:  # what most calls are: one operation
            torch.cat((places.reshape(-1), codes.reshape(-1)), out=staged)
        else:
            self._fill(*self._parts(descriptor, staged), codes, places)
        if is_staged:
            inputs.copy_(staged, non_blocking=True)

    def _fill(self, all_codes: Tensor, all_places: Tensor, codes: Tensor | None, places: Tensor | None) -> None:
        """Write a call's inputs, and padding where they do not reach."""
        rows = 0
        if codes is None or places is None or codes.shape != all_codes.shape:
            all_codes.fill_(_PAD_CODE)
        if codes is not None and places is not None:
            rows, _, columns = codes.shape
            all_codes[:rows, :, :columns].copy_(codes, non_blocking=True)
            all_places[:rows].copy_(places, non_blocking=True)
        if rows < all_places.shape[0]:
            all_places[rows:, 0].fill_(self._arena.spare_slot)
            all_places[rows:, 1].fill_(0)

    def output_after_replay(
        self,
        descriptor: Descriptor,
        buffers: Buffers,
        output: Tensor,
        codes: Tensor,
        places: Tensor,
        has_reference: bool = False,
        is_last: bool = False,
    ) -> Tensor:
        """Cut padded rows and the samples of padded frames."""
        if codes.shape[0] == output.shape[0] and self._new_frames(codes, has_reference) == descriptor.frames:
            return output
        return output[: codes.shape[0], : self._new_frames(codes, has_reference) * self._samples_per_frame]

    def eager_call(self, codes: Tensor, places: Tensor, has_reference: bool = False, is_last: bool = False) -> Tensor:
        """The batched eager path."""
        self.validate_runtime_inputs(codes, places, has_reference)
        with torch.no_grad():
            codes, places = (t.to(self._device, torch.int64, non_blocking=True) for t in (codes, places))
            return self._forward(self._plain, codes, places, has_reference=has_reference)
