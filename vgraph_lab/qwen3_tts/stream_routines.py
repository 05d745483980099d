"""The three streaming Routines: first chunks with and without a reference, and every later chunk.

All copy in host or device integers only (codes, padding, slots). Request state is read by the graph itself, from rows of
the :class:`StateTable`, and comes back as part of the output; writing it is the model's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vgraph_lab.errors import FallbackReason, InputError
from vgraph_lab.graphs.descriptor import Descriptor
from vgraph_lab.graphs.routine import Buffers, Resolution, Routine

from .decoder import Code2WavDecoder
from .inputs import validate_codes
from .state_table import StateTable
from .streaming import PrefixState, SuffixState, run_prefix, suffix_step
from .transitions import TransitionTable

__all__ = ["IclPrefixRoutine", "Mode", "OwnState", "StreamOutput", "SuffixDescriptor", "SuffixRoutine", "XvecPrefixRoutine"]

Mode = Literal["icl", "xvec"]
PAD_CODE = 0


class StreamOutput(NamedTuple):
    """What one step returns, as one structure.

    Attributes:
        waveform: float32 [B, n * samples_per_frame], the new samples.
        prefix: what the references leave behind; None unless the step ran them.
        suffix: the next state, rows as the state table packs them; right only for rows whose frames were not padded.
    """

    waveform: Tensor
    prefix: PrefixState | None
    suffix: Tensor


class OwnState(NamedTuple):
    """State of one request whose reference is longer than W and has no row in the table."""

    prefix: PrefixState
    suffix: SuffixState


@dataclass(frozen=True, slots=True)
class SuffixDescriptor(Descriptor):
    """Shape key of a suffix step: ``frames`` is the target, ``state`` the mode.

    Attributes:
        source: suffix frames before the step, W for all states from W on.
    """

    source: int = 0

    def __str__(self) -> str:
        return f"B{self.batch_size}·{self.state} {self.source}→{self.frames}"


class _StreamRoutine(Routine[StreamOutput]):
    """What the three have in common: integer inputs by name, padded to the graph's shape and copied in.

    Rows that a call does not cover hold valid integers of their own and reach no other row. Frames that it does not cover
    are on the right, behind all real ones, and every step is causal.
    """

    def __init__(self, decoder: Code2WavDecoder, table: StateTable, *, debug: bool = False) -> None:
        self.decoder, self.debug, self._table = decoder, debug, table
        self._device, self._samples_per_frame = decoder.device, decoder.samples_per_frame
        self._window = decoder.geometry.sliding_window

    def captured_modules(self) -> Iterable[nn.Module]:
        """The decoder's weights are read in place."""
        return (self.decoder,)

    def _check_codes(self, name: str, codes: Tensor) -> None:
        try:
            validate_codes(codes, self.decoder.geometry, device=self._device, debug=self.debug)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self._device)

    def _code_buffer(self, batch_size: int, frames: int) -> Tensor:
        return self._zeros(batch_size, self.decoder.geometry.num_quantizers, frames)

    def prepare_for_capture(self, descriptor: Descriptor, buffers: Buffers) -> None:
        """Fill the buffers with what padded rows hold."""
        for name, buffer in buffers.items():
            buffer.fill_(self._fill(name))

    def _fill(self, name: str) -> int:
        return PAD_CODE

    def _copy(self, buffers: Buffers, inputs: Mapping[str, Tensor]) -> None:
        """One copy per input. Padding is added before it, where the input is; on the host that costs no launch."""
        for name, given in inputs.items():
            buffer = buffers[name]
            if given.shape != buffer.shape:
                missing = [n for have, want in zip(reversed(given.shape), reversed(buffer.shape), strict=True) for n in (0, want - have)]
                given = F.pad(given, missing, value=self._fill(name))
            buffer.copy_(given, non_blocking=True)

    def output_after_replay(
        self, descriptor: Descriptor, buffers: Buffers, output: StreamOutput, codes: Tensor, *args: Any, **kwargs: Any
    ) -> StreamOutput:
        """Cut padded rows and the samples of padded frames."""
        return self._cut(output, codes.shape[0], codes.shape[-1] * self._samples_per_frame, output.waveform.shape)

    def _cut(self, output: StreamOutput, rows: int, samples: int, static: Sequence[int]) -> StreamOutput:
        waveform, prefix, suffix = output
        if samples != static[1]:
            waveform = waveform[:, :samples]
        if rows != static[0]:
            waveform = waveform[:rows]
            prefix = prefix and PrefixState(*(t[:rows] for t in prefix))
            suffix = suffix[:rows]
        return StreamOutput(waveform, prefix, suffix)

    def _to_device(self, value: Tensor) -> Tensor:
        return value.to(self._device, torch.int64, non_blocking=True)

    def _decode(self, codes: Tensor, prefix: PrefixState | None, suffix: SuffixState | None) -> tuple[Tensor, Tensor]:
        waveform, after = suffix_step(self.decoder, codes, prefix=prefix, suffix=suffix)
        return waveform[:, 0].float(), self._table.packed(after)


