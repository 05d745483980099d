"""Which mode a batch runs in, and by which graph: vLLM's dispatcher, with its reasons."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vgraph_lab.errors import ConfigError, FallbackReason, InputError, did_you_mean

from .capture_sizes import checked_capture_sizes, get_captured_lora_counts, positive
from .descriptor import BatchDescriptor
from .modes import CUDAGraphMode

__all__ = ["CudagraphDispatcher", "DispatchCandidate", "DispatchExplanation"]

_NONE, _PIECEWISE, _FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


class DispatchCandidate(NamedTuple):
    """One thing that a batch could have run as.

    Attributes:
        mode: the runtime mode.
        descriptor: the key that was looked up; None if it did not come to that.
        why_not: why it was passed over; empty for the one that was chosen.
        reason: the same as a closed-set reason.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor | None
    why_not: str = ""
    reason: FallbackReason | None = None

    def __str__(self) -> str:
        shape = f" {self.descriptor}" if self.descriptor else ""
        return f"{self.mode}{shape}: {self.why_not or 'chosen'}"


@dataclass(frozen=True, slots=True)
class DispatchExplanation:
    """How one batch was dispatched.

    Attributes:
        num_tokens: of the batch, without padding.
        candidates: in the order in which they were considered; the last one was chosen.
    """

    num_tokens: int
    candidates: tuple[DispatchCandidate, ...]

    @property
    def mode(self) -> CUDAGraphMode:
        """What the batch runs as."""
        return self.candidates[-1].mode

    @property
    def descriptor(self) -> BatchDescriptor:
        """The padded batch."""
        chosen = self.candidates[-1].descriptor
        assert chosen is not None  # the last candidate always has one
        return chosen

    @property
    def num_paddings(self) -> int:
        """Tokens that are computed for nothing."""
        return self.descriptor.num_tokens - self.num_tokens

    @property
    def fallback_reason(self) -> FallbackReason | None:
        """Why the batch runs eager, or None if a graph serves it. What configuration rules out counts last."""
        if self.mode is not _NONE:
            return None
        found = [candidate.reason for candidate in self.candidates if candidate.reason]
        return next((reason for reason in found if reason is not FallbackReason.DISABLED), FallbackReason.DISABLED)

    def __str__(self) -> str:
        padding = f" (+{self.num_paddings} padding)" if self.num_paddings else ""
        lines = [f"{self.num_tokens} tokens{padding} → {self.mode}", *(f"  {candidate}" for candidate in self.candidates)]
        return "\n".join(lines)


