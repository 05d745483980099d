"""A Target: the stable callable that the model owns and calls, whoever answers it today."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from vgraph_lab.errors import ConfigError, LifecycleError

from .descriptor import Descriptor
from .routine import Routine

__all__ = ["Target", "VocoderGraphHandle"]

Output = TypeVar("Output")
_ID = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)*")


class VocoderGraphHandle(Generic[Output]):
    """All that the model ever sees of a Manager: something to call."""

    __slots__ = ("__call",)

    def __init__(self, call: Callable[..., Output]) -> None:
        self.__call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Output:
        return self.__call(*args, **kwargs)


class Target(Generic[Output]):
    """One Routine, one eager contract, one Descriptor namespace, behind one callable.

    Calls go to ``Routine.eager_call`` before capture and after cleanup, and to the delegate that a Manager has bound
    in between. The model keeps calling the same object throughout.

    Args:
        target_id: dotted lower-case name, unique within a Manager, e.g. ``qwen3_tts.stateless``.
        routine: the graph adapter.
        descriptors: what to capture at start-up. The order does not matter; duplicates are refused.
        clone_output: True: results own their memory. False: a result is borrowed until the next call on any graph of
            the same Manager; debug mode detects later use.
    """

    def __init__(
        self, target_id: str, routine: Routine[Output], descriptors: Sequence[Descriptor] = (), *, clone_output: bool = True
    ) -> None:
        if not _ID.fullmatch(target_id):
            raise ConfigError(f"Target id {target_id!r} is not a dotted lower-case name such as 'qwen3_tts.stateless'.")
        repeated = sorted({str(d) for d in descriptors if list(descriptors).count(d) > 1})
        if repeated:
            raise ConfigError(
                f"Target {target_id!r} declares Descriptors more than once: {', '.join(repeated)}. Each graph has one Descriptor."
            )
        self.target_id = target_id
        self.routine = routine
        self.descriptors = tuple(descriptors)
        self.clone_output = clone_output
        self._delegate: Callable[..., Output] = routine.eager_call

    def __call__(self, *args: Any, **kwargs: Any) -> Output:
        return self._delegate(*args, **kwargs)

    @property
    def is_bound(self) -> bool:
        """Whether a graph can serve calls now. A Target whose graphs all failed is not bound."""
        return isinstance(self._delegate, VocoderGraphHandle)

    @property
    def is_served(self) -> bool:
        """Whether a Manager answers the calls, with graphs or counting eager ones."""
        return self._delegate != self.routine.eager_call

    def bind(self, handle: VocoderGraphHandle[Output]) -> None:
        """Route calls to a Handle. Managers call this once every capture is over."""
        if self.is_bound:
            raise LifecycleError(f"Target {self.target_id!r} is bound to a Manager already. Clear that Manager first.")
        self._delegate = handle

    def observe(self, counted_eager: Callable[..., Output]) -> None:
        """Stay eager, but through a delegate that counts each call with its reason."""
        self._delegate = counted_eager

    def restore_eager(self, delegate: Callable[..., Output]) -> None:
        """Route calls to the eager contract again, if ``delegate`` still answers them. Safe to call twice."""
        if self._delegate is delegate:
            self._delegate = self.routine.eager_call

    def __repr__(self) -> str:
        return f"Target({self.target_id!r}, {len(self.descriptors)} descriptors, {'bound' if self.is_bound else 'eager'})"