class _FirstChunkRoutine(_StreamRoutine):
    """Resolution of first chunks: by rows and new frames."""

    def __init__(self, decoder: Code2WavDecoder, table: StateTable, descriptors: Sequence[Descriptor], *, debug: bool = False) -> None:
        super().__init__(decoder, table, debug=debug)
        by_work = sorted(descriptors, key=lambda d: (d.work, d.frames))

        @lru_cache(maxsize=4096)
        def covering(batch_size: int, frames: int, is_last: bool) -> Resolution:
            fitting = tuple(d for d in by_work if d.batch_size >= batch_size and (d.frames >= frames if is_last else d.frames == frames))
            return Resolution(Descriptor(batch_size, frames), fitting)

        self._covering: Callable[[int, int, bool], Resolution] = covering

    def make_descriptor(self, key: Descriptor) -> Descriptor | None:
        """Capture exactly the shape that came, unless its reference is too long."""
        return None if key.state else key


class IclPrefixRoutine(_FirstChunkRoutine):
    """First chunks behind a reference: ``(codes [B, Q, n], reference [B, Q, P], pad_frames [B], is_last)``.

    Graphs take references of W physical frames; ``pad_frames`` says how many of them, on the left, are padding.
    """

    def validate_runtime_inputs(self, codes: Tensor, reference: Tensor, pad_frames: Tensor, is_last: bool = False) -> None:
        """Codes and reference of as many rows, padding within the reference."""
        self._check_codes("codes", codes)
        self._check_codes("reference", reference)
        if reference.shape[0] != codes.shape[0] or pad_frames.shape != codes.shape[:1] or reference.shape[-1] < 2:
            raise InputError(
                "reference must be [B, Q, P ≥ 2] and pad_frames [B] for codes [B, Q, n], got "
                f"{list(reference.shape)}, {list(pad_frames.shape)} and {list(codes.shape)}."
            )

    def resolve(self, codes: Tensor, reference: Tensor, pad_frames: Tensor, is_last: bool = False) -> Resolution:
        """Graphs for at least these rows and exactly these frames (at least these, if nothing follows)."""
        if reference.shape[-1] != self._window:
            return Resolution(Descriptor(codes.shape[0], codes.shape[-1], "long reference"), (), FallbackReason.STATE_NOT_COVERED)
        return self._covering(codes.shape[0], codes.shape[-1], is_last)

    def allocate_buffers(self, descriptor: Descriptor) -> Buffers:
        """``codes`` [B, Q, n], ``reference`` [B, Q, W], ``pad_frames`` [B]; int64."""
        rows = descriptor.batch_size
        return {
            "codes": self._code_buffer(rows, descriptor.frames),
            "reference": self._code_buffer(rows, self._window),
            "pad_frames": self._zeros(rows),
        }

    def forward_for_capture(self, descriptor: Descriptor, buffers: Buffers) -> StreamOutput:
        """The eager mathematics on the static inputs."""
        return self._forward(buffers["codes"], buffers["reference"], buffers["pad_frames"])

    def _forward(self, codes: Tensor, reference: Tensor, pad_frames: Tensor) -> StreamOutput:
        prefix = run_prefix(self.decoder, reference, pad_frames)
        waveform, suffix = self._decode(codes, prefix, None)
        return StreamOutput(waveform, prefix, suffix)

    def copy_runtime_inputs(
        self, descriptor: Descriptor, buffers: Buffers, codes: Tensor, reference: Tensor, pad_frames: Tensor, is_last: bool = False
    ) -> None:
        """Padded rows have a reference without padding."""
        self._copy(buffers, {"codes": codes, "reference": reference, "pad_frames": pad_frames})

    def eager_call(self, codes: Tensor, reference: Tensor, pad_frames: Tensor, is_last: bool = False) -> StreamOutput:
        """The batched eager path."""
        self.validate_runtime_inputs(codes, reference, pad_frames)
        with torch.no_grad():
            return self._forward(*(self._to_device(t) for t in (codes, reference, pad_frames)))