class CudagraphDispatcher:
    """Pads a batch to the nearest captured size and picks FULL, then relaxed PIECEWISE, then NONE.

    The counterpart of ``vllm.v1.cudagraph_dispatcher.CudagraphDispatcher`` (0.25.1) with its settings as arguments. Its
    keys are the only source of truth: a graph exists for each, and for nothing else.

    Args:
        cudagraph_mode: one of the five.
        capture_sizes: token counts, see :func:`~vgraph_lab.vllm_v1.default_capture_sizes`; may be empty with NONE.
        max_num_seqs: requests that may run together.
        uniform_decode_query_len: tokens of each request in a uniform decode batch (1 + speculative tokens).
        max_loras: adapters that may be active in one batch; None without LoRA.
        specialize_active_lora: make graphs for several numbers of active adapters, not only for the largest.
        cudagraph_specialize_lora: also make graphs without any adapter.
        max_num_batched_tokens: tokens that one batch may have; sizes beyond are refused. None: not checked.

    Raises:
        ConfigError: a setting is out of range, or settings contradict each other.
    """

    def __init__(
        self,
        cudagraph_mode: CUDAGraphMode,
        capture_sizes: Iterable[int],
        *,
        max_num_seqs: int,
        uniform_decode_query_len: int = 1,
        max_loras: int | None = None,
        specialize_active_lora: bool = False,
        cudagraph_specialize_lora: bool = False,
        max_num_batched_tokens: int | None = None,
    ) -> None:
        self.cudagraph_mode = _checked_mode(cudagraph_mode)
        self.max_num_seqs = positive("max_num_seqs", max_num_seqs)
        self.uniform_decode_query_len = positive("uniform_decode_query_len", uniform_decode_query_len)
        self.cudagraph_capture_sizes = checked_capture_sizes(capture_sizes, max_num_batched_tokens=max_num_batched_tokens)
        self.max_loras, self.specialize_active_lora = max_loras, specialize_active_lora
        lora_counts = [] if max_loras is None else get_captured_lora_counts(max_loras, specialize_active_lora and cudagraph_specialize_lora)
        self._has_lora_free_graphs = max_loras is None or cudagraph_specialize_lora
        self.captured_lora_counts: list[int] = lora_counts
        self.cudagraph_keys: dict[CUDAGraphMode, set[BatchDescriptor]] = {_PIECEWISE: set(), _FULL: set()}
        self._padded_sizes = _padding_table(self.cudagraph_capture_sizes)
        if cudagraph_mode is not _NONE:
            if not self.cudagraph_capture_sizes:
                raise ConfigError(f"cudagraph_capture_sizes: {cudagraph_mode} needs at least one. Mode NONE switches graphs off.")
            self._add_keys([0] * self._has_lora_free_graphs + lora_counts)

    @property
    def max_cudagraph_capture_size(self) -> int:
        """The largest captured size; 0 without any."""
        return len(self._padded_sizes) - 1

    @property
    def padding_table(self) -> tuple[int, ...]:
        """The captured size that serves each number of tokens: ``padding_table[num_tokens]``, up to the largest size."""
        return self._padded_sizes

    def dispatch(
        self,
        num_tokens: int,
        *,
        uniform_decode: bool = False,
        num_active_loras: int = 0,
        valid_modes: Collection[CUDAGraphMode] | None = None,
        invalid_modes: Collection[CUDAGraphMode] | None = None,
    ) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """The runtime mode and the padded shape of one batch.

        Args:
            num_tokens: tokens of the batch.
            uniform_decode: whether each request has exactly ``uniform_decode_query_len`` of them.
            num_active_loras: how many different adapters the batch uses.
            valid_modes: runtime modes to consider; None or empty for all.
            invalid_modes: runtime modes to leave out, e.g. FULL for a batch with cascade attention.

        Returns:
            The mode, and the descriptor whose graph serves the batch. With NONE it is the batch as it came.

        Raises:
            InputError: the batch is not possible, or no graph serves it and NONE is left out.
        """
        allowed = _allowed(valid_modes, invalid_modes)
        for candidate in self._candidates(num_tokens, uniform_decode, num_active_loras, allowed):
            if candidate.reason is None and candidate.descriptor is not None:
                return candidate.mode, candidate.descriptor
        raise self._nothing_left(num_tokens, allowed)

    def explain(
        self,
        num_tokens: int,
        *,
        uniform_decode: bool = False,
        num_active_loras: int = 0,
        valid_modes: Collection[CUDAGraphMode] | None = None,
        invalid_modes: Collection[CUDAGraphMode] | None = None,
    ) -> DispatchExplanation:
        """What :meth:`dispatch` considers for the same arguments, and why it takes or leaves each candidate."""
        allowed, considered = _allowed(valid_modes, invalid_modes), []
        for candidate in self._candidates(num_tokens, uniform_decode, num_active_loras, allowed):
            considered.append(candidate)
            if candidate.reason is None:
                return DispatchExplanation(num_tokens, tuple(considered))
        raise self._nothing_left(num_tokens, allowed)

    def get_capture_descs(self) -> list[tuple[CUDAGraphMode, list[BatchDescriptor]]]:
        """What to capture: PIECEWISE first, then FULL, in each the largest first. Modes without any are left out."""
        plan = ((mode, self.cudagraph_keys[mode]) for mode in (_PIECEWISE, _FULL))
        return [(mode, sorted(keys, key=lambda d: (d.num_tokens, d.num_active_loras), reverse=True)) for mode, keys in plan if keys]

    def _add_keys(self, lora_counts: list[int]) -> None:
        mode, query_len = self.cudagraph_mode, self.uniform_decode_query_len
        decode_sizes = [size for size in self.cudagraph_capture_sizes if query_len <= size <= query_len * self.max_num_seqs]
        has_decode_graphs = mode.decode_mode() is _FULL and mode.separate_routine()
        if has_decode_graphs and (split := [size for size in decode_sizes if size % query_len]):
            multiples = sorted({-(-size // query_len) * query_len for size in self.cudagraph_capture_sizes})
            raise ConfigError(
                f"cudagraph_capture_sizes: uniform decode graphs hold whole requests of {query_len} tokens, "
                f"{', '.join(map(str, split))} would split one. Multiples near yours: {multiples} "
                "(adjust_cudagraph_sizes_for_spec_decode rounds them)."
            )
        for loras in lora_counts:
            for size in self.cudagraph_capture_sizes if mode.mixed_mode() is not _NONE else ():
                key = self._descriptor(size, False, loras)
                self.cudagraph_keys[mode.mixed_mode()].add(key.relax_for_piecewise_cudagraphs() if mode.mixed_mode() is _PIECEWISE else key)
            for size in decode_sizes if has_decode_graphs else ():
                self.cudagraph_keys[_FULL].add(self._descriptor(size, True, loras))

    def _descriptor(self, size: int, uniform: bool, loras: int) -> BatchDescriptor:
        num_reqs = min(size // self.uniform_decode_query_len if uniform else size, self.max_num_seqs)
        return BatchDescriptor(size, num_reqs, uniform, loras > 0, loras)

    def _candidates(
        self, num_tokens: int, uniform_decode: bool, num_active_loras: int, allowed: Collection[CUDAGraphMode]
    ) -> Iterator[DispatchCandidate]:
        """FULL, PIECEWISE and NONE, each chosen or passed over; the caller stops at the first one chosen."""
        if not isinstance(num_tokens, int | np.integer) or isinstance(num_tokens, bool):
            raise InputError(f"num_tokens: a batch has a whole number of tokens, got {num_tokens!r}.")
        if num_tokens < 1:
            raise InputError(f"a batch has at least one token, got {num_tokens}. An idle rank runs a dummy batch of one.")
        loras = self._captured_loras(num_active_loras)
        if num_tokens <= self.max_cudagraph_capture_size and self.cudagraph_mode:
            size = self._padded_sizes[num_tokens]
            uniform = uniform_decode and self.cudagraph_mode.separate_routine() and size % self.uniform_decode_query_len == 0
            full = self._descriptor(size, uniform, loras)
            for mode, key in ((_FULL, full), (_PIECEWISE, full.relax_for_piecewise_cudagraphs())):
                if mode not in allowed:
                    yield _excluded(mode)
                elif key in self.cudagraph_keys[mode]:
                    yield DispatchCandidate(mode, key)
                else:
                    yield self._missing(mode, key, uniform_decode)
        else:
            for mode in (_FULL, _PIECEWISE):
                yield _excluded(mode) if mode not in allowed else self._too_large_or_off(mode, num_tokens)
        if _NONE in allowed:
            yield DispatchCandidate(_NONE, BatchDescriptor(num_tokens))
        else:
            yield _excluded(_NONE)

    def _captured_loras(self, num_active_loras: int) -> int:
        """The number of adapters whose graphs serve this many: the next one captured."""
        if num_active_loras == 0:
            return 0
        if self.max_loras is None or not 0 < num_active_loras <= self.max_loras:
            limit = "LoRA is not configured (max_loras=None)" if self.max_loras is None else f"max_loras is {self.max_loras}"
            raise InputError(f"{num_active_loras} active adapters in one batch, but {limit}.")
        return self.captured_lora_counts[bisect_left(self.captured_lora_counts, num_active_loras)]

    def _too_large_or_off(self, mode: CUDAGraphMode, num_tokens: int) -> DispatchCandidate:
        if not self.cudagraph_mode.has_mode(mode):
            return self._not_captured(mode)
        why = f"{num_tokens} tokens are more than the largest captured size, {self.max_cudagraph_capture_size}"
        return DispatchCandidate(mode, None, why, FallbackReason.SHAPE_NOT_COVERED)

    def _not_captured(self, mode: CUDAGraphMode) -> DispatchCandidate:
        return DispatchCandidate(mode, None, f"cudagraph_mode {self.cudagraph_mode} captures no {mode} graphs", FallbackReason.DISABLED)

    def _missing(self, mode: CUDAGraphMode, key: BatchDescriptor, uniform_decode: bool) -> DispatchCandidate:
        """Why a size that is captured has no such graph."""
        if not self.cudagraph_mode.has_mode(mode):
            return self._not_captured(mode)
        if not key.has_lora and not self._has_lora_free_graphs:
            why = "graphs are captured with adapters only (cudagraph_specialize_lora is off), the batch uses none"
            return DispatchCandidate(mode, key, why, FallbackReason.STATE_NOT_COVERED)
        if not uniform_decode:
            why = f"{self.cudagraph_mode} has FULL graphs for uniform decode only, the batch is mixed"
            return DispatchCandidate(mode, key, why, FallbackReason.STATE_NOT_COVERED)
        query_len, largest = self.uniform_decode_query_len, self.uniform_decode_query_len * self.max_num_seqs
        if key.num_tokens > largest:
            why = f"decode graphs end at {largest} tokens ({self.max_num_seqs} requests of {query_len}), the batch pads to {key.num_tokens}"
        else:
            why = f"decode graphs begin at one request of {query_len} tokens, the batch pads to {key.num_tokens}"
        return DispatchCandidate(mode, key, why, FallbackReason.SHAPE_NOT_COVERED)

    def _nothing_left(self, num_tokens: int, allowed: Collection[CUDAGraphMode]) -> InputError:
        if not allowed:
            return InputError("valid_modes and invalid_modes leave no mode at all. Allow NONE.")
        names = ", ".join(sorted(mode.name for mode in allowed))
        return InputError(f"no graph serves {num_tokens} tokens in the modes allowed ({names}), and NONE is not among them. Allow NONE.")


def _checked_mode(mode: object) -> CUDAGraphMode:
    if isinstance(mode, CUDAGraphMode):
        return mode
    hint = did_you_mean(str(mode).upper(), CUDAGraphMode.__members__)
    raise ConfigError(f"cudagraph_mode: must be a CUDAGraphMode, got {mode!r}.{hint} CUDAGraphMode.parse reads names.")


def _padding_table(sizes: list[int]) -> tuple[int, ...]:
    return tuple(sizes[bisect_left(sizes, count)] if count else 0 for count in range((sizes[-1] if sizes else 0) + 1))


def _allowed(valid_modes: Collection[CUDAGraphMode] | None, invalid_modes: Collection[CUDAGraphMode] | None) -> Collection[CUDAGraphMode]:
    modes = CUDAGraphMode.valid_runtime_modes()
    both: tuple[tuple[str, Any], ...] = (("valid_modes", valid_modes), ("invalid_modes", invalid_modes))
    for name, given in both:
        if given is not None and (isinstance(given, str) or not isinstance(given, Collection)):
            raise InputError(f"{name}: must be several modes, such as {{CUDAGraphMode.FULL}}, got {given!r}.")
    for mode in (*(valid_modes or ()), *(invalid_modes or ())):
        if mode not in modes:
            raise InputError(f"{mode!r} is not a runtime mode. Accepted: CUDAGraphMode.NONE, PIECEWISE, FULL.")
    return (frozenset(valid_modes) if valid_modes else modes) - frozenset(invalid_modes or ())


def _excluded(mode: CUDAGraphMode) -> DispatchCandidate:
    return DispatchCandidate(mode, None, "the caller excludes it", FallbackReason.DISABLED)
