"""The model's side of the contract: what a Routine must provide so that a Manager can capture and replay it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from vgraph_lab.errors import FallbackReason

from .descriptor import Descriptor

__all__ = ["Buffers", "Resolution", "Routine"]

Buffers = Mapping[str, Tensor]
Output = TypeVar("Output")


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a Routine makes of one call's inputs.

    Attributes:
        key: the exact shape of the call; statistics are kept by it.
        candidates: Descriptors whose graphs could serve the call, best first. The first one that has a graph is used.
        miss_reason: why there is no candidate; ignored if there is one.
    """

    key: Descriptor
    candidates: tuple[Descriptor, ...] = ()
    miss_reason: FallbackReason = FallbackReason.SHAPE_NOT_COVERED


class Routine(ABC, Generic[Output]):
    """The model-specific graph adapter of one Target. It holds no policy and keeps no request state.

    The Manager calls, in this order::

        capture   allocate_buffers → (prepare_for_capture → forward_for_capture) per warm-up
                  → prepare_for_capture → forward_for_capture inside the capture; after the last one, captures_are_over
        runtime   validate_runtime_inputs → resolve → copy_runtime_inputs → replay → output_after_replay
                  or, on a coverage miss, → eager_call

    ``args`` and ``kwargs`` are those of the Target's call. From ``copy_runtime_inputs`` on, an exception is a replay
    error: it propagates and is never retried in eager, because buffers may have changed.
    """

    def captured_modules(self) -> Iterable[nn.Module]:
        """Modules whose parameters and buffers the graph reads in place. Any other outside tensor is refused."""
        return ()

    @abstractmethod
    def validate_runtime_inputs(self, *args: Any, **kwargs: Any) -> None:
        """Raise :class:`~vgraph_lab.errors.InputError` for inputs that eager could not take either. Writes nothing."""

    @abstractmethod
    def resolve(self, *args: Any, **kwargs: Any) -> Resolution:
        """Map valid inputs to their runtime key and to the Descriptors that could serve them."""

    @abstractmethod
    def allocate_buffers(self, descriptor: Descriptor) -> Buffers:
        """Allocate the static input buffers of one graph. Their addresses never change."""

    @abstractmethod
    def prepare_for_capture(self, descriptor: Descriptor, buffers: Buffers) -> None:
        """Fill the buffers with valid content, ready for an independent invocation."""

    @abstractmethod
    def forward_for_capture(self, descriptor: Descriptor, buffers: Buffers) -> Output:
        """The work to capture. Reads the buffers and the model's parameters only; returns the static output."""

    @abstractmethod
    def copy_runtime_inputs(self, descriptor: Descriptor, buffers: Buffers, *args: Any, **kwargs: Any) -> None:
        """Copy one call's inputs into the buffers and fill what they do not cover."""

    @abstractmethod
    def output_after_replay(self, descriptor: Descriptor, buffers: Buffers, output: Output, *args: Any, **kwargs: Any) -> Output:
        """Cut the static output to what eager would have returned. Views are welcome: the runtime clones them."""

    @abstractmethod
    def eager_call(self, *args: Any, **kwargs: Any) -> Output:
        """The eager contract: what the Target does without a graph."""

    def notes(self) -> Iterable[str]:
        """What a capture report should say of this Routine's graphs beyond their figures, a line each."""
        return ()

    def captures_are_over(self) -> None:  # most Routines keep nothing
        """Let go of what only captures need. After a start-up capture, a profile or a lazy capture, however it ended."""

    def make_descriptor(self, key: Descriptor) -> Descriptor | None:
        """The Descriptor to capture lazily for a runtime key that no graph serves, or None to decline."""
        return None