class XvecPrefixRoutine(_FirstChunkRoutine):
    """First chunks without a reference: ``(codes [B, Q, n], is_last)``."""

    def validate_runtime_inputs(self, codes: Tensor, is_last: bool = False) -> None:
        """Codes [B, Q, n]."""
        self._check_codes("codes", codes)

    def resolve(self, codes: Tensor, is_last: bool = False) -> Resolution:
        """Graphs for at least these rows and exactly these frames (at least these, if nothing follows)."""
        return self._covering(codes.shape[0], codes.shape[-1], is_last)

    def allocate_buffers(self, descriptor: Descriptor) -> Buffers:
        """``codes``: int64 [B, Q, n]."""
        return {"codes": self._code_buffer(descriptor.batch_size, descriptor.frames)}

    def forward_for_capture(self, descriptor: Descriptor, buffers: Buffers) -> StreamOutput:
        """The eager mathematics on the static codes."""
        return self._forward(buffers["codes"])

    def _forward(self, codes: Tensor) -> StreamOutput:
        waveform, suffix = self._decode(codes, None, None)
        return StreamOutput(waveform, None, suffix)

    def copy_runtime_inputs(self, descriptor: Descriptor, buffers: Buffers, codes: Tensor, is_last: bool = False) -> None:
        """Codes only."""
        self._copy(buffers, {"codes": codes})

    def eager_call(self, codes: Tensor, is_last: bool = False) -> StreamOutput:
        """The batched eager path."""
        self.validate_runtime_inputs(codes)
        with torch.no_grad():
            return self._forward(self._to_device(codes))


class SuffixRoutine(_StreamRoutine):
    """Later chunks: ``(codes [B, Q, n], state, mode, kept_frames, is_last)``.

    ``state`` is int64 [B] slots of the table, or the :class:`OwnState` of one request. All rows of a call have the same
    ``mode`` and as many kept frames (W stands for all from W on). ``is_last`` says that no row will be continued, so that
    its frames may be padded on the right.

    Args:
        decoder: the eager decoder.
        table: the request state.
        transitions: the schedule, to tell an unknown state from an unknown shape.
        descriptors: the graphs that may exist.
        debug: check the values of device tensors too.
    """

    def __init__(
        self,
        decoder: Code2WavDecoder,
        table: StateTable,
        transitions: TransitionTable,
        descriptors: Sequence[SuffixDescriptor],
        *,
        debug: bool = False,
    ) -> None:
        super().__init__(decoder, table, debug=debug)
        by_work = sorted(descriptors, key=lambda d: (d.work, d.frames))

        @lru_cache(maxsize=4096)
        def covering(batch_size: int, frames: int, mode: Mode, kept: int, is_last: bool) -> Resolution:
            target = kept + frames
            fitting = tuple(
                d
                for d in by_work
                if (d.state, d.source) == (mode, kept)
                and d.batch_size >= batch_size
                and (d.frames >= target if is_last else d.frames == target)
            )
            is_known = transitions.after(kept) is not None
            reason = FallbackReason.SHAPE_NOT_COVERED if is_known else FallbackReason.STATE_NOT_COVERED
            return Resolution(SuffixDescriptor(batch_size, target, mode, kept), fitting, reason)

        self._covering: Callable[[int, int, Mode, int, bool], Resolution] = covering

    def captured_modules(self) -> Iterable[nn.Module]:
        """Weights and request state are read in place."""
        return (self.decoder, self._table)

    def validate_runtime_inputs(self, codes: Tensor, state: Tensor | OwnState, mode: Mode, kept_frames: int, is_last: bool = False) -> None:
        """Codes [B, Q, n] with a slot for each row."""
        self._check_codes("codes", codes)
        if isinstance(state, Tensor) and state.shape != codes.shape[:1]:
            raise InputError(f"slots must be [B] for codes [B, Q, n], got {list(state.shape)} and {list(codes.shape)}.")
        if not 1 <= kept_frames <= self._window:
            raise InputError(f"kept_frames must be in 1 … {self._window} (W), got {kept_frames}.")

    def resolve(self, codes: Tensor, state: Tensor | OwnState, mode: Mode, kept_frames: int, is_last: bool = False) -> Resolution:
        """Graphs for at least these rows and exactly this transition (at least its frames, if nothing follows)."""
        rows, _, frames = codes.shape
        if isinstance(state, OwnState):
            key = SuffixDescriptor(rows, kept_frames + frames, "icl, long reference", kept_frames)
            return Resolution(key, (), FallbackReason.STATE_NOT_COVERED)
        return self._covering(rows, frames, mode, kept_frames, is_last)

    def make_descriptor(self, key: Descriptor) -> Descriptor | None:
        """Capture the step that came, unless its state has no row in the table."""
        return key if key.state in ("icl", "xvec") else None

    def allocate_buffers(self, descriptor: Descriptor) -> Buffers:
        """``codes`` [B, Q, n] and ``slots`` [B]; int64."""
        assert isinstance(descriptor, SuffixDescriptor)
        new_frames = descriptor.frames - descriptor.source
        return {"codes": self._code_buffer(descriptor.batch_size, new_frames), "slots": self._zeros(descriptor.batch_size)}

    def _fill(self, name: str) -> int:
        return self._table.spare_slot if name == "slots" else PAD_CODE

    def forward_for_capture(self, descriptor: Descriptor, buffers: Buffers) -> StreamOutput:
        """The eager mathematics on the static inputs and the table's rows."""
        assert isinstance(descriptor, SuffixDescriptor)
        return self._forward(buffers["codes"], buffers["slots"], has_prefix=descriptor.state == "icl", kept_frames=descriptor.source)

    def _forward(self, codes: Tensor, slots: Tensor, *, has_prefix: bool, kept_frames: int) -> StreamOutput:
        prefix = self._table.prefix(slots) if has_prefix else None
        waveform, suffix = self._decode(codes, prefix, self._table.suffix(slots, kept_frames))
        return StreamOutput(waveform, None, suffix)

    def copy_runtime_inputs(
        self, descriptor: Descriptor, buffers: Buffers, codes: Tensor, state: Tensor, mode: Mode, kept_frames: int, is_last: bool = False
    ) -> None:
        """Padded rows read the spare slot."""
        self._copy(buffers, {"codes": codes, "slots": state})

    def eager_call(self, codes: Tensor, state: Tensor | OwnState, mode: Mode, kept_frames: int, is_last: bool = False) -> StreamOutput:
        """The batched eager path."""
        self.validate_runtime_inputs(codes, state, mode, kept_frames)
        with torch.no_grad():
            codes = self._to_device(codes)
            if isinstance(state, OwnState):
                waveform, suffix = self._decode(codes, state.prefix, state.suffix)
                return StreamOutput(waveform, None, suffix)
            return self._forward(codes, self._to_device(state), has_prefix=mode == "icl", kept_frames=kept_frames)
